"""What protection adds to a step: a model with intervals, fitted to the answers to `overhead` of one engine.

    added = step + commit / window + rows (row + r row_and_parity)

with `rows` per step of a rank, and r blocks of parity or r more copies. It is processor time, so commits
beside the next steps take as much. All coefficients are at least 0. The intervals (95 %) come from fits to
measurements that are drawn again within their own errors, which are widened where the measurements disagree
with the model by more than that. A sum of coefficients is known better than each of them, since where one is
too small another is too large: its interval is that of the sums of each draw.

Must not know: jobs, faults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DRAWS = 2000
TERMS = ("step", "commit", "row", "row and parity")
ENDS_PCT = {"cheap": 2.5, "dear": 97.5}
"""End of an interval of 95 % -> its percentile."""
_NORMAL_95 = 1.96


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        setting: Of the tables.
        window: Steps in a transaction.
        parity: r.
        rows: Touched per step and rank.
        added_s: Seconds that a step takes longer.
        error_s: Standard error of that.
    """

    setting: str
    window: int
    parity: int
    rows: float
    added_s: float
    error_s: float


@dataclass(frozen=True)
class Estimate:
    """A coefficient, its interval of 95 %, and its values in the draws, which all coefficients share."""

    value: float
    low: float
    high: float
    drawn: Floats = field(compare=False)


def points(rows: Sequence[Mapping[str, Any]], method: str, engine: str) -> list[Point]:
    """The measurements of "protected" or of "replication" on an engine, of the rows of `overhead`."""
    shared = ("setting", "code", "window", "overlap")
    found: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        name = row.get("method", "any")
        if row.get("engine") == engine and (name in (method, "bare") or row["metric"] == "window_steps"):
            metric = row["metric"] if name == method else f"{name} {row['metric']}"
            found.setdefault(tuple(str(row.get(name)) for name in shared), {})[metric] = row
    return [point for one in found.values() if (point := _point(one)) is not None]


def _point(one: Mapping[str, Mapping[str, Any]]) -> Point | None:
    """The measurement of one case; None if something of it is missing."""
    try:
        added, rows, bare = (
            one[name] for name in ("overhead_cpu_pct", "touched_rows_per_step", "bare step_cpu_ms")
        )
        window = added["window"] if added["window"] != "auto" else one["any window_steps"]["value"]
    except KeyError:
        return None
    ranks = int(added["code"].strip("()").split(",")[0])
    percent_s = bare["value"] / 1000 / ranks / 100
    error = (added["high"] - added["low"]) / (2 * _NORMAL_95)
    return Point(
        added["setting"],
        int(window),
        added["r"],
        rows["value"],
        added["value"] * percent_s,
        max(error * percent_s, 1e-6),
    )


def fit(measured: Sequence[Point], seed: int = 0) -> dict[str, Estimate]:
    """Returns the coefficients `TERMS` in seconds; none of too few measurements.

    Where all windows are the same, what each step takes can't be known from a commit's, and counts as that.
    """
    used = np.arange(len(TERMS)) >= (len({one.window for one in measured}) == 1)
    if len(measured) <= used.sum():
        return {}
    rng = np.random.default_rng(seed)
    terms, added, errors = _arrays(measured)
    terms *= used
    best = _least(terms / errors[:, None], added / errors)
    off = float((((terms @ best - added) / errors) ** 2).sum()) / (len(measured) - used.sum())
    errors = errors * math.sqrt(max(1.0, off))
    drawn = added + errors * rng.standard_normal((DRAWS, len(measured)))
    fits = np.array([_least(terms / errors[:, None], one / errors) for one in drawn])
    return {name: _estimate(float(best[i]), fits[:, i]) for i, name in enumerate(TERMS)}


def shrinking(measured: Sequence[Point]) -> float:
    """The power of the window by which fewer rows per step are touched, since rows come again in it.

    That of the setting in which they come again least.
    """
    powers: list[float] = []
    for setting in {one.setting for one in measured}:
        rows = {one.window: one.rows for one in measured if one.setting == setting}
        few, many = min(rows), max(rows)
        if few != many:
            powers.append(math.log(rows[many] / rows[few]) / math.log(many / few))
    return min(0.0, max(powers, default=0.0))


def _arrays(measured: Sequence[Point]) -> tuple[Floats, Floats, Floats]:
    terms = np.array([(1.0, 1 / one.window, one.rows, one.rows * one.parity) for one in measured])
    return terms, np.array([one.added_s for one in measured]), np.array([one.error_s for one in measured])


def _least(terms: Floats, values: Floats) -> Floats:
    """Least squares among coefficients that are not negative, over all choices of those that are above 0."""
    best, least = np.zeros(terms.shape[1]), float((values**2).sum())
    for size in range(1, terms.shape[1] + 1):
        for chosen in map(list, combinations(range(terms.shape[1]), size)):
            some = np.linalg.lstsq(terms[:, chosen], values, rcond=None)[0]
            off = float(((terms[:, chosen] @ some - values) ** 2).sum())
            if some.min() >= 0 and off < least:
                best, least = np.zeros(terms.shape[1]), off
                best[chosen] = some
    return best


def _estimate(value: float, drawn: Floats) -> Estimate:
    low, high = (float(one) for one in np.percentile(drawn, list(ENDS_PCT.values())))
    return Estimate(value, min(low, value), max(high, value), drawn)
