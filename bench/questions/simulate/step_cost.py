"""What protection adds to a step: a model with intervals, fitted to the answers to `overhead`, `compare`.

    added = commit / window + rows (row + r row_parity), times `overlap` where commits overlap with steps

with `rows` per step of a rank, and r blocks of parity or r more copies. All coefficients are at least 0. The
intervals (95 %) come from fits to measurements that are drawn again within their own errors, which are
widened where the measurements disagree with the model by more than that.

Must not know: jobs, faults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.questions.compare.cases import BY_METHOD

Floats = NDArray[np.float64]

DRAWS = 2000
TERMS = ("commit", "row", "row and parity")
_SPREAD = {2: 1.13, 4: 2.06, 8: 2.85, 16: 3.53, 24: 3.90, 48: 4.47, 96: 5.0}
"""Range over standard deviation of this many normal values, which the nearest count below is taken from."""
_NORMAL_95 = 1.96
COMPARED = {"step_cpu_pct", "bare_step_cpu_s", "window_steps", "touched_rows_per_step"}
"""What `compare` says of a measurement."""
_MEDIAN = 1.25
"""Standard error of a median over that of a mean."""


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        window: Steps in a transaction.
        parity: r.
        rows: Touched per step and rank.
        overlap: Whether commits overlap with the steps that follow.
        added_s: Seconds that a step takes longer.
        error_s: Standard error of that.
    """

    window: int
    parity: int
    rows: float
    overlap: bool
    added_s: float
    error_s: float


@dataclass(frozen=True)
class Estimate:
    """A coefficient, and its interval of 95 %."""

    value: float
    low: float
    high: float


def points(rows: Sequence[Mapping[str, Any]], method: str) -> list[Point]:
    """The measurements of "protected" or of "replication" in rows of answers to `overhead`.

    Answers by pairs, whose rows have a label `r`, give the processor time of a rank, with its interval of
    95 %; older ones give wall time with the range of the rounds.
    """
    shared = ("engine", "setting", "code", "window", "overlap")
    found: dict[tuple[str, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        name = row.get("method", "any")
        if name in (method, "bare") or row["metric"] == "window_steps":
            metric = row["metric"] if name == method else f"{name} {row['metric']}"
            found.setdefault(tuple(str(row.get(name)) for name in shared), {})[metric] = row
    made: list[Point] = []
    for one in found.values():
        if "r" in next(iter(one.values())):
            made += _of_pairs(one)
            continue
        try:
            added, rows_, bare = (
                one[name] for name in ("overhead_wall_pct", "touched_rows_per_step", "bare step_wall_ms")
            )
        except KeyError:
            continue
        n, k = (int(word) for word in added["code"].strip("()").split(","))
        step_s, repeats = bare["value"] / 1000, added["repeats"]
        spread = _SPREAD[max(count for count in _SPREAD if count <= max(2, repeats))]
        error = _MEDIAN * (added["high"] - added["low"]) / 100 / spread / math.sqrt(repeats)
        made.append(
            Point(
                added["window"],
                n - k,
                rows_["value"],
                added["overlap"] != "none",
                added["value"] / 100 * step_s,
                max(error * step_s, 1e-6),
            )
        )
    return made


def _of_pairs(one: Mapping[str, Mapping[str, Any]]) -> list[Point]:
    """The measurement of one case that was compared by pairs; none if something of it is missing."""
    try:
        added, rows, bare = (
            one[name] for name in ("overhead_cpu_pct", "touched_rows_per_step", "bare step_cpu_ms")
        )
        window = added["window"] if added["window"] != "auto" else one["any window_steps"]["value"]
    except KeyError:
        return []
    ranks = int(added["code"].strip("()").split(",")[0])
    percent_s = bare["value"] / 1000 / ranks / 100
    error = (added["high"] - added["low"]) / (2 * _NORMAL_95)
    return [
        Point(
            int(window),
            added["r"],
            rows["value"],
            added["overlap"] != "none",
            added["value"] * percent_s,
            max(error * percent_s, 1e-6),
        )
    ]


def compared(rows: Sequence[Mapping[str, Any]], family: str) -> list[Point]:
    """The measurements of "ecemb" or of "copies" in rows of answers to `compare`."""
    found: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["engine"], row["method"]), {})[row["metric"]] = row
    made: list[Point] = []
    for (_, method), one in found.items():
        guard = BY_METHOD[method].guard if method in BY_METHOD else None
        is_copy = method.startswith("ecemb copies")
        if guard is None or is_copy != (family == "copies") or not one.keys() >= COMPARED:
            continue
        added, step_s = one["step_cpu_pct"], one["bare_step_cpu_s"]["value"]
        error = (added["high"] - added["low"]) / (2 * _NORMAL_95)
        made.append(
            Point(
                int(one["window_steps"]["value"]),
                guard.code.r,
                one["touched_rows_per_step"]["value"],
                guard.overlap,
                added["value"] / 100 * step_s,
                max(error / 100 * step_s, 1e-6),
            )
        )
    return made


def fit(measured: Sequence[Point], seed: int = 0) -> dict[str, Estimate]:
    """Returns the coefficients `TERMS` in seconds, and "overlap"; none of too few measurements."""
    plain = [one for one in measured if not one.overlap]
    if len(plain) <= len(TERMS):
        return {}
    rng = np.random.default_rng(seed)
    terms, added, errors = _arrays(plain)
    best = _least(terms / errors[:, None], added / errors)
    off = float((((terms @ best - added) / errors) ** 2).sum()) / (len(plain) - len(TERMS))
    errors = errors * math.sqrt(max(1.0, off))
    drawn = added + errors * rng.standard_normal((DRAWS, len(plain)))
    fits = np.array([_least(terms / errors[:, None], one / errors) for one in drawn])
    found = {
        name: Estimate(float(best[i]), *_interval(fits[:, i], float(best[i]))) for i, name in enumerate(TERMS)
    }
    beside = [one for one in measured if one.overlap]
    if beside:
        terms, added, errors = _arrays(beside)
        value = _ratio(terms @ best, added, errors)
        drawn = added + errors * rng.standard_normal((DRAWS, len(beside)))
        ratios = np.array([_ratio(terms @ b, one, errors) for b, one in zip(fits, drawn, strict=True)])
        found["overlap"] = Estimate(value, *_interval(ratios, value))
    return found


def shrinking(measured: Sequence[Point]) -> float:
    """The power of the window by which fewer rows per step are touched, since rows come again in it."""
    by_window: dict[int, list[float]] = {}
    for one in measured:
        by_window.setdefault(one.window, []).append(one.rows)
    few, many = min(by_window, default=1), max(by_window, default=1)
    if few == many:
        return 0.0
    ratio = sum(sorted(set(by_window[many]))) / sum(sorted(set(by_window[few])))
    return min(0.0, math.log(ratio) / math.log(many / few))


def _arrays(measured: Sequence[Point]) -> tuple[Floats, Floats, Floats]:
    terms = np.array([(1 / one.window, one.rows, one.rows * one.parity) for one in measured])
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


def _ratio(expected: Floats, added: Floats, errors: Floats) -> float:
    weights = expected / errors**2
    return float(np.clip((weights * added).sum() / max((weights * expected).sum(), 1e-30), 0, 1))


def _interval(values: Floats, value: float) -> tuple[float, float]:
    low, high = (float(one) for one in np.percentile(values, (2.5, 97.5)))
    return min(low, value), max(high, value)
