"""One rank: trains windows of two steps under a guard; what the ranks say to one another, and its time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ecemb
from bench.harness.guarded_job import GuardedJob
from bench.harness.phase_clocks import PhaseClocks
from bench.harness.ranks import Line
from bench.harness.thread_clocks import ThreadClocks, threads
from bench.questions.scaling.rank import Model, counting

WINDOW = 2
"""Steps of a transaction: the first one has nothing to agree on."""
DIM = 8
SILENT = {"capture", "savepoint", "state", "delta", "apply", "image"}
"""Phases that say nothing to other ranks."""


@dataclass(frozen=True)
class Order(GuardedJob):
    """What a rank is to do.

    Attributes:
        rows: Of the table on each rank.
        batch: Samples a rank takes in a step; each looks up one row of the table.
        transactions: That are measured.
    """

    rows: int
    batch: int
    transactions: int


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(order.seed)
    model = Model(order.rows * ranks, DIM)
    sparse = torch.optim.Adagrad(model.table.parameters(), lr=0.1)
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    known = threads()
    guard = ecemb.protect(
        model,
        optimizers=[sparse, dense],
        code=ecemb.Code(n=order.n, k=order.k),
        window=WINDOW,
        failure_domain="rank",
    )
    network = ThreadClocks(threads() - known)
    generator = torch.Generator().manual_seed(order.seed * 1000 + rank)

    def train(steps: int) -> list[dict[str, tuple[int, int]]]:
        """Of each step the messages for protection and their bytes, by phase."""
        found: list[dict[str, tuple[int, int]]] = []
        for _ in range(steps):
            sent.by_phase = {}
            with guard.step():
                sparse.zero_grad()
                dense.zero_grad()
                ids = torch.randint(order.rows * ranks, (order.batch, 1), generator=generator)
                (model(ids).square().mean() / ranks).backward()
                for parameter in model.head.parameters():
                    dist.all_reduce(parameter.grad)
                sparse.step()
                dense.step()
            found.append(sent.by_phase)
        return found

    phases = PhaseClocks(guard)
    with counting() as sent:
        sent.phase = lambda: phases.now
        train(WINDOW)  # the first transaction compares more than others do, and connects
        spent, beside = dict(phases.spent_s), network.read()
        steps = train(WINDOW * order.transactions)
        dist.barrier()
    network_s = network.read() - beside
    cpu: dict[str, Any] = {
        name: seconds - spent.get(name, 0.0) for name, seconds in phases.spent_s.items() if name not in SILENT
    }
    report = guard.scrub()
    line.send(
        {
            "rank": rank,
            "inside": steps[0::WINDOW],
            "ends": steps[WINDOW - 1 :: WINDOW],
            "unknown": sorted(sent.unknown),
            "cpu_s": cpu | {"network": network_s},
            "wrong_words": report.wrong_words,
        }
    )
    guard.close()
    dist.destroy_process_group()
