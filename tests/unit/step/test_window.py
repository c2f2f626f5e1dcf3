"""Several steps in one transaction: the same bits as one at a time, whatever drains or kills them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from ecemb.errors import ConfigurationError, NotEnoughSpace
from ecemb.memory.rank_memory import RankMemory
from ecemb.memory.scan import arenas
from ecemb.net.collectives import Transport
from ecemb.step import window
from ecemb.step.interval import MOST, best, published_mtbf
from ecemb.step.window import Window
from support.guarded_training import TIMEOUT_S, bags, headers, initialise
from support.processes import RankFailed, launch
from support.refusals import refused
from support.simulation import SMALL, alone

SCRUBBED, KILLED, STEPS = 6, 9, 13


def train(
    folder: Path, meet: Barrier, steps: int, overlap: bool = False, killed: int | None = None
) -> dict[str, Any]:
    """Windows of `steps` steps, of which one ends early in a scrub."""
    initialise(folder)
    training = bags(users=12)
    with refused(ConfigurationError, "different arguments", "'window': "):
        training.protect(4, 2, window=1 + dist.get_rank())
    with refused(ConfigurationError, "different arguments", "'overlap': "):
        training.protect(4, 2, overlap=dist.get_rank() == 0)
    guard = training.protect(4, 2, window=steps, overlap=overlap)
    began = guard.next_step
    while guard.next_step < STEPS:
        with guard.step() as step:
            training.body()
            if step.number == killed:
                meet.wait(TIMEOUT_S)
                os.kill(os.getpid(), signal.SIGKILL)
        if step.number == SCRUBBED:
            assert guard.scrub().wrong_words == 0
    assert guard.scrub().wrong_words == 0
    assert guard.stats()["window"] == steps
    result = {"began": began, "rank": dist.get_rank(), **training.snapshot()}
    guard.close()
    return result


def test_windows_change_no_bit_whatever_happens_in_them(tmp_path: Path) -> None:
    ends: dict[int, list[dict[str, Any]]] = {}
    for steps in (1, 4):
        folder = tmp_path / str(steps)
        folder.mkdir()
        ends[steps] = launch(4, train, folder, steps)
    assert ends[1] == ends[4]

    folder = tmp_path / "killed"
    folder.mkdir()
    with pytest.raises(RankFailed, match="died"):
        launch(4, train, folder, 2, True, KILLED)
    committed = {header.committed for header in headers(folder).values()}
    assert committed <= {SCRUBBED + 1, SCRUBBED + 3}  # the window before may not be decided yet
    for one in arenas(folder):
        if one.header is not None and one.header.constants.rank == 2:
            one.path.unlink()
    again = launch(4, train, folder, 2, True)
    (began,) = {end.pop("began") for end in again}
    assert max(committed) <= began <= SCRUBBED + 3
    for end in ends[1]:
        end.pop("began")
    assert sorted(again, key=lambda end: end["rank"]) == ends[1]


def choose(folder: Path, meet: Barrier, asked: Any) -> dict[str, Any]:
    """Windows of one step, and then of as many as the first ones say."""
    window.WARM_UP, window.MEASURED = 1, 3
    initialise(folder)
    training = bags(users=12)
    rare = timedelta(days=1000)  # windows of several steps, however long a step takes here
    guard = training.protect(4, 2, window=asked, mtbf=rare if asked == "auto" else None)
    sizes = set[int]()
    while guard.next_step < STEPS:
        sizes.add(guard.stats()["window"])
        with guard.step():
            training.body()
    assert guard.scrub().wrong_words == 0
    guard.close()
    return {"sizes": sorted(sizes), **training.snapshot()}


def test_auto_picks_one_window_for_all_ranks_and_changes_no_bit(tmp_path: Path) -> None:
    ends: dict[Any, list[dict[str, Any]]] = {}
    for asked in ("auto", 1):
        folder = tmp_path / str(asked)
        folder.mkdir()
        ends[asked] = launch(4, choose, folder, asked)
    sizes = [end.pop("sizes") for end in ends["auto"]]
    assert all(one == sizes[0] for one in sizes)
    assert sizes[0][0] == 1 < sizes[0][1]  # how many follows from the machine; `best` has the bounds
    assert {str(end.pop("sizes")) for end in ends[1]} == {"[1]"}
    assert ends["auto"] == ends[1]


def restart(folder: Path, meet: Barrier, killed: int | None) -> dict[str, Any]:
    """A start that is killed in a step; its window when it began to train, and the lines about it."""
    window.WARM_UP, window.MEASURED = 1, 3
    initialise(folder)
    training = bags(users=12)
    guard = training.protect(4, 2, window="auto")
    size = guard.stats()["window"]
    while guard.next_step < STEPS:
        with guard.step() as step:
            training.body()
            if step.number == killed:
                meet.wait(TIMEOUT_S)
                os.kill(os.getpid(), signal.SIGKILL)
    assert guard.scrub().wrong_words == 0
    guard.close()
    return {"size": size, "chosen": guard._transactions.window.size, "rank": dist.get_rank()}


def test_a_restart_goes_on_with_the_window_that_was_chosen(tmp_path: Path) -> None:
    """Also on a rank whose memory was lost: it takes it from another. And without mtbf."""
    with pytest.raises(RankFailed, match="died"):
        launch(4, restart, tmp_path, 6)
    measured = [
        [one.words[word] / 1e9 for word in window._TIMES]
        for one in arenas(tmp_path)
        if one.header is not None and one.header.constants.rank != 2
    ]
    assert len(measured) == 3
    mtbf_s = published_mtbf(1).total_seconds()
    expected = min(best(commit_s, step_s, mtbf_s) for commit_s, step_s in measured)
    for one in arenas(tmp_path):
        if one.header is not None and one.header.constants.rank == 2:
            one.path.unlink()
    ends = launch(4, restart, tmp_path, None)
    assert {end["size"] for end in ends} == {expected} and expected > 1
    assert len({end["chosen"] for end in ends}) == 1


def test_without_a_time_between_failures_it_is_as_published_of_so_many_hosts() -> None:
    assert published_mtbf(1).days == 59
    ratio = published_mtbf(1) / published_mtbf(256)
    assert ratio == pytest.approx(256)
    assert Window("auto").asked == ["auto", "None", "None"]


@pytest.mark.parametrize(
    ("committing_s", "step_s", "mtbf_s", "steps"),
    [
        (0.01, 0.4, 10_800, 37),  # sqrt(2 * 0.01 * 10800) = 14.7 s
        (0.5, 0.1, 10_800, MOST),
        (0.5, 0.008, 10_800, 7500),  # 60 s
        (1e-6, 10.0, 60, 1),
        (0.0, 0.0, 60, 1),
    ],
)
def test_the_best_window_is_youngs(committing_s: float, step_s: float, mtbf_s: float, steps: int) -> None:
    assert best(committing_s, step_s, mtbf_s) == steps
    assert best(committing_s, step_s, mtbf_s, 5.0) == max(1, min(steps, int(5 / max(step_s, 1e-9))))


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "all", None])
def test_what_is_no_window_is_refused(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="window is a number of steps from 1 on, or 'auto'"):
        Window(steps)


@pytest.mark.parametrize(
    ("steps", "mtbf"),
    [(4, timedelta(hours=1)), ("auto", timedelta(0)), ("auto", 3600), ("auto", "3 h")],
)
def test_auto_goes_with_a_time_between_failures(steps: Any, mtbf: Any) -> None:
    with pytest.raises(ConfigurationError, match="mtbf"):
        Window(steps, mtbf)


@pytest.mark.parametrize(
    ("steps", "most", "why"),
    [
        (4, 30.0, "goes with window='auto'"),
        ("auto", 0, "above 0"),
        ("auto", timedelta(seconds=-1), "above 0"),
        ("auto", float("nan"), "above 0"),
        ("auto", float("inf"), "above 0"),
        ("auto", "30 s", "above 0"),
        ("auto", True, "above 0"),
    ],
)
def test_auto_goes_with_a_bound_of_the_steps_to_run_again(steps: Any, most: Any, why: str) -> None:
    with refused(ConfigurationError, "max_replay", why):
        Window(steps, max_replay=most)
    assert Window("auto", max_replay=timedelta(minutes=1)).asked == Window("auto", max_replay=60).asked


# --- one rank's side ----------------------------------------------------------------------------


class Alone(Transport):
    """The control group of ranks that say what this one says."""

    def __init__(self, *others: bytes) -> None:
        self.rank, self.world_size, self._others = 0, 1 + len(others), others

    def gather(self, data: bytes, what: str) -> list[bytes]:
        return [data, *self._others]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[RankMemory]:
    with alone(tmp_path, SMALL) as opened:
        yield opened


class Trained:
    """A window whose steps and commits take as long as one says, by a clock that only this moves."""

    def __init__(self, memory: RankMemory, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self._now_s = 0.0
        monkeypatch.setattr(window, "_clock", lambda: self._now_s)
        monkeypatch.setattr(window, "WARM_UP", 1)
        overlap = options.pop("overlap", False)
        self.window = Window("auto", timedelta(hours=3), **options)
        self.window.take_up(memory, Alone(), 1, overlap=overlap)

    def run(self, windows: int, step_s: float, commit_s: float) -> int:
        """Runs whole windows; returns the size of the next one."""
        for _ in range(windows):
            for _ in range(self.window.size):
                self.window.begin()
                self._now_s += step_s
            self.window.agree(self.window.wish())
            self.window.end(commit_s)
        return self.window.size


def test_auto_chooses_again_when_a_time_has_changed_by_half(
    memory: RankMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(memory, monkeypatch)
    first = trained.run(22, 0.4, 0.01)
    assert first == 37 == best(0.01, 0.4, 10_800)
    commit_s = 0.05  # more, for more rows: that is what a commit of so many steps takes from now on
    assert trained.run(20, 0.5, commit_s) == first, "a quarter more is no reason"
    assert trained.run(3, 0.8, commit_s) == best(0.01, 0.8, 10_800)
    slower = trained.run(20, 0.8, commit_s)
    assert slower == best(0.01, 0.8, 10_800) == 18
    assert trained.run(20, 0.8, 4 * commit_s) == best(0.04, 0.8, 10_800)
    assert [memory.arena.get(word) for word in window._TIMES] == [40_000_000, 800_000_000]
    assert trained.run(20, 0.3, 4 * commit_s) == best(0.04, 0.3, 10_800)


@pytest.mark.parametrize(("overlap", "steps"), [(False, 25), (True, 12)])
def test_steps_that_run_again_take_no_longer_than_asked(
    overlap: bool, steps: int, memory: RankMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap, a failure may take back two windows."""
    trained = Trained(memory, monkeypatch, max_replay=10, overlap=overlap)
    assert trained.run(30, 0.4, 0.01) == steps
    assert trained.run(5, 20.0, 0.01) == 1, "one step is the least"


