"""One rank of `bench.overhead`: trains two equal models by turns, one of them under a guard.

Blocks of steps alternate, so that whatever else the machine does meets both twins. Both take the same batches
in the same order; at the end both have to hold the same bytes.
"""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ecemb
from bench.overhead_models import ENGINES, INTEGERS, Batch, Twin
from bench.ranks import Line

PROTECTED, BARE = "protected", "bare"
PHASE = "phase "
"""Begins the names of what is counted by phase."""
WARM_UP = 2
"""Steps of both twins before the guard, in which DDP settles the order of its buckets, and as many after."""


@dataclass(frozen=True)
class Order:
    """What a rank is to do.

    Attributes:
        engine: One of `ENGINES`.
        job: The job's name.
        arena_dir: Where arenas lie.
        n: The code's n.
        k: The code's k.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        batch: Samples a rank takes in a step; each looks up one row of each table.
        skew: The rows' popularity falls with their place in the order of it to this power.
        steps: Of a block.
        repeats: Pairs of blocks, one of each twin.
        seed: Of all that is drawn.
        timeout_s: Of every wait.
    """

    engine: str
    job: str
    arena_dir: str
    n: int
    k: int
    tables: int
    rows: int
    dim: int
    batch: int
    skew: float
    steps: int
    repeats: int
    seed: int
    timeout_s: float


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    batches = draw(order, dist.get_rank(), 2 * WARM_UP + order.steps * order.repeats)
    before, after, timed = batches[:WARM_UP], batches[WARM_UP : 2 * WARM_UP], batches[2 * WARM_UP :]
    twins: dict[str, Twin] = {}
    for name in (BARE, PROTECTED):
        torch.manual_seed(order.seed)
        twins[name] = ENGINES[order.engine](order.tables, order.rows, order.dim)
        for batch in before:
            twins[name].train(batch)
    protected = twins[PROTECTED]
    began = digest(protected.tensors())
    code = ecemb.Code(n=order.n, k=order.k)
    guard = ecemb.protect(protected.model, optimizers=protected.optimizers, code=code, failure_domain="rank")
    run(twins[BARE], after, None)
    run(protected, after, guard)

    taken: dict[str, list[dict[str, Any]]] = {PROTECTED: [], BARE: []}
    for repeat, names in enumerate(turns(order.repeats, order.seed)):
        block = timed[repeat * order.steps : (repeat + 1) * order.steps]
        for name in names:
            taken[name].append(measured(twins[name], block, guard if name == PROTECTED else None))

    report = guard.scrub()
    line.tell(
        {
            "blocks": taken,
            "committed_steps": guard.stats()["steps"],
            "wrong_words": report.wrong_words,
            "scrubbed": report.complete,
            "began": began,
            "digests": {name: digest(twin.tensors()) for name, twin in twins.items()},
        }
    )
    guard.close()
    dist.destroy_process_group()


def draw(order: Order, rank: int, count: int) -> list[Batch]:
    """A rank's batches: each table has a popularity of its own, the same on all ranks."""
    places = np.arange(1, order.rows + 1, dtype=np.float64) ** -order.skew
    heaped = np.cumsum(places) / places.sum()
    shared = np.random.default_rng(order.seed)
    popular = [shared.permutation(order.rows) for _ in range(order.tables)]
    own = np.random.default_rng([order.seed, rank])
    batches: list[Batch] = []
    for _ in range(count):
        place = np.searchsorted(heaped, own.random((order.tables, order.batch)))
        ids = np.stack([rows[np.minimum(p, order.rows - 1)] for rows, p in zip(popular, place, strict=True)])
        integers = own.random((order.batch, INTEGERS), np.float32)
        clicks = own.integers(0, 2, (order.batch, 1)).astype(np.float32)
        batches.append(Batch(*map(torch.from_numpy, (integers, ids, clicks))))
    return batches


def turns(repeats: int, seed: int) -> list[tuple[str, str]]:
    """Who is first in each pair of blocks: in every two pairs, each twin once, in random order."""
    rng = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    while len(pairs) < repeats:
        two = [(PROTECTED, BARE), (BARE, PROTECTED)]
        rng.shuffle(two)
        pairs += two
    return pairs[:repeats]


def measured(twin: Twin, batches: Sequence[Batch], guard: ecemb.Guard | None) -> dict[str, Any]:
    """Trains a block; the time that it took on this rank, and what the guard counted meanwhile."""
    gc.collect()
    before = counted(guard)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    run(twin, batches, guard)
    taken = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    after = counted(guard)
    return taken | {name: after[name] - before.get(name, 0) for name in after}


def counted(guard: ecemb.Guard | None) -> dict[str, float]:
    """What a guard counts: bytes, rows, and seconds by phase."""
    if guard is None:
        return {}
    stats = guard.stats()
    counts: Mapping[str, float] = {name: stats[name] for name in ("sent_bytes", "captured_rows")}
    return {**counts, **{f"{PHASE}{name}": spent for name, spent in stats["seconds"].items()}}


def run(twin: Twin, batches: Sequence[Batch], guard: ecemb.Guard | None) -> None:
    """Trains one twin on batches."""
    for batch in batches:
        if guard is None:
            twin.train(batch)
        else:
            with guard.step():
                twin.train(batch)


def digest(tensors: Sequence[Tensor]) -> str:
    """A hash of the tensors' bytes."""
    total = hashlib.blake2b()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()
