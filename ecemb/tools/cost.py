"""The cost of a code for a job, and the losses that it survives: the arithmetic of `ecemb plan`.

Owns: the formulas for memory, bytes per step, overhead, recovery time and the chance of loss. They are pure
first-order arithmetic over a `Job`, derived here unless marked otherwise; bench/ compares them with simulated
events.

Owns as well the probability that lost hosts exceed the parity of a placement: the sets of hosts whose loss is
not tolerated, and the hosts that a burst takes. Both follow from `Placement.positions`; tests compare them
with `Placement.tolerates`.

Stripes are n consecutive positions of the ring, so a set of hosts breaks a stripe exactly when r + 1 of their
positions lie within n consecutive ones. Few sets are counted exactly; many are sampled (with a fixed seed).

Knows nothing of: running jobs, torch, files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from math import comb, exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..coding.code import Code
from ..coding.placement import HOST_FAULTS_PER_DAY, HOST_SHARE, Placement, fitting_codes
from ..errors import ConfigurationError, PlacementError
from ..net.wording import counted

MONTH_H = 730.5
"""A twelfth of 365.25 days."""
BURST_SHARE = 56 / 483
"""The part of host failures in which several hosts fail within 10 minutes, in InfiniteHBD's trace."""
BURST_SIZES = {2: 39 / 56, 3: 9 / 56, 4: 3 / 56, 5: 2 / 56, 6: 1 / 56, 9: 1 / 56, 14: 1 / 56}
"""Number of hosts that fail together -> share of such failures; from the same trace."""
ROW_HEAD_BYTES = 8
"""The bytes of a row's number in a delta."""
CODES = (Code(2, 1), Code(3, 1), Code(4, 3), Code(8, 7), Code(6, 4), Code(10, 8), Code(8, 5))
"""The codes that are compared by default."""
_SHOWN_CODES = 4
MOST_RANKS = 1 << 20
"""Most ranks of a job: the computation for more would take minutes."""
SPARE = 1.25
"""Journals and inbox grow by a quarter at a time (`Arena.reserve`)."""


