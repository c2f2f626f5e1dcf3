"""The picture of one protected step, drawn from the question's rows: a bar for each span, by name.

The whole step is at the left. At the right is what follows when training has done its part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import FAMILIES, INK, plain, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = ("forward", "backward", "optimizer")
WHOLE = "step"
_OURS, _TRAINING = FAMILIES["ecemb"], "#BBBBBB"


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
    totals = {name: sum(row["value"] for row in spans if row["span"] == name) for name in names}
    trained = max(row["begin_ms"] + row["value"] for row in spans if row["span"] in TRAINING)

    protection = {name: total for name, total in totals.items() if name not in TRAINING}
    longest = max(protection, key=lambda name: protection[name])
    title = (
        f"Of a step of {whole['value']:.3g} ms, {whole['value'] - trained:.3g} ms come after training's "
        f"part; most of it is {longest}, {protection[longest]:.3g} ms"
    )

    def paint(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, first, part in ((left, 0.0, "the whole step"), (right, trained, "after training's part")):
            for row in spans:
                color = _TRAINING if row["span"] in TRAINING else _OURS
                bar = (row["begin_ms"] - first, max(row["value"], (whole["value"] - first) / 500))
                axes.broken_barh([bar], (names.index(row["span"]) - 0.35, 0.7), color=color)
            axes.set_xlim(0, whole["value"] - first)
            axes.set_xlabel("ms")
            axes.set_title(part, fontsize=8)
            axes.grid(axis="x", color="0.9", linewidth=0.5)
            axes.set_axisbelow(True)
            plain(axes)
        left.set_yticks(range(len(names)), [f"{name}, {totals[name]:.3g} ms" for name in names])
        for label, name in zip(left.get_yticklabels(), names, strict=True):
            label.set_color(INK if name in TRAINING else _OURS)
        left.invert_yaxis()
        said = (
            f"{whole['engine']}, code {whole['code']}, {whole['setting']}; grey: training, colour: protection"
        )
        figure.supxlabel(said, fontsize=7)

    return svg(paint, 8, 3.2, title)
