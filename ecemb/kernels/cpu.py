"""Kernels for the CPU: loops compiled for this machine's vector units, on one thread.

Owns: which loop does which operation. They are compiled when the kernels are made, which takes some tens of
milliseconds, and run without the interpreter's lock. Arguments are checked before they come here; the loops
check nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from ecemb.kernels import Elements, Indices, Kernels, RowSet, Words

from . import loops
from .emit import compiled
from .products import Products, available


@final
class Cpu(Kernels):
    """Compiled for this machine's vector units; one thread.

    Args:
        products: how it multiplies; the fastest way that there is here when None.

    Attributes:
        products: the same.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, products: Products | None = None) -> None:
        self.products = products or available()[0]
        self._constants, self._start = self.products.constants(), np.zeros(1, np.int64)
        self._weights, self._zero = _address(self._constants), _address(self._start)
        unit = self.products.vector_bytes
        self._copy, self._put, self._differ, self._add, self._multiply, self._collect, self._drop = compiled(
            loops.copy(unit),
            loops.put(unit),
            loops.change(unit),
            loops.add(unit, None),
            loops.add(unit, self.products),
            loops.distinct(),
            loops.forget(),
        )
        # Not every process combines blocks.
        self._combine = functools.cache(lambda outputs: compiled(loops.dot(self.products, outputs))[0])

    def _gather(self, table: Elements, ids: Indices, out: Elements, column: int) -> None:
        self._copy(*_rows(table, ids), *_records(out, column))

    def _scatter(self, table: Elements, ids: Indices, records: Elements, column: int) -> None:
        self._put(*_rows(table, ids), *_records(records, column))

    def _change(self, table: Elements, ids: Indices, old: Elements, out: Elements, column: int) -> None:
        before, _ = _records(old, column)
        self._differ(*_rows(table, ids), before, *_records(out, column))

    def _distinct(self, ids: Indices, rows: RowSet, out: Indices) -> int:
        seen, fresh, summary = map(_address, (rows.seen, rows.fresh, rows.summary))
        return self._collect(_address(ids), ids.size, seen, fresh, summary, rows.summary.size, _address(out))

    def _forget(self, rows: RowSet, ids: Indices) -> None:
        self._drop(_address(ids), ids.size, _address(rows.seen))

    def _xor(self, a: Words, b: Words, out: Words) -> None:
        np.bitwise_xor(a, b, out=out)  # numpy's own loop is vectorised and drops the lock.

    def _gather_rows(self, src: Words, offsets: Indices, out: Words) -> None:
        self._copy(*_places(src, offsets, out), _address(out), 8 * out.shape[1])

    def _scatter_rows(self, dst: Words, offsets: Indices, src: Words) -> None:
        self._put(*_places(dst, offsets, src), _address(src), 8 * src.shape[1])

    def _mul_add_rows(self, dst: Words, offsets: Indices, src: Words, weight: int) -> None:
        self._add_weighted(weight, *_places(dst, offsets, src), _address(src))

    def _mul_add_block(self, dst: Words, src: Words, weight: int) -> None:
        # One row, at offset 0.
        self._add_weighted(weight, _address(dst), self._zero, 1, 8, 8 * src.size, _address(src))

    def _add_weighted(self, weight: int, *arguments: int) -> None:
        if weight == 1:
            self._add(*arguments, 0)
        else:
            self._multiply(*arguments, self._weights + int(weight) * self._constants.shape[1])

    def _dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], outs: Sequence[Words]) -> None:
        sources = np.array([_address(block) for block in blocks], np.int64)
        for first in range(0, len(outs), loops.MOST_OUTPUTS):
            some = outs[first : first + loops.MOST_OUTPUTS]
            targets = np.array([_address(out) for out in some], np.int64)
            constants = self._constants[weights[first : first + len(some)]]
            self._combine(len(some))(
                _address(sources),
                _address(constants),
                constants.shape[-1],
                len(blocks),
                _address(targets),
                8 * some[0].size,
            )


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


def _rows(table: Elements, ids: Indices) -> tuple[int, int, int, int, int]:
    width = table.shape[1] * table.itemsize
    return _address(table), _address(ids), ids.size, width, width


def _records(records: Elements, column: int) -> tuple[int, int]:
    return _address(records) + column * records.itemsize, records.shape[1] * records.itemsize


def _places(words: Words, offsets: Indices, rows: Words) -> tuple[int, int, int, int, int]:
    return _address(words), _address(offsets), offsets.size, 8, 8 * rows.shape[1]
