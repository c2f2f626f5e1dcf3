"""Tables whose rows come only when they are waited for, as a replacement rank's: until then they are NaN."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ecemb.coding.rows import TableLayout, joined, joined_to
from ecemb.engines.contract import Ids

POISON = 0xFF


class Arriving:
    """Takes the rows of all tables away; `ensure` and `ensure_all` are those of a guard's hooks.

    Args:
        layouts: of the tables.
        columns: their memory, uint8 [rows, row_bytes] each; overwritten.
    """

    def __init__(
        self, layouts: Sequence[TableLayout], columns: Sequence[Sequence[NDArray[np.uint8]]]
    ) -> None:
        self._first = joined_to(layouts)
        self._named = [layout.rows for layout in joined(layouts)]
        self._columns = columns
        self._kept = [[column.copy() for column in one] for one in columns]
        self.there = [np.zeros(layout.rows, np.bool_) for layout in layouts]
        self.calls = 0
        for one in columns:
            for column in one:
                column[:] = POISON

    @property
    def is_whole(self) -> bool:
        """Whether all rows have come."""
        return all(there.all() for there in self.there)

    def ensure(self, index: int, ids: Ids) -> None:
        """Brings rows of a table, or of the group of which it is the first."""
        self.calls += 1
        for table, rows in self._by_table(index, ids):
            self._bring(table, np.unique(rows))

    def ensure_all(self, index: int) -> None:
        """Brings all of them."""
        self.ensure(index, np.arange(self._named[index]))

    def assert_there(self, index: int, ids: Ids) -> None:
        """Fails if a row has not come."""
        for table, rows in self._by_table(index, ids):
            missing = rows[~self.there[table][rows]]
            assert not len(missing), f"rows {missing} of table {table} are captured before they are there"

    def _by_table(self, index: int, ids: Ids) -> list[tuple[int, Ids]]:
        assert ids.dtype == np.int64 and ids.ndim == 1
        assert self._first[index] == index, f"table {index} is joined to {self._first[index]}"
        assert not len(ids) or 0 <= ids.min() <= ids.max() < self._named[index]
        found: list[tuple[int, Ids]] = []
        while len(ids):
            rows = len(self.there[index])
            found.append((index, ids[ids < rows]))
            ids, index = ids[ids >= rows] - rows, index + 1
        return found

    def _bring(self, table: int, rows: Ids) -> None:
        new = rows[~self.there[table][rows]]
        for column, kept in zip(self._columns[table], self._kept[table], strict=True):
            column[new] = kept[new]
        self.there[table][new] = True
