"""A step commits on all ranks or on none: failures of one rank, and calls in the wrong order.

Ranks are threads here (see simulation.py); that kills do no harm is the simulator's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import random
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest
import torch

from ecemb.errors import (
    ConfigurationError,
    InconsistentArenas,
    NotEnoughSpace,
    PeerFailure,
    StepFailed,
    UsageError,
)
from ecemb.memory.journal import Inbox
from ecemb.memory.rank_memory import RankMemory, Slots
from ecemb.net.watch import EXIT_UNDECIDED
from ecemb.recovery import state_slices
from ecemb.state.replicated import ReplicatedState
from ecemb.step.agreement import Agreement
from ecemb.step.transaction import Transactions
from ecemb.step.window import Window
from support.simulation import (
    SMALL,
    Hub,
    Killed,
    Life,
    Machines,
    Position,
    Rank,
    Wires,
    alone,
    begun,
    job_of,
)

DONE = 2


@pytest.fixture
def machines(tmp_path: Path, seed: int) -> Machines:
    """A job of four ranks that has done two steps."""
    machines = Machines(tmp_path / "job", job_of(4, 2, 4, random.Random(seed)))
    assert not machines.run(DONE).failures
    return machines


def goes_on(machines: Machines) -> Life:
    """The restart: nothing of the failed step is left, and the job ends as if it had never been."""
    life = machines.run(DONE + 2)
    assert not life.failures
    assert life.plan.kind == "process"
    assert life.plan.transaction == DONE
    machines.check(DONE + 2)
    return life


# --- one rank fails -----------------------------------------------------------------------------


def raising(rank: int, error: BaseException) -> Callable[[Rank, int], None]:
    def body(one: Rank, step: int) -> None:
        if one.memory.rank == rank:
            raise error

    return body


@pytest.mark.parametrize("error", [ValueError("bad batch"), MemoryError(), SystemExit(3)], ids=repr)
def test_an_exception_on_one_rank_undoes_the_step_on_all(error: BaseException, machines: Machines) -> None:
    life = machines.run(DONE + 1, body=raising(2, error))
    assert life.failures.pop(2) is error
    assert {type(one) for one in life.failures.values()} == {StepFailed}
    assert all("failed on ranks [2]" in str(one) for one in life.failures.values())
    assert all("goes on from step 2" in str(one) for one in life.failures.values())
    is_taken_back(life, machines)
    goes_on(machines)


def is_taken_back(life: Life, machines: Machines) -> None:
    """Every process, and its memory, is where it was before the step, or the window."""
    machines.check(DONE)
    for rank, one in life.ranks.items():
        position = Position(rank)
        for step in range(DONE):
            position.run(step)
        assert one.position.value == position.value
        assert one.transactions.in_flight is None


@pytest.mark.parametrize("draining", [False, True])
def test_an_exception_in_a_window_undoes_all_its_steps(draining: bool, machines: Machines) -> None:
    """In a step that is not the first, and in the commit of a window that is not full."""
    machines.job = dataclasses.replace(machines.job, window=3)
    error = ValueError("bad batch")

    def body(one: Rank, step: int) -> None:
        if one.memory.rank == 2 and step == DONE + 1:
            if draining:
                one.replicated.save = mock.Mock(side_effect=error)
            else:
                raise error

    life = machines.run(DONE + 2, body=body)
    assert life.failures.pop(2) is error
    assert {type(one) for one in life.failures.values()} == {StepFailed}
    assert all(
        f"step {DONE + 1} failed on ranks [2]" in str(one) and f"goes on from step {DONE}" in str(one)
        for one in life.failures.values()
    )
    is_taken_back(life, machines)
    goes_on(machines)


def test_ranks_that_failed_are_named(machines: Machines) -> None:
    """The first that is heard of ends the status: there may be more."""

    def body(one: Rank, step: int) -> None:
        if one.memory.rank != 1:
            raise ValueError(step)

    life = machines.run(DONE + 1, body=body)
    assert re.search(r"failed on ranks \[[023]\]", str(life.failures[1]))
    goes_on(machines)


def test_dense_state_of_a_failed_process_is_said_to_be_undefined(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ecemb")  # of ranks whose failure follows from another's
    life = machines.run(DONE + 1, body=raising(0, ValueError()))
    said = [one.message for one in caplog.records if "undoing it" in one.message]
    assert len(said) == machines.job.size == len(life.failures)
    assert all("dense state stays undefined in this process" in one for one in said)
    machines.check(DONE)  # the arenas'
    goes_on(machines)


def failing_on(rank: int, name: str, error: Exception) -> mock._patch[Callable[..., object]]:
    """One rank's method of `RankMemory` raises, or of `Inbox`."""
    owner = RankMemory if hasattr(RankMemory, name) else Inbox
    method = getattr(owner, name)

    def fails(self: RankMemory | Inbox, *args: object) -> object:
        arena = self.arena if isinstance(self, RankMemory) else self._arena
        if arena.constants.rank == rank and arena.get("committed") == DONE:
            raise error
        return method(self, *args)

    return mock.patch.object(owner, name, fails)


