"""A set of rows, as bits: those that a transaction has touched, or those that a replacement rank has.

Owns the bits: whatever remembers something of each row of a table does it here, since a table may have
billions of rows. Must not know: the content of rows.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from ecemb.errors import KernelError

from .checks import Ids

ROWS_PER_WORD = 64

_ALL = (1 << ROWS_PER_WORD) - 1
_LOOK_WORDS = 1 << 14
"""Words that are looked at together: what is computed of them stays in the processor's cache."""

_ONES = np.array([byte.bit_count() for byte in range(256)], np.uint8)


@final
class RowSet:
    """A set of row numbers below `rows`; empty at first.

    One thread may change it at a time. While rows are only added, others may ask `has` meanwhile: a word is
    stored at once, so they find a row or don't.

    The owner keeps it as long as the table, since making a set clears a bit of memory for each row.

    Args:
        rows: rows of the table, 0 or more.

    Attributes:
        rows: the same.
        seen: uint64 [ceil(rows / 64)], bit i % 64 of word i // 64 is set if row i is in the set.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.seen: NDArray[np.uint64] = np.zeros(-(-rows // ROWS_PER_WORD), np.uint64)

    def add_(self, row: int) -> bool:
        """Adds one row, as `Kernels.distinct` adds many; returns whether it is new.

        Raises:
            KernelError: there is no such row.
        """
        if not 0 <= row < self.rows:
            raise KernelError(f"add_: {row} is not a row of the set, which has {self.rows} rows")
        word, bit = divmod(row, ROWS_PER_WORD)
        known = int(self.seen[word])
        self.seen[word] = known | 1 << bit
        return not known >> bit & 1

    def has(self, ids: Ids) -> NDArray[np.bool_]:
        """Which rows are in the set.

        Args:
            ids: int64 [m], rows of the table, in any order, repeats allowed; read.

        Returns:
            bool [m]; new.
        """
        bits = self.seen[ids // ROWS_PER_WORD] >> (ids % ROWS_PER_WORD).astype(np.uint64)
        return (bits & np.uint64(1)).astype(np.bool_)

    def first_absent(self, first: int) -> int:
        """The first row that is not in the set, from `first` (0 or more) on; `rows` if there is none."""
        if first >= self.rows:
            return self.rows
        word, bit = divmod(first, ROWS_PER_WORD)
        absent = ~int(self.seen[word]) >> bit << bit & _ALL
        while not absent and (start := word + 1) < len(self.seen):
            full = self.seen[start : start + _LOOK_WORDS] == _ALL
            word = start + int(full.argmin()) if not full.all() else start + len(full) - 1
            absent = ~int(self.seen[word]) & _ALL
        if not absent:
            return self.rows
        return min(word * ROWS_PER_WORD + (absent & -absent).bit_length() - 1, self.rows)

    def count(self, first: int, stop: int) -> int:
        """How many of the rows first..stop-1 of the table are in the set."""
        low, high = first // ROWS_PER_WORD, stop // ROWS_PER_WORD
        count = self._count_below(stop) - self._count_below(first)
        for start in range(low, high, _LOOK_WORDS):
            count += int(_ONES[self.seen[start : min(start + _LOOK_WORDS, high)].view(np.uint8)].sum())
        return count

    def _count_below(self, row: int) -> int:
        """How many rows before `row` are in the set, of those in its word."""
        word, bit = divmod(row, ROWS_PER_WORD)
        return (int(self.seen[word]) & (1 << bit) - 1).bit_count() if bit else 0

    def clear_(self) -> None:
        """Takes all rows out: faster than `Kernels.forget_` when they are many."""
        self.seen.fill(0)
