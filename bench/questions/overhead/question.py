"""What does protection cost a training step, in processor time, in wall time, and in bytes sent?

Equal models are trained in the same processes: blocks of steps of the protected one, of one whose rows are
replicated, and of a bare one take turns, in random order, on the same batches, so that other load on the
machine meets all of them. Blocks are short, since that load changes within seconds.

- `overhead_cpu_pct`: processor time (user and system, all threads) of all ranks together, in a block of the
  method's model, over that in the block of its bare twin, less 1. A sample for each round of blocks.
- `overhead_wall_pct`: the same for the wall time of the slowest rank. Ranks share the cores, so that
  this includes the waiting for one another.
- `step_cpu_ms`, `step_wall_ms`: those times themselves, a step (processor time of all ranks).
- `bytes_sent_per_step`: what a rank sends for protection, or for replication.
- `touched_rows_per_step`: rows of a rank that are protected, or copied. Rows that several steps of a window
  change count once.
- `step_phase_ms`: wall time of a rank in the guard's phases, the mean over ranks. `heads`, `exchange` and
  `agree` are mostly waiting for slower ranks; with overlap, so is `wait`, for what is done beside a step.

`replication` is the rival: each rank copies its changed rows to the memory of n - k other ranks, which hold
a replica of all its tables (n - k times their memory; parity takes (n - k)/k times). It survives the loss
of as many ranks, but has no transaction, so that replicas may be of different steps, and keeps neither dense
parameters nor generators. With a `window` of s, both wait for the end of s steps, and send each changed row
once.

`torchrec`: DistributedModelParallel, tables sharded by rows, row-wise Adagrad. `sparse`: ecemb.nn's tables,
torch's Adagrad. `dlrm`: above them the dense part of a DLRM (13-512-256-dim, 512-512-256-1) under
DistributedDataParallel, with Adagrad; a sample looks up one row of each table. `sparse-heavy`: a perceptron
with one hidden layer of 64; a sample looks up 100 rows, 10 of each table, and takes their sums: hardly
anything but the tables' work, which is the worst case. The popularity of rows falls with their place in its
order to the power of `skew`; in `dlrm`, 1.2 gives 7,200 rows a rank and step, which is what the costs in the
design were reckoned for, 1.05 gives 12,300. One thread a rank, all ranks on one machine. With `overlap` "next
step" the guard commits beside the next step's body, and a block ends when its last step is committed; else it
is "none". After the run all models have to hold the same bytes on every rank, replicas those of
the rows, all steps have to be committed, and parity has to fit every row.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.harness.devices import ARENA
from bench.harness.ranks import Line, Ranks
from bench.harness.result import Arguments, Label, Row, WrongResult, summary
from bench.workloads.training_rank import BARE, METHODS, PHASE, PROTECTED, REPLICATION, Order, work
from ecemb.coding.code import Code
from ecemb.startup.request import ParityBackend

CODES = (Code(4, 3), Code(4, 2))
"""Each is measured on n ranks."""
COMMITS = ((1, False), (16, False), (1, True))
"""Steps that are committed at once, and whether beside the next one: each is measured with each code."""
LEAST_ROUNDS = 8
"""Of blocks, if as many are asked for."""
IMPORTS = {"torchrec": ("torchrec.distributed.model_parallel",)}
"""Engine -> what its ranks import, which takes long."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        name: Of the setting.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        lookups: Rows of each table that a sample looks up.
        dense: See `Order`.
        batch: Samples a rank takes in a step.
        skew: See `Order`.
        steps: Of a block, or more, so that it is whole windows.
        repeats: Rounds of blocks; fewer, but no less than `LEAST_ROUNDS`, where blocks are longer.
        arena_dir: Where arenas lie.
        timeout_s: Of every wait.
        methods: See `Order`, as for all that follow.
        device: Where tables are.
        rule: The tables' optimizer, on a device of their own.
        backend: Of the training's group.
        threads: Of a rank.
        ranks: How many there are; 0 for as many as a stripe has blocks.
        parity: What deltas go over.
    """

    name: str = "dlrm"
    tables: int = 26
    rows: int = 200_000
    dim: int = 64
    lookups: int = 1
    dense: str = "dlrm"
    batch: int = 1024
    skew: float = 1.2
    steps: int = 4
    repeats: int = 24
    arena_dir: str = "/dev/shm"
    timeout_s: float = 1800.0
    methods: tuple[str, ...] = METHODS
    device: str = ARENA
    rule: str = "Adagrad"
    backend: str = "gloo"
    threads: int = 1
    ranks: int = 0
    parity: ParityBackend = "gloo"

    @property
    def setting(self) -> str:
        """What a row's label says of it."""
        tables = f"{self.tables} x {self.rows:,} x {self.dim}, {self.lookups} of each"
        return f"{self.name}: {tables}, batch {self.batch:,} a rank, skew {self.skew:g}"


