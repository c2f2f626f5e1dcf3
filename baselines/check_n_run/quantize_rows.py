"""Rows as codes and back: the compiled loops of `quantize`, over parts of a chunk of rows.

A uniform scheme keeps of a row a start b and a step s, and of each number x the code q = (x - b) / s, rounded
to the nearest of 0 .. top = 2^bits - 1; the number that comes back is b + s q. Symmetric: b = -s top / 2,
with s = 2 max|x| / top. Asymmetric: b = min x and s = (max x - b) / top. Adaptive: the range [min x, max x]
is shrunk before by a greedy search. K-means keeps 2^bits centroids of a row, and codes say which is nearest.

What is kept of a row is rounded to the type it is stored in first, and codes are for what it then is.

Must not know: tensors, threads.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import numba
import numpy as np
from numpy.typing import NDArray

from .bits import pack_row, unpack_row

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Real = Any
"""A float32, or a truth, of compiled code."""

SYMMETRIC: Final = 0
ASYMMETRIC: Final = 1
ADAPTIVE: Final = 2

_F32: Final = np.float32
_LEAST: Final = np.float32(np.finfo(np.float32).tiny)
"""The smallest normal float32: the inverse of what is smaller may be infinite."""
_HIGHEST: Final = np.int32(0x7FFFFFFF)
_LOWEST: Final = np.int32(-0x80000000)
_INFINITY: Final = np.int32(0x7F800000)
"""Its bits."""

_compiled = numba.njit(nogil=True, cache=True)
# Sums are added up in the fastest order, and what comes in here is finite.
_finite = numba.njit(nogil=True, cache=True, fastmath={"nnan", "nsz", "reassoc", "contract"})


@_compiled
def _stored(value: Real, half: bool) -> Real:
    """A float32 rounded to float16 to the nearest, or as it is."""
    x = _F32(value)
    if not half or x == 0:
        return x
    if abs(x) < _F32(2.0**-14):
        return _F32(np.rint(x * _F32(2.0**24)) * _F32(2.0**-24))
    word = x.view(np.uint32)
    odd = (word >> np.uint32(13)) & np.uint32(1)
    rounded = np.uint32((word + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000)).view(np.float32)
    if abs(rounded) > _F32(65504):
        return _F32(np.inf)
    return rounded


@_compiled
def _grid(low: Real, high: Real, top: Real, half: bool) -> tuple[Real, Real]:
    """The start and step, as they are stored, of even steps from low to high."""
    start = _stored(low, half)
    return start, _stored(max(high - start, _F32(0)) / top, half)


@_compiled
def _inverse(step: Real) -> Real:
    """What a difference is multiplied by to become a code; 0 if all codes are 0."""
    return _F32(1) / step if step >= _LEAST else _F32(0)


@_compiled
def _uniform_fits(low: Real, high: Real, start: Real, step: Real, top: Real) -> Real:
    """Whether every number between low and high comes back within (high - low) / top of itself."""
    exact = (high - low) / top
    if not (np.isfinite(exact) and np.isfinite(start) and np.isfinite(step * top)):
        return False
    if low == high:
        return start == low
    last = start + step * top
    return _LEAST <= step <= 2 * exact and start - low <= exact and high - last <= exact


@_compiled
def _symmetric_fits(high: Real, start: Real, step: Real, top: Real) -> Real:
    """Whether every number up to +-high comes back within 2 high / top of itself."""
    exact = high * (_F32(2) / top)
    return np.isfinite(step * top) and _LEAST <= step <= 2 * exact and high + start <= exact


@_compiled
def _ordered(word: Real) -> Real:
    """A float32's bits as an int32 of the same order, and back; NaN is beyond the infinities."""
    return np.int32(word ^ ((word >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_compiled
def _extremes(row: Floats) -> tuple[Real, Real, Real]:
    """Whether a row is finite, and its smallest and largest number.

    Of integers, since these are compared many at a time, and NaN with the others.
    """
    words = row.view(np.int32)
    low, high = _HIGHEST, _LOWEST
    for j in range(words.size):
        word = _ordered(words[j])
        low = min(low, word)
        high = max(high, word)
    finite = low > ~_INFINITY and high < _INFINITY
    return finite, np.int32(_ordered(low)).view(np.float32), np.int32(_ordered(high)).view(np.float32)


@_finite
def _losses(row: Floats, a: Real, s: Real, b: Real, t: Real, top: Real) -> tuple[Real, Real]:
    """Squared errors of a row under two starts and steps: a and s, b and t."""
    i, k = _inverse(s), _inverse(t)
    zero = _F32(0)
    first, second = zero, zero
    for j in range(row.size):
        x = row[j]
        q = min(max(np.rint((x - a) * i), zero), top)
        error = x - (q * s + a)
        first += error * error
        q = min(max(np.rint((x - b) * k), zero), top)
        error = x - (q * t + b)
        second += error * error
    return first, second


@_compiled
def _greedy(
    row: Floats, low: Real, high: Real, top: Real, half: bool, bins: int, moves: int
) -> tuple[Real, Real]:
    """The start and step of the least error seen while the range shrinks, from either end, by moves/bins."""
    move = (high - low) / _F32(bins)
    start, step = _grid(low, high, top, half)
    least, _ = _losses(row, start, step, start, step, top)
    for _ in range(moves):
        up, down = low + move, high - move
        a, s = _grid(up, high, top, half)
        b, t = _grid(low, down, top, half)
        raised, lowered = _losses(row, a, s, b, t, top)
        if raised < lowered:
            low = up
            if raised < least:
                least, start, step = raised, a, s
        else:
            high = down
            if lowered < least:
                least, start, step = lowered, b, t
    return start, step


@_finite
def _codes(row: Floats, start: Real, step: Real, top: Real, codes: Bytes) -> None:
    inverse, zero = _inverse(step), _F32(0)
    for j in range(row.size):
        codes[j] = np.uint8(np.int32(min(max(np.rint((row[j] - start) * inverse), zero), top)))


@functools.cache
def load_sums() -> None:
    """Loads the loops that add up in any order; called before the first encoding of a process.

    Compiled code that calls them has copies, which were optimised once more and add up in another order. All
    calls go to whichever is loaded first. Without this call that would be these loops in the process that
    compiles all, and the copies in one that finds all compiled: equal rows would get different codes.
    """
    row, number = numba.float32[::1], numba.float32
    _losses.compile((row, *[number] * 5))
    _codes.compile((row, *[number] * 3, numba.uint8[::1]))


@_compiled
def encode_uniform(
    rows: Floats,
    method: int,
    bits: int,
    half: bool,
    bins: int,
    moves: int,
    buffer: Bytes,
    out: Bytes,
    kept: Floats,
    fits: NDArray[np.bool_],
) -> None:
    """Encodes rows under a uniform scheme.

    Args:
        rows: float32 [m, width], width >= 1. Read.
        method: `SYMMETRIC`, `ASYMMETRIC` or `ADAPTIVE`.
        bits: of a code.
        half: whether what is kept of a row is to be stored as float16.
        bins: into which adaptive cuts a row's range.
        moves: by one of them, after which it ends.
        buffer: uint8 [`bits.padded(width)`], 0 from width on.
        out: uint8 [m, `bits.packed_bytes(width, bits)`], overwritten by the codes.
        kept: float32 [m, 1] of symmetric, and [m, 2] of the others: step, and start. Overwritten.
        fits: [m], overwritten: whether a row can be stored so. Codes of one that can't be mean nothing.
    """
    top = _F32(2**bits - 1)
    for i in range(rows.shape[0]):
        row = rows[i]
        fits[i], low, high = _extremes(row)
        start, step = _F32(0), _F32(0)
        if fits[i]:
            if method == SYMMETRIC:
                high = max(-low, high)
                step = _stored(high * (_F32(2) / top), half)
                start = -step * (top / _F32(2))
                fits[i] = high == 0 or _symmetric_fits(high, start, step, top)
            else:
                start, step = _grid(low, high, top, half)
                fits[i] = _uniform_fits(low, high, start, step, top)
                if method == ADAPTIVE and fits[i] and step > 0:
                    start, step = _greedy(row, low, high, top, half, bins, moves)
        if not fits[i]:
            start, step = _F32(0), _F32(0)
            buffer[: row.size] = 0
        else:
            _codes(row, start, step, top, buffer)
        pack_row(buffer, bits, out[i])
        kept[i, 0] = step
        if method != SYMMETRIC:
            kept[i, 1] = start


@_compiled
def decode_uniform(packed: Bytes, kept: Floats, bits: int, buffer: Bytes, out: Floats) -> None:
    """Undoes `encode_uniform`, whose arguments are meant; `out` is float32 [m, width], overwritten."""
    half_top = _F32(2**bits - 1) / _F32(2)
    for i in range(out.shape[0]):
        unpack_row(packed[i], bits, buffer)
        step = kept[i, 0]
        start = kept[i, 1] if kept.shape[1] == 2 else -step * half_top
        row = out[i]
        for j in range(row.size):
            row[j] = start + step * _F32(buffer[j])


@_compiled
def _lloyd(ordered: Floats, centroids: Floats, iterations: int) -> None:
    """Moves ascending centroids to the means of what is nearest: runs, as the numbers are ascending as well.

    One of those that nothing is nearest to goes to the number that is farthest from its own, each time.
    """
    sums = np.zeros(ordered.size + 1)
    for j in range(ordered.size):
        sums[j + 1] = sums[j] + ordered[j]
    for _ in range(iterations):
        changed = False
        first, empty = 0, -1
        far, farthest = ordered[0], _F32(0)
        for c in range(centroids.size):
            stop = ordered.size
            if c + 1 < centroids.size:
                middle = (np.float64(centroids[c]) + np.float64(centroids[c + 1])) / 2
                stop = first
                while stop < ordered.size and ordered[stop] <= middle:
                    stop += 1
            if stop > first:
                mean = _F32((sums[stop] - sums[first]) / (stop - first))
                changed |= mean != centroids[c]
                centroids[c] = mean
                for j in (first, stop - 1):
                    if abs(ordered[j] - mean) > farthest:
                        far, farthest = ordered[j], abs(ordered[j] - mean)
            else:
                empty = c
            first = stop
        if empty >= 0 and farthest > 0:
            centroids[empty] = far
            centroids.sort()
            changed = True
        if not changed:
            return


@_compiled
def encode_kmeans(
    rows: Floats,
    bits: int,
    half: bool,
    iterations: int,
    buffer: Bytes,
    out: Bytes,
    kept: Floats,
    fits: NDArray[np.bool_],
) -> None:
    """Encodes rows by their own 2^bits centroids, which begin evenly over the row's range.

    Args:
        rows: as in `encode_uniform`.
        bits: as there.
        half: as there.
        iterations: at most.
        buffer: as there.
        out: as there.
        kept: float32 [m, 2^bits], the centroids, ascending. Overwritten.
        fits: as there.
    """
    top = _F32(2**bits - 1)
    for i in range(rows.shape[0]):
        row = rows[i]
        centroids = kept[i]
        fits[i], low, high = _extremes(row)
        if fits[i]:
            start, step = _grid(low, high, top, half)
            fits[i] = _uniform_fits(low, high, start, step, top)
        buffer[: row.size] = 0
        if not fits[i]:
            centroids[:] = 0
        else:
            for c in range(centroids.size):
                centroids[c] = low + (high - low) / top * _F32(c)
            _lloyd(np.sort(row), centroids, iterations)
            for c in range(centroids.size):
                centroids[c] = _stored(centroids[c], half)
            for c in range(centroids.size - 1):
                middle = centroids[c] / _F32(2) + centroids[c + 1] / _F32(2)
                for j in range(row.size):
                    buffer[j] += np.uint8(row[j] > middle)
        pack_row(buffer, bits, out[i])


@_compiled
def decode_kmeans(packed: Bytes, kept: Floats, bits: int, buffer: Bytes, out: Floats) -> None:
    """Undoes `encode_kmeans`, whose arguments are meant; `out` is float32 [m, width], overwritten."""
    for i in range(out.shape[0]):
        unpack_row(packed[i], bits, buffer)
        row = out[i]
        for j in range(row.size):
            row[j] = kept[i, buffer[j]]
