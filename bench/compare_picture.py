"""The picture of the head to head, drawn from the rows of `bench.compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.picture import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOOKS = {
    "ecemb copies": ("s", "0.3"),
    "ecemb": ("o", "0.0"),
    "float": ("X", "0.5"),
    "snapshots": ("^", "0.3"),
    "coded": ("v", "0.3"),
    "full": ("D", "0.6"),
    "cpr": ("P", "0.75"),
    "check-n-run": ("p", "0.75"),
    "nothing": ("*", "0.0"),
}
"""How a method's name begins -> marker, grey."""
OVERHEAD = "overhead_cpu_pct"
COLUMNS = 4

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: what is paid in each step, against what a failure takes; numbers are names.

    Args:
        rows: of `bench.compare`, of one engine or several; a row of panels is for each.
    """
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    names = list(dict.fromkeys(row["method"] for row in rows))

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(engines), 2, squeeze=False)
        for (left, right), engine in zip(grid, engines, strict=True):
            found = of_methods([row for row in rows if row["engine"] == engine])
            panel(left, found, names, "caught_up_s")
            panel(right, found, names, "given_up_steps")
            for axes in (left, right):
                axes.set_title(f"engine {engine}", fontsize=8)
                axes.set_xlabel("overhead in processor time, % of an unprotected step")
            left.set_ylabel("from the kill until nothing is missing, s")
            right.set_ylabel("steps run again or forgotten, of both failures")
            right.set_yscale("symlog", linthresh=1)
            right.set_ylim(bottom=-0.2)
        handles = [
            grid[0][0].plot([], [], mark(name)[0], color=mark(name)[1], ls="", ms=5)[0] for name in names
        ]
        said = [f"{number} {name}" for number, name in enumerate(names, 1)]
        figure.legend(handles, said, loc="outside lower center", ncols=COLUMNS, frameon=False, fontsize=7)

    return svg(paint, 8, 3.2 * len(engines) + 0.16 * len(names) / COLUMNS * 2)


def of_methods(rows: Rows) -> dict[str, dict[str, float]]:
    """Method -> metric -> value; the first, of a method that several numbers of ranks had."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["method"], {}).setdefault(row["metric"], row["value"])
    return found


def panel(axes: Axes, found: Mapping[str, Mapping[str, float]], names: Sequence[str], metric: str) -> None:
    """Draws a point for each method, with its number."""
    for name, values in found.items():
        marker, grey = mark(name)
        point = values[OVERHEAD], values[metric]
        axes.plot(*point, marker, color=grey, ms=5)
        axes.annotate(
            str(names.index(name) + 1), point, xytext=(3, 3), textcoords="offset points", fontsize=6
        )
    axes.grid(color="0.9", linewidth=0.5)
    axes.set_axisbelow(True)


def mark(name: str) -> tuple[str, str]:
    """A method's marker and grey."""
    return next((look for begin, look in LOOKS.items() if name.startswith(begin)), ("o", "0.5"))
