"""Undo records: what is there when it is said to be, and what is not."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.coding.parity import Scratch, unpack
from ecemb.coding.rows import Column, RowSpace, TableLayout
from ecemb.engines.contract import all_rows
from ecemb.errors import InconsistentArenas, NotEnoughSpace, StepFailed
from ecemb.kernels import contract
from ecemb.memory.arena import Arena
from ecemb.memory.journal import Prefault, RowJournal
from ecemb.memory.rank_memory import RankMemory
from support.simulation import Killed, Moments, Torn, alone, watched

LAYOUTS = [
    TableLayout("a", 12, (Column("weight", "float32", 12), Column("sum", "float32", 4))),
    TableLayout("empty", 0, (Column("weight", "float32", 8),)),
    TableLayout("b", 7, (Column("weight", "bfloat16", 6),)),
    TableLayout("state", 1, (Column("state", "uint8", 40),)),
]

Words = NDArray[np.uint64]


@pytest.fixture
def memory(tmp_path: Path, seed: int) -> Iterator[RankMemory]:
    with alone(tmp_path, LAYOUTS) as opened:
        rng = np.random.default_rng(seed)
        for table in opened.space.tables:
            for column in table.columns:
                column[:] = rng.integers(0, 256, column.shape, np.uint8)
        yield opened


def ids(*rows: int) -> NDArray[np.int64]:
    return np.array(rows, np.int64)


def scribble(space: RowSpace, table: int, rows: Sequence[int], rng: random.Random) -> None:
    for column in space.tables[table].columns:
        for row in rows:
            column[row] = np.frombuffer(rng.randbytes(column.shape[1]), np.uint8)


def everything(space: RowSpace) -> Words:
    return space.read(0, space.words)


def another_process(memory: RankMemory, kernels: contract.Kernels | None = None) -> RowJournal:
    """The journal as a restarted worker sees it: only what the arena holds."""
    work, ahead = kernels or contract.get_kernels("reference"), Prefault(memory.arena)
    return RowJournal(memory.arena, memory.space, work, "row_journal", ahead, threading.Lock())


def changes(journal: RowJournal) -> tuple[Words, list[int]]:
    outbox = journal.outbox(Scratch())
    outbox.lay_out()
    return outbox.words, outbox.edges


# --- the rows' journal --------------------------------------------------------------------------


def test_undo_gives_every_captured_row_back(memory: RankMemory, seed: int) -> None:
    rng = random.Random(seed)
    before = everything(memory.space)
    memory.journal.arm(1)
    for table in (0, 2, 3, 0, 1):
        count = LAYOUTS[table].rows
        rows = sorted(rng.sample(range(count), rng.randint(0, count)))
        memory.journal.capture(table, ids(*rows))
        scribble(memory.space, table, rows, rng)
    assert memory.journal.label == 1
    for _ in range(2):  # undo copies: doing it again does no harm
        another_process(memory).undo()
        assert np.array_equal(everything(memory.space), before)


def test_a_row_is_saved_once_and_with_its_oldest_bytes(memory: RankMemory, seed: int) -> None:
    rng = random.Random(seed)
    before = everything(memory.space)
    memory.journal.arm(1)
    assert memory.journal.capture(0, ids(2, 5, 7)) == 3
    scribble(memory.space, 0, (2, 5, 7), rng)
    assert memory.journal.capture(0, ids(1, 2, 5, 9)) == 2
    assert memory.journal.capture(2, ids(2, 5)) == 2  # the same numbers in another table
    assert memory.journal.capture(0, ids(2, 9)) == 0
    assert memory.journal.capture(0, ids()) == 0
    scribble(memory.space, 0, (1, 2, 9), rng)
    assert another_process(memory).undo() == 7
    assert np.array_equal(everything(memory.space), before)


def test_a_whole_table_takes_the_journal_its_size_once(tmp_path: Path) -> None:
    """8 bytes a row, and a quarter more; nothing for rows declared again, nor in the other journal."""
    rows, chunk = 16_000, 1 << 20
    layouts = [TableLayout("whole", rows, (Column("weight", "float32", 1024),)), LAYOUTS[-1]]
    with alone(tmp_path, layouts) as memory, mock.patch("ecemb.engines.contract._CHUNK_BYTES", chunk):
        memory.arena.set("prepared", 0)
        memory.commit(0)
        memory.arm(1)
        chunks = list(all_rows(layouts[0]))
        assert max(map(len, chunks)) * 1024 <= chunk
        for some in chunks * 2:
            memory.journal.capture(0, some)
        size = rows * (1024 + 8) + 16 * len(chunks)
        assert memory.journal.used_by_step[-1] == size
        assert size <= memory.arena.reserved("row_journal") <= 1.25 * size
        memory.arm(2)  # while the first is undecided
        memory.journal.capture(0, np.arange(100))
        memory._prefault.wait()
        assert memory.arena.reserved("next_journal") < size / 4


def test_changes_are_old_xor_new_block_by_block(memory: RankMemory, seed: int) -> None:
    rng = random.Random(seed)
    before = everything(memory.space)
    memory.journal.arm(1)
    for table, rows in ((2, (1, 6)), (0, (3, 11)), (2, (0,)), (0, (4,)), (3, (0,))):
        memory.journal.capture(table, ids(*rows))
        scribble(memory.space, table, rows[:1], rng)  # the other row is captured and unchanged
    words, edges = changes(memory.journal)
    bounds = memory.space.bounds
    assert len(edges) == len(bounds)
    delta = everything(memory.space) ^ before
    got, times = np.zeros_like(delta), np.zeros(len(delta), int)
    for block, (a, b) in enumerate(itertools.pairwise(edges)):
        for one in unpack(words[a:b]):
            assert one.block == block
            for offset, part in zip(one.offsets.tolist(), one.words, strict=True):
                at = bounds[block] + offset
                assert at + len(part) <= bounds[block + 1]
                got[at : at + len(part)] = part
                times[at : at + len(part)] += 1
    assert np.array_equal(got, delta)
    width = [2, 1, 1, 5]
    captured = [(0, 3), (0, 4), (0, 11), (2, 0), (2, 1), (2, 6), (3, 0)]
    expected = np.zeros_like(times)
    for table, row in captured:
        at = memory.space.bases[table] + row * width[table]
        expected[at : at + width[table]] = 1
    assert np.array_equal(times, expected)


def test_a_lone_records_unchanged_end_is_not_sent(memory: RankMemory) -> None:
    """Rank state fills only a part of its record."""
    for changed in ((), (0,), (0, 17)):
        memory.journal.arm(1)
        memory.journal.capture(3, ids(0))
        memory.space.tables[3].columns[0][0, list(changed)] ^= 255
        words, edges = changes(memory.journal)
        [delta] = unpack(words[: edges[-1]])
        assert delta.words.shape == (1, max(changed, default=-8) // 8 + 1)
        memory.journal.undo()


def test_without_captures_there_are_no_changes(memory: RankMemory) -> None:
    memory.journal.arm(1)
    _, edges = changes(memory.journal)
    assert set(edges) == {0}
    assert memory.journal.undo() == 0


def test_a_window_is_undone_as_a_whole(memory: RankMemory, seed: int) -> None:
    rng = random.Random(seed)
    journal, before = memory.journal, everything(memory.space)
    journal.arm(1)
    for label in (2, 3, 4):
        for table in (0, 2, 0):
            rows = rng.choices(range(LAYOUTS[table].rows), k=6)
            journal.capture(table, ids(*rows))
            scribble(memory.space, table, sorted(set(rows)), rng)
        if label < 4:
            journal.extend(label)
            assert journal.label == label
    words, edges = changes(journal)
    got = np.zeros_like(before)
    for block, (a, b) in enumerate(itertools.pairwise(edges)):
        for one in unpack(words[a:b]):
            for offset, part in zip(one.offsets.tolist(), one.words, strict=True):
                at = memory.space.bounds[block] + offset
                assert not got[at : at + len(part)].any(), "each row once, whatever the steps that changed it"
                got[at : at + len(part)] = part
    assert np.array_equal(got, everything(memory.space) ^ before)
    another_process(memory).undo()
    assert np.array_equal(everything(memory.space), before)
    journal.arm(5)
    assert journal.capture(0, ids(*range(12))) == 12  # nothing is left of the window before


def test_an_emptied_journal_takes_the_same_rows_again(memory: RankMemory, seed: int) -> None:
    before = everything(memory.space)
    memory.journal.arm(1)
    memory.journal.capture(0, ids(3, 1, 3))
    scribble(memory.space, 0, (1, 3), random.Random(seed))
    memory.journal.empty()
    assert np.array_equal(everything(memory.space), before)
    assert memory.arena.get("rows_bytes") == 0
    assert memory.journal.capture(0, ids(3)) == 1


def test_arming_empties_the_journal_before_it_takes_the_new_label(memory: RankMemory) -> None:
    """Section 3.1: a new label over old entries would undo a committed transaction."""
    memory.journal.arm(1)
    memory.journal.capture(0, ids(1))
    stores: list[tuple[str, int]] = []
    store = Arena.set

    def seen(self: Arena, name: str, value: int) -> None:
        stores.append((name, value))
        store(self, name, value)

    with mock.patch.object(Arena, "set", seen):
        memory.journal.arm(2)
    assert stores == [("rows_bytes", 0), ("rows_label", 2)]
    assert another_process(memory).undo() == 0


def test_a_capture_that_is_cut_off_leaves_only_whole_entries(memory: RankMemory, seed: int) -> None:
    """Section 3.2: the entry first, then the count, then the data."""
    rng = random.Random(seed)
    before = everything(memory.space)
    for end in range(1, 12):
        memory.space.write_(0, before)
        moments = Moments({0: end})
        journal = another_process(memory, Torn())

        def step(journal: RowJournal = journal) -> None:
            try:
                journal.arm(1)
                for table, rows in ((0, (1, 2, 8)), (2, (0, 3))):
                    journal.capture(table, ids(*rows))
                    scribble(memory.space, table, rows, rng)
            except Killed:
                pass

        with watched(moments):
            thread = threading.Thread(target=step, name="0")
            thread.start()
            thread.join()
        another_process(memory).undo()
        assert np.array_equal(everything(memory.space), before)
    assert moments.counts[0] < end, "every moment was tried"


def test_too_little_room_saves_nothing(memory: RankMemory) -> None:
    memory.journal.arm(1)
    memory.journal.capture(0, ids(1))
    used = memory.arena.get("rows_bytes")
    full = mock.patch.object(Arena, "reserve", side_effect=NotEnoughSpace("full"))
    with full, pytest.raises(NotEnoughSpace):
        memory.journal.capture(0, ids(2, 3))
    assert memory.arena.get("rows_bytes") == used
    assert memory.journal.capture(0, ids(2, 3)) == 2  # they count as not yet saved


@pytest.mark.parametrize("where", ["RowJournal._save", "Scratch.room"])
def test_a_capture_that_an_exception_cuts_off_is_the_last(memory: RankMemory, where: str) -> None:
    """A signal's, say, that the script takes for its own: no row may seem to be saved that isn't."""
    memory.journal.arm(1)
    memory.journal.capture(0, ids(1))
    memory.journal.extend(2)
    with mock.patch(f"ecemb.memory.journal.{where}", side_effect=TimeoutError), pytest.raises(TimeoutError):
        memory.journal.capture(0, ids(1, 2))
    for _ in range(2):
        with pytest.raises(StepFailed, match="an exception interrupted the saving of rows"):
            memory.journal.capture(0, ids(2))
    assert another_process(memory).undo() == 1


def test_a_damaged_journal_undoes_nothing(memory: RankMemory, seed: int) -> None:
    memory.journal.arm(1)
    memory.journal.capture(0, ids(1))
    memory.journal.capture(2, ids(3))
    scribble(memory.space, 0, (1,), random.Random(seed))
    now = everything(memory.space)
    memory.arena.region("row_journal")[:8].view(np.int64)[0] = 99
    with pytest.raises(InconsistentArenas, match="refers to table 99.*nothing was undone"):
        another_process(memory).undo()
    assert np.array_equal(everything(memory.space), now)
