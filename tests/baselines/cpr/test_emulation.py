from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from baselines.cpr.emulation import Arrivals, emulate, emulate_runs, failure_hours
from baselines.cpr.job import CprJob
from baselines.cpr.overhead import Costs, Policy
from baselines.cpr.pls import expected_pls_of_job

# Everything in 10 hours: by hand.
JOB = CprJob(total_h=10, mtbf_h=5, servers=4)
COSTS = Costs(save_h=0.25, recover_h=0.5)
FULL, PARTIAL = Policy("full", 4), Policy("partial", 4)


def test_without_failures_only_saves_cost() -> None:
    for policy, arrivals in itertools.product((FULL, PARTIAL), ("progress", "clock")):
        outcome = emulate(COSTS, JOB, policy, [], arrivals)
        assert outcome.overhead == pytest.approx(0.05)  # after 4 and 8 hours
        assert (outcome.saves, outcome.failures, outcome.pls, outcome.trained_again_h) == (2, 0, 0, 0)


@pytest.mark.parametrize("interval_h", [0.1, 0.7, 1, 10 / 3, 5, 9.99, 10, 25])
def test_it_saves_as_often_as_the_job_says(interval_h: float) -> None:
    for recovery in ("full", "partial"):
        outcome = emulate(COSTS, JOB, Policy(recovery, interval_h), [3.3, 7.1], "progress")
        assert outcome.saves == JOB.saves(interval_h)


def test_full_recovery_trains_again_since_the_save() -> None:
    outcome = emulate(COSTS, JOB, FULL, [1, 6, 7], "progress")
    # 1 hour from the start, 6 - 4, and once more 7 - 4
    assert outcome.trained_again_h == pytest.approx(6)
    assert outcome.overhead == pytest.approx((6 + 3 * 0.5 + 2 * 0.25) / 10)
    assert (outcome.failures, outcome.saves, outcome.pls) == (3, 2, 0)


def test_partial_recovery_forgets_what_the_server_trained_since_the_save() -> None:
    outcome = emulate(COSTS, JOB, PARTIAL, [1, 6, 7], "progress")
    assert outcome.pls == pytest.approx((1 + 2 + 3) / 40)
    assert outcome.overhead == pytest.approx((3 * 0.5 + 2 * 0.25) / 10)
    assert outcome.trained_again_h == 0
    job = CprJob(10, 5, servers=4, servers_lost=3)
    assert emulate(COSTS, job, PARTIAL, [1, 6, 7], "progress").pls == pytest.approx(3 * 6 / 40)


def test_on_the_clock_a_save_that_is_cut_off_does_not_count() -> None:
    # Trained until 4, saving until 4.25: cut off at 4.1.
    outcome = emulate(COSTS, JOB, PARTIAL, [4.1], "clock")
    assert outcome.pls == pytest.approx(4 / 40)
    assert outcome.saves == 2 and outcome.overhead == pytest.approx((0.1 + 0.5 + 0.5) / 10)
    outcome = emulate(COSTS, JOB, FULL, [4.1], "clock")
    assert outcome.trained_again_h == pytest.approx(4)
    assert outcome.overhead == pytest.approx((0.1 + 0.5 + 4 + 0.5) / 10)


def test_on_the_clock_a_failure_while_recovering_starts_the_recovery_over() -> None:
    outcome = emulate(COSTS, JOB, PARTIAL, [1, 1.2, 1.4], "clock")
    assert outcome.failures == 3
    assert outcome.overhead == pytest.approx((0.4 + 0.5 + 0.5) / 10)
    assert outcome.pls == pytest.approx(3 / 40)


def test_on_the_clock_training_again_is_struck_too() -> None:
    # Struck at 3; recovered at 3.5 and struck 2 hours later, of which nothing is left.
    outcome = emulate(COSTS, JOB, FULL, [3, 5.5], "clock")
    assert outcome.trained_again_h == pytest.approx(2 + 3)
    assert outcome.overhead == pytest.approx((5 + 2 * 0.5 + 0.5) / 10)


def test_failures_come_as_often_as_they_should(seed: int) -> None:
    job = CprJob(total_h=100, mtbf_h=2.5, servers=4)
    rng = np.random.default_rng(seed)
    hours = list(failure_hours(job, "progress", rng))
    assert len(hours) == 40 and hours == sorted(hours) and hours[0] >= 0 and hours[-1] <= 100
    hours = list(itertools.islice(failure_hours(job, "clock", rng), 40_000))
    gaps = np.diff([0, *hours])
    assert gaps.min() > 0 and gaps.mean() == pytest.approx(2.5, rel=0.04) == gaps.std()


@pytest.mark.parametrize("arrivals", ["progress", "clock"])
def test_the_pls_is_the_formulas_in_a_job_of_any_length(arrivals: Arrivals, seed: int) -> None:
    job = CprJob(total_h=56, mtbf_h=28, servers=8, servers_lost=2)
    costs = Costs(save_h=0.001, recover_h=0.001)
    for interval_h in (3, 44.8, 89.6):
        runs = emulate_runs(
            costs, job, Policy("partial", interval_h), arrivals=arrivals, runs=1000, seed=seed
        )
        expected = expected_pls_of_job(job, interval_h)
        error = (runs.pls.high - runs.pls.low) / 2 / 1.96
        assert abs(runs.pls.mean - expected) < 5 * error
        assert abs(runs.pls.mean - expected) < 0.2 * expected


def test_the_interval_of_confidence_holds_the_truth_19_times_in_20(seed: int) -> None:
    job = CprJob(total_h=56, mtbf_h=7, servers=8)
    expected = expected_pls_of_job(job, 10)
    hits = 0
    for n in range(100):
        runs = emulate_runs(
            COSTS, job, Policy("partial", 10), arrivals="progress", runs=30, seed=seed + 1000 * n
        )
        assert runs.pls.low < runs.pls.mean < runs.pls.high and runs.runs == 30
        hits += runs.pls.low <= expected <= runs.pls.high
    assert hits >= 82  # 95 expected; fewer than 82 once in 10^6


def test_one_seed_is_one_result() -> None:
    def runs(seed: int) -> Any:
        return emulate_runs(COSTS, JOB, PARTIAL, arrivals="clock", runs=5, seed=seed)

    assert runs(1) == runs(1) != runs(2)


def test_a_job_that_cannot_end_is_given_up() -> None:
    job = CprJob(total_h=10, mtbf_h=0.1, servers=4)
    with pytest.raises(RuntimeError, match=r"recovery='full'.* has not ended .*within 1000 times"):
        emulate_runs(COSTS, job, FULL, arrivals="clock", runs=2, seed=0)


def test_arguments_that_make_no_sense() -> None:
    other: Any = "sometimes"
    for call in (
        lambda: emulate(COSTS, JOB, FULL, [], other),
        lambda: emulate_runs(COSTS, JOB, FULL, arrivals=other, runs=2, seed=0),
    ):
        with pytest.raises(ValueError, match="arrivals is 'progress' or 'clock'; it is 'sometimes'"):
            call()
    with pytest.raises(ValueError, match="at least 2 runs; there are 1"):
        emulate_runs(COSTS, JOB, FULL, arrivals="clock", runs=1, seed=0)


def test_a_failure_at_the_moment_of_a_save_loses_nothing() -> None:
    assert emulate(COSTS, JOB, PARTIAL, [4], "progress").pls == 0
    assert not math.isnan(emulate(COSTS, JOB, FULL, [4, 4, 8], "progress").overhead)
