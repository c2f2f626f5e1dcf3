"""The picture of the head to head: the cost of six families of methods, in a step and at a failure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bench.harness.svg import svg
from bench.questions.compare.families import (
    FAMILIES,
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

GIVEN_UP = "given_up_steps"
LEAST_STEPS = 0.5
"""Where a method stands that lost no step, on a logarithmic axis."""
TICKS = (1, 2, 5, 10, 20, 50, 100)
Values = Mapping[str, Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: a labelled mark for each family, and the noise of the measurement.

    Args:
        rows: of the question, of one engine or several; the quietest one is drawn.
    """
    engine = quiet_engine(rows)
    found = of_methods(rows, engine)
    noise = noise_pct(rows, engine)

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        shown = [family for family in FAMILIES if family.shown in found]
        for family in shown:
            one(axes, found, family)
        axes.margins(x=0.25)
        left, right = axes.get_xlim()
        if 0 < noise < right:
            axes.axvspan(max(left, -noise), noise, color="0.93", zorder=0)
            words = "too small\nto measure"
            axes.text(
                noise,
                0.985,
                words + " ",
                color="0.45",
                fontsize=7,
                ha="right",
                va="top",
                transform=axes.get_xaxis_transform(),
            )
        axes.set_xlim(left, right)
        axes.set_yscale("log")
        steps = [point(found[family.shown])[1] for family in shown] or [LEAST_STEPS]
        lowest, highest = min(steps), max(steps)
        axes.set_ylim(lowest / 1.7, highest * 2)
        axes.set_yticks([tick for tick in TICKS if lowest <= tick <= highest * 2])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xlabel("a training step takes longer by, %")
        axes.set_ylabel("steps run again or forgotten, of two failures")
        axes.spines[["top", "right"]].set_visible(False)

    return svg(paint, 7.2, 3.4)


def one(axes: Axes, found: Mapping[str, Values], family: Family) -> None:
    """Draws the mark of a family, and its name beside it."""
    ours = family is FAMILIES[0]
    x, y = point(found[family.shown])
    axes.plot(
        x, y, "*" if ours else "o", color=family.colour, ms=17 if ours else 9, mec="white", mew=0.8, zorder=3
    )
    axes.annotate(
        family.name,
        (x, y),
        xytext=(0, -21) if ours else (10, -3),
        textcoords="offset points",
        color=family.colour,
        ha="center" if ours else "left",
        fontsize=12 if ours else 9,
        fontweight="bold" if ours else "normal",
        zorder=4,
    )


def point(values: Values) -> tuple[float, float]:
    """Where a method stands."""
    return values[OVERHEAD]["value"], max(values[GIVEN_UP]["value"], LEAST_STEPS)
