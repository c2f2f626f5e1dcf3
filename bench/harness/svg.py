"""How pictures are drawn: in grey, so that they can be printed, with text as text.

The same rows always give the same picture.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def svg(paint: Callable[[Figure], None], width_in: float, height_in: float) -> str:
    """Returns a picture as SVG.

    Args:
        paint: Draws it on an empty figure.
        width_in: In inches of 72 points; letters have 8.
        height_in: As well.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "ecemb", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        paint(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
