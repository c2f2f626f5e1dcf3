"""One rank of a training whose ranks are killed: a script for torchrun, under one method.

In each life but the last, one rank dies, or two at once in the first. The others start again as well, in new
processes, or in those that they have (`Order.stays`). Steps of warm-up before `prepare` let
DistributedDataParallel settle in which order it sums; state is brought back to what it was after them, or
before the failure, under every method.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ecemb
from baselines.method import Method, Training
from bench.harness.job_file import JobFile
from bench.methods.ledger import lives
from bench.methods.life import Failure, goes_on, live
from bench.methods.registry import METHODS, Place
from bench.workloads.models import ENGINES, Twin
from bench.workloads.training_rank import WARM_UP, digest, draw

_PATIENCE_S = 60.0
_POLL_S = 0.001
_EACH = 16
"""One row of this many is compared for how far it is off."""


@dataclass(frozen=True)
class Order(JobFile):
    """What the ranks are to do.

    Attributes:
        engine: One of `ENGINES`.
        method: One of `METHODS`.
        folder: Of ledgers, of what the ranks end with, and of saves, which outlive machines.
        memory: Folder on tmpfs, for arenas and all that is lost with a machine.
        reference: Folder with what undisturbed ranks came to; "": to be written here.
        job: The job's name.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        lookups: Rows of each table that a sample looks up.
        dense: One of `models.DENSE`.
        batch: Samples a rank takes in a step.
        skew: See `training_rank.Order`.
        steps: Of the whole training.
        noted: Further numbers of steps after which an undisturbed training says what it came to.
        kills: Lives that end with a failure.
        killed: The step that is cut off in the first of them, after the optimizers.
        victims: Ranks that die in it, with their memory, all of them before any is missed.
        apart_s: Least and most time from the begin of a later life's first step to its failure.
        every: Steps between saves.
        bytes_per_s: Of storage, for each rank.
        seed: Of all that is drawn.
        timeout_s: Of every wait for another rank.
        stays: Whether the ranks that live stay in their processes when one dies, by `ecemb.run`.
    """

    engine: str
    method: str
    folder: str
    memory: str
    reference: str
    job: str
    tables: int
    rows: int
    dim: int
    lookups: int
    dense: str
    batch: int
    skew: float
    steps: int
    noted: tuple[int, ...]
    kills: int
    killed: int
    victims: tuple[int, ...]
    apart_s: tuple[float, float]
    every: int
    bytes_per_s: float
    seed: int
    timeout_s: float
    stays: bool = False

    @property
    def ledgers(self) -> Path:
        """Folder of the ledgers."""
        path = Path(self.folder, "ledgers")
        path.mkdir(exist_ok=True)
        return path

    def end(self, rank: int, steps: int | None = None) -> Path:
        """What a rank has come to after this many steps; by default, at its end."""
        return Path(self.folder, f"end.{rank}.{self.steps if steps is None else steps}.json")

    def struck(self, life: int, ranks: int) -> tuple[int, ...]:
        """The ranks that die in a life: others in turn, the last one after the first failure."""
        if life >= self.kills:
            return ()
        return self.victims if life == 0 else ((ranks - life) % ranks,)


@dataclass(frozen=True)
class Burst(Failure):
    """Ranks that die at once: each takes its memory away, and waits until all have.

    None is missed before.

    Attributes:
        folder: That they meet in.
    """

    folder: str = ""

    def strike(self, rank: int, method: Method) -> None:
        """See `Failure.strike`."""
        if rank not in self.ranks:
            return
        for path in method.memory():
            path.unlink()
        Path(self.folder, f"struck.{rank}").touch()
        deadline = time.monotonic() + _PATIENCE_S
        while not all(Path(self.folder, f"struck.{one}").exists() for one in self.ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {self.ranks} were to die together, and did not all come to it")
            time.sleep(_POLL_S)
        super().strike(rank, method)


def main(path: str) -> None:
    """Trains as the order in the file `path` says."""
    order = Order.read(path)
    torch.set_num_threads(1)
    Path(order.memory, "arenas").mkdir(exist_ok=True, mode=0o700)
    if order.stays:
        ecemb.run(lambda _: train(order))
    else:
        train(order)


def train(order: Order) -> None:
    """One life."""
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=Path(order.memory, "arenas"), timeout=timeout)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if order.stays:
        life = lives(order.ledgers, dist.get_rank())
    Rank(order, life).train()
    dist.destroy_process_group()


class Rank:
    """One life of a rank."""

    def __init__(self, order: Order, life: int) -> None:
        self._order, self._life = order, life
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        batches = draw(order, self._rank, WARM_UP + order.steps)
        before, self._batches = batches[:WARM_UP], batches[WARM_UP:]
        torch.manual_seed(order.seed)
        self._twin: Twin = ENGINES[order.engine](order.tables, order.rows, order.dim, order.dense)
        for batch in before:
            self._twin.train(batch)
        self._began = self._sampled() if not order.reference else []
        self._method: Method | None = None

    def train(self) -> None:
        """Under the method, until a rank is killed or the training is done."""
        order, twin = self._order, self._twin
        place = Place(
            Path(order.folder, "files"),
            Path(order.memory, str(self._rank)),
            every=order.every,
            bytes_per_s=order.bytes_per_s,
            in_threads=True,
        )
        self._method = METHODS[order.method](place)
        live(
            self._method,
            Training(twin.model, twin.optimizers, samples=order.batch * self._ranks),
            self._body,
            order.steps,
            rank=self._rank,
            folder=order.ledgers,
            failures=self._failures(),
        )
        self._say(order.steps)

    def _body(self, number: int) -> None:
        if self._order.stays:
            goes_on()
        if number in self._order.noted:
            self._say(number)
        self._twin.train(self._batches[number])

    def _failures(self) -> list[Failure]:
        order, life = self._order, self._life
        struck = order.struck(life, self._ranks)
        if not struck:
            return []
        if life == 0:
            return [Burst(order.killed, struck, folder=order.folder)]
        after_s = random.Random(order.seed * 1000 + life).uniform(*order.apart_s)
        return [Failure(-1, struck, "clock", after_s=after_s)]

    def _say(self, steps: int) -> None:
        """Leaves what the training has come to after this many steps, as the reference or against it."""
        order, sampled = self._order, self._sampled()
        others = self._began
        if order.reference:
            paths = [self._sample(order.reference, number, steps) for number in range(len(sampled))]
            others = [np.load(path) for path in paths]
        else:
            for number, rows in enumerate(sampled):
                np.save(self._sample(order.folder, number, steps), rows)
        came_to = {
            "digest": digest([tensor.detach() for tensor in self._twin.tensors()]),
            "squared_distance": sum(
                float(((a.astype(np.float64) - b) ** 2).sum()) for a, b in zip(sampled, others, strict=True)
            ),
            "table_bytes": sum(tensor.nbytes for table in self._twin.tables() for tensor in table),
        }
        order.end(self._rank, steps).write_text(json.dumps(came_to), encoding="utf-8")

    def _sampled(self) -> list[Any]:
        """A part of the rows of all that training changes."""
        return [tensor.detach()[::_EACH].numpy().copy() for tensor in self._twin.tensors()]

    def _sample(self, folder: str, number: int, steps: int) -> Path:
        return Path(folder, f"{self._rank}.{number}.{steps}.npy")


if __name__ == "__main__":
    main(sys.argv[1])
