"""A commit beside training takes a part of a busy processor, and all of it when training waits."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

from ecemb.step import transaction
from ecemb.step.transaction import AT_ONCE_S, SHARE, CommitThrottle


class Clocked:
    """Commits on a clock of processor time that stands still but for their work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pace = CommitThrottle()
        self._work_s, self._rested_s = 100.0, 0.0
        self.is_idle = False
        monkeypatch.setattr(transaction, "_work", lambda: self._work_s)
        monkeypatch.setattr(self.pace._idle, "are_idle", lambda: self.is_idle)

    def _wait(self, timeout_s: float) -> None:
        self._rested_s += timeout_s

    def commit(self, parts: int, part_s: float) -> float:
        """A commit of some parts; how long it rested."""
        self._rested_s = 0.0
        self.pace.begin()
        self.pace.start()
        with mock.patch.object(self.pace._waiting, "wait", self._wait):
            for _ in range(parts):
                self._work_s += part_s
                self.pace.rest()
        return self._rested_s


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    return Clocked(monkeypatch)


def test_a_commit_takes_a_part_of_the_processor(clocked: Clocked) -> None:
    for _ in range(2):
        rested_s = clocked.commit(100, 0.02)
        assert 2.0 / (2.0 + rested_s) == pytest.approx(SHARE, rel=0.01)


def test_a_small_commit_does_not_rest(clocked: Clocked) -> None:
    for _ in range(2):
        assert clocked.commit(4, AT_ONCE_S / 5) == 0


def test_beside_idle_processors_it_does_not_rest(clocked: Clocked) -> None:
    clocked.is_idle = True
    assert clocked.commit(100, 0.02) == 0
    clocked.is_idle = False
    assert clocked.commit(100, 0.02) > 0


def test_nothing_rests_while_training_waits() -> None:
    """Also what has begun to rest."""
    made = CommitThrottle()
    made.begin()
    made.start()
    made._last_s -= 1e6  # a part that rests for months
    made._spent_s = 1.0
    thread = threading.Thread(target=lambda: [made.rest() for _ in range(3)])
    thread.start()
    made.hurry()
    thread.join(240)
    assert not thread.is_alive()
    made.begin()
    assert not made._waiting.is_set()
