"""How pictures are drawn: one message each, which is the title, labels at the marks, and text as text.

Colours are Okabe and Ito's, which the colour-blind tell apart. A family of methods has the same one in all
pictures, and ecemb's is no other's. The same rows always give the same picture.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAMILIES = {
    "ecemb": "#D55E00",
    "live copies": "#009E73",
    "snapshots": "#CC79A7",
    "full": "#999999",
    "Check-N-Run": "#56B4E9",
    "CPR": "#F0E442",
    "increments": "#0072B2",
}
"""Family of methods, by how the names of its methods begin -> colour. ecemb first."""
LINES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
"""For variants of one method: blue, orange, green, purple."""
INK, FAINT, EDGE = "#222222", "#666666", "#555555"
MARKERS = ("o", "s", "^", "D")
"""Beside colours, where marks of several kinds may lie on each other."""


def svg(paint: Callable[[Figure], None], width_in: float, height_in: float, title: str = "") -> str:
    """Returns a picture as SVG.

    Args:
        paint: Draws it on an empty figure.
        width_in: In inches of 72 points; letters have 8.
        height_in: As well.
        title: What the picture says: above it, and in it for those who don't see it.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "ecemb", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold", color=INK)
        paint(figure)
        out = io.StringIO()
        about = {"Date": None, **({"Title": title.strip()} if title else {})}
        figure.savefig(out, format="svg", metadata=about)
    return out.getvalue()


def plain(axes: Axes) -> None:
    """Leaves axes their left and lower line."""
    axes.spines[["top", "right"]].set_visible(False)


def label_ends(
    axes: Axes, ends: dict[str, tuple[float, float, str]], apart: float = 9.0, side: Literal[-1, 1] = 1
) -> None:
    """Writes names at the ends of lines, one above the other where lines end close together.

    Call it when the axes have their limits and scales.

    Args:
        axes: Where the lines are.
        ends: Name -> x and y of its end, and its colour.
        apart: Points between two names, at least.
        side: Of the ends: 1 is right, -1 is left.
    """
    axes.figure.canvas.draw()
    points = 72 / axes.figure.dpi
    at = {name: axes.transData.transform((x, y))[1] * points for name, (x, y, _) in ends.items()}
    lowest = -float("inf")
    for name in sorted(at, key=lambda one: at[one]):
        x, y, colour = ends[name]
        place = max(at[name], lowest + apart)
        lowest = place
        axes.annotate(
            name,
            (x, y),
            xytext=(6 * side, place - at[name]),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            color=colour,
            fontsize=8,
            annotation_clip=False,
        )
