"""The reference kernels: the specification, written to be read.

Owns: the meaning of each operation, in numpy, one row at a time. Results of other kernels have to be equal
bit for bit. Products are computed by shift and add, so that they share no table with the code's algebra or
with a faster kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from .contract import POLYNOMIAL, ROWS_PER_WORD, Columns, Elements, Ids, Kernels, RowSet, Words


def product(weight: int, words: Words) -> Words:
    """Returns `weight * words` bytewise, uint64 [S], new, by Horner's rule over weight's bits."""
    factors = words.view(np.uint8)
    result = np.zeros_like(factors)
    for bit in reversed(range(8)):
        # Twice the result: shift, and subtract (that is, XOR) the polynomial where x^8 appears.
        overflow = (result >> 7) * np.uint8(POLYNOMIAL & 0xFF)
        result = (result << 1) ^ overflow
        if weight >> bit & 1:
            result ^= factors
    return result.view(np.uint64)


def distinct(ids: Ids, rows: RowSet, out: Ids) -> int:
    """See `Kernels.distinct`."""
    place, bit = ids // ROWS_PER_WORD, np.uint64(1) << (ids % ROWS_PER_WORD).astype(np.uint64)
    new = np.unique(ids[rows.seen[place] & bit == 0])
    np.bitwise_or.at(rows.seen, place, bit)
    out[: new.size] = new
    return new.size


def forget_(rows: RowSet, ids: Ids) -> None:
    """See `Kernels.forget_`."""
    bit = np.uint64(1) << (ids % ROWS_PER_WORD).astype(np.uint64)
    np.bitwise_and.at(rows.seen, ids // ROWS_PER_WORD, ~bit)


@final
class Reference(Kernels):
    """Plain numpy, slow and easy to read."""

    name: ClassVar[str] = "reference"

    def _scatter(self, table: Elements, ids: Ids, records: Elements, column: int) -> None:
        for i, row in enumerate(ids):
            table[row] = records[i, column : column + table.shape[1]]

    def _gather_records(self, columns: Columns, ids: Ids, out: Words) -> None:
        out[:, -1:] = 0
        for rows, first in columns.parts:
            records = out.view(rows.dtype)
            for i, row in enumerate(ids):
                records[i, first : first + rows.shape[1]] = rows[row]

    def _change_records(self, columns: Columns, ids: Ids, old: Words, out: Words) -> None:
        self._gather_records(columns, ids, out)
        out ^= old

    def _distinct(self, ids: Ids, rows: RowSet, out: Ids) -> int:
        return distinct(ids, rows, out)

    def _forget(self, rows: RowSet, ids: Ids) -> None:
        forget_(rows, ids)

    def _gather_rows(self, src: Words, offsets: Ids, out: Words) -> None:
        for offset, row in zip(offsets, out, strict=True):
            row[...] = src[offset : offset + row.size]

    def _mul_add_rows(self, dst: Words, offsets: Ids, src: Words, weight: int) -> None:
        for offset, row in zip(offsets, src, strict=True):
            dst[offset : offset + row.size] ^= product(weight, row)

    def _mul_add_block(self, dst: Words, src: Words, weight: int) -> None:
        dst ^= product(weight, src)

    def _dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], outs: Sequence[Words]) -> None:
        for row, out in zip(weights, outs, strict=True):
            out[...] = 0
            for block, weight in zip(blocks, row, strict=True):
                out ^= product(int(weight), block)
