"""What a code would cost a job, and what it would survive: the arithmetic of `python -m ecemb plan`.

Owns: the formulas for memory, bytes per step, overhead, recovery time and the chance of loss. They are pure
arithmetic over a `Job`, of first order, and derived here unless marked otherwise; `bench.simulate` counts by
the same ones and holds them against events.

Knows nothing of: running jobs, torch, files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from .code import Code
from .errors import ConfigurationError, PlacementError
from .odds import Odds
from .placement import Placement, fitting_codes

MONTH_H = 730.5
"""A twelfth of 365.25 days."""
HOST_FAULTS_PER_DAY = 4.2e-3
"""Of one host: 584 faults of 400 GPU servers in 349 days (published: InfiniteHBD's fault trace, 2025)."""
HOST_SHARE = 0.25
"""Of a job's faults, those that take a host's memory with them: three of four are over when the process is
started again (published: DLRover)."""
BURST_SHARE = 56 / 483
"""Of the times at which hosts fail, those at which several do: within 10 minutes, in InfiniteHBD's trace."""
BURST_SIZES = {2: 39 / 56, 3: 9 / 56, 4: 3 / 56, 5: 2 / 56, 6: 1 / 56, 9: 1 / 56, 14: 1 / 56}
"""Hosts that fail together -> their share of those times; from the same trace."""
ROW_HEAD_BYTES = 8
"""What a delta says besides the row: which one it is."""
MESSAGE_ROUNDS = 3
"""Times that a step waits for the others: heads, deltas, votes."""
CODES = (Code(2, 1), Code(3, 1), Code(4, 3), Code(8, 7), Code(6, 4), Code(10, 8), Code(8, 5))
"""Compared when none are asked for."""
_SHOWN_CODES = 4
MOST, LEAST = 1e18, 1e-9
"""The largest number that is taken, and the smallest of those that aren't 0."""
MOST_RANKS = 1 << 20
"""Of a job: more would take minutes."""
SPARE = 1.25
"""Journals and inbox grow by a quarter when they do (`Arena.reserve`)."""


@dataclass(frozen=True)
class Job:
    """A training, and the machines that it runs on.

    Attributes:
        hosts: Machines.
        ranks_per_host: Ranks on each.
        table_bytes: Of all tables on all ranks, optimizer state included.
        touched_rows: That a rank's shard changes in a step.
        row_bytes: Of one row, optimizer state included; records are padded to whole words of 8.
        step_s: Seconds of a step without protection.
        network_bytes_per_s: Of a host, each way.
        memory_bytes_per_s: Of a rank, when rows are gathered and parity is updated (chosen).
        latency_s: That a round of small messages among all ranks takes (chosen).
        restart_s: From a process's death until all processes train again, with no data to move (chosen).
        replace_s: Until another host has taken a lost one's place (chosen).
        rebuild_over_network: What a rebuild reaches of the network's speed (measured: docs/results.md).
        mtbf_h: Hours between faults of any kind, of the whole job. None for the published rates.
        host_share: Of those faults, the ones that take a host's memory.
        burst_share: Of those, the part in which several hosts go at once, in `BURST_SIZES`.
        rack_hosts: Hosts that share a rack, and that a burst takes its hosts from; 0: a burst takes any.
        dense_bytes: Of what is the same on all ranks: dense parameters, and their optimizer's state.

    Raises:
        ConfigurationError: A number is outside of its range.
    """

    hosts: int
    ranks_per_host: int
    table_bytes: float
    touched_rows: float
    row_bytes: float
    step_s: float
    network_bytes_per_s: float
    memory_bytes_per_s: float = 5e9
    latency_s: float = 2e-4
    restart_s: float = 30.0
    replace_s: float = 120.0
    rebuild_over_network: float = 0.45
    mtbf_h: float | None = None
    host_share: float = HOST_SHARE
    burst_share: float = BURST_SHARE
    rack_hosts: int = 0
    dense_bytes: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = bounds(field.name)
            if value is not None and not low <= value <= high:
                raise ConfigurationError(
                    f"a job's {field.name} is a number from {low:g} to {high:g}; it is {value}"
                )
        if self.ranks > MOST_RANKS:
            raise ConfigurationError(
                f"a job has at most {MOST_RANKS:,} ranks here, whose placement is worked out one by one; "
                f"{self.hosts:,} hosts with {self.ranks_per_host:,} ranks on each are {self.ranks:,}"
            )

    @property
    def ranks(self) -> int:
        """On all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def record_bytes(self) -> float:
        """Of one row as it is journaled and sent."""
        return 8 * math.ceil(self.row_bytes / 8)

    @property
    def host_faults_per_h(self) -> float:
        """How often some host's memory is lost, alone or with others'."""
        if self.mtbf_h is None:
            return self.hosts * HOST_FAULTS_PER_DAY / 24
        return self.host_share / self.mtbf_h

    @property
    def process_faults_per_h(self) -> float:
        """How often a process dies and its host stays up."""
        if self.mtbf_h is None:
            return self.host_faults_per_h * (1 - HOST_SHARE) / HOST_SHARE
        return (1 - self.host_share) / self.mtbf_h

    def host_of_ranks(self, *, racks_in_turn: bool = False) -> list[int]:
        """Rank -> its host. Host h is in rack h // rack_hosts.

        Args:
            racks_in_turn: Ranks were given to hosts of one rack after the other, in turn; else rack by rack.
        """
        hosts = list(range(self.hosts))
        if racks_in_turn:
            hosts.sort(key=lambda host: (host % self.rack_hosts, host // self.rack_hosts))
        return [host for host in hosts for _ in range(self.ranks_per_host)]


_BOUNDS = {
    **dict.fromkeys(("hosts", "ranks_per_host"), (1, MOST)),
    **dict.fromkeys(("host_share", "burst_share"), (0, 1)),
    "rebuild_over_network": (LEAST, 1),
    **dict.fromkeys(
        ("table_bytes", "row_bytes", "step_s", "network_bytes_per_s", "memory_bytes_per_s", "mtbf_h"),
        (LEAST, MOST),
    ),
}
"""Attribute -> its range, where it isn't from 0 to `MOST`."""


def bounds(attribute: str) -> tuple[float, float]:
    """The smallest and the largest value that an attribute of a `Job` may have."""
    return _BOUNDS.get(attribute, (0, MOST))


@dataclass(frozen=True)
class Estimate:
    """What one code would cost a job, and what it would survive.

    Attributes:
        n: Blocks in a stripe.
        k: Data blocks among them.
        spread: "rank", "host" or "rack": what every stripe has n different ones of; see `placed`.
        survives: Of those, any this many may be lost at once, hosts included. 0 of ranks that share hosts:
            any n - k of them may be lost, but no host.
        memory_bytes: Of a rank beyond its tables: parity, room for journals and inbox, replicated state.
        memory_over_tables: The same, over the rank's tables.
        step_bytes: That a rank sends in a step.
        overhead: Of a step's time, with neither `window` nor `overlap`.
        process_recovery_s: From the death of a process until training goes on.
        host_recovery_s: From the death of a host until training goes on.
        time_lost: Of the time, to recoveries.
        loss_per_month_alone: The chance that hosts lost one by one are once too many in a month.
        loss_per_month_bursts: The same, of hosts lost several at once.
        loss_per_month: Of either.
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
    """Returns who keeps whose parity, and rank -> host.

    Args:
        job: The job.
        code: The code.
        spread: "rank" is `failure_domain="rank"`, ranks on hosts rack by rack. "host" is
            `failure_domain="host"`, for the same ranks. "rack" is that, too, when ranks were given to hosts
            so that racks take turns: positions on the ring follow the ranks' order.

    Raises:
        PlacementError: The code doesn't fit; names codes that do.
        ConfigurationError: Another spread, or racks of a job that has none.
    """
    if spread not in ("rank", "host", "rack") or (spread == "rack" and not job.rack_hosts):
        raise ConfigurationError(
            f"parity is spread over 'rank', 'host', or, with racks, 'rack'; not {spread!r}"
        )
    hosts = job.host_of_ranks(racks_in_turn=spread == "rack")
    if spread == "rank":
        return Placement.ranks(code.n, code.k, job.ranks), hosts
    placement = Placement.plan(code.n, code.k, hosts)
    if spread == "rack" and not placement.spread([host // job.rack_hosts for host in hosts]):
        raise PlacementError(
            f"code ({code.n}, {code.k}) needs {code.n} racks or more, with as many hosts in each, for the "
            f"{code.n} blocks of a stripe; {job.hosts} hosts in racks of {job.rack_hosts} are not that"
        )
    return placement, hosts


def estimate(job: Job, code: Code, spread: str = "host") -> Estimate:
    """Works out one code.

    - memory: r/k of the tables for parity; journals and inbox hold a step's rows 1 + 2 r times, with their
      numbers, and up to `SPARE` times that; two copies of what is the same on all ranks.
    - bytes: each touched row goes to r keepers, with its number.
    - overhead: those bytes over the rank's part of its host's network; memory traffic of 5 times the touched
      rows and 3 times what keepers get; and `MESSAGE_ROUNDS` rounds of messages. Nothing of it overlaps.
      Waiting for slower ranks is not in it, and is most of it where ranks share cores (docs/performance.md).
    - recovery: a restart; for a host also its replacement, and its tables and parity over the network, each
      byte once (see `ecemb.rebuild`), at the part of its speed that a rebuild reaches.
    - chance of loss: hosts are lost at the job's rate, one or several at once; another one that is lost
      before all is rebuilt adds to them, and the rebuild starts over (`Odds.episode`). In a month,
      1 - exp(-losses). Several that are lost while one is being rebuilt are counted as one.

    Raises:
        PlacementError: The code doesn't fit; names codes that do.
        ConfigurationError: Another spread, or racks of a job that has none.
    """
    placement, hosts = placed(job, code, spread)
    odds = Odds(placement, hosts, job.rack_hosts)
    rank_bytes = job.table_bytes / job.ranks
    touched = job.touched_rows * job.record_bytes
    named = job.touched_rows * (job.record_bytes + ROW_HEAD_BYTES)
    step_bytes = code.r * named
    buffers = SPARE * (1 + 2 * code.r) * named
    memory_bytes = rank_bytes * code.r / code.k + buffers + 2 * job.dense_bytes
    step_s = (
        step_bytes * job.ranks_per_host / job.network_bytes_per_s
        + (5 + 3 * code.r) * touched / job.memory_bytes_per_s
        + MESSAGE_ROUNDS * job.latency_s
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
    """Seconds until a host's memory is whole again on another one, and all train; see `estimate`."""
    lost_bytes = job.table_bytes / job.hosts * (1 + code.r / code.k)
    rebuild_s = lost_bytes / (job.network_bytes_per_s * job.rebuild_over_network)
    return job.replace_s + job.restart_s + rebuild_s


def losses_per_month(job: Job, odds: Odds, recovery_h: float) -> tuple[float, float]:
    """How often a month loses data: to hosts lost one by one, and to several at once; see `estimate`.

    Args:
        job: How often hosts are lost.
        odds: Of the placement.
        recovery_h: Hours in which another loss adds to the one before.
    """
    faults = job.host_faults_per_h * MONTH_H
    again = -math.expm1(-job.host_faults_per_h * recovery_h)
    alone = faults * (1 - job.burst_share) * odds.episode(1, again)
    one_rack = job.rack_hosts > 0
    bursts = sum(
        faults * job.burst_share * share * odds.episode(size, again, one_rack=one_rack)
        for size, share in BURST_SIZES.items()
    )
    return alone, bursts


def compare(job: Job, codes: Sequence[Code] = ()) -> tuple[list[Estimate], dict[str, str]]:
    """Works out some codes, spread over hosts and, where there are racks, over racks; one host's over ranks.

    Args:
        job: The job.
        codes: Which; by default those of `CODES` that fit.

    Returns:
        Their estimates; and of each code that has none, its name and why.

    Raises:
        PlacementError: None of them fits.
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
            f"no code of those asked for fits {counted(job.hosts, 'host')} with "
            f"{counted(job.ranks_per_host, 'rank')}{'' if alone else ' on each'}; "
            + (f"these do: {', '.join(fitting)}" if fitting else "parity takes at least 2 ranks")
        )
    return found, refused


def table(job: Job, estimates: Sequence[Estimate]) -> str:
    """Returns the estimates for reading: what the job is, and a line for each code."""
    hours = 1 / (job.host_faults_per_h + job.process_faults_per_h)
    bursts = f"all in one rack of {job.rack_hosts}" if job.rack_hosts else "any"
    losses = job.host_faults_per_h * MONTH_H
    lost = (
        f"{losses:,.1f} times a month hosts are lost, {job.burst_share:.0%} of them several at once, {bursts}"
    )
    if job.hosts == 1:
        lost = (
            f"{losses:.2g} times a month the host is lost, with all rows and parity: the job then begins at "
            f"a checkpoint (protect(resume=))"
        )
    head = (
        f"{counted(job.hosts, 'host')} x {counted(job.ranks_per_host, 'rank')}, "
        f"{size(job.table_bytes)} of tables, {job.touched_rows:,.0f} rows of {job.row_bytes:,.0f} B touched "
        f"per rank and step of {job.step_s * 1e3:,.0f} ms, "
        f"{job.network_bytes_per_s * 8 / 1e9:,.0f} Gbit/s per host\na fault every {hours:,.1f} h; {lost}"
    )
    titles = ("code", "survives", "memory/rank", "sent/step", "overhead", "process", "host", "loss/month")
    lines = [titles, *(_line(one) for one in estimates)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join((head, "", *texts))


def _line(one: Estimate) -> tuple[str, ...]:
    holds = one.survives > 0
    return (
        f"({one.n}, {one.k})",
        f"any {counted(one.survives or one.n - one.k, one.spread)}{'' if holds else ', no host'}",
        f"{size(one.memory_bytes)} (+{one.memory_over_tables:.0%})",
        size(one.step_bytes),
        f"{one.overhead:.1%}",
        f"{one.process_recovery_s:,.0f} s",
        f"{one.host_recovery_s:,.0f} s" if holds else "lost",
        f"{one.loss_per_month:.2g}",
    )


def counted(count: int, noun: str) -> str:
    """Returns a number of things for reading: `1 host`, `2 hosts`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Returns bytes for reading, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
