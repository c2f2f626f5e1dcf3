"""Parts of log lines and tables: counts with their plurals, sizes, lists of ranks, shortened texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

_MOST_RANKS = 8


def short(text: object, most: int = 160) -> str:
    """The first line of a text, cut to `most` characters."""
    line = (str(text).splitlines() or [""])[0]
    return line if len(line) <= most else line[: most - 1].rstrip() + "…"


def counted(count: int, noun: str) -> str:
    """A count with its noun: `1 host`, `2,000 hosts`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def byte_size(count: float) -> str:
    """A number of bytes with its unit, in powers of 1000: `64 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"


def listed(ranks: Sequence[int]) -> str:
    """A list of ranks: `rank 3`, `ranks 1 and 3`, `ranks 0, 1, 2, 3, 4, 5, 6 and 57 more`."""
    names = [str(rank) for rank in sorted(ranks)]
    if len(names) > _MOST_RANKS:
        names = [*names[: _MOST_RANKS - 1], f"{len(names) - _MOST_RANKS + 1} more"]
    joined = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f"rank{'' if len(ranks) == 1 else 's'} {joined}"


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
