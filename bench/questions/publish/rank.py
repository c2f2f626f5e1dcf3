"""One rank: trains under a guard, and saves in one of the ways that a follower reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ecemb
from baselines.check_n_run.durable import DurableTier
from baselines.check_n_run.policy import POLICIES
from baselines.check_n_run.quantize_scheme import EXACT, Scheme
from baselines.check_n_run.tracking import TouchedRows
from bench.harness.guarded_job import GuardedJob
from bench.harness.ranks import Line
from bench.workloads.models import ENGINES
from bench.workloads.training_rank import digest, draw

EXACT_BITS, FEW_BITS = "exact", "4"
KEPT = 4
"""Checkpoints; so that the files of one that has just been served are still there to be measured."""


@dataclass(frozen=True)
class Kind:
    """A way to save.

    Attributes:
        writer: "torch.distributed.checkpoint", or a policy of Check-N-Run.
        bits: `EXACT_BITS` or `FEW_BITS`.
    """

    writer: str
    bits: str


FULL = Kind("torch.distributed.checkpoint", EXACT_BITS)
KINDS = (FULL, *(Kind(policy, bits) for bits in (EXACT_BITS, FEW_BITS) for policy in POLICIES))


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        ranks: All on this machine, one thread each.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        lookups: Rows of each table that a sample looks up.
        batch: Samples a rank takes in a step.
        skew: See `training_rank.Order`.
        every: Steps between checkpoints.
        saves: Checkpoints.
        kinds: Ways to save.
        memory: Folder on tmpfs.
        timeout_s: Of all, for each of them.
    """

    ranks: int = 2
    tables: int = 8
    rows: int = 20_000
    dim: int = 64
    lookups: int = 1
    batch: int = 1024
    skew: float = 1.0
    every: int = 8
    saves: int = 8
    kinds: tuple[Kind, ...] = KINDS
    memory: str = "/dev/shm"
    timeout_s: float = 900.0

    @property
    def setting(self) -> str:
        """What a row's label says of it."""
        size = f"{self.tables} x {self.rows:,} x {self.dim}, batch {self.batch:,} a rank, skew {self.skew:g}"
        return f"{self.ranks} ranks, {size}, every {self.every} steps"

    @property
    def last_step(self) -> int:
        """The number of the step after the last one."""
        return self.every * self.saves


@dataclass(frozen=True, kw_only=True)
class Order(Scale, GuardedJob):
    """What a rank is to do.

    Attributes:
        files: Folder that is saved to.
        kind: How.
    """

    files: str
    kind: Kind


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    line.send(trained(order))
    dist.destroy_process_group()


def trained(order: Order) -> dict[str, Any]:
    """Trains and saves. All ranks.

    Returns:
        "ended": time of day at which each saved step ended, by the number of the next one; "changed_pct":
        rows that changed in each interval, in percent; "rows": of each table its name, where this rank's rows
        begin, how many there are, and a hash of them.
    """
    torch.manual_seed(order.seed)
    twin = ENGINES["sparse"](order.tables, order.rows, order.dim, "small")
    writer = writer_of(order)
    guard = ecemb.protect(
        twin.model,
        optimizers=twin.optimizers,
        code=ecemb.Code(n=order.n, k=order.k),
        failure_domain="rank",
    )
    tables = ecemb.tables(twin.model)
    changed = [TouchedRows(table.rows) for table in tables]
    ends: list[Callable[[], None]] = [
        table.on_touch(rows.touch) for table, rows in zip(tables, changed, strict=True)
    ]
    ended: dict[int, float] = {}
    changed_pct: list[float] = []
    batches = draw(order, dist.get_rank(), order.last_step)
    for number in range(order.saves):
        for batch in batches[number * order.every : (number + 1) * order.every]:
            with guard.step():
                twin.train(batch)
        ended[guard.next_step] = time.time()
        changed_pct.append(100 * sum(one.count() for one in changed) / sum(one.rows for one in changed))
        for one in changed:
            one.clear()
        guard.save(writer, keep=KEPT, asynchronous=True)
    for end in ends:
        end()
    rows = [
        (table.name, (table.whole or (0, 0))[0], table.rows, digest([table.tensors["weight"]]))
        for table in tables
    ]
    guard.close()
    return {"ended": ended, "changed_pct": changed_pct, "rows": rows}


def writer_of(order: Order) -> str | DurableTier:
    """What `guard.save` is given."""
    if order.kind == FULL:
        return order.files
    return DurableTier(
        order.files,
        order.memory,
        policy=order.kind.writer,
        weights=EXACT if order.kind.bits == EXACT_BITS else Scheme("adaptive", int(order.kind.bits)),
    )
