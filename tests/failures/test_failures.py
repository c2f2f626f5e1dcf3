"""The quick form of `make failures`: a few of its cells, one recovery broken by hand, and the harness itself.

What these tests start are real jobs under torchrun; `python tests/failures` runs the whole matrix.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.questions.gpu.question import KILLS
from ecemb.memory.header import WORDS
from failures import board as board_module
from failures import phases
from failures.board import AWAY, NAMES, PHASES, REBUILD, Board, fell_together, memory_of
from failures.campaign import CONTROLLED, CONTROLS, References, verdict
from failures.draws import Lengths
from failures.driver import ROOT, Death, differences, lost_steps, run
from failures.matrix import ATTEMPTS, MAIN, ROW, ROWS, UNMADE, Cell, Chains, cells, hits
from failures.plan import ABORT_EVERY, Exact, Plan, Refused
from failures.refusals import contents

RECOVERY = ("rebuilding", "verifying", "copying replicated state", "creating an arena")


@pytest.fixture(scope="module")
def references() -> References:
    return References(Lengths())


@pytest.mark.timeout(1800)
def test_some_cells_of_the_matrix(references: References, seed: int) -> None:
    """Failures in steps, in the recoveries from them, and of more losses than the code survives."""
    random_ = random.Random(seed)
    starting = Cell("starting", 2, random_.random() < 0.5, MAIN)
    chosen = [
        starting,
        Cell(random_.choice(RECOVERY), random_.choice([1, 2]), random_.random() < 0.5, MAIN),
        Cell(random_.choice(["capture", "apply", "exchange", "commit"]), 3, True, MAIN),
    ]
    reference = references.of(MAIN)
    met, refusals = set[Cell](), 0
    for chain in Chains(seed, Lengths(), chosen):  # two, where some of the cells start warm
        outcome = run(chain.plan)
        print(*outcome.deaths, outcome.refused, sep="\n")
        assert verdict(reference, outcome) == "", f"see {outcome.folder}"
        events = chain.plan.events
        refused = [start for start, event in enumerate(events) if isinstance(event, Refused)]
        assert sorted(outcome.refused) == refused, f"see {outcome.folder}"
        assert len({death.event for death in outcome.deaths}) == len(events) - len(refused)
        refusals += len(refused)
        met |= {chain.cells[index] for index in hits(chain, outcome)}
        assert starting not in chain.cells.values() or starting in met, f"see {outcome.folder}"
        outcome.discard()
    assert refusals and starting in met


@pytest.mark.timeout(900)
def test_a_recovery_that_does_not_undo_is_noticed(references: References) -> None:
    reference = references.of(CONTROLLED)
    outcome = run(Plan(CONTROLLED, (CONTROLS["undo"],), "undo", forked=True))
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


def test_victims_that_have_not_begun_are_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(pid: int, start: int) -> None:
        board = Board.create(tmp_path / "boards", pid)
        board.set("worker", pid % 10)
        board.set("start", start)

    (tmp_path / "boards").mkdir()
    for pid in (11, 12, 13):
        begin(pid, start=0)
    begin(22, start=1)
    waited = iter([23])
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: begin(next(waited), start=1))
    monkeypatch.setattr(phases, "time", clock)
    worker: Any = SimpleNamespace(folder=tmp_path, start=1)
    found = phases.Worker._arrived(worker, {2: False, 3: False})
    assert sorted(board.get("pid") for board in found) == [22, 23]
    monkeypatch.setattr(phases, "HOLD_S", -1.0)
    assert [board.get("pid") for board in phases.Worker._arrived(worker, {1: False, 2: False})] == [22]


def test_memory_that_is_to_be_lost_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process that has not made it yet would live on without a loss: the cell would not be met."""
    (tmp_path / "boards").mkdir()
    board = Board.create(tmp_path / "boards", 1)
    board.set("worker", 2)
    board.set("start", 1)
    looks = []

    def make(_: float) -> None:
        looks.append(1)
        (tmp_path / "some.arena").touch()
        board.write("arena", str(tmp_path / "some.arena"))

    monkeypatch.setattr(phases, "time", SimpleNamespace(monotonic=time.monotonic, sleep=make))
    worker: Any = SimpleNamespace(folder=tmp_path, start=1)
    assert len(phases.Worker._arrived(worker, {2: False})) == 1 and not looks
    assert len(phases.Worker._arrived(worker, {2: True})) == 1 and len(looks) == 1


