"""Rules of a step: a failure at the one moment that each is there for does no harm; without the rule it does.

Ranks are threads here (see simulation.py), and die at exact points. `make failures` breaks the same rules in
real processes, and must notice.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ecemb.errors import InconsistentArenas
from ecemb.memory.arena import Arena
from ecemb.memory.journal import RowJournal
from ecemb.memory.rank_memory import RankMemory
from ecemb.step.agreement import Agreement
from failures import sabotage
from failures.sabotage import Patch
from support.simulation import Killed, Machines, Rank, job_of

DONE = 2  # steps before the one in which rank VICTIM dies
VICTIM = 2
JOB = job_of(4, 2, 4, random.Random(1))


@pytest.fixture
def machines(tmp_path: Path) -> Machines:
    """A job of four ranks that has done two steps."""
    begun = Machines(tmp_path / "job", JOB)
    assert not begun.run(DONE).failures
    return begun


def goes_on(machines: Machines) -> None:
    """What every rule is for: the next start stands on one step, and every byte is what it would be."""
    life = machines.run(DONE + 2)
    assert not life.failures, str(life.failures)  # whole: pytest would cut a dict in the middle
    machines.check(DONE + 2)


@contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, function in patches:
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


def killed_at(owner: Any, name: str, transaction: int, *ranks: int) -> Patch:
    """Ranks die where they call a function of a transaction."""
    function = getattr(owner, name)

    def dies(self: Any, *args: Any) -> Any:
        if self.rank in ranks and args[0] == transaction:
            raise Killed
        return function(self, *args)

    return owner, name, dies


def in_this_thread() -> bool:
    return threading.current_thread().name == str(VICTIM)


# --- the agreement ------------------------------------------------------------------------------


def one_dies_before_it_has_prepared(machines: Machines, without: Sequence[Patch] = ()) -> None:
    with patched(without), patched([killed_at(RankMemory, "prepare", DONE + 1, VICTIM)]):
        machines.run(DONE + 2)
    goes_on(machines)


def test_nobody_commits_what_another_has_not_prepared(machines: Machines) -> None:
    """The agreement (3.6): the process that commits a step knows that every rank has prepared it."""
    one_dies_before_it_has_prepared(machines)


def test_without_the_agreement_some_commit_what_another_has_not_prepared(machines: Machines) -> None:
    """The others are a step ahead of what survives: recovery can only stop."""
    with pytest.raises(InconsistentArenas, match="ahead of the smallest prepared"):
        one_dies_before_it_has_prepared(machines, sabotage.no_agreement())


def all_die_before_they_commit_and_one_is_lost(machines: Machines, without: Sequence[Patch] = ()) -> None:
    deaths = [
        killed_at(RankMemory, "prepare", DONE + 1, VICTIM),
        killed_at(RankMemory, "commit", DONE + 1, *range(4)),
    ]
    with patched(without), patched(deaths):
        machines.run(DONE + 2)
    machines.lose(0)
    goes_on(machines)


def test_parity_is_never_ahead_of_what_is_decided(machines: Machines) -> None:
    """The agreement (3.6): parity changes only when every rank's rows are sure to stay."""
    all_die_before_they_commit_and_one_is_lost(machines)


def test_without_the_agreement_parity_is_ahead(machines: Machines) -> None:
    """Rows go back, and the parity that was changed for them does not: what it rebuilds doesn't fit."""
    with pytest.raises(
        AssertionError, match="parity and rows differ|contradict each other|rows of rank|state of rank"
    ):
        all_die_before_they_commit_and_one_is_lost(machines, sabotage.no_agreement())


# --- the journal --------------------------------------------------------------------------------


def one_dies_between_the_stores_of_arming(machines: Machines, without: Sequence[Patch] = ()) -> None:
    stores: list[str] = []
    with patched(without):
        arm, store = RowJournal.arm, Arena.set

        def arms(self: RowJournal, transaction: int, *rest: int) -> None:
            if in_this_thread() and transaction == DONE + 1:
                stores.append("arm")
            arm(self, transaction, *rest)

        def stores_once(self: Arena, name: str, value: int) -> None:
            if in_this_thread() and stores:
                stores.append(name)
                if len(stores) == 3:
                    raise Killed
            store(self, name, value)

        with patched([(RowJournal, "arm", arms), (Arena, "set", stores_once)]):
            machines.run(DONE + 2)
    assert set(stores) == {"arm", "rows_label", "rows_bytes"}
    goes_on(machines)


