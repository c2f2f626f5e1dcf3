"""CPR's overhead and PLS by formula and by emulation, in the paper's settings, beside what is published."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from baselines.cpr.emulation import Estimate, emulate_runs
from baselines.cpr.job import CprJob
from baselines.cpr.overhead import Policy, best_full_interval_h
from baselines.cpr.pls import expected_pls, expected_pls_of_job, interval_for_pls
from baselines.cpr.setups import (
    EMULATED,
    KAGGLE,
    NOTHING,
    PLS_TARGETS,
    SERVERS_LOST,
    TERABYTE,
    Point,
    Setting,
    Side,
    evaluate,
    sweeps,
)
from bench.harness.result import Label, Row, WrongResult, once

PUBLISHED, FORMULA, WHOLE, EMULATION, CLOCK = (
    "published",
    "formula",
    "formula, whole saves",
    "emulated",
    "emulated on the clock",
)
"""Where a figure is from: columns of the tables."""
AGREE = 0.1
"""How far model and emulation may be apart where the costs are calibrated."""
SEEN = 0.02
"""How far two figures are apart that need a reason."""
CALIBRATED = "calibrated on the published figure, which is therefore no evidence"
FEW_SAVES = "the formula pays for {expected:.3g} saves, the job makes {saves}"
BUSY = "on the clock, failures strike also while it saves, recovers and trains again"
UNKNOWN = (
    "published: over 91; the poster's costs and PLS target are not, ours are the base's; an interval for "
)
TIGHT = "4 servers lost keeps PLS at the target, and saves more often"
LOOSE = "one server lost makes PLS 4 times the target, and saves less often"
PRODUCTION_JOBS = {"mean": (13.0, 12.0, 13.0), "P90": (30.0, 30.0, 43.0)}
"""Of production's jobs, what failures cost them: the poster's figure, and the range with secondary ones."""
PRODUCTION_MTBF_H = (14.0, 30.0)
"""Of these jobs (secondary), from the least to the most."""
OF_JOBS = "production's costs and lengths of jobs are not published: ours are the base's"
LAST = "after the last save less than an interval is left, of which the formula knows nothing"


def overheads(runs: int, seed: int) -> list[Row]:
    """Overheads of the paper's settings, and what of it partial recovery removes.

    Args:
        runs: Jobs emulated for each figure.
        seed: Of their failures.

    Raises:
        WrongResult: Where costs are calibrated, model and emulation are more than `AGREE` apart.
    """
    found: list[Row] = []
    jobs_h, began = 0.0, time.process_time()
    for dataset in (KAGGLE, TERABYTE):
        for setting in distinct(sweeps(dataset)):
            point = evaluate(setting, arrivals="progress", runs=runs, seed=seed)
            clock = evaluate(setting, arrivals="clock", runs=runs, seed=seed)
            if setting.published.calibrated:
                check(point)
            labels: dict[str, Label] = {"data": dataset.name, "setting": named(setting)}
            for kind in ("full", "partial"):
                side, on_clock = getattr(point, kind), getattr(clock, kind)
                said = {**labels, "recovery": kind, "why": why(setting, side, on_clock)}
                found += of_side(setting, side, on_clock, said)
            if setting.published.removed is not None:
                found += removed(setting, point, clock, labels)
            jobs_h += 4 * runs * setting.job.total_h
    speed = jobs_h * 3600 / (time.process_time() - began)
    return [*found, once("emulated_speed", "ratio", speed, emulation="events")]


def distinct(settings: list[Setting]) -> Iterator[Setting]:
    """Each setting once: the sweeps meet in the base."""
    seen: list[Setting] = []
    for setting in settings:
        bare = replace(setting, sweep="", published=NOTHING)
        if bare not in seen:
            seen.append(bare)
            yield setting


def named(setting: Setting) -> str:
    job = setting.job
    if setting.sweep == "servers_lost":
        return f"{job.servers_lost} of {job.servers} servers lost at once"
    if setting.sweep == "failures":
        return f"{round(job.failures)} failures"
    if setting.sweep == "pls_target":
        return f"PLS target {setting.pls_target}"
    if setting.sweep == "production":
        return f"production, interval for PLS {setting.pls_target}, {setting.planned_for} lost"
    return "base"


def check(point: Point) -> None:
    for side in (point.full, point.partial):
        counted = side.emulated.overhead.mean
        if abs(counted / side.overhead - 1) > AGREE:
            raise WrongResult(
                f"{side.policy}: the formula gives {side.overhead}, the emulation {counted}: they are more "
                f"than {AGREE:.0%} apart"
            )


def why(setting: Setting, side: Side, on_clock: Side) -> str:
    """What makes the figures of one line differ."""
    said: list[str] = []
    if setting.published.calibrated:
        said.append(CALIBRATED)
    if abs(side.overhead_of_job / side.overhead - 1) > AGREE:
        interval_h = side.policy.interval_h
        said.append(
            FEW_SAVES.format(expected=setting.job.total_h / interval_h, saves=setting.job.saves(interval_h))
        )
    if abs(on_clock.emulated.overhead.mean / side.emulated.overhead.mean - 1) > AGREE:
        said.append(BUSY)
    return "; ".join(said)


def of_side(setting: Setting, side: Side, on_clock: Side, labels: dict[str, Label]) -> Iterator[Row]:
    """One line."""
    published = getattr(setting.published, f"{side.policy.recovery}_overhead")
    if published is not None:
        yield once("overhead_pct", "%", 100 * published, **labels, source=PUBLISHED)
    yield once("overhead_pct", "%", 100 * side.overhead, **labels, source=FORMULA)
    yield once("overhead_pct", "%", 100 * side.overhead_of_job, **labels, source=WHOLE)
    for source, counted in ((EMULATION, side), (CLOCK, on_clock)):
        runs = counted.emulated.runs
        yield estimated("overhead_pct", "%", counted.emulated.overhead, runs, 100, labels, source)


def removed(setting: Setting, point: Point, clock: Point, labels: dict[str, Label]) -> Iterator[Row]:
    """One line."""
    said = {**labels, "why": UNKNOWN + (LOOSE if setting.planned_for == 1 else TIGHT)}
    figures = {
        PUBLISHED: setting.published.removed or 0.0,
        FORMULA: point.removed,
        EMULATION: point.emulated_removed,
        CLOCK: clock.emulated_removed,
    }
    for source, value in figures.items():
        yield once("overhead_removed_pct", "%", 100 * value, **said, source=source)


def of_production_jobs(runs: int, seed: int) -> Iterator[Row]:
    """What failures cost jobs under full recovery, on average and one of ten at least."""
    for statistic, (value, low, high) in PRODUCTION_JOBS.items():
        labels: dict[str, Label] = {"statistic": statistic, "mtbf_h": "14 to 30", "why": OF_JOBS}
        yield Row("handling_pct", value, "%", low, high, 1, {**labels, "source": PUBLISHED})
    for mtbf_h in PRODUCTION_MTBF_H:
        job = replace(EMULATED, mtbf_h=mtbf_h)
        policy = Policy("full", best_full_interval_h(KAGGLE.costs, job))
        found = emulate_runs(KAGGLE.costs, job, policy, arrivals="clock", runs=runs, seed=seed)
        labels = {"statistic": "mean", "mtbf_h": f"{mtbf_h:g}", "why": OF_JOBS}
        yield estimated("handling_pct", "%", found.overhead, runs, 100, labels, CLOCK)
        labels = {**labels, "statistic": "P90", "source": CLOCK}
        yield once("handling_pct", "%", 100 * found.overhead_p90, **labels)


def pls(failures: int, runs: int, seed: int) -> list[Row]:
    """PLS by formula and counted, in the paper's job and in one that is long enough for many failures.

    Args:
        failures: In the long job.
        runs: Jobs of each.
        seed: Of their failures.

    Raises:
        WrongResult: In the long job, they are more than `AGREE` apart.
    """
    found: list[Row] = []
    for lost, target in [(lost, PLS_TARGETS[1]) for lost in SERVERS_LOST] + [
        (1, target) for target in PLS_TARGETS if target != PLS_TARGETS[1]
    ]:
        paper = replace(EMULATED, servers_lost=lost)
        long = replace(paper, total_h=failures * paper.mtbf_h)
        found += counted(paper, target, 100 * runs, seed)
        found += counted(long, target, runs, seed)
        formula, emulated = (one.value for one in found[-3::2])
        if abs(emulated / formula - 1) > AGREE:
            raise WrongResult(f"{long}: PLS is {emulated}, and by its formula {formula}")
    return found


def counted(job: CprJob, target: float, runs: int, seed: int) -> list[Row]:
    """One line."""
    policy = Policy("partial", interval_for_pls(job, target))
    emulated = emulate_runs(KAGGLE.costs, job, policy, arrivals="progress", runs=runs, seed=seed).pls
    formula, whole = (expected(job, policy.interval_h) for expected in (expected_pls, expected_pls_of_job))
    labels: dict[str, Label] = {
        "failures": round(job.failures),
        "servers_lost": job.servers_lost,
        "interval_h": round(policy.interval_h, 2),
        "why": LAST if abs(whole / formula - 1) > SEEN else "",
    }
    return [
        once("pls", "ratio", formula, **labels, source=FORMULA),
        once("pls", "ratio", whole, **labels, source=WHOLE),
        estimated("pls", "ratio", emulated, runs, 1, labels, EMULATION),
    ]


def estimated(
    metric: str, unit: str, found: Estimate, runs: int, factor: float, labels: dict[str, Label], source: str
) -> Row:
    """A mean with its confidence interval."""
    mean, low, high = (factor * value for value in (found.mean, found.low, found.high))
    return Row(metric, mean, unit, low, high, runs, {**labels, "source": source})
