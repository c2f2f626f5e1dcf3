"""The contract of `ecemb.kernels.contract.Kernels`, held by every implementation.

What is expected is written out here once more, in plain loops, with the products of galois, so that
the reference kernels are under test as well. Sizes are odd on purpose: 0, 1, one less and one more
than a vector or a chunk.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import galois
import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.errors import EcembError, KernelError, KernelUnavailable
from ecemb.kernels import contract, cpu
from ecemb.kernels import contract as kernels
from ecemb.kernels.contract import Columns, Kernels, RowSet
from ecemb.kernels.cpu import Cpu
from ecemb.kernels.threads import Team
from support.each import each

FIELD = galois.GF(2**8, irreducible_poly=0x11D)
PRODUCTS = np.asarray(FIELD.elements[:, None] * FIELD.elements[None, :], np.uint8)
ELEMENTS = [np.uint8, np.uint16, np.uint32, np.uint64]
SIZES = [0, 1, 2, 3, 4, 7, 8, 9, 31, 32, 33, 8193, 131_071, 131_072, 131_073]

Words = NDArray[np.uint64]

FAR, NEAR = 2**63 - 1, -(2**63)


def shared() -> Cpu:
    """Kernels of three threads that share even a few bytes."""
    work = Cpu(threads=3)
    work._team = Team(3, least_bytes=1)
    return work


WORKS = {
    "reference": kernels.get_kernels("reference"),
    **{f"cpu, {way.way} of {way.vector_bytes} bytes": Cpu(way) for way in cpu.available()},
    "cpu, 3 threads": shared(),
}
if importlib.util.find_spec("torch"):  # `make arm` has none
    WORKS["cuda"] = importlib.import_module("bench.questions.gpu.cuda").Cuda()


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "cuda")) for name in WORKS]  # interpreted
)
def work(request: pytest.FixtureRequest) -> Kernels:
    return WORKS[request.param]


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def draw(rng: np.random.Generator, *shape: int, dtype: Any = np.uint64) -> Any:
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def times(weight: int, words: Words) -> Words:
    return PRODUCTS[weight][words.view(np.uint8)].view(np.uint64)


def ids(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


# Names.


def test_each_goes_by_its_name() -> None:
    assert {"reference", "cpu"} <= set(kernels.NAMES)
    for name in kernels.NAMES:
        assert kernels.get_kernels(name).name == name
        assert kernels.get_kernels(name) is kernels.get_kernels(name)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(KernelUnavailable, match=r"no kernels named 'gpu'; .*'reference', 'cpu'"):
        kernels.get_kernels("gpu")


def test_kernels_that_cannot_be_imported_are_never_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    for name in ("cpu", "loops", "gf_products", "llvm"):
        monkeypatch.delitem(sys.modules, f"ecemb.kernels.{name}", raising=False)
    kernels._cached.cache_clear()
    with pytest.raises(KernelUnavailable, match=r"'cpu' can't be imported here: .*llvmlite"):
        kernels.get_kernels("cpu")
    assert kernels.get_kernels("reference").name == "reference"


# Rows.

Sizes = tuple[int, int, int, int, int]  # rows, table's width, ids, record's width, column
ROWS = [
    (1, 1, 1, 1, 0),
    (5, 3, 0, 8, 5),
    (5, 0, 4, 8, 3),
    (0, 3, 0, 3, 0),
    (7, 1, 9, 4, 3),
    (7, 5, 20, 5, 0),
    (100, 16, 33, 24, 4),
    (100, 65, 101, 80, 13),
]


def over_rows(test: Callable[..., None]) -> Callable[..., None]:
    return each("dtype", ELEMENTS)(each("sizes", ROWS)(test))


@over_rows
def test_scatter(work: Kernels, rng: np.random.Generator, dtype: Any, sizes: Sizes) -> None:
    rows, width, count, record, column = sizes
    table, records = draw(rng, rows, width, dtype=dtype), draw(rng, count, record, dtype=dtype)
    chosen = rng.integers(0, max(rows, 1), count)  # Repeats included: the last one stays.
    expected, before = table.copy(), records.copy()
    for i, row in enumerate(chosen):
        for j in range(width):
            expected[row, j] = records[i, column + j]
    work.scatter_(table, chosen, records, column)
    assert table.tobytes() == expected.tobytes()
    assert records.tobytes() == before.tobytes()


def test_the_last_record_of_a_repeated_row_stays(work: Kernels) -> None:
    table = np.zeros((3, 2), np.uint32)
    work.scatter_(table, ids(1, 2, 1), np.arange(6, dtype=np.uint32).reshape(3, 2), 0)
    assert table.tolist() == [[0, 0], [4, 5], [2, 3]]


# Records.

RECORDS: list[list[tuple[Any, int]]] = [  # of each column its type, and how many of them
    [],
    [(np.uint8, 1)],
    [(np.uint16, 65)],
    [(np.uint32, 16), (np.uint32, 0), (np.uint16, 1)],
    [(np.uint64, 32), (np.uint32, 1)],
    [(np.uint32, 25), (np.uint32, 25)],
    [(np.uint16, 3), (np.uint8, 7), (np.uint8, 128)],
    [(np.uint8, 1029), (np.uint8, 2)],
]


def columns_of(rng: np.random.Generator, rows: int, kinds: list[tuple[Any, int]]) -> Columns:
    parts: list[tuple[Any, int]] = []
    at = 0
    for dtype, width in kinds:
        column = draw(rng, rows, width, dtype=dtype)
        parts.append((column, at // column.itemsize))
        at += width * column.itemsize
    return Columns(rows, parts)


@each(("rows", "count"), [(0, 0), (1, 1), (50, 0), (50, 1), (50, 2), (50, 100)])
@each("kinds", RECORDS)
def test_records(
    work: Kernels, rng: np.random.Generator, kinds: list[tuple[Any, int]], rows: int, count: int
) -> None:
    columns = columns_of(rng, rows, kinds)
    chosen = rng.integers(0, max(rows, 1), count)
    before = [column.tobytes() for column, _ in columns.parts]
    expected = np.zeros((count, columns.words * 8), np.uint8)
    for i, row in enumerate(chosen):
        record = b"".join(column[row].tobytes() for column, _ in columns.parts)
        expected[i, : len(record)] = np.frombuffer(record, np.uint8)
    out = draw(rng, count, columns.words)
    work.gather_records(columns, chosen, out)
    assert out.tobytes() == expected.tobytes()

    old = out.copy()
    for column, _ in columns.parts:
        column[...] = draw(rng, *column.shape, dtype=column.dtype)
    changed, new = draw(rng, count, columns.words), draw(rng, count, columns.words)
    work.change_records(columns, chosen, old, changed)
    work.gather_records(columns, chosen, new)
    assert changed.tobytes() == (old ^ new).tobytes()
    assert old.tobytes() == expected.tobytes()
    if kinds and rows > 1:
        assert [column.tobytes() for column, _ in columns.parts] != before


def test_columns_of_one_table(rng: np.random.Generator) -> None:
    for rows, parts, message in (
        (5, [(t(5, 2), 0), (t(4, 1), 2)], r"column 1 has 4 rows .* 5"),
        (5, [(t(5, 2), 0), (t(5, 1), 3)], r"column 1 .* begins at byte 12; .* byte 8"),
        (5, [(t(5, 2, np.float32), 0)], r"column 0 has .* float32"),
    ):
        with pytest.raises(KernelError, match=message):
            Columns(rows, parts)


# Sets of rows.


def add(work: Kernels, rows: RowSet, chosen: NDArray[np.int64]) -> list[int]:
    """Calls `distinct`, and checks what holds after every call."""
    out = np.full(chosen.size + 2, -7, np.int64)
    before = chosen.copy()
    count = work.distinct(chosen, rows, out)
    assert (out[count:] == -7).all()
    assert chosen.tobytes() == before.tobytes()
    return out[:count].tolist()


def members(rows: RowSet) -> list[int]:
    return np.flatnonzero(np.unpackbits(rows.seen.view(np.uint8), bitorder="little")).tolist()


@each("size", [0, 1, 63, 64, 65, 4095, 4096, 4097, 300_000])
def test_rows_are_new_once(work: Kernels, rng: np.random.Generator, size: int) -> None:
    rows, known = RowSet(size), set[int]()
    for count in (0, 1, 7, 200, 1000):
        chosen = rng.integers(0, max(size, 1), count if size else 0)
        assert add(work, rows, chosen) == sorted(set(chosen.tolist()) - known)
        known |= set(chosen.tolist())
        assert members(rows) == sorted(known)
        forgotten = rng.permutation(
            np.concatenate([chosen[::3], rng.integers(0, max(size, 1), min(size, 5))])
        )
        work.forget_(rows, forgotten)
        known -= set(forgotten.tolist())
        assert members(rows) == sorted(known)


@each("size", [1, 64, 500, 5000])
def test_ascending_rows_are_new_once(work: Kernels, rng: np.random.Generator, size: int) -> None:
    """Threads cut them where a word of the set begins, also where most rows are known."""
    rows, known = RowSet(size), set[int]()
    for share in (0.02, 0.3, 0.9, 1):
        chosen = np.flatnonzero(rng.random(size) < share)
        assert add(work, rows, chosen) == sorted(set(chosen.tolist()) - known)
        known |= set(chosen.tolist())
        gone = np.flatnonzero(rng.random(size) < 0.5)
        work.forget_(rows, gone)
        known -= set(gone.tolist())
        assert members(rows) == sorted(known)


def test_rows_of_one_word_are_new_once(work: Kernels, rng: np.random.Generator) -> None:
    """However many threads there are, one has the word; and rows beside it stay as they are."""
    rows = RowSet(640)
    assert add(work, rows, np.array([5, 639])) == [5, 639]
    for chosen in (np.arange(128, 192), rng.permutation(np.arange(64, 128)), np.repeat([200, 300], 50)):
        known = set(members(rows))
        assert add(work, rows, chosen) == sorted(set(chosen.tolist()) - known)
        assert set(members(rows)) == known | set(chosen.tolist())


def test_first_and_last_rows_are_rows(work: Kernels) -> None:
    rows = RowSet(4097)
    assert add(work, rows, ids(4096, 0, 4096, 4095, 63, 64)) == [0, 63, 64, 4095, 4096]
    assert add(work, rows, np.arange(4097)) == [
        row for row in range(4097) if row not in (0, 63, 64, 4095, 4096)
    ]
    work.forget_(rows, np.arange(4097))
    assert not rows.seen.any()


@each("look_words", [1, 3, 1 << 14])
@each("size", [0, 1, 63, 64, 65, 640, 1000])
def test_a_set_answers_as_a_row_of_booleans_does(
    work: Kernels, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, size: int, look_words: int
) -> None:
    monkeypatch.setattr(contract, "_LOOK_WORDS", look_words)
    for share in (0.0, 0.1, 0.9, 0.99, 1.0):
        expected = rng.random(size) < share
        if share == 0.99:
            expected[: size * 7 // 8] = True  # whole words, then some that aren't
        rows = RowSet(size)
        add(work, rows, np.flatnonzero(expected))
        asked = rng.integers(0, max(size, 1), 200 if size else 0)
        assert np.array_equal(rows.has(asked), expected[asked])
        for first in {0, 1, 63, 64, 65, size // 2, size, size + 1, size + 64}:
            absent = np.flatnonzero(~expected[first:])
            assert rows.first_absent(first) == (first + int(absent[0]) if len(absent) else size)
            for stop in {first, first + 1, first + 64, size}:
                if first <= stop <= size:
                    assert rows.count(first, stop) == np.count_nonzero(expected[first:stop])


@each("wrong", [-1, 65, FAR, NEAR])
def test_a_set_refuses_what_is_no_row_of_it(work: Kernels, wrong: int) -> None:
    rows, out = RowSet(65), ids(5, 5, 5)
    add(work, rows, ids(64))
    for call, operation in (
        (lambda: work.distinct(ids(1, 2, wrong), rows, out), "distinct"),
        (lambda: work.forget_(rows, ids(64, 2, wrong)), "forget_"),
    ):
        with pytest.raises(KernelError, match=rf"^{operation}: ids\[2\] = {wrong} is .* set, which has 65"):
            call()
        assert members(rows) == [64]
    assert out.tolist() == [5, 5, 5]


# Words.


# rows, words of each
PLACES = [(0, 3), (4, 0), (1, 1), (1, 201), (9, 5), (40, 8), (50, 1), (33, 16), (20, 17), (7, 63), (5, 129)]


def places(rng: np.random.Generator, size: int, count: int, width: int) -> NDArray[np.int64]:
    """Random offsets of rows of `width` words within `size`, the first and the last possible one included."""
    offsets = rng.integers(0, size - width, count, endpoint=True)
    offsets[:1], offsets[1:2] = 0, size - width
    return rng.permutation(offsets)


@each(("count", "width"), PLACES)
def test_gather_rows(work: Kernels, rng: np.random.Generator, count: int, width: int) -> None:
    src, out = draw(rng, 201), draw(rng, count, width)
    offsets = places(rng, src.size, count, width)
    expected = out.copy()
    for i, offset in enumerate(offsets):
        for j in range(width):
            expected[i, j] = src[offset + j]
    work.gather_rows(src, offsets, out)
    assert out.tobytes() == expected.tobytes()


@each("weight", [0, 1, 2, 0x1D, 0x80, 255, np.uint8(200), np.int64(3)])
@each(("count", "width"), PLACES)
def test_mul_add_rows(work: Kernels, rng: np.random.Generator, count: int, width: int, weight: Any) -> None:
    dst, src = draw(rng, 201), draw(rng, count, width)
    offsets = places(rng, dst.size, count, width)  # They overlap: they add up.
    expected, weighted = dst.copy(), times(int(weight), src)
    for i, offset in enumerate(offsets):
        for j in range(width):
            expected[offset + j] ^= weighted[i, j]
    work.mul_add_rows_(dst, offsets, src, weight)
    assert dst.tobytes() == expected.tobytes()


@each("weight", [1, 2, 255])
@each(("count", "width"), PLACES)
def test_update_rows(work: Kernels, rng: np.random.Generator, count: int, width: int, weight: int) -> None:
    dst, src, saved = draw(rng, 201), draw(rng, count, width), draw(rng, 2, width + 3)
    offsets = places(rng, dst.size, count, width)  # they overlap, so the order of rows shows
    first = int(rng.integers(-1, 9))
    expected, kept, mark = dst.copy(), saved.copy(), ids(first)
    for i, offset in enumerate(offsets):
        kept[(first + 1 + i) % 2, :width] = expected[offset : offset + width]
        expected[offset : offset + width] ^= times(weight, src[i])
    work.update_rows_(dst, offsets, src, weight, saved, mark)
    assert (dst.tobytes(), saved.tobytes()) == (expected.tobytes(), kept.tobytes())
    assert mark.tolist() == [first + count]


@each("weight", [1, 2, 255])
@each("edges", [(0, 9), (0, 4, 9), (0, 0, 9), (0, 2, 2, 7, 9)])
def test_update_lanes(work: Kernels, rng: np.random.Generator, edges: tuple[int, ...], weight: int) -> None:
    """Each lane keeps a journal of its own."""
    lanes, width = len(edges) - 1, 5
    dst, src, saved = draw(rng, 201), draw(rng, 9, width), draw(rng, lanes, 2, width + 3)
    offsets = np.sort(rng.choice(196 // width, 9, replace=False)) * width
    marks = np.tile(np.arange(10, 10 + lanes)[:, None], (1, 3))
    expected, kept = dst.copy(), saved.copy()
    for lane in range(lanes):
        mark, part = ids(10 + lane), slice(edges[lane], edges[lane + 1])
        work.update_rows_(expected, offsets[part], src[part], weight, kept[lane], mark)
    work.update_lanes_(dst, offsets, src, weight, edges, saved, marks)
    assert (dst.tobytes(), saved.tobytes()) == (expected.tobytes(), kept.tobytes())
    assert marks[:, 0].tolist() == [10 + i + b - a for i, (a, b) in enumerate(itertools.pairwise(edges))]
    assert marks[:, 1].tolist() == list(range(10, 10 + lanes))


def test_a_repeated_offset_adds_up(work: Kernels) -> None:
    dst = np.zeros(3, np.uint64)
    work.mul_add_rows_(dst, ids(1, 1, 1), np.array([[3], [5], [9]], np.uint64), 1)
    assert dst.tolist() == [0, 3 ^ 5 ^ 9, 0]


def test_all_products(work: Kernels, rng: np.random.Generator) -> None:
    """Every weight with every byte, at every place within a word."""
    bytes_ = np.arange(256, dtype=np.uint8)
    src = np.concatenate([np.roll(bytes_, shift) for shift in range(8)]).view(np.uint64)
    for weight in range(256):
        dst = draw(rng, src.size)
        expected = dst ^ times(weight, src)
        work.mul_add_block_(dst, src, weight)
        assert dst.tobytes() == expected.tobytes(), weight


@each("weight", [0, 1, 0xB7, np.uint8(200), np.int64(2)])
@each("size", SIZES)
def test_mul_add_block(work: Kernels, rng: np.random.Generator, size: int, weight: Any) -> None:
    dst, src = draw(rng, size), draw(rng, size)
    expected = dst ^ times(int(weight), src)
    work.mul_add_block_(dst, src, weight)
    assert dst.tobytes() == expected.tobytes()


@each("weights", [[], [0], [1], [7], [1, 1, 1], [0, 1, 2, 255, 0x8E]])
@each("size", SIZES)
def test_dot(work: Kernels, rng: np.random.Generator, size: int, weights: list[int]) -> None:
    combines(work, rng, size, np.array([weights], np.uint8))


@each("outs", range(11))
def test_dot_to_many(work: Kernels, rng: np.random.Generator, outs: int) -> None:
    for size, blocks in ((0, 2), (37, 0), (1, 3), (333, 5)):
        combines(work, rng, size, draw(rng, outs, blocks, dtype=np.uint8))


def combines(work: Kernels, rng: np.random.Generator, size: int, weights: NDArray[np.uint8]) -> None:
    blocks, outs = ([draw(rng, size) for _ in range(count)] for count in weights.shape[::-1])
    before = [block.copy() for block in blocks]
    work.dot(blocks, weights, outs)
    for row, out in zip(weights.tolist(), outs, strict=True):
        expected = np.zeros(size, np.uint64)
        for weight, block in zip(row, before, strict=True):
            expected ^= times(weight, block)
        assert out.tobytes() == expected.tobytes()
    assert all(map(np.array_equal, blocks, before))


def test_a_block_may_be_named_twice(work: Kernels, rng: np.random.Generator) -> None:
    block, out = draw(rng, 9), draw(rng, 9)
    work.dot([block, block], np.array([[6, 5]], np.uint8), [out])
    assert out.tobytes() == times(3, block).tobytes()


# What holds for all of them.


def test_what_is_only_read_may_be_read_only(work: Kernels, rng: np.random.Generator) -> None:
    table, words, out = draw(rng, 4, 3), draw(rng, 12), np.zeros(12, np.uint64)
    offsets, rows = ids(0, 6), words.reshape(2, 6)
    for array in (table, words, rows, offsets):
        array.flags.writeable = False
    work.gather_records(Columns(4, [(table, 0)]), offsets[:1], out.reshape(4, 3)[:1])
    work.scatter_(out.reshape(4, 3), offsets[:1], table[:1], 0)
    work.gather_rows(words, offsets, out.reshape(2, 6))
    work.mul_add_rows_(out, offsets, rows, 2)
    work.mul_add_block_(out, words, 2)
    assert out.tobytes() == words.tobytes()
    work.dot([words], np.full((1, 1), 2, np.uint8), [out])
    assert out.tobytes() == times(2, words).tobytes()


def test_threads_may_share_what_they_read(work: Kernels, rng: np.random.Generator) -> None:
    src = draw(rng, 5000)
    outputs = [np.zeros_like(src) for _ in range(8)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work.mul_add_block_, outputs, [src] * 8, range(8)))
    for weight, out in enumerate(outputs):
        assert out.tobytes() == times(weight, src).tobytes()


def test_one_row_is_new_once(work: Kernels) -> None:
    rows = RowSet(130)
    for row in (0, 63, 64, 129):
        assert rows.add_(row)
        assert not rows.add_(row)
    assert add(work, rows, ids(129, 1, 64)) == [1]
    assert not rows.add_(1)
    assert members(rows) == [0, 1, 63, 64, 129]
    for wrong in (-1, 130):
        with pytest.raises(KernelError, match=f"add_: {wrong} is not a row .* 130"):
            rows.add_(wrong)
    assert members(rows) == [0, 1, 63, 64, 129]


def test_new_rows_of_a_large_set_are_sorted(work: Kernels, rng: np.random.Generator) -> None:
    size = (1 << 24) + 100
    rows = RowSet(size)
    chosen = np.concatenate([rng.integers(0, size, 500), [size - 1, 0, 255, 256, 65_536], [size - 1]])
    assert add(work, rows, chosen) == sorted(set(chosen.tolist()))


def unaligned(size: int) -> Words:
    return np.zeros(size * 8 + 1, np.uint8)[1:].view(np.uint64)


OVER = np.zeros(16, np.uint64)  # Parts of it overlap.


def w(size: int) -> Words:
    return np.zeros(size, np.uint64)


def t(rows: int, width: int, dtype: Any = np.uint32) -> Any:
    return np.zeros((rows, width), dtype)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


ROW_REFUSALS: dict[str, tuple[tuple[Any, ...], str]] = {
    "id past the end": ((t(5, 2), ids(0, 4, 5), t(3, 2), 0), r"ids\[2\] = 5 .* has 5"),
    "id negative": ((t(5, 2), ids(0, -1), t(2, 2), 0), r"ids\[1\] = -1"),
    "id far": ((t(5, 2), ids(FAR), t(1, 2), 0), rf"ids\[0\] = {FAR}"),
    "id near": ((t(5, 2), ids(NEAR), t(1, 2), 0), rf"ids\[0\] = {NEAR}"),
    "no rows": ((t(0, 2), ids(0), t(1, 2), 0), r"ids\[0\] = 0 .* has 0"),
    "column negative": ((t(5, 2), ids(0), t(1, 4), -1), r"column -1"),
    "column too far": ((t(5, 2), ids(0), t(1, 4), 3), r"2 columns from column 3 .* 4"),
    "too narrow": ((t(5, 5), ids(0), t(1, 4), 0), r"5 columns from column 0 .* 4"),
    "too few records": ((t(5, 2), ids(0, 1), t(1, 2), 0), r"1 rows; .* 2 ids"),
    "too many records": ((t(5, 2), ids(0, 1), t(3, 2), 0), r"3 rows; .* 2 ids"),
    "other dtype": ((t(5, 2), ids(0), t(1, 2, np.uint16), 0), r"uint16; it has to be uint32"),
    "float": ((t(5, 2, np.float32), ids(0), t(1, 2, np.float32), 0), r"table has .* float32"),
    "int ids": ((t(5, 2), np.zeros(1, np.int32), t(1, 2), 0), r"ids has the dtype int32"),
    "ids 2d": ((t(5, 2), np.zeros((1, 1), np.int64), t(1, 2), 0), r"ids has the shape \[1, 1\]"),
    "table 1d": ((np.zeros(5, np.uint32), ids(0), t(1, 2), 0), r"table has the shape \[5\]"),
    "a list": ((t(5, 2), [0], t(1, 2), 0), r"ids has to be a numpy array, not list"),
    "strided": ((t(5, 4)[:, ::2], ids(0), t(1, 2), 0), r"table has to be C-contiguous"),
    "other byte order": ((t(5, 2, ">u4"), ids(0), t(1, 2, ">u4"), 0), r"table has .* >u4"),
}


@each("case", ROW_REFUSALS)
def test_rows_that_break_the_contract(work: Kernels, case: str) -> None:
    arguments, message = ROW_REFUSALS[case]
    refused(work, "scatter_", arguments, message)


TABLE = Columns(5, [(t(5, 2), 0), (t(5, 1), 2)])

RECORD_REFUSALS: dict[str, tuple[tuple[Any, ...], str]] = {
    "id past the end": ((ids(0, 5), w(4).reshape(2, 2)), r"ids\[1\] = 5 .* has 5"),
    "id negative": ((ids(-1), w(2).reshape(1, 2)), r"ids\[0\] = -1"),
    "too few records": ((ids(0, 1), w(2).reshape(1, 2)), r"shape \[1, 2\]; it has to be \[2, 2\]"),
    "too narrow": ((ids(0), w(1).reshape(1, 1)), r"shape \[1, 1\]; it has to be \[1, 2\]"),
    "int ids": ((np.zeros(1, np.int32), w(2).reshape(1, 2)), r"ids has the dtype int32"),
    "signed words": ((ids(0), t(1, 2, np.int64)), r"has the dtype int64"),
    "strided": ((ids(0, 1), w(8).reshape(2, 4)[:, :2]), r"C-contiguous"),
    "unaligned": ((ids(0), unaligned(2).reshape(1, 2)), r"aligned"),
    "read-only": ((ids(0), read_only(w(2).reshape(1, 2))), r"out is written to, but the array is read-only"),
}


@each("case", RECORD_REFUSALS)
def test_records_that_break_the_contract(work: Kernels, case: str) -> None:
    (chosen, out), message = RECORD_REFUSALS[case]
    refused(work, "gather_records", (TABLE, chosen, out), message)
    refused(work, "change_records", (TABLE, chosen, out.copy(), out), message)


def test_records_are_not_written_to_their_table_or_to_what_is_read(work: Kernels) -> None:
    words = np.zeros((5, 2), np.uint64)
    columns = Columns(5, [(words, 0)])
    refused(work, "gather_records", (columns, ids(0), words[1:2]), "overlaps")
    refused(work, "change_records", (TABLE, ids(0), words[:1], words[:1]), "overlaps")


PLACE_REFUSALS: dict[str, tuple[tuple[Any, ...], str]] = {
    # sparse words, offsets, rows
    "past the end": ((w(9), ids(0, 8), w(4).reshape(2, 2)), r"row 1 of 2 words .* = 8 .* 9 words"),
    "too long": ((w(9), ids(0), w(10).reshape(1, 10)), r"row 0 of 10 words"),
    "negative": ((w(9), ids(-1), w(2).reshape(1, 2)), r"offsets\[0\] = -1"),
    "far": ((w(9), ids(FAR), w(2).reshape(1, 2)), rf"= {FAR} is"),
    "near": ((w(9), ids(NEAR), w(2).reshape(1, 2)), rf"= {NEAR} is"),
    "empty but outside": ((w(9), ids(10), w(0).reshape(1, 0)), r"row 0 of 0 words .* = 10"),
    "too few rows": ((w(9), ids(0, 1), w(2).reshape(1, 2)), r"has 1 rows; .* 2 offsets"),
    "int offsets": ((w(9), np.zeros(1, np.int32), w(2).reshape(1, 2)), r"offsets has the dtype int32"),
    "signed words": ((np.zeros(9, np.int64), ids(0), w(2).reshape(1, 2)), r"has the dtype int64"),
    "flat": ((w(9), ids(0), w(2)), r"has the shape \[2\]; .* 2 dimension"),
    "strided": ((w(9), ids(0, 1), w(8).reshape(2, 4)[:, :2]), r"C-contiguous and aligned"),
    "unaligned": ((unaligned(9), ids(0), w(2).reshape(1, 2)), r"C-contiguous and aligned"),
    "overlapping": ((OVER[:9], ids(0), OVER[8:10].reshape(1, 2)), r"memory overlaps"),
    "None": ((None, ids(0), w(2).reshape(1, 2)), r"not NoneType"),
}


@each("operation", ["gather_rows", "mul_add_rows_"])
@each("case", PLACE_REFUSALS)
def test_places_that_break_the_contract(work: Kernels, operation: str, case: str) -> None:
    arguments, message = PLACE_REFUSALS[case]
    refused(work, operation, (*arguments, 3) if operation == "mul_add_rows_" else arguments, message)


def b(*weights: int) -> NDArray[np.uint8]:
    return np.array(weights, np.uint8)


def lanes(**changes: Any) -> tuple[Any, ...]:
    """Arguments of `update_lanes_`, two lanes of a row each, with changes."""
    fields = {
        "dst": w(6),
        "offsets": ids(0, 2),
        "src": w(4).reshape(2, 2),
        "weight": 3,
        "edges": (0, 1, 2),
        "saved": w(8).reshape(2, 2, 2),
        "marks": np.zeros((2, 4), np.int64),
    }
    return tuple((fields | changes).values())


REFUSALS: list[tuple[str, tuple[Any, ...], str]] = [
    ("scatter_", (read_only(t(5, 2)), ids(0), t(1, 2), 0), r"table is written to, .* read-only"),
    ("scatter_", (OVER.reshape(8, 2), ids(0), OVER[:2].reshape(1, 2), 0), r"memory overlaps"),
    ("distinct", (ids(0, 1), RowSet(5), ids(0)), r"room for 1 ids, and all 2"),
    ("distinct", (ids(0, 1), RowSet(5), read_only(ids(0, 0))), r"out is written to"),
    ("distinct", (OVER[:2].view(np.int64), RowSet(5), OVER[1:3].view(np.int64)), r"memory overlaps"),
    ("distinct", ([0], RowSet(5), ids(0)), r"ids has to be a numpy array, not list"),
    ("forget_", (RowSet(5), np.zeros(1, np.int32)), r"ids has the dtype int32"),
    ("gather_rows", (w(3), ids(0), read_only(w(1).reshape(1, 1))), r"out is written to"),
    ("mul_add_rows_", (read_only(w(3)), ids(0), w(1).reshape(1, 1), 2), r"dst is written to"),
    ("mul_add_rows_", (w(3), ids(0), w(1).reshape(1, 1), 256), r"weight 256"),
    ("update_rows_", (w(3), ids(0), w(1).reshape(1, 1), 0, w(2).reshape(2, 1), ids(0)), r"weight 0"),
    ("update_rows_", (w(3), ids(0), w(1).reshape(1, 1), 2, w(2).reshape(1, 2), ids(0)), r"saved \[1, 2\]"),
    ("update_rows_", (w(3), ids(0), w(2).reshape(1, 2), 2, w(2).reshape(2, 1), ids(0)), r"rows of 2 words"),
    ("update_rows_", (w(3), ids(0), w(1).reshape(1, 1), 2, w(2).reshape(2, 1), ids(0, 1)), r"mark of 2"),
    (
        "update_rows_",
        (w(3), ids(0), w(1).reshape(1, 1), 2, w(2).reshape(2, 1), read_only(ids(0))),
        r"mark is written",
    ),
    ("update_rows_", (OVER[:8], ids(0), w(1).reshape(1, 1), 2, OVER[6:8].reshape(2, 1), ids(0)), r"overlap"),
    ("update_lanes_", lanes(weight=0), r"weight 0"),
    ("update_lanes_", lanes(edges=(0, 1)), r"2 rows, .* edges \[0, 1\]"),
    ("update_lanes_", lanes(edges=(0, 3, 2)), r"edges \[0, 3, 2\]"),
    ("update_lanes_", lanes(edges=(2,)), r"edges \[2\]"),
    ("update_lanes_", lanes(offsets=ids(0, 1)), r"overlap, or don't ascend"),
    ("update_lanes_", lanes(offsets=ids(2, 0)), r"overlap, or don't ascend"),
    ("update_lanes_", lanes(saved=w(4).reshape(1, 2, 2)), r"saved \[1, 2, 2\]"),
    ("update_lanes_", lanes(saved=w(4).reshape(2, 2, 1)), r"saved \[2, 2, 1\]"),
    ("update_lanes_", lanes(marks=np.zeros((1, 4), np.int64)), r"marks \[1, 4\]"),
    ("update_lanes_", lanes(marks=read_only(np.zeros((2, 4), np.int64))), r"marks is written"),
    ("mul_add_block_", (w(3), w(3), 1.0), r"weight 1\.0"),
    ("mul_add_block_", (w(3), w(3), "2"), r"weight '2'"),
    ("mul_add_block_", (w(3), w(4), 2), r"src has 4 words; .* dst's 3"),
    ("mul_add_block_", (OVER[:8], OVER[:8], 2), r"memory overlaps"),
    ("mul_add_block_", (read_only(w(3)), w(3), 2), r"dst is written to"),
    ("mul_add_block_", (w(3), w(3).view(np.uint8), 2), r"src has the dtype uint8"),
    ("dot", ([w(3)], b(1, 2)[None], [w(3)]), r"1 blocks, 1 outs and weights \[1, 2\]"),
    ("dot", ([w(3)], b(1, 2)[:, None], [w(3)]), r"1 blocks, 1 outs and weights \[2, 1\]"),
    ("dot", ([w(3)], b(1)[None], []), r"1 blocks, 0 outs and weights \[1, 1\]"),
    ("dot", ([w(3), w(4)], b(1, 2)[None], [w(3)]), r"blocks\[1\] has 4 words; .* outs\[0\]'s 3"),
    ("dot", ([w(3)], b(1, 2)[:, None], [w(3), w(4)]), r"outs\[1\] has 4 words; .* outs\[0\]'s 3"),
    ("dot", ([w(3), OVER[4:7]], b(1, 2)[None], [OVER[:5]]), r"blocks\[0\] has 3 words; .* 5"),
    ("dot", ([w(5), OVER[4:9]], b(1, 2)[None], [OVER[:5]]), r"blocks\[1\] is read; .* overlaps"),
    ("dot", ([w(5)], b(1, 2)[:, None], [OVER[:5], OVER[4:9]]), r"outs\[1\] is .* outs\[0\] .* overlaps"),
    ("dot", ([w(3)], np.ones((1, 1), np.int64), [w(3)]), r"weights has the dtype int64"),
    ("dot", ([w(3)], b(1), [w(3)]), r"weights has the shape \[1\]"),
    ("dot", ([w(3)], [[1]], [w(3)]), r"weights has to be a numpy array, not list"),
    ("dot", ([w(3)], b(1)[None], [read_only(w(3))]), r"outs\[0\] is written to"),
    ("dot", ([w(3)], b(1)[None], [t(3, 1, np.uint64)]), r"outs\[0\] has the shape \[3, 1\]"),
]


@each(("operation", "arguments", "message"), REFUSALS)
def test_arguments_that_break_the_contract(
    work: Kernels, operation: str, arguments: tuple[Any, ...], message: str
) -> None:
    refused(work, operation, arguments, message)


def refused(work: Kernels, operation: str, arguments: tuple[Any, ...], message: str) -> None:
    """The call names itself and the argument, is of the tree, and has written nothing."""
    arrays = [x for x in arguments if isinstance(x, np.ndarray)]
    before = [array.tobytes() for array in arrays]
    with pytest.raises(KernelError, match=message) as caught:
        getattr(work, operation)(*arguments)
    assert str(caught.value).startswith(f"{operation}: ")
    assert isinstance(caught.value, EcembError)
    assert [array.tobytes() for array in arrays] == before


def test_nothing_is_written_where_only_the_last_of_many_is_wrong(work: Kernels) -> None:
    many = np.arange(1000)
    many[-1] = 1000
    table, records = np.zeros((1000, 1), np.uint64), np.ones((1000, 1), np.uint64)
    flat = np.zeros(1000, np.uint64)
    with pytest.raises(KernelError, match=r"ids\[999\]"):
        work.scatter_(table, many, records, 0)
    with pytest.raises(KernelError, match=r"offsets\[999\]"):
        work.mul_add_rows_(flat, many, records, 3)
    assert not table.any()
    assert not flat.any()


def test_random_calls_agree_with_the_reference(work: Kernels, seed: int) -> None:
    """Many small calls of all shapes, one after the other on the same memory."""
    rng, choose = np.random.default_rng(seed), random.Random(seed)
    reference = kernels.get_kernels("reference")
    ours = draw(rng, 500)
    theirs = ours.copy()
    for _ in range(100):
        src, weight = draw(rng, choose.randrange(12), choose.choice((0, 1, 2, 9, 17))), choose.randrange(256)
        offsets = places(rng, ours.size, *src.shape)
        for worker, memory in ((work, ours), (reference, theirs)):
            worker.mul_add_rows_(memory, offsets, src, weight)
        assert ours.tobytes() == theirs.tobytes()