def test_a_journal_is_emptied_before_it_is_labelled(machines: Machines) -> None:
    """Arming (3.1): the count is 0 before the label says that the entries are the new step's."""
    one_dies_between_the_stores_of_arming(machines)


def test_a_journal_that_is_labelled_first_undoes_a_committed_step(machines: Machines) -> None:
    """The old records of the step before, under the new step's label, are copied back over its rows."""
    with pytest.raises(AssertionError, match=f"(rows|state) of rank {VICTIM}"):
        one_dies_between_the_stores_of_arming(machines, sabotage.label_first())


def one_dies_when_its_rows_have_changed(machines: Machines, without: Sequence[Patch] = ()) -> None:
    def dies(rank: Rank, step: int) -> None:
        if rank.memory.rank == VICTIM and step == DONE:
            raise Killed

    with patched(without):
        life = machines.run(DONE + 2, body=dies)
    assert isinstance(life.failures[VICTIM], Killed)
    goes_on(machines)


def test_old_records_are_in_the_journal_before_rows_change(machines: Machines) -> None:
    """Capture (3.2): entry, then count, then the data; a row that changed can be changed back."""
    one_dies_when_its_rows_have_changed(machines)


def test_rows_that_change_before_the_journal_counts_them_stay_changed(machines: Machines) -> None:
    """The step is run again on rows that it has changed already."""
    with pytest.raises(AssertionError, match=f"(rows|state) of rank {VICTIM}"):
        one_dies_when_its_rows_have_changed(machines, sabotage.rows_first())


# --- the two journals ---------------------------------------------------------------------------


def one_dies_before_a_step_is_decided_beside_the_next_one(
    machines: Machines, without: Sequence[Patch] = ()
) -> None:
    exchange: Callable[..., Any] = Agreement.exchange

    def dies(self: Agreement, *args: Any) -> Any:
        if self._transport.rank == VICTIM and args[3] == f"the exchange of step {DONE}":
            raise Killed
        return exchange(self, *args)

    machines.job = dataclasses.replace(machines.job, overlap=True)
    with patched(without):
        with patched([(Agreement, "exchange", dies)]):
            machines.run(DONE + 2)
        assert machines.plan().transaction == DONE
        goes_on(machines)


def test_a_step_that_began_beside_an_undecided_one_is_undone_with_it(machines: Machines) -> None:
    """Overlap (7): the newer transaction's old records are copied back first, then the older one's."""
    one_dies_before_a_step_is_decided_beside_the_next_one(machines)


@pytest.mark.parametrize(
    ("without", "noticed"),
    [
        # the one journal has other rows by then: of those are the older step's deltas, or of no row at all
        (sabotage.one_journal, "(rows|state) of rank|is not a row of the table"),
        (sabotage.oldest_first, "(rows|state) of rank"),
    ],
)
def test_two_steps_are_not_undone_otherwise(
    without: Callable[[], list[Patch]], noticed: str, machines: Machines
) -> None:
    """One journal forgets the step that is not yet decided; the wrong order ends in the middle of both."""
    with pytest.raises(AssertionError, match=noticed):
        one_dies_before_a_step_is_decided_beside_the_next_one(machines, without())


# --- the inbox ----------------------------------------------------------------------------------


def one_dies_before_its_deltas_are_sent(machines: Machines, without: Sequence[Patch] = ()) -> None:
    exchange: Callable[..., Any] = Agreement.exchange

    def dies(self: Agreement, *args: Any) -> Any:
        if self._transport.rank == VICTIM and args[3] == f"the exchange of step {DONE}":
            raise Killed
        return exchange(self, *args)

    with patched(without), patched([(Agreement, "exchange", dies)]):
        machines.run(DONE + 2)
    machines.lose(VICTIM)
    goes_on(machines)


def test_whoever_is_prepared_holds_every_delta(machines: Machines) -> None:
    """Prepared (3.5) comes after a complete inbox: who is lost later can be rebuilt as of that step."""
    one_dies_before_its_deltas_are_sent(machines)


def test_without_a_complete_inbox_a_prepared_step_cannot_be_redone(machines: Machines) -> None:
    """All survivors say that the step is prepared, and its deltas died with the rank that made them."""
    with pytest.raises(AssertionError, match="the inbox holds"):
        one_dies_before_its_deltas_are_sent(machines, sabotage.prepared_first())
