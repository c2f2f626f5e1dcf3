"""A step that is decided beside the next one's body: what waits for it, and what its failure takes back.

That kills do no harm is the simulator's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.errors import NotEnoughSpace, PeerFailure, UsageError
from ecemb.memory.rank_memory import RankMemory
from ecemb.net.watch import EXIT_UNDECIDED
from ecemb.step.agreement import Agreement
from ecemb.step.transaction import Transactions
from ecemb.step.window import Window
from support.simulation import SMALL, WAIT_S, Hub, Wires, alone, begun


class Held(Wires):
    """The wires of a rank that is alone; exchanges wait until they are let go."""

    def __init__(self) -> None:
        super().__init__(Hub(1), 0, 1)
        self.go = threading.Event()
        self.error: Exception | None = None

    def hold(self, *args: object) -> None:
        assert self.go.wait(WAIT_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[RankMemory]:
    with alone(tmp_path, SMALL) as opened:
        yield opened


@pytest.fixture
def wires() -> Held:
    return Held()


@pytest.fixture
def transactions(memory: RankMemory, wires: Held) -> Iterator[Transactions]:
    found = begun(memory, wires, overlap=True)
    found._agreement.exchange = wires.hold
    yield found
    wires.go.set()
    found.close()


def change(transactions: Transactions, memory: RankMemory, value: int) -> None:
    """A step's body, which changes rows 1 and 3."""
    rows = np.array([1, 3], np.int64)
    transactions.capture(0, rows)
    memory.space.tables[0].columns[0][rows] = value


def begin_two(transactions: Transactions, memory: RankMemory) -> None:
    """A step that is handed over, and the body of the next one."""
    transactions.begin()
    change(transactions, memory, 1)
    transactions.commit()
    transactions.begin()
    change(transactions, memory, 2)


def rows(memory: RankMemory) -> list[int]:
    return memory.space.tables[0].columns[0][[1, 3]].max(axis=1).tolist()


