"""One rank: trains windows of two steps under a guard; what the ranks say to one another, and its time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.harness.messages import counting
from bench.harness.phase_clocks import PhaseClocks
from bench.harness.ranks import Line
from bench.harness.thread_clocks import ThreadClocks
from bench.workloads.table_training import TableJob, TableTraining

WINDOW = 2
"""Steps of a transaction: the first one has nothing to agree on."""
SILENT = {"capture", "compare", "state", "delta", "apply", "image", "store"}
"""Phases that say nothing to other ranks."""
IDLE_S = 2.0
"""Seconds for which the network's thread is watched while no rank trains."""


@dataclass(frozen=True, kw_only=True)
class Order(TableJob):
    """What a rank is to do.

    Attributes:
        transactions: That are measured.
        meeting: A folder where jobs meet that are measured side by side.
        jobs: How many these are.
    """

    transactions: int
    meeting: Path
    jobs: int
    window: int = WINDOW


def idle(network: ThreadClocks) -> float:
    """Processor time of threads in a second in which no rank does anything. All ranks."""
    dist.barrier()
    time.sleep(IDLE_S / 10)  # the barrier's own messages
    spent, began = network.read(), time.perf_counter()
    time.sleep(IDLE_S)
    spent, passed = network.read() - spent, time.perf_counter() - began
    dist.barrier()
    return spent / passed


def meet(order: Order, rank: int) -> None:
    """Returns when all jobs have come so far. All ranks.

    Raises:
        TimeoutError: One doesn't come.
    """
    if rank == 0:
        (order.meeting / order.job).touch()
        deadline = time.monotonic() + order.timeout_s
        while len(os.listdir(order.meeting)) < order.jobs:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{order.job}: not all of {order.jobs} jobs have begun")
            time.sleep(0.01)
    dist.barrier()


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    training = TableTraining(order)

    def train(steps: int) -> list[dict[str, tuple[int, int]]]:
        """Of each step the messages for protection and their bytes, by phase."""
        found: list[dict[str, tuple[int, int]]] = []
        for _ in range(steps):
            sent.by_phase = {}
            training.step()
            found.append(sent.by_phase)
        return found

    phases, network = PhaseClocks(training.guard), training.network
    with counting() as sent:
        sent.phase = lambda: phases.now
        train(WINDOW)  # the first transaction compares more than others do, and connects
        meet(order, training.rank)
        spent, beside, began = dict(phases.spent_s), network.read(), time.perf_counter()
        steps = train(WINDOW * order.transactions)
        dist.barrier()
    network_s, passed_s = network.read() - beside, time.perf_counter() - began
    network_s = max(0.0, network_s - idle(network) * passed_s)
    cpu: dict[str, Any] = {
        name: seconds - spent.get(name, 0.0) for name, seconds in phases.spent_s.items() if name not in SILENT
    }
    report = training.guard.scrub()
    line.send(
        {
            "rank": training.rank,
            "inside": steps[0::WINDOW],
            "ends": steps[WINDOW - 1 :: WINDOW],
            "unknown": sorted(sent.unknown),
            "cpu_s": cpu | {"network": network_s},
            "wrong_words": report.wrong_words,
        }
    )
    training.end()
