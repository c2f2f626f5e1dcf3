"""Defects that are planted in the product, to see which seed of the simulator finds each.

A defect leaves out one rule of the protocol (docs/protocol.md), by a patch of the function that has it. The
table says which seed finds it, and what that says. A defect that shows in few runs, or in none, has a test,
which is run with the defect planted.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from bench.harness.result import Arguments, Row, document, once, write
from ecemb.coding.parity import ParityBlocks
from ecemb.errors import PeerFailure
from ecemb.guard import Guard
from ecemb.memory import classify
from ecemb.memory.arena import Arena
from ecemb.memory.header import State, Word
from ecemb.memory.journal import Inbox, Outbox, ParityJournal, RowJournal
from ecemb.memory.rank_memory import RankMemory, Slots
from ecemb.net.collectives import Transport, Waits
from ecemb.recovery import execute
from ecemb.recovery.missing import Missing
from ecemb.recovery.plan import RecoveryPlan, plan_recovery
from ecemb.recovery.requester import Requester
from ecemb.recovery.server import Snapshot
from ecemb.start import agree, opening
from ecemb.state.rank_state import RankState
from ecemb.step.agreement import Agreement
from ecemb.step.transaction import Transactions
from ecemb.step.window import Window
from failures import sabotage
from failures.sabotage import Patch
from simulator import job
from simulator.network import Store

_ROOT = Path(__file__).resolve().parents[2]

DEFECTS: dict[str, Callable[[], list[Patch]]] = {
    make.__name__: make
    for make in (
        sabotage.no_agreement,
        sabotage.label_first,
        sabotage.rows_first,
        sabotage.prepared_first,
        sabotage.one_journal,
        sabotage.oldest_first,
        sabotage.no_undo,
        sabotage.no_redo,
        sabotage.no_replicated,
        sabotage.no_rebuild,
        sabotage.no_waiting,
    )
}
"""Name -> the patches. A docstring is the line of the table."""


def defect(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Adds a defect to the table, under its function's name."""
    DEFECTS[make.__name__] = make
    return make


# --- the step ---


@defect
def vote_ignores_a_no() -> list[Patch]:
    """A rank commits although another one has voted no."""

    def vote(self: Agreement, decision: Any, what: str) -> None:
        decision.voted = True
        decision.votes.run(np.array([1], np.int64), what)

    return [(Agreement, "vote", vote)]


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


class _Before:
    """An arena of which a word has the value of before."""

    def __init__(self, arena: Any, word: Word, value: int) -> None:
        self._arena, self._word, self._value = arena, word, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arena, name)

    def get(self, word: Word) -> int:
        return self._value if word is self._word else self._arena.get(word)


@defect
def count_before_entry() -> list[Patch]:
    """The journal's count is stored before the old records."""
    save = RowJournal._save

    def saves(self: RowJournal, table: int, ids: Any) -> Any:
        arena, used = self._arena, self._arena.get(self._bytes)
        width = self._space.named[table].table.layout.record_words
        size_bytes = 8 * (2 + len(ids) * (1 + width))
        arena.reserve(self._region, used + size_bytes)
        arena.set(self._bytes, used + size_bytes)
        self._arena = _Before(arena, self._bytes, used)  # pyright: ignore
        try:
            return save(self, table, ids)
        finally:
            self._arena = arena

    return [(RowJournal, "_save", saves)]


@defect
def parity_label_before_row() -> list[Patch]:
    """The parity journal gets its label while it names a row of the transaction before."""
    begin = ParityJournal.begin

    def begins(self: ParityJournal, transaction: int) -> None:
        self._arena.set(Word.PARITY_LABEL, transaction)
        begin(self, transaction)

    return [(ParityJournal, "begin", begins)]


@defect
def open_lanes_are_forgotten() -> list[Patch]:
    """Redoing goes on with the row after the one that the journal names, whatever lanes have begun."""
    return [(ParityJournal, "interrupted", lambda self, received, saved: [])]


@defect
def lanes_share_their_places() -> list[Patch]:
    """Redoing copies the old words of each lane's row from the places of the first lane."""
    interrupted = ParityJournal.interrupted

    def shares(self: ParityJournal, received: Any, saved: Any) -> Any:
        return [dataclasses.replace(lane, saved=saved[0]) for lane in interrupted(self, received, saved)]

    return [(ParityJournal, "interrupted", shares)]


