"""One rank of a launch: a script for torchrun, which trains a script of the reader under one method."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ecemb
from baselines.state import TrainingState
from bench.harness.devices import ARENA, CUDA
from bench.harness.job_file import JobFile
from bench.methods.ledger import Ledger, account
from bench.methods.life import Failure, live
from bench.methods.registry import METHODS, Domain, Place
from bench.questions.compare.beside_twins import NEVER
from bench.questions.compare_cluster.steps import EVERY, Steps
from bench.questions.compare_cluster.watched import Watched, host
from bench.workloads.scripts import Job, load
from bench.workloads.training_rank import WARM_UP, digest


@dataclass(frozen=True)
class Order(JobFile):
    """What the ranks are to do.

    Attributes:
        folder: Of ledgers, of what the ranks end with, and of saves; all hosts see it.
        memory: Folder on tmpfs of each host, of this launch alone.
        job: The job's name.
        method: One of `METHODS`.
        script: Path of what is trained; see `bench.workloads.scripts`.
        settings: NAME=VALUE each, for it.
        device: "cpu" or "cuda".
        backend: "gloo" or "nccl".
        domain: Over which ecemb spreads parity.
        ranks_per_host: Ranks on each host.
        plain: Steps whose cost is measured; see `Steps`.
        kills: See `Steps`; 0 for none.
        steps: Of the training.
        cut_off: Steps in which a rank dies, one in each life but the last.
        victims: The rank that dies in each of them.
        noted: Number of steps after which an undisturbed training also says what it came to; 0 for none.
        seed: Of all that is drawn.
        timeout_s: Of every wait for another rank.
    """

    folder: str
    memory: str
    job: str
    method: str
    script: str
    settings: tuple[str, ...]
    device: str
    backend: str
    domain: Domain
    ranks_per_host: int
    plain: int
    kills: int
    steps: int
    cut_off: tuple[int, ...]
    victims: tuple[int, ...]
    noted: int
    seed: int
    timeout_s: float

    @property
    def ledgers(self) -> Path:
        """Folder of the ledgers."""
        return Path(self.folder, "ledgers")

    @property
    def marks(self) -> Path:
        """Folder of the marks of `Watched`."""
        return Path(self.folder, "marks")

    def end(self, rank: int, steps: int) -> Path:
        """What a rank has come to after this many steps."""
        return Path(self.folder, f"end.{rank}.{steps}.json")


def main(path: str) -> None:
    """Trains as the order in the file `path` says."""
    order = Order.read(path)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if order.device == CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    arenas = Path(order.memory, "arenas")
    arenas.mkdir(parents=True, exist_ok=True, mode=0o700)
    backend = "cpu:gloo,cuda:nccl" if order.backend == "nccl" else order.backend
    timeout = timedelta(seconds=order.timeout_s)
    ecemb.init_process_group(backend, job=order.job, arena_dir=arenas, timeout=timeout)
    Rank(order).train()
    dist.barrier()
    dist.destroy_process_group()
    if os.environ["LOCAL_RANK"] == "0":
        shutil.rmtree(order.memory, ignore_errors=True)


class Rank:
    """One life of a rank."""

    def __init__(self, order: Order) -> None:
        self._order, self._script = order, load(order.script)
        self._rank, ranks = dist.get_rank(), dist.get_world_size()
        on_device = order.device == CUDA
        self._job = Job(
            self._rank,
            ranks,
            torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu"),
            order.seed,
            dict(one.split("=", 1) for one in order.settings),
        )
        self._life = self._lives_before()
        torch.manual_seed(order.seed)
        np.random.seed(order.seed)
        random.seed(order.seed)
        self._training = self._script.build(self._job)
        for number in range(WARM_UP):  # DistributedDataParallel settles in which order it sums
            self._script.train(self._training, self._script.batch(self._job, number))
        local = os.environ["LOCAL_RANK"] == "0"
        notes = Ledger(order.marks, self._rank)
        if local:
            notes.note(**host())
        notes.note(clock_s=time.time() - time.monotonic(), life=self._life)
        place = Place(
            Path(order.folder, "files"),
            Path(order.memory, str(self._rank)),
            every=EVERY if self._life else NEVER,
            in_threads=True,
            domain=order.domain,
            ranks_per_host=order.ranks_per_host,
        )
        self._method = Watched(
            METHODS[order.method](place),
            Steps(order.plain, order.kills),
            notes,
            CUDA if on_device else ARENA,
            first=self._life == 0 and order.plain > 0,
            host=local,
            at=self._at,
        )

    def train(self) -> None:
        """Under the method, until a rank is killed or the training is done."""
        order = self._order
        live(
            self._method,
            self._training,
            lambda number: self._script.train(
                self._training, self._script.batch(self._job, WARM_UP + number)
            ),
            order.steps,
            rank=self._rank,
            folder=order.ledgers,
            failures=self._failures(),
        )
        self._say(order.steps)

    def _failures(self) -> list[Failure]:
        if self._life >= len(self._order.cut_off):
            return []
        return [Failure(self._order.cut_off[self._life], (self._order.victims[self._life],))]

    def _lives_before(self) -> int:
        """How often the ranks have trained before, as their ledgers say. All ranks."""
        own = 0
        with suppress(FileNotFoundError):  # of the first life
            own = len(account(self._order.ledgers, self._rank).lives)
        most = torch.tensor([own])
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _at(self, number: int) -> None:
        if number and number == self._order.noted:
            self._say(number)

    def _say(self, steps: int) -> None:
        """Leaves what the training has come to after this many steps."""
        order, state = self._order, TrainingState(self._training)
        own, shared = state.take()
        plain = {key: tensor for key, tensor in (own | shared).items() if "/" in key}  # not what is packed
        came_to = {
            "digest": _digest([tensor for _, tensor in sorted(plain.items())]),
            "finite": all(_is_finite(one) for key, one in plain.items() if not key.startswith("generator/")),
            "table_bytes": sum(tensor.nbytes for tensor in state.rows().values()),
            "samples": self._training.samples,
        }
        path = order.end(self._rank, steps)
        path.with_suffix(".partial").write_text(json.dumps(came_to), encoding="utf-8")
        path.with_suffix(".partial").rename(path)


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    return hashlib.sha256("".join(digest([one]) for one in tensors).encode()).hexdigest()


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


if __name__ == "__main__":
    main(sys.argv[1])
