"""What a method costs without failures: steps beside those of bare twins, and single saves.

ecemb's own steps are measured by `bench.questions.overhead`, rivals' by
`bench.questions.compare.beside_twins`.

Must not know: how often a method saves, failures.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.harness.ranks import Ranks
from bench.harness.result import Label, Row, WrongResult, once
from bench.questions.compare.beside_twins import FEW, RIVAL, WHOLE, Order, work
from bench.questions.compare.cases import Case, Guard
from bench.questions.compare.families import CONTROL as CONTROL_METHOD
from bench.questions.compare.families import FAMILIES
from bench.questions.overhead import question as overhead
from bench.questions.overhead.estimate import (
    Estimate,
    Floats,
    Strata,
    cpu_s,
    joined,
    overheads,
    parts,
    rounds_of,
    wall_s,
)
from bench.workloads.training_rank import BARE, CONTROL, METHODS, PROTECTED

GB = 1e9
SHOWN = {family.shown for family in FAMILIES} | {CONTROL_METHOD}
LOST, STALL, STALL_CPU, WRITTEN = SECONDS = (
    "save_lost_s",
    "save_stall_s",
    "save_stall_cpu_s",
    "save_until_written_s",
)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        tables: Number of tables.
        rows: Of each table, over all ranks.
        few_rows: Of the smaller tables that are saved as well.
        dim: Of each row.
        dense: See `training_rank.Order`, as for all that follow.
        batch: Samples a rank takes in a step.
        skew: Of the rows' popularity.
        pairs: Rounds of steps, of a method of the pages.
        launches: That these rounds are of, a part of them each; see `python -m bench overhead`.
        fewer: Rounds of steps of others, in a launch.
        saves: That are measured.
        storage_mb_s: That a rank writes, or reads.
        memory: Folder on tmpfs, for what is lost with a machine, and for files.
        timeout_s: Of every wait.
    """

    tables: int = 26
    rows: int = 200_000
    few_rows: int = 25_000
    dim: int = 64
    dense: str = "dlrm"
    batch: int = 1024
    skew: float = 1.2
    pairs: int = 112
    launches: int = 2
    fewer: int = 50
    saves: int = 6
    storage_mb_s: float = 200.0
    memory: str = "/dev/shm"
    timeout_s: float = 900.0

    def of(self, case: Case) -> tuple[int, int]:
        """Rounds of a case's steps, and launches that they are of."""
        return (self.pairs, self.launches) if case.method in SHOWN else (self.fewer, 1)


@dataclass(frozen=True)
class Measured:
    """What was measured of a method.

    Attributes:
        cpu_pct: What a step takes longer by, in processor time.
        control_pct: The same of one bare model over the other.
        step_s: Of a bare step, wall time.
        window: Steps in a transaction.
        saves: Metric of `SECONDS` -> seconds of each save, by size of the tables.
        table_gb: Of a rank, by size.
        rows: Of the answer.
    """

    cpu_pct: Estimate | None
    control_pct: Estimate | None
    step_s: float
    window: int
    saves: Mapping[str, Mapping[str, Floats]]
    table_gb: Mapping[str, float]
    rows: Sequence[Row]


def guarded(
    scale: Scale, engine: str, case: Case, guard: Guard, seed: int, labels: Mapping[str, Label]
) -> Measured:
    """Measures the steps of one of ecemb's methods.

    Raises:
        WrongResult, RankFailed: See `overhead.measure`.
    """
    pairs, launches = scale.of(case)
    asked = overhead.Scale(
        tables=scale.tables,
        rows=scale.rows,
        dim=scale.dim,
        dense=scale.dense,
        batch=scale.batch,
        skew=scale.skew,
        pairs=pairs,
        launches=launches,
        timeout_s=scale.timeout_s,
        methods=METHODS,
        ranks=case.ranks,
    )
    answers = overhead.trained(asked, engine, guard.code, guard.window, guard.overlap, seed)
    window, steps = answers[0]["window"], answers[0]["protected_steps"]
    sent = [answer["counted"][PROTECTED]["sent_bytes"] / steps for answer in answers]
    touched = [answer["counted"][PROTECTED]["touched_rows"] / steps for answer in answers]
    rows = [
        once("sent_bytes_per_step", "bytes", float(np.mean(sent)), **labels),
        once("touched_rows_per_step", "rows", float(np.mean(touched)), **labels),
    ]
    return of_steps(answers, PROTECTED, window, labels, rows)


