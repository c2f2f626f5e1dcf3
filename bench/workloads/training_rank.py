"""What ranks train in measurements: an order, its batches, and equal models under a guard, replicated, bare.

All models take the same batches in the same order; at the end they have to hold the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import ecemb
from baselines.live_copies import Replication, Shard
from bench.harness.devices import ARENA
from bench.harness.guarded_job import GuardedJob
from bench.workloads.models import INTEGERS, Batch, Twin
from ecemb.start.request import ParityBackend

PROTECTED, REPLICATION, BARE, CONTROL = "protected", "replication", "bare", "control"
"""The control is a second bare model."""
METHODS = (PROTECTED, BARE, CONTROL)
RIVALS = (REPLICATION, BARE, CONTROL)
PHASE = "phase "
"""Begins the names of what is counted by phase."""
WARM_UP = 2
"""Steps of all twins before the guard, in which DDP settles the order of its buckets."""


@dataclass(frozen=True)
class Order(GuardedJob):
    """What a rank is to do.

    Attributes:
        engine: One of `ENGINES`.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        lookups: Rows of each table that a sample looks up.
        dense: One of `DENSE`.
        batch: Samples a rank takes in a step.
        skew: The rows' popularity falls with their place in the order of it to this power.
        window: Steps that are committed, or copied, at once.
        overlap: Whether they are committed beside the steps that follow.
        steps: That are measured, of each model.
        mtbf_s: Mean time between failures, for the window "auto".
        methods: Of those in `METHODS` and `RIVALS`.
        device: One of `devices`; another than `ARENA` only with the engine "sparse".
        rule: The tables' optimizer, where it isn't `ARENA`; see `sparse_twin`.
        backend: Of the training's process group.
        threads: Of each rank.
        parity: What deltas go over.
    """

    engine: str
    tables: int
    rows: int
    dim: int
    lookups: int
    dense: str
    batch: int
    skew: float
    window: int | Literal["auto"]
    overlap: bool
    steps: int
    mtbf_s: float | None = None
    methods: tuple[str, ...] = METHODS
    device: str = ARENA
    rule: str = "Adagrad"
    backend: str = "gloo"
    threads: int = 1
    parity: ParityBackend = "tcp"


class Bare:
    """A twin that nothing protects."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin

    def train(self, batch: Batch) -> None:
        """One step."""
        self.twin.train(batch)

    def end(self) -> None:
        """The block ends; nothing may go on beside the next one."""

    def counted(self) -> dict[str, float]:
        """What it has sent so far, and of how many rows."""
        return {}


class Protected(Bare):
    """A twin under a guard."""

    def __init__(self, twin: Twin, guard: ecemb.Guard) -> None:
        super().__init__(twin)
        self.guard = guard

    def train(self, batch: Batch) -> None:
        """One step, as a transaction."""
        with self.guard.step():
            self.twin.train(batch)

    def end(self) -> None:
        """The last step is committed."""
        self.guard._drain()

    def counted(self) -> dict[str, float]:
        """The same, and seconds by phase."""
        stats = self.guard.stats()
        phases = {f"{PHASE}{name}": spent for name, spent in stats["seconds"].items()}
        return {"sent_bytes": stats["sent_bytes"], "touched_rows": stats["captured_rows"], **phases}


class Replicated(Bare):
    """A twin whose rows are copied to other ranks."""

    def __init__(self, twin: Twin, order: Order) -> None:
        super().__init__(twin)
        copied_at_once = 1 if order.window == "auto" else order.window
        self.replication = Replication(twin.tables(), twin.touched(), order.n - order.k, copied_at_once)

    def train(self, batch: Batch) -> None:
        """One step, and its copies."""
        self.twin.train(batch)
        self.replication.step()

    def counted(self) -> dict[str, float]:
        """What it has sent so far, and of how many rows."""
        return {"sent_bytes": self.replication.sent_bytes, "touched_rows": self.replication.copied_rows}


def protect(twin: Twin, order: Order) -> ecemb.Guard:
    """The guard of the protected twin."""
    return ecemb.protect(
        twin.model,
        optimizers=twin.optimizers,
        code=ecemb.Code(n=order.n, k=order.k),
        window=order.window,
        mtbf=None if order.mtbf_s is None else timedelta(seconds=order.mtbf_s),
        overlap=order.overlap,
        failure_domain="rank",
        parity_backend=order.parity,
        verify=0,  # its pace would go by the time of all models; see bench.questions.overhead.verification
    )


class Clicks(Protocol):
    """Of an order, what its batches are drawn by."""

    @property
    def tables(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def lookups(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def skew(self) -> float: ...
    @property
    def seed(self) -> int: ...


def draw(order: Clicks, rank: int, count: int) -> list[Batch]:
    """A rank's batches: each table has a popularity of its own, the same on all ranks."""
    weights, popular = popularity(order)
    heaped, own = np.cumsum(weights), np.random.default_rng([order.seed, rank])
    return [drawn(order, heaped, popular, own) for _ in range(count)]


def drawn(
    order: Clicks,
    heaped: NDArray[np.float64],
    popular: Sequence[NDArray[np.int64]],
    random: np.random.Generator,
) -> Batch:
    """One batch; the popularity of rows is given as `popularity` does, but summed up."""
    place = np.searchsorted(heaped, random.random((order.tables, order.batch, order.lookups)))
    ids = np.stack([rows[np.minimum(p, order.rows - 1)] for rows, p in zip(popular, place, strict=True)])
    integers = random.random((order.batch, INTEGERS), np.float32)
    clicks = random.integers(0, 2, (order.batch, 1)).astype(np.float32)
    return Batch(*map(torch.from_numpy, (integers, ids, clicks)))


def popularity(order: Clicks) -> tuple[NDArray[np.float64], list[NDArray[np.int64]]]:
    """The share of lookups of each row, from the most popular on; of each table, its rows in that order."""
    places = np.arange(1, order.rows + 1, dtype=np.float64) ** -order.skew
    shared = np.random.default_rng(order.seed)
    return places / places.sum(), [shared.permutation(order.rows) for _ in range(order.tables)]


def run(method: Bare, batches: Sequence[Batch]) -> None:
    """Trains one twin on batches."""
    for batch in batches:
        method.train(batch)
    method.end()


def by_columns(shards: Sequence[Shard]) -> list[str]:
    """A hash of each tensor of tables, joined as they are in replicas."""
    return [digest([torch.from_numpy(column)]) for shard in shards for column in shard.columns]


def digest(tensors: Sequence[Tensor]) -> str:
    """A hash of the tensors' bytes; of tables on a GPU, too many to be brought here, a hash of `folded`."""
    total = hashlib.blake2b()
    for tensor in tensors:
        plain = tensor.detach().contiguous()
        if plain.is_cuda and plain.dim() > 1:
            plain = folded(plain)
        total.update(plain.cpu().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def folded(table: Tensor) -> Tensor:
    """A hash of each row of a table, int64 [rows]: its words times odd numbers, summed, modulo 2^64.

    Two rows that differ in any bits have the same one with a chance of 2^-32 at most.

    Args:
        table: [rows, ...] of 4-byte values, contiguous; read.
    """
    words = table.view(len(table), -1).view(torch.int32)
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (words.shape[1],), generator=generator) * 2 + 1
    return (words * factors.to(table.device)).sum(1)
