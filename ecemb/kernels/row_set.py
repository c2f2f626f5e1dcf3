"""A set of rows of one table, as bits: the rows that a transaction has touched.

Owns the bits. Must not know: the content of rows.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

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

    def clear_(self) -> None:
        """Takes all rows out: faster than `Kernels.forget_` when they are many."""
        self.seen.fill(0)
