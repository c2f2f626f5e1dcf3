"""A training of one tiny table under a guard, on ranks that a question counts something of.

Each rank has as many rows and takes as large a batch as any other, so that with more ranks the work of one
stays the same. Each step draws its samples from the rank and its number alone: a second life draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from bench.harness.guarded_job import GuardedJob
from bench.harness.ranks import Line, Ranks
from bench.harness.thread_clocks import ThreadClocks, threads, with_own_network


@dataclass(frozen=True, kw_only=True)
class TableJob(GuardedJob):
    """What every rank of the training is given; questions add fields of their own.

    Attributes:
        rows: Of the table on each rank.
        batch: Samples a rank takes in a step; each looks up one row of the table.
        dim: Of the table.
        window: Steps of a transaction.
    """

    rows: int
    batch: int
    dim: int = 8
    window: int = 1


AnyJob = TypeVar("AnyJob", bound=TableJob)


class Model(nn.Module):
    """One table, and a small dense part that is the same on all ranks."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = ecemb.nn.ShardedEmbeddingBag(rows, dim, device="meta")
        self.head = nn.Linear(dim, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores samples: ids int64 [batch, 1]."""
        return self.head(self.table(ids))


class TableTraining:
    """One rank of the training, from joining the job to its end. All ranks.

    Args:
        job: What is trained.

    Attributes:
        guard: Of this process.
        model: Its table, and the dense part.
        optimizers: Adagrad of the table, and SGD of the dense part.
        network: Clocks of the threads that protection has started, which send and receive.
    """

    def __init__(self, job: TableJob) -> None:
        torch.set_num_threads(1)
        timeout = timedelta(seconds=job.timeout_s)
        ecemb.init_process_group("gloo", job=job.job, arena_dir=job.arena_dir, timeout=timeout)
        self._job, self.rank, self._ranks = job, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(job.seed)
        self.model = Model(job.rows * self._ranks, job.dim)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Adagrad(self.model.table.parameters(), lr=0.1),
            torch.optim.SGD(self.model.head.parameters(), lr=0.1),
        )
        known = threads()
        with with_own_network():
            self.guard = ecemb.protect(
                self.model,
                optimizers=list(self.optimizers),
                code=ecemb.Code(n=job.n, k=job.k),
                window=job.window,
                failure_domain="rank",
                verify=0,  # messages are counted exactly
            )
        self.network = ThreadClocks(threads() - known)

    def step(self) -> None:
        """Trains one step."""
        with self.guard.step() as step:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            drawn = (self._job.seed * 1000 + self.rank) * 1000 + step.number
            generator = torch.Generator().manual_seed(drawn)
            samples = (self._job.batch, 1)
            ids = torch.randint(self._job.rows * self._ranks, samples, generator=generator)
            (self.model(ids).square().mean() / self._ranks).backward()
            for parameter in self.model.head.parameters():
                dist.all_reduce(parameter.grad)
            for optimizer in self.optimizers:
                optimizer.step()

    def end(self) -> None:
        """Closes the guard, and leaves the group."""
        self.guard.close()
        dist.destroy_process_group()


def answers_of(ranks: int, work: Callable[[Line, AnyJob], None], job: AnyJob) -> list[dict[str, Any]]:
    """Runs a training to its end on this number of ranks, and removes its arenas.

    Args:
        ranks: How many.
        work: What each of them does; see `Ranks`.
        job: What it is called with.

    Returns:
        The answer of each rank, in their order, by its "rank".

    Raises:
        RankFailed: A rank did.
    """
    with job.leaving_nothing(), Ranks(ranks, work, job, deadline_s=job.timeout_s) as running:
        found = sorted(running.answers(), key=lambda answer: answer["rank"])
        running.finished()
    return found
