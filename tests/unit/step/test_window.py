"""Several steps in one transaction: the same bits as one at a time, whatever aborts, drains or kills them."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ecemb.arena.scan import arenas
from ecemb.errors import ConfigurationError
from ecemb.step import window
from ecemb.step.window import MOST, Window, best
from support.guarded_training import TIMEOUT_S, bags, headers, initialise
from support.processes import RankFailed, launch
from support.refusals import refused

ABORTED, SCRUBBED, KILLED, STEPS = 5, 6, 9, 13


def train(
    folder: Path,
    meet: Barrier,
    steps: int,
    overlap: bool = False,
    killed: int | None = None,
    abortable: bool = True,
) -> dict[str, Any]:
    """Windows of `steps` steps: one is aborted in the middle of its window, one ends early in a scrub."""
    initialise(folder)
    training = bags(users=12)
    with refused(ConfigurationError, "different arguments", "'window': "):
        training.protect(4, 2, window=1 + dist.get_rank())
    with refused(ConfigurationError, "different arguments", "'overlap': "):
        training.protect(4, 2, overlap=dist.get_rank() == 0)
    with refused(ConfigurationError, "different arguments", "'abortable': "):
        training.protect(4, 2, abortable=dist.get_rank() == 0)
    guard = training.protect(4, 2, window=steps, overlap=overlap, abortable=abortable)
    began = guard.next_step
    while guard.next_step < STEPS:
        with guard.step() as step:
            training.body()
            if abortable and step.number == ABORTED and dist.get_rank() == 1:
                step.abort("to see what happens")
            if step.number == killed:
                meet.wait(TIMEOUT_S)
                os.kill(os.getpid(), signal.SIGKILL)
        assert step.aborted == (abortable and step.number == ABORTED)
        if step.number == SCRUBBED:
            assert guard.scrub().wrong_words == 0
    assert guard.scrub().wrong_words == 0
    assert guard.stats()["window"] == steps
    result = {"began": began, "rank": dist.get_rank(), **training.snapshot()}
    guard.close()
    return result


@pytest.mark.parametrize("abortable", [True, False])
def test_windows_change_no_bit_whatever_happens_in_them(tmp_path: Path, abortable: bool) -> None:
    ends: dict[int, list[dict[str, Any]]] = {}
    for steps in (1, 4):
        folder = tmp_path / str(steps)
        folder.mkdir()
        ends[steps] = launch(4, train, folder, steps, False, None, abortable)
    assert ends[1] == ends[4]

    folder = tmp_path / "killed"
    folder.mkdir()
    with pytest.raises(RankFailed, match="died"):
        launch(4, train, folder, 2, True, KILLED, abortable)
    committed = {header.committed for header in headers(folder).values()}
    assert committed <= {SCRUBBED + 1, SCRUBBED + 3}  # the window before may not be decided yet
    for one in arenas(folder):
        if one.header is not None and one.header.constants.rank == 2:
            one.path.unlink()
    again = launch(4, train, folder, 2, True, None, abortable)
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
    assert sizes[0][0] == 1 < sizes[0][1] <= MOST
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
    measured = {
        tuple(one.words[word] for word in window._WORDS) for one in arenas(tmp_path) if one.header is not None
    }
    ((commit_ns, step_ns),) = measured
    expected = best(commit_ns / 1e9, step_ns / 1e9, window.published_mtbf(1).total_seconds())
    for one in arenas(tmp_path):
        if one.header is not None and one.header.constants.rank == 2:
            one.path.unlink()
    ends = launch(4, restart, tmp_path, None)
    assert {(end["size"], end["chosen"]) for end in ends} == {(expected, expected)} and expected > 1


def test_without_a_time_between_failures_it_is_as_published_of_so_many_hosts() -> None:
    assert window.published_mtbf(1).days == 59
    ratio = window.published_mtbf(1) / window.published_mtbf(256)
    assert ratio == pytest.approx(256)
    assert Window("auto").asked == ["auto", "None"]


@pytest.mark.parametrize(
    ("committing_s", "step_s", "mtbf_s", "steps"),
    [
        (0.01, 0.4, 10_800, 37),  # sqrt(2 * 0.01 * 10800) = 14.7 s
        (0.5, 0.1, 10_800, MOST),
        (1e-6, 10.0, 60, 1),
        (0.0, 0.0, 60, 1),
    ],
)
def test_the_best_window_is_youngs(committing_s: float, step_s: float, mtbf_s: float, steps: int) -> None:
    assert best(committing_s, step_s, mtbf_s) == steps


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
