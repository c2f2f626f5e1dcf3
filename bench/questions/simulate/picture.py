"""The map: which method is ahead, by MTBF of the job and size of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "full": "1.0",
    "Check-N-Run": "0.9",
    "CPR": "0.8",
    "snapshots": "0.65",
    "live copies": "0.4",
    "ecemb": "0.15",
}
"""Kind of method, by how its name begins -> grey, dark for what is live."""
DARK = 0.5

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
        rows: of the question.
    """
    cells = [row for row in rows if row["metric"] == "best_ettr"]
    choices = list(dict.fromkeys(row["among"] for row in cells))

    def paint(figure: Figure) -> None:
        line = figure.subplots(1, len(choices), squeeze=False, sharey=True)[0]
        for axes, among in zip(line, choices, strict=True):
            panel(axes, [row for row in cells if row["among"] == among])
            axes.set_title(f"methods: {among}", fontsize=8)
        line[0].set_ylabel("tables, TB")

    return svg(paint, 9, 4.5)


def panel(axes: Axes, cells: Rows) -> None:
    """Draws one map: in each cell the method, its ETTR, and how far it is ahead of another kind."""
    across = sorted({row["mtbf_h"] for row in cells})
    up = sorted({row["table_tb"] for row in cells})
    for row in cells:
        x, y = across.index(row["mtbf_h"]), up.index(row["table_tb"])
        grey = LOOKS[kind(row["method"])]
        axes.add_patch(_box(x, y, grey))
        said = row["method"].replace(", window ", "\nw").replace(", async", "\nasync").replace(" x", "\nx")
        axes.text(
            x,
            y,
            f"{said}\n{row['value']:.2f} (+{row['ahead']:.2f})",
            ha="center",
            va="center",
            fontsize=4.5,
            color="white" if float(grey) < DARK else "black",
        )
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(-0.5, len(up) - 0.5)
    axes.set_xticks(range(len(across)), [f"{hours:g}" for hours in across])
    axes.set_yticks(range(len(up)), [f"{size:g}" for size in up])
    axes.set_xlabel("hours between faults of the job")


def _box(x: float, y: float, grey: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=grey, edgecolor="0.5", linewidth=0.5)
