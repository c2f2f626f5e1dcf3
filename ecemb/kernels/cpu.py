"""Kernels for the CPU: loops compiled for this machine's vector units, on one thread or several.

Owns: which loop does which operation. The loops are compiled when the kernels are made, in some tens of
milliseconds, and run without the interpreter's lock. The contract checks all arguments; the loops check
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import NDArray

from ecemb.kernels.contract import Columns, Elements, Ids, Kernels, RowSet, Words

from . import loops
from .gf_products import Products, available
from .llvm import compiled


@final
class Cpu(Kernels):
    """Kernels compiled for this machine's vector units.

    Args:
        products: how to multiply; by default the fastest way that this processor has.
        threads: threads that share large operations. `scatter_`, `scatter_rows_`, `distinct` and `forget_`
            use one thread, since they may write one place twice, and `update_rows_`, since it works in order.

    Attributes:
        products: the same.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, products: Products | None = None, threads: int = 1) -> None:
        super().__init__(threads)
        self.products: Products = products or available()[0]
        self._constants, self._start = self.products.constants(), np.zeros(1, np.int64)
        self._weights, self._zero = _address(self._constants), _address(self._start)
        unit = self.products.vector_bytes
        self._copy, self._put, self._differ, self._collect, self._drop, *adds = compiled(
            loops.copy(unit),
            loops.put(unit),
            loops.change(unit),
            loops.distinct(),
            loops.forget(),
            loops.add(unit, None),
            loops.add(unit, self.products),
            loops.add(unit, None, journalled=True),
            loops.add(unit, self.products, journalled=True),
        )
        self._add, self._multiply, self._add_journalled, self._multiply_journalled = adds
        # Compiled at the first use: for the records that there are; and most processes never combine blocks.
        self._of_records = functools.cache(
            lambda widths: compiled(loops.pack(unit, widths), loops.differ(unit, widths))
        )
        self._combine = functools.cache(lambda outputs: compiled(loops.dot(self.products, outputs))[0])

    def _gather(self, table: Elements, ids: Ids, out: Elements, column: int) -> None:
        self._gather_from(*_rows(table, ids), *_records(out, column))

    def _scatter(self, table: Elements, ids: Ids, records: Elements, column: int) -> None:
        self._put(*_rows(table, ids), *_records(records, column))

    def _change(self, table: Elements, ids: Ids, old: Elements, out: Elements, column: int) -> None:
        before, _ = _records(old, column)
        base, places, count, scale, width = _rows(table, ids)
        after, stride = _records(out, column)

        def some(first: int, stop: int) -> None:
            at = (before + first * stride, after + first * stride, stride)
            self._differ(base, places + 8 * first, stop - first, scale, width, *at)

        self._team.share(count, 3 * width, some)

    def _gather_records(self, columns: Columns, ids: Ids, out: Words) -> None:
        pack, _ = self._of_records(columns.widths)
        self._share_records(pack, columns, ids, _address(out))

    def _change_records(self, columns: Columns, ids: Ids, old: Words, out: Words) -> None:
        _, differ = self._of_records(columns.widths)
        self._share_records(differ, columns, ids, _address(out), _address(old))

    def _share_records(self, loop: Callable[..., int], columns: Columns, ids: Ids, *records: int) -> None:
        bases, places, stride = _address(columns.addresses), _address(ids), 8 * columns.words

        def some(first: int, stop: int) -> None:
            loop(bases, places + 8 * first, stop - first, *(at + first * stride for at in records))

        self._team.share(ids.size, (1 + len(records)) * stride, some)

    def _distinct(self, ids: Ids, rows: RowSet, out: Ids) -> int:
        digits = -(-rows.rows.bit_length() // 8) | 1
        spare = np.empty(ids.size + 1 + loops.DIGITS, np.int64)
        places = _address(spare), _address(spare) + 8 * (ids.size + 1)
        return self._collect(_address(ids), ids.size, _address(rows.seen), _address(out), *places, digits)

    def _forget(self, rows: RowSet, ids: Ids) -> None:
        self._drop(_address(ids), ids.size, _address(rows.seen))

    def _gather_rows(self, src: Words, offsets: Ids, out: Words) -> None:
        self._gather_from(*_places(src, offsets, out), _address(out), 8 * out.shape[1])

    def _gather_from(
        self, base: int, places: int, count: int, scale: int, width: int, out: int, stride: int
    ) -> None:
        def some(first: int, stop: int) -> None:
            self._copy(base, places + 8 * first, stop - first, scale, width, out + first * stride, stride)

        self._team.share(count, 2 * width, some)

    def _scatter_rows(self, dst: Words, offsets: Ids, src: Words) -> None:
        self._put(*_places(dst, offsets, src), _address(src), 8 * src.shape[1])

    def _mul_add_rows(self, dst: Words, offsets: Ids, src: Words, weight: int) -> None:
        base, places, count, scale, width = _places(dst, offsets, src)
        source = _address(src)

        def some(first: int, stop: int) -> None:
            self._add_weighted(
                weight, base, places + 8 * first, stop - first, scale, width, source + first * width
            )

        if self._team.threads > 1 and not _apart(offsets, src.shape[1]):
            some(0, count)
        else:
            self._team.share(count, 3 * width, some)

    def _update_rows(
        self, dst: Words, offsets: Ids, src: Words, weight: int, saved: Words, mark: Ids
    ) -> None:
        arguments = (*_places(dst, offsets, src), _address(src))
        journal = (_address(saved), saved.strides[0], _address(mark))
        if weight == 1:
            self._add_journalled(*arguments, 0, *journal)
        else:
            constants = self._weights + int(weight) * self._constants.shape[1]
            self._multiply_journalled(*arguments, constants, *journal)

    def _mul_add_block(self, dst: Words, src: Words, weight: int) -> None:
        target, source = _address(dst), _address(src)

        def some(first: int, stop: int) -> None:  # words, as one row at offset 0
            size = 8 * (stop - first)
            self._add_weighted(weight, target + 8 * first, self._zero, 1, 8, size, source + 8 * first)

        self._team.share(src.size, 3 * 8, some)

    def _add_weighted(self, weight: int, *arguments: int) -> None:
        if weight == 1:
            self._add(*arguments, 0)
        else:
            self._multiply(*arguments, self._weights + int(weight) * self._constants.shape[1])

    def _dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], outs: Sequence[Words]) -> None:
        sources = np.array([_address(block) for block in blocks], np.int64)
        for row in range(0, len(outs), loops.MOST_OUTPUTS):
            targets = np.array([_address(out) for out in outs[row : row + loops.MOST_OUTPUTS]], np.int64)
            constants = self._constants[weights[row : row + len(targets)]]
            some = functools.partial(_combine, self._combine(len(targets)), sources, constants, targets)
            self._team.share(outs[0].size, 8 * (len(blocks) + len(targets)), some)


def _combine(
    combine: Callable[..., int],
    sources: Ids,
    constants: NDArray[np.uint8],
    targets: Ids,
    first: int,
    stop: int,
) -> None:
    """`dot` for words first..stop-1."""
    sources, targets = sources + 8 * first, targets + 8 * first
    sizes = constants.shape[-1], len(sources)
    combine(_address(sources), _address(constants), *sizes, _address(targets), 8 * (stop - first))


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]


def _apart(offsets: Ids, words: int) -> bool:
    """Whether rows of `words` words are in ascending order and none overlaps the row before it."""
    return bool(np.all(offsets[1:] - offsets[:-1] >= words))


def _rows(table: Elements, ids: Ids) -> tuple[int, int, int, int, int]:
    width = table.shape[1] * table.itemsize
    return _address(table), _address(ids), ids.size, width, width


def _records(records: Elements, column: int) -> tuple[int, int]:
    return _address(records) + column * records.itemsize, records.shape[1] * records.itemsize


def _places(words: Words, offsets: Ids, rows: Words) -> tuple[int, int, int, int, int]:
    return _address(words), _address(offsets), offsets.size, 8, 8 * rows.shape[1]
