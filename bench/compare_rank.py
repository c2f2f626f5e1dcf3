"""One rank of `bench.compare`: a training script for torchrun, under one method, beside an unprotected twin.

In the job's first life the twin is trained before the method's model, in the later ones after it: each life
has both, and what a method does beside training has ended when the twin's turn comes. Steps of warm-up before
`prepare`, in each life, let DistributedDataParallel settle in which order it sums; state is brought back to
what it was after them, or before the failure, whatever the method.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ecemb
from bench.method import Failure, Training, live
from bench.methods import METHODS, Place
from bench.order import Written
from bench.overhead_models import ENGINES, Twin
from bench.overhead_rank import WARM_UP, digest, draw


@dataclass(frozen=True)
class Order(Written):
    """What the ranks are to do.

    Attributes:
        engine: One of `ENGINES`.
        method: One of `METHODS`.
        folder: Of ledgers, of what the ranks end with, and of saves, which outlive machines.
        memory: Folder on tmpfs, for arenas and all that is lost with a machine.
        reference: Folder with what ranks end with if nobody is killed; "": to be written here.
        job: The job's name.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        lookups: Rows of each table that a sample looks up.
        dense: One of `overhead_models.DENSE`.
        batch: Samples a rank takes in a step.
        skew: See `overhead_rank.Order`.
        steps: Of the whole training.
        killed: The step that is cut off; -1: none.
        victims: Ranks that are killed in it, with their memory.
        every: See `Place`.
        twin_steps: Of the unprotected twin, in each life.
        seed: Of all that is drawn.
        timeout_s: Of every wait for another rank.
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
    killed: int
    victims: tuple[int, ...]
    every: int
    twin_steps: int
    seed: int
    timeout_s: float

    def ledgers(self, life: int | None = None) -> Path:
        """Folder of the ledgers of the method; or of the twin in one life."""
        path = Path(self.folder, "ledgers" if life is None else f"twin.{life}")
        path.mkdir(exist_ok=True)
        return path

    def end(self, rank: int) -> Path:
        """What a rank tells at its end."""
        return Path(self.folder, f"end.{rank}.json")


def main(path: str) -> None:
    """Trains as the order in the file `path` says."""
    order = Order.read(path)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    arenas = Path(order.memory, "arenas")
    arenas.mkdir(exist_ok=True, mode=0o700)
    ecemb.init_process_group(
        "gloo", job=order.job, arena_dir=arenas, timeout=timedelta(seconds=order.timeout_s)
    )
    one = Rank(order, life)
    if life == 0:
        one.train_twin()
    one.train()
    if life > 0:
        one.train_twin()
    dist.destroy_process_group()


class Rank:
    """One life of a rank."""

    def __init__(self, order: Order, life: int) -> None:
        self._order, self._life = order, life
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._batches = draw(order, self._rank, order.steps + WARM_UP)

    def train_twin(self) -> None:
        """The unprotected one."""
        self._live("nothing", self._warm(), self._order.twin_steps, self._order.ledgers(self._life))

    def train(self) -> None:
        """Under the method, until this rank is killed or the training is done."""
        order, twin = self._order, self._warm()
        began = [tensor.detach().clone() for tensor in twin.tensors()] if not order.reference else []
        failures = [Failure(order.killed, order.victims)] if self._life == 0 else []
        self._live(order.method, twin, order.steps, order.ledgers(), failures)
        self._tell(twin, began)

    def _warm(self) -> Twin:
        """A model that has been trained on the last batches."""
        order = self._order
        torch.manual_seed(order.seed)
        twin = ENGINES[order.engine](order.tables, order.rows, order.dim, order.dense)
        for batch in self._batches[order.steps :]:
            twin.train(batch)
        return twin

    def _live(
        self, method: str, twin: Twin, steps: int, ledgers: Path, failures: list[Failure] | None = None
    ) -> None:
        order = self._order
        place = Place(Path(order.folder, "files"), Path(order.memory, str(self._rank)), order.every)
        samples = order.batch * self._ranks
        live(
            METHODS[method](place),
            Training(twin.model, twin.optimizers, samples=samples),
            lambda number: twin.train(self._batches[number]),
            steps,
            rank=self._rank,
            folder=ledgers,
            failures=failures or (),
        )

    def _tell(self, twin: Twin, began: list[torch.Tensor]) -> None:
        """Leaves what the training has come to: as the reference, or against it."""
        order = self._order
        tensors = [tensor.detach() for tensor in twin.tensors()]
        if not order.reference:
            for number, tensor in enumerate(tensors):
                np.save(self._reference(order.folder, number), tensor.numpy())
            others = began
        else:
            others = [
                torch.from_numpy(np.load(self._reference(order.reference, number), mmap_mode="c"))
                for number in range(len(tensors))
            ]
        distance = sum(
            float((a.double() - b.double()).square().sum()) for a, b in zip(tensors, others, strict=True)
        )
        told = {
            "digest": digest(tensors),
            "squared_distance": distance,
            "table_bytes": sum(tensor.nbytes for table in twin.tables() for tensor in table),
        }
        order.end(self._rank).write_text(json.dumps(told), encoding="utf-8")

    def _reference(self, folder: str, number: int) -> Path:
        return Path(folder, f"{self._rank}.{number}.npy")


if __name__ == "__main__":
    main(sys.argv[1])
