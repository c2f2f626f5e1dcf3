"""One rank: a training script for torchrun, with ecemb or without it.

Ranks that are victims kill themselves inside a step, once in each life of the job but the last. Every rank
leaves its marks, the moments at which it had done each part of its start, in a file. The script imports
what it needs only in `main`: imports are a part of what is measured.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench.harness.devices import ARENA, CUDA, begin, settle
from bench.harness.guarded_job import GuardedJob
from bench.harness.job_file import JobFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    import ecemb
    from ecemb.place import Place

DIM = 64
RECORD_BYTES = 2 * 4 * DIM
"""Of one row: its weights and Adagrad's sums, float32."""
TABLES = 2
BARE, PROTECTED = "torchrun alone", "ecemb"
"""Methods."""
BLOCKING, BACKGROUND = "blocking", "background"
"""How lost memory is rebuilt."""
BACK = "back"
"""The mark of a process that stayed: when its training was called again."""
PARTS = ("agree", "kernels", "attach", "decide", "rebuild", "replicated", "verify", "restore", "rehearse")
"""Parts of `ecemb.protect` in a recovery, in their order, as `guard.recovery.seconds` names them."""
_POLL_S = 0.002
_PIECE_BYTES = 256 << 20


@dataclass(frozen=True)
class Order(GuardedJob, JobFile):
    """What the ranks are to do.

    Attributes:
        method: `BARE` or `PROTECTED`.
        folder: Where marks are left.
        rows: Of all tables of a rank.
        batch: Samples a rank takes in a step.
        steps: Of a life that ends with a kill, the killed one included; and of the last life.
        kills: How many lives end with one.
        victims: Ranks that are killed, all at once.
        with_memory: Their arenas go with them.
        device: Where tables are, one of `devices`; without ecemb, in this process's memory.
        stays: Whether `ecemb.run` calls the training.
        rebuild: How lost memory is rebuilt, as `ecemb.protect` takes it.
    """

    method: str
    folder: str
    rows: int
    batch: int
    steps: int
    kills: int
    victims: tuple[int, ...]
    with_memory: bool
    device: str = ARENA
    stays: bool = False
    rebuild: str = BLOCKING

    def file(self, life: int, what: object) -> Path:
        """A file of the folder: marks of a rank in a life of the job, say."""
        return Path(self.folder, f"{life}.{what}.json")

    def leave(self, life: int, what: object, content: object) -> None:
        """Writes such a file, whole."""
        path = self.file(life, what)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)


