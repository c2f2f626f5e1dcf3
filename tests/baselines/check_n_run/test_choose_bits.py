"""Bits by the number of restores, and what happens when there are more of them than planned."""

from __future__ import annotations

import math

import pytest

from baselines.check_n_run.choose_bits import bits_for, capacity, expected_restores, scheme_for
from baselines.check_n_run.quantize_scheme import Scheme


@pytest.mark.parametrize(
    ("planned", "bits"), [(0, 2), (1, 2), (1.01, 3), (3, 3), (3.5, 4), (20, 4), (21, 8), (math.inf, 8)]
)
def test_the_rule(planned: float, bits: int) -> None:
    assert bits_for(planned) == bits
    assert planned <= capacity(bits)


def test_more_restores_than_planned_for_fall_back_to_8_bits() -> None:
    assert [bits_for(1, past) for past in range(4)] == [2, 2, 8, 8]
    assert [bits_for(2, past) for past in range(5)] == [3, 3, 3, 3, 8]
    assert bits_for(20, 20) == 4 and bits_for(20, 21) == 8
    assert bits_for(21, 10_000) == 8


def test_four_bits_and_below_are_adaptive() -> None:
    assert scheme_for(1) == Scheme("adaptive", 2)
    assert scheme_for(20, 3, "float16") == Scheme("adaptive", 4, "float16")
    assert scheme_for(1, 2) == Scheme("asymmetric", 8)


def test_restores_to_expect() -> None:
    assert expected_restores(56, 28) == 2
    assert expected_restores(0, 28) == expected_restores(56, math.inf) == 0


def test_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="they are -1 and 0"):
        bits_for(-1)
    with pytest.raises(ValueError, match="they are nan and 0"):
        bits_for(math.nan)
    with pytest.raises(ValueError, match="they are 1 and -2"):
        bits_for(1, -2)
    with pytest.raises(ValueError, match=r"one of \(2, 3, 4, 8\); they are 5"):
        capacity(5)
    with pytest.raises(ValueError, match="they are 56 and 0"):
        expected_restores(56, 0)