def _without_voiding(name: str) -> list[Patch]:
    change: Callable[..., Any] = getattr(ParityJournal, name)

    def changes(self: ParityJournal, *arguments: Any) -> Any:
        with mock.patch.object(self, "_void_lanes"):
            return change(self, *arguments)

    return [(ParityJournal, name, changes)]


@defect
def lanes_are_not_void() -> list[Patch]:
    """The parity journal gets its label while lines of lanes of the transaction before name rows."""
    return _without_voiding("begin")


@defect
def earlier_lanes_are_not_void() -> list[Patch]:
    """Lines of lanes are written while lines of the lanes before name rows."""
    return _without_voiding("open")


@defect
def lanes_end_without_a_line() -> list[Patch]:
    """The journal names the last row of the lanes that have ended, and not that it is complete."""

    def close(self: ParityJournal, stop: int) -> None:
        self._arena.set(Word.PARITY_ROW, stop - 1)

    return [(ParityJournal, "close", close)]


@defect
def lanes_end_by_their_row() -> list[Patch]:
    """The journal names the last row of the lanes that have ended before it says that it is complete."""
    close = ParityJournal.close

    def closes(self: ParityJournal, stop: int) -> None:
        self._arena.set(Word.PARITY_ROW, stop - 1)
        close(self, stop)

    return [(ParityJournal, "close", closes)]


@defect
def undo_beside_the_commit() -> list[Patch]:
    """An exception undoes its step while the other thread is at work on the step before."""
    undo = Transactions.undo

    def undoes(self: Transactions, error: BaseException) -> None:
        self._pending = None
        undo(self, error)

    return [(Transactions, "undo", undoes)]


@defect
def newer_rows_in_deltas() -> list[Patch]:
    """Deltas that are laid out beside the next body say what that has made of the rows."""
    return [(Outbox, "_correct", lambda self, *_: None)]


@defect
def full_window_is_not_halved() -> list[Patch]:
    """A window whose journal ran out of memory is run again at the same size."""
    return [(Window, "run_out", lambda self: None)]


# --- recovery ---


@defect
def stale_journal_is_not_undone() -> list[Patch]:
    """Of two journals, only that of the newest transaction is undone."""

    def undo(self: RankMemory, transaction: int) -> int:
        undone = sorted((one for one in self.journals if one.label > transaction), key=lambda one: one.label)
        return undone[-1].undo() if undone else 0

    return [(RankMemory, "undo", undo)]


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


@defect
def decided_is_undone() -> list[Patch]:
    """Recovery undoes the transaction that was decided as well."""

    def undo(self: RankMemory, transaction: int) -> int:
        undone = [one for one in self.journals if one.label >= transaction]
        return sum(one.undo() for one in sorted(undone, key=lambda one: one.label, reverse=True))

    return [(RankMemory, "undo", undo)]


@defect
def prepared_is_lowered_late() -> list[Patch]:
    """`prepared` is lowered to the decided transaction after rows are undone."""
    roll_to = RankMemory.roll_to

    def rolls(self: RankMemory, transaction: int) -> Any:
        if self.committed <= transaction:
            self.undo(transaction)
        return roll_to(self, transaction)

    return [(RankMemory, "roll_to", rolls)]


@defect
def half_changed_row_counts() -> list[Patch]:
    """A redo takes the parity row that was changing for a row that has changed."""
    return [(ParityBlocks, "finish_", lambda self, *_: None)]


@defect
def undone_journal_keeps_its_label() -> list[Patch]:
    """A journal that was undone is not void."""
    undo = RowJournal.undo

    def undoes(self: RowJournal) -> int:
        label = self.label
        rows = undo(self)
        self._arena.set(self._label, label)
        return rows

    return [(RowJournal, "undo", undoes)]


@defect
def slices_are_not_copied() -> list[Patch]:
    """A replacement has no slices of dense state when it is LIVE."""
    return [(execute, "copy_lost", lambda *_: 0)]


# --- a rank that is rebuilt beside training ---


@defect
def snapshot_has_newer_rows() -> list[Patch]:
    """A holder sends rows as the next transaction has made them."""
    return [(Snapshot, "_undo", lambda self, *_: None)]


