"""The whole protocol in one process: ranks are killed at every moment of a start, a step, a recovery.

Each case: a life of the job in which ranks are killed, then one in which it recovers, maybe after the
loss of memory and maybe killed again, then one that goes on; then every byte is compared with a run
that never failed. docs/protocol.md, 10: a kill stops a rank between two stores.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ecemb.errors import UndeclaredWrite
from ecemb.recovery.plan import RecoveryPlan
from support.simulation import BESIDE, Job, Life, Machines, Rank, check_parity, job_of

SHAPES = [(2, 1, 2), (3, 2, 3), (4, 2, 4), (3, 1, 4), (4, 3, 5)]
DONE = 3  # transactions before the life in which ranks are killed


class Trial:
    """One case. As a context it prints, when it fails, its `history`: what was done."""

    def __init__(self, machines: Machines, rng: random.Random) -> None:
        self.machines = machines
        self.rng = rng
        self.history: list[object] = []
        self._longest, self._overlapping = machines.job.window, machines.job.overlap

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(f"kind, transaction, lost, window, ends, interrupts of each life: {self.history}")

    def live(self, until: int, ends: dict[int, int], interrupts: dict[int, int] | None = None) -> Life:
        if self.history and self._overlapping:  # every start may ask for another way to commit
            overlap = self.rng.random() < 0.5
            self.machines.job = dataclasses.replace(self.machines.job, overlap=overlap)
        if self.history and self._longest > 1:
            window = self.rng.randint(1, self._longest)
            self.machines.job = dataclasses.replace(self.machines.job, window=window)
        plan = self.machines.plan()
        window = self.machines.job.window
        self.history.append((plan.kind, plan.transaction, plan.lost, window, ends, interrupts))
        life = self.machines.run(until, ends, interrupts=interrupts)
        assert not life.unexpected(), life.unexpected()
        assert life.plan == plan
        return life

    def plan_after(self, life: Life) -> RecoveryPlan:
        """What is decided now: no step that any rank had committed is lost, and none is made up."""
        plan = self.machines.plan()
        if life.committed >= 0:
            assert plan.kind != "fresh"
            assert life.committed <= plan.transaction <= life.committed + self.machines.job.window
        return plan

    def lose_some(self, likely: float = 0.6) -> None:
        """Takes the memory of some ranks, as many as the code survives; some may come back."""
        job, plan = self.machines.job, self.machines.plan()
        lost = set(plan.lost)
        for rank in self.rng.sample(range(job.size), job.size):
            if rank not in lost and self.rng.random() < 0.3:
                self.machines.come_back(rank)
                self.history.append(("came back", rank))
                assert rank not in self.machines.plan().lost
            bearable = plan.kind == "fresh" or job.placement.tolerates(lost | {rank})
            if bearable and self.rng.random() < likely:
                lost.add(rank)
                if self.rng.random() < 0.5:
                    self.machines.lose(rank)
                else:
                    self.machines.cut_off(rank)
        self.history.append(("lost", sorted(lost)))

    def finish(self, transaction: int) -> None:
        """Goes on undisturbed, and compares every byte."""
        life = self.live(transaction, {})
        assert not life.failures
        self.machines.check(transaction)


def some_ends(moments: dict[int, int], likely: float, rng: random.Random) -> dict[int, int]:
    """Rank -> one of its moments, for some ranks."""
    return {rank: rng.randint(1, count) for rank, count in moments.items() if rng.random() < likely}


def run_trial(
    machines: Machines, ends: dict[int, int], moments: dict[int, int], seed: int, goal: int
) -> None:
    rng = random.Random(seed)
    with Trial(machines, rng) as trial:
        life = trial.live(goal, ends)
        plan = trial.plan_after(life)
        if rng.random() < 0.7:
            trial.lose_some()
        if rng.random() < 0.6:
            life = trial.live(goal, some_ends(moments, 0.6, rng))
            if life.ranks or plan.kind == "fresh":
                plan = trial.plan_after(life)
            if rng.random() < 0.5:
                trial.lose_some()
        trial.finish(goal + 1)


@pytest.fixture(scope="module")
def begun(run_seed: int) -> Iterator[dict[tuple[int, int, int], Machines]]:
    """Shape -> a job of that shape that has done three steps, undisturbed. In memory, as arenas are."""
    rng = random.Random(run_seed)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        yield {shape: start(Path(root) / str(shape), job_of(*shape, rng)) for shape in SHAPES}


def start(root: Path, job: Job) -> Machines:
    machines = Machines(root, job)
    life = machines.run(DONE)
    assert not life.failures
    assert life.plan.kind == "fresh"
    machines.check(DONE)
    return machines


def cases(moments: dict[int, int], share: int, rng: random.Random) -> list[tuple[int, int]]:
    """One in `share` of all (rank, moment), evenly from all parts of the protocol."""
    every = [(rank, end) for rank, count in sorted(moments.items()) for end in range(1, count + 1)]
    return every[rng.randrange(share) :: share]


def check_undisturbed(base: Machines, goal: int, folder: Path) -> None:
    machines = base.copy(folder)
    life = machines.run(goal)
    assert not life.failures
    machines.check(goal)


def run_trials(base: Machines, share: int, rng: random.Random, folder: Path, goal: int = DONE + 1) -> None:
    """The next step of a job, once for each case: one or more ranks are killed at a moment of it."""
    folder.mkdir(exist_ok=True)
    moments = base.copy(folder / "rehearsal").run(goal).moments
    for rank, end in cases(moments, share, rng):
        others = some_ends(moments, 0.3, rng)
        machines = base.copy(folder / f"{rank}-{end}")
        run_trial(machines, {**others, rank: end}, moments, rng.randrange(2**31), goal)


@pytest.mark.parametrize(("shape", "share"), [*zip(SHAPES, (1, 14, 24, 24, 40), strict=True)])
def test_every_rank_killed_at_every_moment(
    shape: tuple[int, int, int],
    share: int,
    begun: dict[tuple[int, int, int], Machines],
    arena_dir: Path,
    seed: int,
) -> None:
    """Really every one with two ranks; with more, another sample in every run of the tests."""
    run_trials(begun[shape], share, random.Random(seed), arena_dir)


@pytest.mark.parametrize(
    ("shape", "share", "window"),
    [*zip(SHAPES[:3], (1, 12, 24), (1, 1, 1), strict=True), (SHAPES[0], 8, 3), (SHAPES[2], 80, 3)],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_every_rank_interrupted_at_every_moment(
    shape: tuple[int, int, int],
    share: int,
    window: int,
    overlap: bool,
    begun: dict[tuple[int, int, int], Machines],
    arena_dir: Path,
    seed: int,
) -> None:
    """Ctrl-C: what is not prepared is undone in the process, what is prepared is left to recovery."""
    rng = random.Random(seed)
    base, goal = begun[shape].copy(arena_dir / "base"), DONE + window * (1 + overlap)
    base.job = dataclasses.replace(base.job, window=window, overlap=overlap)
    moments = base.copy(arena_dir / "rehearsal").run(goal).moments
    main = {rank: count for rank, count in moments.items() if rank < BESIDE}  # no other thread is
    for rank, end in cases(main, share * (1 + 2 * overlap), rng):
        with Trial(base.copy(arena_dir / f"{rank}-{end}"), rng) as trial:
            life = trial.live(goal, some_ends(moments, 0.1, rng), {rank: end})
            trial.plan_after(life)
            if rng.random() < 0.5:
                trial.lose_some()
            trial.finish(goal + 1)


@pytest.mark.parametrize(
    ("shape", "share"), [((2, 1, 2), 8), ((3, 2, 3), 36), ((4, 2, 4), 64), ((3, 1, 4), 64)]
)
def test_every_rank_killed_while_a_step_is_aborted(
    shape: tuple[int, int, int],
    share: int,
    begun: dict[tuple[int, int, int], Machines],
    arena_dir: Path,
    seed: int,
) -> None:
    """Who aborts may be lost at once with its memory; the step never goes forward without it.

    No rank commits the step empty before all others have undone it. The next step is aborted as well.
    """
    rng = random.Random(seed)
    base = begun[shape].copy(arena_dir / "base")
    aborting = rng.sample(range(shape[2]), rng.randint(1, shape[2]))
    aborts = frozenset((step, rank) for rank in aborting for step in (DONE, DONE + 1))
    base.job = dataclasses.replace(base.job, aborts=aborts)
    check_undisturbed(base, DONE + 3, arena_dir / "undisturbed")
    run_trials(base, share, rng, arena_dir / "trials", DONE + 2)


@pytest.mark.parametrize(("shape", "share"), [((2, 1, 2), 10), ((3, 2, 3), 38), ((4, 2, 4), 86)])
def test_every_rank_killed_in_a_window(
    shape: tuple[int, int, int],
    share: int,
    begun: dict[tuple[int, int, int], Machines],
    arena_dir: Path,
    seed: int,
) -> None:
    """Three steps are one transaction; a fourth is committed by itself."""
    rng = random.Random(seed)
    base, goal = begun[shape].copy(arena_dir / "base"), DONE + 4
    base.job = dataclasses.replace(base.job, window=3)
    check_undisturbed(base, goal, arena_dir / "undisturbed")
    run_trials(base, share, rng, arena_dir / "trials", goal)


@pytest.mark.parametrize(
    ("shape", "share", "window"),
    [
        ((2, 1, 2), 10, 1),
        ((3, 2, 3), 38, 1),
        ((4, 2, 4), 86, 1),
        ((3, 1, 4), 86, 1),
        ((2, 1, 2), 11, 2),
        ((3, 2, 3), 43, 3),
    ],
)
def test_every_rank_killed_while_a_step_is_decided_beside_the_next_one(
    shape: tuple[int, int, int],
    share: int,
    window: int,
    begun: dict[tuple[int, int, int], Machines],
    arena_dir: Path,
    seed: int,
) -> None:
    """Section 7, overlap: two transactions are undecided, of which the rows lie in two journals.

    One step is aborted: in a window of several steps, the others run again.
    """
    rng = random.Random(seed)
    base, goal = begun[shape].copy(arena_dir / "base"), DONE + 3 * window
    aborts = frozenset({(rng.randrange(DONE, goal), rng.randrange(shape[2]))})
    base.job = dataclasses.replace(base.job, overlap=True, window=window, aborts=aborts)
    check_undisturbed(base, goal, arena_dir / "undisturbed")
    run_trials(base, share, rng, arena_dir / "trials", goal)


@pytest.mark.parametrize(("window", "overlap"), [(1, False), (2, False), (1, True), (2, True)])
def test_every_rank_killed_around_cancelled_steps(
    window: int, overlap: bool, begun: dict[tuple[int, int, int], Machines], arena_dir: Path, seed: int
) -> None:
    """A step that is cancelled leaves an arena in which nothing shows that it began; also the last one."""
    rng = random.Random(seed)
    base, goal = begun[3, 2, 3].copy(arena_dir / "base"), DONE + 3
    cancels = frozenset((step, rank) for step in range(DONE, goal + 1) for rank in range(3))
    base.job = dataclasses.replace(base.job, cancels=cancels, window=window, overlap=overlap)
    check_undisturbed(base, goal, arena_dir / "undisturbed")
    run_trials(base, 40, rng, arena_dir / "trials", goal)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_every_rank_killed_at_a_fresh_start(shape: tuple[int, int, int], arena_dir: Path, seed: int) -> None:
    """The initial state is transaction 0 of the same protocol: all of it is kept, or none."""
    rng = random.Random(seed)
    job = job_of(*shape, rng, rows=5)
    moments = Machines(arena_dir / "rehearsal", job).run(0).moments
    for rank, end in cases(moments, 4 * shape[2], rng):
        with Trial(Machines(arena_dir / f"{rank}-{end}", job), rng) as trial:
            trial.plan_after(trial.live(0, {**some_ends(moments, 0.3, rng), rank: end}))
            trial.lose_some()
            trial.finish(1)


@pytest.mark.parametrize(("shape", "share"), [*zip(SHAPES, (1, 10, 18, 18, 30), strict=True)])
def test_every_rank_killed_during_a_rebuild(
    shape: tuple[int, int, int],
    share: int,
    begun: dict[tuple[int, int, int], Machines],
    arena_dir: Path,
    seed: int,
) -> None:
    """A half-rebuilt replacement rank counts as lost, and more may be lost meanwhile, up to r in all."""
    rng = random.Random(seed)
    lost = rng.sample(range(shape[2]), shape[0] - shape[1])
    base = begun[shape].copy(arena_dir / "base")
    base.run(DONE + 1, {rank: rng.randint(1, 40) for rank in range(shape[2])})
    for rank in lost:
        base.lose(rank)
    until = base.plan().transaction
    moments = base.copy(arena_dir / "rehearsal").run(until).moments
    for rank, end in cases(moments, share, rng):
        with Trial(base.copy(arena_dir / f"{rank}-{end}"), rng) as trial:
            trial.live(until, {**some_ends(moments, 0.3, rng), rank: end})
            trial.lose_some(0.3)
            trial.finish(until + 1)


def write_undeclared(rank: Rank, step: int) -> None:
    """What the guard does when it notices that a row was written behind its back."""
    if rank.memory.rank == 0 and step == DONE:
        rank.memory.space.tables[0].columns[0][0] ^= np.uint8(1)
        rank.memory.arena.set("undeclared", 1)
        raise UndeclaredWrite("on purpose")


@pytest.mark.parametrize(("shape", "share"), [((2, 1, 2), 2), ((4, 2, 4), 9)])
def test_every_rank_killed_while_parity_is_made_anew(
    shape: tuple[int, int, int],
    share: int,
    begun: dict[tuple[int, int, int], Machines],
    arena_dir: Path,
    seed: int,
) -> None:
    """Rows that were written undeclared stay as they are; their parity fits them in the end."""
    rng = random.Random(seed)
    base = begun[shape].copy(arena_dir / "base")
    life = base.run(DONE + 1, body=write_undeclared)
    assert type(life.failures[0]) is UndeclaredWrite
    assert base.plan().encode
    moments = base.copy(arena_dir / "rehearsal").run(DONE).moments
    for rank, end in cases(moments, share, rng):
        machines = base.copy(arena_dir / f"{rank}-{end}")
        ends = {**some_ends(moments, 0.3, rng), rank: end}
        machines.run(DONE, ends)
        assert not machines.run(DONE + 1).failures, ends
        assert not machines.plan().encode
        with machines.memories() as memories:
            check_parity(memories, machines.job.placement)


def test_a_host_that_was_cut_off_and_replaced_comes_back_stale(
    begun: dict[tuple[int, int, int], Machines], arena_dir: Path
) -> None:
    """Section 2.3: the others went on without it, so its memory counts for nothing."""
    machines = begun[3, 2, 3].copy(arena_dir / "a")
    machines.cut_off(1)
    assert machines.run(DONE + 1).plan.lost == (1,)
    machines.come_back(1)
    assert len(machines.headers()) == 4
    life = machines.run(DONE + 2)
    assert life.plan.kind == "process"
    assert life.plan.transaction == DONE + 1
    assert len(machines.headers()) == 3, "the stale arena is removed"
    machines.check(DONE + 2)


def test_a_host_that_was_cut_off_comes_back_before_anybody_went_on(
    begun: dict[tuple[int, int, int], Machines], arena_dir: Path
) -> None:
    """Joining alone changes nothing: until the generation is opened, the memory is as good as ever."""
    machines = begun[3, 2, 3].copy(arena_dir / "a")
    machines.cut_off(1)
    machines.run(DONE + 1, {0: 3, 1: 3, 2: 3})  # while they store that they have joined
    machines.come_back(1)
    assert machines.run(DONE + 1).plan.kind == "process"
    machines.check(DONE + 1)
