"""What does protection cost a training on a GPU, in windows of more and fewer steps? A part of `gpu`.

A DLRM whose tables are on the device, 26 with rows of 128 values and row-wise Adagrad inside backward; a
sample looks up one row of each. Equal models are trained in turns, in blocks of many steps, on fresh batches
that were drawn on the device before: one protected, two bare. A block of the protected model is of whole
windows, after another one whose commit goes on beside it, as in a training.

- `window_overhead_wall_pct`: wall time of a step of the slowest rank, in the protected model's blocks over
  that in the bare one's, less 1, by rounds: the median, smallest and largest. `control` compares the two bare
  models with each other.
- `window_step_wall_ms`: those times themselves.
- `window_phase_ms`: of the guard's phases, wall time a step, the mean over ranks. With `overlap` those from
  `delta` on are beside the training.
- `window_drain_ms`: how long the end of a protected block waits for the last commit, a block.
- `window_steps`, `window_rows_per_step`: what "auto" chose, for the mean time between failures of a job of
  128 hosts; and rows that a rank's window captured, a step, each once in a window.

After the run all models have to hold the same bytes on every rank, all steps have to be committed, and parity
has to fit every row.
"""

from __future__ import annotations

import os
import random
import secrets
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ecemb
from bench.harness.devices import CUDA, begin, settle
from bench.harness.ranks import Line, Ranks
from bench.harness.result import Arguments, Label, Row, WrongResult, once, summary
from bench.questions.gpu.step import one_by_one
from bench.workloads.models import ENGINES, INTEGERS, Batch
from bench.workloads.training_rank import (
    BARE,
    METHODS,
    PHASE,
    PROTECTED,
    WARM_UP,
    Bare,
    Order,
    Protected,
    digest,
    popularity,
    protect,
)
from bench.workloads.training_rank import (
    run as train,
)
from ecemb.step.interval import published_mtbf
from ecemb.step.window import MEASURED
from ecemb.step.window import WARM_UP as SKIPPED

HOSTS = 128
"""Of the job whose mean time between failures "auto" is given."""
CHOOSING = SKIPPED + MEASURED + 5
MOST_S = 75.0
"""Of one training."""


@dataclass(frozen=True)
class Setting:
    """One training to measure.

    Attributes:
        name: In the rows' labels.
        engine: One of `ENGINES`.
        ranks: How many, all on one device.
        backend: Of the training.
        batch: Samples of a rank in a step.
        lookups: Rows of each table that a sample looks up.
        window: Steps of a transaction.
        rows: Of each table, over all ranks.
        tables: How many there are.
        dim: Of each row.
        rounds: Of blocks of each model.
        bare_steps: Steps of a bare model's block.
        drawn: Fresh batches, which blocks take in turn.
    """

    name: str
    engine: str = "sparse"
    ranks: int = 4
    backend: str = "gloo"
    batch: int = 2048
    lookups: int = 1
    window: Any = "auto"
    rows: int = 200_000
    tables: int = 26
    dim: int = 128
    rounds: int = 5
    bare_steps: int = 100
    drawn: int = 1000


FUSED = Setting("one-hot", engine="torchrec")
FULL = (
    replace(FUSED, name="one rank", ranks=1, backend="nccl", batch=8192, rounds=4, bare_steps=300),
    replace(FUSED, window=50, rounds=3, bare_steps=50, drawn=200),
    replace(FUSED, window=1, rounds=3, bare_steps=50, drawn=200),
)
TINY = Setting("one-hot, 4", window=4, rows=1000, tables=4, dim=16, batch=64, rounds=2, bare_steps=4, drawn=8)
SMALL = (TINY, replace(TINY, name="fused", engine="torchrec"))


def run(arguments: Arguments, device: str, until: float) -> Iterator[Row]:
    """Measures this part.

    Args:
        arguments: Of the question.
        device: Where tables are, one of `devices`.
        until: When it has to be done, on time.monotonic().

    Raises:
        Incomplete: Some of it failed, or came too late.
    """
    settings = FULL if device == CUDA else SMALL
    yield from one_by_one(
        {
            f"{one.name} of {one.engine}, window {one.window}": lambda left_s, one=one: measure(
                one, device, arguments.seed, min(left_s, MOST_S)
            )
            for one in settings
        },
        until,
    )


