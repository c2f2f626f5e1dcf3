"""Who says at the end of a process that the job's memory stays."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from ecemb.guard import Remaining
from ecemb.net import watch
from ecemb.net.error_file import Activity, Failure


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", calls.append)
    monkeypatch.setattr(atexit, "unregister", calls.remove)
    monkeypatch.setattr(watch, "_calls", [])
    return calls


def remaining(rank: int, **arena: Any) -> Remaining:
    session = mock.Mock(rank=rank, job="a", world_size=8, hosts=("h", "i") * 4, activity=Activity())
    session.directory = mock.Mock(arena_dir="/arenas", removal="rm")
    return Remaining(session, mock.Mock(**{"get.return_value": 7, "is_named.return_value": True, **arena}))


def test_of_all_ranks_one_says_it(
    registered: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    every = [remaining(rank) for rank in range(8)]
    assert len(registered) == 1
    registered[0]()
    (line,) = caplog.records
    assert line.levelno == logging.WARNING
    assert line.getMessage() == (
        "job a was not closed: the memory of its 8 ranks stays in /arenas of 2 hosts. The same launch goes "
        "on from step 7; to remove it, on each host: rm"
    )
    every[0].forget()
    assert not registered and not watch._calls


def test_memory_that_is_gone_and_a_forked_child_say_nothing(
    registered: list[Callable[[], None]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining(0, **{"is_named.return_value": False})._say()
    child = remaining(0)
    child._pid += 1
    child._say()
    monkeypatch.setattr(sys, "last_value", ValueError("a restart follows"), raising=False)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    remaining(0)._say()
    assert not caplog.records
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
    remaining(0)._say()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("ends", [["exit", "hard"], ["hard", "exit"], ["hard", "hard"]], ids="-".join)
def test_a_hard_exit_says_it_too_and_both_say_it_once(
    ends: list[str], registered: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    remaining(0)
    for end in ends:
        if end == "exit":
            registered[0]()
        else:
            watch.say_last_words()
        assert len(caplog.records) == 1


@pytest.mark.parametrize("restarts", [0, 1])
def test_after_a_failed_step_and_at_a_hard_exit_the_last_attempt_alone_says_it(
    restarts: int,
    registered: list[Callable[[], None]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    left = remaining(0)
    left._activity.failure = Failure("SystemExit: 0", "", 0, 0.0)  # no hook sees it
    registered[0]()
    assert len(caplog.records) == (restarts == 0)
    remaining(0)
    watch.say_last_words()
    assert len(caplog.records) == 2 * (restarts == 0)
