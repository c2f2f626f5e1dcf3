"""What a checkpoint takes, by the sizes before it."""

from __future__ import annotations

import pytest

from baselines.check_n_run.policy import POLICIES, intermittent, policy_of


def run(name: str, size: float, count: int) -> list[tuple[str, ...]]:
    """What each of this many checkpoints stands on, if each differential one grows by `size`."""
    policy = policy_of(name)
    needs: list[tuple[str, ...]] = []
    sizes: list[float] = []
    for number in range(count):
        if number == 0 or policy.takes_full(sizes):
            needs.append(())
            sizes = []
        else:
            needs.append(policy.needs(str(number - 1), needs[-1]))
            sizes.append(size * (len(sizes) + 1))
    return needs


def test_what_checkpoints_stand_on() -> None:
    assert run("full", 0.1, 3) == [(), (), ()]
    assert run("one_shot", 0.1, 4) == [(), ("0",), ("0",), ("0",)]
    assert run("consecutive", 0.1, 4) == [(), ("0",), ("0", "1"), ("0", "1", "2")]
    assert run("intermittent", 0.4, 6) == [(), ("0",), ("0",), (), ("3",), ("3",)]


def test_the_predictor_follows_its_formula() -> None:
    assert not intermittent([])
    assert not intermittent([0.9])  # 1.9 > 1.8
    assert intermittent([1.0])  # 2 <= 2: a differential checkpoint that has everything
    assert not intermittent([0.26, 0.34, 0.38]) and intermittent([0.1, 0.9])


def test_rows_that_change_as_published_get_a_new_baseline_about_every_8_intervals() -> None:
    """S_i = 0.26 i^0.25: 26 % of the rows in one interval is published, the exponent is calibrated."""
    policy, sizes = POLICIES["intermittent"], list[float]()
    while not policy.takes_full(sizes):
        sizes.append(0.26 * (len(sizes) + 1) ** 0.25)
    assert 7 <= len(sizes) <= 9


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"policy=.*'consecutive'.*got 'daily'"):
        policy_of("daily")
