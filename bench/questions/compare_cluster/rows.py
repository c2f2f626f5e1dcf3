"""The rows of a comparison: what launches under a method took, over those without any.

Must not know: how anything was launched.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from baselines.method import Promise
from bench.harness.result import Label, Row, once, summary
from bench.methods import JOB_MTBF
from bench.questions.compare.cases import NOTHING, Case, in_a_window, interval_s, takes_s
from bench.questions.compare.charged import NONE, both
from bench.questions.compare.families import COST, TAKES
from bench.questions.compare.measured import GB, size_of
from bench.questions.compare.rows import CAUGHT_UP, NEXT, PREPARE, RESTART_SENT, again, until_next
from bench.questions.compare_cluster.answers import Answers
from bench.questions.overhead.estimate import Estimate, Floats, Strata

Labels = Mapping[str, Label]
MTBF_S = JOB_MTBF.total_seconds()
AFTER_FAILURES = {NEXT: "s", CAUGHT_UP: "s", PREPARE: "s", RESTART_SENT: "bytes"}
ANY = "any"


def without(
    first: Sequence[Answers], second: Sequence[Answers], killed: Answers, labels: Labels
) -> list[Row]:
    """The rows of launches without protection.

    Args:
        first: With which all methods are compared.
        second: The others of the same rounds.
        killed: Whose ranks were killed.
        labels: Of all rows.
    """
    of_case: Labels = {**labels, "method": NOTHING, "rule": "never", "domain": "rank"}
    wall = over(second, first, lambda one: one.step_wall_s)
    ranks = len(killed.accounts)
    return [
        *steps_of(second, first, of_case),
        _row("bare_step_s", "s", mean([one.step_wall_s for one in first]), len(first), of_case),
        _row(COST, "%", wall, len(second), {**of_case, "tables": ANY}),
        *failures([killed], of_case),
        once("steps_forgotten", "steps", 0, **of_case),
        once("bit_identical", "0 or 1", float(killed.is_as(first[0].noted)), **of_case),
        once("survives_ranks", "ranks", ranks, **of_case),
        once("memory_over_tables", "ratio", 0, **of_case),
        once("stored_over_tables", "ratio", 0, **of_case),
    ]


def of(
    case: Case, found: Sequence[Answers], bare: Sequence[Answers], promise: Promise, labels: Labels
) -> list[Row]:
    """The rows of a method.

    Args:
        case: The method.
        found: Its launches, in the order of rounds.
        bare: Those without protection, in the same rounds.
        promise: Of the method.
        labels: Of the method.
    """
    ranks = len(found[0].accounts)
    costs = [[one.costs for one in launch.accounts] for launch in found]
    sizes = [[end["table_bytes"] for end in launch.ends] for launch in found]
    samples = sum(one.samples_lost for launch in costs for one in launch)
    kills = sum(launch.order.kills for launch in found)
    forgotten = samples / (found[0].ends[0]["samples"] * ranks * kills) if samples else 0.0
    memory = max(
        one.memory_bytes / size
        for of_launch, of_sizes in zip(costs, sizes, strict=True)
        for one, size in zip(of_launch, of_sizes, strict=True)
        if size
    )
    stored = sum(one.stored_bytes for one in costs[-1]) / sum(sizes[-1])
    identical = all(launch.is_as(bare[0].ends) for launch in found)
    survives = ranks if promise.survives is None else promise.survives
    return [
        *steps_of(found, bare, labels),
        *(saves_of(found, labels) if case.saves else ()),
        *charged(case, found, bare, labels),
        *failures(found, labels),
        once("steps_forgotten", "steps", forgotten, **labels),
        once("bit_identical", "0 or 1", float(identical), **labels),
        once("survives_ranks", "ranks", survives, **labels),
        once("memory_over_tables", "ratio", memory, **labels),
        once("stored_over_tables", "ratio", stored, **labels),
    ]


def steps_of(found: Sequence[Answers], bare: Sequence[Answers], labels: Labels) -> list[Row]:
    """What steps take, and what is sent in them."""
    rows = [
        _row("step_wall_pct", "%", over(found, bare, lambda one: one.step_wall_s), len(found), labels),
        _row("step_cpu_pct", "%", over(found, bare, lambda one: one.step_cpu_s), len(found), labels),
        summary("window_steps", "steps", [one.window for one in found], **labels),
        summary("sent_bytes_per_step", "bytes", [one.sent_bytes for one in found], **labels),
    ]
    links = [one.link_bytes for one in found]
    if not any(map(math.isnan, links)):
        rows.append(_row("link_bytes_per_step", "bytes", mean(links), len(links), labels))
    return rows


def saves_of(found: Sequence[Answers], labels: Labels) -> list[Row]:
    """What saves take, write and send."""
    of_size = {**labels, "tables": size_of(found[0].table_bytes / GB)}
    each, launches = _saves(found)
    seconds = {"stall_s": "save_stall_s", "lost_s": "save_lost_s", "written_s": "save_until_written_s"}
    rows = [
        _row(metric, "s", seconds_of(each[key], launches), len(launches), of_size)
        for key, metric in seconds.items()
    ]
    return rows + [
        once(f"save_{key}", "bytes", float(np.mean(each[key])), **of_size)
        for key in ("written_bytes", "sent_bytes")
    ]


def charged(case: Case, found: Sequence[Answers], bare: Sequence[Answers], labels: Labels) -> list[Row]:
    """What a long job pays for a method, and what a failure takes from it, by the method's own rule."""
    acts = case.acts or case.guard is not None
    wall = over(found, bare, lambda one: one.step_wall_s) if acts else NONE
    step_s = mean([one.step_wall_s for one in bare])
    if not case.saves:
        any_size: Labels = {**labels, "tables": ANY}
        each = [float(taken) for one in found for taken in again(one)]
        takes = mean(each).times(step_s.value)
        if case.guard is not None and case.guard.window != 1:
            takes = Estimate(*[in_a_window(max(one.window for one in found)) * step_s.value] * 3)
        return [
            _row(COST, "%", wall, len(found), any_size),
            _row(TAKES, "s", takes, len(each), any_size),
        ]
    of_size: Labels = {**labels, "tables": size_of(found[0].table_bytes / GB)}
    each, launches = _saves(found)
    lost = seconds_of(each["lost_s"], launches)
    written_s = float(np.mean(each["written_s" if case.behind else "stall_s"]))
    ranks = len(found[0].accounts)
    every = [interval_s(case, max(one, 1e-9), written_s, MTBF_S, ranks) for one in lost]
    spent = Estimate(*(100 * one / seconds for one, seconds in zip(lost, every, strict=True)))
    takes = Estimate(*(takes_s(case, one, written_s, ranks) for one in every))
    return [
        _row("interval_s", "s", Estimate(*every), len(launches), of_size),
        _row("saves_pct", "%", spent, len(launches), of_size),
        _row(COST, "%", both(wall, spent), len(found), of_size),
        _row(TAKES, "s", takes, len(launches), of_size),
    ]


