from __future__ import annotations

import random
import statistics

import pytest

from baselines.cpr.job import CprJob
from baselines.cpr.pls import PlsAccount, expected_pls, expected_pls_of_job, interval_for_pls

JOB = CprJob(total_h=56, mtbf_h=28, servers=8)


def test_the_papers_interval() -> None:
    assert interval_for_pls(JOB, 0.1) == pytest.approx(44.8)
    assert expected_pls(JOB, 44.8) == pytest.approx(0.1)
    assert expected_pls_of_job(JOB, 44.8) == pytest.approx(0.085)


@pytest.mark.parametrize("lost", [1, 2, 8])
@pytest.mark.parametrize("target", [0.001, 0.02, 0.2])
def test_interval_and_pls_are_each_others_inverse(lost: int, target: float) -> None:
    job = CprJob(56, 28, 8, lost)
    assert expected_pls(job, interval_for_pls(job, target)) == pytest.approx(target)


def test_each_failure_adds_what_was_trained_since_the_save() -> None:
    account = PlsAccount(1000, 4)
    assert account.failed(100, [2]) == pytest.approx(100 / 4000)
    account.saved(200)
    assert account.failed(200, [0, 1, 2, 3]) == 0
    account.saved(300, [1])
    assert account.failed(500, [0, 1]) == pytest.approx((300 + 200) / 4000)
    assert account.failed(500, []) == 0
    assert account.failures == pytest.approx([0.025, 0, 0.125, 0])
    assert account.pls == pytest.approx(0.15)


def test_losing_all_servers_at_the_end_without_a_save_loses_everything() -> None:
    account = PlsAccount(10, 3)
    assert account.failed(10, [0, 1, 2]) == account.pls == 1


def test_over_many_failures_it_is_what_the_formula_says(seed: int) -> None:
    rng = random.Random(seed)
    job = CprJob(total_h=1000, mtbf_h=0.1, servers=16, servers_lost=3)
    interval_h = 7.0
    account = PlsAccount(job.total_h, job.servers)
    events = sorted(
        [(rng.uniform(0, job.total_h), False) for _ in range(round(job.failures))]
        + [(n * interval_h, True) for n in range(1, 1 + job.saves(interval_h))]
    )
    for hour, is_save in events:
        if is_save:
            account.saved(hour)
        else:
            account.failed(hour, rng.sample(range(job.servers), job.servers_lost))
    assert len(account.failures) == 10_000
    margin = 5 * statistics.stdev(account.failures) * len(account.failures) ** 0.5
    assert abs(account.pls - expected_pls_of_job(job, interval_h)) < margin
    assert account.pls == pytest.approx(expected_pls(job, interval_h), rel=0.05)


def test_an_account_goes_on_from_its_state() -> None:
    account = PlsAccount(1000, 2)
    account.saved(100, [1])
    account.failed(150, [1])
    state = account.state_dict()
    account.failed(150, [0])
    again = PlsAccount(1000, 2)
    again.load_state_dict(state)
    assert again.failures == [50 / 2000]
    assert again.failed(150, [0]) == account.failures[-1]
    assert state["failures"] == [50 / 2000]
    with pytest.raises(ValueError, match=r"\(1000, 3\), the state given of \(1000, 2\)"):
        PlsAccount(1000, 3).load_state_dict(state)


@pytest.mark.parametrize("servers", [[2], [-1], [0, 0]])
def test_servers_are_named_once_and_exist(servers: list[int]) -> None:
    account = PlsAccount(1000, 2)
    for call in (account.failed, account.saved):
        with pytest.raises(ValueError, match="servers are different numbers from 0 to 1"):
            call(10, servers)
    assert account.pls == 0 and account.failed(10, [0]) == 10 / 2000


def test_samples_only_grow() -> None:
    account = PlsAccount(1000, 2)
    account.saved(100, [1])
    for call in (account.failed, account.saved):
        with pytest.raises(ValueError, match="server 1 was saved after 100 samples, and samples is 99"):
            call(99, [0, 1])
    account.failed(99, [0])


@pytest.mark.parametrize(("samples", "servers"), [(0, 1), (10, 0), (float("nan"), 1)])
def test_there_is_something_to_lose(samples: float, servers: int) -> None:
    with pytest.raises(ValueError, match="is a number above 0"):
        PlsAccount(samples, servers)


def test_intervals_and_targets_are_above_zero() -> None:
    for function in (expected_pls, expected_pls_of_job, interval_for_pls):
        with pytest.raises(ValueError, match="is a number above 0; it is -1"):
            function(JOB, -1)
