"""What does each way of surviving failures cost, and what is left after a rank is killed with its memory?

Four ranks train under stock torchrun, once under each method of `bench.methods`. One rank is killed by
SIGKILL in the middle of the training, when the optimizers have changed the rows of a step and the step has
not ended, and what its machine's memory held is deleted. torchrun starts all ranks again, and they train to
the end.

After the failure:

- `steps_run_again`: steps that were begun a second time, on the rank with most; the one that was cut off is
  one of them, and on survivors perhaps the next one.
- `samples_lost`: whose updates the rows of some rank have forgotten, added up over ranks (CPR's PLS, times
  all samples, times ranks).
- `bit_identical`: 1 if tables, their optimizer state and dense parameters have ended, on all ranks, with the
  bytes of a training that nobody disturbed.
- `off_by`: how far they have ended from those, by the L2 norm, as a part of how far the training moved them.
- `recovery_s`: from the kill until every rank has ended a step; most of it is torchrun's and the imports',
  which `nothing`, which begins anew, needs, too. `caught_up_s`: until every rank has come past the step that
  was cut off. `prepare_s`: of it, what the method takes before the first step, on the slowest rank.
- `recovery_sent_bytes`: by all ranks in that time.

Without failures, compared with an unprotected twin, which is trained in the same processes before the method
or, after the restart, when it is done:

- `overhead_cpu_pct`: processor time (user and system, all threads, all ranks) of so many steps as lie between
  two saves, over that of the twin's, less 1. A sample for each such stretch but the first of each life.
- `overhead_wall_pct`: the same for wall time. `step_wall_ms`: that time itself, of the method.
- `stall_ms_per_step`: how long the method keeps a rank's training waiting, waits for slower ranks included.
- `sent_bytes_per_step`, `written_bytes_per_step`: by a rank, to other ranks' memory, and to files.
- `memory_over_tables`, `stored_over_tables`: what a method takes of a machine's memory at most beside the
  training's own, and has in files at the end, over the bytes of the rank's tables and their optimizer state.

Those that save now and then do it every `every` steps. A real interval is longer: what saves cost per step
falls with it as 1 / `every`, and what is run again or lost after a failure grows with it.

Why some are not bit-identical: `cpr` loads only the failed rank's rows, as last saved, and counts what they
have forgotten; the others go on with what they have, and where the step that was cut off had not ended
everywhere, they take it twice. `cpr controlled` chooses its interval by the loss that it is allowed, and in
so short a training never saves a second time. `float parity` solves for lost rows in floating point, so that
they are off by rounding, which is as large for all rows under a parity as for the largest number there:
Adagrad's sums of squares, which begin at 0 and span many powers of ten, come back of another size in rows
that were hardly trained, and so are these rows' next steps. In float64 they come back. It has no transaction
either: ranks that had taken over the step that was cut off, because they keep no parity of who died, take
it twice. `check-n-run` with bits goes back to rows as their codes have them. All others go back to, or keep,
the bytes of one step, and run on from there.

Engines `sparse` and `torchrec`, and the dense part of a DLRM above them, are those of `python -m bench
overhead`. One thread a rank, all ranks on one machine; files are synced to its disk. A method that breaks its
promise is an error.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compare_rank import Order
from bench.method import Account, Costs, Done, Life, Promise, account
from bench.methods import METHODS, Place
from bench.result import Arguments, Label, Row, WrongResult, once, summary
from bench.torchrun import Torchrun

VICTIMS = (1,)
UNDISTURBED = "nothing"
"""The method under which nobody is killed, for reference."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        methods: Names of `METHODS`.
        ranks: All on this machine, one thread each.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        batch: Samples a rank takes in a step.
        every: Steps between saves.
        skew: See `overhead_rank.Order`.
        memory: Folder on tmpfs, for what is lost with a machine.
        timeout_s: Of one launch.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    ranks: int = 4
    tables: int = 26
    rows: int = 20_000
    dim: int = 64
    batch: int = 512
    every: int = 5
    skew: float = 1.2
    memory: str = "/dev/shm"
    timeout_s: float = 600.0

    @property
    def steps(self) -> int:
        """Of a training: two stretches between saves in each life, after one to settle in."""
        return 6 * self.every

    @property
    def killed(self) -> int:
        """The step that is cut off: in the middle between saves, as on average."""
        return 3 * self.every + self.every // 2

    @property
    def setting(self) -> str:
        """What a row's label says of it."""
        return f"{self.tables} x {self.rows:,} x {self.dim}, batch {self.batch:,} a rank, skew {self.skew:g}"


