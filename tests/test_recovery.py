"""The whole protocol in one process: ranks are killed at every moment of a start, a step, a recovery.

Each case: a life of the job in which ranks are killed, then one in which it recovers, maybe after the
loss of memory and maybe killed again, then one that goes on; then every byte is compared with a run
that never failed. protocol.md, section 8: a kill stops a rank between two stores.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from simulation import Job, Life, Machines, job_of

from ecemb.plan import RecoveryPlan

SHAPES = [(2, 1, 2), (3, 2, 3), (4, 2, 4), (3, 1, 4), (4, 3, 5)]
DONE = 3  # transactions before the life in which ranks are killed


class Trial:
    """One case; `history` tells what was done when it fails."""

    def __init__(self, machines: Machines, rng: random.Random) -> None:
        self.machines = machines
        self.rng = rng
        self.history: list[object] = []

    def live(self, until: int, ends: dict[int, int]) -> Life:
        plan = self.machines.plan()
        self.history.append((plan.kind, plan.transaction, plan.lost, ends))
        life = self.machines.run(until, ends)
        assert not life.unexpected(), life.unexpected()
        assert life.plan == plan
        return life

    def plan_after(self, life: Life) -> RecoveryPlan:
        """What is decided now: no step that any rank had committed is lost, and none is made up."""
        plan = self.machines.plan()
        if life.committed >= 0:
            assert plan.kind != "fresh"
            assert life.committed <= plan.transaction <= life.committed + 1
        return plan

    def lose_some(self) -> None:
        """Takes the memory of some ranks, as many as the code survives."""
        job, plan = self.machines.job, self.machines.plan()
        lost = set(plan.lost)
        for rank in self.rng.sample(range(job.size), job.size):
            bearable = plan.kind == "fresh" or job.placement.tolerates(lost | {rank})
            if bearable and self.rng.random() < 0.6:
                lost.add(rank)
                self.machines.lose(rank)
        self.history.append(("lost", sorted(lost)))


def some_ends(moments: dict[int, int], likely: float, rng: random.Random) -> dict[int, int]:
    """Rank -> one of its moments, for some ranks."""
    return {rank: rng.randint(1, count) for rank, count in moments.items() if rng.random() < likely}


def run_trial(machines: Machines, ends: dict[int, int], moments: dict[int, int], seed: int) -> None:
    rng = random.Random(seed)
    trial = Trial(machines, rng)
    try:
        life = trial.live(DONE + 1, ends)
        plan = trial.plan_after(life)
        if rng.random() < 0.7:
            trial.lose_some()
        if rng.random() < 0.6:
            life = trial.live(DONE + 1, some_ends(moments, 0.6, rng))
            if life.ranks or plan.kind == "fresh":
                plan = trial.plan_after(life)
            if rng.random() < 0.5:
                trial.lose_some()
        life = trial.live(DONE + 2, {})
        assert not life.failures
        machines.check(DONE + 2)
    except BaseException:
        print(f"seed of this trial: {seed}; kind, transaction, lost, ends: {trial.history}")
        raise


@pytest.fixture(scope="module")
def begun(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[int, int, int], Machines]:
    """Shape -> a job of that shape that has done three steps, undisturbed."""
    rng = random.Random(request.config.option.seed)
    return {shape: start(tmp_path_factory.mktemp("job"), job_of(*shape, rng)) for shape in SHAPES}


def start(root: Path, job: Job) -> Machines:
    machines = Machines(root / "base", job)
    life = machines.run(DONE)
    assert not life.failures
    assert life.plan.kind == "fresh"
    machines.check(DONE)
    return machines


def cases(moments: dict[int, int], share: int, rng: random.Random) -> list[tuple[int, int]]:
    """One in `share` of all (rank, moment), evenly from all parts of the protocol."""
    every = [(rank, end) for rank, count in sorted(moments.items()) for end in range(1, count + 1)]
    return every[rng.randrange(share) :: share]


@pytest.mark.parametrize(("shape", "share"), [*zip(SHAPES, (1, 4, 7, 7, 9), strict=True)])
def test_every_rank_killed_at_every_moment(
    shape: tuple[int, int, int],
    share: int,
    begun: dict[tuple[int, int, int], Machines],
    tmp_path: Path,
    seed: int,
) -> None:
    """Really every one with two ranks; with more, another sample in every run of the tests."""
    rng = random.Random(seed)
    moments = begun[shape].copy(tmp_path / "rehearsal").run(DONE + 1).moments
    for rank, end in cases(moments, share, rng):
        others = some_ends(moments, 0.3, rng)
        machines = begun[shape].copy(tmp_path / f"{rank}-{end}")
        run_trial(machines, {**others, rank: end}, moments, rng.randrange(2**31))


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_every_rank_killed_at_a_fresh_start(shape: tuple[int, int, int], tmp_path: Path, seed: int) -> None:
    """The initial state is transaction 0 of the same protocol: all of it is kept, or none."""
    rng = random.Random(seed)
    job = job_of(*shape, rng, rows=5)
    moments = Machines(tmp_path / "rehearsal", job).run(0).moments
    for rank, end in cases(moments, 3 * shape[2], rng):
        trial = Trial(Machines(tmp_path / f"{rank}-{end}", job), rng)
        try:
            trial.plan_after(trial.live(0, {**some_ends(moments, 0.3, rng), rank: end}))
            trial.lose_some()
            assert not trial.live(1, {}).failures
            trial.machines.check(1)
        except BaseException:
            print(f"kind, transaction, lost, ends: {trial.history}")
            raise