@defect
def parity_is_sent_while_it_changes() -> list[Patch]:
    """A holder sends parity to which it is adding the deltas of the next transaction."""
    has: Any = property(lambda self: self._memory.committed == self._of)
    return [(Snapshot, "_has_parity", has)]


@defect
def old_parity_is_stored() -> list[Patch]:
    """A rank stores parity that it asked for before its last commit."""
    return [(Requester, "pause", lambda self: None)]


@defect
def trained_rows_are_overwritten() -> list[Patch]:
    """A rank stores rows that it has by now as well."""

    def stores(self: Missing, owner: int, ids: Any, records: Any) -> None:
        self._space.named[owner].table.scatter_(ids, records)
        store(self, owner, ids, records)

    store = Missing._store_rows
    return [(Missing, "_store_rows", stores)]


# --- which arenas count ---


@defect
def rebuilding_survives() -> list[Patch]:
    """An arena that is REBUILDING counts."""
    holds = classify._holds

    def held(one: Any, living: Any) -> bool:
        return one.state is State.REBUILDING or holds(one, living)

    return [(classify, "_holds", held)]


@defect
def initial_is_lost() -> list[Patch]:
    """An arena that is INIT and prepared does not count beside one that is LIVE."""
    return [(classify, "_holds", lambda one, living: one.state is State.LIVE)]


@defect
def rebuilding_shows_no_start() -> list[Patch]:
    """An arena that is REBUILDING does not show that the job had started."""
    return [(classify, "_shows_a_start", lambda one: one.state is State.LIVE)]


@defect
def opened_is_not_stored() -> list[Patch]:
    """No arena says which generation was opened."""
    return [(RankMemory, "mark_opened", lambda self, generation: None)]


@defect
def start_is_not_marked() -> list[Patch]:
    """The store does not say that the job has started."""
    return [(opening, "_flag_started", lambda *_: None)]


@defect
def mark_has_no_generation() -> list[Patch]:
    """The store's mark does not say which generation was opened."""
    return [(opening, "_flag_started", lambda start, _: start.session.job_flags.set("started", "0"))]


@defect
def generation_id_is_kept() -> list[Patch]:
    """An arena has the id of its last generation while it joins another one."""

    def join(self: Arena, generation: int, generation_id: int) -> None:
        self.set(Word.JOINED, generation)
        self.set(Word.GENERATION_ID, generation_id)

    return [(Arena, "join", join)]


# --- the end ---


@defect
def closed_before_the_last_commit() -> list[Patch]:
    """`close` does not wait for steps that are not committed."""
    return [(Guard, "_drain", lambda self: None)]


@defect
def no_tombstone() -> list[Patch]:
    """No arena says that the job is finished."""
    return [(RankMemory, "finish", lambda self: None)]


@defect
def end_is_not_marked() -> list[Patch]:
    """The store does not say that the job is finished."""
    put = Store.set

    def puts(self: Store, key: str, value: Any) -> None:
        if key != "finished":
            put(self, key, value)

    return [(Store, "set", puts)]


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


for _name in (
    "joining the generation",
    "the initial state",
    "the end of recovery",
    "closing the job",
    "the end of the job",
):
    DEFECTS["no_barrier_at_" + _name.replace(" ", "_")] = _without(_name)


@contextmanager
def planted(make: Callable[[], list[Patch]]) -> Generator[None]:
    """The product with a defect."""
    with ExitStack() as stack:
        for owner, name, function in make():
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


_RANK_MEMORY = "tests/unit/memory/test_rank_memory.py"
_SERVER = "tests/unit/recovery/test_server.py"