def test_a_window_is_committed_beside_all_steps_of_the_next_one(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    transactions.window = Window(2)
    for value in range(3):
        transactions.begin()
        change(transactions, memory, value)
        transactions.commit()
    assert (memory.committed, transactions.next_step) == (0, 3)  # the third step has not waited
    transactions.begin()
    change(transactions, memory, 3)
    threading.Timer(0.05, wires.go.set).start()
    transactions.commit()
    assert memory.committed >= 2
    transactions.drain()
    assert memory.committed == transactions.next_step == 4


class Elsewhere:
    """Stands in for images: notes the step in which rows are staged, and stored."""

    def __init__(self, transactions: Transactions, *, is_held: bool = True) -> None:
        self._transactions, self.is_held = transactions, is_held
        self.taken: list[int] = []
        self.stored: list[tuple[int, bool]] = []

    def take(self) -> Rows:
        self.taken.append(self._transactions.next_step)
        return Rows(self, self.taken[-1])

    def store(self, step: int, capture: Callable[[int, NDArray[np.int64]], None]) -> None:
        self.stored.append((step, threading.current_thread() is not threading.main_thread()))
        capture(0, np.array([len(self.stored)]))


class Rows:
    """What it has staged in a step."""

    size_bytes = 0

    def __init__(self, elsewhere: Elsewhere, step: int) -> None:
        self._elsewhere, self._step = elsewhere, step
        self.is_held = elsewhere.is_held

    def store(self, capture: Callable[[int, NDArray[np.int64]], None]) -> None:
        self._elsewhere.store(self._step, capture)


def test_the_end_of_a_window_brings_rows_that_lie_elsewhere(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    """Once, also when it is drained, by the thread that commits."""
    brought: Any = Elsewhere(transactions)
    transactions._off_arena.images = brought
    transactions.window = Window(3)
    wires.go.set()
    for value in range(7):
        transactions.begin()
        change(transactions, memory, value)
        transactions.commit()
    assert brought.taken == [2, 5]
    transactions.drain()
    transactions.drain()
    assert brought.taken == [2, 5, 7]
    assert brought.stored == [(2, True), (5, True), (7, True)]


def test_rows_that_lie_elsewhere_are_dropped_when_their_step_is_aborted(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    brought: Any = Elsewhere(transactions)
    transactions._off_arena.images = brought
    wires.go.set()
    for aborts in (False, True, False):
        transactions.begin()
        change(transactions, memory, 1)
        if aborts:
            transactions.abort()
        assert transactions.commit() == [0] * aborts
    transactions.drain()
    assert brought.taken == [0, 1, 2] and brought.stored == [(0, True), (2, True)]


def test_rows_that_can_t_be_set_aside_are_brought_at_once(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    brought: Any = Elsewhere(transactions, is_held=False)
    transactions._off_arena.images = brought
    wires.go.set()
    transactions.begin()
    change(transactions, memory, 1)
    transactions.commit()
    assert brought.stored[0] == (0, False)


def test_rows_from_elsewhere_are_journalled_with_the_transaction_that_changed_them(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    """Although the next one has begun by then; and a failure takes them back."""
    rows = memory.space.tables[0].columns[0]
    was = rows.copy()

    class Late(Elsewhere):
        def store(self, step: int, capture: Callable[[int, NDArray[np.int64]], None]) -> None:
            begun.wait()
            capture(0, np.array([1]))
            rows[1] ^= 255

    begun = threading.Event()
    late: Any = Late(transactions)
    transactions._off_arena.images = late
    transactions.begin()
    first = memory.journal
    transactions.commit()
    transactions.begin()
    second = memory.journal
    begun.set()
    wires.go.set()
    transactions.settle()
    assert memory.committed == 1 and first is not second
    assert [ids.tolist() for table, ids, _ in first.saved().chunks if table == 0] == [[1]]
    assert not [ids for table, ids, _ in second.saved().chunks if table == 0]
    assert (rows[1] != was[1]).any()


def test_a_failure_takes_back_what_the_commit_brought_from_elsewhere(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    rows = memory.space.tables[0].columns[0]
    was = rows.copy()

    class Full(Elsewhere):
        def store(self, step: int, capture: Callable[[int, NDArray[np.int64]], None]) -> None:
            capture(0, np.array([1]))
            rows[1] ^= 255
            raise NotEnoughSpace("no space for the second half")

    full: Any = Full(transactions)
    transactions._off_arena.images = full
    wires.go.set()
    transactions.begin()
    transactions.commit()
    transactions.begin()
    with pytest.raises(NotEnoughSpace, match="second half") as raised:
        transactions.settle()
    transactions.undo(raised.value)
    assert (rows == was).all() and memory.prepared == 0


def test_a_step_ends_before_it_is_committed_and_the_next_one_waits_for_it(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    begin_two(transactions, memory)
    assert (memory.committed, transactions.next_step, transactions.in_flight) == (0, 1, 2)
    threading.Timer(0.05, wires.go.set).start()
    transactions.commit()
    assert memory.committed >= 1
    assert transactions.next_step == 2
    transactions.drain()
    assert memory.committed == memory.arena.get("prepared") == 2
    assert transactions.next_step == 2
    assert {"wait", "exchange", "apply"} <= set(transactions.seconds)


def test_a_third_step_takes_the_journal_of_the_first(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    begin_two(transactions, memory)
    first, second = (memory.arena.get(word) for word in ("rows_label", "next_label"))
    assert (first, second) == (1, 2)
    wires.go.set()
    transactions.commit()
    transactions.begin()
    assert memory.journal.label == 3


def test_a_failure_beside_the_next_step_takes_both_back(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    begin_two(transactions, memory)
    wires.error = PeerFailure("gone")
    wires.go.set()
    with pytest.raises(PeerFailure, match="gone") as failure:
        transactions.commit()
    transactions.undo(failure.value)
    assert rows(memory) == [0, 0]
    assert (memory.committed, transactions.next_step, transactions.in_flight) == (0, 0, None)


@pytest.mark.parametrize("call", ["drain", "commit"])
def test_a_failure_is_told_by_whatever_waits_for_it(
    call: str, transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    transactions.begin()
    change(transactions, memory, 1)
    transactions.commit()
    wires.error = PeerFailure("gone")
    wires.go.set()
    if call == "commit":
        transactions.begin()
    with pytest.raises(PeerFailure) as failure:
        getattr(transactions, call)()
    transactions.undo(failure.value)
    assert rows(memory) == [0, 0]
    with pytest.raises(UsageError, match="no step is open"):
        transactions.undo(failure.value)


def test_a_body_that_raises_takes_back_its_own_step_only(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    begin_two(transactions, memory)
    threading.Timer(0.05, wires.go.set).start()
    transactions.undo(ValueError("in the body"))
    assert rows(memory) == [1, 1]
    assert (memory.committed, transactions.next_step) == (1, 1)


def test_an_interrupt_while_a_step_is_handed_over_takes_it_back(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    """Ctrl-C may come before the thread has the work; then the work is not done."""
    transactions.begin()
    change(transactions, memory, 1)
    thread = transactions._thread
    assert thread is not None
    interrupt = mock.patch.object(thread, "submit", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt) as error:
        transactions.commit()
    transactions.undo(error.value)
    assert rows(memory) == [0, 0]
    assert (memory.committed, memory.arena.get("prepared"), transactions.next_step) == (0, 0, 0)


def test_what_is_prepared_beside_the_next_step_ends_the_process(
    transactions: Transactions, memory: RankMemory, wires: Held
) -> None:
    """Section 3: nothing undoes locally; recovery decides."""

    class Ended(BaseException):
        pass

    with (
        mock.patch.object(os, "_exit", side_effect=Ended) as ended,
        mock.patch.object(Agreement, "vote", side_effect=PeerFailure("a deadline")),
    ):
        begin_two(transactions, memory)
        wires.go.set()
        with pytest.raises(Ended):
            transactions.drain()
    ended.assert_called_once_with(EXIT_UNDECIDED)
    assert rows(memory) == [2, 2]
    assert memory.arena.get("prepared") == 1
    assert memory.roll_to(1) == (2, True)
    assert rows(memory) == [1, 1]
