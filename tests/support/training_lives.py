"""A small training on real ranks, launch after launch: what tests of starts and of checkpoints share.

A *life* is what happens between a launch and the next: at its end a process forgets all that it has of the
job, and gives up its claim on the arena, as if it had died. (Processes that really die are tests/failures'
affair.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ecemb
from ecemb import session as sessions

CODE = ecemb.Code(n=3, k=2)
TIMEOUT = timedelta(seconds=300)
DIM, STEPS = 3, 5

_past: list[object] = []


@contextmanager
def launched(job: str, arena_dir: str | Path, host: str) -> Iterator[None]:
    """One life; the environment is torchrun's already.

    Its process group stays until the next one's end: a DistributedDataParallel that were the last to hold it
    would wait for gloo's threads with the GIL, which they need to drop a tensor.
    """
    ecemb.init_process_group("gloo", job=job, arena_dir=arena_dir, host=host, timeout=TIMEOUT)
    group = dist.group.WORLD
    try:
        yield
    finally:
        session = sessions.current()
        for arena in (session.arena, *session.held):
            if arena is not None:
                arena.close()
        if session.watch is not None:
            session.watch.say_goodbye()
        sessions._session = None
        dist.destroy_process_group()
        _past[:] = [group]


class Training:
    """A table sharded over the ranks, dense layers, and noise of each rank's own.

    Args:
        head: makes the dense layers.
        rows: of the table.
        device: of the table.
        kind: "adagrad", "adam" or "sgd", for the table.
    """

    def __init__(self, head: Callable[[], nn.Module], *, rows: int, device: str | None, kind: str) -> None:
        torch.manual_seed(1)
        self.bag = ecemb.nn.ShardedEmbeddingBag(rows, DIM, device=device)
        self.head = head()
        self.model = nn.ModuleDict({"bag": self.bag, "head": self.head})
        make = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam, "sgd": torch.optim.SGD}
        self.sparse = make[kind](self.bag.parameters(), lr=0.3)
        self.dense = torch.optim.Adam(self.head.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.dense, 0.9)
        torch.manual_seed(100 + dist.get_rank())

    def protect(self, **changes: Any) -> ecemb.Guard:
        arguments = {
            "optimizers": [self.sparse, self.dense],
            "code": CODE,
            "state": [self.schedule],
            "failure_domain": "host",
        }
        return ecemb.protect(self.model, **{**arguments, **changes})

    def step(self, number: int) -> None:
        self.sparse.zero_grad()
        self.dense.zero_grad()
        ids = torch.randint(self.bag.num_embeddings, (4, 2))
        target = torch.rand(4, 1) + number
        loss = (self.head(self.bag(ids)) - target).pow(2).mean()
        loss.backward()
        for parameter in self.head.parameters():
            dist.all_reduce(parameter.grad)
        for buffer in self.head.buffers():
            dist.all_reduce(buffer)
        self.sparse.step()
        self.dense.step()
        self.schedule.step()

    def run(self, guard: ecemb.Guard, until: int = STEPS) -> None:
        for _ in range(guard.next_step, until):
            with guard.step() as step:
                self.step(step.number)
