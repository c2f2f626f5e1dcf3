"""What is committed, and the two ways to do it, for the measurement of commits (bench/gpu_commit.py).

Must not know: what is timed, and what is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.devices import CUDA
from bench.gpu_image import layout_of
from bench.gpu_memory import mapped
from ecemb import kernels
from ecemb.adapters.image import Fetcher, Image
from ecemb.rows import WORD_BYTES, Table, arrange

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]
Phases = Mapping[str, Callable[[], None]]

WEIGHT = 142
"""Of products: a constant with several bits."""


class Held:
    """A table as it is before a step and after it, and what an arena holds of it, and of parity.

    Args:
        rows: Of the table.
        dim: Values of a row, float32, beside one of state; odd, so that records have no padding.
        most: Rows of a commit, at most.
        device: Where the tables are.
        seed: Of their values.

    Attributes:
        tables: The tensors of both, float32, by columns.
        now: Which of them the image holds, 0 or 1; a commit leaves it with the other one.
        memory: uint8, all of the following, as it lies in one mapping.
        table: The image's.
        parity: uint64, as large as the table's records.
        numbers: int64 [2, most]: those that are touched, and where what was received goes in parity.
        journal, delta, received, saved: uint64 [most, words].
        words: Of a record.
    """

    def __init__(self, rows: int, dim: int, most: int, device: torch.device, seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.tables: list[list[Tensor]] = [
            [torch.rand(rows, width, device=device, generator=generator) for width in (dim, 1)]
            for _ in range(2)
        ]
        self.now = 0
        layout = layout_of(self.tables[self.now])
        (starts,), table_bytes = arrange([layout])
        self.words: int = layout.record_words
        sizes = [table_bytes // WORD_BYTES, layout.words, 2 * most, *[most * self.words] * 4]
        self.memory: NDArray[np.uint8] = mapped(WORD_BYTES * sum(sizes))
        parts = np.split(self.memory.view(np.uint64), np.cumsum(sizes[:-1]))
        image, self.parity, numbers, *records = parts
        cores = kernels.get("cpu", torch.get_num_threads())
        self.table = Table(layout, image.view(np.uint8), starts, cores)
        self.numbers: Ids = numbers.view(np.int64).reshape(2, most)
        self.journal, self.delta, self.received, self.saved = (
            part.reshape(most, self.words) for part in records
        )
        rng = np.random.default_rng(seed)
        for part in (self.parity, self.received.reshape(-1)):
            part[:] = rng.integers(0, 2**64, len(part), np.uint64)
        self.numbers[:] = [rng.choice(rows, most, replace=False) for _ in range(2)]
        self.numbers[1] *= self.words
        Image(self.table, self.tables[self.now]).fill()


class Work:
    """A commit of some rows.

    Args:
        held: Where.
        touched: How many; as many more are received.

    Attributes:
        held: As given.
        touched: As given.
        ids: int64 [touched], ascending, the rows.
        offsets: int64 [touched], ascending, where what was received goes in parity, in words.
        journal, delta, received, saved: uint64 [touched, words], of `held`.
    """

    def __init__(self, held: Held, touched: int) -> None:
        self.held, self.touched = held, touched
        for row in held.numbers:
            row[:touched] = np.sort(row[:touched])
        self.ids = held.numbers[0, :touched]
        self.offsets = held.numbers[1, :touched]
        self.journal, self.delta = held.journal[:touched], held.delta[:touched]
        self.received, self.saved = held.received[:touched], held.saved[:touched]

    def records(self, tensors: Sequence[Tensor]) -> Words:
        """The rows of a table, uint64 [touched, words], new."""
        rows = torch.from_numpy(self.ids).to(tensors[0].device)
        records = Image(self.held.table, tensors).records(rows).cpu().numpy()
        return records.view(np.uint64).reshape(self.touched, -1)

    def forget(self) -> None:
        """Clears what commits have written besides the image and parity."""
        for part in (self.journal, self.delta, self.saved):
            part[:] = 0


class OnHost:
    """The host's way, as ecemb goes it.

    Args:
        work: The commit.

    Attributes:
        phases: In their order.
    """

    def __init__(self, work: Work) -> None:
        self._work, self._table = work, work.held.table
        self._images = [Image(self._table, tensors) for tensors in work.held.tables]
        for image in self._images:
            image.tell(work.ids)
        self._fetcher = Fetcher()
        self.phases: Phases = {
            "capture": lambda: self._table.gather(work.ids, work.journal),
            "fetch": lambda: self._fetcher.fetch([self._images[1 - work.held.now]]),
            "delta": lambda: self._table.change(work.ids, work.journal, work.delta),
            "parity": self._parity,
        }

    def _parity(self) -> None:
        work, parity, cores = self._work, self._work.held.parity, self._table.kernels
        cores.gather_rows(parity, work.offsets, work.saved)
        cores.mul_add_rows_(parity, work.offsets, work.received, WEIGHT)


class OnDevice:
    """The device's way: a prototype.

    Args:
        work: The commit, whose memory is registered.

    Attributes:
        phases: In their order.
    """

    def __init__(self, work: Work) -> None:
        from ecemb.kernels import cuda  # needs Triton

        self._kernels, self._work, held = cuda, work, work.held
        self._device = held.tables[0][0].device
        self._tables = [[tensor.view(torch.int32) for tensor in tensors] for tensors in held.tables]
        self._image = [torch.from_numpy(column.view(np.int32)) for column in held.table.columns]
        self._columns: list[slice] = []  # of a record
        at = 0
        for column in self._image:
            self._columns.append(slice(at, at := at + column.shape[1]))
        self._parity_rows = cuda.rows_at_words(signed(held.parity), held.words)
        self._ids, self._offsets = torch.from_numpy(work.ids), torch.from_numpy(work.offsets)
        self._rows = self._ids  # on the device, from the first phase on
        self._old, self._delta, self._words = (
            torch.empty(work.touched, held.words, dtype=torch.int64, device=self._device) for _ in range(3)
        )
        self.phases: Phases = {
            "capture": self._capture,
            "fetch": self._fetch,
            "delta": self._find_delta,
            "parity": self._add,
        }

    def _capture(self) -> None:
        self._rows = self._ids.to(self._device, non_blocking=True)
        old = self._old.view(torch.int32)
        for column, table in zip(self._columns, self._tables[self._work.held.now], strict=True):
            self._kernels.copy_rows_(old[:, column], table, of=self._rows)
        self._bring(self._old, self._work.journal)

    def _fetch(self) -> None:
        for image, table in zip(self._image, self._tables[1 - self._work.held.now], strict=True):
            self._kernels.copy_rows_(image, table, to=self._rows, of=self._rows)
        self._settle()

    def _find_delta(self) -> None:
        old, delta = self._old.view(torch.int32), self._delta.view(torch.int32)
        for column, table in zip(self._columns, self._tables[1 - self._work.held.now], strict=True):
            self._kernels.differ_rows_(delta[:, column], old[:, column], table, self._rows)
        self._bring(self._delta, self._work.delta)

    def _add(self) -> None:
        received = signed(self._work.received).to(self._device, non_blocking=True)
        offsets = self._offsets.to(self._device, non_blocking=True)
        self._kernels.copy_rows_(self._words, self._parity_rows, of=offsets)
        self._bring(self._words, self._work.saved)
        self._kernels.multiply_add_(self._words, received, WEIGHT)
        self._kernels.copy_rows_(self._parity_rows, self._words, to=offsets)
        self._settle()

    def _bring(self, found: Tensor, out: Words) -> None:
        """Copies to host memory, where it is in the end."""
        signed(out).copy_(found, non_blocking=True)
        self._settle()

    def _settle(self) -> None:
        if self._device.type == CUDA:
            torch.cuda.current_stream(self._device).synchronize()


def signed(words: Words) -> Tensor:
    """The same memory as a tensor."""
    return torch.from_numpy(words.view(np.int64))
