"""The picture of what checkpoints write and keep, and restores cost, from the question's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POLICIES = {
    "full": ("0.7", "", "-"),
    "one_shot": ("0.5", "s", "--"),
    "consecutive": ("0.35", "^", ":"),
    "intermittent": ("0.0", "o", "-"),
}
"""Policy -> grey, marker, line."""
RESTORES = (("0.55", "s", "--"), ("0.35", "^", ":"), ("0.0", "o", "-"))
"""The same for numbers of restores, in their order."""
VOLUMES = (("written_of_interval", "written, % of full"), ("stored_of_interval", "kept, % of full"))
QUALITY = (("loss_added_pct", "log loss added, %"), ("auc_lost", "AUC lost"))
"""Of the two panels of a line: metric, label."""

Rows = Sequence[Mapping[str, Any]]
Panel = Callable[["Axes", Rows], None]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: a line of two panels for each pattern of access, and one for quality."""
    patterns = list(dict.fromkeys(row["pattern"] for row in rows if row["metric"] == VOLUMES[0][0]))

    def paint(figure: Figure) -> None:
        *grid, last = figure.subplots(len(patterns) + 1, 2, squeeze=False)
        for line, pattern in zip(grid, patterns, strict=True):
            of_pattern = [row for row in rows if row.get("pattern") == pattern]
            for axes, (metric, label) in zip(line, VOLUMES, strict=True):
                volume(axes, [row for row in of_pattern if row["metric"] == metric])
                axes.set_ylabel(label)
                axes.set_title(f"access: {pattern}", fontsize=8)
        grid[0][1].legend(frameon=False, loc="upper left")
        for axes in grid[-1]:
            axes.set_xlabel("interval")
        for axes, (metric, label) in zip(last, QUALITY, strict=True):
            own = [row for row in rows if row["metric"] == metric]
            shortest = min(row["steps"] for row in own)
            quality(axes, [row for row in own if row["steps"] == shortest])
            axes.set_ylabel(label)
            axes.set_xlabel("bits of a code")
        budgets = [row for row in rows if row["metric"] == "budget_pct"]
        for row, line in zip(budgets, ("-.", ":"), strict=True):
            label = f"the {row['budget']} budget"
            last[0].axhline(row["value"], color="0.6", linestyle=line, linewidth=0.8, label=label)
        handles, labels = last[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)

    return svg(paint, 8, 2.1 * (len(patterns) + 1) + 0.4)


def volume(axes: Axes, rows: Rows) -> None:
    """Draws one metric of all policies in one pattern."""
    for policy, (grey, marker, line) in POLICIES.items():
        own = {row["interval"]: row["value"] for row in rows if row["policy"] == policy}
        axes.plot(list(own), list(own.values()), line + marker, color=grey, ms=3, lw=1, label=policy)
    axes.set_ylim(bottom=0)


def quality(axes: Axes, rows: Rows) -> None:
    """Draws one metric by bits, means with their confidence intervals; small losses on a linear scale."""
    counts = list(dict.fromkeys(row["restores"] for row in rows))
    for count, (grey, marker, line) in zip(counts, RESTORES, strict=False):
        own = [row for row in rows if row["restores"] == count and row["bits"].isdigit()]
        bits, values = [int(row["bits"]) for row in own], [row["value"] for row in own]
        reach = [[row["value"] - row["low"] for row in own], [row["high"] - row["value"] for row in own]]
        axes.errorbar(
            bits, values, reach, fmt=line + marker, color=grey, ms=4, lw=1, capsize=2, label=f"L = {count}"
        )
        axes.set_xticks(bits)
    most = max(abs(row["value"]) for row in rows)
    axes.set_yscale("symlog", linthresh=10 ** round(math.log10(most / 100)) if most else 1)
    axes.axhline(0, color="0.8", linewidth=0.5, zorder=0)
