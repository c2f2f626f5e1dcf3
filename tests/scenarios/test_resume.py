"""Starts from a checkpoint that are cut off at every moment, and what the next start makes of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ecemb.errors import StateLost, TooManyErasures
from ecemb.memory.classify import classify
from ecemb.recovery.plan import RecoveryPlan
from ecemb.state import rank_state
from support.simulation import Job, Machines, Rank, job_of

SAVED, REACHED = 2, 3


class Durable(Machines):
    """A job with a checkpoint of transaction SAVED, which is what `Job.expected` says."""

    def plan(self) -> RecoveryPlan:
        try:
            return super().plan()
        except (TooManyErasures, StateLost):
            return RecoveryPlan("checkpoint", SAVED)

    def _discard(self, rank: int, kept: set[str]) -> None:
        # Whoever resumed from a checkpoint has another arena than what survived before.
        for found in self.directory(rank).scan(timeout_s=0):
            if found.holder is None:
                found.path.unlink()


def restored(rank: Rank) -> None:
    """Instead of the initial state: what a checkpoint of SAVED gives back."""
    number = rank.memory.rank
    words = rank.job.expected(number, SAVED)
    rank.memory.space.write_(0, words)
    for step in range(SAVED):
        rank.position.run(step)
        for parameter in rank.model.parameters():
            parameter.data.mul_(1.5).add_(step)
    rank.replicated.save(rank.memory.slots, SAVED)
    rank_state.write_(rank.memory.rank_state, rank.position.pack())


@pytest.fixture
def begun(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Durable:
    """A job that stands at REACHED, and has lost more than it survives."""
    job: Job = job_of(3, 2, 4, random.Random(seed), rows=4)
    machines = Durable(tmp_path / "job", job)
    machines.run(REACHED)
    machines.lose(0)
    machines.lose(2)
    monkeypatch.setattr(Rank, "_write_initial", restored)
    return machines


def test_a_resumed_start_may_end_at_any_moment(begun: Durable, tmp_path: Path) -> None:
    """One rank dies at each of its moments, then another one in the start after it; nothing is lost."""
    whole = begun.copy(tmp_path / "whole")
    life = whole.run(SAVED)
    assert life.plan.kind == "checkpoint" and not life.failures, life.failures
    whole.check(SAVED)
    kinds: set[str] = set()
    for rank in (1, 2):
        moments = life.moments[rank]
        for end in sorted({*range(1, moments, 4), *range(moments - 8, moments + 1)}):
            one = begun.copy(tmp_path / f"{rank}-{end}")
            first = one.run(SAVED, ends={rank: end})
            assert not first.unexpected(), first.unexpected()
            second = one.run(SAVED, ends={(rank + 1) % 4: end})
            kinds.add(second.plan.kind)
            assert not second.unexpected(), second.unexpected()
            assert second.plan.transaction == SAVED
            third = one.run(REACHED + 1)
            assert not third.failures, third.failures
            one.check(REACHED + 1)
    assert kinds == {"checkpoint", "process"}


def test_old_memory_counts_until_the_new_is_opened(begun: Durable) -> None:
    before = {header.constants.arena_id for header in classify(begun.headers()).survivors}
    assert len(before) == 2
    begun.run(SAVED, ends={1: 3})
    assert before <= {header.constants.arena_id for header in begun.headers()}
