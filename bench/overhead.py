"""What does protection cost a training step, in processor time, in wall time, and in bytes sent?

Two equal models are trained in the same processes: blocks of steps of the protected one and of the other take
turns, in random order, on the same batches, so that whatever else the machine does meets both.

- `overhead_cpu_pct`: processor time (user and system, all threads) of all ranks together, in a block of the
  protected model, over that in the block of its twin, less 1. A sample for each pair of blocks.
- `overhead_wall_pct`: the same for the wall time of the slowest rank. Ranks share the cores, so that
  this includes the waiting for one another.
- `step_cpu_ms`, `step_wall_ms`: those times themselves, a step (processor time of all ranks).
- `bytes_sent_per_step`: what a rank sends for protection.
- `touched_rows_per_step`: rows that change on a rank, and that are protected in the step.
- `step_phase_ms`: wall time of a rank in the guard's phases, the mean over ranks. `exchange` and
  `agree` are mostly waiting for slower ranks.

`torchrec`: DistributedModelParallel, tables sharded by rows, row-wise Adagrad. `sparse`: ecemb.nn's tables,
torch's Adagrad. Above them the dense part of a DLRM (13-512-256-dim, 512-512-256-1) under
DistributedDataParallel, with Adagrad. A sample looks up one row of each table; the popularity of rows falls
with their place in its order to the power of `skew`; 1.2 gives 7,200 rows a rank and step, which is what the
costs in the design were reckoned for, 1.05 gives 12,300. One thread a rank, all ranks on one machine, no
overlap with training (`overlap`), every step committed (`window`). After the run both models have to hold the
same bytes on every rank, all steps have to be committed, and parity has to fit every row.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.overhead_rank import BARE, PHASE, PROTECTED, WARM_UP, Order, work
from bench.ranks import Ranks
from bench.result import Arguments, Label, Row, WrongResult, summary
from ecemb.code import Code
from ecemb.directory import arenas, remove

CODES = (Code(4, 3), Code(4, 2))
"""Each is measured on n ranks."""
IMPORTS = {"torchrec": ("torchrec.distributed.model_parallel",)}
"""Engine -> what its ranks import, which takes long."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        batch: Samples a rank takes in a step.
        skew: See `Order`.
        steps: Of a block.
        repeats: Pairs of blocks.
        arena_dir: Where arenas lie.
        timeout_s: Of every wait.
    """

    tables: int = 26
    rows: int = 200_000
    dim: int = 64
    batch: int = 1024
    skew: float = 1.2
    steps: int = 10
    repeats: int = 16
    arena_dir: str = "/dev/shm"
    timeout_s: float = 1800.0

    @property
    def setting(self) -> str:
        """What a row's label says of it."""
        tables = f"{self.tables} x {self.rows:,} x {self.dim}"
        return f"{tables}, batch {self.batch:,} a rank, skew {self.skew:g}"


FULL = Scale()
QUICK = Scale(tables=4, rows=2000, dim=16, batch=64, steps=2, repeats=2, timeout_s=280)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    return [row for code in CODES for row in measure(scale, arguments.engine, code, arguments.seed)]


def measure(scale: Scale, engine: str, code: Code, seed: int) -> list[Row]:
    """Trains twins on n ranks, and compares what it cost.

    Raises:
        WrongResult: Protection changed the result, or was not there.
        RankFailed: A rank did.
    """
    order = Order(
        engine=engine,
        job=f"bench-overhead-{secrets.token_hex(4)}",
        arena_dir=scale.arena_dir,
        n=code.n,
        k=code.k,
        tables=scale.tables,
        rows=scale.rows,
        dim=scale.dim,
        batch=scale.batch,
        skew=scale.skew,
        steps=scale.steps,
        repeats=scale.repeats,
        seed=seed,
        timeout_s=scale.timeout_s,
    )
    try:
        imports = IMPORTS.get(engine, ())
        with Ranks(order.n, work, order, deadline_s=order.timeout_s, imports=imports) as ranks:
            answers = ranks.answers()
            ranks.finished()
    finally:
        for one in (one for one in arenas(order.arena_dir) if one.job == order.job):
            remove(one, force=True)
    check(order, answers)
    labels: dict[str, Label] = {
        "engine": engine,
        "code": f"({code.n}, {code.k})",
        "window": 1,
        "overlap": "none",
        "setting": scale.setting,
    }
    return rows_of(answers, scale.steps, labels)


def check(order: Order, answers: Sequence[Mapping[str, Any]]) -> None:
    """Compares what the twins have become.

    Raises:
        WrongResult: They differ, nothing was trained, steps are missing, or parity doesn't fit the rows.
    """
    steps = WARM_UP + order.steps * order.repeats
    for rank, answer in enumerate(answers):
        ends = answer["digests"]
        if ends[PROTECTED] != ends[BARE]:
            raise WrongResult(f"rank {rank}: the protected model is not what its twin is")
        if ends[PROTECTED] == answer["began"]:
            raise WrongResult(f"rank {rank}: training has changed nothing")
        if answer["committed_steps"] != steps:
            raise WrongResult(f"rank {rank}: {answer['committed_steps']} of {steps} steps are committed")
        if answer["wrong_words"] or not answer["scrubbed"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")


def rows_of(answers: Sequence[Mapping[str, Any]], steps: int, labels: Mapping[str, Label]) -> list[Row]:
    """Returns all metrics of one code."""

    def blocks(twin: str, name: str) -> list[list[float]]:
        """What each rank counted, block by block."""
        return [list(of) for of in zip(*([b[name] for b in a["blocks"][twin]] for a in answers), strict=True)]

    rows: list[Row] = []
    for metric, name, joined in (("cpu", "cpu_s", sum), ("wall", "wall_s", max)):
        seconds = {twin: [joined(ranks) for ranks in blocks(twin, name)] for twin in (PROTECTED, BARE)}
        more = [100 * (a / b - 1) for a, b in zip(seconds[PROTECTED], seconds[BARE], strict=True)]
        rows.append(summary(f"overhead_{metric}_pct", "%", more, **labels))
        for twin, taken in seconds.items():
            each = [1000 * one / steps for one in taken]
            rows.append(summary(f"step_{metric}_ms", "ms", each, **labels, method=twin))
    for metric, name, unit in (
        ("bytes_sent_per_step", "sent_bytes", "bytes"),
        ("touched_rows_per_step", "captured_rows", "rows"),
    ):
        each = [count / steps for ranks in blocks(PROTECTED, name) for count in ranks]
        rows.append(summary(metric, unit, each, **labels))
    phases = [name for name in answers[0]["blocks"][PROTECTED][0] if name.startswith(PHASE)]
    for name in phases:
        each = [1000 * sum(ranks) / len(ranks) / steps for ranks in blocks(PROTECTED, name)]
        rows.append(summary("step_phase_ms", "ms", each, **labels, phase=name.removeprefix(PHASE)))
    return rows
