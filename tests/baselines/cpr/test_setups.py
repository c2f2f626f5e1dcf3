"""Model and emulation beside each other and beside what is published, in the paper's settings.

The costs are calibrated on the published overheads: that these come out shows that the formulas are the ones
they were calibrated with, and nothing more. What the emulation says isn't calibrated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from baselines.cpr.emulation import emulate_runs
from baselines.cpr.job import CprJob
from baselines.cpr.overhead import Policy, expected_overhead
from baselines.cpr.setups import (
    EMULATED,
    FAILURES,
    KAGGLE,
    PLS_TARGETS,
    PRODUCTION,
    SERVERS_LOST,
    TERABYTE,
    Dataset,
    Setting,
    Side,
    evaluate,
    sweeps,
)

DATASETS = pytest.mark.parametrize("dataset", [KAGGLE, TERABYTE], ids=lambda dataset: dataset.name)


def sides(setting: Setting, seed: int, runs: int = 300) -> tuple[Side, Side]:
    point = evaluate(setting, arrivals="progress", runs=runs, seed=seed)
    return point.full, point.partial


@DATASETS
def test_the_calibrated_setting_gives_the_published_overheads(dataset: Dataset) -> None:
    setting = sweeps(dataset)[0]
    point = evaluate(setting, arrivals="progress", runs=2, seed=0)
    assert setting.sweep == "base" and setting.published.calibrated
    assert point.full.overhead == pytest.approx(setting.published.full_overhead, rel=0.01)
    assert point.partial.overhead == pytest.approx(setting.published.partial_overhead, rel=0.02)
    assert point.partial.policy.interval_h == pytest.approx(44.8)


@DATASETS
def test_model_and_emulation_agree_within_a_tenth_there(dataset: Dataset, seed: int) -> None:
    for side in sides(sweeps(dataset)[0], seed, runs=1000):
        assert side.emulated.overhead.mean == pytest.approx(side.overhead, rel=0.1)


@DATASETS
def test_on_the_clock_they_agree_within_a_tenth_as_well(dataset: Dataset) -> None:
    # 2000 Poisson runs leave 2 %: a fixed seed, as the partial side is 6 to 9 % below the formula.
    point = evaluate(sweeps(dataset)[0], arrivals="clock", runs=2000, seed=1)
    for side in (point.full, point.partial):
        assert side.emulated.overhead.mean == pytest.approx(side.overhead, rel=0.1)


@pytest.mark.slow
@DATASETS
def test_everywhere_in_the_sweeps_the_emulation_is_what_a_job_of_that_length_gives(
    dataset: Dataset, seed: int
) -> None:
    for setting in sweeps(dataset):
        full, partial = sides(setting, seed)
        for side in (full, partial):
            assert side.emulated.overhead.mean == pytest.approx(side.overhead_of_job, rel=0.1), setting
        assert partial.emulated.pls.mean == pytest.approx(partial.pls_of_job, rel=0.15), setting
        assert full.emulated.pls.mean == full.pls == full.pls_of_job == 0


@DATASETS
def test_the_formula_is_off_only_where_a_job_has_next_to_no_saves(dataset: Dataset) -> None:
    """An interval as long as the job pays for no save at all; the formula charges for a part of one."""
    for setting in sweeps(dataset):
        point = evaluate(setting, arrivals="progress", runs=2, seed=0)
        assert point.full.overhead_of_job == pytest.approx(point.full.overhead, rel=0.02)
        if setting.job.saves(point.partial.policy.interval_h) >= 6:
            assert point.partial.overhead_of_job == pytest.approx(point.partial.overhead, rel=0.1)
        else:
            assert point.partial.overhead_of_job < point.partial.overhead


def test_the_sweeps_are_the_papers() -> None:
    settings = sweeps(KAGGLE)
    assert Counter(setting.sweep for setting in settings) == {
        "base": 1,
        "servers_lost": 3,
        "failures": 3,
        "pls_target": 3,
        "production": 6,
    }
    by_sweep = {name: [one for one in settings if one.sweep == name] for name in ("servers_lost", "failures")}
    shares = [one.job.servers_lost / one.job.servers for one in by_sweep["servers_lost"]]
    assert shares == [0.125, 0.25, 0.5] and len(SERVERS_LOST) == 3
    assert tuple(round(one.job.failures) for one in by_sweep["failures"]) == FAILURES == (2, 20, 40)
    assert {one.pls_target for one in settings} == set(PLS_TARGETS)
    assert (PRODUCTION.failures, PRODUCTION.servers, PRODUCTION.servers_lost) == (5, 18, 4)
    assert [one.published.calibrated for one in settings] == [True] + 15 * [False]


@DATASETS
def test_partial_recovery_wins_less_the_more_fails_and_the_less_may_be_lost(dataset: Dataset) -> None:
    points = [evaluate(setting, arrivals="progress", runs=20, seed=0) for setting in sweeps(dataset)]
    assert all(point.choice.policy == point.partial.policy for point in points)
    for sweep, falls in (("servers_lost", True), ("failures", True), ("pls_target", False)):
        removed = [point.emulated_removed for point in points if point.setting.sweep == sweep]
        assert removed == sorted(removed, reverse=falls) and len(set(removed)) == 3


@DATASETS
def test_the_production_setup_reaches_the_published_figure_nearly(dataset: Dataset) -> None:
    """Published: over 91 % gone. Its costs and PLS target are not: ours are those of the base setting."""
    (setting,) = (
        one
        for one in sweeps(dataset)
        if one.sweep == "production" and one.planned_for == 1 and one.pls_target == 0.1
    )
    point = evaluate(setting, arrivals="progress", runs=200, seed=0)
    assert point.setting.published.removed == pytest.approx(point.emulated_removed, abs=0.03)
    assert point.removed == pytest.approx(point.emulated_removed, abs=0.01)
    assert point.partial.pls == pytest.approx(0.4)  # planned for one server, and four fail


def test_where_failures_are_close_overhead_draws_failures_of_its_own() -> None:
    """On the clock W = (1 + O_save / T_save) + W (O_load + O_res + T_save / 2) / T_fail hours for each."""
    job = replace(EMULATED, mtbf_h=EMULATED.total_h / 40)
    policy = Policy("full", 0.5)
    costs = KAGGLE.costs
    first = expected_overhead(costs, job, policy)
    saves = costs.save_h / policy.interval_h
    second = (1 + saves) / (1 - (first - saves)) - 1
    runs = emulate_runs(costs, job, policy, arrivals="clock", runs=300, seed=0)
    assert runs.overhead.mean == pytest.approx(second, rel=0.1)
    assert runs.overhead.low > 1.25 * first


def test_a_longer_job_comes_closer_to_the_formula() -> None:
    errors: list[float] = []
    for total_h in (56, 560, 5600):
        job = CprJob(total_h, EMULATED.mtbf_h, EMULATED.servers)
        setting = replace(sweeps(KAGGLE)[0], job=job)
        point = evaluate(setting, arrivals="progress", runs=2, seed=0)
        errors.append(abs(point.partial.overhead_of_job / point.partial.overhead - 1))
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.01
