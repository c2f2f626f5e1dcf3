"""One rank: joins the job, trains to a step, and reports what its memory holds then."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from bench.harness.ranks import Line
from bench.workloads.table_training import TableJob, TableTraining

KILLED = 1
"""The life that ends with a kill."""


@dataclass(frozen=True, kw_only=True)
class Order(TableJob):
    """What a rank is to do.

    Attributes:
        port: Of the store, which outlives the ranks as torchrun's does.
        life: Of the job, from 1.
        until: Step that it trains to.
    """

    port: int
    life: int
    until: int


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    ranks = int(os.environ["WORLD_SIZE"])
    if order.life > KILLED:  # torchrun numbers restarted workers as it likes
        os.environ["RANK"] = str(ranks - 1 - int(os.environ["RANK"]))
    os.environ.update(MASTER_PORT=str(order.port), TORCHELASTIC_USE_AGENT_STORE="True")
    began = time.monotonic()
    training = TableTraining(order)
    seconds, first = time.monotonic() - began, training.guard.next_step
    for _ in range(first, order.until):
        training.step()
    state = [value for held in training.optimizers for one in held.state.values() for value in one.values()]
    answer = {
        "rank": training.rank,
        "seconds": seconds,
        "first": first,
        "digest": digest([*training.model.parameters(), *state]),
    }
    answer["wrong_words"] = training.guard.scrub().wrong_words
    line.send(answer)
    line.await_end()


def digest(values: Iterable[object]) -> str:
    """Of tensors' bytes."""
    found = hashlib.blake2b(digest_size=16)
    for value in values:
        if isinstance(value, Tensor):
            found.update(value.detach().contiguous().numpy().tobytes())
    return found.hexdigest()
