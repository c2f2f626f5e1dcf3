"""Prints aligned columns: the one table printer of the commands."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path


def aligned(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str] = (),
    *,
    right: Collection[str] = (),
) -> str:
    """Returns a plain table in columns, with notes below it.

    Args:
        titles: One per column.
        rows: Cells, one per title.
        notes: Lines below the table.
        right: Titles of the columns that are aligned to the right.
    """
    lines = [titles, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    columns = [(width, title in right) for width, title in zip(widths, titles, strict=True)]
    texts = [
        "  ".join(
            cell.rjust(width) if to_the_right else cell.ljust(width)
            for cell, (width, to_the_right) in zip(line, columns, strict=True)
        )
        for line in lines
    ]
    return "\n".join([*(text.rstrip() for text in texts), *notes])


def no_arenas(arena_dir: Path, job: str | None) -> str:
    """Returns the line that stands for an empty table of arenas."""
    return f"no arenas of this user{f' and job {job!r}' if job else ''} in {arena_dir}"