TESTS: dict[str, str] = {
    "generation_id_is_kept": (
        "tests/unit/memory/test_arena.py::TestWords::test_join_stores_two_words_as_if_they_were_one"
    ),
    "mark_has_no_generation": (
        "tests/unit/start/test_opening.py::test_the_mark_of_the_store_has_the_generation_that_was_opened"
    ),
    "earlier_lanes_are_not_void": (
        "tests/unit/memory/test_parity_journal.py"
        "::test_lanes_that_name_no_row_are_void_while_others_are_written"
    ),
    "lanes_end_by_their_row": (
        f"{_RANK_MEMORY}::test_lanes_cut_off_anywhere_are_redone_by_any_number_of_threads"
    ),
    "parity_label_before_row": f"{_RANK_MEMORY}::test_apply_cut_off_anywhere_is_redone",
    "prepared_is_lowered_late": f"{_RANK_MEMORY}::test_undo_that_has_begun_can_never_roll_forward",
    "label_first": (
        "tests/unit/memory/test_journal.py::test_arming_empties_the_journal_before_it_takes_the_new_label"
    ),
    "live_before_it_is_rebuilt": (
        "tests/unit/recovery/test_verify.py"
        "::test_killed_at_any_moment_of_such_a_rebuild_the_next_start_ends_it"
    ),
    "parity_is_sent_while_it_changes": f"{_SERVER}::test_parity_that_changes_while_it_is_read",
    "rebuilding_shows_no_start": (
        "tests/unit/memory/test_classify.py::test_what_shows_that_the_job_had_started"
    ),
    "snapshot_has_newer_rows": f"{_SERVER}::test_rows_of_two_open_transactions",
    "trained_rows_are_overwritten": (
        "tests/unit/recovery/test_missing.py::test_rows_are_stored_where_they_are_missing"
    ),
    "undo_beside_the_commit": (
        "tests/unit/step/test_step_overlap.py::test_a_body_that_raises_takes_back_its_own_step_only"
    ),
    "full_window_is_not_halved": (
        "tests/unit/step/test_window.py::test_a_window_that_ran_out_is_halved_by_the_next_start"
    ),
}
"""Defect that shows in few runs, or in none -> the test that notices it."""


FOUND = Path(__file__).with_name("found.json")
"""Defect -> the seed that has found it: the next search begins with it."""


def search(make: Callable[[], list[Patch]], seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed that finds a defect, and what it says."""
    with planted(make):
        for seed in seeds:
            try:
                job.run(seed)
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                return seed, f"{type(error).__name__}: {error}"
    return None


class _Failures:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash: Any = getattr(report.longrepr, "reprcrash", None)
            self.texts.append(str(report.longrepr) if crash is None else crash.message)


def noticed(make: Callable[[], list[Patch]], test: str) -> str | None:
    """What a test says of a defect; None if it passes."""
    seen = _Failures()
    with planted(make), redirect_stdout(StringIO()):
        pytest.main(["-q", "-n0", "-p", "no:cacheprovider", str(_ROOT / test)], plugins=[seen])
    return " ".join(seen.texts[0].split()) if seen.texts else None


def main(words: Sequence[str]) -> int:
    """Prints the table; returns 1 if a defect is not noticed."""
    parser = argparse.ArgumentParser(prog="python tests/simulator defects")
    parser.add_argument("--seeds", type=int, default=2000, help="the most seeds for a defect")
    parser.add_argument("--only", default="*", help="names of defects, with *")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the table")
    given = parser.parse_args(words)
    known: dict[str, int] = json.loads(FOUND.read_text())
    rows: list[Row] = []
    print("| defect | noticed by | as |\n|---|---|---|", flush=True)
    for name in fnmatch.filter(DEFECTS, given.only):
        make = DEFECTS[name]
        began = time.process_time()
        if (test := TESTS.get(name)) is not None:
            by, seen = test.replace("::", ", "), noticed(make, test)
        else:
            first = [known.pop(name)] if name in known else []
            found = search(make, itertools.chain(first, range(given.seeds)))
            if found is not None:
                known[name] = found[0]
            by, seen = (f"{given.seeds} seeds", None) if found is None else (f"seed {found[0]}", found[1])
            _keep(known)
        rows.append(once("noticed", "ratio", int(seen is not None), defect=name, by=by, says=seen or ""))
        if seen is None:
            by, seen = f"**nothing**: {by}", ""
        line = str(make.__doc__).splitlines()[0]
        took_s = time.process_time() - began
        print(f"| {name}: {line} | {by} ({took_s:.0f} s) | {seen[:110]} |", flush=True)
    if given.json:
        write(given.json, document("defects", Arguments(), rows))
    return 0 if all(row.value for row in rows) else 1


def _keep(known: dict[str, int]) -> None:
    """Writes `FOUND`, in the order of the table: a search that was cut off goes on from there."""
    seeds = {name: known[name] for name in DEFECTS if name in known}
    FOUND.write_text(json.dumps(seeds, indent=1) + "\n")
