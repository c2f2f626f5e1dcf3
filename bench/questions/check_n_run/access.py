"""Which rows change from one checkpoint to the next: patterns of access, each calibrated on what it names.

How often a row is looked up in an interval is Poisson's, at a rate of the row's own, the same in all
intervals. Rates follow a power law that is cut off at its upper end (chosen):

    g(rate) ~ rate^(-1 - alpha) exp(-rate / cutoff),    rate >= least

so that the rows which are touched within t intervals grow about as t^alpha, until all have been. Of the rows
that one interval touches, those that it touches k times are then

    p(1) = alpha (1 + x)^(alpha - 1) / ((1 + x)^alpha - x^alpha),    x = 1 / cutoff
    p(k + 1) = p(k) (k - alpha) / ((k + 1) (1 + x))

- "published": without a cutoff; alpha and the least rate are *calibrated* so that an interval changes 26 %
  of the rows, and 11 of them 52 %. Published (S): 26 % in 30 minutes, and 52 % after 11 B samples. That these
  are 11 intervals is *derived*, from a chain of 11 differentials that takes about 4 times a full checkpoint
  (S): 1 + 11 x 0.26 = 3.9.
- "locality 2021", "locality 2022": alpha and cutoff are *calibrated* on how often the rows of one recorded
  production batch were looked up in it. So an interval is such a batch: chosen, since nothing longer was
  recorded. How many rows the tables have, the statistics don't say: the least rate is *calibrated* on the
  published 52 % after 11 intervals.

None is calibrated on bytes, reductions or baselines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.harness.result import WrongResult

Floats = NDArray[np.float64]

CHANGED: Final = 0.26
"""Of all rows, in one interval."""
TOUCHED: Final = 0.52
"""Of all rows, in `LONG` intervals."""
LONG: Final = 11
MULTIPLICITIES: Final = (1, 2, 4, 8, 16)
"""How often a row was looked up in a batch: each number ends a bin, and what is above has one more."""
LOCALITY: Final[Mapping[str, tuple[float, ...]]] = {
    "locality 2021": (0.423, 0.165, 0.167, 0.121, 0.073),
    "locality 2022": (0.342, 0.144, 0.149, 0.138, 0.112),
}
"""Of the rows that a batch looks up, the share in each bin.

From facebookresearch/dlrm_datasets (MIT), embedding_bag/locality_stats.txt, fbgemm_t856_bs65536_0.pt (856
tables, 468,084,223 lookups of 61,644,628 rows), and embedding_bag/2022/locality_stats.txt,
fbgemm_t788_bs131072_0.pt (788 tables, 1,405,163,864 lookups of 110,259,238 rows).
"""
CLOSE: Final = 0.02
"""Of a bin's share, how far the law may be from it."""

_RATES: Final = np.geomspace(1e-9, 1e4, 20_001)


@dataclass(frozen=True)
class Law:
    """How rates are spread.

    Attributes:
        alpha: Of the power law, above 0 and below 1.
        cutoff: See the module.
    """

    alpha: float
    cutoff: float = math.inf

    @property
    def weights(self) -> Floats:
        """Rows at each of `_RATES`, in proportion."""
        return _RATES**-self.alpha * np.exp(-_RATES / self.cutoff)


@dataclass(frozen=True)
class Pattern:
    """A pattern of access.

    Attributes:
        name: Of it.
        law: Of its rates.
    """

    name: str
    law: Law

    @property
    def least(self) -> int:
        """Which of `_RATES` is the least, so that 52 % of the rows are touched in 11 intervals."""
        return int(np.argmax(self._shares(LONG) >= TOUCHED))

    def share(self, intervals: float) -> float:
        """The part of all rows that is touched within a number of intervals."""
        return float(self._shares(intervals)[self.least])

    def changed(self, rows: int, intervals: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        """Rows of a table that each interval changes, ascending."""
        first = self.least
        heaped = np.cumsum(self.law.weights[first:])
        places = (np.arange(rows) + 0.5) / rows * heaped[-1]
        rates = rng.permutation(np.exp(np.interp(places, heaped, np.log(_RATES[first:]))))
        odds = -np.expm1(-rates)
        return [np.flatnonzero(rng.random(rows) < odds) for _ in range(intervals)]

    def _shares(self, intervals: float) -> Floats:
        """The same as `share`, if each of `_RATES` were the least."""
        weights = self.law.weights
        touched = weights * -np.expm1(-intervals * _RATES)
        return np.cumsum(touched[::-1])[::-1] / np.cumsum(weights[::-1])[::-1]


def published() -> Pattern:
    """The pattern that is calibrated on the paper."""
    low, high = 0.01, 0.99  # the faster touched rows grow, the fewer of the 52 % are one interval's
    for _ in range(40):
        middle = (low + high) / 2
        if Pattern("", Law(middle)).share(1) > CHANGED:
            low = middle
        else:
            high = middle
    return Pattern("published", Law(low))


def recorded(name: str) -> Pattern:
    """A pattern that is calibrated on recorded batches, by least squares.

    Args:
        name: One of `LOCALITY`.

    Raises:
        WrongResult: No such law is like what was recorded.
    """
    alphas = np.linspace(0.005, 0.995, 199)[:, None]
    inverses = np.geomspace(1e-5, 1, 101)[None, :]
    found = np.stack(list(binned(alphas, inverses)))
    seen = np.array([*LOCALITY[name], 1 - sum(LOCALITY[name])])[:, None, None]
    best = np.unravel_index(np.argmin(((found - seen) ** 2).sum(0)), found.shape[1:])
    off = float(np.abs(found - seen)[:, best[0], best[1]].max())
    if off > CLOSE:
        raise WrongResult(f"{name}: a bin's share is off by {off:.3f}, and not by {CLOSE} at most")
    return Pattern(name, Law(float(alphas[best[0], 0]), 1 / float(inverses[0, best[1]])))


def binned(alpha: Floats, inverse: Floats) -> Iterator[Floats]:
    """Of the rows that one interval touches, the share in each bin of `MULTIPLICITIES`, and above.

    Args:
        alpha: Of the law.
        inverse: 1 / cutoff, of a shape that goes with it.
    """
    share = alpha * (1 + inverse) ** (alpha - 1) / ((1 + inverse) ** alpha - inverse**alpha)
    rest, count = np.ones_like(share), 0
    for end in MULTIPLICITIES:
        of_bin = np.zeros_like(share)
        while count < end:
            count += 1
            of_bin = of_bin + share
            share = share * (count - alpha) / ((count + 1) * (1 + inverse))
        rest = rest - of_bin
        yield of_bin
    yield rest


def patterns() -> list[Pattern]:
    """All of them.

    Raises:
        WrongResult: See `recorded`.
    """
    return [published(), *map(recorded, LOCALITY)]
