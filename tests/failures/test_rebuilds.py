"""Ranks are rebuilt beside training, and some die meanwhile; `make rebuilds` plays all cells."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from failures import rebuilds
from failures.board import PHASES
from failures.campaign import References, verdict
from failures.draws import Lengths
from failures.driver import run
from failures.plan import Exact, Plan, Refused, Setting, Victim

PLAIN = Setting(4, 4, 3, "Adagrad", steps=20, background=5)


@pytest.fixture(scope="module")
def references() -> References:
    return References(Lengths())


def lost(step: int, *ranks: int) -> Exact:
    """These die in a step, with their memory."""
    return Exact(tuple(Victim(rank, True) for rank in ranks), "in the body", step, 3)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ranks", "window", "steps"),
    [
        pytest.param((3, 0), 4, (11, 17), id="r = 2, window 4"),
        pytest.param((1,), 4, (11, 17), id="r = 1, window 4", marks=pytest.mark.long),
        pytest.param((3, 0), 1, (8, 14), id="r = 2", marks=pytest.mark.long),
        pytest.param((1,), 1, (8, 14), id="r = 1", marks=pytest.mark.long),
    ],
)
def test_training_goes_on_while_lost_ranks_are_rebuilt(
    ranks: Sequence[int], window: int, steps: tuple[int, int], references: References
) -> None:
    """All is rebuilt before step 12; then others lose their memory. A window begins with step 10, or 16."""
    others = [rank for rank in (2, 1) if rank not in ranks][: len(ranks)]
    setting = Setting(4, 4, 4 - len(ranks), "Adagrad", steps=20, background=6, window=window, overlap=True)
    outcome = run(Plan(setting, (lost(steps[0], *ranks), lost(steps[1], *others)), forked=True))
    assert verdict(references.of(setting), outcome) == "", f"see {outcome.folder}"
    assert [death.rank for death in outcome.deaths if death.event == 1] == sorted(others)
    log = (outcome.folder / "log").read_text(errors="replace")
    assert "is rebuilt beside training" in log
    outcome.discard()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_lookup_that_does_not_wait_for_its_rows_is_noticed(references: References) -> None:
    outcome = run(Plan(PLAIN, (lost(11, 1),), "waiting", forked=True))
    assert outcome.deaths, f"see {outcome.folder}"
    assert verdict(references.of(PLAIN), outcome) != "", f"see {outcome.folder}"
    outcome.discard()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_some_deaths_in_a_rebuild_beside_training(references: References, seed: int) -> None:
    choice = random.Random(seed)
    for who in (rebuilds.REPLACED, rebuilds.HOLDER):
        some = [cell for cell in rebuilds.cells() if cell.who == who and cell.phase in PHASES]
        print(rebuilds.play(choice.choice(some), choice, references))


def test_no_plan_loses_more_than_the_code_survives(seed: int) -> None:
    choice = random.Random(seed)
    for cell in rebuilds.cells():
        plan = rebuilds.plan(cell, choice)
        victims = [event.victims for event in plan.events if not isinstance(event, Refused)]
        gone = {victim.rank for event in victims for victim in event if victim.lost}
        assert len(gone) <= plan.setting.tolerated
