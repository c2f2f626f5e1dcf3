"""The probability that lost hosts exceed the parity of a placement.

Owns: the sets of hosts whose loss is not tolerated, and their probability. Both follow from
`Placement.positions`; tests compare them with `Placement.tolerates`. And the hosts that a burst takes.

Stripes are n consecutive positions of the ring, so a set of hosts breaks a stripe exactly when r + 1 of their
positions lie within n consecutive ones. Few sets are counted exactly; many are sampled (with a fixed seed).

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

from ..coding.placement import Placement
from ..errors import PlacementError

Hosts = NDArray[np.int64]

TRIALS = 5000
"""Most sets that are counted, and the number of samples: a sampled probability of 10 % is within 5 % of
itself."""
LITTLE = 1e-3
"""Terms below this part of a probability are neglected."""
RARE = 0.01
"""Below this, the probability for more than r + 1 hosts is the sum over their (r + 1)-subsets, without
samples."""
MOST_SETS = 1 << 20
"""More places than this for r + 1 hosts all count as different, which is an upper bound."""
FOLLOWING = 3
"""Most hosts that are lost one after another during one recovery; the probability of more is neglected."""


class Odds:
    """Probabilities of data loss under one placement.

    Args:
        placement: The placement of parity.
        hosts: Rank -> its host, 0 .. H-1, with equally many ranks on each. Losses are losses of hosts.
        rack_hosts: Hosts in a rack: host h is in rack h // rack_hosts. 0 for one rack.

    Attributes:
        count: The number of hosts, H.

    Raises:
        PlacementError: `hosts` has other than one host for each rank, or hosts have different numbers of
            ranks, or `rack_hosts` is negative.
    """

    def __init__(self, placement: Placement, hosts: Sequence[int], rack_hosts: int = 0) -> None:
        self._placement = placement
        self._spread = placement.spread(hosts)
        self.count: int = max(hosts) + 1
        held = np.bincount(np.asarray(hosts), minlength=self.count)
        if held.min() != held.max():
            raise PlacementError(
                f"the probability of loss is computed for equally many ranks on each host; hosts have "
                f"{held.min()} to {held.max()} ranks: use the largest number for all hosts"
            )
        if rack_hosts < 0:
            raise PlacementError(
                f"rack_hosts is the number of hosts in a rack, or 0 without racks; it is {rack_hosts}"
            )
        self._rack_hosts = min(rack_hosts or self.count, self.count)
        by_host = np.argsort(np.asarray(hosts), kind="stable")
        positions = np.asarray(placement.positions, np.int64)[by_host].reshape(self.count, -1)
        self._positions, self._ring = _folded(positions, placement.n)
        self._chance = cache(self._drawn_or_counted)

    def broken(self, lost: Hosts) -> NDArray[Any]:
        """Whether each set of lost hosts holds more than r blocks of a stripe.

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

    def chance(self, lost: int, following: int = 0, *, by_rack: bool = False) -> float:
        """The probability that the loss of `lost` + `following` hosts is not tolerated.

        Args:
            lost: Number of hosts lost at once, drawn uniformly; with `by_rack`, as `RackBursts` has them.
            following: Number of other hosts, from any rack, lost before the first ones are rebuilt.
            by_rack: See `lost`.
        """
        by_rack = by_rack and self._rack_hosts < self.count
        lost = min(lost, self.count)
        return self._chance(lost, min(following, self.count - lost), by_rack)

    def episode(self, lost: int, again: float, *, by_rack: bool = False) -> float:
        """The probability that data is lost before the rebuild ends, if each further loss restarts it.

        Let q(j) be the probability of data loss for j of H hosts, and p that any of the H hosts is lost
        during a rebuild. Then p(j) = p (1 - j/H) / (1 - p j/H) is the probability that a further host is lost
        (derived), and the result is q(j) + p(j) (q(j+1) - q(j)) + p(j) p(j+1) (q(j+2) - q(j+1)) + ...

        Args:
            lost: Number of hosts that are lost first, at once.
            again: p.
            by_rack: As in `chance`.
        """
        total, before, reached = 0.0, 0.0, 1.0
        for following in range(FOLLOWING + 1):
            now = max(before, self.chance(lost, following, by_rack=by_rack))
            total += reached * (now - before)
            before = now
            part = min(1.0, (lost + following) / self.count)
            reached *= again * (1 - part) / (1 - again * part) if part < 1 else 0.0
            if reached * (1 - before) <= LITTLE * total:
                break
        return total

    def _drawn_or_counted(self, lost: int, following: int, by_rack: bool) -> float:
        together, r = lost + following, self._placement.r
        if self._spread and together <= r:
            return 0.0
        if together > 1 and not self._spread and self.chance(1) == 1:
            return 1.0
        bursts = RackBursts(self.count, self._rack_hosts if by_rack else self.count)
        if not (by_rack and following) and bursts.number_of(together) <= TRIALS:
            return float(self.broken(bursts.all_of(together)).mean())
        if self._spread and not by_rack:
            least = self._least
            expected = comb(together, r + 1) * least
            if together == r + 1:
                return least
            if expected < RARE:
                return 1 - exp(-expected)
        rng = np.random.default_rng((together, lost, by_rack))
        return float(self.broken(self._draw(rng, bursts, lost, following)).mean())

    @cached_property
    def _least(self) -> float:
        """The probability for r + 1 hosts: the sets of them within n positions, divided by all sets.

        A set begins at one of the ring's positions and has its r others within the n - 1 that follow. On a
        ring shorter than 2n - 1, or if hosts have several positions, it may begin at several positions.
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

    def _draw(self, rng: np.random.Generator, bursts: RackBursts, lost: int, following: int) -> Hosts:
        """Samples int64 [TRIALS, lost + following] with distinct hosts in each row."""
        found: list[Hosts] = []
        missing = TRIALS
        while missing:
            more = rng.integers(self.count, size=(missing, following))
            drawn = np.hstack((bursts.draw(rng, missing, lost), more))
            ordered = np.sort(drawn, axis=1)
            found.append(drawn[(ordered[:, 1:] != ordered[:, :-1]).all(axis=1)])
            missing -= len(found[-1])
        return np.concatenate(found)


class RackBursts:
    """Sets of hosts that are lost at once: all from one rack, drawn uniformly, or from it and the next ones.

    A burst of more hosts than a rack has takes the whole rack, and the others from the rack after it, and so
    on. After the last host comes host 0. A rack with fewer hosts than the others is
    never the first.

    Args:
        count: The number of hosts, H.
        rack_hosts: Hosts in a rack, at most H. With H, a burst takes any hosts.
    """

    def __init__(self, count: int, rack_hosts: int) -> None:
        self._count, self._rack_hosts = count, rack_hosts

    def number_of(self, lost: int) -> int:
        """The number of sets of `lost` hosts, at most H; some may be equal."""
        whole, size = self._parts(lost)
        return (self._count // self._rack_hosts) * comb(size, lost - whole)

    def all_of(self, lost: int) -> Hosts:
        """All sets of `lost` hosts, int64 [`number_of(lost)`, lost]; new."""
        whole, size = self._parts(lost)
        rest = np.array(list(combinations(range(whole, whole + size), lost - whole)), np.int64)
        one = np.hstack((np.tile(np.arange(whole), (len(rest), 1)), rest))
        first = range(0, self._count - self._rack_hosts + 1, self._rack_hosts)
        return np.concatenate([(one + host) % self._count for host in first])

    def draw(self, rng: np.random.Generator, sets: int, lost: int) -> Hosts:
        """Draws sets of `lost` hosts, at most H, uniformly.

        Args:
            rng: Generator; its state advances.
            sets: Number of sets.
            lost: Hosts in each set.

        Returns:
            int64 [sets, lost]; new.
        """
        whole, size = self._parts(lost)
        rest = whole + different(rng, sets, lost - whole, size)
        drawn = np.hstack((np.tile(np.arange(whole), (sets, 1)), rest))
        racks = self._count // self._rack_hosts
        if racks > 1:
            drawn += self._rack_hosts * rng.integers(racks, size=(sets, 1))
        return drawn % self._count

    def _parts(self, lost: int) -> tuple[int, int]:
        """Hosts of racks that are lost completely, and the number of hosts that the others are taken from."""
        whole = lost // self._rack_hosts * self._rack_hosts
        return whole, max(1, min(self._rack_hosts, self._count - whole))


def different(rng: np.random.Generator, sets: int, size: int, count: int) -> Hosts:
    """Draws sets of distinct numbers below `count`, uniformly.

    Args:
        rng: Generator; its state advances.
        sets: Number of sets.
        size: Numbers in each set; at most `count`.
        count: End of the range of numbers.

    Returns:
        int64 [sets, size]; new.
    """
    if size * size <= count:  # few sets repeat a number: draw those again
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
    """The positions of each host, and the ring's length; one position each if the ring repeats the hosts.

    With equal hosts, placed round-robin, the j-th ranks of the hosts are in the same order for all j, so
    stripes without a repeated host see a ring of hosts.
    """
    count, each = positions.shape
    if n <= count and (positions % count == positions[:, :1] % count).all():
        return positions[:, :1] % count, count
    return positions, count * each
