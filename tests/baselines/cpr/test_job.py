from __future__ import annotations

import random

import pytest

from baselines.cpr.job import CprJob

JOB = CprJob(total_h=56, mtbf_h=28, servers=8)


@pytest.mark.parametrize(
    ("interval_h", "saves"), [(44.8, 1), (56, 0), (89.6, 0), (28, 1), (8, 6), (8.1, 6), (5.6, 9), (0.1, 559)]
)
def test_saves_come_after_each_interval_but_not_at_the_end(interval_h: float, saves: int) -> None:
    assert JOB.saves(interval_h) == saves


@pytest.mark.parametrize("interval_h", [0.7, 8, 9.3, 44.8, 56, 89.6])
def test_the_mean_since_the_last_save_is_that_of_many_moments(interval_h: float) -> None:
    moments = [(i + 0.5) * JOB.total_h / 100_000 for i in range(100_000)]
    since = sum(moment % interval_h for moment in moments) / len(moments)
    assert JOB.mean_since_save_h(interval_h) == pytest.approx(since, rel=1e-3)


def test_with_many_saves_it_is_half_an_interval(seed: int) -> None:
    interval_h = random.Random(seed).uniform(0.05, 0.15)
    assert JOB.mean_since_save_h(interval_h) == pytest.approx(interval_h / 2, rel=0.01)


@pytest.mark.parametrize("name", ["total_h", "mtbf_h"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_times_are_above_zero(name: str, value: float) -> None:
    times = {"total_h": 56.0, "mtbf_h": 28.0} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is a number above 0; it is"):
        CprJob(servers=8, **times)


@pytest.mark.parametrize(("servers", "lost"), [(8, 0), (8, 9), (0, 1), (-1, 1)])
def test_servers_that_fail_are_some_of_them(servers: int, lost: int) -> None:
    with pytest.raises(ValueError, match="servers_lost"):
        CprJob(56, 28, servers, lost)


def test_an_interval_is_above_zero() -> None:
    for method in (JOB.saves, JOB.mean_since_save_h):
        with pytest.raises(ValueError, match="interval_h is a number above 0; it is 0"):
            method(0)
