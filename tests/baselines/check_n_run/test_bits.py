"""Codes are packed as the module says: a row is one little-endian number."""

from __future__ import annotations

import numpy as np
import pytest

from baselines.check_n_run.bits import WIDTHS, pack_row, packed_bytes, padded, unpack_row


def as_one_number(codes: np.ndarray, bits: int) -> bytes:
    number = sum(int(code) << (bits * j) for j, code in enumerate(codes))
    return number.to_bytes(packed_bytes(len(codes), bits), "little")


@pytest.mark.parametrize("bits", WIDTHS)
def test_rows_of_all_widths_are_one_number(bits: int) -> None:
    random = np.random.default_rng(bits)
    for width in [*range(1, 35), 128]:
        codes = np.zeros(padded(width), np.uint8)
        codes[:width] = random.integers(0, 2**bits, width)
        packed = np.full(packed_bytes(width, bits), 255, np.uint8)
        pack_row(codes, bits, packed)
        assert packed.tobytes() == as_one_number(codes[:width], bits), width
        back = np.full(padded(width), 255, np.uint8)
        unpack_row(packed, bits, back)
        assert (back[:width] == codes[:width]).all(), width


def test_eight_codes_of_three_bits_fill_three_bytes() -> None:
    assert [packed_bytes(8, bits) for bits in WIDTHS] == [2, 3, 4, 8]
    assert [packed_bytes(9, bits) for bits in WIDTHS] == [3, 4, 5, 9]