def of_steps(
    answers: Sequence[Mapping[str, Any]],
    method: str,
    window: int,
    labels: Mapping[str, Label],
    more: Sequence[Row] = (),
) -> Measured:
    """What pairs of steps say of a method, and of the control beside it."""
    strata = Strata(answers[0]["commits"], window, answers[0].get("launches", ()))
    cpu, wall = cpu_s(answers), wall_s(answers)
    rounds = len(answers[0]["commits"])
    both = {"cpu": overheads(cpu, strata), "wall": overheads(wall, strata)}
    step_s = strata.mean(sum(wall[name] for name in (BARE, CONTROL)) / 2)
    seconds, of = {"cpu": cpu, "wall": wall}, answers[0].get("launches", ())
    rows = [
        dataclasses.replace(
            _row(f"{what}_{kind}_pct", "%", both[kind][name], rounds, labels),
            rounds=rounds_of(seconds[kind], name, answers[0]["commits"], of),
        )
        for what, name in (("step", method), ("control", CONTROL))
        for kind in both
    ]
    rows += [
        _row("bare_step_s", "s", step_s, rounds, labels),
        once("window_steps", "steps", window, **labels),
    ]
    cost = both["cpu"]
    return Measured(cost[method], cost[CONTROL], step_s.value, window, {}, {}, [*rows, *more])


def rival(scale: Scale, engine: str, case: Case, seed: int, labels: Mapping[str, Label]) -> Measured:
    """Measures the steps of a rival, if it acts in them, and in the first launch its saves.

    Raises:
        WrongResult: The models differ, or nothing was trained.
        RankFailed: A rank did.
    """
    launches: list[list[Any]] = []
    for number, pairs in enumerate(parts(*scale.of(case)) if case.acts else [0]):
        saves = scale.saves if case.saves and not number else 0
        launches.append(launched(scale, engine, case, pairs, saves, seed + number))
        if case.acts:
            check(case, launches[-1])
    found = Measured(None, None, 0.0, 1, {}, {}, [])
    if case.acts:
        found = of_steps(joined(launches), RIVAL, 1, labels)
    if not case.saves:
        return found
    saved = launches[0]
    return replace(found, **of_saves(saved), rows=[*found.rows, *save_rows(saved, labels)])


def launched(scale: Scale, engine: str, case: Case, pairs: int, saves: int, seed: int) -> list[Any]:
    """The reports of the ranks that train and save under a rival."""
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-", dir=scale.memory) as memory:
        order = Order(
            engine=engine,
            method=case.method,
            job=f"bench-compare-{secrets.token_hex(4)}",
            arena_dir=scale.memory,
            n=case.ranks,
            k=case.ranks - 1,
            memory=memory,
            tables=scale.tables,
            rows=scale.rows,
            few_rows=scale.few_rows,
            dim=scale.dim,
            dense=scale.dense,
            batch=scale.batch,
            skew=scale.skew,
            pairs=pairs,
            saves=saves,
            bytes_per_s=scale.storage_mb_s * 1e6,
            seed=seed,
            timeout_s=scale.timeout_s,
        )
        imports = overhead.IMPORTS.get(engine, ())
        with (
            order.leaving_nothing(),
            Ranks(case.ranks, work, order, deadline_s=scale.timeout_s, imports=imports) as ranks,
        ):
            answers = ranks.answers()
            ranks.finished()
    return answers


