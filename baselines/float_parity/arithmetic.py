"""Difference propagation and its sums: what is done to numbers, on whatever rank.

Differences are made, sent and added in one type, float32 or float64. A keeper adds `coefficient * (new -
old)` of each changed row to its parity, which so stays the sum of all rows under it, but for rounding; and
but for NaN and infinities: (finite - NaN) is NaN, and NaN + anything is, so that these never leave it again.

Must not know: stripes, processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = NDArray[Any]
"""Of floating point."""
Ids = NDArray[np.int64]
SQUARES = ("sum", "exp_avg_sq", "momentum1")
"""Optimizer state that is never negative: torch's Adagrad and SparseAdam, FBGEMM's Adagrad."""

F = TypeVar("F", bound=Callable[..., Any])


def overflowing(function: F) -> F:
    """Decorates what may meet NaN and infinities, as training may: they are answered for elsewhere."""
    return np.errstate(invalid="ignore", over="ignore")(function)


def widths(columns: Sequence[Numbers]) -> list[int]:
    """Numbers of a row in each column."""
    return [int(np.prod(column.shape[1:])) for column in columns]


@overflowing
def gather(columns: Sequence[Numbers], rows: Ids | slice, out: Numbers) -> None:
    """Writes rows of a table, all columns side by side.

    Args:
        columns: [rows, ...] each, of any type. Read.
        rows: which, m of them.
        out: [m, width], overwritten.
    """
    at = 0
    for column, width in zip(columns, widths(columns), strict=True):
        out[:, at : at + width] = column[rows].reshape(-1, width)
        at += width


@overflowing
def difference(new: Sequence[Numbers], old: Sequence[Numbers], rows: Ids, out: Numbers) -> None:
    """Writes new - old of some rows, rounded once to the type of `out`.

    Args:
        new: columns of a table, [rows, ...] each. Read.
        old: the same, before. Read.
        rows: int64 [m].
        out: [m, width], overwritten.
    """
    at = 0
    for now, before, width in zip(new, old, widths(new), strict=True):
        pair = (column.take(rows, axis=0).reshape(-1, width) for column in (now, before))
        part = out[:, at : at + width]
        np.subtract(*pair, out=part, dtype=np.result_type(now, part), casting="same_kind")
        at += width


@overflowing
def scatter_(columns: Sequence[Numbers], rows: slice, values: Numbers) -> None:
    """Writes to rows of a table what `gather` gives, rounded to the columns' types."""
    at = 0
    for column, width in zip(columns, widths(columns), strict=True):
        column[rows] = values[:, at : at + width].reshape(-1, *column.shape[1:])
        at += width


def clear_signs_(columns: Mapping[str, Numbers]) -> None:
    """Raises what is below 0 in sums of squares, whose root optimizers take: rebuilt zeros may be.

    Args:
        columns: by keys that end in the names of `ecemb.tables`, changed in place.
    """
    for key, column in columns.items():
        if key.rpartition("/")[2] in SQUARES:
            np.maximum(column, 0, out=column)


def add_(parity: Numbers, rows: Ids, differences: Numbers, coefficient: float) -> None:
    """Adds differences, times a coefficient, to rows of parity.

    Args:
        parity: [rows, width], changed in place.
        rows: int64 [m], distinct.
        differences: [m, width], of the same type. Read.
        coefficient: of the block that they are of.
    """
    sums = torch.from_numpy(parity)
    sums.index_add_(0, torch.from_numpy(rows), torch.from_numpy(differences), alpha=coefficient)
