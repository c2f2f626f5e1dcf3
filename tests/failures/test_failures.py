"""The quick form of `make failures`: a few kills, one recovery broken by hand, and the harness itself.

What these tests start are real jobs under torchrun; `python tests/failures` runs many more.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from failures.board import NAMES, PHASES, STARTING, Board
from failures.campaign import CONTROLS, References, verdict
from failures.draws import SETTINGS, Dealer, Lengths
from failures.driver import ROOT, differences, run
from failures.plan import Exact, Plan, Setting, Timed, Victim

QUICK = Setting(4, 4, 3, "Adagrad", steps=16)


@pytest.fixture(scope="module")
def references() -> References:
    return References(Lengths())


def test_killed_in_a_step_in_recovery_and_from_outside_it_ends_bit_identical(
    references: References, seed: int
) -> None:
    reference = references.of(QUICK)
    random_ = random.Random(seed)
    first, second = random_.sample(range(4), 2)
    phase = random_.choice(["capture", "exchange", "agreement", "apply"])
    plan = Plan(
        Setting(4, 4, 3, "Adagrad", steps=16, workers=2),
        (
            Exact((Victim(first, False),), phase, 3, random_.randint(1, 20)),
            Exact((Victim(first, True),), "deciding", None, random_.randint(1, 8)),
            Exact((Victim(second, False),), "rebuilding", None, random_.randint(1, 60)),
            Timed((Victim(second, True),), None, 9, random_.random() / 20),
        ),
    )
    outcome = run(plan)
    print(*outcome.deaths, sep="\n")
    assert verdict(reference, outcome) == "", f"see {outcome.folder}"
    assert [death.event for death in outcome.deaths] == [0, 1, 2, 3]
    outcome.discard()


def test_a_recovery_that_does_not_undo_is_noticed(references: References) -> None:
    reference = references.of(QUICK)
    outcome = run(Plan(QUICK, (CONTROLS["undo"],), "undo"))
    found = differences(reference, outcome.digests)
    assert len(outcome.deaths) == 1, f"see {outcome.folder}"
    assert "rank 1: model users.weight" in found or "rank 1: model items.weight" in found
    outcome.discard()


def test_a_changed_a_missing_and_an_unexpected_digest_are_differences() -> None:
    there = {0: {"a": "1", "b": "2"}, 1: {"a": "1"}}
    assert differences(there, {0: {"a": "1", "b": "2"}, 1: {"a": "1"}}) == []
    assert differences(there, {0: {"a": "1", "b": "3"}, 1: {"a": "1"}}) == ["rank 0: b"]
    assert differences(there, {0: {"a": "1", "b": "2"}}) == ["rank 1: no results"]
    assert differences(there, {0: {"a": "1"}, 1: {"a": "1", "c": "1"}}) == ["rank 0: b", "rank 1: c"]
    assert differences({}, {0: {"a": "1"}}) == ["rank 0: a"]


def test_a_board_outlives_its_process(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from failures.board import Board\n"
        "board = Board.create(Path(sys.argv[1]), os.getpid())\n"
        "board.set('step', 7); board.phase = 'apply'; board.write('place', 'memory.py:12')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        check=False,
    )
    assert process.returncode == -signal.SIGKILL
    [path] = tmp_path.glob("*.board")
    board = Board(path)
    assert (board.get("step"), board.phase, board.text("place")) == (7, "apply", "memory.py:12")
    assert (board.get("rank"), board.text("arena"), board.alive) == (-1, "", False)


def test_a_victims_memory_is_its_arenas_file(tmp_path: Path) -> None:
    board = Board.create(tmp_path, 1)
    board.fell(0, lost=True)
    assert board.get("lost") == 0  # it had none yet
    arena = tmp_path / "some.arena"
    arena.touch()
    board.write("arena", str(arena))
    board.fell(1, lost=False)
    assert arena.exists()
    board.fell(2, lost=True)
    assert (board.get("lost"), board.get("event"), arena.exists()) == (1, 2, False)
    assert NAMES[board.get("fell")] == board.phase


def test_plans_are_written_and_read(tmp_path: Path, seed: int) -> None:
    for plan in islice(Dealer(seed, Lengths()).plans(), 12):
        plan.write(tmp_path / "plan.json")
        assert Plan.read(tmp_path / "plan.json") == plan


def test_no_plan_loses_more_than_the_code_survives(seed: int) -> None:
    """Counted from the events alone, and so that a death while starting may come before LIVE."""
    for plan in islice(Dealer(seed, Lengths()).plans(), 150):
        gone: set[int] = set()
        for event in plan.events:
            training = event.step is not None or (
                isinstance(event, Exact) and PHASES[event.phase] not in STARTING
            )
            gone = set() if training else gone
            gone |= {victim.rank for victim in event.victims if victim.lost}
            assert len(gone) <= plan.setting.tolerated, plan
        assert len({victim.rank for victim in plan.events[0].victims}) == len(plan.events[0].victims)


def test_plans_meet_the_promise(seed: int) -> None:
    """In 20 runs: every setting, every kind of death, and a third with loading workers."""
    plans = list(islice(Dealer(seed, Lengths()).plans(), 20))
    events = [event for plan in plans for event in plan.events]
    assert sum(plan.setting.workers > 0 for plan in plans) >= len(plans) // 3
    assert {dataclasses.replace(plan.setting, workers=0) for plan in plans} == set(SETTINGS)
    exact = {event.phase for event in events if isinstance(event, Exact)}
    assert len(exact) >= len(NAMES) // 2
    assert any(len(event.victims) == 2 for event in events)
    assert any(isinstance(event, Exact) and event.raises for event in events)
    assert any(isinstance(event, Timed) and event.agent for event in events)
    assert {victim.lost for event in events for victim in event.victims} == {True, False}