def process_began() -> float:
    """When this process was made, on time.monotonic(), to a hundredth of a second."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


def main(path: str) -> None:
    """Trains as the order in the file `path` says."""
    marks = {"process": process_began(), "interpreter": time.monotonic()}
    order = Order.read(path)
    import torch  # noqa: F401 # pyright: ignore[reportUnusedImport]

    marks["import torch"] = time.monotonic()
    if order.method == PROTECTED:
        import ecemb  # noqa: F401 # pyright: ignore[reportUnusedImport]

        marks["import ecemb"] = time.monotonic()
    run(Bags, order, marks)


def run(kind: type[Training], order: Order, marks: dict[str, float]) -> None:
    """Trains in this process: for one life of the job, or for several where it stays.

    Args:
        kind: What is trained.
        order: What to do.
        marks: The moments so far, which are those of the first life.
    """
    if not order.stays:
        train(kind, order, marks, None)
        return
    import ecemb

    def again(place: Place) -> None:
        train(kind, order, marks if place.calls == 1 else {BACK: time.monotonic()}, place)

    ecemb.run(again)


def train(kind: type[Training], order: Order, marks: dict[str, float], place: Place | None) -> None:
    """Trains for one life of the job.

    Args:
        kind: What is trained.
        order: What to do.
        marks: The moments so far; others are added.
        place: Of `ecemb.run`, which may keep the model.
    """
    import torch.distributed as dist

    if order.method == PROTECTED:
        import ecemb

        ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir)
    else:
        join(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    marks["process group"] = time.monotonic()
    if place is not None and kind.is_kept:
        training = copy.copy(place.keep("model", lambda: built(kind, order, None)))  # no guard is kept
    else:
        training = built(kind, order, place)
    training.run(marks)
    dist.destroy_process_group()


def built(kind: type[Training], order: Order, place: Place | None) -> Training:
    """A training with its model."""
    training = kind(order, place)
    training.build()
    return training


def join(life: int) -> None:
    """The process group of a start without ecemb.

    Not by `init_process_group("gloo")` alone: in torchrun's store it would find addresses of the life before.
    """
    import torch.distributed as dist

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(str(life), store), rank=rank, world_size=ranks)


class Training:
    """What comes after the process group: model, guard, steps, and death.

    A subclass has the model: `build`, `protected`, `train` and `tensors`.

    Attributes:
        is_kept: Whether a process that stays keeps the model: it has no process group.
        place: Of a training that isn't kept, where its process stays: keeps parts of it.
    """

    is_kept: ClassVar[bool] = False

    def __init__(self, order: Order, place: Place | None = None) -> None:
        import torch.distributed as dist

        self.order, self.place = order, place
        self.life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.marks: dict[str, float] = {}
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.on: torch.device | None = None  # where tables are, where they don't move into the arena
        self.guard: ecemb.Guard | None = None

    def build(self) -> None:
        """Makes the model and its optimizers."""
        raise NotImplementedError

    def protected(self) -> tuple[nn.Module, Sequence[Optimizer]]:
        """What the guard is given: the whole model, and all of its optimizers."""
        raise NotImplementedError

    def train(self, number: int, *, dies: bool) -> None:
        """One step. Calls `perish` in the middle of it, when rows have changed, if it `dies`."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """All that is trained here."""
        raise NotImplementedError

    def run(self, marks: dict[str, float]) -> None:
        """One life of the job, with the model that is built.

        Args:
            marks: The moments so far; others are added.
        """
        order, self.marks = self.order, marks
        self.marks["model"] = time.monotonic()
        begin = 0
        if order.method == PROTECTED:
            begin = self._protect().next_step
            self.life = begin // (order.steps - 1)  # what each life before has committed
        last = self.life == order.kills
        for number in range(begin, begin + order.steps):
            self._step(number, dies=not last and number == begin + order.steps - 1)
            if number == begin:
                self.marks["first step"] = time.monotonic()
                self._tell()
                if self.guard is not None:
                    self.guard.wait_rebuilt()
        order.leave(self.life, f"end.{self.rank}", {"digest": digest(self.tensors())})
        if self.guard is not None:
            self.guard.close()

    def _protect(self) -> ecemb.Guard:
        import ecemb

        began = self.marks["model"]
        model, optimizers = self.protected()
        code = ecemb.Code(n=self.order.n, k=self.order.k)
        self.guard = ecemb.protect(
            model, optimizers=optimizers, code=code, failure_domain="rank", rebuild=self.order.rebuild
        )
        for part in PARTS:
            began += self.guard.recovery.seconds.get(part, 0.0)
            self.marks[part] = began
        self.marks["rest of protect"] = time.monotonic()
        return self.guard

    def _step(self, number: int, *, dies: bool) -> None:
        if self.guard is None:
            self.train(number, dies=dies)
            return
        with self.guard.step():
            self.train(number, dies=dies)

    def generator(self, number: int) -> torch.Generator:
        """Draws a step's batch of this rank."""
        import torch

        return torch.Generator().manual_seed((self.order.seed * 1000 + number) * self.ranks + self.rank)

    def _tell(self) -> None:
        """Leaves this life's marks, and what else is to be known of its start."""
        told: dict[str, Any] = {"pid": os.getpid(), "marks": self.marks, "lost": []}
        if self.guard is not None:
            report = self.guard.recovery
            told |= {"kind": report.kind, "lost": report.lost, "step": report.step}
            told["rebuild_s"] = report.seconds.get("rebuild", 0.0)
            if report.lost and self.order.rebuild == BLOCKING:
                from bench.questions.recovery import wire as recovery_wire

                told["wire"] = recovery_wire.measure(self.order.job, self.order.arena_dir, report.lost)
            if self.life and self.on is not None and self.order.device != ARENA:
                told["copy_s"] = copied_s(self.order.rows * RECORD_BYTES, self.order.device, self.on)
        self.order.leave(self.life, self.rank, told)

    def perish(self) -> None:
        """Ends a victim by a SIGKILL, once the parent watches the other ranks; returns elsewhere."""
        if self.rank not in self.order.victims:
            return
        while not self.order.file(self.life, "watched").exists():
            time.sleep(_POLL_S)
        if self.order.with_memory and self.order.method == PROTECTED:
            from ecemb.memory.scan import arenas

            for one in arenas(self.order.arena_dir):
                if one.job == self.order.job and one.pid == os.getpid():
                    one.path.unlink()
        self.order.leave(self.life, f"killed.{self.rank}", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)


