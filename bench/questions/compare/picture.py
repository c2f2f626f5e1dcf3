"""The picture of the head to head: what methods cost a training, and what a failure takes from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.harness.svg import EDGE, FAINT, INK, label_ends, plain, svg
from bench.questions.compare.families import (
    COST,
    FAMILIES,
    TAKES,
    Family,
    Rows,
    of_methods,
    quiet_engine,
    reach_pct,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICKS = {0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36_000: "10 h"}
ROOM = 2.5
"""Times the lowest and the highest mark, where the axis ends."""
NAMES = 0.14
"""Of the width, for names on the right."""
CLOSE = 0.3
"""Decades, and part of the width, within which a name could cover a mark."""
TIGHT = 0.06
"""Part of the width within which marks are a group, whose names stand on one side of all."""
APART = 11.0
"""Points between two names."""
Values = Mapping[str, Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: a labelled mark for each family, and the reach of the control.

    Args:
        rows: of the question, of one engine or several; the quietest one is drawn.
    """
    engine = quiet_engine(rows)
    found = of_methods(rows, engine)
    reach = reach_pct(rows, engine)
    shown = [family for family in FAMILIES if {COST, TAKES} <= found.get(family.shown, {}).keys()]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        seconds = [found[family.shown][TAKES]["value"] for family in shown] or [1.0]
        axes.set_yscale("log")
        axes.set_ylim(min(seconds) / ROOM, max(seconds) * ROOM)
        for family in shown:
            one(axes, found[family.shown], family)
        left, right = axes.get_xlim()
        left, right = left - NAMES * (right - left), right + NAMES * (right - left)
        costs = {one.name: found[one.shown][COST] for one in shown}
        marks = {one.name: (costs[one.name]["value"], found[one.shown][TAKES]["value"]) for one in shown}
        lefts = leftmost(marks, right - left)
        if any(marks[name][0] < left + 2 * NAMES * (right - left) for name in lefts):
            left -= NAMES * (right - left)
        if reach < right:
            axes.axvspan(max(left, -reach), reach, color="0.94", zorder=0)
            axes.annotate(
                "grey: as far as a model without\nprotection may seem from its twin",
                (0.99, 0.99),
                xycoords="axes fraction",
                color=FAINT,
                fontsize=7,
                ha="right",
                va="top",
            )
        axes.set_xlim(left, right)
        low, high = axes.get_ylim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [TICKS[tick] for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("training takes longer by, %, steps and saves together; lines are 95 % intervals")
        axes.set_ylabel("training that a failure takes")
        plain(axes)
        for side, key, names in ((1, "high", [*(marks.keys() - lefts)]), (-1, "low", lefts)):
            reaches = {name: (costs[name][key], marks[name][1]) for name in names}
            ends = beside(reaches, right - left, side)
            label_ends(axes, {name: (*end, INK) for name, end in ends.items()}, APART, side)
        for text in axes.texts:
            if text.get_text() == FAMILIES[0].name:
                text.set(color=FAMILIES[0].colour, fontsize=12, fontweight="bold")

    return svg(paint, 7.2, 3.6, title(found))


def title(found: Mapping[str, Values]) -> str:
    """What a failure takes from ecemb, and at most from another family."""
    ours = found.get(FAMILIES[0].shown, {})
    others = [found[one.shown][TAKES]["value"] for one in FAMILIES[2:] if TAKES in found.get(one.shown, {})]
    if TAKES not in ours or not others:
        return ""
    return (
        f"A failure takes {duration(ours[TAKES]['value'])} of training from ecemb, up to "
        f"{duration(max(others))} from others"
    )


def leftmost(marks: Mapping[str, tuple[float, float]], width: float) -> list[str]:
    """Marks with others close by on the right, and on the left none but those of their group.

    Their names stand on the left.
    """
    found: list[str] = []
    for name, (x, y) in marks.items():
        others = [
            other - x
            for one, (other, height) in marks.items()
            if one != name and abs(math.log10(height / y)) < CLOSE and abs(other - x) < CLOSE * width
        ]
        if others and max(others) > 0 and min(others) > -TIGHT * width:
            found.append(name)
    return found


def beside(
    marks: Mapping[str, tuple[float, float]], width: float, side: int
) -> dict[str, tuple[float, float]]:
    """Where names stand: on the right (1) of all marks close by, or on the left (-1) of a group's."""
    reach, end = (CLOSE, max) if side == 1 else (TIGHT, min)
    found: dict[str, tuple[float, float]] = {}
    for name, (x, y) in marks.items():
        close = [
            other
            for other, height in marks.values()
            if abs(math.log10(height / y)) < CLOSE and abs(other - x) < reach * width
        ]
        found[name] = end(close), y
    return found


def duration(seconds: float) -> str:
    """For reading."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def one(axes: Axes, values: Values, family: Family) -> None:
    """Draws the mark of a family, and the interval of its cost."""
    ours = family is FAMILIES[0]
    cost, y = values[COST], values[TAKES]["value"]
    axes.plot([cost["low"], cost["high"]], [y, y], color=family.colour, lw=2, alpha=0.6, zorder=2)
    axes.plot(
        cost["value"],
        y,
        "*" if family.name.startswith("ecemb") else "o",
        color=family.colour,
        ms=18 if ours else 12 if family.name.startswith("ecemb") else 9,
        mec=EDGE,
        mew=0.7,
        zorder=3,
    )