def check(case: Case, answers: Sequence[Mapping[str, Any]]) -> None:
    """Compares what the models have become.

    Raises:
        WrongResult: They differ, or nothing was trained.
    """
    for rank, answer in enumerate(answers):
        ends = answer["digests"]
        if len(set(ends.values())) > 1:
            raise WrongResult(f"{case.method}, rank {rank}: the model is not what its bare twin is")
        if answer["began"] == ends[BARE]:
            raise WrongResult(f"{case.method}, rank {rank}: training has changed nothing")


def of_saves(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of each save, by metric and size of the tables: of the slowest rank.

    Training loses the time that a save stops it, and the processor time that it takes of all ranks after
    that: ranks keep all cores busy.
    """
    saves: dict[str, dict[str, Floats]] = {metric: {} for metric in SECONDS}
    table_gb: dict[str, float] = {}
    cores = len(os.sched_getaffinity(0))
    for size in (WHOLE, FEW):
        stall, whole, stalled_cpu, cpu = (
            np.array([[one[key] for one in answer["saves"][size]] for answer in answers])
            for key in ("stall_s", "whole_s", "stalled_cpu_s", "cpu_s")
        )
        saves[STALL][size], saves[WRITTEN][size] = stall.max(0), whole.max(0)
        saves[STALL_CPU][size] = stalled_cpu.mean(0)
        saves[LOST][size] = stall.max(0) + np.maximum(0.0, cpu - stalled_cpu).sum(0) / cores
        table_gb[size] = max(answer["saves"][size][0]["table_bytes"] for answer in answers) / GB
    return {"saves": saves, "table_gb": table_gb}


def save_rows(answers: Sequence[Mapping[str, Any]], labels: Mapping[str, Label]) -> Iterator[Row]:
    """What a save takes, as means with their 95 % intervals, and what it writes and sends."""
    found = of_saves(answers)
    for metric in SECONDS:
        for size, each in found["saves"][metric].items():
            of_size: dict[str, Label] = {**labels, "tables": size_of(found["table_gb"][size])}
            yield _row(metric, "s", mean(each), len(each), of_size)
        fixed, per_gb = line(found["saves"][metric], found["table_gb"])
        few = len(found["saves"][metric][FEW])
        yield _row(metric.replace("save", "fixed"), "s", fixed, few, labels)
        yield _row(f"{metric}_per_gb", "s/GB", per_gb, few, labels)
    for key in ("written_bytes", "sent_bytes"):
        whole = [one[key] for answer in answers for one in answer["saves"][WHOLE]]
        yield once(f"save_{key}", "bytes", float(np.mean(whole)), **labels)


def size_of(table_gb: float) -> str:
    """What a row's label says of the tables' size."""
    return f"{table_gb:.2g} GB a rank"


def mean(each: Floats) -> Estimate:
    """The mean with its 95 % interval, by resampling."""
    return Strata([True] * len(each), 1).mean(each)


def line(seconds: Mapping[str, Floats], table_gb: Mapping[str, float]) -> tuple[Estimate, Estimate]:
    """What a save takes of tables of no size, and what each GB of a rank takes more; neither is below 0."""
    rng = np.random.default_rng(0)
    drawn = {
        size: each[rng.integers(len(each), size=(4000, len(each)))].mean(1) for size, each in seconds.items()
    }
    apart = table_gb[WHOLE] - table_gb[FEW]

    def fitted(whole: Any, few: Any) -> tuple[Any, Any]:
        per_gb = np.maximum((whole - few) / apart, 0.0)
        return np.maximum(few - per_gb * table_gb[FEW], 0.0), per_gb

    likeliest = fitted(seconds[WHOLE].mean(), seconds[FEW].mean())
    found = [
        Estimate(float(value), *(float(one) for one in np.percentile(each, (2.5, 97.5))))
        for value, each in zip(likeliest, fitted(drawn[WHOLE], drawn[FEW]), strict=True)
    ]
    fixed, per_gb = (Estimate(one.value, min(one.low, one.value), max(one.high, one.value)) for one in found)
    return fixed, per_gb


def _row(metric: str, unit: str, found: Estimate, repeats: int, labels: Mapping[str, Label]) -> Row:
    return Row(metric, found.value, unit, found.low, found.high, repeats, dict(labels))
