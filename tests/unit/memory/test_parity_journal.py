"""The parity journal: what it names, and rows that are not there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

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
    assert journal.places(received).shape[1:] == (2, 3)
    journal.places(received)[0] = [[1, 2, 3], [4, 5, 6]]
    journal.begin(6)
    journal.mark[0] = 4
    again = ParityJournal(memory.arena)
    assert (again.label, again.row) == (6, 4)
    assert again.places(received)[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    again.begin(7)
    assert (again.label, again.row) == (7, NONE)


@pytest.mark.parametrize("row", [-2, 5, 2**62, -(2**63)])
def test_a_row_that_the_inbox_does_not_have_is_damage(memory: RankMemory, row: int) -> None:
    deltas = [(1, Delta(0, np.arange(count), np.zeros((count, 2), np.uint64))) for count in (2, 0, 3)]
    journal = memory.parity_journal
    journal.reserve(deltas)
    for last in (NONE, 0, 4):
        journal.mark[0] = last
        assert journal.finished(deltas) == last + 1
    journal.mark[0] = row
    with pytest.raises(InconsistentArenas, match=rf"row {row}, after 0 complete rows, and the inbox has 5"):
        journal.finished(deltas)


def test_the_memory_of_a_row_s_number_is_the_arena_s(memory: RankMemory) -> None:
    journal = memory.parity_journal
    memory.arena.close()
    with pytest.raises(UsageError, match="closed"):
        _ = journal.mark


RECEIVED = [(1, Delta(0, np.arange(count) * 2, np.zeros((count, 2), np.uint64))) for count in (4, 6)]


def test_lanes_have_places_and_numbers_of_their_own(memory: RankMemory) -> None:
    journal = memory.parity_journal
    journal.reserve(RECEIVED, 3)
    places = journal.places(RECEIVED)
    assert len(places) >= 3 and places.shape[1:] == (2, 2)
    journal.begin(6)
    journal.mark[0] = 3
    saved, marks = journal.open([4, 6, 10], places)
    assert saved.shape == (2, 2, 2) and marks[:, 0].tolist() == [3, 5]
    assert journal.interrupted(RECEIVED, places) == [], "no row has begun to change"
    marks[1, 0] = 6
    saved[1] = [[7, 7], [8, 8]]
    again = ParityJournal(memory.arena)
    assert again.finished(RECEIVED) == 4 and not again.is_whole
    first, second = again.interrupted(RECEIVED, again.places(RECEIVED))
    assert (first.first, first.stop, first.mark.tolist()) == (4, 6, [3])
    assert (second.first, second.stop, second.mark.tolist()) == (6, 10, [6])
    assert second.saved.tolist() == [[7, 7], [8, 8]]
    again.close(10)
    assert again.interrupted(RECEIVED, places) == [] and again.is_whole and again.finished(RECEIVED) == 10


def test_lanes_that_name_no_row_are_void_while_others_are_written(memory: RankMemory) -> None:
    """docs/protocol.md, 10.4: a redo cuts the run into other lanes, and may end at each store."""
    journal = memory.parity_journal
    journal.reserve(RECEIVED, 3)
    places, store = journal.places(RECEIVED), ParityJournal._store
    journal.begin(6)
    journal.mark[0] = 3

    def stores(self: ParityJournal, *word: int) -> None:
        store(self, *word)
        assert ParityJournal(memory.arena).interrupted(RECEIVED, places) == []

    with mock.patch.object(ParityJournal, "_store", stores):
        for edges in ([4, 7, 10], [4, 6, 8, 10], [4, 10], [4, 5, 10]):
            journal.open(edges, places)


def test_a_process_that_ends_between_the_two_stores_of_close(memory: RankMemory) -> None:
    journal = memory.parity_journal
    journal.reserve(RECEIVED, 2)
    journal.begin(6)
    journal.open([0, 2, 4], journal.places(RECEIVED))
    journal.close(4)
    journal.mark[0] = NONE
    again = ParityJournal(memory.arena)
    assert again.finished(RECEIVED) == 4 and again.row == 3 and again.is_whole
    again.mark[0] = 4  # a row after the lanes, by one thread
    assert not again.is_whole
    again.begin(7)
    assert again.finished(RECEIVED) == 0


@pytest.mark.parametrize(
    ("lane", "word", "value"), [(1, 1, 3), (1, 2, 7), (2, 1, 5), (2, 2, 11), (2, 0, 10), (1, 0, 6), (2, 2, 4)]
)
def test_lanes_that_are_no_run_of_rows_are_damage(
    memory: RankMemory, lane: int, word: int, value: int
) -> None:
    journal = memory.parity_journal
    journal.reserve(RECEIVED, 2)
    journal.begin(6)
    journal.mark[0] = 3
    _, marks = journal.open([4, 6, 10], journal.places(RECEIVED))
    marks[0, 0] = 4
    marks[1, 0] = 7
    journal._head()[lane, word] = value
    with pytest.raises(InconsistentArenas, match=r"lanes with the rows and numbers .* after row 3"):
        journal.interrupted(RECEIVED, journal.places(RECEIVED))


def test_lanes_of_two_deltas_are_damage(memory: RankMemory) -> None:
    journal = memory.parity_journal
    journal.reserve(RECEIVED, 2)
    journal.begin(6)
    _, marks = journal.open([0, 4, 10], journal.places(RECEIVED))
    marks[0, 0] = 0
    with pytest.raises(
        InconsistentArenas, match=r"after row -1, and the deltas of the inbox end with .*4, 10"
    ):
        journal.interrupted(RECEIVED, journal.places(RECEIVED))