def failures(found: Sequence[Answers], labels: Labels) -> list[Row]:
    """What failures take until training goes on, and of steps, in all launches together."""
    each = [until_next(one) for one in found]
    rows = [
        summary(metric, unit, [taken for one in each for taken in one[metric]], **labels)
        for metric, unit in AFTER_FAILURES.items()
    ]
    steps = [taken for one in found for taken in again(one)]
    return [
        *rows,
        Row(
            "steps_run_again",
            statistics.fmean(steps),
            "steps",
            min(steps),
            max(steps),
            len(steps),
            {**labels},
        ),
    ]


def over(found: Sequence[Answers], bare: Sequence[Answers], what: Callable[[Answers], float]) -> Estimate:
    """By how many % launches take more than those without protection in the same rounds."""
    ours, theirs = (np.array([what(one) for one in launches]) for launches in (found, bare))
    return _strata(range(len(ours))).ratio(ours, theirs).times(100, less=1)


def mean(each: Sequence[float] | Floats, launches: Sequence[int] = ()) -> Estimate:
    """The mean with its 95 % interval, by resampling launches: each number is of one, or of those given."""
    return _strata(launches or range(len(each))).mean(np.asarray(each, float))


def seconds_of(each: Sequence[float], launches: Sequence[int]) -> Estimate:
    """The same of what can't be below 0."""
    return Estimate(*(max(0.0, one) for one in mean(each, launches)))


def _strata(launches: Sequence[int]) -> Strata:
    return Strata([True] * len(launches), 1, list(launches))


def _saves(found: Sequence[Answers]) -> tuple[dict[str, list[float]], list[int]]:
    """Of all saves each number by name, and the launch of each save."""
    each: dict[str, list[float]] = {}
    launches: list[int] = []
    for number, one in enumerate(found):
        for save in one.saves():
            launches.append(number)
            for key, value in save.items():
                each.setdefault(key, []).append(value)
    return each, launches


def _row(metric: str, unit: str, estimate: Estimate, repeats: int, labels: Labels) -> Row:
    return Row(metric, estimate.value, unit, estimate.low, estimate.high, repeats, dict(labels))
