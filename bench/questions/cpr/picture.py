"""The picture of quality against PLS, drawn from the question's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from bench.harness.svg import LINES, MARKERS, label_ends, plain, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

VANILLA = "vanilla"
LOOKS = dict(zip((VANILLA, "mfu", "ssu", "scar"), zip(LINES, MARKERS, strict=True), strict=True))
"""Method -> colour, marker."""
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
            axes.set_title(f"{setting} in 56 h", fontsize=9)
        for axes in grid[-1]:
            axes.set_xlabel("PLS, the portion of lost samples")

    return svg(paint, 8, 5.4, title(rows))


def title(rows: Rows) -> str:
    """How much less saving by priority loses than saving everything, at the same PLS."""
    slopes = [row for row in rows if row["metric"] == "loss_per_pls"]
    by_setting = {row["setting"]: row["value"] for row in slopes if row["method"] == VANILLA}
    found = [
        row["value"] / by_setting[row["setting"]]
        for row in slopes
        if row["method"] != VANILLA and by_setting[row["setting"]] > 0
    ]
    if not found:
        return ""
    low, high = (f"{100 * one:.0f}" for one in (min(found), max(found)))
    return (
        f"At the same PLS, saves by priority lose {low}{'' if low == high else f' to {high}'} % of the "
        f"quality that whole saves lose, on average"
    )


def panel(axes: Axes, rows: Rows, pairs: str, means: str, slopes: str) -> None:
    """Draws one metric in one setting."""
    specks = [row for row in rows if row["metric"] == pairs]
    longest = max(row["pls"] for row in specks)
    ends: dict[str, tuple[float, float, str]] = {}
    for place, slope in enumerate(row for row in rows if row["metric"] == slopes):
        colour, marker = LOOKS[slope["method"]]
        own = [row for row in specks if row["method"] == slope["method"]]
        axes.plot(
            [row["pls"] for row in own], [row["value"] for row in own], marker, color=colour, ms=2, alpha=0.6
        )
        for found in (row for row in rows if row["metric"] == means and row["method"] == slope["method"]):
            pls = mean(row["pls"] for row in own if row["pls_target"] == found["pls_target"])
            pls += place * APART * longest
            reach = [[found["value"] - found["low"]], [found["high"] - found["value"]]]
            axes.errorbar(pls, found["value"], reach, fmt=marker, color=colour, ms=5, capsize=2, lw=1)
        axes.plot([0, longest], [0, slope["value"] * longest], color=colour, lw=1.2)
        ends[slope["method"]] = (longest, slope["value"] * longest, colour)
    axes.axhline(0, color="0.8", linewidth=0.5, zorder=0)
    axes.set_xlim(0, 1.25 * longest)
    plain(axes)
    label_ends(axes, ends)
