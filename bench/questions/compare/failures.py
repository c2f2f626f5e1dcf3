"""Launches trainings whose ranks are killed, and compares what becomes of them with what methods promise.

Must not know: what a method costs without failures.
"""

from __future__ import annotations

import json
import math
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baselines.method import Promise
from bench.harness.result import Label, Row, WrongResult
from bench.harness.torchrun import Torchrun
from bench.methods.ledger import Account, account
from bench.methods.registry import METHODS, STAY, Place
from bench.questions.compare.cases import NOTHING, RANKS, Case
from bench.questions.compare.families import FAMILIES
from bench.questions.compare.measured import Scale
from bench.questions.compare.rank import Order
from bench.questions.compare.rows import Told, again, rows_of

VICTIMS = (1, 2)
"""As many of them as the first failure takes."""
PRELOADED = ("bench.methods.registry", "bench.workloads.training_rank")
SHOWN = {family.shown for family in FAMILIES}
OF_ENGINE = {"torchrec": ("torchrec.distributed.model_parallel",)}
"""What `ecemb-run` imports once, for all methods alike; and beside it for an engine."""


@dataclass(frozen=True)
class Deaths:
    """When ranks die.

    Attributes:
        kills: Of each training under a method of the pages.
        fewer: Of each other training.
        killed: The step that the first one cuts off.
        apart: Fewest and most steps, by the undisturbed training's clock, between a restart and the next.
        every: Steps between saves: more than between two failures, so that one save is gone back to.
        margin: Times as many steps as the latest failure could come to, after which trainings end.
    """

    kills: int = 6
    fewer: int = 3
    killed: int = 11
    apart: tuple[int, int] = (2, 5)
    every: int = 8
    margin: float = 1.5

    def of(self, case: Case) -> int:
        """How many failures a training has."""
        return self.kills if case.method in SHOWN else self.fewer

    def steps(self, case: Case) -> int:
        """Of the whole training."""
        if case.goes_back:
            return self.killed + 3 * self.every
        return math.ceil(self.margin * (self.killed + self.of(case) * self.apart[1]))


@dataclass(frozen=True)
class Reference:
    """The undisturbed training.

    Attributes:
        told: What it came to.
        ends: Number of steps -> what each rank had come to after them.
    """

    told: Told
    ends: Mapping[int, Sequence[Mapping[str, Any]]]


@contextmanager
def undisturbed(
    scale: Scale, deaths: Deaths, engine: str, ranks: int, cases: Sequence[Case], seed: int
) -> Iterator[Reference]:
    """Trains without failures, as long as the longest of these cases."""
    counts = sorted({deaths.steps(case) for case in cases})
    with launched(scale, deaths, engine, Case(NOTHING), ranks, seed, counts[-1], noted=counts[:-1]) as told:
        ends = {count: _ends(told.order, ranks, count) for count in counts}
        yield Reference(told, ends)


def killed(
    scale: Scale,
    deaths: Deaths,
    engine: str,
    case: Case,
    seed: int,
    reference: Reference,
    labels: Mapping[str, Label],
) -> tuple[list[Row], list[int]]:
    """Kills ranks under one method. Returns its rows, and the steps that each failure has taken.

    Raises:
        WrongResult: It broke its promise.
        LaunchFailed: torchrun did, and will not end the training.
    """
    steps = deaths.steps(case)
    promise = METHODS[case.method](Place(Path(), Path(), every=deaths.every)).promise
    with launched(scale, deaths, engine, case, case.ranks, seed, steps, reference=reference) as told:
        check(told, reference.ends[steps], promise)
        return rows_of(told, reference.ends[steps], promise.survives, labels), again(told)


@contextmanager
def launched(
    scale: Scale,
    deaths: Deaths,
    engine: str,
    case: Case,
    ranks: int,
    seed: int,
    steps: int,
    *,
    noted: Sequence[int] = (),
    reference: Reference | None = None,
) -> Iterator[Told]:
    """Trains under torchrun; with a reference, ranks are killed. What is left is deleted after the block."""
    with (
        tempfile.TemporaryDirectory(prefix="ecemb-bench-", dir=scale.memory) as memory,
        tempfile.TemporaryDirectory(prefix="ecemb-bench-", dir=scale.memory) as folder,
    ):
        step_s = 0.0 if reference is None else reference.told.step_s
        order = Order(
            engine=engine,
            method=case.method,
            folder=folder,
            memory=memory,
            reference="" if reference is None else reference.told.order.folder,
            job=f"bench-compare-{secrets.token_hex(4)}",
            tables=scale.tables,
            rows=scale.rows,
            dim=scale.dim,
            lookups=1,
            dense=scale.dense,
            batch=scale.batch,
            skew=scale.skew,
            steps=steps,
            noted=tuple(noted),
            kills=0 if reference is None else deaths.of(case),
            killed=deaths.killed,
            victims=VICTIMS[: 2 if ranks > RANKS else 1],
            apart_s=(deaths.apart[0] * step_s, deaths.apart[1] * step_s),
            every=deaths.every,
            bytes_per_s=scale.storage_mb_s * 1e6,
            seed=seed,
            timeout_s=scale.timeout_s,
            stays=case.method in STAY,
        )
        with Torchrun(
            ranks,
            order.kills,
            "bench.questions.compare.rank",
            str(order.write()),
            folder=Path(folder),
            name=case.method,
            timeout_s=scale.timeout_s,
            warm=True,
            replaces=order.stays,
            preload=(*PRELOADED, *OF_ENGINE.get(engine, ())),
        ) as torchrun:
            torchrun.wait()
        yield Told(order, _ends(order, ranks, steps), [account(order.ledgers, rank) for rank in range(ranks)])


def _ends(order: Order, ranks: int, steps: int) -> list[Mapping[str, Any]]:
    return [json.loads(order.end(rank, steps).read_text(encoding="utf-8")) for rank in range(ranks)]


def done_again(one: Account) -> int:
    """How often a rank came to the end of a step that it had ended before."""
    done = [each.step for life in one.lives for each in life.done]
    return len(done) - len(set(done))


def check(told: Told, undisturbed_: Sequence[Mapping[str, Any]], promise: Promise) -> None:
    """Compares what became of a training with what its method promises.

    Raises:
        WrongResult: It is less; or no rank was killed, or NaN has come of it.
    """
    order, name = told.order, told.order.method
    if not all(math.isfinite(end["squared_distance"]) for end in told.ends):
        raise WrongResult(f"{name} ended with NaN or infinities in the model")
    for rank, one in enumerate(told.accounts):
        if len(one.lives) != order.kills + 1:
            raise WrongResult(
                f"{name}, rank {rank}: {len(one.lives)} lives, and {order.kills + 1} were to be"
            )
        twice = done_again(one)
        if promise.steps_again is not None and twice > order.kills * (promise.steps_again + 1):
            raise WrongResult(
                f"{name}, rank {rank}: {twice} steps were done again, and not at most "
                f"{promise.steps_again} and the one that was cut off, {order.kills} times"
            )
        if one.costs.samples_lost and not promise.samples_lost:
            raise WrongResult(f"{name}, rank {rank}: {one.costs.samples_lost:g} samples are lost")
    for life in range(order.kills):
        victims = order.struck(life, len(told.accounts))
        struck = tuple(
            rank for rank, one in enumerate(told.accounts) if one.lives[life].struck_at_s is not None
        )
        if struck != victims:
            raise WrongResult(f"{name}, life {life}: ranks {struck} were killed, and not {victims}")
    if promise.bit_identical and not told.is_as(undisturbed_):
        raise WrongResult(f"{name} ended with other bytes than without a kill")
