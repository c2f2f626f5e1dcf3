"""The picture of the head to head: the cost of six families of methods, in a step and at a failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.harness.svg import EDGE, FAINT, INK, plain, svg
from bench.questions.compare.families import (
    FAMILIES,
    GIVEN_UP,
    KILLS,
    OVERHEAD,
    Family,
    Rows,
    noise_pct,
    of_methods,
    quiet_engine,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_STEPS = 0.25
"""Where a method stands that lost no step, on a logarithmic axis."""
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
Values = Mapping[str, Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: a labelled mark for each family, and the noise of the measurement.

    Args:
        rows: of the question, of one engine or several; the quietest one is drawn.
    """
    engine = quiet_engine(rows)
    found = of_methods(rows, engine)
    noise = noise_pct(rows, engine)
    shown = [family for family in FAMILIES if family.shown in found]

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for family in shown:
            one(axes, found[family.shown], family)
        axes.margins(x=0.12)
        left, right = axes.get_xlim()
        if 0 < noise < right:
            axes.axvspan(max(left, -noise), noise, color="0.94", zorder=0)
            axes.text(
                max(left, -noise),
                0.985,
                " too small to measure:\n as far as a run without\n protection is from its twin",
                color=FAINT,
                fontsize=7,
                ha="left",
                va="top",
                transform=axes.get_xaxis_transform(),
            )
        axes.set_xlim(left, right)
        axes.set_yscale("log")
        steps = [point(found[family.shown])[1] for family in shown] or [LEAST_STEPS]
        lowest, highest = min(steps), max(steps)
        axes.set_ylim(lowest / 1.8, highest * 2.4)
        axes.set_yticks([tick for tick in TICKS if lowest <= tick <= highest * 2])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xlabel("a training step takes longer by, %; the lines are the reach of single lives")
        axes.set_ylabel("steps run again or forgotten, a failure")
        plain(axes)

    return svg(paint, 7.2, 3.6, title(found, noise))


def title(found: Mapping[str, Values], noise: float) -> str:
    """What a failure takes from ecemb, and at most from another family; and what ecemb costs."""
    ours = found.get(FAMILIES[0].shown)
    others = [point(found[family.shown])[1] for family in FAMILIES[1:] if family.shown in found]
    if ours is None or not others:
        return ""
    cost, steps = point(ours)
    said = f"costs {cost:.2g} % of each step" if abs(cost) >= noise else "costs too little to measure"
    return (
        f"A failure takes {steps:.2g} step{'s' * (steps != 1)} from ecemb, up to {max(others):.2g} from "
        f"others; ecemb {said}"
    )


def one(axes: Axes, values: Values, family: Family) -> None:
    """Draws the mark of a family, the interval of its cost, and its name beside it."""
    ours = family is FAMILIES[0]
    x, y = point(values)
    overhead = values[OVERHEAD]
    axes.plot([overhead["low"], overhead["high"]], [y, y], color=family.colour, lw=2, alpha=0.6, zorder=2)
    axes.plot(
        x,
        y,
        "*" if ours else "o",
        color=family.colour,
        ms=18 if ours else 9,
        mec=EDGE,
        mew=0.7,
        zorder=3,
    )
    axes.annotate(
        family.name,
        (x, y),
        xytext=(0, -20 if ours else 9),
        textcoords="offset points",
        color=family.colour if ours else INK,
        ha="center",
        fontsize=12 if ours else 9,
        fontweight="bold" if ours else "normal",
        zorder=4,
    )


def point(values: Values) -> tuple[float, float]:
    """Where a method stands: the cost of a step in %, and steps that a failure takes."""
    return values[OVERHEAD]["value"], max(values[GIVEN_UP]["value"] / KILLS, LEAST_STEPS)
