"""How far are rows rebuilt from parity of floats off, and what does one NaN take from it?

A training in one process: k ranks' tables of 256 rows in float32, 64 draws of a row in each step, gradients
with a normal distribution. All parities watch the same training: sums in float32 and in float64, updated by
differences (`baselines.float_parity`), and parity of bits over GF(2^8), as ecemb has it. Then r ranks are
lost.

- `rebuilt_error`: |rebuilt - row| / |row| after `steps` steps, optimizer state included: the median of all
  lost rows. In brackets: of different seeds; the longest training has one.
- `rebuilt_error_worst`: the largest of all lost rows.
- `rows_lost_to_one_nan`: one number of one rank is NaN for one step, long ago; all rows are finite now, and
  another rank is lost. How many of its 256 rows come back with NaN, or further off than 0.001 of their
  length.

Parity of bits has to give back every bit, or there is no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baselines.float_parity.arithmetic import Ids, Numbers
from baselines.float_parity.coefficients import vandermonde
from baselines.float_parity.drift import OPTIMIZERS, Columns, Sums, Tables, errors
from bench.harness.result import Arguments, Row, WrongResult, once, summary
from bench.harness.side_by_side import side_by_side
from ecemb.coding.code import Code, multiply

Bytes = NDArray[np.uint8]

CODES = (Code(4, 3), Code(6, 4))
STEPS, QUICK_STEPS = (100, 1_000, 10_000, 100_000), (10, 100)
SEEDS, QUICK_SEEDS = 2, 2
NAN_STEPS = 100
"""Before the NaN, and after it."""
FAR = 1e-3
BITS = "bits"


@dataclass(frozen=True)
class Training:
    """One training.

    Attributes:
        code: Of the parity of bits, and of the sums.
        optimizer: One of `OPTIMIZERS`.
        at: Numbers of steps after which ranks are lost.
        seed: Of all that is drawn.
    """

    code: Code
    optimizer: str
    at: tuple[int, ...]
    seed: int


Errors = dict[tuple[int, str], tuple[float, float]]
"""Steps and parity -> the median and the largest error of a row."""


class Parity(Protocol):
    """What is kept of tables elsewhere."""

    def rebuilt(self, lost: Sequence[int]) -> list[Numbers]: ...


class Bits:
    """Parity of the tables' bits, updated by old XOR new.

    Args:
        tables: That it watches from here on.
        code: ecemb's.
    """

    def __init__(self, tables: Tables, code: Code) -> None:
        self._tables, self._code, self._generator = tables, code, code.generator()
        rows, width = tables.shape
        self._parity = np.zeros((code.r, rows, 4 * width), np.uint8)
        for rank in range(code.k):
            self._add(rank, np.arange(rows), tables.records(rank).view(np.uint8))
        tables.watchers.append(self._told)

    def rebuilt(self, lost: Sequence[int]) -> list[Numbers]:
        blocks = {rank: self._tables.records(rank).view(np.uint8) for rank in range(self._code.k)}
        blocks |= {self._code.k + q: parity for q, parity in enumerate(self._parity)}
        available = [block for block in blocks if block not in lost][: self._code.k]
        found: list[Numbers] = []
        for weights in self._code.decode_weights(lost, available, self._generator):
            total = np.zeros_like(self._parity[0])
            for weight, block in zip(weights, available, strict=True):
                total ^= multiply(weight, blocks[block])
            found.append(total.view(np.float32))
        return found

    def _told(self, rank: int, rows: Ids, before: Columns, now: Columns) -> None:
        old, new = (np.hstack([column[rows] for column in table]).view(np.uint8) for table in (before, now))
        self._add(rank, rows, old ^ new)

    def _add(self, rank: int, rows: Ids, delta: Bytes) -> None:
        for q, parity in enumerate(self._parity):
            parity[rows] ^= multiply(self._generator[self._code.k + q, rank], delta)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question.

    Raises:
        WrongResult: Parity of bits lost some.
    """
    steps, seeds = (QUICK_STEPS, QUICK_SEEDS) if arguments.quick else (STEPS, SEEDS)
    trainings = [
        Training(code, optimizer, steps if seed == arguments.seed else steps[:-1], seed)
        for code in CODES
        for optimizer in OPTIMIZERS
        for seed in range(arguments.seed, arguments.seed + seeds)
    ]
    found = side_by_side(drift, trainings, quick=arguments.quick)
    rows = rows_of(trainings, found)
    for code in CODES:
        rows += one_nan(code, arguments.seed)
    return sorted(rows, key=lambda row: row.metric)


def watched(code: Code, optimizer: str, seed: int) -> tuple[Tables, dict[str, Parity]]:
    """A new training, and the parities that watch it, by name."""
    tables = Tables(code.k, optimizer, seed=seed)
    matrix = vandermonde(code.r, code.k)
    sums = {dtype: Sums(tables, matrix, dtype) for dtype in ("float32", "float64")}
    return tables, {**sums, BITS: Bits(tables, code)}


def drift(training: Training) -> Errors:
    """Errors of rebuilt rows."""
    tables, parities = watched(training.code, training.optimizer, training.seed)
    lost, found = range(training.code.r), {}
    for before, steps in pairwise((0, *training.at)):
        for _ in range(steps - before):
            tables.step()
        for method, parity in parities.items():
            rebuilt = parity.rebuilt(lost)
            if method == BITS:
                check(tables, lost, rebuilt)
            each = errors(tables, lost, rebuilt)
            found[steps, method] = float(np.median(each)), float(each.max())
    return found


def rows_of(trainings: Sequence[Training], found: Sequence[Errors]) -> list[Row]:
    """The rows of trainings that differ by seed, together."""
    samples: dict[tuple[str, str, str, int, str], list[float]] = {}
    for training, of_one in zip(trainings, found, strict=True):
        for (steps, method), both in of_one.items():
            for metric, value in zip(("rebuilt_error", "rebuilt_error_worst"), both, strict=True):
                key = metric, label(training.code), training.optimizer, steps, method
                samples.setdefault(key, []).append(value)
    return [
        summary(metric, "ratio", values, code=code, optimizer=optimizer, steps=steps, method=method)
        for (metric, code, optimizer, steps, method), values in samples.items()
    ]


def one_nan(code: Code, seed: int) -> list[Row]:
    """Rows that one NaN takes from another rank."""
    tables, parities = watched(code, "sgd", seed)
    for _ in range(NAN_STEPS):
        tables.step()
    tables.set_(1, 7, 2, tables.set_(1, 7, 2, np.nan))
    for _ in range(NAN_STEPS):
        tables.step()
    rows: list[Row] = []
    for method, parity in parities.items():
        rebuilt = parity.rebuilt([0])
        if method == BITS:
            check(tables, [0], rebuilt)
        far = int((~(errors(tables, [0], rebuilt) <= FAR)).sum())
        rows.append(once("rows_lost_to_one_nan", "rows", far, code=label(code), method=method))
    return rows


def check(tables: Tables, lost: Sequence[int], rebuilt: Sequence[Numbers]) -> None:
    for rank, values in zip(lost, rebuilt, strict=True):
        if values.tobytes() != tables.records(rank).tobytes():
            raise WrongResult(f"rank {rank}'s rows, rebuilt from parity of bits, are not those it lost")


def label(code: Code) -> str:
    return f"({code.n}, {code.k})"