FULL = Scale()
QUICK = Scale(tables=4, rows=2000, dim=16, batch=64, steps=2, repeats=2, timeout_s=280)


def sparse_heavy(scale: Scale) -> Scale:
    """The setting that has hardly anything but the tables' work."""
    return replace(
        scale, name="sparse-heavy", tables=min(10, scale.tables), lookups=10, dense="small", skew=1.05
    )


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale, codes = (QUICK, CODES[:1]) if arguments.quick else (FULL, CODES)
    return [
        row
        for setting in (scale, sparse_heavy(scale))
        if arguments.setting in ("", setting.name)
        for code in codes
        for window, overlap in COMMITS
        for row in measure(setting, arguments.engine, code, window, overlap, arguments.seed)
    ]


def train(
    scale: Scale,
    engine: str,
    code: Code,
    work: Callable[[Line, Order], None],
    *,
    window: int,
    overlap: bool,
    steps: int,
    repeats: int,
    seed: int,
) -> tuple[Order, list[Any]]:
    """Calls `work` on all ranks, and leaves no arenas behind.

    Returns:
        The order of the ranks, and the report of each.

    Raises:
        RankFailed: A rank did.
    """
    order = Order(
        engine=engine,
        job=f"bench-{secrets.token_hex(4)}",
        arena_dir=scale.arena_dir,
        n=code.n,
        k=code.k,
        tables=scale.tables,
        rows=scale.rows,
        dim=scale.dim,
        lookups=scale.lookups,
        dense=scale.dense,
        batch=scale.batch,
        skew=scale.skew,
        window=window,
        overlap=overlap,
        steps=steps,
        repeats=repeats,
        seed=seed,
        timeout_s=scale.timeout_s,
        methods=scale.methods,
        device=scale.device,
        rule=scale.rule,
        backend=scale.backend,
        threads=scale.threads,
        parity=scale.parity,
    )
    with order.leaving_nothing():
        imports = IMPORTS.get(engine, ())
        with Ranks(scale.ranks or order.n, work, order, deadline_s=order.timeout_s, imports=imports) as ranks:
            answers = ranks.answers()
            ranks.finished()
    return order, answers