def test_a_window_is_as_long_as_there_is_room_and_that_is_said_once(
    memory: RankMemory, caplog: pytest.LogCaptureFixture
) -> None:
    sixteen = Window(16)
    sixteen.take_up(memory, Alone(), 1)
    assert sixteen.size == sixteen.wish() == 16
    with mock.patch.object(RankMemory, "window_room", return_value=5), caplog.at_level("WARNING", "ecemb"):
        assert [sixteen.wish() for _ in range(3)] == [5, 5, 5]
    assert len(caplog.records) == 1 and "for the rows of 5 steps, and 16 are asked for" in caplog.text
    assert "B that stay free for other processes" in caplog.text
    sixteen.agree(3)  # another rank has less room
    assert (sixteen.size, sixteen.wish()) == (3, 16)


def test_a_window_that_ran_out_is_halved_by_the_next_start(memory: RankMemory) -> None:
    """On all ranks: the smallest that an arena holds counts."""
    sixteen = Window(16)
    sixteen.take_up(memory, Alone(), 1)
    sixteen.run_out()
    assert memory.arena.get("window_room") == 8
    again = Window(16)
    again.take_up(memory, Alone(json.dumps([0, 0, 6, True]).encode()), 1)
    assert again.size == again.wish() == 6
    again.agree(1)
    again.run_out()  # one step is too much: half a step there isn't
    assert memory.arena.get("window_room") == 8


