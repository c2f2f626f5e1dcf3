"""What a ledger says of several lives of a rank, and when failures strike."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

from baselines.method import Costs, Promise, Training, total
from bench.methods.ledger import Account, account
from bench.methods.life import Failure, live


class Scripted:
    """A method that begins where it is asked to, and counts what it is asked to."""

    promise = Promise(bit_identical=False, steps_again=None)

    def __init__(self, begin: int, arena: Path) -> None:
        self._begin, self._arena = begin, arena
        self._steps = 0
        self.calls: list[str] = []

    def prepare(self, training: Training) -> int:
        self.calls.append("prepare")
        return self._begin

    @contextmanager
    def step(self) -> Generator[None]:
        self.calls.append("before")
        yield
        self.calls.append("after")
        self._steps += 1

    def memory(self) -> Sequence[Path]:
        return [self._arena]

    def costs(self) -> Costs:
        return Costs(self._steps * 0.5, self._steps, 10 * self._steps, 7, 100 - self._steps, 2.0)

    def close(self) -> None:
        self.calls.append("close")


class Died(BaseException):
    """Stands for the end of the process."""


def run(method: Scripted, folder: Path, steps: int, failures: Sequence[Failure] = ()) -> list[int]:
    done: list[int] = []
    live(
        method,
        Training(nn.Module(), []),
        done.append,
        steps,
        rank=1,
        folder=folder,
        failures=failures,
    )
    return done


def test_two_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    struck: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        struck.append((pid, number))
        raise Died

    monkeypatch.setattr(os, "kill", kill)
    arena = tmp_path / "arena"
    arena.touch()
    first = Scripted(0, arena)
    others = [Failure(step=1, ranks=(0, 2)), Failure(step=2, ranks=(1,), moment="after", with_memory=False)]
    with pytest.raises(Died):
        run(first, tmp_path, 6, [*others, Failure(step=4, ranks=(1,))])
    assert first.calls == ["prepare", *["before", "after"] * 3]
    assert struck == [(os.getpid(), signal.SIGKILL)] and arena.exists()
    with pytest.raises(Died):
        run(Scripted(2, arena), tmp_path, 6, [Failure(step=4, ranks=(1, 2))])
    assert not arena.exists()
    last = Scripted(4, arena)
    assert run(last, tmp_path, 6) == [4, 5] and last.calls[-1] == "close"
    found = account(tmp_path, 1)
    assert isinstance(found, Account)
    assert found.started == (0, 2, 4)
    assert [life.begun for life in found.lives] == [(0, 1, 2), (2, 3, 4), (4, 5)]
    assert [[one.step for one in life.done] for life in found.lives] == [[0, 1, 2], [2, 3], [4, 5]]
    for life in found.lives:
        times = [one.at_s for one in life.done]
        assert times == sorted(times) and life.started_s >= 0 and life.start_costs.written_bytes == 0
        assert 0 <= life.done[0].cpu_s <= life.done[-1].cpu_s <= life.cpu_s
        assert [one.costs.written_bytes for one in life.done] == list(range(1, len(times) + 1))
    struck_s = [life.struck_at_s for life in found.lives]
    assert struck_s[2] is None
    assert all(
        at is not None and at >= life.done[-1].at_s
        for at, life in zip(struck_s[:2], found.lives, strict=False)
    )
    assert found.steps_again == 2  # steps 2 and 4 were begun twice
    assert found.costs == Costs(7 * 0.5, 7, 70, 7, 98, 6.0)


def test_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()
    monkeypatch.setattr(os, "kill", lambda *_: killed.set())
    arena = tmp_path / "arena"
    arena.touch()
    clocks = [
        Failure(-1, (1,), "clock"),
        Failure(-1, (1,), "clock", after_s=3600),
        Failure(-1, (0,), "clock"),
    ]
    steps: list[bool] = []
    live(
        Scripted(0, arena),
        Training(nn.Module(), []),
        lambda _: steps.append(killed.wait(300)),
        2,
        rank=1,
        folder=tmp_path,
        failures=clocks,
    )
    assert steps == [True, True] and not arena.exists()
    (life,) = account(tmp_path, 1).lives
    assert life.struck_at_s is not None and life.struck_at_s < life.done[0].at_s


def test_of_no_lives_at_all_nothing_was_spent() -> None:
    assert total([]) == Costs()
