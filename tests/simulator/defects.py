"""Defects that are planted in the product, to see within how many seeds the simulator finds each.

A defect leaves out one rule of the protocol (docs/protocol.md), by a patch of the function that has it. The
table says which seed found it first, and by what.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

import numpy as np

from ecemb.errors import PeerFailure
from ecemb.memory.header import State, Word
from ecemb.memory.journal import Inbox, ParityJournal, RowJournal
from ecemb.memory.rank_memory import RankMemory, Slots
from ecemb.net.collectives import Transport, Waits
from ecemb.recovery import execute
from ecemb.recovery.plan import RecoveryPlan, plan_recovery
from ecemb.start import agree
from ecemb.state.rank_state import RankState
from ecemb.state.replicated import ReplicatedState
from ecemb.step.agreement import Agreement
from ecemb.step.transaction import Transactions
from failures import sabotage
from failures.sabotage import Patch
from simulator import job

DEFECTS: dict[str, Callable[[], list[Patch]]] = {}


def defect(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Adds a defect to the table, under its function's name; the docstring is its line in the table."""
    DEFECTS[make.__name__] = make
    return make


# --- the step ---


@defect
def vote_is_not_awaited() -> list[Patch]:
    """Parity is changed without knowing that all ranks have prepared."""
    return sabotage.no_agreement()


@defect
def vote_ignores_a_no() -> list[Patch]:
    """A rank commits although another one has voted no."""

    def vote(self: Agreement, decision: Any, what: str) -> None:
        decision.voted = True
        decision.votes.run(np.array([1], np.int64), what)

    return [(Agreement, "vote", vote)]


@defect
def prepared_before_the_inbox() -> list[Patch]:
    """A rank says that it is prepared before its inbox is complete."""
    return sabotage.prepared_first()


@defect
def commit_before_parity() -> list[Patch]:
    """`committed` is stored before the deltas are added to parity."""
    apply, commit = RankMemory.apply, RankMemory.commit

    def commits(self: RankMemory, transaction: int, *rest: Any) -> None:
        commit(self, transaction)
        apply(self, transaction, *rest)

    return [(RankMemory, "apply", commits)]


@defect
def deltas_applied_twice() -> list[Patch]:
    """Redoing adds the rows to parity that the interrupted commit has added before."""
    return [(ParityJournal, "finished", lambda self, received: 0)]


@defect
def inbox_is_not_sealed() -> list[Patch]:
    """The inbox keeps the label of an earlier transaction."""
    return [(Inbox, "seal", lambda self, transaction: None)]


@defect
def rows_before_the_journal() -> list[Patch]:
    """Rows change before their old bytes are in the journal: the count is stored late."""
    return sabotage.rows_first()


@defect
def one_journal() -> list[Patch]:
    """A transaction begins in the journal that the one before may still need."""
    return sabotage.one_journal()


@defect
def oldest_undone_first() -> list[Patch]:
    """Of two transactions, the older one is undone first."""
    return sabotage.oldest_first()


@defect
def rank_state_is_not_captured() -> list[Patch]:
    """Rank state is overwritten without its old bytes in the journal."""
    return [(RankMemory, "capture_rank_state", lambda self, front=None: None)]


@defect
def committed_slot_is_overwritten() -> list[Patch]:
    """Dense state is written over that of the last commit."""

    def free(self: Slots) -> str:
        committed = self._arena.get(Word.COMMITTED)
        return "slot0" if self._arena.get(Word.SLOT0_LABEL) == committed else "slot1"

    return [(Slots, "_free", free)]


@defect
def prepared_is_undone_locally() -> list[Patch]:
    """A rank that fails after it has prepared undoes the transaction, in place of ending."""
    never: Any = property(lambda self: False)
    return [(Transactions, "_is_undecided", never)]


@defect
def abort_keeps_dense_state() -> list[Patch]:
    """An abort does not take dense state back."""
    undo_all = Transactions._undo_all

    def undoes(self: Transactions, *arguments: Any, **named: Any) -> None:
        replicated: Any = self._replicated
        replicated.load = lambda *_: None
        undo_all(self, *arguments, **named)
        del replicated.load

    return [(Transactions, "_undo_all", undoes)]


@defect
def abort_keeps_rank_state() -> list[Patch]:
    """An abort does not take rank state back."""
    unpack = RankState.unpack

    def unpacks(self: RankState, data: bytes, *, positions: bool = True) -> None:
        if positions:
            unpack(self, data, positions=positions)

    return [(RankState, "unpack", unpacks)]


# --- recovery ---


@defect
def no_undo() -> list[Patch]:
    """Recovery does not undo rows."""
    return [(RowJournal, "undo", lambda self: 0)]


@defect
def stale_journal_is_not_undone() -> list[Patch]:
    """Of two journals, only that of the newest transaction is undone."""

    def undo(self: RankMemory, transaction: int) -> int:
        undone = sorted((one for one in self.journals if one.label > transaction), key=lambda one: one.label)
        return undone[-1].undo() if undone else 0

    return [(RankMemory, "undo", undo)]