@dataclass(frozen=True)
class Job:
    """A training job, and the machines that it runs on.

    Attributes:
        hosts: Number of machines.
        ranks_per_host: Number of ranks on each host.
        table_bytes: Bytes of all tables on all ranks, with optimizer state.
        touched_rows: Rows of a rank's shard that a step changes.
        row_bytes: Bytes of one row, with optimizer state; records are padded to words of 8 bytes.
        step_s: Seconds of a step without protection.
        network_bytes_per_s: Speed of a host's network, each way.
        memory_bytes_per_s: Speed of a rank's memory while it gathers rows and updates parity (chosen).
        latency_s: Seconds of a small message between two ranks (chosen).
        restart_s: Seconds from a process's death until all processes train again, without data to move
            (chosen).
        replace_s: Seconds until another host replaces a lost one (chosen).
        rebuild_over_network: Part of the network's speed that a rebuild reaches (docs/results/recovery.md).
        mtbf_h: Hours between faults of any kind in the whole job; None for the published rates.
        host_share: Part of those faults that lose a host's memory.
        burst_share: Part of host faults that lose several hosts at once, in numbers from `BURST_SIZES`.
        rack_hosts: Number of hosts in a rack; a burst takes its hosts from one rack, and those that one rack
            doesn't have from the next (`RackBursts`). With 0, a burst takes any hosts.
        dense_bytes: Bytes of replicated state: dense parameters and their optimizer's state.

    Raises:
        ConfigurationError: There are too many ranks.
    """

    hosts: int
    ranks_per_host: int
    table_bytes: float
    touched_rows: float
    row_bytes: float
    step_s: float
    network_bytes_per_s: float
    memory_bytes_per_s: float = 5e9
    latency_s: float = 5e-5
    restart_s: float = 30.0
    replace_s: float = 120.0
    rebuild_over_network: float = 0.45
    mtbf_h: float | None = None
    host_share: float = HOST_SHARE
    burst_share: float = BURST_SHARE
    rack_hosts: int = 0
    dense_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks > MOST_RANKS:
            raise ConfigurationError(
                f"a job can have at most {MOST_RANKS:,} ranks, since the placement of each rank is computed; "
                f"{self.hosts:,} hosts with {self.ranks_per_host:,} ranks on each are {self.ranks:,}"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def record_bytes(self) -> float:
        """Bytes of one row as it is journaled and sent."""
        return 8 * math.ceil(self.row_bytes / 8)

    @property
    def host_faults_per_h(self) -> float:
        """Rate at which hosts lose their memory, one at a time or several."""
        if self.mtbf_h is None:
            return self.hosts * HOST_FAULTS_PER_DAY / 24
        return self.host_share / self.mtbf_h

    @property
    def process_faults_per_h(self) -> float:
        """Rate at which a process dies while its host stays up."""
        if self.mtbf_h is None:
            return self.host_faults_per_h * (1 - HOST_SHARE) / HOST_SHARE
        return (1 - self.host_share) / self.mtbf_h

    def host_of_ranks(self, *, racks_in_turn: bool = False) -> list[int]:
        """Rank -> its host. Host h is in rack h // rack_hosts.

        Args:
            racks_in_turn: Consecutive hosts are in different racks, in turn; otherwise rack by rack.
        """
        hosts = list(range(self.hosts))
        if racks_in_turn:
            hosts.sort(key=lambda host: (host % self.rack_hosts, host // self.rack_hosts))
        return [host for host in hosts for _ in range(self.ranks_per_host)]


@dataclass(frozen=True)
class Estimate:
    """The cost of one code for a job, and the losses that it survives.

    Attributes:
        n: Blocks in a stripe.
        k: Data blocks among them.
        spread: "rank", "host" or "rack": the failure domains; every stripe is in n different ones. See
            `placed`.
        survives: Any this many failure domains may be lost at once, but 0 if they are ranks that share
            hosts: then any n - k ranks may be lost, but no host.
        memory_bytes: Memory of a rank beyond its tables: parity, journals, inbox, replicated state.
        memory_over_tables: The same, divided by the bytes of the rank's tables.
        step_bytes: Bytes of deltas that a rank sends in a step; messages have a sixteenth of room to spare.
        overhead: Additional part of a step's time, without `window` and `overlap`.
        process_recovery_s: Seconds from the death of a process until training continues.
        host_recovery_s: Seconds from the death of a host until training continues.
        time_lost: Part of all time that recoveries take.
        loss_per_month_alone: Probability that hosts lost one at a time exceed the code within a month.
        loss_per_month_bursts: The same for several hosts lost at once.
        loss_per_month: The same for both.
    """

    n: int
    k: int
    spread: str
    survives: int
    memory_bytes: float
    memory_over_tables: float
    step_bytes: float
    overhead: float
    process_recovery_s: float
    host_recovery_s: float
    time_lost: float
    loss_per_month_alone: float
    loss_per_month_bursts: float
    loss_per_month: float


def placed(job: Job, code: Code, spread: str) -> tuple[Placement, list[int]]:
    """Returns the placement of parity, and rank -> host.

    Args:
        job: The job.
        code: The code.
        spread: "rank" is `failure_domain="rank"`, ranks on hosts rack by rack. "host" is
            `failure_domain="host"`, for the same ranks. "rack" is `failure_domain="host"` with ranks on hosts
            of each rack in turn, in a job with racks: positions on the ring follow the order of ranks.

    Raises:
        PlacementError: The code doesn't fit; names codes that do.
    """
    hosts = job.host_of_ranks(racks_in_turn=spread == "rack")
    if spread == "rank":
        return Placement.ranks(code.n, code.k, job.ranks), hosts
    placement = Placement.plan(code.n, code.k, hosts)
    if spread == "rack" and not placement.spread([host // job.rack_hosts for host in hosts]):
        raise PlacementError(
            f"code ({code.n}, {code.k}) needs {code.n} or more racks, with equally many hosts in each, for "
            f"the {code.n} blocks of a stripe; the job has {job.hosts} hosts in racks of {job.rack_hosts}"
        )
    return placement, hosts


def message_rounds(ranks: int) -> int:
    """Messages of a step that wait for each other: status and vote, ceil(log2 N) each; sizes; deltas."""
    return 2 * (ranks - 1).bit_length() + 2


def estimate(job: Job, code: Code, spread: str = "host") -> Estimate:
    """Computes the estimate of one code.

    - memory: r/k of the tables for parity; journals and inbox hold a step's rows and their numbers 1 + r
      times, and reserve up to `SPARE` times that; replicated state is in one slice per rank, and each rank
      has two copies of r + 1 slices.
    - bytes: each touched row goes to r keepers, with its number.
    - overhead: those bytes over the rank's part of its host's network; memory traffic of 5 times the touched
      rows and 3 times the bytes that keepers receive; and `message_rounds` messages, one after the other.
      Nothing overlaps. The wait for slower ranks is not included; where ranks share cores, it is the largest
      part (docs/performance.md).
    - recovery: a restart; for a host also its replacement, and the transfer of its tables and parity, each
      byte once (see `ecemb.recovery.relay`), at `rebuild_over_network` of the network's speed.
    - probability of loss: hosts are lost at the job's rate, one or several at once. A host that is lost
      before the rebuild ends adds to them, and the rebuild starts over (`Odds.episode`). In a month, 1 -
      exp(-losses). Several hosts lost during one rebuild count as one loss.

    Raises:
        PlacementError: The code doesn't fit; names codes that do.
    """
    placement, hosts = placed(job, code, spread)
    odds = Odds(placement, hosts, job.rack_hosts)
    rank_bytes = job.table_bytes / job.ranks
    touched = job.touched_rows * job.record_bytes
    named = job.touched_rows * (job.record_bytes + ROW_HEAD_BYTES)
    step_bytes = code.r * named
    buffers = SPARE * (1 + code.r) * named
    dense_bytes = 2 * job.dense_bytes * (code.r + 1) / job.ranks
    memory_bytes = rank_bytes * code.r / code.k + buffers + dense_bytes
    step_s = (
        step_bytes * job.ranks_per_host / job.network_bytes_per_s
        + (5 + 3 * code.r) * touched / job.memory_bytes_per_s
        + message_rounds(job.ranks) * job.latency_s
    )
    host_s = host_recovery_s(job, code)
    alone, bursts = losses_per_month(job, odds, host_s / 3600)
    return Estimate(
        n=code.n,
        k=code.k,
        spread=spread,
        survives=code.r if spread != "rank" or placement.spread(hosts) else 0,
        memory_bytes=memory_bytes,
        memory_over_tables=memory_bytes / rank_bytes,
        step_bytes=step_bytes,
        overhead=step_s / job.step_s,
        process_recovery_s=job.restart_s,
        host_recovery_s=host_s,
        time_lost=(job.process_faults_per_h * job.restart_s + job.host_faults_per_h * host_s) / 3600,
        loss_per_month_alone=-math.expm1(-alone),
        loss_per_month_bursts=-math.expm1(-bursts),
        loss_per_month=-math.expm1(-alone - bursts),
    )


def host_recovery_s(job: Job, code: Code) -> float:
    """Seconds until a lost host's memory is rebuilt on another host and all ranks train; see `estimate`."""
    lost_bytes = job.table_bytes / job.hosts * (1 + code.r / code.k)
    rebuild_s = lost_bytes / (job.network_bytes_per_s * job.rebuild_over_network)
    return job.replace_s + job.restart_s + rebuild_s


def losses_per_month(job: Job, odds: Odds, recovery_h: float) -> tuple[float, float]:
    """Data losses per month: by hosts lost one at a time, and by several lost at once; see `estimate`.

    Args:
        job: The job, with its rate of lost hosts.
        odds: Probabilities of loss under the placement.
        recovery_h: Hours of a recovery, in which another loss adds to the first.
    """
    faults = job.host_faults_per_h * MONTH_H
    again = -math.expm1(-job.host_faults_per_h * recovery_h)
    alone = faults * (1 - job.burst_share) * odds.episode(1, again)
    bursts = sum(
        faults * job.burst_share * share * odds.episode(size, again, by_rack=True)
        for size, share in BURST_SIZES.items()
    )
    return alone, bursts


def compare(job: Job, codes: Sequence[Code] = ()) -> tuple[list[Estimate], dict[str, str]]:
    """Estimates codes, spread over hosts and, if there are any, over racks; over ranks on a single host.

    Args:
        job: The job.
        codes: The codes; by default those of `CODES` that fit.

    Returns:
        The estimates; and for each code that doesn't fit, its name -> the reason.

    Raises:
        PlacementError: No code fits.
    """
    found: list[Estimate] = []
    refused: dict[str, str] = {}
    spreads = ("host", "rack") if job.rack_hosts else ("host",)
    if job.hosts == 1:
        spreads = ("rank",)
    for code in codes or CODES:
        for spread in spreads:
            try:
                found.append(estimate(job, code, spread))
            except PlacementError as error:
                refused[f"({code.n}, {code.k}) over {spread}s"] = str(error)
    if not found:
        alone = job.hosts == 1
        domains = range(job.ranks) if alone else job.host_of_ranks()
        fitting = [str(code) for code in fitting_codes(domains)[:_SHOWN_CODES]]
        raise PlacementError(
            f"none of these codes fits {counted(job.hosts, 'host')} with "
            f"{counted(job.ranks_per_host, 'rank')}{'' if alone else ' on each'}; "
            + (f"these do: {', '.join(fitting)}" if fitting else "parity needs at least 2 ranks")
        )
    return found, refused


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
"""Most places for r + 1 hosts that are compared; if there are more, all count as different (upper bound)."""
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
    """

    def __init__(self, placement: Placement, hosts: Sequence[int], rack_hosts: int = 0) -> None:
        self._placement = placement
        self._spread = placement.spread(hosts)
        self.count: int = max(hosts) + 1
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
