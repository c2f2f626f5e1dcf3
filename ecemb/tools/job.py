"""A training job and its machines, as `ecemb plan` takes them, and the rows that the job changes.

Owns: `Job`, and the number of different rows that some steps change: `Job.changed_rows`. Lookups follow
Zipf's law, so a row that one step changes is often changed again by the next steps, and a window of many
steps changes far fewer rows than its steps do one by one.

Must not know: codes, what protection costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from ..coding.placement import HOST_FAULTS_PER_DAY, HOST_SHARE
from ..errors import ConfigurationError

BURST_SHARE = 56 / 483
"""The part of host failures in which several hosts fail within 10 minutes, in InfiniteHBD's trace."""
MOST_RANKS = 1 << 20
"""Most ranks of a job: the computation for more would take minutes."""
_SINGLE, _BINS = 1000, 4000
"""Most popular rows of a table that are computed one by one, and the number of bins of all others."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training job, the machines that it runs on, and its settings of `ecemb.protect`.

    Attributes:
        hosts: Number of machines.
        ranks_per_host: Number of ranks on each host.
        table_bytes: Bytes of all tables on all ranks, with optimizer state.
        row_bytes: Bytes of one row, with optimizer state; records are padded to words of 8 bytes.
        step_s: Seconds of a step without protection.
        batch: Samples of a rank in a step.
        features: Number of tables; all are of one size.
        ids: Rows of each table that a sample looks up.
        skew: The popularity of a table's rows falls with their place in the order of it to this power; with 0
            all rows are as popular.
        device: "cuda": tables are on GPUs, whose hosts have processors to spare; "cpu": in host memory, and
            training keeps all processors busy.
        window: Steps of a transaction, or "auto".
        overlap: Whether a transaction commits beside the steps that follow.
        cores: Processors of a host.
        host_memory_bytes: Memory of a host.
        device_memory_bytes: Memory of a GPU; each rank has one.
        network_bytes_per_s: Speed of a host's network, each way.
        round_trip_s: Seconds from a small message to another host until its answer is there; with 0, messages
            take no time besides that of their bytes.
        restart_s: Seconds from a process's death until all processes train again, without data to move
            (chosen).
        replace_s: Seconds until another host replaces a lost one (chosen).
        rebuild_over_network: Part of the network's speed that a rebuild reaches (docs/results/recovery.md).
        mtbf_h: Hours between faults of any kind in the whole job; None for the published rates.
        host_share: Part of those faults that lose a host's memory.
        burst_share: Part of host faults that lose several hosts at once, in numbers from `cost.BURST_SIZES`.
        rack_hosts: Number of hosts in a rack; a burst takes its hosts from one rack, and those that one rack
            doesn't have from the next (`cost.RackBursts`). With 0, a burst takes any hosts.
        dense_bytes: Bytes of replicated state: dense parameters and their optimizer's state.

    Raises:
        ConfigurationError: There are too many ranks.
    """

    hosts: int
    ranks_per_host: int
    table_bytes: float
    row_bytes: float
    step_s: float
    batch: float
    features: int = 26
    ids: float = 1.0
    skew: float = 1.05
    device: Literal["cpu", "cuda"] = "cpu"
    window: int | Literal["auto"] = "auto"
    overlap: bool = True
    cores: int = 96
    host_memory_bytes: float = 2e12
    device_memory_bytes: float = 80e9
    network_bytes_per_s: float = 12.5e9
    round_trip_s: float = 0.0
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
    def rank_rows(self) -> float:
        """Rows of a rank's shards."""
        return self.table_bytes / self.ranks / self.row_bytes

    def changed_rows(self, steps: float = 1) -> float:
        """Different rows of a rank's shards that some steps change, on average."""
        table_rows = max(1.0, self.table_bytes / self.row_bytes / self.features)
        lookups = steps * self.ranks * self.batch * self.ids
        rows = distinct(table_rows, self.skew, lookups) * self.features / self.ranks
        return min(rows, self.rank_rows)

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

    @property
    def mtbf_s(self) -> float:
        """Mean time between faults of any kind in the whole job, in seconds."""
        return 3600 / (self.host_faults_per_h + self.process_faults_per_h)

    def host_of_ranks(self, *, racks_in_turn: bool = False) -> list[int]:
        """Rank -> its host. Host h is in rack h // rack_hosts.

        Args:
            racks_in_turn: Consecutive hosts are in different racks, in turn; otherwise rack by rack.
        """
        hosts = list(range(self.hosts))
        if racks_in_turn:
            hosts.sort(key=lambda host: (host % self.rack_hosts, host // self.rack_hosts))
        return [host for host in hosts for _ in range(self.ranks_per_host)]


@lru_cache(maxsize=4096)
def distinct(rows: float, skew: float, lookups: float) -> float:
    """The expected number of different rows among lookups that follow Zipf's law.

    A row with the share p of all lookups is among m of them with the probability 1 - (1 - p)^m. All rows but
    the most popular ones are summed in bins, at each bin's geometric mean.

    Args:
        rows: Rows of the table, 1 or more.
        skew: Exponent of the law, 0 or more.
        lookups: Number of lookups.
    """
    edges = np.concatenate(
        (np.arange(1.0, min(_SINGLE, rows) + 1), np.geomspace(min(_SINGLE, rows) + 1, rows + 1, _BINS))
    )
    low, high = edges[:-1], edges[1:]
    count = np.maximum(0.0, high - low)
    share = np.sqrt(low * np.maximum(low, high - 1)) ** -skew
    share /= (count * share).sum()
    hit = -np.expm1(lookups * np.log1p(-np.minimum(share, 1 - 1e-12)))
    return float((count * hit).sum())
