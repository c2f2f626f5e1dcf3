"""One worker of `bench.gpu_keeper`: trains a table in a keeper's memory, and is ended in the middle of it.

A step first copies the rows that it will change to a journal in the same memory, and then changes them. Two
words there say which step is prepared and which is committed. All of it is work for one stream, which a
device does in that order, so that the host never waits for it, and whatever the moment of a kill, the words
tell the next worker whether rows have to go back. An undo that is killed is begun again: it writes the same.

Must not know: who keeps the memory, and what is compared with what.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.devices import CUDA, begin, settle
from bench.gpu_image import imaged
from bench.gpu_keeper_memory import attached
from bench.overhead_rank import digest, folded
from bench.ranks import Line
from bench.result import WrongResult
from bench.timing import interleaved
from ecemb.adapters.image import Fetcher

HELD, FREE, FAULTY, WHOLE = "held", "free", "faulty", "whole"
"""A worker's life: killed half way through a step, killed at any moment, ended by a fault of the device half
way through a step, or whole, with all that is measured and compared."""
COUNT, PREPARED, COMMITTED = range(3)
"""Words: rows in the journal, the step that they are of, and the last step that was committed."""
PIECES = 4
"""In which a step changes its rows, one after another."""
DECAY = 0.5
STRIDE = 48_271
"""Between the rows of the first step; of later ones, other odd numbers: no row comes twice among a power of
two of them, and any two steps have some in common."""
ALIGN_BYTES = 512
HOLD_CYCLES = 1_000_000_000
"""For which a held step keeps the device busy: about half a second."""


@dataclass(frozen=True)
class Shape:
    """Of a table and its journal.

    Attributes:
        rows: Of the table, a power of two.
        dim: Values of a row, float32.
        touched: Rows that a step changes.
    """

    rows: int
    dim: int
    touched: int

    @property
    def parts(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """The table; of the journal: records, rows' numbers, and words."""
        return (
            (torch.float32, (self.rows, self.dim)),
            (torch.float32, (self.touched, self.dim)),
            (torch.int64, (self.touched,)),
            (torch.int64, (3,)),
        )

    @property
    def table_bytes(self) -> int:
        """Bytes of the table."""
        return 4 * self.rows * self.dim

    @property
    def ends(self) -> list[int]:
        """Where the parts end in a block of bytes, aligned."""
        ends: list[int] = []
        for dtype, shape in self.parts:
            size = dtype.itemsize * int(np.prod(shape))
            ends.append(-(-((ends[-1] if ends else 0) + size) // ALIGN_BYTES) * ALIGN_BYTES)
        return ends


@dataclass(frozen=True)
class Order:
    """What a worker is to do.

    Attributes:
        device: One of `devices`.
        address: Of the keeper.
        shape: Of what it keeps.
        life: How this worker's ends.
        steps: That are committed before the one that is not, or before the end of a life that is whole.
        watch_s: How long to look whether the last worker's kernels still write.
        repeats: Of what is measured in a life that is whole; 0 for nothing.
        at_least_s: See `timing.interleaved`.
        seed: Of all that is drawn.
        timeout_s: For the keeper's answer.
    """

    device: str
    address: str
    shape: Shape
    life: str
    steps: int
    watch_s: float
    repeats: int
    at_least_s: float
    seed: int
    timeout_s: float


class Journalled:
    """A table and its journal, in a block of bytes.

    Args:
        block: As a keeper began it, or as other workers left it; read and overwritten.
        shape: The same for all of them.
        seed: Of what steps add.
    """

    def __init__(self, block: torch.UntypedStorage, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._seed = seed
        own = torch.empty(0, dtype=torch.uint8, device=block.device).set_(block, 0, (shape.ends[-1],))
        self.table, self.records, self.ids, self.words = (
            own[begin : begin + dtype.itemsize * int(np.prod(size))].view(dtype).view(size)
            for (dtype, size), begin in zip(shape.parts, [0, *shape.ends], strict=False)
        )

    def committed(self) -> int:
        """The last step that was."""
        return int(self.words[COMMITTED])

    def step(self, number: int, half_way: Callable[[], None] = lambda: None) -> None:
        """A step: prepared, done, committed."""
        ids = self.touched(number)
        self.prepare(number, ids)
        self.change(number, ids, half_way)
        self.words[COMMITTED].fill_(number)

    def prepare(self, number: int, ids: Tensor) -> None:
        """Copies the rows that a step will change to the journal, and says so when they are there."""
        torch.index_select(self.table, 0, ids, out=self.records)
        self.ids.copy_(ids)
        self.words[COUNT].fill_(len(ids))
        self.words[PREPARED].fill_(number)

    def change(self, number: int, ids: Tensor, half_way: Callable[[], None] = lambda: None) -> None:
        """Changes a step's rows, so that one step too many, too few or out of turn is seen."""
        generator = torch.Generator(self.table.device).manual_seed(self._seed * 1_000_003 + number)
        added = torch.rand(len(ids), self._shape.dim, generator=generator, device=self.table.device)
        for i, (rows, values) in enumerate(zip(ids.chunk(PIECES), added.chunk(PIECES), strict=True)):
            if 2 * i == PIECES:
                half_way()
            self.table.index_copy_(0, rows, self.table[rows] * DECAY + values)

    def touched(self, number: int) -> Tensor:
        """The rows that a step changes, each once: int64 [touched]."""
        places = torch.arange(self._shape.touched, device=self.table.device)
        return places * (STRIDE + 2 * number) % self._shape.rows

    def undo(self) -> bool:
        """Takes back the step that is prepared and not committed.

        Returns:
            Whether there was one.

        Raises:
            WrongResult: The words are none that a step leaves.
        """
        count, prepared, committed = self.words.tolist()
        if prepared == committed:
            return False
        if prepared != committed + 1 or count != self._shape.touched:
            raise WrongResult(f"step {prepared} with {count} rows is prepared after step {committed}")
        self.table.index_copy_(0, self.ids, self.records)
        self.words[PREPARED].fill_(committed)
        return True


def work(line: Line, order: Order) -> None:
    """What one worker does."""
    torch.set_num_threads(len(os.sched_getaffinity(0)) if order.device == CUDA else 1)
    began = time.perf_counter()
    device = begin(order.device)
    torch.zeros(1, device=device)
    settle(order.device)
    context_s = time.perf_counter() - began

    began = time.perf_counter()
    block = attached(order.device, order.address, order.timeout_s)
    kept = Journalled(block, order.shape, order.seed)
    found = kept.committed()  # to the host: it is there and can be used
    attach_s = time.perf_counter() - began

    late_rows = written_late(kept.table, order.watch_s)
    began = time.perf_counter()
    undone = kept.undo()
    settle(order.device)
    undo_s = time.perf_counter() - began
    told: dict[str, Any] = {
        "context_s": context_s,
        "attach_s": attach_s,
        "found": found,
        "late_rows": late_rows,
        "undone": undone,
        "undo_s": undo_s,
    }
    following = kept.committed() + 1
    if order.life == FREE:
        train_until_killed(line, kept, following, told, order.device)
        return
    for number in range(following, following + order.steps):
        kept.step(number)
    following += order.steps
    if order.life == HELD:
        hold(line, kept, following, told, order.device)
        return
    if order.life == FAULTY:
        line.tell(told)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        kept.step(following, lambda: fault(order.device))
        return
    settle(order.device)
    told |= {"digest": digest([kept.table]), "steps": kept.committed()}
    told["seconds"] = measured(kept, order) if order.repeats else {}
    told["expected"] = digest([undisturbed(order, kept.table.device, told["steps"])])
    line.tell(told)


def written_late(table: Tensor, watch_s: float) -> int:
    """Rows that change while nobody should be there who changes them."""
    before = folded(table)
    time.sleep(watch_s)
    return int((folded(table) != before).sum())


def train_until_killed(
    line: Line, kept: Journalled, following: int, told: dict[str, Any], device: str
) -> None:
    """Trains, far ahead of the device; also ends if the caller is gone."""
    kept.step(following)
    settle(device)
    line.tell(told)
    while not wait([line], timeout=0):
        following += 1
        kept.step(following)


def hold(line: Line, kept: Journalled, number: int, told: dict[str, Any], device: str) -> None:
    """Is killed in a step, of which the device has done one half; it spins before the other one."""

    def half_way() -> None:
        settle(device)
        if device == CUDA:
            torch.cuda._sleep(HOLD_CYCLES)
        else:
            line.tell(told)
            line.await_end()
            sys.exit("was to be killed")

    kept.step(number, half_way)
    line.tell(told)
    line.await_end()


def fault(device: str) -> None:
    """Asks for a row that isn't there, after which a process can do nothing more on a CUDA device.

    Raises:
        RuntimeError: It can't.
        IndexError: There is none, where the CPU is taken for a device.
    """
    place = begin(device)
    _ = torch.zeros(1, device=place)[torch.ones(1, dtype=torch.int64, device=place)]
    settle(device)


def undisturbed(order: Order, device: torch.device, steps: int) -> Tensor:
    """The table of a training of so many steps, in memory of its own."""
    block = torch.zeros(order.shape.ends[-1], dtype=torch.uint8, device=device).untyped_storage()
    own = Journalled(block, order.shape, order.seed)
    for number in range(1, steps + 1):
        own.change(number, own.touched(number))
    return own.table


def measured(kept: Journalled, order: Order) -> dict[str, list[float]]:
    """Seconds of what a step takes with a keeper and with an image, and of a restart from an image.

    Raises:
        WrongResult: One of them computes something else; nothing was timed.
    """
    _, image = imaged([kept.table])
    image.fill()
    number = kept.committed() + 1
    ids = kept.touched(number)
    image.tell(ids.cpu().numpy())
    kept.step(number)
    fetcher = Fetcher()
    fetcher.fetch([image])
    after = folded(kept.table)
    kept.table.zero_()
    image.put()
    if not torch.equal(folded(kept.table), after):
        raise WrongResult("a table that was put back from its image is another one")

    bits = kept.records.view(torch.int32)
    sent = torch.empty(bits.shape, dtype=torch.int32, pin_memory=kept.table.is_cuda)

    def send_delta() -> None:
        sent.copy_(bits ^ kept.table[ids].view(torch.int32), non_blocking=True)
        settle(order.device)

    def prepare_alone() -> None:
        kept.prepare(number, ids)
        settle(order.device)

    def fetch() -> None:
        fetcher.fetch([image])
        settle(order.device)

    def put() -> None:
        image.put()
        settle(order.device)

    send_delta()
    new = kept.table[ids].cpu().view(torch.int32)
    if not torch.equal(kept.records.cpu().view(torch.int32) ^ sent, new) or not bool(sent.any()):
        raise WrongResult("old rows and deltas don't make new rows")
    calls = {"journal": prepare_alone, "delta": send_delta, "image": fetch, "put": put}
    return interleaved(calls, repeats=order.repeats, at_least_s=order.at_least_s)
