"""One rank of the question about memory: trains under a guard, reports what it holds, leaves the job open.

Started again after that, it recovers instead of training, says what it holds now, and closes it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from bench.harness.guarded_job import GuardedJob
from bench.harness.ranks import Line

DIM = 64
RECORD_BYTES = 2 * 4 * DIM
"""Of one row: its weights and Adagrad's sums, float32."""
SHARES = (0.5, 0.3, 0.2)
"""The tables' shares of the rows."""


@dataclass(frozen=True)
class Order(GuardedJob):
    """What a rank is to do.

    Attributes:
        rows: Of all tables together, over all ranks.
        batches: Samples a rank takes in a step; one phase of training for each, ascending.
        steps: Of each phase.
    """

    rows: int
    batches: tuple[int, ...]
    steps: int


class Model(nn.Module):
    """Three tables, and a small dense part that is the same on all ranks."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            ecemb.nn.ShardedEmbeddingBag(int(rows * share), DIM, device="meta") for share in SHARES
        )
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Scores samples: ids int64 [batch, tables], one row of each table."""
        pooled = sum(table(ids[:, at : at + 1]) for at, table in enumerate(self.tables))
        return self.head(pooled)

    def draw(self, batch: int, seed: int) -> Tensor:
        """A batch of uniformly drawn rows."""
        generator = torch.Generator().manual_seed(seed)
        columns = [torch.randint(t.num_embeddings, (batch,), generator=generator) for t in self.tables]
        return torch.stack(columns, dim=1)


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    torch.manual_seed(order.seed)
    model = Model(order.rows)
    sparse = torch.optim.Adagrad(model.tables.parameters(), lr=0.1)
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    code = ecemb.Code(n=order.n, k=order.k)
    guard = ecemb.protect(model, optimizers=[sparse, dense], code=code, failure_domain="rank")

    fresh = guard.recovery.kind == "fresh"
    phases = [train(guard, model, sparse, dense, order, batch) for batch in order.batches] if fresh else []
    tensors = protected(model, sparse)
    dist.barrier()  # all have committed: the arenas stay as they are
    line.send(
        {
            "rank": dist.get_rank(),
            "step": guard.next_step,
            "lost": guard.recovery.lost,
            "digest": digest(tensors),
            "tensor_bytes": sum(tensor.nbytes for tensor in tensors),
            "bytes": guard.stats()["bytes"],
            "phases": phases,
        }
    )
    if fresh:
        line.await_end()
        return
    guard.close()
    dist.destroy_process_group()


def train(
    guard: ecemb.Guard,
    model: Model,
    sparse: torch.optim.Optimizer,
    dense: torch.optim.Optimizer,
    order: Order,
    batch: int,
) -> dict[str, Any]:
    """Runs a phase; what its largest step touched here, and what the arena has reserved after it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    touched_rows = 0
    for _ in range(order.steps):
        before = guard.stats()["captured_rows"]
        with guard.step() as step:
            sparse.zero_grad()
            dense.zero_grad()
            ids = model.draw(batch, (order.seed * 1000 + step.number) * ranks + rank)
            (model(ids).square().mean() / ranks).backward()
            for parameter in model.head.parameters():
                dist.all_reduce(parameter.grad)
            sparse.step()
            dense.step()
        touched_rows = max(touched_rows, guard.stats()["captured_rows"] - before)
    return {
        "batch": batch,
        "touched_bytes": touched_rows * RECORD_BYTES,
        "bytes": guard.stats()["bytes"],
    }


def protected(model: Model, sparse: torch.optim.Optimizer) -> list[Tensor]:
    """The tables' weights, and their optimizer's state."""
    weights = [table.weight.detach() for table in model.tables]
    return weights + [sparse.state[table.weight]["sum"] for table in model.tables]


def digest(tensors: list[Tensor]) -> str:
    """A hash of the tensors' bytes."""
    total = hashlib.blake2b()
    for tensor in tensors:
        total.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()
