"""One rank: joins the job, trains to a step, and reports what its memory holds then."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import ecemb
from bench.harness.guarded_job import GuardedJob
from bench.harness.ranks import Line
from bench.questions.scaling.rank import Model

DIM = 8
KILLED = 1
"""The life that ends with a kill."""


@dataclass(frozen=True)
class Order(GuardedJob):
    """What a rank is to do.

    Attributes:
        port: Of the store, which outlives the ranks as torchrun's does.
        life: Of the job, from 1.
        until: Step that it trains to.
        rows: Of the table on each rank.
        batch: Samples a rank takes in a step.
    """

    port: int
    life: int
    until: int
    rows: int
    batch: int


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    if order.life > KILLED:  # torchrun numbers restarted workers as it likes
        os.environ["RANK"] = str(ranks - 1 - int(os.environ["RANK"]))
    os.environ.update(MASTER_PORT=str(order.port), TORCHELASTIC_USE_AGENT_STORE="True")
    began = time.monotonic()
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir, timeout=timeout)
    rank = dist.get_rank()
    torch.manual_seed(order.seed)
    model = Model(order.rows * ranks, DIM)
    sparse = torch.optim.Adagrad(model.table.parameters(), lr=0.1)
    dense = torch.optim.SGD(model.head.parameters(), lr=0.1)
    code = ecemb.Code(n=order.n, k=order.k)
    guard = ecemb.protect(model, optimizers=[sparse, dense], code=code, failure_domain="rank")
    seconds, first = time.monotonic() - began, guard.next_step
    for _ in range(first, order.until):
        with guard.step() as step:
            sparse.zero_grad()
            dense.zero_grad()
            drawn = torch.Generator().manual_seed((order.seed * 1000 + rank) * 1000 + step.number)
            ids = torch.randint(order.rows * ranks, (order.batch, 1), generator=drawn)
            (model(ids).square().mean() / ranks).backward()
            for parameter in model.head.parameters():
                dist.all_reduce(parameter.grad)
            sparse.step()
            dense.step()
    state = [value for held in (sparse, dense) for one in held.state.values() for value in one.values()]
    answer = {
        "rank": rank,
        "seconds": seconds,
        "first": first,
        "digest": digest([*model.parameters(), *state]),
    }
    answer["wrong_words"] = guard.scrub().wrong_words
    line.send(answer)
    line.await_end()


def digest(values: Iterable[object]) -> str:
    """Of tensors' bytes."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
