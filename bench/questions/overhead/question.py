"""What does protection cost a training step, in processor time, in wall time, and in bytes sent?

Equal models are trained in the same processes: one protected, two bare. In each round every model trains one
step on the same batch, in random order, so that other load on the machine meets all of them. The rounds are
of several launches, how many is decided before: in each, memory lies elsewhere, which alone makes equal
models differ.

- `overhead_cpu_pct`: processor time (user and system, all threads) of all ranks together, in the method's
  steps over that in the steps of the bare models, less 1. In brackets: the 95 % interval, by resampling
  launches, then the rounds of each. `control` compares the two bare models with each other: an interval
  without 0 says how much equal models differ here.
- `overhead_wall_pct`: the same for the wall time of the slowest rank. Ranks share the cores, so that
  this includes the waiting for one another.
- `step_cpu_ms`, `step_wall_ms`: those times themselves, a step (processor time of all ranks).
- `step_p99_over_median`: of a step's wall time. `bare` is what the machine does by itself.
- `phases_cpu_ms`: processor time of a rank a step in the protection's own calls, by their threads' clocks,
  the mean over the ranks: a second witness, which no bare model has a part in. `other` is the begin and the
  end of a step besides the phases, `network` are the threads that send and receive, `watch` those
  that watch the other ranks. A gloo thread looks for messages a hundred times a second. Where the training
  has one, the protection uses it; here it has its own, so that its clock can be read, and what that takes
  while bare models train, and nothing is sent, isn't counted. What the hooks of optimizers and tables do
  besides `capture` isn't either.
- `phases_cpu_pct`: all of them together, over the bare models' processor time.
- `step_phase_ms`: wall time of a rank in the guard's phases, the mean over ranks. `status`, `exchange` and
  `agree` are mostly waiting for slower ranks; with overlap, so is `wait`, for what is done beside a step.
- `bytes_sent_per_step`: what a rank sends for protection, or for replication.
- `touched_rows_per_step`: rows of a rank that are protected, or copied. Rows that several steps of a window
  change count once.
- `window_steps`: what "auto" chose, for the mean time between failures of a job of 128 hosts.
- `managed_over_plain`: `overhead_cpu_pct` with a managed collision over that of plain tables, in the setting
  `managed-collision`, which is measured only if it is asked for. In brackets: of the ends of both intervals.

`replication` is the rival: each rank copies its changed rows to the memory of n - k other ranks, which hold
a replica of all its tables (n - k times their memory; parity takes (n - k)/k times). It survives the loss
of as many ranks, but has no transaction, so that replicas may be of different steps, and keeps neither dense
parameters nor generators. It is compared with two bare models of its own, "beside replication".

In a window of more steps than are measured, *quiet* steps stand for the others: they declare the rows that
a batch would change, and train nothing. The last step of a window, which commits, is always measured, and
counts once a window, as often as it comes. With `overlap` "next step" the guard commits beside the steps
that follow, whichever model's they are. Its threads' clocks say how much of a step's processor time that was:
it counts for the protected model. Wall time can't be divided like that: `step_p99_over_median` then takes
the steps of all models, and `overhead_wall_pct` counts what the training's own thread does.

`torchrec`: DistributedModelParallel, tables sharded by rows, row-wise Adagrad. `sparse`: ecemb.nn's tables,
torch's Adagrad. `dlrm`: above them the dense part of a DLRM (13-512-256-dim, 512-512-256-1) under
DistributedDataParallel, with Adagrad; a sample looks up one row of each table. `sparse-heavy`: a perceptron
with one hidden layer of 64; a sample looks up 100 rows, 10 of each table, and takes their sums: hardly
anything but the tables' work, which is the worst case. `managed-collision`: `dlrm` with 8 tables, once as it
is, engine `torchrec`, and once with four raw ids for each row and TorchRec's map (distance-LFU) before the
tables, engine `managed`. It evicts in each 32nd batch; whole intervals are measured, from the second one on.
Rarer evictions cost less: each saves and sends the whole map. The popularity of rows falls with their place
in its order to the power of `skew`; in `dlrm`, 1.2 gives 7,200 rows a rank and step, which is what the costs
in the design were reckoned for, 1.05 gives 12,300. One thread a rank, all ranks on one machine. In the
setting `device`, which is measured only if it is asked for, steps sleep while a device would train:
`bench.questions.overhead.device` has its metrics. After the run all models have to hold the same bytes on
every rank, replicas those of the rows, all steps have to be committed, and parity has to fit every row.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from bench.harness.devices import ARENA
from bench.harness.ranks import Ranks
from bench.harness.result import (
    Arguments,
    Label,
    Row,
    Unavailable,
    WrongResult,
    by_metric,
    once,
    summary,
)
from bench.questions.overhead import device, managed_collision, verification
from bench.questions.overhead.estimate import (
    Estimate,
    Strata,
    cpu_s,
    joined,
    overheads,
    p99_over_median,
    parts,
    phases_cpu_s,
    rounds_of,
    shared,
    wall_s,
)
from bench.workloads.pairs import work
from bench.workloads.training_rank import (
    BARE,
    CONTROL,
    METHODS,
    PHASE,
    PROTECTED,
    REPLICATION,
    RIVALS,
    Order,
)
from ecemb.coding.code import Code
from ecemb.start.request import ParityBackend
from ecemb.step.interval import published_mtbf

CODES = (Code(4, 3), Code(4, 2))
"""Each is measured on n ranks."""
Steps = int | Literal["auto"]
COMMITS: tuple[tuple[Steps, bool], ...] = ((1, False), (16, False), ("auto", True))
"""Steps that are committed at once, and whether beside the next ones: each is measured with each code."""
BESIDE_COMMITS = (COMMITS[0], COMMITS[-1])
"""Of these, what is measured on the other engine, there without replication."""
FEWER, FEWER_LAUNCHES, BESIDE_ENGINE = 24, 3, "sparse"
"""Pairs beside replication, in the other settings, and on this engine, and launches that they are of."""
DEVICE_ROWS, QUICK_DEVICE_ROWS = 2_000_000, 200_000
"""Of the setting `device`, over all ranks."""
QUICK_MAX_REPLAY_S = 0.4
"""Bounds the window of this setting, and so how long it takes."""
HOSTS = 128
"""Of the job whose mean time between failures "auto" is given: that of the simulation."""
IMPORTS = dict.fromkeys(managed_collision.ENGINES, ("torchrec.distributed.model_parallel",))
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
        pairs: Rounds that are measured.
        launches: That they are of, a part of them each.
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
    pairs: int = 160
    launches: int = 1
    arena_dir: str = "/dev/shm"
    timeout_s: float = 1800.0
    methods: tuple[str, ...] = METHODS
    device: str = ARENA
    rule: str = "Adagrad"
    backend: str = "gloo"
    threads: int = 1
    ranks: int = 0
    parity: ParityBackend = "tcp"

    @property
    def setting(self) -> str:
        """What a row's label says of it."""
        tables = f"{self.tables} x {self.rows:,} x {self.dim}, {self.lookups} of each"
        return f"{self.name}: {tables}, batch {self.batch:,} a rank, skew {self.skew:g}"


