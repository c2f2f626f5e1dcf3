"""The picture of drift, drawn from the question's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import FAMILIES, LINES, label_ends, plain, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

METRIC = "rebuilt_error_worst"
LOOKS = {"float32": (LINES[1], "o"), "float64": (LINES[0], "s"), "bits": (FAMILIES["ecemb"], "D")}
"""Method -> colour, marker."""
STYLES = {"sgd": "-", "adagrad": "--"}
LEAST = 1e-16
"""Errors below it are drawn between it and 0, which a logarithm has no place for."""

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: the worst row's error over steps, with the reach of the seeds.

    Args:
        rows: of the question; a panel is for each code.
    """
    chosen = [row for row in rows if row["metric"] == METRIC]
    codes = list(dict.fromkeys(row["code"] for row in chosen))

    def paint(figure: Figure) -> None:
        line = figure.subplots(1, len(codes), squeeze=False, sharex=True, sharey=True)[0]
        line[0].set_ylabel("error of the worst row that is rebuilt, of its norm")
        for axes, code in zip(line, codes, strict=True):
            panel(axes, [row for row in chosen if row["code"] == code])
            axes.set_title(f"code {code}", fontsize=9)
            axes.set_xlabel("steps")

    return svg(paint, 8, 3.8, title(chosen))


def title(chosen: Rows) -> str:
    """The worst error of parity of floats, and of bits."""
    worst = {
        method: max(row["value"] for row in chosen if row["method"] == method)
        for method in dict.fromkeys(row["method"] for row in chosen)
    }
    said = [f"of {method} up to {value:.1g}" for method, value in worst.items() if method != "bits"]
    return f"Rows rebuilt from parity of bits are off by {worst.get('bits', 0):.1g}; {', '.join(said)}"


def panel(axes: Axes, rows: Rows) -> None:
    """Draws one code."""
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=LEAST)
    ends: dict[str, tuple[float, float, str]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
            own = [row for row in rows if (row["method"], row["optimizer"]) == (method, optimizer)]
            colour, marker = LOOKS[method]
            values = [row["value"] for row in own]
            reach = [
                [row["value"] - row["low"] for row in own],
                [row["high"] - row["value"] for row in own],
            ]
            axes.errorbar(
                [row["steps"] for row in own],
                values,
                reach,
                fmt=STYLES[optimizer] + marker,
                color=colour,
                ms=4,
                lw=1.2,
                capsize=2,
            )
            ends[f"{method}, {optimizer}"] = (own[-1]["steps"], values[-1], colour)
        if len({y for name, (_, y, _) in ends.items() if name.startswith(method)}) == 1:
            (ends[method], *_) = [ends.pop(name) for name in list(ends) if name.startswith(method)]
    axes.grid(axis="y", color="0.92", linewidth=0.5)
    axes.set_axisbelow(True)
    plain(axes)
    steps = [row["steps"] for row in rows]
    axes.set_xlim(min(steps) / 1.3, max(steps) * (max(steps) / min(steps)) ** 0.35)
    axes.set_xticks(sorted(set(steps)))
    label_ends(axes, ends)