def test_a_journal_without_room_fails_the_step_on_all(machines: Machines) -> None:
    """Before the status: the others learn it by that."""
    with failing_on(3, "capture_rank_state", NotEnoughSpace("full")):
        life = machines.run(DONE + 1)
    assert type(life.failures.pop(3)) is NotEnoughSpace
    assert {type(one) for one in life.failures.values()} == {StepFailed}
    goes_on(machines)


def test_an_inbox_that_is_full_fails_the_step_on_all(machines: Machines) -> None:
    """After the verdict the others learn it by its vote.

    Who has prepared by then ends undecided; who has not undoes.
    """
    with failing_on(1, "receive", NotEnoughSpace("full")):
        life = machines.run(DONE + 1)
    assert type(life.failures.pop(1)) is NotEnoughSpace
    assert len(life.failures) == machines.job.size - 1
    assert {type(one) for one in life.failures.values()} <= {StepFailed, PeerFailure, Killed}
    goes_on(machines)


def test_a_state_that_cannot_be_packed_fails_the_step_on_all(machines: Machines) -> None:
    def body(one: Rank, step: int) -> None:
        if one.memory.rank == 0:
            one.position.pack = mock.Mock(side_effect=ConfigurationError("a set"))

    life = machines.run(DONE + 1, body=body)
    assert type(life.failures.pop(0)) is ConfigurationError
    assert {type(one) for one in life.failures.values()} == {StepFailed}
    goes_on(machines)


def test_replicas_that_drift_apart_are_noticed_in_the_first_step(tmp_path: Path, seed: int) -> None:
    def body(one: Rank, step: int) -> None:
        if one.memory.rank == 1:
            with torch.no_grad():
                one.model.bias.add_(1)

    machines = Machines(tmp_path / "job", job_of(2, 1, 2, random.Random(seed)))
    life = machines.run(1, body=body)
    assert {type(one) for one in life.failures.values()} == {StepFailed}
    assert all("replicated state" in str(one) for one in life.failures.values())
    assert all(
        "bias is the first that differs, on rank [1] from" in str(one) for one in life.failures.values()
    )
    machines.check(0)


def test_a_later_drift_is_noticed_when_replicas_are_compared_again(tmp_path: Path, seed: int) -> None:
    def body(one: Rank, step: int) -> None:
        if step == 2 and one.memory.rank == 2:
            with torch.no_grad():
                one.model.bias.add_(1)

    machines = Machines(tmp_path / "job", job_of(3, 1, 3, random.Random(seed)))
    init = Transactions.__init__
    every = functools.partialmethod(init, compare_every=4)
    with mock.patch.object(Transactions, "__init__", every):
        life = machines.run(8, body=body)
    assert {type(one) for one in life.failures.values()} == {StepFailed}
    assert all("in step 4: " in str(one) for one in life.failures.values())  # commits 1 and 5 are compared
    assert all("on rank [2] from" in str(one) for one in life.failures.values())


