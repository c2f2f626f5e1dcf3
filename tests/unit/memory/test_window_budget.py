"""How many steps of a window have room: what the last window says of the next one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ecemb.coding.rows import Column, TableLayout
from ecemb.memory import capacity, private_files, rank_memory
from ecemb.memory.header import Word
from ecemb.memory.rank_memory import RankMemory, WindowBudget, journal_bytes, with_owed
from support.simulation import alone

MIB = 1 << 20
LAYOUTS = [
    TableLayout("a", 64_000, (Column("weight", "float32", 1024),)),
    TableLayout("state", 1, (Column("state", "uint8", 40),)),
]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[RankMemory]:
    with alone(tmp_path, LAYOUTS) as opened:
        yield opened


def test_a_window_goes_on_as_its_last_quarter_did() -> None:
    spare = rank_memory._SPARE
    assert journal_bytes([100], 1) == 100 * spare
    assert journal_bytes([100], 5) == 500 * spare
    used = [1000, 1500, 1800, 2000, 2150, 2250, 2320, 2360]  # fewer new rows in each step
    assert journal_bytes(used, 3) == 1800 * spare
    assert journal_bytes(used, 8) == 2360 * spare
    assert journal_bytes(used, 10) == (2360 + 2 * 55) * spare


def free(size_bytes: int) -> object:
    return mock.patch.object(rank_memory, "free_bytes", return_value=size_bytes)


@pytest.mark.parametrize(("free_mib", "copies", "steps"), [(45, 1, 40), (90, 2, 40), (90, 1, 200), (0, 1, 1)])
def test_as_many_steps_as_the_free_memory_holds(
    free_mib: int, copies: int, steps: int, memory: RankMemory
) -> None:
    with free(free_mib * MIB):  # pyright: ignore
        one = WindowBudget(memory.arena, dict.fromkeys(["row_journal", "next_journal"][:copies], 1))
        assert one.steps(200, [MIB], 0) == steps


def test_memory_that_the_regions_have_already_counts(memory: RankMemory) -> None:
    memory.arena.reserve("row_journal", 36 * MIB, spare_bytes=0)
    with free(0):  # pyright: ignore
        one = WindowBudget(memory.arena, {"row_journal": 1, "": 1})
        assert one.steps(200, [MIB], 36 * MIB) == 32
        assert one.steps(200, [MIB], 18 * MIB) == 16
        assert one.steps(10, [MIB], 18 * MIB) == 10
        assert not one.has_all()


def test_no_window_needs_more_than_all_rows(memory: RankMemory) -> None:
    size = len(memory.arena.region("row_journal"))
    with free(size):  # pyright: ignore
        one = WindowBudget(memory.arena, {"row_journal": 1})
        assert one.has_all() and one.steps(1000, [size // 2], 0) == 1000
    with free(size // 2):  # pyright: ignore
        assert not WindowBudget(memory.arena, {"row_journal": 1}).has_all()


def test_ranks_of_one_host_share_what_is_free(memory: RankMemory) -> None:
    object.__setattr__(memory.arena.constants, "domains", ("here", "there", "here"))
    with free(90 * MIB):  # pyright: ignore
        assert WindowBudget(memory.arena, {"row_journal": 1}).steps(200, [MIB], 0) == 40


def test_the_kernel_says_what_is_free(memory: RankMemory) -> None:
    before = rank_memory.free_bytes(memory.arena)
    assert before > 0
    limits = mock.patch("ecemb.memory.capacity.limits", return_value=[])
    with limits:
        assert rank_memory.free_bytes(memory.arena) > before, "a file system without limits"


def test_windows_leave_a_reserve_to_the_host(memory: RankMemory) -> None:
    limits = [capacity.Limit("the mount", 90 * MIB, "."), capacity.Limit("the sky", 94 * MIB, ".", 4 * MIB)]
    with mock.patch("ecemb.memory.capacity.limits", return_value=limits):
        assert (rank_memory.free_bytes(memory.arena), memory.reserve_bytes) == (90 * MIB, 4 * MIB)
        limits[0] = capacity.Limit("the mount", 92 * MIB, ".", 0)
        assert rank_memory.free_bytes(memory.arena) == 90 * MIB


def test_a_swept_folder_is_no_error(memory: RankMemory) -> None:
    """Training goes on without its name in /dev/shm, and so do windows."""
    memory.arena.remove()
    shutil.rmtree(private_files.home(memory.arena.path.parents[3]), ignore_errors=True)
    assert not memory.arena.is_named()
    assert (
        WindowBudget(memory.arena, {"row_journal": 1}).steps(3, [memory.arena.reserved("row_journal")], 0) > 0
    )


def test_a_journal_knows_what_its_steps_took(memory: RankMemory) -> None:
    memory.arm(1, 3)
    for step, rows in enumerate((10, 4, 0)):
        if step:
            memory.journal.extend(1 + step)
        memory.journal.capture(0, np.arange(100 * step, 100 * step + rows))
    first, second, third = memory.journal.used_by_step
    assert 0 < first < second == third == memory.arena.get(Word.ROWS_BYTES)
    assert memory.window_room(50, overlap=True) == 50
    assert memory.has_room_for_all(overlap=False)
    memory.arm(4)
    assert memory.journal.used_by_step == [0]


def test_rows_that_a_window_s_end_adds_count_from_its_first_steps_on() -> None:
    assert with_owed([7, 8, 8], 0) == [7, 8, 8]
    grown = with_owed([10, 20, 20, 20], 1000)
    assert grown[-1] == 1020 and grown == sorted(grown)
    assert grown[0] == 10 + 500  # more than a quarter: popular rows come first
