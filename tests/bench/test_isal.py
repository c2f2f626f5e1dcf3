"""ISA-L computes in the same field as we do; otherwise it would be no rival."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from bench.harness import isal
from ecemb.coding.code import Code, multiply


@pytest.fixture
def library() -> isal.Isal:
    try:
        return isal.load()
    except isal.IsalUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("size", [1, 31, 64, 1000])
def test_it_encodes_and_updates_with_our_coefficients(library: isal.Isal, size: int, seed: int):
    rng = np.random.default_rng(seed)
    code = Code(6, 4)
    rows = code.generator()[code.k :]
    data = [rng.integers(0, 256, size, np.uint8) for _ in range(code.k)]
    parity = [np.zeros(size, np.uint8) for _ in range(code.r)]
    added = [np.zeros(size, np.uint8) for _ in range(code.r)]
    tables = library.tables(rows)
    library.encode(tables, data, parity)()
    for block in range(code.k):
        library.update(tables, code.k, block, data[block], added)()
    for row, by_encoding, by_updating in zip(rows, parity, added, strict=True):
        expected = np.bitwise_xor.reduce(
            [multiply(weight, block) for weight, block in zip(row, data, strict=True)]
        )
        assert by_encoding.tobytes() == expected.tobytes()
        assert by_updating.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [1, 64, 100])
def test_it_updates_row_by_row(library: isal.Isal, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = Code(6, 4).generator()[4:]
    delta, places = rng.integers(0, 256, 3 * size, np.uint8), np.array([2, 0, 5]) * size
    parity = [rng.integers(0, 256, 7 * size, np.uint8) for _ in rows]
    expected = [whole.reshape(7, size).copy() for whole in parity]
    for row, whole in zip(rows, expected, strict=True):
        whole[[2, 0, 5]] ^= multiply(row[1], delta).reshape(3, size)
    library.update_rows(library.tables(rows), 4, 1, delta, parity, places)()
    for whole, wanted in zip(parity, expected, strict=True):
        assert whole.tobytes() == wanted.tobytes()
    with pytest.raises(ValueError, match="not all within parity"):
        library.update_rows(library.tables(rows), 4, 1, delta, parity, places + 2 * size)


def test_what_c_would_not_notice_is_refused(library: isal.Isal) -> None:
    tables = library.tables(np.ones((1, 2), np.uint8))
    block, short = np.zeros(64, np.uint8), np.zeros(63, np.uint8)
    with pytest.raises(ValueError, match="equally long"):
        library.encode(tables, [block, short], [block.copy()])
    with pytest.raises(ValueError, match="not for 3 coefficients"):
        library.encode(tables, [block] * 3, [block.copy()])
    with pytest.raises(ValueError, match="contiguous uint8"):
        library.encode(tables, [block, np.zeros(64, np.int8)], [block.copy()])
    with pytest.raises(ValueError, match="block 2 is no data block of 2"):
        library.update(tables, 2, 2, block, [block.copy()])


def test_where_it_is_missing_the_message_says_how_to_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    isal.load.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(isal.IsalUnavailable, match="apt-get install libisal2"):
        isal.load()
