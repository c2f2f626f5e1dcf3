"""How pictures are drawn: grey, so that they can be printed, and text is text.

The same rows always give the same picture. `draw` is the picture of one protected step, from the rows of
`bench.profile`: a bar for each span, by name. The whole step at the left; at the right, what follows when
training has done its part.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = ("forward", "backward", "optimizer")
WHOLE = "step"
_DARK, _LIGHT = "0.25", "0.7"


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


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the picture of a step as SVG.

    Args:
        rows: of `timeline_ms`, and any others; those of the first code are drawn.
    """
    spans = [row for row in rows if row["metric"] == "timeline_ms"]
    spans = [row for row in spans if row["code"] == spans[0]["code"]]
    whole = next(row for row in spans if row["span"] == WHOLE)
    spans = [row for row in spans if row["span"] != WHOLE]
    names = list(dict.fromkeys(row["span"] for row in spans))
    names.sort(key=lambda name: name not in TRAINING)
    trained = max(row["begin_ms"] + row["value"] for row in spans if row["span"] in TRAINING)

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, first, title in ((left, 0.0, "the whole step"), (right, trained, "after training's part")):
            for row in spans:
                color = _LIGHT if row["span"] in TRAINING else _DARK
                bar = (row["begin_ms"] - first, max(row["value"], (whole["value"] - first) / 500))
                axes.broken_barh([bar], (names.index(row["span"]) - 0.35, 0.7), color=color)
            axes.set_xlim(0, whole["value"] - first)
            axes.set_xlabel("ms")
            axes.set_title(title, fontsize=8)
            axes.grid(axis="x", color="0.9", linewidth=0.5)
            axes.set_axisbelow(True)
        totals = {name: sum(row["value"] for row in spans if row["span"] == name) for name in names}
        left.set_yticks(range(len(names)), [f"{name}, {totals[name]:.3g} ms" for name in names])
        left.invert_yaxis()
        figure.suptitle(f"{whole['engine']}, code {whole['code']}, {whole['setting']}", fontsize=8)

    return svg(paint, 8, 2.8)