FULL = Scale(pairs=192, launches=4)
QUICK = Scale(tables=4, rows=2000, dim=16, batch=64, pairs=4, timeout_s=280)


def sparse_heavy(scale: Scale) -> Scale:
    """The setting that has hardly anything but the tables' work."""
    return replace(
        scale, name="sparse-heavy", tables=min(10, scale.tables), lookups=10, dense="small", skew=1.05
    )


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale, codes = (QUICK, CODES[:1]) if arguments.quick else (FULL, CODES)
    if arguments.pairs:
        scale = replace(scale, pairs=arguments.pairs, launches=min(scale.launches, arguments.pairs))
    if arguments.setting == verification.NAME:
        return by_metric(of_verification(scale, arguments.engine, codes[0], arguments.seed))
    if arguments.setting == device.NAME:
        return by_metric(of_device(codes[0], arguments))
    if arguments.setting == managed_collision.NAME:
        if not arguments.quick and not arguments.pairs:
            scale = replace(scale, pairs=managed_collision.PAIRS)
        return by_metric(with_managed_collision(scale, arguments.engine, codes, arguments.seed))
    fewer = replace(scale, pairs=min(FEWER, scale.pairs), launches=min(FEWER_LAUNCHES, scale.launches))
    few = scale if arguments.pairs else fewer
    is_beside = arguments.engine == BESIDE_ENGINE
    settings = [few if is_beside else scale, sparse_heavy(few)]
    asked = arguments.setting or (scale.name if arguments.quick else "")
    rows: list[Row] = []
    for setting in (one for one in settings if asked in ("", one.name)):
        for code in codes:
            for window, overlap in BESIDE_COMMITS if is_beside else COMMITS:
                rows += measure(setting, arguments.engine, code, window, overlap, arguments.seed)
            if not is_beside:
                rival = replace(setting, methods=RIVALS, pairs=fewer.pairs, launches=fewer.launches)
                rows += measure(rival, arguments.engine, code, 1, False, arguments.seed)
    return by_metric(rows)


