"""The cost of a code for a job, and the losses that it survives: the arithmetic of `ecemb plan`.

Owns: the formulas for recovery time and the chance of loss. They are pure first-order arithmetic over a
`Job`, derived here unless marked otherwise; bench/ compares them with simulated events, and simulates with
them. The time and the memory of steps are those of `ecemb.tools.window_cost`.

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
from ..coding.placement import Placement, fitting_codes
from ..errors import PlacementError
from ..net.wording import counted
from .job import Job
from .window_cost import WindowCost, cost_of

MONTH_H = 730.5
"""A twelfth of 365.25 days."""
FIRST_READ_BYTES_PER_S = 1.2e9
"""First reads of an arena's mapped pages by a new process, with one thread (measured: tmpfs, pages of 4 KiB,
processor time; 0.7 GB/s on a busy machine)."""
COPY_BYTES_PER_S = 8.1e9
"""A plain copy by one thread to a buffer of 16 MiB (measured in the same run)."""
PUT_BYTES_PER_S = 4.6e9
"""A rank's tables put back from an arena that its process has just attached: one thread reads the file
(docs/results/host.md; 6.9 by two threads, and never measured on a host whose ranks all do it)."""
ALLOCATE_BYTES_PER_S = 4.3e9
"""`posix_fallocate` of one rank's new arena on tmpfs (docs/results/host.md)."""
ALLOCATE_TOGETHER = 1.87
"""Two ranks of a host that allocate at the same time, over one (docs/results/host.md). More than two were not
measured, and count as two."""
REBUILD_BYTES_PER_S = 0.66e9
"""Lost memory that a replacement rank gets back, by its one thread (docs/results/recovery.md: 0.5 to 0.66
GB/s on two processors that four ranks keep busy; it was never measured where each rank has its own)."""
BURST_SIZES = {2: 39 / 56, 3: 9 / 56, 4: 3 / 56, 5: 2 / 56, 6: 1 / 56, 9: 1 / 56, 14: 1 / 56}
"""Number of hosts that fail together -> share of such failures; from the same trace."""
CODES = (Code(2, 1), Code(3, 1), Code(4, 3), Code(8, 7), Code(6, 4), Code(10, 8), Code(8, 5))
"""The codes that are compared by default."""
_SHOWN_CODES = 4


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
        window: The cost of the job's windows.
        memory_bytes: Host memory of a rank beyond its tables, or beside those on a GPU: the sum over
            `window.memory_bytes`.
        memory_over_tables: The same, divided by the bytes of the rank's tables.
        process_recovery_s: Seconds from the death of a process until training continues.
        host_recovery_s: Seconds from the death of a host until training continues.
        time_lost: Part of all time that protection, recoveries and replays take; see `time_lost`.
        loss_per_month_alone: Probability that hosts lost one at a time exceed the code within a month.
        loss_per_month_bursts: The same for several hosts lost at once.
        loss_per_month: The same for both.
    """

    n: int
    k: int
    spread: str
    survives: int
    window: WindowCost
    memory_bytes: float
    memory_over_tables: float
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


def estimate(job: Job, code: Code, spread: str = "host") -> Estimate:
    """Computes the estimate of one code.

    - time and memory of steps: `ecemb.tools.window_cost`.
    - recovery: see `after_process` and `after_host`.
    - probability of loss: hosts are lost at the job's rate, one or several at once. A host that is lost
      before the rebuild ends adds to them, and the rebuild starts over (`Odds.episode`). In a month, 1 -
      exp(-losses). Several hosts lost during one rebuild count as one loss.

    Raises:
        PlacementError: The code doesn't fit; names codes that do.
    """
    placement, hosts = placed(job, code, spread)
    odds = Odds(placement, hosts, job.rack_hosts)
    window = cost_of(job, code)
    memory_bytes = sum(window.memory_bytes.values())
    host_s = host_recovery_s(job, code)
    alone, bursts = losses_per_month(job, odds, host_s / 3600)
    return Estimate(
        n=code.n,
        k=code.k,
        spread=spread,
        survives=code.r if spread != "rank" or placement.spread(hosts) else 0,
        window=window,
        memory_bytes=memory_bytes,
        memory_over_tables=memory_bytes / (job.table_bytes / job.ranks),
        process_recovery_s=sum(after_process(job, window).values()),
        host_recovery_s=host_s,
        time_lost=time_lost(job, code, window),
        loss_per_month_alone=-math.expm1(-alone),
        loss_per_month_bursts=-math.expm1(-bursts),
        loss_per_month=-math.expm1(-alone - bursts),
    )


def time_lost(job: Job, code: Code, window: WindowCost) -> float:
    """The part of all time that isn't training: what protection adds to steps, recoveries, and replays."""
    again_s = window.replayed_steps * job.step_s * (1 + window.overhead)
    faults = job.process_faults_per_h, job.host_faults_per_h
    downs_s = sum(after_process(job, window).values()) + again_s, host_recovery_s(job, code) + again_s
    down = sum(rate * down_s / 3600 for rate, down_s in zip(faults, downs_s, strict=True))
    return 1 - max(0.0, 1 - down) / (1 + window.overhead)


def after_process(job: Job, window: WindowCost) -> dict[str, float]:
    """Part -> seconds, from a process's death until all ranks train again.

    A restart; the undo of the open window, from journals whose pages the new processes map and read for the
    first time; and tables go back to GPUs whole, all ranks' at once, each at the speed of one thread. The
    steps that run again are not in it.
    """
    undo_s = window.changed_bytes * (1 / FIRST_READ_BYTES_PER_S + 1 / COPY_BYTES_PER_S)
    parts = {"restart": job.restart_s, "undo": undo_s}
    if job.device == "cuda":
        parts["tables to the GPUs"] = job.rank_rows * job.record_bytes / PUT_BYTES_PER_S
    return parts


def after_host(job: Job, code: Code) -> dict[str, float]:
    """Part -> seconds, until a lost host's memory is rebuilt on another host and all ranks train.

    The replacement of the host, a restart, the allocation of its arenas by all ranks at once, and the
    transfer of its tables and parity, each byte once (see `ecemb.recovery.relay`), at `rebuild_over_network`
    of the network's speed or as fast as each rank's thread is. Tables go back to GPUs meanwhile, as in
    `after_process`.
    """
    rank_bytes = job.table_bytes / job.ranks
    lost_bytes = rank_bytes * (1 + code.r / code.k)
    network_bytes_per_s = job.network_bytes_per_s * job.rebuild_over_network / job.ranks_per_host
    rebuild_s = lost_bytes / min(network_bytes_per_s, REBUILD_BYTES_PER_S)
    if job.device == "cuda":
        rebuild_s = max(rebuild_s, rank_bytes / PUT_BYTES_PER_S)
    allocate_bytes_per_s = ALLOCATE_BYTES_PER_S * (ALLOCATE_TOGETHER if job.ranks_per_host > 1 else 1)
    return {
        "another host": job.replace_s,
        "restart": job.restart_s,
        "allocation": lost_bytes * job.ranks_per_host / allocate_bytes_per_s,
        "rebuild": rebuild_s,
    }


def host_recovery_s(job: Job, code: Code) -> float:
    """The sum of `after_host`."""
    return sum(after_host(job, code).values())


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
