"""The chance that lost hosts take more than parity gives back, for the placement as it is.

Owns: which sets of hosts are too many, and how likely a draw of them is. All from `Placement.positions`;
tests hold it against `Placement.tolerates`.

Stripes are n consecutive positions of the ring, so hosts break one exactly when r + 1 of their positions lie
within n consecutive ones. All sets are counted where they are few, else they are drawn (with a fixed seed).

Knows nothing of: bytes, time beyond the length of a recovery, processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import combinations
from math import comb, exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PlacementError
from .placement import Placement

Hosts = NDArray[np.int64]

TRIALS = 5000
"""Sets that are counted or drawn, at most: drawn, a chance of 10 % comes out within 5 % of itself."""
LITTLE = 1e-3
"""What can add no more than this part to a chance is not worked out."""
RARE = 0.01
"""Below it, the chance of more than r + 1 hosts is that of any of their (r + 1)-subsets; nothing is drawn."""
MOST_SETS = 1 << 20
"""More places than that for r + 1 hosts are all taken to be different, which is a bound from above."""
FOLLOWING = 3
"""Hosts that may be lost one after the other while one recovery lasts; the chance of more is neglected."""


class Odds:
    """Chances of loss under one placement.

    Args:
        placement: Who keeps whose parity.
        hosts: Rank -> the host that it is on, 0 .. H-1, as many ranks on each. Hosts are what is lost.
        rack_hosts: Hosts in a rack: host h is in rack h // rack_hosts. 0 for all in one.

    Attributes:
        count: The number of hosts, H.

    Raises:
        PlacementError: Not one host for each rank, or not as many ranks on each, or a negative rack.
    """

    def __init__(self, placement: Placement, hosts: Sequence[int], rack_hosts: int = 0) -> None:
        self._placement = placement
        self._spread = placement.spread(hosts)
        self.count: int = max(hosts) + 1
        held = np.bincount(np.asarray(hosts), minlength=self.count)
        if held.min() != held.max():
            raise PlacementError(
                f"the chance of loss is worked out for as many ranks on each host; they hold {held.min()} to "
                f"{held.max()}: give it the most that one holds, for all"
            )
        if rack_hosts < 0:
            raise PlacementError(f"rack_hosts counts the hosts of a rack, 0 for no racks; it is {rack_hosts}")
        self._rack_hosts = min(rack_hosts or self.count, self.count)
        by_host = np.argsort(np.asarray(hosts), kind="stable")
        positions = np.asarray(placement.positions, np.int64)[by_host].reshape(self.count, -1)
        self._positions, self._ring = _folded(positions, placement.n)
        self._chance = cache(self._drawn_or_counted)

    def broken(self, lost: Hosts) -> NDArray[Any]:
        """Whether each set of lost hosts takes more than r blocks of a stripe.

        Args:
            lost: int64 [sets, j], j different hosts in each row; read.

        Returns:
            bool [sets]; new.
        """
        r, n = self._placement.r, self._placement.n
        taken = np.sort(self._positions[lost].reshape(len(lost), -1), axis=1)
        if taken.shape[1] <= r:
            return np.zeros(len(lost), np.bool_)
        around = np.concatenate((taken, taken[:, :r] + self._ring), axis=1)
        return np.any(around[:, r:] - taken < n, axis=1)

    def chance(self, lost: int, following: int = 0, *, one_rack: bool = False) -> float:
        """The chance that so many lost hosts are too many.

        Args:
            lost: Hosts that are lost at once, all hosts alike; with `one_rack`, all of one rack, which
                loses no more than it has.
            following: Other hosts, anywhere, lost before those are rebuilt.
            one_rack: See `lost`.
        """
        one_rack = one_rack and self._rack_hosts < self.count
        lost = min(lost, self._rack_hosts if one_rack else self.count)
        return self._chance(lost, min(following, self.count - lost), one_rack)

    def episode(self, lost: int, again: float, *, one_rack: bool = False) -> float:
        """The chance that data is lost before all is rebuilt, when each further loss starts the rebuild over.

        With q(j) the chance for j of H hosts, and p that one of all H is lost in time, p(j) = p (1 - j/H) /
        (1 - p j/H) is the chance that one is lost that was not yet (derived). Then it is
        q(j) + p(j) (q(j+1) - q(j)) + p(j) p(j+1) (q(j+2) - q(j+1)) + ...

        Args:
            lost: Hosts that are lost first, at once.
            again: p.
            one_rack: As in `chance`.
        """
        total, before, reached = 0.0, 0.0, 1.0
        for following in range(FOLLOWING + 1):
            now = max(before, self.chance(lost, following, one_rack=one_rack))
            total += reached * (now - before)
            before = now
            part = min(1.0, (lost + following) / self.count)
            reached *= again * (1 - part) / (1 - again * part) if part < 1 else 0.0
            if reached * (1 - before) <= LITTLE * total:
                break
        return total

    def _drawn_or_counted(self, lost: int, following: int, one_rack: bool) -> float:
        together, r = lost + following, self._placement.r
        if self._spread and together <= r:
            return 0.0
        if together > 1 and not self._spread and self.chance(1) == 1:
            return 1.0
        if (
            one_rack
            and not following
            and (self.count // self._rack_hosts) * comb(self._rack_hosts, lost) <= TRIALS
        ):
            return self._counted(lost, self._rack_hosts)
        if not one_rack and comb(self.count, together) <= TRIALS:
            return self._counted(together, self.count)
        if self._spread and not one_rack:
            least = self._least
            expected = comb(together, r + 1) * least
            if together == r + 1:
                return least
            if expected < RARE:
                return 1 - exp(-expected)
        rng = np.random.default_rng((together, lost, one_rack))
        return float(self.broken(self._draw(rng, lost, following, one_rack)).mean())

    def _counted(self, lost: int, size: int) -> float:
        """Of all sets of so many hosts out of one of the groups of `size`, the part that is too many."""
        one = np.array(list(combinations(range(size), lost)), np.int64)
        groups = range(0, self.count - size + 1, size)
        return float(self.broken(np.concatenate([one + first for first in groups])).mean())

    @cached_property
    def _least(self) -> float:
        """The chance for r + 1 hosts: the sets of them that lie within n positions, over all sets.

        A set begins at one of the ring's positions and has its r others within the n - 1 that follow. On a
        ring shorter than 2n - 1, or where hosts have several positions, it may begin in several places.
        """
        r, n, ring = self._placement.r, self._placement.n, self._ring
        places = ring * comb(n - 1, r)
        if (ring > self.count or ring < 2 * n - 1) and places <= MOST_SETS:
            host = np.empty(ring, np.int64)
            host[self._positions] = np.arange(self.count)[:, None]
            first = np.arange(ring)[:, None]
            inside = np.array(list(combinations(range(1, n), r)), np.int64)
            taken = np.concatenate([np.hstack((first, first + offsets)) for offsets in inside]) % ring
            places = len(np.unique(np.sort(host[taken], axis=1), axis=0))
        return min(1.0, places / comb(self.count, r + 1))

    def _draw(self, rng: np.random.Generator, lost: int, following: int, one_rack: bool) -> Hosts:
        """int64 [TRIALS, lost + following], all different in a row."""
        size = self._rack_hosts if one_rack else self.count
        found: list[Hosts] = []
        missing = TRIALS
        while missing:
            drawn = different(rng, missing, lost, size)
            if one_rack:
                drawn += self._rack_hosts * rng.integers(self.count // size, size=(missing, 1))
            more = rng.integers(self.count, size=(missing, following))
            drawn = np.hstack((drawn, more))
            ordered = np.sort(drawn, axis=1)
            found.append(drawn[(ordered[:, 1:] != ordered[:, :-1]).all(axis=1)])
            missing -= len(found[-1])
        return np.concatenate(found)


def different(rng: np.random.Generator, sets: int, size: int, count: int) -> Hosts:
    """Draws sets of different numbers below `count`, all sets alike.

    Args:
        rng: Consumed.
        sets: How many.
        size: Numbers in each; at most `count`.
        count: Of numbers.

    Returns:
        int64 [sets, size]; new.
    """
    if size * size <= count:  # few repeat a number: draw those again
        drawn = rng.integers(count, size=(sets, size))
        ordered = np.sort(drawn, axis=1)
        again = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
        if again.any():
            drawn[again] = different(rng, int(again.sum()), size, count)
        return drawn
    found = np.empty((sets, size), np.int64)
    at_once = max(1, (1 << 22) // count)
    for begin in range(0, sets, at_once):
        keys = rng.random((min(at_once, sets - begin), count))
        found[begin : begin + at_once] = np.argsort(keys, axis=1)[:, :size]
    return found


def _folded(positions: Hosts, n: int) -> tuple[Hosts, int]:
    """The positions of each host and the ring's length: one position each, where the ring repeats the hosts.

    Of equal hosts, placed round-robin, the j-th ranks lie in the same order for all j: stripes that have no
    host twice see a ring of hosts.
    """
    count, each = positions.shape
    if n <= count and (positions % count == positions[:, :1] % count).all():
        return positions[:, :1] % count, count
    return positions, count * each
