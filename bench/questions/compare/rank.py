"""One rank of the head to head: a training script for torchrun, under one method, beside an unprotected twin.

In the job's first life the twin is trained before the method's model, in the last one after it: what a method
does beside training has ended when the twin's turn comes. Steps of warm-up before
`prepare`, in each life, let DistributedDataParallel settle in which order it sums; state is brought back to
what it was after them, or before the failure, under every method.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import ecemb
from baselines.method import Method, Training
from bench.harness.job_file import JobFile
from bench.methods.life import Failure, live
from bench.methods.registry import METHODS, Place, ScaledJob
from bench.workloads.click_training import auc
from bench.workloads.models import ENGINES, Batch, Twin
from bench.workloads.planted import WEIGHTS
from bench.workloads.training_rank import WARM_UP, Clicks, digest, draw

_PATIENCE_S = 60.0
_POLL_S = 0.001


@dataclass(frozen=True)
class Order(JobFile):
    """What the ranks are to do.

    Attributes:
        engine: One of `ENGINES`.
        method: One of `METHODS`.
        folder: Of ledgers, of what the ranks end with, and of saves, which outlive machines.
        memory: Folder on tmpfs, for arenas and all that is lost with a machine.
        reference: Folder with what undisturbed ranks end with; "": to be written here.
        job: The job's name.
        tables: Number of tables.
        rows: Of each table, over all ranks.
        dim: Of each row.
        lookups: Rows of each table that a sample looks up.
        dense: One of `models.DENSE`.
        batch: Samples a rank takes in a step.
        skew: See `training_rank.Order`.
        steps: Of the whole training.
        held_out: Batches of each rank that the model is asked at the end.
        killed: The step that is cut off in the first life; -1: none.
        victims: Ranks that are killed in it, with their memory, all of them before any is missed.
        killed_after_s: From the beginning of the second life's first step on; then another is killed.
        next_victim: Which.
        mtbf_steps: See `ScaledJob`.
        step_h: See `ScaledJob`.
        step_s: See `ScaledJob`.
        bytes_per_s: Of storage, for each rank.
        twin_steps: Of the unprotected twin, each time.
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
    held_out: int
    killed: int
    victims: tuple[int, ...]
    killed_after_s: float
    next_victim: int
    mtbf_steps: int
    step_h: float
    step_s: float
    bytes_per_s: float
    twin_steps: int
    seed: int
    timeout_s: float

    def ledgers(self, life: int | None = None) -> Path:
        """Folder of the ledgers of the method; or of the twin in one life."""
        path = Path(self.folder, "ledgers" if life is None else f"twin.{life}")
        path.mkdir(exist_ok=True)
        return path

    def end(self, rank: int) -> Path:
        """What a rank writes at its end."""
        return Path(self.folder, f"end.{rank}.json")


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
        drawn = draw(order, self._rank, order.steps + WARM_UP + order.held_out)
        batches = learnable(drawn, order, self._rank)
        self._batches, self._held_out = batches[: -order.held_out], batches[-order.held_out :]

    def train_twin(self) -> None:
        """The unprotected one."""
        self._live("nothing", self._warm(), self._order.twin_steps, self._order.ledgers(self._life))

    def train(self) -> None:
        """Under the method, until this rank is killed or the training is done."""
        order, twin = self._order, self._warm()
        began = [tensor.detach().clone() for tensor in twin.tensors()] if not order.reference else []
        method = self._live(order.method, twin, order.steps, order.ledgers(), self._failures())
        self._tell(twin, began, method)

    def _failures(self) -> list[Failure]:
        order = self._order
        if not order.victims or self._life > 1:
            return []
        if self._life == 0:
            return [Burst(order.killed, order.victims, folder=order.folder)]
        return [Failure(-1, (order.next_victim,), "clock", after_s=order.killed_after_s)]

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
    ) -> Method:
        order = self._order
        place = Place(
            Path(order.folder, "files"),
            Path(order.memory, str(self._rank)),
            job=ScaledJob(order.mtbf_steps, order.step_s, order.step_h, self._ranks),
            bytes_per_s=order.bytes_per_s,
        )
        made = METHODS[method](place)
        live(
            made,
            Training(twin.model, twin.optimizers, samples=order.batch * self._ranks),
            lambda number: twin.train(self._batches[number]),
            steps,
            rank=self._rank,
            folder=ledgers,
            failures=failures or (),
        )
        return made

    def _tell(self, twin: Twin, began: list[Tensor], method: Method) -> None:
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
            "interval_steps": method.interval_steps,
            **self._quality(twin),
        }
        order.end(self._rank).write_text(json.dumps(told), encoding="utf-8")

    @torch.no_grad()
    def _quality(self, twin: Twin) -> dict[str, float]:
        """Of what all ranks have held out. All ranks."""
        own = [torch.cat([twin.logits(batch), batch.clicks], 1) for batch in self._held_out]
        mine = torch.cat(own)
        every = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(every, mine)
        logits, clicks = torch.cat(every).unbind(1)
        loss = functional.binary_cross_entropy_with_logits(logits, clicks)
        return {"log_loss": float(loss), "auc": auc(logits, clicks)}

    def _reference(self, folder: str, number: int) -> Path:
        return Path(folder, f"{self._rank}.{number}.npy")


def learnable(batches: list[Batch], order: Clicks, rank: int) -> list[Batch]:
    """The same samples, with clicks that can be learnt: categories have weights, the same on all ranks."""
    shared, own = np.random.default_rng([order.seed, 0, 1]), np.random.default_rng([order.seed, rank, 2])
    weights = WEIGHTS * shared.uniform(-1, 1, (order.tables, order.rows))
    found: list[Batch] = []
    for batch in batches:
        log_odds = np.take_along_axis(weights[:, None, :], batch.ids.numpy(), 2).sum((0, 2))
        clicks = own.random(len(log_odds)) < 1 / (1 + np.exp(-log_odds))
        found.append(batch._replace(clicks=torch.from_numpy(clicks[:, None].astype(np.float32))))
    return found


if __name__ == "__main__":
    main(sys.argv[1])
