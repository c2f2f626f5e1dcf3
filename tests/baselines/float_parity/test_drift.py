"""What becomes of sums of floats: they drift, and one NaN stays in them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from baselines.float_parity.coefficients import vandermonde
from baselines.float_parity.drift import Sums, Tables, errors

AT = (0, 100, 1000)


def drift(optimizer: str, dtype: str, r: int = 1, k: int = 3, at: tuple[int, ...] = AT) -> list[np.ndarray]:
    """Rebuilt rows' errors after this many steps, when r ranks are lost."""
    tables = Tables(k, optimizer)
    sums = Sums(tables, vandermonde(r, k), dtype)
    found = []
    for before, steps in pairwise((0, *at)):
        for _ in range(steps - before):
            tables.step()
        found.append(errors(tables, range(r), sums.rebuilt(range(r))))
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_float32_drifts_like_a_random_walk(optimizer: str) -> None:
    first, middle, last = (float(np.median(found)) for found in drift(optimizer, "float32"))
    assert 1e-8 < first < 1e-7 < middle < 3e-7 < last < 2e-6
    assert 2 < last / middle < 5  # ten times the steps: sqrt(10) times the error


def test_the_more_may_be_lost_the_larger_the_error() -> None:
    one, two = (drift("sgd", "float32", r, k, AT[:2])[-1] for r, k in ((1, 3), (2, 4)))
    assert 2 * np.median(one) < np.median(two) < two.max() < 1e-4


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_float64_holds_sums_of_float32_of_one_size(optimizer: str) -> None:
    assert all(found.max() < 1e-12 for found in drift(optimizer, "float64"))
    coded = drift(optimizer, "float64", 2, 4, AT[:2])[-1]
    assert 0 < coded.max() < 1e-10


def test_a_sum_in_float64_of_plain_numbers_is_exact() -> None:
    assert all(found.max() == 0 for found in drift("sgd", "float64", at=AT[:2]))


def spoilt(value: float, dtype: str, r: int = 1, k: int = 3) -> tuple[Tables, Sums]:
    """One number of rank 1's row 7 has that value for a moment, then its own again; training goes on."""
    tables = Tables(k)
    sums = Sums(tables, vandermonde(r, k), dtype)
    for _ in range(5):
        tables.step()
    tables.set_(1, 7, 2, tables.set_(1, 7, 2, value))
    for _ in range(20):
        tables.step()
    assert all(np.isfinite(tables.records(rank)).all() for rank in range(k))
    return tables, sums


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("r", "k"), [(1, 3), (2, 4)])
def test_one_nan_poisons_parity_for_good(value: float, dtype: str, r: int, k: int) -> None:
    tables, sums = spoilt(value, dtype, r, k)
    assert np.argwhere(~np.isfinite(sums.parity)).tolist() == [[q, 7, 2] for q in range(r)]
    for lost in range(k):  # of all ranks' rows under it, none can be rebuilt
        [found] = errors(tables, [lost], sums.rebuilt([lost]))
        assert np.flatnonzero(~np.isfinite(found)).tolist() == [7]
        assert np.delete(found, 7).max() < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_huge_number_wipes_out_what_was_summed(dtype: str) -> None:
    tables, sums = spoilt(1e30, dtype)
    [found] = errors(tables, [0], sums.rebuilt([0]))
    assert found[7] > 0.01
    assert np.delete(found, 7).max() < 1e-5
