"""What a run of `python -m bench` prints: the answer in some ten lines, and where all of it is."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.report import choosing, summary
from bench.report.headlines import Unknown

TABLES = {
    "compare": lambda document: choosing.methods([document]),
    "compare_cluster": lambda document: choosing.on_a_cluster(document["rows"]),
}
"""Question -> its table of methods, in Markdown, with what is below it."""
LEFT_OUT = ("memory", "ranks that")
"""How heads of columns begin that a terminal has no room for."""
WIDTH = 110


def verdict(question: str, document: Mapping[str, Any], path: Path) -> str:
    """The answer to a question for a terminal.

    Args:
        question: The question.
        document: The answer, as JSON has it.
        path: The file with it.
    """
    rows = document["rows"]
    lines: list[str] = []
    if question in TABLES:
        try:
            table, *below = TABLES[question](document).split("\n\n")
            lines += [
                *aligned(table),
                *(line for one in below if one.startswith("- ") for line in one.splitlines()),
            ]
        except (Unknown, KeyError):
            pass  # methods alone were asked for, or some failed
    lines += textwrap.wrap(summary.answer(question, [document]) or figures(rows), WIDTH)
    shown = path.resolve()
    named = shown.relative_to(ROOT) if shown.is_relative_to(ROOT) else shown
    lines.append(f"{len(rows):,} figures: {named}; --verbose prints them all")
    return "\n".join(lines)


def figures(rows: Sequence[Mapping[str, Any]]) -> str:
    """The metrics of an answer, with the range of their values."""
    found: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    for row in rows:
        found.setdefault(row["metric"], []).append(row["value"])
        units[row["metric"]] = row["unit"]
    named = [f"{name} {_range(values)} {units[name]}" for name, values in found.items()]
    shown = "; ".join(named[:12])
    return f"{shown}; and {len(named) - 12} more" if len(named) > 12 else shown


def aligned(markdown: str) -> list[str]:
    """A table of Markdown as columns of text, without marks, and without `LEFT_OUT`."""
    plain = markdown.replace("**", "").replace("`", "")
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in plain.splitlines()]
    heads, _, *lines = cells
    kept = [at for at, head in enumerate(heads) if not head.startswith(LEFT_OUT)]
    shown = [[line[at] for at in kept] for line in [heads, *lines]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in shown
    ]


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
