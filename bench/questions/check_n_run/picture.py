"""Pictures of what checkpoints write and keep, and of what restores cost, from the question's rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import FAINT, FAMILIES, LINES, MARKERS, label_ends, plain, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PUBLISHED = "published"
"""The pattern of access that is drawn; those of the traces are lines beside it."""
FULL, CHOSEN = "full", "intermittent"
POLICIES = {
    FULL: (FAMILIES["full"], ""),
    "one_shot": (LINES[2], "s"),
    "consecutive": (LINES[1], "^"),
    CHOSEN: (LINES[0], "o"),
}
"""Policy -> colour, marker."""
VOLUMES = (
    ("written_of_interval", "written in an interval, % of full"),
    ("stored_of_interval", "kept, % of full"),
)
QUALITY = (("loss_added_pct", "log loss added, %"), ("auc_lost", "AUC lost"))
"""Of the two panels: metric, label."""
ASKED = "published budget"
BUDGETS = {"published": "--", "calibrated": ":"}
"""Budget -> line."""

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture of volumes as SVG: what is written, and what is kept, by policy."""
    patterns = list(dict.fromkeys(row["pattern"] for row in rows if row["metric"] == VOLUMES[0][0]))

    def paint(figure: Figure) -> None:
        line = figure.subplots(1, 2)
        for axes, (metric, label) in zip(line, VOLUMES, strict=True):
            own = [row for row in rows if row["metric"] == metric]
            for pattern in sorted(patterns, key=lambda one: one == PUBLISHED):
                volume(axes, [row for row in own if row["pattern"] == pattern], faint=pattern != PUBLISHED)
            axes.set_ylabel(label)
            axes.set_xlabel("interval; thin lines: accesses as in Meta's traces")

    return svg(paint, 8, 3.6, title_of_volumes(rows))


def title_of_volumes(rows: Rows) -> str:
    """What the intermittent policy writes and keeps, without quantization."""

    def found(metric: str) -> float:
        return next(
            row["value"]
            for row in rows
            if row["metric"] == metric
            and (row["pattern"], row["policy"], row["bits"]) == (PUBLISHED, CHOSEN, "exact")
        )

    written, kept = found("written_pct"), found("stored_pct")
    return f"Intermittent differentials write {written:.0f} % of full checkpoints, and keep {kept:.0f} %"


def volume(axes: Axes, rows: Rows, *, faint: bool) -> None:
    """Draws one metric of all policies in one pattern."""
    ends: dict[str, tuple[float, float, str]] = {}
    for policy, (colour, marker) in POLICIES.items():
        own = {row["interval"]: row["value"] for row in rows if row["policy"] == policy}
        if faint:
            axes.plot(list(own), list(own.values()), color=colour, lw=0.6, alpha=0.6)
            continue
        axes.plot(list(own), list(own.values()), marker=marker, color=colour, ms=3, lw=1.4)
        ends[policy] = (max(own), own[max(own)], colour)
    if faint:
        return
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.3 * max(row["interval"] for row in rows))
    plain(axes)
    label_ends(axes, ends)


def draw_quality(rows: Rows) -> str:
    """Returns the picture of quality as SVG: what restores from few bits cost."""

    def paint(figure: Figure) -> None:
        line = figure.subplots(1, 2)
        for axes, (metric, label) in zip(line, QUALITY, strict=True):
            own = [row for row in rows if row["metric"] == metric]
            shortest = min(row["steps"] for row in own)
            quality(axes, [row for row in own if row["steps"] == shortest])
            axes.set_ylabel(label)
            axes.set_xlabel("bits of a code")
        for row in rows:
            if row["metric"] == "budget_pct":
                style = BUDGETS[row["budget"]]
                line[0].axhline(row["value"], color=FAINT, linestyle=style, linewidth=0.8)
                said = f"the {row['budget']} budget"
                line[0].annotate(said, (6, row["value"]), color=FAINT, fontsize=7, ha="center", va="bottom")

    return svg(paint, 8, 3.6, title_of_quality(rows))


def title_of_quality(rows: Rows) -> str:
    """The fewest bits that stay within a budget, by number of restores."""
    found = [row for row in rows if row["metric"] == "least_bits" and row["asked_by"] == ASKED]
    shortest = min((row["steps"] for row in found), default=0)
    said = [f"{row['value']:.0f} after {row['restores']}" for row in found if row["steps"] == shortest]
    return f"Fewest bits within the {ASKED}: {', '.join(said)} restores" if said else ""


def quality(axes: Axes, rows: Rows) -> None:
    """Draws one metric by bits, means with their confidence intervals; small losses on a linear scale."""
    counts = list(dict.fromkeys(row["restores"] for row in rows))
    ends: dict[str, tuple[float, float, str]] = {}
    for place, (count, colour, marker) in enumerate(zip(counts, LINES, MARKERS, strict=False)):
        own = [row for row in rows if row["restores"] == count and row["bits"].isdigit()]
        bits, values = [int(row["bits"]) + 0.06 * place for row in own], [row["value"] for row in own]
        reach = [[row["value"] - row["low"] for row in own], [row["high"] - row["value"] for row in own]]
        axes.errorbar(bits, values, reach, fmt="-" + marker, color=colour, ms=4, lw=1.2, capsize=2)
        axes.set_xticks([int(row["bits"]) for row in own])
        ends[f"{count} restore{'s' * (count != 1)}"] = (bits[0], values[0], colour)
    most = max(abs(row["value"]) for row in rows)
    axes.set_yscale("symlog", linthresh=10 ** round(math.log10(most / 100)) if most else 1)
    axes.axhline(0, color="0.8", linewidth=0.5, zorder=0)
    axes.set_xlim(0.1, 8.5)
    plain(axes)
    label_ends(axes, ends, side=-1)
