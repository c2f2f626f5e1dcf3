"""The picture of what rows lose by bits and method, drawn from the question's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.harness.svg import FAINT, LINES, label_ends, plain, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = "symmetric"
"""The method that the others are compared with."""
OURS = "adaptive"
"""Check-N-Run's."""
BEST = "k-means (scikit-learn)"
LOOKS = {"asymmetric": (LINES[1], "^"), OURS: (LINES[0], "o"), BEST: (LINES[2], "D")}
"""Method -> colour, marker."""

Rows = Sequence[Mapping[str, Any]]


def draw(rows: Rows) -> str:
    """Returns the picture as SVG: errors beside those of symmetric ranges; a panel for each table.

    Lines are medians over the dimensions; what is shaded goes from the smallest to the largest.
    """
    chosen = [row for row in rows if row["metric"] == "l2_error"]
    tables = list(dict.fromkeys(row["table"] for row in chosen))

    def paint(figure: Figure) -> None:
        line = figure.subplots(1, len(tables), squeeze=False, sharex=True, sharey=True)[0]
        line[0].set_ylabel(f"mean L2 error, % of that with {LEAST} ranges")
        for axes, table in zip(line, tables, strict=True):
            panel(axes, [row for row in chosen if row["table"] == table])
            axes.set_title(f"rows: {table}", fontsize=9)
            axes.set_xlabel("bits of a code")

    return svg(paint, 8, 3.4, title(chosen))


def title(chosen: Rows) -> str:
    """What Check-N-Run's search, and k-means, leave of the error at the fewest bits."""
    fewest = min(row["bits"] for row in chosen)

    def reach(method: str) -> str:
        found = shares([row for row in chosen if row["bits"] == fewest], method).get(fewest, [])
        return f"{min(found):.0f} to {max(found):.0f} %" if found else "none"

    return (
        f"With {fewest} bits, adaptive ranges leave {reach(OURS)} of symmetric ones' error, "
        f"k-means {reach(BEST)}"
    )


def shares(rows: Rows, method: str) -> dict[int, list[float]]:
    """Bits -> a method's errors in % of symmetric ranges', of each table and dimension."""
    errors = {(row["table"], row["dim"], row["bits"], row["method"]): row["value"] for row in rows}
    found: dict[int, list[float]] = {}
    for (table, dim, bits, one), error in errors.items():
        if one == method:
            found.setdefault(bits, []).append(100 * error / errors[table, dim, bits, LEAST])
    return found


def panel(axes: Axes, rows: Rows) -> None:
    """Draws one table."""
    ends: dict[str, tuple[float, float, str]] = {}
    for method, (colour, marker) in LOOKS.items():
        found = shares(rows, method)
        if not found:
            continue
        bits = list(found)
        middle = [median(found[one]) for one in bits]
        axes.fill_between(
            bits,
            [min(found[one]) for one in bits],
            [max(found[one]) for one in bits],
            color=colour,
            alpha=0.2,
        )
        axes.plot(bits, middle, marker=marker, color=colour, ms=5, lw=1.2)
        ends[method.partition(" ")[0]] = (bits[-1], middle[-1], colour)
    axes.axhline(100, color=FAINT, linewidth=0.8, linestyle=":")
    every = sorted({row["bits"] for row in rows})
    axes.set_xticks(every)
    axes.set_ylim(0, 110)
    axes.set_xlim(every[0] - 0.3, every[-1] + 0.45 * (every[-1] - every[0]))
    plain(axes)
    label_ends(axes, ends)
