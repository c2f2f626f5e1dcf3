"""The parts of which a table's records are made, and which lie apart in memory.

Owns their addresses, so that one call takes whole records. Must not know: the content of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from ecemb.errors import KernelError

from .checks import ELEMENTS, INDEX, WORD, Elements, Ids, Words, check_array, check_ids, check_output

_WORD_BYTES = 8


@final
class Columns:
    """The columns of a table, side by side in a record. The rest of a record's last word is 0.

    Args:
        rows: rows of the table, 0 or more.
        parts: of each column its rows, uint8/16/32/64 [rows, w], and its first element in a record; without
            gaps, in the order of a record.

    Attributes:
        rows: as given.
        words: 8-byte words of a record.
        parts: as given.
        widths: bytes of a row in each column.
        addresses: int64, of row 0 in each column.

    Raises:
        KernelError: a column is no such array, has other rows than the others, or leaves a gap.
    """

    def __init__(self, rows: int, parts: Sequence[tuple[Elements, int]]) -> None:
        self.rows = rows
        self.parts: tuple[tuple[Elements, int], ...] = tuple(parts)
        widths: list[int] = []
        end = 0
        for number, (column, first) in enumerate(self.parts):
            check_array("records", f"column {number}", column, 2, ELEMENTS)
            at = first * column.itemsize
            if len(column) != rows or at != end:
                raise KernelError(
                    f"records: column {number} has {len(column)} rows and begins at byte {at}; it has to "
                    f"have {rows}, and to begin at byte {end}, where the column before it ends"
                )
            widths.append(column.shape[1] * column.itemsize)
            end += widths[-1]
        self.widths: tuple[int, ...] = tuple(widths)
        self.words: int = -(-end // _WORD_BYTES)
        addresses = [column.__array_interface__["data"][0] for column, _ in parts]
        self.addresses: NDArray[np.int64] = np.array(addresses, np.int64)
        self._named = {f"column {number} of the table": column for number, (column, _) in enumerate(parts)}

    def check(self, operation: str, ids: Ids, *, out: Words, **read: Words) -> None:
        """Raises KernelError unless `ids` are rows, and `out` and what is `read` have a record for each.

        `out` must be writeable, and share no memory with the columns or what is read.
        """
        check_array(operation, "ids", ids, 1, (INDEX,))
        for label, records in {**read, "out": out}.items():
            check_array(operation, label, records, 2, (WORD,))
            if records.shape != (ids.size, self.words):
                raise KernelError(
                    f"{operation}: {label} has the shape {list(records.shape)}; it has to be "
                    f"[{ids.size}, {self.words}], a record for each id"
                )
        check_ids(operation, ids, self.rows, "table")
        check_output(operation, "out", out, **read, **self._named)
