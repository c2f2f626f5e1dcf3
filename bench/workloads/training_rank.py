"""One rank of a training: equal models by turns, one under a guard, one replicated, one bare.

Blocks of steps alternate, so that other load on the machine meets all of them. All take the same batches
in the same order; at the end they have to hold the same bytes.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ecemb
from baselines.live_copies import Replication, Shard, joined
from bench.harness.devices import ARENA, begin, settle
from bench.harness.guarded_job import GuardedJob
from bench.harness.ranks import Line
from bench.workloads.models import ENGINES, INTEGERS, Batch, Twin
from ecemb.startup.request import ParityBackend

PROTECTED, REPLICATION, BARE = "protected", "replication", "bare"
METHODS = (PROTECTED, REPLICATION, BARE)
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
        steps: Of a block, a multiple of the window.
        repeats: Rounds of blocks, one of each twin.
        methods: Of those in `METHODS`.
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
    window: int
    overlap: bool
    steps: int
    repeats: int
    methods: tuple[str, ...] = METHODS
    device: str = ARENA
    rule: str = "Adagrad"
    backend: str = "gloo"
    threads: int = 1
    parity: ParityBackend = "gloo"

    @property
    def warm_up(self) -> int:
        """Steps between the guard and what is timed."""
        return max(WARM_UP, self.window)


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
        self.replication = Replication(twin.tables(), twin.touched(), order.n - order.k, order.window)

    def train(self, batch: Batch) -> None:
        """One step, and its copies."""
        self.twin.train(batch)
        self.replication.step()

    def counted(self) -> dict[str, float]:
        """What it has sent so far, and of how many rows."""
        return {"sent_bytes": self.replication.sent_bytes, "touched_rows": self.replication.copied_rows}


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(order.threads)
    device = begin(order.device, int(os.environ["RANK"]))
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group(order.backend, job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    rank = dist.get_rank()
    batches = draw(order, rank, WARM_UP + order.warm_up + order.steps * order.repeats)
    if device is not None:
        batches = [Batch(*(tensor.to(device) for tensor in batch)) for batch in batches]
    before, batches = batches[:WARM_UP], batches[WARM_UP:]
    after, timed = batches[: order.warm_up], batches[order.warm_up :]
    staying = {} if device is None else {"device": device, "rule": order.rule}
    twins: dict[str, Twin] = {}
    for name in order.methods:
        torch.manual_seed(order.seed)
        twins[name] = ENGINES[order.engine](order.tables, order.rows, order.dim, order.dense, **staying)
        run(Bare(twins[name]), before)
    began = digest(twins[PROTECTED].tensors())
    guard = protect(twins[PROTECTED], order)
    methods: dict[str, Bare] = {}
    for name, twin in twins.items():
        if name == REPLICATION:
            methods[name] = Replicated(twin, order)
        else:
            methods[name] = Protected(twin, guard) if name == PROTECTED else Bare(twin)
    for method in methods.values():
        run(method, after)

    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for repeat, names in enumerate(turns(order.repeats, order.seed, order.methods)):
        block = timed[repeat * order.steps : (repeat + 1) * order.steps]
        for name in names:
            taken[name].append(measured(methods[name], block, order.device))

    report = guard.scrub() if dist.get_world_size() > 1 else None  # one rank keeps no parity
    answer = {
        "rank": rank,
        "blocks": taken,
        "committed_steps": guard.stats()["steps"],
        "wrong_words": report.wrong_words if report is not None else 0,
        "scrubbed": report is None or report.complete,
        "began": began,
        "digests": {name: digest(twin.tensors()) for name, twin in twins.items()},
    }
    if isinstance(replicated := methods.get(REPLICATION), Replicated):
        replicas = replicated.replication.replicas
        answer["columns"] = by_columns(joined(twins[REPLICATION].tables()))
        answer["replicas"] = {source: by_columns(shards) for source, shards in replicas.items()}
    line.send(answer)
    guard.close()
    dist.destroy_process_group()


def protect(twin: Twin, order: Order) -> ecemb.Guard:
    """The guard of the protected twin."""
    return ecemb.protect(
        twin.model,
        optimizers=twin.optimizers,
        code=ecemb.Code(n=order.n, k=order.k),
        window=order.window,
        overlap=order.overlap,
        failure_domain="rank",
        parity_backend=order.parity,
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
    places = np.arange(1, order.rows + 1, dtype=np.float64) ** -order.skew
    heaped = np.cumsum(places) / places.sum()
    shared = np.random.default_rng(order.seed)
    popular = [shared.permutation(order.rows) for _ in range(order.tables)]
    own = np.random.default_rng([order.seed, rank])
    batches: list[Batch] = []
    for _ in range(count):
        place = np.searchsorted(heaped, own.random((order.tables, order.batch, order.lookups)))
        ids = np.stack([rows[np.minimum(p, order.rows - 1)] for rows, p in zip(popular, place, strict=True)])
        integers = own.random((order.batch, INTEGERS), np.float32)
        clicks = own.integers(0, 2, (order.batch, 1)).astype(np.float32)
        batches.append(Batch(*map(torch.from_numpy, (integers, ids, clicks))))
    return batches


def turns(repeats: int, seed: int, methods: Sequence[str] = METHODS) -> list[tuple[str, ...]]:
    """Who is when in each round of blocks: in as many rounds as twins, each of them has each place once."""
    rng = random.Random(seed)
    rounds: list[tuple[str, ...]] = []
    while len(rounds) < repeats:
        names = rng.sample(methods, len(methods))
        turned = [tuple(names[i:] + names[:i]) for i in range(len(names))]
        rounds += rng.sample(turned, len(turned))
    return rounds[:repeats]


def measured(method: Bare, batches: Sequence[Batch], device: str) -> dict[str, Any]:
    """Trains a block; the time that it took on this rank, and what was counted meanwhile."""
    gc.collect()
    before = method.counted()
    settle(device)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    run(method, batches)
    settle(device)
    taken = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    after = method.counted()
    return taken | {name: after[name] - before.get(name, 0) for name in after}


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