class Bags(Training):
    """Tables of `ecemb.nn`, on the meta device before protect; without ecemb, a rank's own tables."""

    is_kept = True

    def build(self) -> None:
        import torch
        from torch import nn

        protected = self.order.method == PROTECTED
        device = begin(self.order.device) if protected else None
        torch.manual_seed(self.order.seed)
        rows = self.order.rows // TABLES
        self.on = torch.device(device or "cpu")
        self.tables = nn.ModuleList(
            self._bag(rows, device) if protected else nn.EmbeddingBag(rows, DIM, sparse=True, device="meta")
            for _ in range(TABLES)
        )
        self.head = nn.Linear(DIM, 1, device=self.on)
        self.sparse: Optimizer = torch.optim.Adagrad(self.tables.parameters(), lr=0.1)
        self.dense: Optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)
        if not protected:  # zeros that nothing has touched yet
            for table in self.tables:
                torch.utils.swap_tensors(table.weight, nn.Parameter(untouched(rows)))
                self.sparse.state[table.weight]["sum"] = untouched(rows)

    def _bag(self, rows: int, device: str | None) -> nn.Module:
        """A table with this many rows on each rank; what stays on a device is drawn there."""
        from torch import nn

        import ecemb

        bag = ecemb.nn.ShardedEmbeddingBag(rows * self.ranks, DIM, device="meta")
        if device is not None:
            nn.init.uniform_(bag.to_empty(device=device).weight, -1, 1)
        return bag

    def protected(self) -> tuple[nn.Module, Sequence[Optimizer]]:
        from torch import nn

        return nn.ModuleList([self.tables, self.head]), [self.sparse, self.dense]

    def train(self, number: int, *, dies: bool) -> None:
        import torch
        import torch.distributed as dist

        generator, size = self.generator(number), (self.order.batch, 1)
        self.sparse.zero_grad()
        self.dense.zero_grad()
        pooled = sum(
            table(torch.randint(table.num_embeddings, size, generator=generator).to(self.on))
            for table in self.tables
        )
        (self.head(pooled).square().mean() / self.ranks).backward()
        for parameter in self.head.parameters():
            dist.all_reduce(parameter.grad)
        self.sparse.step()
        if dies:
            self.perish()
        self.dense.step()

    def tensors(self) -> list[Tensor]:
        found = [table.weight.detach() for table in self.tables]
        found += [self.sparse.state[table.weight]["sum"] for table in self.tables]
        return [*found, *(parameter.detach() for parameter in self.head.parameters())]


def copied_s(size: int, device: str, on: torch.device) -> float:
    """How long ranks take to copy `size` bytes each from pinned memory to the device at once. All ranks."""
    import torch
    import torch.distributed as dist

    piece = min(size, _PIECE_BYTES)
    held = torch.ones(piece, dtype=torch.uint8, pin_memory=device == CUDA)
    there = held.to(on, copy=True)
    settle(device)
    dist.barrier()
    began = time.perf_counter()
    for at in range(0, size, piece):
        left = min(piece, size - at)
        there[:left].copy_(held[:left], non_blocking=True)
    settle(device)
    return time.perf_counter() - began


def untouched(rows: int) -> Tensor:
    """Zeros that take no memory, and no time, before they are used; then by the page of 4 KiB."""
    import mmap

    import numpy as np
    import torch

    memory = mmap.mmap(-1, max(1, rows * DIM * 4))
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # which would fill 2 MiB for each row
    return torch.from_numpy(np.frombuffer(memory, np.float32, rows * DIM).reshape(rows, DIM))


def digest(tensors: list[Tensor]) -> str:
    """A hash of the tensors' bytes."""
    total = hashlib.blake2b()
    for tensor in tensors:
        total.update(tensor.cpu().numpy().data.cast("B"))
    return total.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1])
