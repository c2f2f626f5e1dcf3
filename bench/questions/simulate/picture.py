"""The map: which method is ahead, by MTBF of the job and size of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import EDGE, FAINT, FAMILIES, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {name: FAMILIES[name] for name in ("full", "Check-N-Run", "CPR", "snapshots", "live copies", "ecemb")}
"""Kind of method, by how its name begins -> colour."""
ECEMB = "ecemb"
CANNOT_TELL = "cannot tell"
HATCH = "#BBBBBB"
SQUARE = 0.19
"""Width of a mark in a cell."""
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
            axes.set_title(title(among, [row for row in cells if row["among"] == among]), fontsize=8)
        line[0].set_ylabel("tables, TB")
        kinds = [name for name in LOOKS if any(name in candidates(row) for row in cells)]
        marks = [Patch(facecolor=LOOKS[name], edgecolor=EDGE, label=name) for name in kinds]
        said = f"{CANNOT_TELL}; marks: who may be ahead"
        marks.append(Patch(facecolor="white", edgecolor=HATCH, hatch="////", label=said))
        figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
        figure.text(
            0.01,
            0.925,
            "Number: the share of time that trains, under the method ahead; the first mark is the likeliest",
            fontsize=8,
            color=FAINT,
        )

    return svg(paint, 9.4, 5.2, message(cells) + "\n")


def message(cells: Rows) -> str:
    """What both panels say together."""
    exact = [row for row in cells if row["among"] != "all"]
    may = sum(ECEMB in candidates(row) for row in exact)
    sure = sum(verdict(row) == ECEMB for row in exact)
    return (
        f"Where no sample may be lost, ecemb may be ahead in {may} of {len(exact)} cells, and is for certain "
        f"in {sure or 'none'}"
    )


def title(among: str, cells: Rows) -> str:
    """What a panel shows in one line: who is ahead for certain, and where, if one is."""
    certain = [verdict(row) for row in cells if verdict(row) != CANNOT_TELL]
    leads = [f"{name} {certain.count(name)}" for name in LOOKS if name in certain]
    named = "Samples may be lost" if among == "all" else "No sample may be lost"
    return f"{named}: {', '.join(leads) or 'no method ahead in any'} of {len(cells)} cells"


def verdict(row: Mapping[str, Any]) -> str:
    """The kind that is ahead for certain, or `CANNOT_TELL`."""
    return row.get("verdict", kind(row["method"]))


def candidates(row: Mapping[str, Any]) -> list[str]:
    """The kinds that may be ahead in a cell, the likeliest first."""
    return row.get("candidates", kind(row["method"])).split(", ")


def panel(axes: Axes, cells: Rows) -> None:
    """Draws one map: in each cell the kind that is ahead, or marks of those that may be, and the ETTR."""
    from matplotlib.patches import Rectangle

    across = sorted({row["mtbf_h"] for row in cells})
    up = sorted({row["table_tb"] for row in cells})
    for row in cells:
        x, y = across.index(row["mtbf_h"]), up.index(row["table_tb"])
        sure = verdict(row) != CANNOT_TELL
        corner, named = (x - 0.5, y - 0.5), candidates(row)
        colour = LOOKS[named[0]] if sure else "white"
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor="none"))
        if not sure:
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=HATCH, linewidth=0, hatch="////"))
            left = x - SQUARE * len(named) / 2
            for i, name in enumerate(named):
                at = (left + SQUARE * i, y - 0.36)
                axes.add_patch(
                    Rectangle(at, SQUARE, 0.3, facecolor=LOOKS[name], edgecolor=EDGE, linewidth=0.5)
                )
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=EDGE, linewidth=0.5))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}
        place = y if sure else y + 0.2
        axes.text(x, place, f"{row['value']:.2f}", ha="center", va="center", fontsize=7, bbox=box)
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(-0.5, len(up) - 0.5)
    axes.set_xticks(range(len(across)), [f"{hours:g}" for hours in across])
    axes.set_yticks(range(len(up)), [f"{size:g}" for size in up])
    axes.set_xlabel("hours between faults of the job")