def test_where_not_all_rows_have_room_the_first_window_is_a_step(memory: RankMemory) -> None:
    sixteen = Window(16)
    sixteen.take_up(memory, Alone(json.dumps([0, 0, 0, False]).encode()), 1)
    assert (sixteen.size, sixteen.wish()) == (1, 16)


# --- four ranks, one of which has little memory ---------------------------------------------------


def short(folder: Path, meet: Barrier, steps: int, is_full: bool) -> dict[str, Any]:
    """Windows of `steps` steps; from the end of the first one on, rank 1 has no room for two steps."""
    initialise(folder)
    training = bags(users=12)
    guard = training.protect(4, 2, window=steps)
    sizes: list[int] = []
    if is_full and dist.get_rank() == 1:
        for budget in guard._memory._budgets:
            budget._fits = lambda *_: False
    while guard.next_step < STEPS:
        sizes.append(guard.stats()["window"])
        with guard.step():
            training.body()
    assert guard.scrub().wrong_words == 0
    guard.close()
    return {"sizes": sizes, "rank": dist.get_rank(), **training.snapshot()}


def test_all_ranks_have_shorter_windows_when_one_has_little_room(tmp_path: Path) -> None:
    ends: dict[bool, list[dict[str, Any]]] = {}
    for is_full in (False, True):
        folder = tmp_path / str(is_full)
        folder.mkdir()
        ends[is_full] = launch(4, short, folder, 4, is_full)
    assert all(end.pop("sizes") == [4] * STEPS for end in ends[False])
    assert all(end.pop("sizes") == [4] * 4 + [1] * (STEPS - 4) for end in ends[True])
    assert ends[True] == ends[False]


def runs_out(
    folder: Path, meet: Barrier, steps: int, full_at: int | None, error: type[Exception]
) -> dict[str, Any]:
    """Rank 1's journal can't grow in step `full_at`."""
    initialise(folder)
    training = bags(users=12)
    guard = training.protect(4, 2, window=steps)
    began, size = guard.next_step, guard.stats()["window"]
    while guard.next_step < STEPS:
        with guard.step() as step:
            training.body()
            if step.number == full_at and dist.get_rank() == 1:
                raise error("the row journal is full")
    guard.close()
    return {"size": size, "began": began, "rank": dist.get_rank()}


@pytest.mark.parametrize("error", [NotEnoughSpace, MemoryError])  # of the arena, of the process
def test_a_window_that_runs_out_fails_and_the_next_start_has_shorter_ones(
    error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(RankFailed, match=rf"{error.__name__}|failed on ranks \[1\]"):  # the first one heard
        launch(4, runs_out, tmp_path, 6, 8, error)
    ends = launch(4, runs_out, tmp_path, 6, None, error)
    assert {(end["size"], end["began"]) for end in ends} == {(3, 6)}
