"""The map, which method is ahead by MTBF of the job and size of the model; and what would turn it.

Must not know: how either was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import EDGE, FAINT, FAMILIES, plain, svg
from bench.questions.simulate.methods import KINDS, kind
from bench.questions.simulate.verdicts import ALL, CANNOT_TELL, EXACT, LEAN, PANELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ECEMB = "ecemb"
HATCH = "#BBBBBB"
SQUARE = 0.13
"""Width of a mark in a cell."""
FAINTLY = 0.35
STRONGEST = 6
"""Inputs of a profile that are drawn."""
NAMED = {ALL: "all methods", EXACT: "no sample may be lost", LEAN: "nor a second copy kept"}
Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the map as SVG: a line of panels for each profile of jobs.

    Args:
        rows: Of the question.
    """
    cells = [row for row in rows if row["metric"] == "best_ettr"]
    jobs = list(dict.fromkeys(row["job"] for row in cells))

    def paint(figure: Figure) -> None:
        from matplotlib.patches import Patch

        grid = figure.subplots(len(jobs), len(PANELS), squeeze=False, sharey=True, sharex=True)
        for line, job in zip(grid, jobs, strict=True):
            for axes, among in zip(line, PANELS, strict=True):
                shown = [row for row in cells if (row["job"], row["among"]) == (job, among)]
                panel(axes, shown)
                axes.set_title(title(job, among, shown), fontsize=8)
            line[0].set_ylabel("tables, TB")
        for axes in grid[-1]:
            axes.set_xlabel("hours between faults of the job")
        kinds = [name for name in KINDS if any(name in candidates(row) for row in cells)]
        marks = [Patch(facecolor=FAMILIES[name], edgecolor=EDGE, label=name) for name in kinds]
        said = f"{CANNOT_TELL}: faint is the likeliest, marks who may be ahead as well"
        marks.append(Patch(facecolor="white", edgecolor=HATCH, hatch="////", label=said))
        figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False)

    return svg(paint, 9.4, 3.1 * len(jobs) + 0.8, message(cells) + "\n")


def message(cells: Rows) -> str:
    """What all panels say together."""
    sure = sum(row["verdict"] != CANNOT_TELL for row in cells)
    return f"{sure or 'None'} of {len(cells)} cells have a sure winner over the whole range of inputs"


def title(job: str, among: str, cells: Rows) -> str:
    """A profile and a panel, and how many cells ecemb leads at the likeliest inputs."""
    ours = sum(kind(row["method"]) == ECEMB for row in cells)
    return f"{job}\n{NAMED[among]}: ecemb first in {ours} of {len(cells)}"


def candidates(row: Mapping[str, Any]) -> list[str]:
    """The kinds that may be ahead in a cell, the likeliest first."""
    return row["candidates"].split(", ")


def panel(axes: Axes, cells: Rows) -> None:
    """Draws one map: in each cell the kind that is ahead, and marks of others that may be."""
    from matplotlib.patches import Rectangle

    across = sorted({row["mtbf_h"] for row in cells})
    up = sorted({row["table_tb"] for row in cells})
    for row in cells:
        x, y = across.index(row["mtbf_h"]), up.index(row["table_tb"])
        sure = row["verdict"] != CANNOT_TELL
        corner, (first, *others) = (x - 0.5, y - 0.5), candidates(row)
        alpha = 1.0 if sure else FAINTLY
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=FAMILIES[first], alpha=alpha, edgecolor="none"))
        if not sure:
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=HATCH, linewidth=0, hatch="////"))
        left = x - SQUARE * len(others) / 2
        for i, name in enumerate(others):
            at = (left + SQUARE * i, y - 0.4)
            looks = {"facecolor": FAMILIES[name], "edgecolor": EDGE, "linewidth": 0.4}
            axes.add_patch(Rectangle(at, SQUARE, 0.25, **looks))
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=EDGE, linewidth=0.5))
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
        axes.text(x, y + 0.15, f"{row['value']:.2f}", ha="center", va="center", fontsize=6, bbox=box)
    axes.set_xlim(-0.5, len(across) - 0.5)
    axes.set_ylim(-0.5, len(up) - 0.5)
    axes.set_xticks(range(len(across)), [f"{hours:g}" for hours in across])
    axes.set_yticks(range(len(up)), [f"{size:g}" for size in up])


def turning(rows: Rows) -> str:
    """Returns as SVG what it takes to turn the map: the strongest inputs of each profile.

    Args:
        rows: Of the question.
    """
    moved = [row for row in rows if row["metric"] == "cells_turned" and row["among"] == EXACT]
    jobs = list(dict.fromkeys(row["job"] for row in moved))

    def paint(figure: Figure) -> None:
        line = figure.subplots(1, len(jobs), squeeze=False)[0]
        for axes, job in zip(line, jobs, strict=True):
            turned = {(row["input"], row["end"]): row["value"] for row in moved if row["job"] == job}
            names = strongest(turned)[::-1]
            for end, colour, sign in (("cheap", "#0072B2", -1), ("dear", "#E69F00", 1)):
                axes.barh(names, [sign * turned[name, end] for name in names], color=colour, label=end)
            axes.axvline(0, color=FAINT, linewidth=0.8)
            plain(axes)
            axes.set_title(job, fontsize=8)
            most = max([1.0, *turned.values()])
            axes.set_xticks([-most, 0, most], [f"{most:g}", "0", f"{most:g}"])
            axes.set_xlabel("cells with another leader")
        handles, labels = line[0].get_legend_handles_labels()
        labels = [f"at the {label} end of its range" for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)

    said = "The inputs that turn most cells of the map, where no sample may be lost"
    return svg(paint, 11, 2.8, said + "\n")


def strongest(turned: Mapping[tuple[str, str], float]) -> list[str]:
    """The inputs that turn most cells at either end of their ranges, the strongest first."""
    most: dict[str, float] = {}
    for (name, _), cells in turned.items():
        most[name] = max(cells, most.get(name, 0.0))
    return sorted((name for name in most if most[name]), key=lambda name: -most[name])[:STRONGEST]
