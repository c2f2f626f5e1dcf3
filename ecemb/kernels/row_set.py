"""A set of rows of one table, as bits: the rows that a transaction has touched.

Owns the bits. Must not know: the content of rows.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from ecemb.errors import KernelError

ROWS_PER_WORD = 64


@final
class RowSet:
    """A set of row numbers below `rows`; empty at first. One thread may use it at a time.

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

    def clear_(self) -> None:
        """Takes all rows out: faster than `Kernels.forget_` when they are many."""
        self.seen.fill(0)