@defect
def redo_skips_parity() -> list[Patch]:
    """Redoing a prepared transaction leaves parity as it is."""
    roll_to = RankMemory.roll_to

    def without_parity(self: RankMemory, transaction: int) -> Any:
        parity, self.parity = self.parity, None
        try:
            return roll_to(self, transaction)
        finally:
            self.parity = parity

    return [(RankMemory, "roll_to", without_parity)]


@defect
def recovers_to_the_highest_prepared() -> list[Patch]:
    """Recovery takes the highest prepared transaction of the survivors, in place of the lowest."""
    return [(agree, "plan_recovery", _planned(max))]


@defect
def recovers_to_the_lowest_committed() -> list[Patch]:
    """Recovery takes the lowest committed transaction of the survivors."""
    return [(agree, "plan_recovery", _planned(min, "committed"))]


def _planned(choose: Callable[..., int], word: str = "prepared") -> Callable[..., RecoveryPlan]:
    def plan(headers: Sequence[Any], placement: Any, **named: Any) -> RecoveryPlan:
        made = plan_recovery(headers, placement, **named)
        if made.begins:
            return made
        of = [getattr(one, word) for one in headers if one.constants.rank in made.survivors]
        return dataclasses.replace(made, transaction=choose(of))

    return plan


@defect
def dense_state_is_not_restored() -> list[Patch]:
    """A start leaves dense state as the script has made it."""
    return [(ReplicatedState, "load", lambda self, slots, transaction: None)]


@defect
def lost_memory_is_not_rebuilt() -> list[Patch]:
    """A replacement rank's rows and parity stay empty."""
    return [(execute, "rebuild_lost", lambda *_: 0), (execute, "_verify", lambda *_: None)]


@defect
def live_before_it_is_rebuilt() -> list[Patch]:
    """A replacement's arena counts before its rows and parity are there."""
    rebuild = execute.rebuild_lost

    def rebuilds(memory: RankMemory, *arguments: Any) -> int:
        if memory.arena.get(Word.STATE) == State.REBUILDING:
            memory.commit(arguments[1].transaction)
            memory.mark_prepared(arguments[1].transaction)
            memory.go_live()
        return rebuild(memory, *arguments)

    return [(execute, "rebuild_lost", rebuilds)]


# --- the network ---


@defect
def failed_collective_counts() -> list[Patch]:
    """A collective that failed before it was waited for counts as a success."""
    ended = Waits.ended

    def ends(self: Waits, work: Any, what: str) -> None:
        if not work.is_completed():
            ended(self, work, what)

    return [(Waits, "ended", ends)]


@defect
def death_in_the_vote_is_ignored() -> list[Patch]:
    """A rank whose peer dies during the vote commits."""
    vote = Agreement.vote

    def votes(self: Agreement, decision: Any, what: str) -> None:
        with suppress(PeerFailure):
            vote(self, decision, what)

    return [(Agreement, "vote", votes)]


def _without(barrier: str) -> Callable[[], list[Patch]]:
    barriers = Transport.barrier

    def make() -> list[Patch]:
        def passes(self: Transport, what: str) -> None:
            if what != barrier:
                barriers(self, what)

        return [(Transport, "barrier", passes)]

    make.__doc__ = f"No rank waits for the others at {barrier!r}."
    return make


for _name in ("joining the generation", "the initial state", "the end of recovery", "closing the job"):
    DEFECTS["no_barrier_at_" + _name.replace(" ", "_")] = _without(_name)


@contextmanager
def planted(make: Callable[[], list[Patch]]) -> Generator[None]:
    """The product with a defect."""
    with ExitStack() as stack:
        for owner, name, function in make():
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def search(make: Callable[[], list[Patch]], seeds: range) -> tuple[int, str] | None:
    """The first seed that finds a defect, and what it says."""
    with planted(make):
        for seed in seeds:
            try:
                job.run(seed)
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                return seed, f"{type(error).__name__}: {error}"
    return None


def main(words: Sequence[str]) -> int:
    """Prints the table; returns 1 if a defect is not found."""
    parser = argparse.ArgumentParser(prog="python tests/simulator defects")
    parser.add_argument("--seeds", type=int, default=300, help="the most seeds for a defect")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="*", help="names of defects, with *")
    given = parser.parse_args(words)
    missed = 0
    print("| defect | seeds | seen as |\n|---|---|---|", flush=True)
    for name, make in DEFECTS.items():
        if not fnmatch.fnmatch(name, given.only):
            continue
        began = time.process_time()
        found = search(make, range(given.first, given.first + given.seeds))
        missed += found is None
        seeds, seen = (
            ("none of " + str(given.seeds), "") if found is None else (found[0] - given.first + 1, found[1])
        )
        line = str(make.__doc__).splitlines()[0]
        print(
            f"| {name}: {line} | {seeds} ({time.process_time() - began:.0f} s) | {seen[:110]} |", flush=True
        )
    return 1 if missed else 0