def test_victims_are_all_stopped_before_the_first_of_them_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends the others as soon as it sees one of them dead, however slow their killer is."""
    script = "import time\nwhile True: time.sleep(3600)"
    victims = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(3)]
    boards = [Board.create(tmp_path, process.pid) for process in victims]
    kill, sent = os.kill, []

    def recorded(pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            states = {board_module._state(process.pid) for process in victims if process.pid not in sent}
            assert states == {b"T"} and all(board.get("fell_ns") > 0 for board in boards)
            sent.append(pid)
        kill(pid, number)

    monkeypatch.setattr(os, "kill", recorded)
    try:
        fell_together([(board, False, None) for board in boards], 3, away=False)
        assert [process.wait() for process in victims] == [-signal.SIGKILL] * 3
    finally:
        monkeypatch.undo()
        for process in victims:
            process.kill()
            process.wait()
    assert {board.get("event") for board in boards} == {3} and len(sent) == 3


def test_no_plan_takes_memory_that_a_rank_may_not_have(seed: int) -> None:
    """In the first phases of a recovery, a rank whose memory is gone has no new one: nothing can be lost."""
    for number in range(20):
        for chain in Chains(seed + number, Lengths(), cells("*with memory*")):
            gone: set[int] = set()
            for index, cell in chain.cells.items():
                event = chain.plan.events[index]
                assert not isinstance(event, Refused)
                row = ROW[cell.row]
                gone = gone if row.when == "recovery" else set()
                ranks = [victim.rank for victim in event.victims][row.phase == "creating an arena" :]
                if cell.memory and row.when == "recovery" and (row.phase is None or row.phase in UNMADE):
                    assert not gone & set(ranks), (str(cell), event)
                if not cell.refused:  # else it comes back
                    gone = gone | {victim.rank for victim in event.victims if victim.lost}


def test_nothing_is_to_die_in_a_phase_that_a_setting_does_not_have(seed: int) -> None:
    for number in range(60):
        for chain in Chains(seed + number, Lengths(), cells("*images*")):
            assert all(getattr(event, "phase", None) != "capture" for event in chain.plan.events)


def test_a_victim_that_was_past_the_start_was_not_starting() -> None:
    """Other phases wait for all ranks: there the first victim's counts alone."""
    for phase in ("starting", "joining"):
        cell = Cell(phase, 2, False, MAIN)
        chain = next(iter(Chains(0, Lengths(), [cell])))
        [(index, _)] = [(index, one) for index, one in chain.cells.items() if one == cell]
        event = chain.plan.events[index]
        assert isinstance(event, Exact)
        for other in (phase, "rendezvous"):
            places = zip(event.ranks, (phase, other), strict=True)
            deaths = [Death(index, rank, where, -1, "process", "", None) for rank, where in places]
            outcome: Any = SimpleNamespace(deaths=deaths, refused={})
            assert (index in hits(chain, outcome)) == (phase == "joining" or other == phase)


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


def test_memory_that_is_put_aside_can_come_back(tmp_path: Path) -> None:
    """Also that of a rank whose process has not found it yet: an earlier start's board tells."""
    arena = tmp_path / "some.arena"
    arena.touch()
    first = Board.create(tmp_path, 1)
    first.set("rank", 2)
    first.set("start", 0)
    first.write("arena", str(arena))
    second = Board.create(tmp_path, 2)
    second.set("worker", 2)
    second.set("start", 1)
    assert memory_of(second) == arena
    second.fell(1, lost=True, away=True)
    assert (second.get("lost"), arena.exists(), arena.with_suffix(AWAY).exists()) == (1, False, True)
    assert memory_of(second) is None


def test_a_start_that_goes_back_or_skips_a_step_is_noticed(tmp_path: Path) -> None:
    def board(pid: int, start: int, **words: int) -> Board:
        made = Board.create(tmp_path, pid)
        for word, value in {"start": start, **words}.items():
            made.set(word, value)
        return made

    before = [board(1, 0, resumed=0, step=6, committed=6), board(2, 0, resumed=0, step=6, committed=7)]
    assert lost_steps([*before, board(3, 1, resumed=7)]) == []
    assert "[6]" in lost_steps([*before, board(4, 1, resumed=6)])[0]
    assert "[8]" in lost_steps([*before, board(5, 1, resumed=8)])[0]
    assert "[6, 7]" in lost_steps([*before, board(6, 1, resumed=7), board(7, 1, resumed=6)])[0]


def test_a_changed_byte_of_an_arena_is_noticed_and_who_holds_it_is_not(tmp_path: Path) -> None:
    arena = tmp_path / "job" / "some.arena"
    arena.parent.mkdir()
    arena.write_bytes(bytes(4096) + (3).to_bytes(8, "little") + bytes(8192))
    before, states = contents(tmp_path)
    assert states == [3]
    with arena.open("r+b") as file:
        file.seek(4096 + 8 * WORDS.index("pid"))
        file.write(b"\7")
    assert contents(tmp_path)[0] == before
    with arena.open("r+b") as file:
        file.seek(9000)
        file.write(b"\7")
    assert contents(tmp_path)[0] != before