FULL = Scale()
QUICK = Scale(("ecemb (4, 3)", "full files", "cpr vanilla"), tables=4, rows=2000, dim=16, batch=64, every=4)


@dataclass(frozen=True)
class Told:
    """What a launch has come to.

    Attributes:
        order: What it was.
        ends: What each rank told at its end.
        accounts: Of each rank.
        twins: Of each rank's twin, in each life.
    """

    order: Order
    ends: Sequence[Mapping[str, Any]]
    accounts: Sequence[Account]
    twins: Sequence[Sequence[Account]]


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    return measure(QUICK if arguments.quick else FULL, arguments.engine, arguments.seed)


def measure(scale: Scale, engine: str, seed: int) -> list[Row]:
    """Kills a rank under every method, and compares with a training that nobody disturbed.

    Raises:
        WrongResult: A method broke its promise.
        LaunchFailed: torchrun did, and will not end the training.
    """
    rows: list[Row] = []
    with launched(scale, engine, UNDISTURBED, seed) as reference:
        for method in scale.methods:
            with launched(scale, engine, method, seed, reference) as told:
                check(told, reference, METHODS[method](Place(Path(), Path())).promise)
                labels: dict[str, Label] = {
                    "engine": engine,
                    "every": scale.every,
                    "setting": scale.setting,
                    "method": method,
                }
                rows += rows_of(told, reference, labels)
    return rows


@contextmanager
def launched(
    scale: Scale, engine: str, method: str, seed: int, reference: Told | None = None
) -> Iterator[Told]:
    """Trains under torchrun; with a reference, a rank is killed. What is left is deleted after the block."""
    with (
        tempfile.TemporaryDirectory(prefix="ecemb-bench-") as folder,
        tempfile.TemporaryDirectory(prefix="ecemb-bench-", dir=scale.memory) as memory,
    ):
        order = Order(
            engine=engine,
            method=method,
            folder=folder,
            memory=memory,
            reference="" if reference is None else reference.order.folder,
            job=f"bench-compare-{secrets.token_hex(4)}",
            tables=scale.tables,
            rows=scale.rows,
            dim=scale.dim,
            lookups=1,
            dense="dlrm",
            batch=scale.batch,
            skew=scale.skew,
            steps=scale.steps,
            killed=scale.killed,
            victims=() if reference is None else VICTIMS,
            every=scale.every,
            twin_steps=3 * scale.every,
            seed=seed,
            timeout_s=scale.timeout_s,
        )
        with Torchrun(
            scale.ranks,
            1,
            "bench.compare_rank",
            str(order.write()),
            folder=Path(folder),
            name=method,
            timeout_s=scale.timeout_s,
        ) as torchrun:
            torchrun.wait()
        ranks = range(scale.ranks)
        lives = range(len(account(order.ledgers(), 0).lives))
        yield Told(
            order,
            [json.loads(order.end(rank).read_text(encoding="utf-8")) for rank in ranks],
            [account(order.ledgers(), rank) for rank in ranks],
            [[account(order.ledgers(life), rank) for life in lives] for rank in ranks],
        )


def check(told: Told, reference: Told, promise: Promise) -> None:
    """Compares what became of a training with what its method promises.

    Raises:
        WrongResult: It is less; or nobody was killed, or NaN has come of it.
    """
    name, killed = told.order.method, told.order.killed
    if not all(math.isfinite(end["squared_distance"]) for end in told.ends):
        raise WrongResult(f"{name} ended with NaN or infinities in the model")
    for rank, one in enumerate(told.accounts):
        if len(one.lives) != 2 or killed not in one.lives[0].begun:
            raise WrongResult(f"{name}, rank {rank}: step {killed} of the first of two lives was not cut off")
        if promise.steps_again is not None and one.steps_again > promise.steps_again + 1:
            raise WrongResult(
                f"{name}, rank {rank}: {one.steps_again} steps were begun again, and not at most "
                f"{promise.steps_again} and the one that was cut off"
            )
        if one.costs.samples_lost and not promise.samples_lost:
            raise WrongResult(f"{name}, rank {rank}: {one.costs.samples_lost:g} samples are lost")
    if promise.bit_identical and not is_identical(told, reference):
        raise WrongResult(f"{name} ended with other bytes than if nobody had been killed")


