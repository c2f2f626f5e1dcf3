"""The parity journal: what it names, and rows that are not there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ecemb.coding.parity import Delta
from ecemb.errors import InconsistentArenas, UsageError
from ecemb.memory.header import NONE
from ecemb.memory.journal import ParityJournal
from ecemb.memory.rank_memory import RankMemory
from support.simulation import Machines, job_of


@pytest.fixture
def memory(tmp_path: Path, seed: int) -> Iterator[RankMemory]:
    machines = Machines(tmp_path / "a", job_of(3, 2, 3, random.Random(seed)))
    assert not machines.run(0).failures
    with machines.memories() as memories:
        yield memories[0]


def test_a_transaction_begins_with_no_row(memory: RankMemory) -> None:
    journal = ParityJournal(memory.arena)
    assert (journal.label, journal.row) == (NONE, NONE)
    received = [(1, Delta(0, np.arange(5), np.zeros((5, width), np.uint64))) for width in (1, 3, 0)]
    journal.reserve(received)
    journal.places(received)[:] = [[1, 2, 3], [4, 5, 6]]
    journal.begin(6)
    journal.mark[0] = 4
    again = ParityJournal(memory.arena)
    assert (again.label, again.row) == (6, 4)
    assert again.places(received).tolist() == [[1, 2, 3], [4, 5, 6]]
    again.begin(7)
    assert (again.label, again.row) == (7, NONE)


@pytest.mark.parametrize("row", [-2, 5, 2**62, -(2**63)])
def test_a_row_that_the_inbox_does_not_have_is_damage(memory: RankMemory, row: int) -> None:
    deltas = [(1, Delta(0, np.arange(count), np.zeros((count, 2), np.uint64))) for count in (2, 0, 3)]
    journal = memory.parity_journal
    for last in (NONE, 0, 4):
        journal.mark[0] = last
        assert journal.finished(deltas) == last + 1
    journal.mark[0] = row
    with pytest.raises(InconsistentArenas, match=rf"names row {row}, and the inbox has 5"):
        journal.finished(deltas)


def test_the_memory_of_a_row_s_number_is_the_arena_s(memory: RankMemory) -> None:
    journal = memory.parity_journal
    memory.arena.close()
    with pytest.raises(UsageError, match="closed"):
        _ = journal.mark