def test_ranks_in_different_steps_are_noticed(machines: Machines) -> None:
    """A rank that skipped a step would send deltas of another transaction."""
    conclude = Agreement.conclude

    def ahead(self: Agreement, transaction: int, *args: Any, **more: Any) -> object:
        return conclude(self, transaction + (self._transport.rank == 2), *args, **more)

    with mock.patch.object(Agreement, "conclude", ahead):
        life = machines.run(DONE + 1)
    assert {type(one) for one in life.failures.values()} == {StepFailed}
    assert "rank 0 ends step 2, and rank 2 step 3" in str(life.failures[0])
    goes_on(machines)


# --- one rank alone, call by call ---------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[RankMemory]:
    with alone(tmp_path, SMALL) as opened:
        yield opened


@pytest.fixture
def transactions(memory: RankMemory) -> Transactions:
    return begun(memory, Wires(Hub(1), 0, 1))


def ids(*rows: int) -> np.ndarray:
    return np.array(rows, np.int64)


def test_transactions_count_up_and_alternate_the_slots(
    transactions: Transactions, memory: RankMemory
) -> None:
    for expected in range(1, 5):
        assert transactions.begin() == expected
        assert transactions.in_flight == expected
        transactions.capture(0, ids(1, 3))
        transactions.commit()
        assert transactions.in_flight is None
        assert memory.committed == memory.arena.get("prepared") == expected
        for kept in (expected - 1, expected):
            assert len(Slots(memory.arena).read(kept))
    assert transactions.captured_rows == 8
    phases = {"compare", "capture", "state", "delta", "status", "exchange", "agree", "apply"}
    assert set(transactions.seconds) == phases


def test_calls_in_the_wrong_order(transactions: Transactions, memory: RankMemory) -> None:
    with pytest.raises(UsageError, match="no step is open"):
        transactions.commit()
    with pytest.raises(UsageError, match="no step is open"):
        transactions.undo(ValueError())
    transactions.begin()
    with pytest.raises(UsageError, match="step 0 is open"):
        transactions.begin()
    transactions.undo(ValueError())
    with pytest.raises(UsageError, match="no step is open"):
        transactions.undo(ValueError())
    assert memory.committed == 0


