"""Codes over the real numbers: parity row q of a stripe is sum_i G[q, i] * data[i].

Row 0 is a plain sum, and so r = 1 is nothing else: what ECRec's public code does. For r >= 2, Liu & Xu allow
any (n, k); which coefficients they take is not known to us, so these are chosen: a Vandermonde matrix,
G[q, i] = x_i^q, with x_i from 1/4 to 4, each the same multiple of the one before.

The nodes are positive and distinct, so every minor is above 0, and any
r blocks can be lost, as over a finite field. But the systems to be solved are the worse conditioned the
larger r and k are, and multiply the rounding errors of parity by up to `condition`: 1 for r = 1, about 4 for
(6, 4), 37 for (9, 6), 360 for (12, 8).

Must not know: rows, ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]


def vandermonde(r: int, k: int) -> Reals:
    """float64 [r, k], new."""
    nodes = 4.0 ** ((2 * np.arange(k) - (k - 1)) / max(1, k - 1))
    return nodes[None, :] ** np.arange(r)[:, None]


def decode_weights(matrix: Reals, lost: Sequence[int], rows: Sequence[int]) -> tuple[Reals, Reals]:
    """How lost data blocks are made of parity rows and the other data blocks.

    `data[lost] = of_rows @ parity[rows] + of_data @ data`: from G[rows] @ data = parity[rows], with
    of_rows = G[rows, lost]^-1 and of_data = -of_rows @ G[rows], but 0 for those that are lost.

    Args:
        matrix: float64 [r, k].
        lost: data blocks.
        rows: as many parity rows.

    Returns:
        of_rows, float64 [lost, rows], and of_data, float64 [lost, k].
    """
    of_rows = np.linalg.inv(matrix[np.ix_(rows, lost)]).astype(np.float64)
    of_data = -of_rows @ matrix[list(rows)]
    of_data[:, list(lost)] = 0
    return of_rows, of_data


def condition(matrix: Reals) -> float:
    """The largest factor by which a rounding error of parity may come out in a rebuilt block.

    max over all systems of the infinity norm of G[rows, lost]^-1.
    """
    r, k = matrix.shape
    return max(
        float(np.abs(decode_weights(matrix, lost, rows)[0]).sum(1).max())
        for size in range(1, min(r, k) + 1)
        for lost in itertools.combinations(range(k), size)
        for rows in itertools.combinations(range(r), size)
    )
