"""The picture of the head to head: what methods cost a training, and what a failure takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.harness.svg import EDGE, FAINT, INK, plain, svg
from bench.questions.compare.families import (
    COST,
    FAMILIES,
    TAKES,
    Family,
    Rows,
    is_certain,
    of_methods,
    quiet_engine,
    reach_pct,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICKS = {0.1: "0.1 s", 1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36_000: "10 h"}
ROOM = 2.2
"""Times the lowest and the highest mark, where the axis ends."""
LABELS = {
    "ecemb": (0, 13, "center"),
    "ecemb, each step": (0, 13, "center"),
    "live copies": (0, -17, "center"),
    "full, asynchronous": (9, 5, "left"),
    "full checkpoints": (9, -9, "left"),
}
"""Family -> where its name stands from its mark, in points, and how it is aligned; else beside it."""
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
        axes.margins(x=0.12)
        left, right = axes.get_xlim()
        if reach < right:
            axes.axvspan(max(left, -reach), reach, color="0.94", zorder=0)
            axes.annotate(
                "grey: as far as a model without\nprotection may seem from its twin",
                (0.99, 0.02),
                xycoords="axes fraction",
                color=FAINT,
                fontsize=7,
                ha="right",
                va="bottom",
            )
        axes.set_xlim(left, right)
        low, high = axes.get_ylim()
        ticks = [tick for tick in TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [TICKS[tick] for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("training takes longer by, %, steps and saves together; lines are 95 % intervals")
        axes.set_ylabel("training that a failure takes")
        plain(axes)

    return svg(paint, 7.2, 3.6, title(found))


def title(found: Mapping[str, Values]) -> str:
    """What a failure takes from ecemb, and at most from another family; and what ecemb costs."""
    ours = found.get(FAMILIES[0].shown, {})
    others = [found[one.shown][TAKES]["value"] for one in FAMILIES[2:] if TAKES in found.get(one.shown, {})]
    if not {COST, TAKES} <= ours.keys() or not others:
        return ""
    cost = ours[COST]
    said = f"{cost['value']:.2g} % of the time" if is_certain(cost) else "too little to measure"
    return (
        f"A failure takes {duration(ours[TAKES]['value'])} of training from ecemb, up to "
        f"{duration(max(others))} from others; ecemb costs {said}"
    )


def duration(seconds: float) -> str:
    """For reading."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"


def one(axes: Axes, values: Values, family: Family) -> None:
    """Draws the mark of a family, the interval of its cost, and its name beside it."""
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
    right, up, side = LABELS.get(family.name, (9, 4, "left"))
    axes.annotate(
        family.name,
        (cost["value"], y),
        xytext=(right, up),
        textcoords="offset points",
        color=family.colour if ours else INK,
        ha=side,
        fontsize=12 if ours else 9,
        fontweight="bold" if ours else "normal",
        zorder=4,
    )