def measure(scale: Scale, engine: str, code: Code, window: int, overlap: bool, seed: int) -> list[Row]:
    """Trains twins on all ranks, and compares what they cost.

    Raises:
        WrongResult: Protection changed the result, or was not there.
        RankFailed: A rank did.
    """
    steps = -(-scale.steps // window) * window
    rounds = max(scale.repeats * scale.steps // steps, min(scale.repeats, LEAST_ROUNDS))
    order, answers = train(
        scale,
        engine,
        code,
        work,
        window=window,
        overlap=overlap,
        steps=steps,
        repeats=rounds,
        seed=seed,
    )
    check(order, answers)
    labels: dict[str, Label] = {
        "engine": engine,
        "code": f"({code.n}, {code.k})",
        "window": window,
        "overlap": "next step" if overlap else "none",
        "setting": scale.setting,
        **labels_of(scale, code),
    }
    return rows_of(answers, order.steps, labels)


def labels_of(scale: Scale, code: Code) -> dict[str, Label]:
    """What else a row's labels say where tables have a device of their own."""
    if scale.device == ARENA:
        return {}
    return {
        "device": scale.device,
        "optimizer": scale.rule,
        "ranks": scale.ranks or code.n,
        "backend": scale.backend,
        "parity": scale.parity,
        "threads": scale.threads,
        "arenas": scale.arena_dir,
    }


def check(order: Order, answers: Sequence[Mapping[str, Any]]) -> None:
    """Compares what the twins have become.

    Raises:
        WrongResult: They differ, nothing was trained, steps are missing, or parity doesn't fit the rows.
    """
    steps = order.warm_up + order.steps * order.repeats
    for rank, answer in enumerate(answers):
        ends = answer["digests"]
        if ends[PROTECTED] != ends[BARE]:
            raise WrongResult(f"rank {rank}: the protected model is not what its twin is")
        if ends.get(REPLICATION, ends[BARE]) != ends[BARE]:
            raise WrongResult(f"rank {rank}: the replicated model is not what its twin is")
        if ends[PROTECTED] == answer["began"]:
            raise WrongResult(f"rank {rank}: training has changed nothing")
        if answer["committed_steps"] != steps:
            raise WrongResult(f"rank {rank}: {answer['committed_steps']} of {steps} steps are committed")
        if answer["wrong_words"] or not answer["scrubbed"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")
    if REPLICATION in order.methods:
        _check_replicas(order, answers)


def _check_replicas(order: Order, answers: Sequence[Mapping[str, Any]]) -> None:
    columns = {answer["rank"]: answer["columns"] for answer in answers}
    for rank, answer in enumerate(answers):
        if len(answer["replicas"]) != order.n - order.k:
            raise WrongResult(f"rank {rank}: holds replicas of ranks {sorted(answer['replicas'])} alone")
        for source, held in answer["replicas"].items():
            if held != columns[source]:
                raise WrongResult(
                    f"rank {rank}: its replica of rank {source} is not what that rank's rows are"
                )


def rows_of(answers: Sequence[Mapping[str, Any]], steps: int, labels: Mapping[str, Label]) -> list[Row]:
    """Returns all metrics of one code."""

    def blocks(twin: str, name: str) -> list[list[float]]:
        """What each rank counted, block by block."""
        return [list(of) for of in zip(*([b[name] for b in a["blocks"][twin]] for a in answers), strict=True)]

    rows: list[Row] = []
    twins = list(answers[0]["blocks"])
    kept = [twin for twin in twins if twin != BARE]
    for metric, name, joined in (("cpu", "cpu_s", sum), ("wall", "wall_s", max)):
        seconds = {twin: [joined(ranks) for ranks in blocks(twin, name)] for twin in twins}
        for twin in kept:
            more = [100 * (a / b - 1) for a, b in zip(seconds[twin], seconds[BARE], strict=True)]
            rows.append(summary(f"overhead_{metric}_pct", "%", more, **labels, method=twin))
        for twin, taken in seconds.items():
            each = [1000 * one / steps for one in taken]
            rows.append(summary(f"step_{metric}_ms", "ms", each, **labels, method=twin))
    for metric, name, unit in (
        ("bytes_sent_per_step", "sent_bytes", "bytes"),
        ("touched_rows_per_step", "touched_rows", "rows"),
    ):
        for twin in kept:
            each = [count / steps for ranks in blocks(twin, name) for count in ranks]
            rows.append(summary(metric, unit, each, **labels, method=twin))
    phases = [name for name in answers[0]["blocks"][PROTECTED][0] if name.startswith(PHASE)]
    for name in phases:
        each = [1000 * sum(ranks) / len(ranks) / steps for ranks in blocks(PROTECTED, name)]
        rows.append(summary("step_phase_ms", "ms", each, **labels, phase=name.removeprefix(PHASE)))
    return rows
