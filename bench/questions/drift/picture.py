"""The picture of drift, drawn from the question's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {"rebuilt_error": "the median row's error", "rebuilt_error_worst": "the worst row's error"}
"""Metric -> the label of its row of panels."""
MARKERS = {"float32": "o", "float64": "s", "bits": "D"}
LINES = {"sgd": ("0.5", "-"), "adagrad": ("0.0", "--")}
"""Optimizer -> grey, line."""
LEAST = 1e-16
"""Errors below it are drawn between it and 0, which a logarithm has no place for."""

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: errors over steps, with the reach of the seeds; 0 is at the bottom.

    Args:
        rows: of the question; a column of panels is for each code.
    """
    codes = list(dict.fromkeys(row["code"] for row in rows if row["metric"] in PANELS))

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(PANELS), len(codes), squeeze=False, sharex=True, sharey=True)
        for line, (metric, label) in zip(grid, PANELS.items(), strict=True):
            line[0].set_ylabel(f"{label}, relative")
            for axes, code in zip(line, codes, strict=True):
                panel(axes, [row for row in rows if row["metric"] == metric and row["code"] == code])
        for axes, code in zip(grid[0], codes, strict=True):
            axes.set_title(f"code {code}", fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel("steps")
        figure.legend(
            *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
        )

    return svg(paint, 8, 5.5)


def panel(axes: Axes, rows: Rows) -> None:
    """Draws one metric of one code."""
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LEAST)
    for method in dict.fromkeys(row["method"] for row in rows):
        for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
            own = [row for row in rows if (row["method"], row["optimizer"]) == (method, optimizer)]
            grey, line = LINES[optimizer]
            values = [row["value"] for row in own]
            reach = [
                [row["value"] - row["low"] for row in own],
                [row["high"] - row["value"] for row in own],
            ]
            axes.errorbar(
                [row["steps"] for row in own],
                values,
                reach,
                fmt=line + MARKERS[method],
                color=grey,
                ms=4,
                lw=0.8,
                capsize=2,
                label=f"{method}, {optimizer}",
            )
    axes.grid(axis="y", color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)
