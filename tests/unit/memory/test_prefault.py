"""Memory that is made ready beside the training: what is asked for, what is there, and what can't be."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ecemb.coding.rows import Column, TableLayout
from ecemb.errors import NotEnoughSpace
from ecemb.kernels.contract import get_kernels
from ecemb.memory import arena
from ecemb.memory.arena import Arena
from ecemb.memory.journal import Prefault, RowJournal
from ecemb.memory.rank_memory import RankMemory
from support.simulation import alone

ROWS = 4000
LAYOUTS = [
    TableLayout("a", ROWS, (Column("weight", "float32", 1024),)),
    TableLayout("state", 1, (Column("state", "uint8", 40),)),
]
ROW_BYTES = 1024 + 8


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[RankMemory]:
    with alone(tmp_path, LAYOUTS) as opened:
        yield opened


def test_what_was_asked_for_is_backed_and_mapped(memory: RankMemory) -> None:
    work = Prefault(memory.arena)
    work.ask("row_journal", 3 << 20)
    work.ask("row_journal", 1 << 20)
    work.wait()
    assert memory.arena.reserved("row_journal") >= work.ready("row_journal") == 3 << 20
    work.ask("row_journal", 1 << 40)  # its capacity is the most that there can be
    work.wait()
    assert work.ready("row_journal") == len(memory.arena.region("row_journal"))


def test_too_little_space_is_told_to_the_one_who_needs_it(memory: RankMemory) -> None:
    work = Prefault(memory.arena)
    with mock.patch.object(Arena, "reserve", side_effect=NotEnoughSpace("full")):
        work.ask("row_journal", 3 << 20)
        work.wait()
    assert work.ready("row_journal") == 0
    memory.arm(1)
    assert memory.journal.capture(0, np.arange(ROWS)) == ROWS


def test_an_arena_that_was_closed_meanwhile_ends_the_work(memory: RankMemory) -> None:
    work = Prefault(memory.arena)
    memory.arena.close()
    with mock.patch.object(memory.arena, "region", return_value=np.empty(1 << 20, np.uint8)):
        work.ask("row_journal", 1 << 20)
    work.wait()
    assert work.ready("row_journal") == 0


def test_where_no_thread_can_start_nothing_is_ready(memory: RankMemory) -> None:
    work = Prefault(memory.arena)
    with mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        work.ask("row_journal", 1 << 20)
    work.wait()
    assert work.ready("row_journal") == 0
    work.ask("row_journal", 2 << 20)
    work.wait()
    assert work.ready("row_journal") == 2 << 20


def test_a_closed_job_is_not_made_ready_any_more(memory: RankMemory) -> None:
    """A folder that was removed would come back."""
    memory._prefault.ask("row_journal", 1 << 20)
    memory.finish()
    assert memory._prefault._thread is None and memory._prefault.ready("row_journal") == 1 << 20


@pytest.mark.parametrize("refused", [False, True])
def test_mapping_pages_changes_nothing(refused: bool, tmp_path: Path) -> None:
    """Also on a kernel that doesn't know the call."""
    path = tmp_path / "mapped"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("r+b") as file:
        data = arena.map_shared(file.fileno(), 256 * 64)
    with mock.patch.object(arena, "_MADV_POPULATE_WRITE", 9999 if refused else 23):
        arena.populate(data[100:9000])
        arena.populate(data[:0])
    assert data.tobytes() == path.read_bytes() == bytes(range(256)) * 64


def test_a_window_asks_for_its_next_steps_before_it_needs_them(memory: RankMemory, seed: int) -> None:
    """From the second step on, no row waits for memory, and a window asks for no more than it may use."""
    rows = random.Random(seed).sample(range(ROWS), ROWS)
    steps, per_step = 40, 100
    memory.arm(1, steps)
    grown: list[int] = []
    for step in range(steps):
        if step:
            memory.journal.extend(1 + step)
            memory._prefault.wait()
            used = memory.journal.used_by_step[-1]
            assert memory._prefault.ready("row_journal") >= used + per_step * ROW_BYTES
        grown.append(memory.arena.reserved("row_journal"))
        memory.journal.capture(0, np.array(rows[step * per_step : (step + 1) * per_step]))
        if step:
            assert memory.arena.reserved("row_journal") == grown[-1], "rows had to wait for memory"
    assert grown[-1] <= memory.journal.used_by_step[-1] + (1 << 20)
    assert len(set(grown)) < 5, "it grows in large steps"


def test_the_other_journal_is_ready_for_as_much_as_this_one_took(memory: RankMemory) -> None:
    memory.arm(1)
    memory.journal.capture(0, np.arange(0, ROWS, 2))
    taken = memory.journal.used_by_step[-1]
    memory.arm(2)  # the first is undecided
    memory._prefault.wait()
    assert memory._prefault.ready("next_journal") >= taken


@pytest.mark.parametrize("rows", [10, 3000])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_a_new_transaction_saves_every_row_again(memory: RankMemory, rows: int, kernels: str) -> None:
    """However many the last one saved: few are taken out of the set one by one, many all at once."""
    work, ahead = get_kernels(kernels), Prefault(memory.arena)
    saved = RowJournal(memory.arena, memory.space, work, "row_journal", ahead, threading.Lock())
    for transaction in (1, 2, 3):
        saved.arm(transaction)
        for part in np.array_split(np.arange(rows), 3):
            assert saved.capture(0, part) == len(part)
        assert saved.capture(0, np.arange(rows)) == 0
