"""Rows as byte records, against an oracle that lays every record out byte by byte."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ecemb.coding.rows import (
    ALIGN_BYTES,
    SPLIT_BYTES,
    WORD_BYTES,
    Addresses,
    Column,
    RowSpace,
    Table,
    TableLayout,
    arrange,
    joined,
    split,
)
from ecemb.errors import ConfigurationError
from ecemb.kernels import contract

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8]
DIMS = [1, 3, 7, 16]
KERNELS = ["reference", "cpu"]

Words = NDArray[np.uint64]


def layout(name: str, rows: int, *row_bytes: int) -> TableLayout:
    columns = [Column(f"c{i}", "uint8", size) for i, size in enumerate(row_bytes)]
    return TableLayout(name, rows, tuple(columns))


def random_bytes(size: int, rng: random.Random) -> NDArray[np.uint8]:
    return np.frombuffer(rng.randbytes(size), np.uint8).copy()


def bound(table: TableLayout, rng: random.Random, kernel: str = "reference") -> Table:
    """A table over random bytes, 64-byte aligned as in an arena."""
    (starts,), size = arrange([table])
    memory = random_bytes(size + ALIGN_BYTES, rng)
    skip = -memory.ctypes.data % ALIGN_BYTES
    return Table(table, memory[skip : skip + size], starts, contract.get_kernels(kernel))


def record_bytes(table: Table, row: int) -> bytes:
    """The oracle: the row's bytes of every column, one after another, zeros up to 8."""
    content = b"".join(column[row].tobytes() for column in table.columns)
    return content + bytes(-len(content) % WORD_BYTES)


def all_words(tables: Sequence[Table]) -> Words:
    """The oracle of a row space: all records of all tables."""
    content = b"".join(record_bytes(t, row) for t in tables for row in range(t.layout.rows))
    return np.frombuffer(content, np.uint64).copy()


# --- tables -------------------------------------------------------------------------------------