@pytest.mark.parametrize("window", [2, "auto"])
def test_a_step_of_a_window_cannot_be_aborted(
    transactions: Transactions,
    memory: RankMemory,
    window: Literal[2, "auto"],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever the window's size is at the moment: "auto" measures steps first, and 2 may have no room.

    Nor does the log say that it is.
    """
    transactions.window = Window(window)
    transactions.window.agree(1)
    transactions.begin()
    with pytest.raises(UsageError, match=rf"step 0 can't be aborted in this loop with window={window!r}"):
        transactions.abort()
    assert transactions.aborts is None and "aborts step" not in caplog.text
    assert transactions.commit() == []
    assert memory.committed == 1


def test_a_window_exchanges_and_copies_nothing_before_its_end(memory: RankMemory) -> None:
    wires = Wires(Hub(1), 0, 1)
    transactions = begun(memory, wires)
    transactions.window = Window(3)
    with mock.patch.object(Agreement, "conclude", side_effect=AssertionError("an exchange in a window")):
        for step in range(2):
            transactions.begin()
            transactions.capture(0, ids(0, step + 1))
            memory.space.tables[0].columns[0][[0, step + 1]] += 1
            assert transactions.commit() == []
    assert transactions.captured_rows == 3
    assert (memory.committed, transactions.next_step) == (0, 2)
    transactions.begin()
    assert transactions.commit() == []
    assert memory.committed == transactions.next_step == 3


def test_an_aborted_step_is_committed_empty(transactions: Transactions, memory: RankMemory) -> None:
    with pytest.raises(UsageError, match="no step is open"):
        transactions.abort()
    before = memory.space.read(0, memory.space.words)
    transactions.begin()
    transactions.capture(0, ids(0, 5))
    memory.space.tables[0].columns[0][[0, 5]] = 7
    transactions.abort()
    transactions.abort()
    assert transactions.commit() == [0]
    assert np.array_equal(memory.space.read(0, memory.space.words), before)
    assert memory.committed == memory.arena.get("prepared") == 1
    transactions.begin()
    transactions.capture(0, ids(1))
    memory.space.tables[0].columns[0][1] = 8
    assert transactions.commit() == []
    assert memory.committed == 2


def test_an_aborted_step_that_raises_fails(transactions: Transactions, memory: RankMemory) -> None:
    transactions.begin()
    transactions.abort()
    transactions.undo(ValueError())
    assert memory.committed == 0
    assert transactions.aborts is None


def test_all_ranks_learn_who_aborted(machines: Machines) -> None:
    machines.job = dataclasses.replace(machines.job, aborts=frozenset([(DONE, 1), (DONE, 3)]))
    told: dict[int, list[int]] = {}
    commit = Transactions.commit

    def noting(self: Transactions) -> list[int]:
        told[self._memory.rank] = commit(self)
        return told[self._memory.rank]

    with mock.patch.object(Transactions, "commit", noting):
        assert not machines.run(DONE + 1).failures
    assert told == {rank: [1, 3] for rank in range(4)}
    machines.check(DONE + 1)
    assert not machines.run(DONE + 3).failures
    machines.check(DONE + 3)


def aborting(machines: Machines, *steps: int, overlap: bool = False) -> Machines:
    """Rank 1 aborts these steps."""
    aborts = frozenset((step, 1) for step in steps)
    machines.job = dataclasses.replace(machines.job, aborts=aborts, overlap=overlap)
    return machines


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("window", [1, 3])
def test_aborts_in_a_row_go_back_to_the_last_commit(machines: Machines, window: int, overlap: bool) -> None:
    """Of each of them, which is empty; and all that an aborted step has changed is gone, on all ranks.

    The good steps of a window run again. Rank 2 aborts a step before the first one that rank 1 aborts.
    """
    aborting(machines, DONE, DONE + 1, DONE + 5, DONE + 6, overlap=overlap)
    aborts = machines.job.aborts | {(DONE + 4, 2)}
    machines.job = dataclasses.replace(machines.job, aborts=aborts, window=window)
    assert not machines.run(DONE + 8).failures
    machines.check(DONE + 8)


def test_a_rank_that_has_no_slices_for_an_abort_tells_all(machines: Machines) -> None:
    def damaged(memory: RankMemory, transaction: int) -> Any:
        if memory.rank == 2:
            raise InconsistentArenas("no slot has it")
        return read(memory, transaction)

    read = state_slices._read
    with mock.patch.object(state_slices, "_read", damaged):
        life = aborting(machines, DONE).run(DONE + 1)
    assert {type(error) for error in life.failures.values()} == {InconsistentArenas, PeerFailure}
    assert all("no slot has it" in str(error) for error in life.failures.values())
    assert life.committed == DONE
    machines.job = dataclasses.replace(machines.job, aborts=frozenset())
    goes_on(machines)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (state_slices, "_chunks_of", PeerFailure("rank 0 is gone")),  # in the gather
        (ReplicatedState, "load", MemoryError()),
        (ReplicatedState, "load", KeyboardInterrupt()),
    ],
)
def test_a_rank_that_fails_in_an_abort_keeps_nobody_waiting(
    machines: Machines, owner: Any, name: str, error: BaseException
) -> None:
    """Nor waits for others: in the gather they notice its end."""
    method, training = getattr(owner, name), set[str]()

    def failing(*arguments: Any) -> Any:
        if threading.current_thread().name == "2" and "2" in training:
            raise error
        return method(*arguments)

    def body(rank: Rank, step: int) -> None:
        training.add(str(rank.memory.rank))

    with mock.patch.object(owner, name, failing):
        life = aborting(machines, DONE).run(DONE + 1, body=body)
    assert life.failures[2] is error
    assert {type(one) for one in life.failures.values()} <= {type(error), PeerFailure, StepFailed}
    assert set(life.failures) == set(range(4)) and life.committed == DONE
    machines.job = dataclasses.replace(machines.job, aborts=frozenset())
    goes_on(machines)


def test_undo_gives_rows_and_states_back(transactions: Transactions, memory: RankMemory) -> None:
    before = memory.space.read(0, memory.space.words)
    transactions.begin()
    transactions.capture(0, ids(0, 5))
    memory.space.tables[0].columns[0][[0, 5]] = 7
    transactions.undo(ValueError())
    assert np.array_equal(memory.space.read(0, memory.space.words), before)


def test_ctrl_c_while_a_failure_is_announced_takes_no_row_with_it(
    transactions: Transactions, memory: RankMemory
) -> None:
    before = memory.space.read(0, memory.space.words)
    transactions.begin()
    transactions.capture(0, ids(0, 5))
    memory.space.tables[0].columns[0][[0, 5]] = 7
    with (
        mock.patch.object(Agreement, "leave", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        transactions.undo(ValueError())
    assert np.array_equal(memory.space.read(0, memory.space.words), before)
    assert transactions.in_flight is None


def test_undo_before_the_journal_is_armed_leaves_the_committed_step_alone(
    transactions: Transactions, memory: RankMemory
) -> None:
    """Ctrl-C may come between: the journal still holds the old records of the step before."""
    transactions.begin()
    transactions.capture(0, ids(0, 5))
    memory.space.tables[0].columns[0][[0, 5]] = 7
    transactions.commit()
    committed = memory.space.read(0, memory.space.words)
    interrupt = mock.patch.object(memory.journal, "arm", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt) as error:
        transactions.begin()
    transactions.undo(error.value)
    assert np.array_equal(memory.space.read(0, memory.space.words), committed)


@pytest.mark.parametrize("where", ["vote", "apply", "commit"])
def test_what_is_prepared_is_never_undone_in_the_process(
    where: str, transactions: Transactions, memory: RankMemory
) -> None:
    """Section 3: A timed out in the barrier and undid, B had committed. Recovery decides instead."""

    class Ended(BaseException):
        pass

    transactions.begin()
    transactions.capture(0, ids(2))
    memory.space.tables[0].columns[0][2] = 9
    owner = transactions._agreement if where == "vote" else memory
    failure = PeerFailure("a deadline")
    with mock.patch.object(owner, where, side_effect=failure), pytest.raises(PeerFailure):
        transactions.commit()
    changed = memory.space.read(0, memory.space.words)
    with mock.patch.object(os, "_exit", side_effect=Ended) as ended, pytest.raises(Ended):
        transactions.undo(failure)
    ended.assert_called_once_with(EXIT_UNDECIDED)
    assert np.array_equal(memory.space.read(0, memory.space.words), changed)
    assert memory.arena.get("prepared") == 1
    assert memory.roll_to(1) == (0, True)


def test_the_body_of_the_protocol_is_in_the_order_of_the_protocol(
    transactions: Transactions, memory: RankMemory
) -> None:
    """Section 3, numbers 1 to 8."""
    seen: list[str] = []

    def noting(owner: object, name: str) -> mock._patch[Callable[..., object]]:
        method = getattr(owner, name)

        def note(*args: object) -> object:
            seen.append(name)
            return method(*args)

        return mock.patch.object(owner, name, note)

    parts = [
        (memory.journal, "arm"),
        (memory.journal, "capture"),
        (transactions._replicated, "save"),
        (memory, "lay_out"),
        (transactions._agreement, "exchange"),
        (transactions._agreement, "_make_room"),
        (memory, "prepare"),
        (transactions._agreement, "vote"),
        (memory, "apply"),
        (memory, "commit"),
    ]
    patches = [noting(owner, name) for owner, name in parts]
    for patch in patches:
        patch.start()
    try:
        transactions.begin()
        transactions.commit()
    finally:
        for patch in patches:
            patch.stop()
    assert seen == [name for _, name in parts]
