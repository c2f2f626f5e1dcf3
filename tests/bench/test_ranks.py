"""Ranks are real processes with torchrun's environment; what ends them too early is reported."""

from __future__ import annotations

import os
import sys
from typing import Any

import psutil
import pytest

from bench.harness.ranks import Line, RankFailed, Ranks


def say_where(line: Line, word: str) -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    line.send([word, os.getpid(), *(os.environ[name] for name in names)])
    line.await_end()


def fail(line: Line, how: str) -> None:
    if os.environ["RANK"] == "1":
        print(f"about to {how}")
        sys.stdout.flush()
        if how == "raise":
            raise ValueError("wrong on purpose")
        os._exit(3)
    line.send("fine")


def fail_late(line: Line) -> None:
    line.send("fine")
    raise ValueError("wrong after all")


def test_ranks_have_their_environment_and_are_gone_after_the_block() -> None:
    with Ranks(3, say_where, "hello", deadline_s=300) as ranks:
        told = ranks.answers()
        ranks.dismiss()
        ranks.finished()
    assert [one[2:4] for one in told] == [[str(rank), "3"] for rank in range(3)]
    assert len({(one[4], one[5]) for one in told}) == 1
    assert {one[0] for one in told} == {"hello"}
    assert len({one[1] for one in told} - {os.getpid()}) == 3
    assert not any(psutil.pid_exists(one[1]) for one in told)


def test_ranks_are_gone_when_their_caller_fails() -> None:
    told: list[Any] = []

    def call() -> None:
        with Ranks(2, say_where, "hello", deadline_s=300) as ranks:
            told.extend(ranks.answers())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call()
    assert len(told) == 2
    assert not any(psutil.pid_exists(one[1]) for one in told)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "(?s)rank 1 of 2 raised:.*wrong on purpose"),
        ("die", "(?s)rank 1 of 2 ended with 3:.*about to die"),
    ],
)
def test_a_rank_that_fails(how: str, words: str) -> None:
    with pytest.raises(RankFailed, match=words), Ranks(2, fail, how, deadline_s=300) as ranks:
        ranks.answers()


def test_a_rank_that_fails_after_its_answer() -> None:
    with Ranks(1, fail_late, deadline_s=300) as ranks:
        assert ranks.answers() == ["fine"]
        with pytest.raises(RankFailed, match="wrong after all"):
            ranks.finished()


def test_a_rank_that_does_not_end() -> None:
    with Ranks(1, say_where, "hello", deadline_s=300) as ranks:
        ranks.answers()
        ranks._deadline = 0.0  # it has passed
        with pytest.raises(RankFailed, match="rank 0 of 1 still runs after 300 s"):
            ranks.finished()
