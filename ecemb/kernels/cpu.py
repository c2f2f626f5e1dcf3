"""Kernels for the CPU: loops compiled by numba, on one thread, without the interpreter's lock.

Owns: how eight bytes are multiplied at once. A product in GF(2^8) is linear in the bits of one
factor: for a byte x, weight * x = XOR_j x_j · (weight * 2^j), where x_j is bit j. So for a word of
eight bytes, each of its eight bit planes `(word >> j) & 0x0101010101010101` times the constant
`weight * 2^j` (below 256: no carry crosses a byte) is XORed up, and a vector unit does four or
eight words of that in one instruction.

Compiled code is kept beside this file, or in numba's cache folder of the user where that can't be
written to: the first process ever pays seconds for it, restarts do not. Arguments are checked
before they come here; the loops check nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, TypeVar, cast, final

import numba
import numpy as np
from numba.cpython.unsafe.numbers import trailing_zeros
from numpy.typing import NDArray

from ecemb.kernels import POLYNOMIAL, Elements, Indices, Kernels, RowSet, Words

_Function = TypeVar("_Function", bound=Callable[..., Any])

_DOT_CHUNK_WORDS: Final = 1 << 17
"""`dot` completes its output in pieces (1 MiB) that stay in the cache: measured to be up to twice as
fast as pieces of 64 KiB, and where weights are 1 a quarter faster than one piece of 64 MiB."""


def _compiled(function: _Function) -> _Function:
    njit = cast(Any, numba).njit
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError as error:  # No folder that numba could keep it in can be written to.
        logging.getLogger(__name__).warning(
            "compiling %s again in each process: %s", function.__name__, error
        )
        return njit(nogil=True)(function)


def _constants() -> NDArray[np.uint64]:
    """Returns uint64 [256, 8]: `weight * 2^j` at [weight, j]."""
    table = np.empty((256, 8), np.uint64)
    power = np.arange(256)
    for j in range(8):
        table[:, j] = power
        power = (power << 1) ^ np.where(power > 127, POLYNOMIAL, 0)
    return table


_CONSTANTS: Final = _constants()
_trailing_zeros = cast(Any, trailing_zeros)


@_compiled
def _copy_rows(table: Elements, ids: Indices, out: Elements, column: int) -> None:
    width = table.shape[1]
    for i in range(ids.size):
        source = table[ids[i]]
        target = out[i, column : column + width]
        for j in range(width):
            target[j] = source[j]


@_compiled
def _put_rows(table: Elements, ids: Indices, records: Elements, column: int) -> None:
    width = table.shape[1]
    for i in range(ids.size):
        source = records[i, column : column + width]
        target = table[ids[i]]
        for j in range(width):
            target[j] = source[j]


@_compiled
def _change_rows(table: Elements, ids: Indices, old: Elements, out: Elements, column: int) -> None:
    width = table.shape[1]
    for i in range(ids.size):
        source = table[ids[i]]
        before = old[i, column : column + width]
        target = out[i, column : column + width]
        for j in range(width):
            target[j] = source[j] ^ before[j]


@_compiled
def _add_rows(ids: Indices, seen: Words, fresh: Words, summary: Words, out: Indices) -> int:
    one, six, low = np.uint64(1), np.uint64(6), np.uint64(63)
    for i in range(ids.size):
        row = np.uint64(ids[i])
        word = row >> six
        fresh[word] |= (one << (row & low)) & ~seen[word]
        summary[word >> six] |= one << (word & low)
    count = 0
    for i in range(summary.size):
        words = summary[i]
        summary[i] = 0
        while words:
            word = np.uint64(i) * np.uint64(64) + np.uint64(_trailing_zeros(words))
            words &= words - one
            bits = fresh[word]
            fresh[word] = 0
            seen[word] |= bits
            while bits:
                out[count] = np.int64(word * np.uint64(64) + np.uint64(_trailing_zeros(bits)))
                bits &= bits - one
                count += 1
    return count


@_compiled
def _drop_rows(ids: Indices, seen: Words) -> None:
    for i in range(ids.size):
        row = np.uint64(ids[i])
        seen[row >> np.uint64(6)] &= ~(np.uint64(1) << (row & np.uint64(63)))


@_compiled
def _pack(src: Words, offsets: Indices, starts: Indices, out: Words) -> None:
    for i in range(offsets.size):
        target = out[starts[i] : starts[i + 1]]
        source = src[offsets[i] : offsets[i] + target.size]
        for j in range(target.size):
            target[j] = source[j]


@_compiled
def _unpack(dst: Words, offsets: Indices, starts: Indices, src: Words) -> None:
    for i in range(offsets.size):
        source = src[starts[i] : starts[i + 1]]
        target = dst[offsets[i] : offsets[i] + source.size]
        for j in range(source.size):
            target[j] = source[j]


@_compiled
def _xor_spans(dst: Words, offsets: Indices, starts: Indices, src: Words) -> None:
    for i in range(offsets.size):
        source = src[starts[i] : starts[i + 1]]
        target = dst[offsets[i] : offsets[i] + source.size]
        for j in range(source.size):
            target[j] ^= source[j]


@_compiled
def _multiply_spans(dst: Words, offsets: Indices, starts: Indices, src: Words, constants: Words) -> None:
    ones = np.uint64(0x0101010101010101)
    c0, c1, c2, c3 = constants[0], constants[1], constants[2], constants[3]
    c4, c5, c6, c7 = constants[4], constants[5], constants[6], constants[7]
    for i in range(offsets.size):
        source = src[starts[i] : starts[i + 1]]
        target = dst[offsets[i] : offsets[i] + source.size]
        for j in range(source.size):
            word = source[j]
            product = (word & ones) * c0
            product ^= ((word >> np.uint64(1)) & ones) * c1
            product ^= ((word >> np.uint64(2)) & ones) * c2
            product ^= ((word >> np.uint64(3)) & ones) * c3
            product ^= ((word >> np.uint64(4)) & ones) * c4
            product ^= ((word >> np.uint64(5)) & ones) * c5
            product ^= ((word >> np.uint64(6)) & ones) * c6
            product ^= ((word >> np.uint64(7)) & ones) * c7
            target[j] ^= product


@final
class Cpu(Kernels):
    """Compiled by numba for this machine's vector units; one thread."""

    name: ClassVar[str] = "cpu"

    def _gather(self, table: Elements, ids: Indices, out: Elements, column: int) -> None:
        _copy_rows(table, ids, out, column)

    def _scatter(self, table: Elements, ids: Indices, records: Elements, column: int) -> None:
        _put_rows(table, ids, records, column)

    def _change(self, table: Elements, ids: Indices, old: Elements, out: Elements, column: int) -> None:
        _change_rows(table, ids, old, out, column)

    def _distinct(self, ids: Indices, rows: RowSet, out: Indices) -> int:
        return _add_rows(ids, rows.seen, rows.fresh, rows.summary, out)

    def _forget(self, rows: RowSet, ids: Indices) -> None:
        _drop_rows(ids, rows.seen)

    def _xor(self, a: Words, b: Words, out: Words) -> None:
        np.bitwise_xor(a, b, out=out)  # numpy's own loop is vectorised and drops the lock.

    def _gather_words(self, src: Words, offsets: Indices, starts: Indices, out: Words) -> None:
        _pack(src, offsets, starts, out)

    def _scatter_words(self, dst: Words, offsets: Indices, starts: Indices, src: Words) -> None:
        _unpack(dst, offsets, starts, src)

    def _mul_add(self, dst: Words, offsets: Indices, starts: Indices, src: Words, weight: int) -> None:
        if weight == 1:
            _xor_spans(dst, offsets, starts, src)
        else:
            _multiply_spans(dst, offsets, starts, src, _CONSTANTS[weight])

    def _gather_rows(self, src: Words, offsets: Indices, out: Words) -> None:
        _pack(src, offsets, _starts(out), out.reshape(-1))

    def _scatter_rows(self, dst: Words, offsets: Indices, src: Words) -> None:
        _unpack(dst, offsets, _starts(src), src.reshape(-1))

    def _mul_add_rows(self, dst: Words, offsets: Indices, src: Words, weight: int) -> None:
        self._mul_add(dst, offsets, _starts(src), src.reshape(-1), weight)

    def _mul_add_block(self, dst: Words, src: Words, weight: int) -> None:
        if weight == 1:
            np.bitwise_xor(dst, src, out=dst)
        else:
            _multiply_spans(dst, _WHOLE, np.array((0, src.size)), src, _CONSTANTS[weight])

    def _dot(self, blocks: Sequence[Words], weights: NDArray[np.uint8], out: Words) -> None:
        for begin in range(0, out.size, _DOT_CHUNK_WORDS):
            chunk = slice(begin, begin + _DOT_CHUNK_WORDS)
            target = out[chunk]
            target[...] = 0
            for block, weight in zip(blocks, weights, strict=True):
                if weight:
                    self._mul_add_block(target, block[chunk], int(weight))


_WHOLE: Final = np.zeros(1, np.int64)


def _starts(rows: Words) -> Indices:
    count, width = rows.shape
    return np.arange(count + 1, dtype=np.int64) * width
