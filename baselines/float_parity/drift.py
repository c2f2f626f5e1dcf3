"""A training and its sums in one process: how far they drift apart, and what NaN does to sums.

The arithmetic is that of a job, without its processes, so that many steps take little time, and several
parities can watch one training. Rows, their number, popularity and gradients are chosen: normal gradients,
and rows that are met the more rarely the higher their number is (to the power -1).

Must not know: processes, files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .arithmetic import Ids, Numbers, add_, difference, gather, overflowing
from .coefficients import Reals, decode_weights

Columns = list[Numbers]
"""Of a table: its weight and its optimizer's state, [rows, dim] each."""
Optimizer = Callable[[Columns, Ids, Numbers], None]
"""Changes rows of a table by their gradient."""
Watcher = Callable[[int, Ids, Columns, Columns], None]
"""Called with the rank, rows that it has changed, its table before and now."""

LR = 0.05


def sgd(columns: Columns, rows: Ids, gradient: Numbers) -> None:
    """w -= lr g, in the columns' own type."""
    columns[0][rows] -= np.float32(LR) * gradient


def adagrad(columns: Columns, rows: Ids, gradient: Numbers) -> None:
    """s += g^2, w -= lr g / (sqrt(s) + 1e-10), as torch.optim.Adagrad has it."""
    columns[1][rows] += gradient * gradient
    columns[0][rows] -= np.float32(LR) * gradient / (np.sqrt(columns[1][rows]) + np.float32(1e-10))


OPTIMIZERS: dict[str, tuple[Optimizer, int]] = {"sgd": (sgd, 1), "adagrad": (adagrad, 2)}
"""Name -> what it does, and how many columns a table has under it."""


class Tables:
    """A table in float32 on each of k ranks, whose rows with the same number are in one stripe.

    Args:
        k: ranks.
        optimizer: one of `OPTIMIZERS`.
        rows: of each table.
        dim: numbers of a row in each column.
        touched: rows that each rank draws in a step, repeats allowed.
        seed: of all that is drawn.

    Attributes:
        columns: of each rank its table.
        watchers: called with all changes.
    """

    def __init__(
        self,
        k: int,
        optimizer: str = "sgd",
        *,
        rows: int = 256,
        dim: int = 8,
        touched: int = 64,
        seed: int = 0,
    ) -> None:
        self._update, columns = OPTIMIZERS[optimizer]
        self._random, self._touched = np.random.default_rng(seed), touched
        popularity = 1 / np.arange(1, rows + 1)
        self._popularity = np.cumsum(popularity / popularity.sum())
        self._popularity[-1] = 1
        self.columns: list[Columns] = []
        for _ in range(k):
            weight = self._random.normal(0, 0.1, (rows, dim)).astype(np.float32)
            self.columns.append([weight, *(np.zeros((rows, dim), np.float32) for _ in range(columns - 1))])
        self.watchers: list[Watcher] = []

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of a table, and numbers of a row in all columns."""
        rows, dim = self.columns[0][0].shape
        return rows, dim * len(self.columns[0])

    def step(self) -> None:
        """Each rank meets some rows, and changes them by their gradients."""
        for rank, columns in enumerate(self.columns):
            rows = np.unique(np.searchsorted(self._popularity, self._random.random(self._touched)))
            gradient = self._random.normal(size=(len(rows), columns[0].shape[1])).astype(np.float32)
            self.train(rank, rows, gradient)

    def train(self, rank: int, rows: Ids, gradient: Numbers) -> None:
        """A rank meets rows, int64 [m], with a gradient of them, float32 [m, dim]."""
        self.change(rank, rows, lambda table: self._update(table, rows, gradient))

    def change(self, rank: int, rows: Ids, act: Callable[[Columns], None]) -> None:
        """A rank changes rows of its table, int64 [m], ascending and distinct, in any way."""
        before = [column.copy() for column in self.columns[rank]]
        act(self.columns[rank])
        for watcher in self.watchers:
            watcher(rank, rows, before, self.columns[rank])

    def set_(self, rank: int, row: int, place: int, value: float) -> float:
        """A rank sets one number of a row's weight; what it was."""
        before = float(self.columns[rank][0][row, place])

        def act(table: Columns) -> None:
            table[0][row, place] = value

        self.change(rank, np.array([row]), act)
        return before

    def records(self, rank: int) -> Numbers:
        """A rank's rows, all columns side by side: float32 [rows, width], new."""
        out = np.empty(self.shape, np.float32)
        gather(self.columns[rank], slice(None), out)
        return out


class Sums:
    """Parity of tables as sums of floats, updated by differences.

    Args:
        tables: that it watches from here on.
        matrix: float64 [r, k], the code's coefficients.
        dtype: of parity and differences: float32 or float64.

    Attributes:
        parity: [r, rows, width].
    """

    def __init__(self, tables: Tables, matrix: Reals, dtype: str = "float32") -> None:
        self._tables, self._matrix = tables, matrix
        rows, width = tables.shape
        self.parity = np.zeros((len(matrix), rows, width), dtype)
        for rank in range(len(tables.columns)):
            self._add(rank, np.arange(rows), tables.records(rank).astype(dtype))
        tables.watchers.append(self._told)

    @overflowing
    def rebuilt(self, lost: Sequence[int]) -> list[Numbers]:
        """What becomes of lost ranks' tables, solved for in float64: [rows, width] each."""
        used = range(len(lost))
        of_parity, of_data = decode_weights(self._matrix, lost, used)
        survivors = [rank for rank in range(len(self._tables.columns)) if rank not in lost]
        found: list[Numbers] = []
        for own, others in zip(of_parity, of_data, strict=True):
            total = np.zeros(self._tables.shape)
            for q in used:
                total += own[q] * self.parity[q]
            for rank in survivors:
                total += others[rank] * self._tables.records(rank)
            found.append(total)
        return found

    def _told(self, rank: int, rows: Ids, before: Columns, now: Columns) -> None:
        out = np.empty((len(rows), self._tables.shape[1]), self.parity.dtype)
        difference(now, before, rows, out)
        self._add(rank, rows, out)

    def _add(self, rank: int, rows: Ids, differences: Numbers) -> None:
        for parity, coefficients in zip(self.parity, self._matrix, strict=True):
            add_(parity, rows, differences, float(coefficients[rank]))


@overflowing
def errors(tables: Tables, lost: Sequence[int], rebuilt: Sequence[Numbers]) -> Numbers:
    """Of each lost rank's each row: |rebuilt - row| / |row|, Euclidean: float64 [lost, rows]."""
    found: list[Numbers] = []
    for rank, values in zip(lost, rebuilt, strict=True):
        true = tables.records(rank).astype(np.float64)
        found.append(np.linalg.norm(values - true, axis=1) / np.linalg.norm(true, axis=1))
    return np.stack(found)
