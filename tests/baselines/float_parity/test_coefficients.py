"""Codes over the real numbers: what is lost comes back, and how much errors grow."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from baselines.float_parity.coefficients import condition, decode_weights, vandermonde


@pytest.mark.parametrize(("r", "k"), [(1, 1), (1, 4), (2, 1), (2, 3), (3, 4), (4, 2)])
def test_any_r_blocks_come_back(r: int, k: int) -> None:
    matrix = vandermonde(r, k)
    assert matrix.shape == (r, k) and (matrix[0] == 1).all()
    data = np.random.default_rng(r * 10 + k).normal(size=(k, 5))
    parity = matrix @ data
    for size in range(1, min(r, k) + 1):
        for lost in itertools.combinations(range(k), size):
            for rows in itertools.combinations(range(r), size):
                of_rows, of_data = decode_weights(matrix, lost, rows)
                assert not of_data[:, lost].any()
                found = of_rows @ parity[list(rows)] + of_data @ data
                np.testing.assert_allclose(found, data[list(lost)], atol=1e-12)


@pytest.mark.parametrize(("r", "k", "factor"), [(1, 7, 1), (2, 4, 4.29), (3, 6, 36.8), (4, 8, 359)])
def test_errors_grow_with_r_and_k(r: int, k: int, factor: float) -> None:
    assert condition(vandermonde(r, k)) == pytest.approx(factor, rel=0.01)
