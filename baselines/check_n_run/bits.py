"""Codes of a few bits, really packed: compiled loops over one row, which other compiled loops call.

A row of `width` codes of b bits is one little-endian number of ceil(width b / 8) bytes: code j is its bits
j b to (j + 1) b - 1, and what is left over in the last byte is 0. So 8 codes of 3 bits fill 3 bytes.

Must not know: what codes stand for.
"""

from __future__ import annotations

from typing import Final

import numba
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

WIDTHS: Final = (2, 3, 4, 8)
"""Bits of a code that there are loops for."""
GROUP: Final = 8
"""Codes that fill whole bytes at any number of bits; buffers of codes have a multiple of it."""

_compiled = numba.njit(nogil=True, cache=True)


def packed_bytes(width: int, bits: int) -> int:
    """Bytes of a row of `width` codes of `bits` bits."""
    return -(-width * bits // 8)


def padded(width: int) -> int:
    """Codes of a buffer for a row of `width` codes."""
    return -(-width // GROUP) * GROUP


@_compiled
def pack_row(codes: Bytes, bits: int, out: Bytes) -> None:
    """Packs one row.

    Args:
        codes: uint8 [`padded(width)`], each below 2^bits, and 0 from `width` on. Read.
        bits: one of `WIDTHS`.
        out: uint8 [`packed_bytes(width, bits)`], overwritten.
    """
    if bits == 8:
        for j in range(out.size):
            out[j] = codes[j]
    elif bits == 4:
        for j in range(out.size):
            out[j] = codes[2 * j] | (codes[2 * j + 1] << 4)
    elif bits == 2:
        for j in range(out.size):
            low = codes[4 * j] | (codes[4 * j + 1] << 2)
            out[j] = low | (codes[4 * j + 2] << 4) | (codes[4 * j + 3] << 6)
    else:
        whole = out.size // 3
        for group in range(whole):
            word = _word_of_eight(codes, 8 * group)
            for byte in range(3):
                out[3 * group + byte] = np.uint8((word >> np.uint32(8 * byte)) & np.uint32(255))
        if 3 * whole < out.size:
            word = _word_of_eight(codes, 8 * whole)
            for byte in range(out.size - 3 * whole):
                out[3 * whole + byte] = np.uint8((word >> np.uint32(8 * byte)) & np.uint32(255))


@_compiled
def unpack_row(packed: Bytes, bits: int, codes: Bytes) -> None:
    """Undoes `pack_row`.

    Args:
        packed: uint8 [`packed_bytes(width, bits)`]. Read.
        bits: one of `WIDTHS`.
        codes: uint8 [`padded(width)`], overwritten up to `width`, and further with what is left over.
    """
    if bits == 8:
        for j in range(packed.size):
            codes[j] = packed[j]
    elif bits == 4:
        for j in range(packed.size):
            codes[2 * j] = packed[j] & 15
            codes[2 * j + 1] = packed[j] >> 4
    elif bits == 2:
        for j in range(packed.size):
            for k in range(4):
                codes[4 * j + k] = (packed[j] >> (2 * k)) & 3
    else:
        for group in range((packed.size + 2) // 3):
            word = np.uint32(0)
            for byte in range(min(3, packed.size - 3 * group)):
                word |= np.uint32(packed[3 * group + byte]) << np.uint32(8 * byte)
            for k in range(8):
                codes[8 * group + k] = np.uint8((word >> np.uint32(3 * k)) & np.uint32(7))


@_compiled
def _word_of_eight(codes: Bytes, first: int) -> np.uint32:
    word = np.uint32(0)
    for k in range(8):
        word |= np.uint32(codes[first + k]) << np.uint32(3 * k)
    return word
