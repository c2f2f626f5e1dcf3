"""What a run of `python -m bench` prints: the answer in some ten lines, and where all of it is."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT
from bench.report import screen, summary, tables
from bench.report.headlines import Unknown

TABLES = {
    "compare": lambda document: screen.screen([document, *_measured("recovery")]),
    "compare_cluster": lambda document: screen.on_a_cluster(document["rows"]),
}
"""Question -> its tables of methods, in Markdown, with what is below them."""
LEFT_OUT = ("host memory", "may be lost")
"""Heads of columns that a terminal has no room for."""
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
            parts = TABLES[question](document).split("\n\n")
            lines += aligned(*(part for part in parts if part.startswith("|")))
            lines += [line for line in "\n".join(parts).splitlines() if " is left out: " in line]
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


def aligned(*markdown: str) -> list[str]:
    """Tables of Markdown, side by side by their first column, as columns of text.

    Without marks, and without the columns of `LEFT_OUT`.
    """
    joined: dict[str, list[str]] = {}
    for table in markdown:
        heads, _, *lines = [_cells(line) for line in table.splitlines()]
        width = max(map(len, joined.values()), default=0)
        for name, *cells in [heads, *lines]:
            joined.setdefault(name, [""] * width).extend(cells)
        for cells in joined.values():
            cells += [""] * (width + len(heads) - 1 - len(cells))
    heads, *lines = [[name, *cells] for name, cells in joined.items()]
    kept = [at for at, head in enumerate(heads) if head not in LEFT_OUT]
    shown = [[line[at] for at in kept] for line in [heads, *lines]]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in shown
    ]


def _cells(line: str) -> list[str]:
    plain = re.sub(r" \*[a-z]\*|\*\*|`", "", line)
    return [cell.strip() for cell in plain.strip("| ").split(" | ")]


def _measured(question: str) -> list[dict[str, Any]]:
    """The answers to a question that bench/results has."""
    return [one for one in tables.load(RESULTS) if one["question"] == question]


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.3g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
