"""The bits of a replacement rank, and rows and parity that arrive while all ranks train."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.coding.rows import Column, RowSpace, Table, TableLayout, arrange
from ecemb.errors import KernelError
from ecemb.kernels.contract import get_kernels
from ecemb.memory.rank_memory import RankMemory
from ecemb.recovery import missing as missing_module
from ecemb.recovery.missing import Chunk, Missing
from support.interleaved import Ranks, grouped, take_turns
from support.simulation import Job, Machines, job_of

Words = NDArray[np.uint64]
SHAPES = [(2, 1, 2), (3, 2, 3), (4, 2, 4), (3, 1, 3), (4, 3, 5)]
UNTIL = 3


@pytest.fixture(autouse=True)
def parts() -> Iterator[None]:
    """The record of rank state is captured in parts, though it is short."""
    with mock.patch("ecemb.coding.rows.SPLIT_BYTES", 8):
        yield


@pytest.fixture
def memory(tmp_path: Path, seed: int) -> Iterator[RankMemory]:
    """A rank of a job that has not trained yet."""
    machines = Machines(tmp_path / "a", grouped(4, 2, 4, random.Random(seed)))
    assert not machines.run(0).failures
    with machines.memories("cpu") as memories:
        yield memories[1]


@pytest.fixture(params=[1, 7, 1 << 17], ids=lambda words: f"chunks of {words} words")
def chunk_words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(missing_module, "CHUNK_WORDS", request.param)
    return request.param


def rows_of(space: RowSpace) -> Words:
    return space.read(0, space.words)


def emptied(memory: RankMemory) -> tuple[Words, dict[int, Words]]:
    """What rows and parity were; they are garbage now."""
    assert memory.parity is not None
    rows, blocks = rows_of(memory.space), memory.parity.blocks
    parity = {c: words.copy() for c, (_, words) in blocks.items()}
    memory.space.write_(0, ~rows)
    for _, words in blocks.values():
        words ^= np.uint64(2**64 - 1)
    return rows, parity


def test_all_rows_of_a_span_are_backed_before_they_are_written(memory: RankMemory) -> None:
    """Of each column, whether or not some of the rows are there."""
    backed, space = set[int](), memory.space

    def ensure(_: str, starts: NDArray[np.int64], size_bytes: int) -> None:
        for start in starts.tolist():
            backed.update(range(start, start + size_bytes))

    with mock.patch.object(memory, "_backing", mock.Mock(ensure=ensure)):
        missing, rows = Missing(memory), rows_of(space)
        for block, (low, high) in enumerate(itertools.pairwise(space.bounds)):
            missing.store_span_(block, 0, rows[low:high])
    for owner in {one.owner for one in space.named}:
        table = space.named[owner].table
        for start, column in zip(table.starts, table.columns, strict=True):
            assert backed.issuperset(range(start, start + column.size)), table.layout.name


def every_chunk(missing: Missing, rows: Words, parity: dict[int, Words]) -> Iterator[Chunk]:
    """All chunks; each is stored when the next one is asked for."""
    bounds = missing._space.bounds  # pyright: ignore[reportPrivateUsage]
    while (chunk := missing.next_chunk()) is not None:
        yield chunk
        words, left = (
            rows[bounds[chunk.block] :] if not chunk.is_parity else parity[chunk.stripe_class],
            missing.bytes_left,
        )
        words = words[chunk.start : chunk.stop]
        if chunk.is_parity:
            missing.store_parity_(chunk.stripe_class, chunk.start, words)
        else:
            missing.store_span_(chunk.block, chunk.start, words)
        assert missing.bytes_left < left


# --- bits -----------------------------------------------------------------------------------------


def test_chunks_are_given_out_once_until_they_are_again(memory: RankMemory, chunk_words: int) -> None:
    """Those that are stored meanwhile are not given out again."""
    rows, parity = emptied(memory)
    missing = Missing(memory)
    chunks = list(iter(missing.next_chunk, None))
    missing.rewind()
    assert chunks[0].start == 0 and list(iter(missing.next_chunk, None)) == chunks
    first, last = chunks[0], chunks[-1]
    missing.store_span_(first.block, first.start, rows[first.start : first.stop])
    missing.store_parity_(last.stripe_class, last.start, parity[last.stripe_class][last.start : last.stop])
    missing.rewind()
    assert list(iter(missing.next_chunk, None)) == chunks[1:-1]


def test_all_is_missing_at_first(memory: RankMemory) -> None:
    space, missing = memory.space, Missing(memory)
    assert memory.parity is not None
    names = {table.layout.name: table.layout.rows for table in space.tables if table.layout.words}
    assert missing.rows_left() == names and not missing.is_whole()
    parity = sum(len(words) for _, words in memory.parity.blocks.values())
    assert missing.bytes_left == 8 * (space.words + parity)
    for index, one in enumerate(space.named):
        table = one.table
        ids = np.array([*range(table.layout.rows)] * 2, np.int64)[::-1]
        expected = range(table.layout.rows) if table.layout.words else ()
        assert missing.lacks(index, ids).tolist() == list(expected)
        owned = one.owner != index  # its rows are among those of its group
        assert missing.table_is_whole(index) == (not table.layout.words and not owned)


def test_rows_outside_of_a_table_are_left_to_the_lookup(memory: RankMemory) -> None:
    rows = memory.space.named[0].table.layout.rows
    assert Missing(memory).lacks(0, np.array([-1, rows, 0, 2**62, 0])).tolist() == [0]


def test_rows_are_stored_where_they_are_missing(memory: RankMemory, seed: int) -> None:
    """In any order, some of them twice; through each table of a group as well."""
    rng, space = np.random.default_rng(seed), memory.space
    rows, _ = emptied(memory)
    missing, has = Missing(memory), np.zeros(space.words, np.bool_)
    for index in rng.permutation(np.repeat(np.arange(len(space.named)), 8)).tolist():
        layout = space.named[index].table.layout
        owner = space.named[index].owner
        width = layout.record_words
        ids = np.flatnonzero(rng.random(layout.rows) < 0.3).astype(np.int64)
        at = (space.bases[index] + ids * width)[:, None] + np.arange(width)
        lacking = missing.lacks(index, ids)
        assert lacking.tolist() == [
            one for one, bits in zip(ids.tolist(), has[at], strict=True) if not bits.all()
        ]
        left = missing.bytes_left
        missing.store_rows_(index, ids, rows[at])
        assert left - missing.bytes_left == 8 * width * len(lacking)
        has[at] = True
        found = rows_of(space)
        assert np.array_equal(found[has], rows[has])
        left = missing.bytes_left
        missing.store_rows_(index, ids, ~rows[at])
        assert missing.bytes_left == left and np.array_equal(rows_of(space)[has], rows[has])
        assert missing.table_is_whole(owner) == bool(has[_span(space, owner)].all())


def _span(space: RowSpace, index: int) -> slice:
    base = space.bases[index]
    return slice(base, base + space.named[index].table.layout.words)


def test_places_of_rows(memory: RankMemory) -> None:
    space, missing = memory.space, Missing(memory)
    for index, one in enumerate(space.named):
        table = one.table
        width = table.layout.record_words
        if width:
            ids, found = np.arange(0, table.layout.rows, 2), list[int]()
            for block, rows, offsets in missing.place(index, ids):
                addresses = offsets + space.bounds[block]
                assert addresses.tolist() == (space.bases[index] + rows * width).tolist()
                assert (addresses >= space.bounds[block]).all()
                assert (addresses + width <= space.bounds[block + 1]).all()
                found += rows.tolist()
            assert found == ids.tolist()


def test_a_row_that_is_missing_takes_a_bit() -> None:
    """At the start and while rows arrive: a table may have billions."""
    rows = 1 << 24
    layout = TableLayout("t", rows, (Column("weight", "float32", 4),))
    (starts,), size_bytes = arrange([layout])
    area = np.frombuffer(
        mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE), np.uint8
    )  # tracemalloc has no mmap
    table = Table(layout, area, starts, get_kernels("cpu", 1))
    tracemalloc.start()
    try:
        missing = Missing(mock.Mock(space=RowSpace([table], 2, [table]), parity=None))
        chunk = missing.next_chunk()
        assert chunk is not None
        missing.store_span_(chunk.block, chunk.start, np.ones(chunk.stop - chunk.start, np.uint64))
        last = np.array([0, rows - 1])
        assert missing.lacks(0, last).tolist() == [rows - 1]
        missing.store_rows_(0, last, np.full((2, 1), 7, np.uint64))
        assert missing.rows_left() == {"t": rows - missing_module.CHUNK_WORDS - 1}
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < rows / 2  # an eighth of a byte a row, and what is computed of one chunk


# --- chunks ---------------------------------------------------------------------------------------


def test_chunks_cover_all_that_is_missing(memory: RankMemory, chunk_words: int) -> None:
    """Each of them is in one block and one table, has whole rows, and comes once in a pass."""
    rows, parity = emptied(memory)
    space, missing, found = memory.space, Missing(memory), list[Chunk]()
    for chunk in every_chunk(missing, rows, parity):
        found.append(chunk)
        words = chunk.stop - chunk.start
        if chunk.is_parity:
            assert chunk.block == 2 + list(parity).index(chunk.stripe_class)
            assert words <= chunk_words
        else:
            layout, low = space.named[chunk.table].table.layout, space.bounds[chunk.block]
            assert words <= max(chunk_words, layout.record_words) and words % layout.record_words == 0
            assert low + chunk.stop <= space.bounds[chunk.block + 1]
    assert [chunk.is_parity for chunk in found] == sorted(chunk.is_parity for chunk in found)
    assert missing.is_whole() and missing.bytes_left == 0 and missing.rows_left() == {}
    assert len(set(found)) == len(found)
    assert np.array_equal(rows_of(space), rows)
    assert memory.parity is not None
    assert all(np.array_equal(words, parity[c]) for c, (_, words) in memory.parity.blocks.items())


@pytest.mark.usefixtures("chunk_words")
def test_the_hottest_tables_come_first(memory: RankMemory) -> None:
    space = memory.space
    wide = next(i for i, table in enumerate(space.tables) if table.layout.name == "wide")
    member = next(i for i, table in enumerate(space.tables) if table.layout.name == "g3")
    missing, rows, order = Missing(memory), rows_of(space), list[int]()
    while (chunk := missing.next_chunk([wide, member])) is not None and not chunk.is_parity:
        order.append(chunk.table)
        low = space.bounds[chunk.block]
        missing.store_span_(chunk.block, chunk.start, rows[low + chunk.start : low + chunk.stop])
    tables = list(dict.fromkeys(order))
    assert tables == [wide, space.named[member].owner, 0, len(space.tables) - 1]
    assert order == sorted(order, key=tables.index)


@pytest.mark.usefixtures("chunk_words")
def test_rows_that_are_there_are_left_out_of_chunks(memory: RankMemory) -> None:
    rows, parity = emptied(memory)
    space, missing = memory.space, Missing(memory)
    last = space.named[0].table.layout.rows - 1
    first = np.zeros(1, np.int64)
    missing.store_rows_(0, first, np.zeros((1, 2), np.uint64))
    if last:
        missing.store_rows_(0, first + last, np.zeros((1, 2), np.uint64))
    given = [chunk for chunk in every_chunk(missing, rows, parity) if chunk.table == 0]
    words = [range(space.bounds[c.block] + c.start, space.bounds[c.block] + c.stop) for c in given]
    assert list(itertools.chain(*words)) == list(range(2, 2 * last))


def test_a_part_of_a_row_is_not_stored(memory: RankMemory) -> None:
    """Every range of words of every block, into an empty rank each time."""
    rows, _ = emptied(memory)
    space, garbage = memory.space, rows_of(memory.space)
    for block, (low, high) in enumerate(itertools.pairwise(space.bounds)):
        for start in range(min(high - low, 12)):
            for stop in range(start, high - low + 1, 3):
                missing = Missing(memory)
                left = missing.bytes_left
                missing.store_span_(block, start, rows[low + start : low + stop])
                whole = np.zeros(space.words, np.bool_)
                for one, base in zip(space.named, space.bases, strict=False):
                    for row in range(len(one.rows)):
                        at = base + row * one.table.layout.record_words
                        end = at + one.table.layout.record_words
                        whole[at:end] = low + start <= at and end <= low + stop
                found = rows_of(space)
                assert np.array_equal(found, np.where(whole, rows, garbage))
                assert left - missing.bytes_left == 8 * np.count_nonzero(whole)
                space.write_(0, garbage)


def test_what_does_not_fit_is_refused(memory: RankMemory, chunk_words: int) -> None:
    rows, parity = emptied(memory)
    before, missing = rows_of(memory.space), Missing(memory)
    c, words = next(iter(parity.items()))
    space, ids = memory.space, np.zeros(1, np.int64)
    records = np.zeros((1, space.named[0].table.layout.record_words), np.uint64)
    end = space.bounds[1]
    for store in (
        lambda: missing.store_rows_(0, ids - 1, records),
        lambda: missing.store_rows_(0, ids + space.named[0].table.layout.rows, records),
        lambda: missing.store_rows_(0, np.zeros(2, np.int64), np.concatenate([records, records])),
        lambda: missing.store_rows_(0, ids, records[:, 1:]),
        lambda: missing.store_rows_(0, ids, records[:0]),
        lambda: missing.store_span_(-1, 0, rows[:1]),
        lambda: missing.store_span_(2, 0, rows[:1]),
        lambda: missing.store_span_(0, -1, rows[:1]),
        lambda: missing.store_span_(0, end, rows[:1]),
        lambda: missing.store_span_(0, 0, rows[: end + 1]),
        lambda: missing.store_parity_(-1, 0, words[:chunk_words]),
        lambda: missing.store_parity_(c, -chunk_words, words[:chunk_words]),
        lambda: missing.store_parity_(c, -(-len(words) // chunk_words) * chunk_words, words[:chunk_words]),
        lambda: missing.store_parity_(c, 0, words[:0]),
        lambda: missing.store_parity_(c, 0, np.zeros(min(chunk_words, len(words)) + 1, np.uint64)),
    ):
        with pytest.raises(KernelError):
            store()
    assert np.array_equal(rows_of(space), before)
    assert missing.bytes_left == Missing(memory).bytes_left


# --- arrivals while all train -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [grouped, job_of])
def test_a_rank_that_is_rebuilt_while_all_train(
    make: Callable[..., Job],
    shape: tuple[int, int, int],
    window: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """All that is read, stored and trained is as without it. For every choice of ranks, in any order."""
    rng = random.Random(seed)
    monkeypatch.setattr(missing_module, "CHUNK_WORDS", rng.choice([1, 5, 1 << 17]))
    job = dataclasses.replace(make(*shape, rng), window=window, aborts=frozenset({(2 * window, 0)}))
    base = Machines(tmp_path / "base", job)
    assert not base.run(0).failures
    with base.copy(tmp_path / "first").memories("cpu") as memories:
        first = Ranks(job, memories, UNTIL)
        list(take_turns([first.trains(i) for i in range(job.size)], rng))
    for lost in itertools.combinations(range(job.size), rng.randint(1, job.placement.r)):
        with base.copy(tmp_path / "-".join(map(str, lost))).memories("cpu") as memories:
            ranks = Ranks(job, memories, UNTIL, lost, first.truth)
            actors = [ranks.trains(i) for i in range(job.size)]
            actors += [ranks.arrives(i, rng) for i in lost for _ in range(2)]
            list(take_turns(actors, rng))
            for i in range(job.size):
                ranks.check(i, UNTIL * window)
            assert all(ranks.missing[i].is_whole() for i in lost)
