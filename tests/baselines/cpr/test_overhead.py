from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baselines.cpr.job import CprJob
from baselines.cpr.overhead import (
    Costs,
    Policy,
    best_full_interval_h,
    choose,
    expected_overhead,
    expected_overhead_of_job,
)

JOB = CprJob(total_h=56, mtbf_h=28, servers=8)
COSTS = Costs(save_h=0.1, recover_h=0.09)


def test_the_formulas_by_hand() -> None:
    # 0.1 / 4 + (0.09 + 4 / 2) / 28, and without the 4 / 2
    assert expected_overhead(COSTS, JOB, Policy("full", 4)) == pytest.approx(0.0996428571)
    assert expected_overhead(COSTS, JOB, Policy("partial", 4)) == pytest.approx(0.0282142857)
    # 13 saves, as the last interval ends with the job
    assert expected_overhead_of_job(COSTS, JOB, Policy("full", 4)) == pytest.approx(1.3 / 56 + 2.09 / 28)
    assert expected_overhead_of_job(COSTS, JOB, Policy("partial", 100)) == pytest.approx(0.09 / 28)


def test_youngs_interval_is_the_best_of_all() -> None:
    best = best_full_interval_h(COSTS, JOB)
    least = expected_overhead(COSTS, JOB, Policy("full", best))
    tried = [expected_overhead(COSTS, JOB, Policy("full", best * 1.01**n)) for n in range(-300, 301)]
    assert min(tried) == pytest.approx(least)
    assert all(overhead >= least - 1e-12 for overhead in tried)


@pytest.mark.parametrize("policy", [Policy("full", 0.11), Policy("partial", 0.11)])
def test_both_forms_agree_where_saves_are_many(policy: Policy) -> None:
    exact = expected_overhead_of_job(COSTS, JOB, policy)
    assert expected_overhead(COSTS, JOB, policy) == pytest.approx(exact, rel=0.01)


def test_partial_recovery_is_taken_where_it_is_cheaper() -> None:
    choice = choose(COSTS, JOB, 0.1)
    assert choice.policy == choice.partial
    assert choice.partial.recovery == "partial" and choice.partial.interval_h == pytest.approx(44.8)
    assert choice.pls == pytest.approx(0.1)
    assert choice.full == Policy("full", best_full_interval_h(COSTS, JOB))
    assert choice.removed == pytest.approx(1 - choice.partial_overhead / choice.full_overhead)


def test_it_falls_back_to_full_recovery_exactly_where_partial_costs_more() -> None:
    # At Young's T_full saves cost what training again costs, so saving twice as often costs as much as both.
    target = best_full_interval_h(COSTS, JOB) / 2 / (2 * JOB.servers * JOB.mtbf_h)
    above, below = choose(COSTS, JOB, target * 1.001), choose(COSTS, JOB, target * 0.999)
    assert above.policy == above.partial and above.removed > 0
    assert below.policy == below.full and below.pls == 0 and below.removed == 0
    assert below.partial_overhead > below.full_overhead


def test_servers_that_fail_together_shorten_the_interval() -> None:
    alone, together = (choose(COSTS, replace(JOB, servers_lost=lost), 0.1) for lost in (1, 4))
    assert together.partial.interval_h == pytest.approx(alone.partial.interval_h / 4)
    assert together.partial_overhead > alone.partial_overhead
    assert together.full_overhead == alone.full_overhead


@pytest.mark.parametrize(("save_h", "recover_h"), [(0, 1), (-1, 1), (1, -1), (1, float("nan"))])
def test_costs_that_are_none(save_h: float, recover_h: float) -> None:
    with pytest.raises(ValueError, match="_h is a number"):
        Costs(save_h, recover_h)


@pytest.mark.parametrize(("recovery", "interval_h"), [("none", 1), ("full", 0), ("partial", -1)])
def test_policies_that_are_none(recovery: Any, interval_h: float) -> None:
    with pytest.raises(ValueError, match="recovery is 'full' or 'partial'|interval_h is a number above 0"):
        Policy(recovery, interval_h)


def test_a_target_is_above_zero() -> None:
    with pytest.raises(ValueError, match="pls is a number above 0; it is 0"):
        choose(COSTS, JOB, 0)