def drawn(seed: int) -> list[tuple[Plan, dict[int, Cell]]]:
    return [(chain.plan, chain.cells) for chain in Chains(seed, Lengths(), cells())]


def test_plans_are_written_and_read(tmp_path: Path, seed: int) -> None:
    for plan, _ in drawn(seed):
        plan.write(tmp_path / "plan.json")
        assert Plan.read(tmp_path / "plan.json") == plan


def test_every_cell_is_drawn_in_steps_that_come_after_each_other(seed: int) -> None:
    chains = drawn(seed)
    assert set(cells()) <= {cell for _, covered in chains for cell in covered.values()}
    for plan, covered in chains:
        timed = [e for e in plan.events if not isinstance(e, Refused) and e.step is not None]
        steps = [event.step for event in timed]
        assert steps == sorted(set(steps)) and all(0 <= step < plan.setting.steps for step in steps)
        for index, cell in covered.items():
            event = plan.events[index]
            assert not isinstance(event, Refused)
            assert len(event.victims) == cell.victims
            assert {victim.lost for victim in event.victims} == {cell.memory}
            if isinstance(event, Exact) and event.phase == "aborting":
                assert event.step % ABORT_EVERY == ABORT_EVERY - 1


def test_no_plan_loses_more_than_the_code_survives_unless_it_says_so(seed: int) -> None:
    """Counted from the events alone, and so that a death while starting may come before LIVE."""
    for plan, covered in drawn(seed):
        gone: set[int] = set()
        for index, event in enumerate(plan.events):
            if isinstance(event, Refused):
                continue
            when = ROW[covered[index].row].when
            if when != "recovery":
                gone = set()
            now = gone | {victim.rank for victim in event.victims if victim.lost}
            after = plan.events[index + 1] if index + 1 < len(plan.events) else None
            if isinstance(after, Refused):
                assert event.away and len(now) > plan.setting.tolerated
                assert after.lost == tuple(sorted(now))
            elif when != "fresh":
                assert not event.away and len(now) <= plan.setting.tolerated, plan
                gone = now


def test_the_matrix_has_every_phase_and_every_kind_of_death() -> None:
    named = {row.phase for row in ROWS}
    assert {phase for phase, group in PHASES.items() if group != REBUILD} - named == set()
    assert {cell.victims for cell in cells() if cell.memory and cell.setting == MAIN} == {1, 2, 3}
    assert any(cell.refused for cell in cells())
    assert {row.how for row in ROWS} == {"line", "torn", "raise", "outside", "torchrun"}
    assert {row.when for row in ROWS} == {"fresh", "first", "step", "last", "recovery", "end"}
    assert [str(cell) for cell in cells("apply: 3*")] == ["apply: 3, processes", "apply: 3, with memory"]


def test_a_third_of_the_cells_start_each_way(seed: int) -> None:
    started: dict[tuple[bool, bool], set[Cell]] = {}
    for plan, covered in drawn(seed):
        started.setdefault((plan.warm, plan.stays), set()).update(covered.values())
    for start, ways in (("plain", (False, False)), ("warm", (True, False)), ("stays", (True, True))):
        these = {cell for cell in cells() if cell.start == start}
        assert 0.25 < len(these) / len(cells()) < 0.42 and these <= started[ways]


def test_images_can_be_of_tables_on_a_device(seed: int) -> None:
    moved = cells("*images*", device="cuda")
    assert {(cell.setting.device, cell.setting.plain.apart) for cell in moved} == {("cuda", True)}
    assert "apply: 1, processes (4 ranks, code (4, 2), images, cuda)" in map(str, moved)
    others = [cell.setting for cell in cells(device="cuda") if cell not in moved]
    assert {(setting.device, setting.plain.apart) for setting in others} == {("cpu", False)}
    chosen = cells(*KILLS, device="cuda")
    assert len(chosen) == len(KILLS) and {cell.memory for cell in chosen} == {True, False}
    for chain in Chains(seed, Lengths(), chosen):
        assert chain.plan.setting.device == "cuda"


def test_a_cell_that_was_missed_is_drawn_again_until_it_is_given_up(seed: int) -> None:
    [cell] = cells("verifying: 1, processes")
    chains = Chains(seed, Lengths(), [cell])
    tried = 0
    for chain in chains:
        assert cell in chain.cells.values()
        tried += 1
        if not chains.missed(cell):
            break
    assert tried == ATTEMPTS
