"""The picture of one protected step, drawn from the question's rows: a bar for each span, by name.

The whole step is at the left. At the right is what follows when training has done its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = ("forward", "backward", "optimizer")
WHOLE = "step"
_DARK, _LIGHT = "0.25", "0.7"


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
