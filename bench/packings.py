"""Lossless packings of a step's deltas, for `bench.wire`: what they leave out, and what they cost.

A message is uint32 [m, w]: m records' values of one column (a weight, or an optimizer's state), old XOR new.
Loops are compiled by numba; LZ4 and Zstandard are the system's libraries, left out where they are missing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.uint32]
Bytes = NDArray[np.uint8]

ZSTD_LEVEL = 1
BLOCK_ROWS = 64


class Packing(NamedTuple):
    """One way to pack.

    Attributes:
        pack: (uint32 [m, w], read; uint8 [`bound`], overwritten) -> bytes written.
        unpack: (uint8, those bytes and at least 8 of any content more; uint32 [m, w], overwritten).
    """

    pack: Callable[[Values, Bytes], int]
    unpack: Callable[[Bytes, Values], None]


def bound(values: Values) -> int:
    """Bytes that are enough for whatever a packing makes of these values."""
    return values.nbytes + values.nbytes // 4 + 8 * len(values) + 1024


_compiled = numba.njit(nogil=True, cache=True)


@_compiled
def _pack_planes(values: Values, out: Bytes, rows: int) -> int:
    m, width = values.shape
    at = 0
    for first in range(0, m, rows):
        last = min(first + rows, m)
        used = np.uint32(0)
        for i in range(first, last):
            for j in range(width):
                used |= values[i, j]
        mask_at, mask = at, 0
        at += 1
        for plane in range(4):
            shift = np.uint32(8 * plane)
            if (used >> shift) & np.uint32(255):
                mask |= 1 << plane
                for i in range(first, last):
                    target = out[at : at + width]
                    for j in range(width):
                        target[j] = np.uint8(values[i, j] >> shift)
                    at += width
        out[mask_at] = mask
    return at


@_compiled
def _unpack_planes(packed: Bytes, out: Values, rows: int) -> None:
    m, width = out.shape
    at = 0
    for first in range(0, m, rows):
        last = min(first + rows, m)
        mask = packed[at]
        at += 1
        for i in range(first, last):
            for j in range(width):
                out[i, j] = 0
        for plane in range(4):
            shift = np.uint32(8 * plane)
            if (mask >> plane) & 1:
                for i in range(first, last):
                    source = packed[at : at + width]
                    for j in range(width):
                        out[i, j] |= np.uint32(source[j]) << shift
                    at += width


@_compiled
def _pack_bitmap(values: Values, out: Bytes) -> int:
    flat = values.reshape(-1)
    at = 0
    for i in range(0, flat.size, 2):
        word = np.uint64(flat[i])
        if i + 1 < flat.size:
            word |= np.uint64(flat[i + 1]) << np.uint64(32)
        mask_at, mask = at, 0
        at += 1
        for j in range(8):
            byte = np.uint8(word >> np.uint64(8 * j))
            out[at] = byte
            some = 1 if byte else 0
            at += some
            mask |= some << j
        out[mask_at] = mask
    return at


@_compiled
def _unpack_bitmap(packed: Bytes, out: Values) -> None:
    flat = out.reshape(-1)
    at = 0
    for i in range(0, flat.size, 2):
        mask = packed[at]
        at += 1
        word = np.uint64(0)
        for j in range(8):
            some = (mask >> j) & 1
            word |= np.uint64(packed[at] * some) << np.uint64(8 * j)
            at += some
        flat[i] = np.uint32(word)
        if i + 1 < flat.size:
            flat[i + 1] = np.uint32(word >> np.uint64(32))


@_compiled
def _pack_bits(values: Values, out: Bytes) -> int:
    m, width = values.shape
    head = (m + 3) // 4
    words = out[: out.size // 4 * 4].view(np.uint32)
    at = head
    for i in range(m):
        used = np.uint32(0)
        for j in range(width):
            used |= values[i, j]
        bits = 0
        while used:
            used >>= np.uint32(1)
            bits += 1
        out[i] = bits
        if bits == 32:
            words[at : at + width] = values[i]
            at += width
        elif bits:
            gathered, filled = np.uint64(0), 0
            for j in range(width):
                gathered |= np.uint64(values[i, j]) << np.uint64(filled)
                filled += bits
                if filled >= 32:
                    words[at] = np.uint32(gathered)
                    at += 1
                    gathered >>= np.uint64(32)
                    filled -= 32
            if filled:
                words[at] = np.uint32(gathered)
                at += 1
    return 4 * at


@_compiled
def _unpack_bits(packed: Bytes, out: Values) -> None:
    m, width = out.shape
    words = packed[: packed.size // 4 * 4].view(np.uint32)
    at = (m + 3) // 4
    for i in range(m):
        bits = packed[i]
        if bits == 32:
            out[i] = words[at : at + width]
            at += width
        elif bits == 0:
            out[i] = 0
        else:
            mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
            gathered, filled = np.uint64(0), 0
            for j in range(width):
                if filled < bits:
                    gathered |= np.uint64(words[at]) << np.uint64(filled)
                    at += 1
                    filled += 32
                out[i, j] = np.uint32(gathered & mask)
                gathered >>= np.uint64(bits)
                filled -= bits


def _planes(rows: int) -> Packing:
    return Packing(
        lambda values, out: _pack_planes(values, out, rows),
        lambda packed, out: _unpack_planes(packed, out, rows),
    )


def _libraries() -> dict[str, Packing]:
    found: dict[str, Packing] = {}
    for name, file, packing in (("lz4", "liblz4.so.1", _lz4), ("zstd", "libzstd.so.1", _zstd)):
        with contextlib.suppress(OSError):  # it is not installed here
            found[name] = packing(ctypes.CDLL(file))
    return found


def _address(array: NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _framed(
    compress: Callable[[Values, Bytes], int], decompress: Callable[[Bytes, int, Values], int]
) -> Packing:
    """A packing of a library that wants to be told how long its input is: 8 bytes before it say so."""

    def pack(values: Values, out: Bytes) -> int:
        size = compress(values, out[8:])
        if not 0 < size <= len(out):
            raise ValueError(f"{values.nbytes} bytes can't be compressed: {size}")
        out[:8].view(np.int64)[0] = size
        return 8 + size

    def unpack(packed: Bytes, out: Values) -> None:
        size = decompress(packed[8:], int(packed[:8].view(np.int64)[0]), out)
        if size != out.nbytes:
            raise ValueError(f"{size} of {out.nbytes} bytes can be decompressed")

    return Packing(pack, unpack)


def _lz4(library: ctypes.CDLL) -> Packing:
    return _framed(
        lambda values, out: library.LZ4_compress_default(
            _address(values), _address(out), values.nbytes, len(out)
        ),
        lambda packed, size, out: library.LZ4_decompress_safe(
            _address(packed), _address(out), size, out.nbytes
        ),
    )


def _zstd(library: ctypes.CDLL) -> Packing:
    library.ZSTD_compress.restype = library.ZSTD_decompress.restype = ctypes.c_size_t
    size_t = ctypes.c_size_t
    return _framed(
        lambda values, out: library.ZSTD_compress(
            _address(out), size_t(len(out)), _address(values), size_t(values.nbytes), ZSTD_LEVEL
        ),
        lambda packed, size, out: library.ZSTD_decompress(
            _address(out), size_t(out.nbytes), _address(packed), size_t(size)
        ),
    )


PACKINGS: Mapping[str, Packing] = {
    "row planes": _planes(1),
    "block planes": _planes(BLOCK_ROWS),
    "row bits": Packing(_pack_bits, _unpack_bits),
    "bitmap": Packing(_pack_bitmap, _unpack_bitmap),
    **_libraries(),
}
"""All packings that can be had here."""
