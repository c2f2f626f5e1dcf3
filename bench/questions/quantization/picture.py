"""The picture of what rows lose by bits and method, drawn from the question's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.harness.svg import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = {
    "symmetric": ("0.65", "s", ":"),
    "asymmetric": ("0.5", "^", "--"),
    "adaptive": ("0.0", "o", "-"),
    "k-means (scikit-learn)": ("0.35", "D", "-."),
}
"""Method -> grey, marker, line."""


def draw(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the picture as SVG: a panel for each table and dimension; errors on a logarithmic scale."""
    chosen = [row for row in rows if row["metric"] == "l2_error"]
    tables = list(dict.fromkeys(row["table"] for row in chosen))
    dims = sorted({row["dim"] for row in chosen})
    bits = sorted({row["bits"] for row in chosen})

    def paint(figure: Figure) -> None:
        grid = figure.subplots(len(tables), len(dims), squeeze=False, sharex=True, sharey="row")
        for line, table in zip(grid, tables, strict=True):
            line[0].set_ylabel(f"{table}: mean L2 error")
            for axes, dim in zip(line, dims, strict=True):
                for method, (grey, marker, style) in LOOKS.items():
                    own = {
                        row["bits"]: row["value"]
                        for row in chosen
                        if (row["table"], row["dim"], row["method"]) == (table, dim, method)
                    }
                    axes.plot(
                        list(own), list(own.values()), style + marker, color=grey, ms=4, lw=1, label=method
                    )
                axes.set_yscale("log")
                axes.set_xticks(bits)
                axes.grid(color="0.9", linewidth=0.5)
        for axes, dim in zip(grid[0], dims, strict=True):
            axes.set_title(f"dim {dim}", fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel("bits of a code")
        grid[0][0].legend(frameon=False)

    return svg(paint, 8, 2.2 * len(tables) + 0.4)
