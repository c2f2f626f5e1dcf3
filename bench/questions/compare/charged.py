"""What a method costs a long job: its steps and its saves, at the method's own interval.

Single saves are measured; how often a job saves follows from the method's rule and the job's mean time
between failures, which no run here can hold. Tables of another size take a save's fixed part and its part per
GB.

Must not know: how anything was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from bench.harness.result import Label, Row, once
from bench.methods import JOB_MTBF
from bench.questions.compare.beside_twins import WHOLE
from bench.questions.compare.cases import NOTHING, Case, in_a_window, interval_s, takes_s
from bench.questions.compare.measured import LOST, WRITTEN, Measured, line, mean, size_of
from bench.questions.overhead.estimate import Estimate

MTBF_S = JOB_MTBF.total_seconds()
LARGE_GB = 8.0
"""Of a rank: a host of eight ranks has 64 GB, as in `bench simulate`."""
NONE = Estimate(0.0, 0.0, 0.0)
COST, TAKES = "training_longer_pct", "failure_takes_s"


def rows_of(
    case: Case, found: Measured, again: Sequence[int], step_s: float, labels: Mapping[str, Label]
) -> Iterator[Row]:
    """Returns what a method costs the job, and what a failure takes of training.

    Args:
        case: The method.
        found: What was measured of it.
        again: Steps that each measured failure took.
        step_s: Of an undisturbed training.
        labels: Of the method.
    """
    steps = found.cpu_pct or NONE
    if not case.saves:
        yield _row(COST, "%", steps, {**labels, "tables": "any"})
        if case.method != NOTHING:
            yield takes(case, found, again, step_s, labels)
        return
    measured = {metric: mean(found.saves[metric][WHOLE]) for metric in (LOST, WRITTEN)}
    fitted = {metric: line(found.saves[metric], found.table_gb) for metric in (LOST, WRITTEN)}
    large = {metric: at_size(*fitted[metric], LARGE_GB) for metric in fitted}
    for size, saves in ((size_of(found.table_gb[WHOLE]), measured), (size_of(LARGE_GB), large)):
        of_size: dict[str, Label] = {**labels, "tables": size}
        every, spent = charged(case, saves[LOST], saves[WRITTEN])
        yield _row("interval_s", "s", every, of_size)
        yield _row("saves_pct", "%", spent, of_size)
        yield _row(COST, "%", both(steps, spent), of_size)
        ends = [takes_s(case, one, saves[WRITTEN].value, case.ranks) for one in every]
        yield _row(TAKES, "s", Estimate(*ends), of_size)


def takes(
    case: Case, found: Measured, again: Sequence[int], step_s: float, labels: Mapping[str, Label]
) -> Row:
    """What a failure takes of training under ecemb: as measured, or half of a window."""
    of_case: dict[str, Label] = {**labels, "tables": "any"}
    if case.guard is not None and case.guard.window != 1:
        return once(TAKES, "s", in_a_window(found.window) * step_s, **of_case)
    each = mean(np.array(again, float)).times(step_s)
    return _row(TAKES, "s", each, of_case, len(again))


def charged(case: Case, lost: Estimate, written: Estimate) -> tuple[Estimate, Estimate]:
    """The interval between saves in seconds, and what they take of the time in %; dearer saves come rarer."""
    every = [interval_s(case, one, written.value, MTBF_S, case.ranks) for one in lost]
    spent = [100 * one / seconds for one, seconds in zip(lost, every, strict=True)]
    return Estimate(*every), Estimate(*spent)


def at_size(fixed: Estimate, per_gb: Estimate, table_gb: float) -> Estimate:
    """Seconds of a save of tables of this size; the two intervals are taken for independent."""
    return both(fixed, per_gb.times(table_gb))


def both(one: Estimate, other: Estimate) -> Estimate:
    """The sum of two independent estimates."""
    value = one.value + other.value
    low = math.hypot(one.value - one.low, other.value - other.low)
    high = math.hypot(one.high - one.value, other.high - other.value)
    return Estimate(value, value - low, value + high)


def _row(metric: str, unit: str, found: Estimate, labels: Mapping[str, Label], repeats: int = 1) -> Row:
    return Row(metric, found.value, unit, found.low, found.high, repeats, dict(labels))
