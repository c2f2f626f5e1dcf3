"""The picture of quality against PLS, drawn from the question's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from bench.harness.svg import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "vanilla": ("0.0", "o", "-"),
    "ssu": ("0.3", "s", "--"),
    "mfu": ("0.45", "^", "-."),
    "scar": ("0.6", "D", ":"),
}
"""Method -> grey, marker, line."""
APART = 0.012
"""Of the axis: how far methods' means are set apart, to be seen apart; they belong to the first one's PLS."""
PANELS = (
    ("loss_of_pair", "loss_added", "loss_per_pls", "log loss added, nats"),
    ("auc_of_pair", "auc_lost", "auc_per_pls", "AUC lost"),
)
"""Of each row of panels: metrics of the pairs, of their means and of the slopes; the label."""

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: means with their confidence intervals, and slopes; each pair is a speck.

    Args:
        rows: of the question; a column of panels is for each setting that has slopes.
    """
    settings = list(dict.fromkeys(row["setting"] for row in rows if row["metric"] == "loss_per_pls"))

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(PANELS), len(settings), squeeze=False, sharex="col", sharey="row")
        for line, (*metrics, label) in zip(grid, PANELS, strict=True):
            line[0].set_ylabel(label)
            for axes, setting in zip(line, settings, strict=True):
                panel(axes, [row for row in rows if row.get("setting") == setting], *metrics)
        for axes, setting in zip(grid[0], settings, strict=True):
            axes.set_title(f"{setting} in 56 h", fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel("PLS, the portion of lost samples")
        grid[0][0].legend(frameon=False)

    return svg(paint, 8, 5)


def panel(axes: Axes, rows: Rows, pairs: str, means: str, slopes: str) -> None:
    """Draws one metric in one setting."""
    specks = [row for row in rows if row["metric"] == pairs]
    longest = max(row["pls"] for row in specks)
    for place, slope in enumerate(row for row in rows if row["metric"] == slopes):
        grey, marker, line = LOOKS[slope["method"]]
        own = [row for row in specks if row["method"] == slope["method"]]
        axes.plot([row["pls"] for row in own], [row["value"] for row in own], marker, color=grey, ms=1.5)
        for found in (row for row in rows if row["metric"] == means and row["method"] == slope["method"]):
            pls = mean(row["pls"] for row in own if row["pls_target"] == found["pls_target"])
            pls += place * APART * longest
            reach = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
            axes.errorbar(pls, found["value"], reach, fmt=marker, color=grey, ms=4, capsize=2, lw=0.8)
        axes.plot([0, longest], [0, slope["value"] * longest], line, color=grey, lw=1)
        axes.plot([], [], line + marker, color=grey, ms=4, lw=1, label=slope["method"])
    axes.axhline(0, color="0.8", linewidth=0.5, zorder=0)
    axes.set_xlim(left=0)
