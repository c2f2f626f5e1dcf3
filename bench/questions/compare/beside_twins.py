"""One rank that measures a rival: its steps beside those of bare twins, and then its saves.

Each round trains one step of the rival's model and of two bare ones on the same batch
(`bench.workloads.pairs`). Saves come after that, of the same tables and of smaller ones, with no training
between them: methods that follow changes are given the rows that half an hour would change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ecemb
from baselines.check_n_run.recovery import CheckNRun
from baselines.cpr.priority import PERIOD, Mfu, RowPriority, Ssu
from baselines.cpr.recovery import PartialRecovery
from baselines.full import FullRecovery
from baselines.method import Method, Training
from baselines.rollback import Rollback
from baselines.snapshot import SnapshotRecovery
from bench.harness.guarded_job import GuardedJob
from bench.harness.ranks import Line
from bench.harness.thread_clocks import ThreadClocks, threads
from bench.methods.registry import METHODS, Place
from bench.questions.check_n_run.access import published
from bench.workloads.models import ENGINES, Batch, Twin
from bench.workloads.pairs import SETTLING, measure
from bench.workloads.training_rank import BARE, CONTROL, WARM_UP, Bare, digest, draw, run
from bench.workloads.training_rank import Order as PairsOrder

RIVAL = "rival"
NEVER = 10**9
"""Steps between saves, while steps are measured."""
WHOLE, FEW = "whole", "few rows"
"""Sizes of the tables that are saved."""


@dataclass(frozen=True, kw_only=True)
class Order(GuardedJob):
    """What a rank is to do.

    Attributes:
        engine: One of `ENGINES`.
        method: Of `METHODS`; no code of ecemb's.
        memory: Folder on tmpfs, for files and for what machines keep in memory.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        few_rows: Of the smaller tables.
        dim: Of each row.
        dense: See `training_rank.Order`.
        batch: Samples a rank takes in a step.
        skew: See `training_rank.Order`.
        pairs: Rounds; 0 for none.
        saves: Of either size that count, after a first one; 0 for none.
        bytes_per_s: That a rank writes, or reads, at most.
    """

    engine: str
    method: str
    memory: str
    tables: int
    rows: int
    few_rows: int
    dim: int
    dense: str
    batch: int
    skew: float
    pairs: int
    saves: int
    bytes_per_s: float

    def of_pairs(self) -> PairsOrder:
        """The same for `bench.workloads.pairs`."""
        return PairsOrder(
            engine=self.engine,
            job=self.job,
            arena_dir=self.arena_dir,
            n=self.n,
            k=self.k,
            tables=self.tables,
            rows=self.rows,
            lookups=1,
            dim=self.dim,
            dense=self.dense,
            batch=self.batch,
            skew=self.skew,
            window=1,
            overlap=False,
            steps=self.pairs,
            seed=self.seed,
            timeout_s=self.timeout_s,
            methods=(RIVAL, BARE, CONTROL),
        )


class Kept(Bare):
    """A twin that a method keeps alive, which saves nothing before `each_step`."""

    def __init__(self, twin: Twin, order: Order) -> None:
        super().__init__(twin)
        rows = sum(len(table[0]) for table in twin.tables())
        place = Path(order.memory, f"{order.method} {rows}")
        machine = place / f"machine {dist.get_rank()}"
        machine.mkdir(parents=True)
        self.method = METHODS[order.method](
            Place(place / "files", machine, every=NEVER, bytes_per_s=order.bytes_per_s, in_threads=True)
        )
        samples = order.batch * dist.get_world_size()
        self.method.prepare(Training(twin.model, twin.optimizers, samples=samples))

    def train(self, batch: Batch) -> None:
        """One step under the method."""
        with self.method.step():
            self.twin.train(batch)


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    known = threads()
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    watch = ThreadClocks(
        one.native_id for one in threading.enumerate() if one.native_id and one.native_id not in known
    )
    batches = draw(order.of_pairs(), dist.get_rank(), WARM_UP + SETTLING + order.pairs)
    answer: dict[str, Any] = {}
    of_sizes: dict[str, list[dict[str, float]]] = {}
    sizes = ((WHOLE, order.rows), (FEW, order.few_rows))
    for size, rows in sizes if order.saves else sizes[:1]:
        kept = Kept(built(order, rows, batches), order)
        if size == WHOLE and order.pairs:
            answer |= paired(order, kept, batches, watch)
        of_sizes[size] = saves(order, kept) if order.saves else []
        kept.method.close()
    line.send(answer | {"saves": of_sizes})
    dist.destroy_process_group()


def built(order: Order, rows: int, batches: Sequence[Batch]) -> Twin:
    """A model, the same each time, of which DistributedDataParallel has settled the order of its sums."""
    torch.manual_seed(order.seed)
    twin = ENGINES[order.engine](order.tables, rows, order.dim, order.dense)
    for batch in batches[:WARM_UP]:
        twin.train(batch._replace(ids=batch.ids % rows))
    return twin


def paired(order: Order, kept: Kept, batches: Sequence[Batch], watch: ThreadClocks) -> dict[str, Any]:
    """Trains all rounds; see `bench.workloads.pairs.measure`. Adds a hash of each model."""
    methods: dict[str, Bare] = {RIVAL: kept}
    methods |= {name: Bare(built(order, order.rows, batches)) for name in (BARE, CONTROL)}
    began = digest(methods[BARE].twin.tensors())
    for method in methods.values():
        run(method, batches[WARM_UP : WARM_UP + SETTLING])
    answer = measure(methods, None, batches[WARM_UP + SETTLING :], order.of_pairs(), threads(), watch)
    digests = {name: digest(method.twin.tensors()) for name, method in methods.items()}
    return answer | {"began": began, "digests": digests}


def saves(order: Order, kept: Kept) -> list[dict[str, float]]:
    """Saves a few times; of each, the seconds and bytes of this rank. All ranks."""
    method, found = kept.method, []
    changed = marks(method, order.saves + 1)
    each_step(method)
    for number in range(order.saves + 1):
        for touch, rows in changed:
            touch(rows[number])
        before = method.costs()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        with method.step():
            pass
        stall, stalled = time.perf_counter() - wall, time.process_time() - cpu
        until_whole(method)
        whole, spent = time.perf_counter() - wall, time.process_time() - cpu
        after = method.costs()
        found.append(
            {
                "stall_s": stall,
                "whole_s": whole,
                "stalled_cpu_s": stalled,
                "cpu_s": spent,
                "written_bytes": after.written_bytes - before.written_bytes,
                "sent_bytes": after.sent_bytes - before.sent_bytes,
                "table_bytes": sum(one.nbytes for table in kept.twin.tables() for one in table),
            }
        )
    return found[1:]


def each_step(method: Method) -> None:
    """From here on, the method saves after each step."""
    if isinstance(method, PartialRecovery):
        method._saving.interval = 1
    elif isinstance(method, Rollback):
        method.interval.steps = 1


def until_whole(method: Method) -> None:
    """Waits until what a save does beside training is done. All ranks."""
    if isinstance(method, PartialRecovery):
        method.costs()  # waits for the image
    elif isinstance(method, FullRecovery):
        method._writer.wait()
    elif isinstance(method, CheckNRun | SnapshotRecovery):
        method._finish()


def marks(method: Method, count: int) -> list[tuple[Callable[[Tensor], None], list[Tensor]]]:
    """Of each table that a method follows, what marks rows, and those that each interval changes."""
    rows: dict[Callable[[Tensor], None], int] = {}
    if isinstance(method, CheckNRun):
        rows = {one.touch: one.rows for one in method._touched.values()}
    elif isinstance(method, PartialRecovery):
        rows = {partial(looked_up, one): one.rows for one in method._saving._ranked.values()}
    pattern, rng = published(), np.random.default_rng(dist.get_rank())
    return [
        (touch, [torch.from_numpy(one) for one in pattern.changed(size, count, rng)])
        for touch, size in rows.items()
    ]


def looked_up(ranked: RowPriority, rows: Tensor) -> None:
    """These rows change, each by one lookup, in a batch of those that SSU lists."""
    for _ in range(PERIOD if isinstance(ranked, Ssu) else 1):
        ranked.touch(rows)
    if isinstance(ranked, Mfu):
        ranked.add(rows, torch.ones_like(rows))