def adam_layout(dtype: torch.dtype, dim: int, rows: int) -> TableLayout:
    """A weight [rows, dim], a state of its shape, and one of one fp32 value per row."""
    row_bytes = dim * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return TableLayout(
        "t",
        rows,
        (
            Column("weight", name, row_bytes),
            Column("mean", name, row_bytes),
            Column("sum", "float32", 4),
        ),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_records_of_every_type(dtype: torch.dtype, dim: int, kernel: str, seed: int) -> None:
    rng = random.Random(seed)
    table = bound(adam_layout(dtype, dim, 11), rng, kernel)
    width = table.layout.record_words
    assert width == -(-(2 * dim * dtype.itemsize + 4) // 8)
    ids = np.array([3, 0, 10, 7], np.int64)
    records = np.full((4, width), 2**64 - 1, np.uint64)  # what was there must not shine through
    table.gather(ids, records)
    for row, got in zip(ids, records, strict=True):
        assert got.tobytes() == record_bytes(table, row)
    for start, stop in itertools.combinations_with_replacement(range(12), 2):
        expected = b"".join(record_bytes(table, row) for row in range(start, stop))
        assert table.read(start, stop).tobytes() == expected


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_records_are_put_back_and_nothing_else_changes(
    dtype: torch.dtype, dim: int, kernel: str, seed: int
) -> None:
    rng = random.Random(seed)
    table = bound(adam_layout(dtype, dim, 9), rng, kernel)
    other = bound(table.layout, rng, kernel)
    before = [record_bytes(table, row) for row in range(9)]
    ids = np.array([8, 2, 5], np.int64)
    records = np.empty((3, table.layout.record_words), np.uint64)
    other.gather(ids, records)
    table.scatter_(ids, records)
    for row in range(9):
        expected = record_bytes(other, row) if row in ids else before[row]
        assert record_bytes(table, row) == expected
    table.write_(2, other.read(2, 7))
    for row in range(9):
        expected = record_bytes(other, row) if row in (2, 3, 4, 5, 6, 8) else before[row]
        assert record_bytes(table, row) == expected


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_special_values_keep_their_bits(dtype: torch.dtype) -> None:
    """Parity is of bits: NaN payloads, signalling NaNs, -0.0 and subnormals come back."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    quiet, infinity, minus = torch.tensor([torch.nan, torch.inf, -0.0], dtype=dtype).view(integers)
    patterns = [quiet, quiet | 1, infinity | 1, infinity, infinity | minus, minus, minus | quiet]
    special = torch.stack([*patterns, torch.ones_like(quiet), ~torch.zeros_like(quiet)])
    table = bound(layout("t", len(special), dtype.itemsize), random.Random(0))
    weight = torch.from_numpy(table.columns[0].reshape(-1)).view(integers)
    weight.copy_(special)  # as integers: a copy of floats may make NaNs quiet
    assert not weight.view(dtype)[:3].isfinite().any()
    kept = table.read(0, len(special))
    weight.zero_()
    table.write_(0, kept)
    assert torch.equal(weight, special)


def test_views_of_other_types_share_the_tables_memory() -> None:
    """In place: what the optimizer writes through a tensor is what a record reads."""
    table = bound(layout("t", 4, 12), random.Random(0))
    weight = torch.from_numpy(table.columns[0].reshape(-1)).view(torch.float32).reshape(4, 3)
    weight[2] = torch.tensor([1.0, 2.0, 3.0])
    expected = np.array([1, 2, 3], np.float32).tobytes() + bytes(4)
    assert table.read(2, 3).tobytes() == expected


def test_columns_are_aligned_and_apart() -> None:
    table = bound(layout("t", 5, 3, 12, 1), random.Random(0))
    starts = [column.ctypes.data for column in table.columns]
    assert all(start % ALIGN_BYTES == 0 for start in starts)
    for column in table.columns:
        column[:] = 0
    for index, column in enumerate(table.columns):
        column[:] = index + 1
    for index, column in enumerate(table.columns):
        assert (column == index + 1).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("sizes", [(), (0,), (0, 5), (5, 0, 3)])
def test_a_table_may_have_no_rows_or_columns_of_no_bytes(sizes: tuple[int, ...], kernel: str) -> None:
    for rows in (0, 3):
        table = bound(layout("t", rows, *sizes), random.Random(1), kernel)
        width = -(-sum(sizes) // 8)
        assert table.layout.record_words == width
        assert table.layout.words == rows * width
        assert table.read(0, rows).shape == (rows, width)
        ids = np.arange(rows, dtype=np.int64)
        records = np.empty((rows, width), np.uint64)
        table.gather(ids, records)
        assert records.tobytes() == b"".join(record_bytes(table, row) for row in range(rows))
        table.scatter_(ids, records)
        table.write_(0, records)


def test_padding_is_zero_and_takes_nothing_in() -> None:
    table = bound(layout("t", 2, 5), random.Random(0))
    table.write_(0, np.full((2, 1), 2**64 - 1, np.uint64))
    assert table.read(0, 2).tobytes() == (b"\xff" * 5 + bytes(3)) * 2


def test_a_layout_comes_back_from_json_as_it_was() -> None:
    for table in (adam_layout(torch.float16, 3, 7), layout("empty", 0), layout("a/b", 10**12, 8)):
        assert TableLayout.from_json(table.to_json()) == table


# --- the row space ------------------------------------------------------------------------------

SPACES = [
    [layout("a", 3, 12), layout("b", 0, 8), layout("c", 2, 3, 5), layout("d", 1, 24)],
    [layout("empty", 0, 4), layout("a", 1, 40), layout("none", 3), layout("b", 4, 1)],
    [layout("only", 7, 20, 4)],
]


def space_of(layouts: Sequence[TableLayout], k: int, rng: random.Random) -> RowSpace:
    return RowSpace([bound(table, rng) for table in layouts], k)


@pytest.mark.parametrize("layouts", SPACES)
def test_reading_from_any_word_to_any_word(layouts: list[TableLayout], seed: int) -> None:
    space = space_of(layouts, 2, random.Random(seed))
    expected = all_words(space.tables)
    assert space.words == len(expected)
    for start in range(space.words + 1):
        for stop in range(start, space.words + 1):
            assert np.array_equal(space.read(start, stop), expected[start:stop])


@pytest.mark.parametrize("layouts", SPACES)
def test_writing_from_any_word_to_any_word(layouts: list[TableLayout], seed: int) -> None:
    """A recovery writes in chunks that begin and end within records: the rest of those stays."""
    rng = random.Random(seed)
    space, other = space_of(layouts, 2, rng), space_of(layouts, 2, rng)
    original, new = all_words(space.tables), all_words(other.tables)
    for start in range(space.words + 1):
        for stop in range(start, space.words + 1):
            space.write_(start, new[start:stop].copy())
            expected = original.copy()
            expected[start:stop] = new[start:stop]
            assert np.array_equal(all_words(space.tables), expected)
            space.write_(0, original)


@pytest.mark.parametrize("layouts", SPACES)
def test_rows_are_completed_once_and_whole(layouts: list[TableLayout], seed: int) -> None:
    """Blocks are rebuilt in chunks that take turns, and end within records."""
    rng = random.Random(seed)
    for k in (1, 2, 3):
        space = space_of(layouts, k, rng)
        for size in range(1, space.words + 2):
            here = np.zeros(space.words, bool)
            found: list[tuple[int, int]] = []
            blocks = list(itertools.pairwise(space.bounds))
            for start in range(0, space.words + 1, size):
                for low, high in blocks:
                    words = slice(min(low + start, high), min(low + start + size, high))
                    here[words] = True
                    for table, rows in space.completed(words.start, words.stop):
                        width = layouts[table].record_words
                        first = space.bases[table]
                        assert here[first + rows.start * width : first + rows.stop * width].all()
                        found += [(table, row) for row in rows]
            whole = [(i, row) for i, one in enumerate(layouts) if one.record_words for row in range(one.rows)]
            assert sorted(found) == whole


def test_an_empty_space() -> None:
    for tables in ([], [layout("a", 0, 8)], [layout("a", 3)]):
        space = space_of(tables, 3, random.Random(0))
        assert space.words == 0
        assert space.bounds == (0, 0, 0, 0)
        assert len(space.read(0, 0)) == 0
        space.write_(0, np.empty(0, np.uint64))


def test_tables_need_distinct_names() -> None:
    with pytest.raises(ConfigurationError, match="distinct names"):
        space_of([layout("a", 1, 8), layout("a", 2, 8)], 1, random.Random(0))


# --- cutting it into blocks ---------------------------------------------------------------------


@st.composite
def spaces(draw: st.DrawFn) -> tuple[list[TableLayout], int]:
    sizes = st.tuples(st.integers(0, 40), st.integers(0, 60))
    tables = draw(st.lists(sizes, max_size=5))
    layouts = [layout(str(i), rows, size) for i, (rows, size) in enumerate(tables)]
    return layouts, draw(st.integers(1, 9))


@settings(max_examples=200, deadline=None)
@given(spaces())
def test_blocks_are_cut_at_records_and_nearly_even(case: tuple[list[TableLayout], int]) -> None:
    layouts, k = case
    bounds = Addresses(layouts, k).bounds
    total = sum(table.words for table in layouts)
    starts = {total}
    at = 0
    for table in layouts:
        if table.record_words:
            starts |= set(range(at, at + table.words, table.record_words))
        at += table.words
    assert len(bounds) == k + 1
    assert bounds[0] == 0
    assert bounds[-1] == total
    assert list(bounds) == sorted(bounds)
    assert set(bounds) <= starts | {0}
    widest = max((table.record_words for table in layouts), default=0)
    for i, address in enumerate(bounds):
        assert abs(address - total * i / k) <= widest / 2 + 1


def test_fewer_records_than_blocks_leave_blocks_empty() -> None:
    bounds = Addresses([layout("a", 1, 800)], 4).bounds
    assert bounds[0] == 0
    assert bounds[-1] == 100
    assert set(bounds) == {0, 100}


@given(spaces(), st.data())
@settings(max_examples=60, deadline=None)
def test_rows_are_cut_where_the_blocks_are(case: tuple[list[TableLayout], int], data: st.DataObject) -> None:
    """Every row that has words is in one block; the others, which have no place in parity, are in none."""
    layouts, k = case
    space = RowSpace([bound(one, random.Random(1)) for one in layouts], k)
    for table, one in enumerate(layouts):
        ids = np.array(sorted(data.draw(st.sets(st.integers(0, max(0, one.rows - 1))))), np.int64)
        edges = space.cut(table, ids)
        assert len(edges) == k + 1
        for block, (a, b) in enumerate(itertools.pairwise(edges)):
            at = space.bases[table] + ids[a:b] * one.record_words
            assert ((at >= space.bounds[block]) & (at < space.bounds[block + 1])).all()
        if one.rows:
            assert edges[-1] - edges[0] == (len(ids) if one.record_words else 0)


# --- groups of tables ---------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_rows_of_a_group_are_named_by_its_first_table(kernel: str, seed: int) -> None:
    rng = random.Random(seed)
    columns = (Column("weight", "float32", 16), Column("momentum1", "float32", 4))
    layouts = [
        TableLayout("alone", 5, columns),
        *(TableLayout(f"g{i}", rows, columns, "g") for i, rows in enumerate((3, 0, 7, 1))),
        *(TableLayout(f"h{i}", 4, columns[: i + 1] * (2 - i), "h") for i in range(2)),
        TableLayout("last", 1, columns[:1]),
    ]
    starts, size = arrange(layouts)
    memory = random_bytes(size + ALIGN_BYTES, rng)
    skip = -memory.ctypes.data % ALIGN_BYTES
    memory = memory[skip : skip + size]
    found = joined(layouts)
    assert [one.rows for one in found] == [5, 11, 0, 7, 1, 4, 4, 1]
    tables, named = (
        [Table(one, memory, at, contract.get_kernels(kernel)) for one, at in zip(each, starts, strict=True)]
        for each in (layouts, found)
    )
    space = RowSpace(tables, 2, named)
    group = np.concatenate([table.read(0, table.layout.rows) for table in tables[1:5]])
    out = np.zeros((4, group.shape[1]), np.uint64)
    ids = np.array([0, 3, 9, 10], np.int64)
    space.named[1].table.gather(ids, out)
    assert (out == group[ids]).all()
    at = ids[2] * group.shape[1] + space.bases[1]
    assert (space.read(at, at + group.shape[1]) == group[9]).all()
    space.named[1].table.scatter_(ids[2:3], ~out[2:3])
    first_words = space.bases[1] + np.arange(11) * group.shape[1]
    for k in range(1, 12):
        space = RowSpace(tables, k, named)
        owners = [(one.owner, one.rows.start) for one in space.named]
        assert owners == [(0, 0), (1, 0), (1, 3), (1, 3), (1, 10), (5, 0), (6, 0), (7, 0)]
        assert [len(one.rows) for one in space.named] == [one.rows for one in layouts]
        assert space.cut(1, np.arange(11)) == space.named[1].edges
        assert space.cut(1, np.arange(11)) == np.searchsorted(first_words, space.bounds).tolist()
    assert (tables[3].read(6, 7)[0] != group[9]).any() and (tables[4].read(0, 1) == group[10:]).all()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 3))
@settings(deadline=None)
def test_a_column_is_at_its_place_also_without_rows(rows: list[int], more: int) -> None:
    """An engine takes a batch of tables from the first one's place on."""
    columns = (Column("weight", "float32", 12), Column("momentum1", "float32", 4))
    layouts = [TableLayout("alone", more, columns)]
    layouts += [TableLayout(f"g{i}", count, columns, "g") for i, count in enumerate(rows)]
    starts, size = arrange(layouts)
    memory = np.zeros(size, np.uint8)
    kernels = contract.get_kernels("reference")
    for layout, at in zip(layouts, starts, strict=True):
        for column, start in zip(Table(layout, memory, at, kernels).columns, at, strict=True):
            assert column.ctypes.data - memory.ctypes.data == start
            assert column.reshape(-1).ctypes.data - memory.ctypes.data == start


def test_a_long_record_is_captured_in_parts() -> None:
    """One of another size, and any other table, is captured as it is."""
    long = TableLayout("state", 1, (Column("state", "uint8", 4 * SPLIT_BYTES),))
    assert split(long) == TableLayout("state", 4, (Column("state", "uint8", SPLIT_BYTES),))
    assert split(long).words == long.words
    odd, empty = (TableLayout("state", 1, (Column("state", "uint8", n),)) for n in (SPLIT_BYTES + 8, 0))
    several = TableLayout("state", 2, long.columns), TableLayout("state", 1, 2 * long.columns)
    for one in (odd, empty, *several):
        assert split(one) == one
    rows = TableLayout("rows", 5, (Column("weight", "float32", 24),))
    starts, size = arrange([rows, long])
    memory = np.arange(size // 8, dtype=np.uint64).view(np.uint8)
    kernels = contract.get_kernels("reference")
    tables, named = (
        [Table(one, memory, at, kernels) for one, at in zip(each, starts, strict=True)]
        for each in ([rows, long], [rows, split(long)])
    )
    for k in range(1, 5):
        space = RowSpace(tables, k, named)
        assert [(one.table, one.owner) for one in space.named] == [(named[0], 0), (named[1], 1)]
        assert [one.rows for one in space.named] == [range(5), range(4)]
        records = np.empty((4, SPLIT_BYTES // 8), np.uint64)
        space.named[1].table.gather(np.arange(4), records)
        assert np.array_equal(records.reshape(-1), space.read(space.bases[1], space.bases[2]))
        assert sorted(set(space.cut(1, np.arange(4)))) == [0, 4]  # all parts are in one block
