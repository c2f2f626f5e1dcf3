"""The map: which method is ahead, by MTBF of the job and size of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "full": "#999999",
    "Check-N-Run": "#56B4E9",
    "CPR": "#F0E442",
    "snapshots": "#CC79A7",
    "live copies": "#009E73",
    "ecemb": "#D55E00",
}
"""Kind of method, by how its name begins -> colour; of Okabe and Ito, which the colour-blind tell apart."""
CANNOT_TELL = "cannot tell"
Rows = Sequence[Mapping[str, Any]]


def kind(method: str) -> str:
    """Returns the kind of a method: a key of `LOOKS`.

    Raises:
        KeyError: It is of none.
    """
    for name in LOOKS:
        if method.startswith(name):
            return name
    raise KeyError(method)


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: a panel for all methods, one for those that lose no samples.

    Args:
        rows: Of the question.
    """
    cells = [row for row in rows if row["metric"] == "best_ettr"]
    choices = list(dict.fromkeys(row["among"] for row in cells))

    def paint(figure: Figure) -> None:
        from matplotlib.patches import Patch

        line = figure.subplots(1, len(choices), squeeze=False, sharey=True)[0]
        for axes, among in zip(line, choices, strict=True):
            panel(axes, [row for row in cells if row["among"] == among])
            axes.set_title(title(among, [row for row in cells if row["among"] == among]), fontsize=9)
        line[0].set_ylabel("tables, TB")
        kinds = [name for name in LOOKS if any(name in candidates(row) for row in cells)]
        marks = [Patch(facecolor=LOOKS[name], edgecolor="0.4", label=name) for name in kinds]
        marks.append(
            Patch(facecolor="white", edgecolor="0.4", hatch="////", label=f"{CANNOT_TELL}: two or more")
        )
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
        figure.suptitle("Number: share of time that trains, under the method that is ahead", fontsize=8)

    return svg(paint, 9, 4.8)


def title(among: str, cells: Rows) -> str:
    """What a panel shows in one line: who is ahead for certain, and where, if one is."""
    certain = [verdict(row) for row in cells if verdict(row) != CANNOT_TELL]
    leads = [f"{name} leads {certain.count(name)}" for name in LOOKS if name in certain]
    named = "Samples may be lost" if among == "all" else "No sample may be lost"
    return f"{named}: {', '.join(leads) or 'no method leads any'} of {len(cells)} cells"


def verdict(row: Mapping[str, Any]) -> str:
    """The kind that is ahead for certain, or `CANNOT_TELL`."""
    return row.get("verdict", kind(row["method"]))


def candidates(row: Mapping[str, Any]) -> list[str]:
    """The kinds that may be ahead in a cell, the likeliest first."""
    return row.get("candidates", kind(row["method"])).split(", ")


def panel(axes: Axes, cells: Rows) -> None:
    """Draws one map: in each cell the kind that is ahead, or stripes of those that may be, and the ETTR."""
    from matplotlib.patches import Rectangle

    across = sorted({row["mtbf_h"] for row in cells})
    up = sorted({row["table_tb"] for row in cells})
    for row in cells:
        x, y = across.index(row["mtbf_h"]), up.index(row["table_tb"])
        sure = verdict(row) != CANNOT_TELL
        named = candidates(row)[:1] if sure else candidates(row)
        for i, name in enumerate(named):
            left = x - 0.5 + i / len(named)
            axes.add_patch(Rectangle((left, y - 0.5), 1 / len(named), 1, facecolor=LOOKS[name], linewidth=0))
        hatch = None if sure else "////"
        axes.add_patch(
            Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="0.4", linewidth=0.5, hatch=hatch)
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
        axes.text(x, y, f"{row['value']:.2f}", ha="center", va="center", fontsize=7, bbox=box)
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(-0.5, len(up) - 0.5)
    axes.set_xticks(range(len(across)), [f"{hours:g}" for hours in across])
    axes.set_yticks(range(len(up)), [f"{size:g}" for size in up])
    axes.set_xlabel("hours between faults of the job")