def of_verification(scale: Scale, engine: str, code: Code, seed: int) -> list[Row]:
    """Measures what comparing parity with rows beside training costs, with a commit in each step."""
    rounds = max(3, scale.pairs // 4)
    tables, batch = min(4, scale.tables), min(256, scale.batch)
    setting = replace(scale, name=verification.NAME, tables=tables, dense="small", batch=batch)
    work = verification.work
    _, answers = train(setting, engine, code, work, window=1, overlap=False, steps=rounds, seed=seed)
    labels: dict[str, Label] = {"engine": engine, "code": f"({code.n}, {code.k})", "setting": setting.setting}
    return verification.rows_of(answers, labels)


def of_device(code: Code, arguments: Arguments) -> list[Row]:
    """Measures steps whose device part sleeps, with commits beside them; see `device`."""
    rounds = arguments.pairs or (3 if arguments.quick else 20)
    base = QUICK if arguments.quick else FULL
    setting = replace(
        base,
        name=device.NAME,
        tables=1,
        dim=64,
        rows=QUICK_DEVICE_ROWS if arguments.quick else DEVICE_ROWS,
        skew=0.0,
        timeout_s=2 * base.timeout_s,
    )
    rows: list[Row] = []
    for step_ms in device.STEPS_MS[-1:] if arguments.quick else device.STEPS_MS:
        _, answers = train(
            setting,
            "sparse",
            code,
            device.work,
            step_ms,
            QUICK_MAX_REPLAY_S if arguments.quick else None,
            window="auto",
            overlap=True,
            steps=rounds,
            seed=arguments.seed,
        )
        labels: dict[str, Label] = {
            "code": f"({code.n}, {code.k})",
            "setting": f"{device.NAME}: 1 x {setting.rows:,} x {setting.dim}",
            "step_ms": step_ms,
        }
        rows += device.rows_of(answers, labels)
    return rows


def with_managed_collision(scale: Scale, engine: str, codes: Sequence[Code], seed: int) -> list[Row]:
    """Measures plain tables and those with a managed collision, each with a commit in each step.

    Raises:
        Unavailable: The engine has no managed collision.
    """
    name, plain = managed_collision.NAME, managed_collision.PLAIN
    if engine != plain:
        raise Unavailable(f"the setting {name} is of the engine {plain}; it was asked of {engine!r}")
    tables, pairs = (
        min(managed_collision.TABLES, scale.tables),
        managed_collision.whole_intervals(scale.pairs),
    )
    setting = replace(scale, name=name, tables=tables, pairs=pairs, launches=1)
    rows: list[Row] = []
    for code in codes:
        both = [measure(setting, one, code, 1, False, seed) for one in managed_collision.ENGINES]
        rows += [*both[0], *both[1], managed_collision.managed_over_plain(both[1], both[0])]
    return rows


def train(
    scale: Scale,
    engine: str,
    code: Code,
    work: Callable[..., None],
    *more: object,
    window: Steps,
    overlap: bool,
    steps: int,
    seed: int,
) -> tuple[Order, list[Any]]:
    """Calls `work` on all ranks with a line, an order, and `more`; leaves no arenas behind.

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
        mtbf_s=published_mtbf(HOSTS).total_seconds() if window == "auto" else None,
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
        count = scale.ranks or order.n
        with Ranks(count, work, order, *more, deadline_s=order.timeout_s, imports=imports) as ranks:
            answers = ranks.answers()
            ranks.finished()
    return order, answers


def measure(scale: Scale, engine: str, code: Code, window: Steps, overlap: bool, seed: int) -> list[Row]:
    """Trains equal models on all ranks, and compares what they cost.

    Raises:
        WrongResult: Protection changed the result, or was not there.
        RankFailed: A rank did.
    """
    answers = trained(scale, engine, code, window, overlap, seed)
    labels: dict[str, Label] = {
        "engine": engine,
        "code": f"({code.n}, {code.k})",
        "r": code.r,
        "window": window,
        "overlap": "next step" if overlap else "none",
        "setting": scale.setting,
        **labels_of(scale, code),
    }
    return list(rows_of(answers, labels, overlap=overlap))


def trained(
    scale: Scale, engine: str, code: Code, window: Steps, overlap: bool, seed: int
) -> list[dict[str, Any]]:
    """Trains equal models in each launch, and checks them. The window "auto" is chosen by the first launch.

    Returns:
        The reports of the ranks, of all launches together.

    Raises:
        WrongResult, RankFailed: See `measure`.
    """
    launches: list[list[Any]] = []
    for number, pairs in enumerate(parts(scale.pairs, scale.launches)):
        order, answers = train(
            scale, engine, code, work, window=window, overlap=overlap, steps=pairs, seed=seed + number
        )
        check(order, answers)
        window = answers[0]["window"]
        launches.append(answers)
    return joined(launches)


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
    """Compares what the models have become.

    Raises:
        WrongResult: They differ, nothing was trained, steps are missing, or parity doesn't fit the rows.
    """
    for rank, answer in enumerate(answers):
        ends = answer["digests"]
        for name, digest in ends.items():
            if digest != ends[BARE]:
                raise WrongResult(f"rank {rank}: the model {name!r} is not what its bare twin is")
        if ends[BARE] == answer["began"]:
            raise WrongResult(f"rank {rank}: training has changed nothing")
        if PROTECTED in order.methods:
            _check_protected(rank, answer)
    if REPLICATION in order.methods:
        _check_replicas(order, answers)


def _check_protected(rank: int, answer: Mapping[str, Any]) -> None:
    committed, expected = answer["committed_steps"], answer["expected_steps"]
    if committed != expected:
        raise WrongResult(f"rank {rank}: {committed} of {expected} steps are committed")
    if answer["window_at_end"] != answer["window"]:
        changed = f"from {answer['window']} to {answer['window_at_end']} steps"
        raise WrongResult(f"rank {rank}: the window changed {changed} while it was measured")
    if answer["wrong_words"] or not answer["scrubbed"]:
        raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")


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


def rows_of(
    answers: Sequence[Mapping[str, Any]], labels: Mapping[str, Label], *, overlap: bool
) -> Iterator[Row]:
    """Returns all metrics of one code and window.

    Args:
        answers: As `bench.workloads.pairs.work` sends them.
        labels: Of all rows.
        overlap: Whether commits go on beside the steps that follow.
    """
    first = answers[0]
    strata = Strata(first["commits"], first["window"], first.get("launches", ()))
    pairs, steps = len(first["commits"]), first["protected_steps"]
    cpu, wall = cpu_s(answers), wall_s(answers)
    beside = f" beside {REPLICATION}" if REPLICATION in cpu else ""

    def named(method: str) -> str:
        return f"{method}{beside}" if method in (BARE, CONTROL) else method

    def row(metric: str, unit: str, found: Estimate, **more: Label) -> Row:
        return Row(metric, found.value, unit, found.low, found.high, pairs, {**labels, **more})

    for metric, seconds in (("cpu", cpu), ("wall", wall)):
        for method, found in overheads(seconds, strata).items():
            one = row(f"overhead_{metric}_pct", "%", found, method=named(method))
            rounds = rounds_of(seconds, method, first["commits"], first.get("launches", ()))
            yield dataclasses.replace(one, rounds=rounds)
        for method, each in shared(seconds).items():
            yield row(f"step_{metric}_ms", "ms", strata.mean(each).times(1000), method=named(method))
    for method, value in p99_over_median(wall, strata, beside=overlap).items():
        yield once("step_p99_over_median", "ratio", value, **labels, method=named(method))
    for metric, name, unit in (
        ("bytes_sent_per_step", "sent_bytes", "bytes"),
        ("touched_rows_per_step", "touched_rows", "rows"),
    ):
        for method in first["counted"]:
            each = [answer["counted"][method].get(name) for answer in answers]
            if None not in each:
                yield summary(metric, unit, [one / steps for one in each], **labels, method=method)
    if PROTECTED not in cpu:
        return
    for name in (name for name in first["counted"][PROTECTED] if name.startswith(PHASE)):
        each = [1000 * answer["counted"][PROTECTED].get(name, 0.0) / steps for answer in answers]
        yield once("step_phase_ms", "ms", float(np.mean(each)), **labels, phase=name.removeprefix(PHASE))
    bare_s = strata.mean(shared(cpu)[BARE]).value / len(answers)
    by_rank = [phases_cpu_s(answer, overlap=overlap) for answer in answers]
    for phase in by_rank[0]:
        each = [1000 * one.get(phase, 0.0) / steps for one in by_rank]
        yield _mean("phases_cpu_ms", "ms", each, **labels, phase=phase)
    whole = [100 * sum(one.values()) / steps / bare_s for one in by_rank]
    yield _mean("phases_cpu_pct", "%", whole, **labels)
    if labels["window"] == "auto":
        yield once("window_steps", "steps", first["window"], **labels)


def _mean(metric: str, unit: str, each: Sequence[float], **labels: Label) -> Row:
    """The row of the ranks' mean, from the smallest to the largest."""
    return Row(metric, float(np.mean(each)), unit, min(each), max(each), len(each), labels)