def measure(setting: Setting, device: str, seed: int, timeout_s: float) -> Iterator[Row]:
    """Measures one setting.

    Raises:
        WrongResult: Protection changed the result, or was not there.
        RankFailed: A rank did.
    """
    order = Order(
        engine=setting.engine,
        job=f"bench-{secrets.token_hex(4)}",
        arena_dir="/dev/shm",
        n=max(2, setting.ranks),
        k=max(1, setting.ranks - 1),
        tables=setting.tables,
        rows=setting.rows,
        dim=setting.dim,
        lookups=setting.lookups,
        dense="dlrm",
        batch=setting.batch,
        skew=1.05,
        window=setting.window,
        overlap=setting.window != 1,
        steps=setting.rounds,
        mtbf_s=published_mtbf(HOSTS).total_seconds() if setting.window == "auto" else None,
        seed=seed,
        timeout_s=timeout_s,
        device=device,
        rule="SGD" if setting.engine == "sparse" else "Adagrad",
        backend=setting.backend,
        threads=max(1, len(os.sched_getaffinity(0)) // setting.ranks),
    )
    with order.leaving_nothing(), Ranks(setting.ranks, work, order, setting, deadline_s=timeout_s) as ranks:
        answers = ranks.answers()
        ranks.finished()
    check(answers)
    yield from rows_of(answers, setting, order)


def work(line: Line, order: Order, setting: Setting) -> None:
    """What one rank does."""
    torch.set_num_threads(order.threads)
    device = begin(order.device, int(os.environ["RANK"])) or "cpu"
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group(order.backend, job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    rank = dist.get_rank()
    batches = drawn_on(device, order, rank, setting.drawn)
    twins = {}
    for name in METHODS:
        torch.manual_seed(order.seed)
        twins[name] = ENGINES[order.engine](
            order.tables, order.rows, order.dim, order.dense, device=device, rule=order.rule
        )
        train(Bare(twins[name]), batches[:WARM_UP])
    began = digest(twins[BARE].tensors())
    guard = protect(twins[PROTECTED], order)
    methods = {name: Bare(twin) for name, twin in twins.items()} | {
        PROTECTED: Protected(twins[PROTECTED], guard)
    }
    settling = CHOOSING if order.window == "auto" else 3
    for method in methods.values():
        train(method, batches[:settling])
    window = int(guard.stats()["window"])
    whole = window * max(1, round(setting.bare_steps / window))
    steps = {name: whole if name == PROTECTED else setting.bare_steps for name in METHODS}
    taken: dict[str, list[tuple[int, float, float]]] = {name: [] for name in METHODS}
    trained = dict.fromkeys(METHODS, 0)
    before = methods[PROTECTED].counted()
    rng = random.Random(order.seed)
    for _ in range(order.steps):
        for name in rng.sample(METHODS, len(METHODS)):
            lead = window if name == PROTECTED else 1  # its commit goes on beside what is timed
            train_on(methods[name], batches, trained[name], lead)
            settle(order.device)
            dist.barrier()
            began_s = time.perf_counter()
            train_on(methods[name], batches, trained[name] + lead, steps[name])
            settle(order.device)
            body_s = time.perf_counter() - began_s
            methods[name].end()
            taken[name].append((steps[name], body_s, time.perf_counter() - began_s))
            trained[name] += lead + steps[name]
    after = methods[PROTECTED].counted()
    for name in METHODS:  # the same steps in all of them
        train_on(methods[name], batches, trained[name], max(trained.values()) - trained[name])
        methods[name].end()
    report = guard.scrub() if dist.get_world_size() > 1 else None
    line.send(
        {
            "taken": taken,
            "window": window,
            "counted": {name: value - before.get(name, 0) for name, value in after.items()},
            "steps": trained[PROTECTED],
            "committed": guard.stats()["steps"],
            "expected": settling + max(trained.values()),
            "digests": {name: digest(twin.tensors()) for name, twin in twins.items()},
            "began": began,
            "wrong_words": report.wrong_words if report is not None else 0,
        }
    )
    guard.close()
    dist.destroy_process_group()


def train_on(method: Bare, batches: Sequence[Batch], first: int, steps: int) -> None:
    """Trains this many steps, the first of which takes batch number `first`; they come again."""
    for number in range(first, first + steps):
        method.train(batches[number % len(batches)])


def drawn_on(device: str, order: Order, rank: int, count: int) -> list[Batch]:
    """A rank's batches, drawn on the device, which is faster: popular rows are the same on all ranks."""
    weights, popular = popularity(order)
    heaped = torch.from_numpy(np.cumsum(weights)).to(device)
    rows = torch.from_numpy(np.stack(popular)).to(device)
    generator = torch.Generator(device).manual_seed(order.seed * 1000 + rank)
    shape = order.tables, order.batch * order.lookups
    found: list[Batch] = []
    for _ in range(count):
        random_ = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
        place = torch.searchsorted(heaped, random_).clamp_(max=order.rows - 1)
        ids = rows.gather(1, place).view(order.tables, order.batch, order.lookups)
        integers = torch.rand(order.batch, INTEGERS, generator=generator, device=device)
        clicks = torch.randint(0, 2, (order.batch, 1), generator=generator, device=device).float()
        found.append(Batch(integers, ids, clicks))
    return found


def check(answers: Sequence[dict[str, Any]]) -> None:
    """Compares what the models have become.

    Raises:
        WrongResult: They differ, nothing was trained, steps are missing, or parity doesn't fit the rows.
    """
    for rank, answer in enumerate(answers):
        if len({*answer["digests"].values()}) != 1:
            raise WrongResult(f"rank {rank}: models differ at the end: {answer['digests']}")
        if answer["began"] == answer["digests"][BARE]:
            raise WrongResult(f"rank {rank}: training has changed nothing")
        if answer["committed"] != answer["expected"]:
            raise WrongResult(
                f"rank {rank}: {answer['committed']} of {answer['expected']} steps are committed"
            )
        if answer["wrong_words"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")


def rows_of(answers: Sequence[dict[str, Any]], setting: Setting, order: Order) -> Iterator[Row]:
    """All metrics of one setting."""
    labels: dict[str, Label] = {
        "training": setting.name,
        "engine": setting.engine,
        "optimizer": order.rule,
        "ranks": setting.ranks,
        "backend": setting.backend,
        "window": str(setting.window),
        "lookups": setting.lookups,
        "batch": setting.batch * setting.ranks,
        "setting": f"{setting.tables} x {setting.rows:,} x {setting.dim}",
        "device": order.device,
    }
    walls = {
        name: [
            max(answer["taken"][name][i][1] / answer["taken"][name][i][0] for answer in answers)
            for i in range(setting.rounds)
        ]
        for name in METHODS
    }
    for name, each in walls.items():
        yield summary("window_step_wall_ms", "ms", [1000 * one for one in each], **labels, method=name)
        if name != BARE:
            over = [100 * (one / bare - 1) for one, bare in zip(each, walls[BARE], strict=True)]
            yield summary("window_overhead_wall_pct", "%", over, **labels, method=name)
    drains = [
        max(
            1000 * (answer["taken"][PROTECTED][i][2] - answer["taken"][PROTECTED][i][1]) for answer in answers
        )
        for i in range(setting.rounds)
    ]
    yield summary("window_drain_ms", "ms", drains, **labels)
    yield once("window_steps", "steps", answers[0]["window"], **labels)
    steps = answers[0]["steps"]
    counted = [answer["counted"] for answer in answers]
    rows = statistics.mean(one["touched_rows"] for one in counted) / steps
    yield once("window_rows_per_step", "rows", rows, **labels)
    yield once(
        "window_sent_bytes_per_step",
        "bytes",
        statistics.mean(o["sent_bytes"] for o in counted) / steps,
        **labels,
    )
    for phase in [key for key in counted[0] if key.startswith(PHASE)]:
        spent = 1000 * statistics.mean(one.get(phase, 0.0) for one in counted) / steps
        yield once("window_phase_ms", "ms", spent, **labels, phase=phase.removeprefix(PHASE))