def is_identical(told: Told, reference: Told) -> bool:
    """Whether all ranks have ended with the bytes of the reference."""
    return [end["digest"] for end in told.ends] == [end["digest"] for end in reference.ends]


def rows_of(told: Told, reference: Told, labels: Mapping[str, Label]) -> list[Row]:
    """Returns all rows of one method."""
    first, second = ([one.lives[number] for one in told.accounts] for number in (0, 1))
    struck_s = min(life.struck_at_s for life in first if life.struck_at_s is not None)
    moved, off = (sum(end["squared_distance"] for end in ends) for ends in (reference.ends, told.ends))
    after = [
        once("steps_run_again", "steps", max(one.steps_again for one in told.accounts), **labels),
        once("samples_lost", "samples", sum(one.costs.samples_lost for one in told.accounts), **labels),
        once("bit_identical", "0 or 1", float(is_identical(told, reference)), **labels),
        once("off_by", "ratio", math.sqrt(off / moved), **labels),
        once("recovery_s", "s", max(life.done[0].at_s for life in second) - struck_s, **labels),
        once("caught_up_s", "s", max(at(life, told.order.killed) for life in second) - struck_s, **labels),
        once("prepare_s", "s", max(life.started_s for life in second), **labels),
        once("recovery_sent_bytes", "bytes", sum(life.start_costs.sent_bytes for life in second), **labels),
    ]
    return after + normal(told, labels)


def at(life: Life, step: int) -> float:
    """When a life had come past a step."""
    return next(one.at_s for one in life.done if one.step >= step)


def normal(told: Told, labels: Mapping[str, Label]) -> list[Row]:
    """Returns the rows of what a method costs without failures."""
    every = told.order.every
    cpu: list[float] = []
    wall: list[float] = []
    taken: list[list[tuple[Done, Done]]] = []
    for number in range(len(told.accounts[0].lives)):
        twins = stretches([one[number].lives[0] for one in told.twins], every)
        ours = stretches([one.lives[number] for one in told.accounts], every)
        taken += ours
        for found, spent in ((cpu, cpu_s), (wall, wall_s)):
            bare = statistics.fmean(map(spent, twins))
            found += [100 * (spent(stretch) / bare - 1) for stretch in ours]

    def each(of: Callable[[Costs], float]) -> list[float]:
        """Of each stretch, the mean over ranks, for a step."""
        return [
            statistics.fmean((of(end.costs) - of(begin.costs)) / every for begin, end in stretch)
            for stretch in taken
        ]

    sizes = [end["table_bytes"] for end in told.ends]
    costs = [one.costs for one in told.accounts]
    memory = max(one.memory_bytes / size for one, size in zip(costs, sizes, strict=True))
    stored = sum(one.stored_bytes for one in costs) / sum(sizes)
    return [
        summary("overhead_cpu_pct", "%", cpu, **labels),
        summary("overhead_wall_pct", "%", wall, **labels),
        summary("step_wall_ms", "ms", [1000 * wall_s(one) / every for one in taken], **labels),
        summary("stall_ms_per_step", "ms", each(lambda one: 1000 * one.stalled_s), **labels),
        summary("sent_bytes_per_step", "bytes", each(lambda one: one.sent_bytes), **labels),
        summary("written_bytes_per_step", "bytes", each(lambda one: one.written_bytes), **labels),
        once("memory_over_tables", "ratio", memory, **labels),
        once("stored_over_tables", "ratio", stored, **labels),
    ]


def stretches(lives: Sequence[Life], every: int) -> list[list[tuple[Done, Done]]]:
    """Of each whole stretch between saves, but the first of the lives, each rank's first and last notes.

    Args:
        lives: Of each rank, the same one.
        every: Steps between saves, which are made when so many, or a multiple, are done.
    """
    notes = [{one.step + 1: one for one in life.done} for life in lives]
    ends = sorted(step for step in notes[0] if step % every == 0 and all(step in one for one in notes))
    return [[(one[begin], one[end]) for one in notes] for begin, end in itertools.pairwise(ends)]


def cpu_s(stretch: Sequence[tuple[Done, Done]]) -> float:
    """Processor time of all ranks."""
    return sum(end.cpu_s - begin.cpu_s for begin, end in stretch)


def wall_s(stretch: Sequence[tuple[Done, Done]]) -> float:
    """Until the last rank was done, since the last one had begun."""
    return max(end.at_s for _, end in stretch) - max(begin.at_s for begin, _ in stretch)
