"""Images: the arena's copies of tables that are in other memory, such as a GPU's.

Owns the copies between a table's own tensors and its image. A step changes the tensors; rows about to change
are journalled from the image, which still holds their old values. When the transaction ends, `fetch` copies
the rows that it has changed to the image, each once, however many of its steps have changed it. (If single
steps can be aborted, it does so after each.) From then on the image serves like rows in host memory: deltas
are taken from it, an undo writes to it, recovery rebuilds it; then its rows are copied back to the tensors.

Invariant: between transactions, the image equals the tensors. A row of it changes only after it was
journalled, and a row that the transaction has not changed is the same in both at any time.
Must not know: engines, journals, parity.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from ..coding.rows import WORD_BYTES, RowSpace, Table
from ..kernels.contract import Ids, RowSet

_CHUNK_BYTES = 16 << 20
_BUFFERS = 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By an element's bytes; int64 for more. Rows are gathered by element: the wider, the faster."""


def is_apart(tensor: torch.Tensor) -> bool:
    """Whether a table stays where its tensor is, and the arena holds an image of it."""
    return tensor.device.type not in ("cpu", "meta")


def finish_all(device: torch.device) -> None:
    """Waits for all work of a device, on all its streams.

    Rows may change on a stream that the current stream does not wait for; an image taken before would
    agree with its parity on old rows. No stream is capturing a graph here: the step's body has ended.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Image:
    """The image of one table.

    Args:
        stored: the arena's memory of the table; read and overwritten.
        tensors: the training's own, in the order of the layout's columns; contiguous, rows first.
    """

    def __init__(self, stored: Table, tensors: Sequence[torch.Tensor]) -> None:
        self._stored = stored
        self._rows = [
            tensor.detach().view(stored.layout.rows, -1).view(_INTEGERS.get(tensor.itemsize, torch.int64))
            if tensor.numel()
            else torch.empty(stored.layout.rows, 0, dtype=torch.uint8, device=tensor.device)
            for tensor in tensors
        ]
        self._seen = RowSet(stored.layout.rows)
        self._changed: list[Ids] = []
        self.is_fetched: bool = False

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self._rows[0].device

    @property
    def record_bytes(self) -> int:
        """Bytes of one row's record."""
        return self._stored.layout.record_words * WORD_BYTES

    def mark_dirty(self, ids: Ids) -> None:
        """Marks rows (int64 [m], in any order, repeats allowed) that are journalled, and about to change."""
        out = np.empty(len(ids), np.int64)
        self.is_fetched = False
        if count := self._stored.kernels.distinct(ids, self._seen, out):
            self._changed.append(out[:count])

    def changed(self) -> Ids:
        """The rows marked since `forget`, int64 [m], each once."""
        if len(self._changed) > 1:
            self._changed = [np.concatenate(self._changed)]
        return self._changed[0] if self._changed else np.empty(0, np.int64)

    def forget(self) -> None:
        """Clears the marks, when a step begins and the image has all rows."""
        for ids in self._changed:
            self._stored.kernels.forget_(self._seen, ids)
        self._changed.clear()

    def records(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the tensors as records, uint8 [m, record_bytes] on their device.

        Args:
            rows: int64 [m] on that device.
        """
        parts = [one.index_select(0, rows).view(torch.uint8) for one in self._rows]
        if padding := self.record_bytes - sum(part.shape[1] for part in parts):
            parts.append(parts[0].new_zeros(len(rows), padding))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def take(self, ids: Ids, records: NDArray[np.uint8]) -> None:
        """Overwrites rows of the image with records (uint8 [m * record_bytes], aligned)."""
        self._stored.scatter_(ids, records.view(np.uint64).reshape(len(ids), -1))

    @torch.no_grad()
    def put_rows(self, ids: Ids) -> None:
        """Overwrites rows of the tensors (int64 [m], each once) with the image's."""
        finish_all(self.device)
        words = np.empty((len(ids), self._stored.layout.record_words), np.uint64)
        self._stored.gather(ids, words)
        records = torch.from_numpy(words.view(np.uint8)).to(self.device)
        rows = torch.from_numpy(ids).to(self.device)
        at = 0
        for one in self._rows:
            size = one.shape[1] * one.itemsize
            part = records[:, at : at + size].clone(memory_format=torch.contiguous_format)  # aligned
            one.index_copy_(0, rows, part.view(one.dtype))
            at += size

    def put(self, rows: range | None = None) -> None:
        """Overwrites the tensors, or these rows of them, with the image."""
        self._copy(range(self._stored.layout.rows) if rows is None else rows, from_image=True)

    def fill(self) -> None:
        """Overwrites the image with the tensors."""
        self._copy(range(self._stored.layout.rows), from_image=False)

    @torch.no_grad()
    def differing(self, rows: range) -> Ids:
        """The rows among these in which tensors and image differ, int64 [m], ascending."""
        finish_all(self.device)
        wrong = np.zeros(len(rows), np.bool_)
        for held, own in zip(self._stored.columns, self._rows, strict=True):
            if width := held.shape[1]:
                for at in range(0, len(rows), step := max(1, _CHUNK_BYTES // width)):
                    part = slice(rows.start + at, min(rows.start + at + step, rows.stop))
                    now = own[part].cpu().view(torch.uint8).numpy()
                    wrong[at : at + step] |= (now != held[part]).any(axis=1)
        return np.flatnonzero(wrong) + rows.start

    @torch.no_grad()
    def _copy(self, rows: range, *, from_image: bool) -> None:
        """Copies whole columns through two buffers: one is filled while a device copies the other."""
        finish_all(self.device)
        pieces = list(self._pieces(rows))
        size = max((len(own) for _, own in pieces), default=0)
        lanes = [_Lane(self.device, size) for _ in range(_BUFFERS)]
        for (held, own), lane in zip(pieces, itertools.cycle(lanes), strict=False):
            if from_image:
                lane.send(held, own)
            else:
                lane.receive(held, own)
        for lane in lanes:
            lane.end()

    def _pieces(self, rows: range) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of some rows' columns, in the image and in the tensors; uint8, one-dimensional."""
        for column, whole in zip(self._stored.columns, self._rows, strict=True):
            own = whole[rows.start : rows.stop].view(-1).view(torch.uint8)
            if own.numel():
                held = torch.from_numpy(column[rows.start : rows.stop].reshape(-1))
                yield from zip(held.split(_CHUNK_BYTES), own.split(_CHUNK_BYTES), strict=True)


class Putter:
    """Copies images to their tensors in a separate thread, while recovery still rebuilds others.

    It first waits for work that the main thread has begun, such as the tensors' initialisation. Leaving the
    block cancels copies that have not begun.

    Args:
        images: by their tables' numbers in the row space.
        space: the row space.
    """

    def __init__(self, images: Mapping[int, Image], space: RowSpace) -> None:
        self._images, self._space = images, space
        self._thread = ThreadPoolExecutor(1, "ecemb-put") if images else None
        self._begun: list[Future[None]] = []
        for device in {image.device for image in images.values()}:
            finish_all(device)

    def __enter__(self) -> Putter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def ready(self, start: int, stop: int) -> None:
        """Words start..stop-1 of the row space are final; of a block, reported from its start on."""
        if self._thread is not None:
            for index, rows in self._space.completed(start, stop):
                if (image := self._images.get(index)) is not None:
                    self._begun.append(self._thread.submit(image.put, rows))

    def finish(self) -> None:
        """Waits until all final rows are in the tensors."""
        for done in self._begun:
            done.result()


class _Lane:
    """A buffer between host memory and a device, with at most one copy in progress.

    Args:
        device: on a CUDA device copies run asynchronously; on others they are done at once.
        size: most bytes of a copy.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._buffer = _staging(size, device)
        self._to: torch.Tensor | None = None  # destination of the device's bytes in the buffer

    def send(self, held: torch.Tensor, own: torch.Tensor) -> None:
        """Copies host memory to the device."""
        self.end()
        buffer = self._buffer[: len(held)]
        buffer.copy_(held)
        own.copy_(buffer, non_blocking=True)
        self._began()

    def receive(self, held: torch.Tensor, own: torch.Tensor) -> None:
        """Copies the device's memory to the host; complete after `end`."""
        self.end()
        self._buffer[: len(own)].copy_(own, non_blocking=True)
        self._to = held
        self._began()

    def end(self) -> None:
        """Waits for the copy in progress."""
        if self._done is not None:
            self._done.synchronize()
        if self._to is not None:
            self._to.copy_(self._buffer[: len(self._to)])
            self._to = None

    def _began(self) -> None:
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))  # the current device may differ


class Fetcher:
    """Updates images, with one wait per device."""

    def __init__(self) -> None:
        self._buffers: dict[torch.device, torch.Tensor] = {}

    def fetch(self, images: Iterable[Image]) -> None:
        """Copies changed rows to their images, when all work on their devices is done."""
        images = list(images)
        by_device: dict[torch.device, list[Image]] = {}
        for image in images:
            if len(image.changed()):
                by_device.setdefault(image.device, []).append(image)
        for device, changed in by_device.items():
            finish_all(device)
            for batch in _batches(changed):
                self._fetch(device, batch)
        for image in images:
            image.is_fetched = True

    @torch.no_grad()
    def _fetch(self, device: torch.device, batch: Sequence[tuple[Image, Ids]]) -> None:
        ids = [rows for _, rows in batch]
        numbers = torch.from_numpy(np.concatenate(ids)).to(device).split([len(one) for one in ids])
        sizes = [len(rows) * image.record_bytes for image, rows in batch]
        parts = self._buffer(device, sum(sizes)).split(sizes)  # whole words, so all parts are aligned
        for (image, _), rows, part in zip(batch, numbers, parts, strict=True):
            part.copy_(image.records(rows).view(-1), non_blocking=True)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        for (image, rows), part in zip(batch, parts, strict=True):
            image.take(rows, part.numpy())

    def _buffer(self, device: torch.device, size: int) -> torch.Tensor:
        """Staging memory, uint8 [size], of any content."""
        if device not in self._buffers or size > len(self._buffers[device]):
            self._buffers[device] = _staging(size + size // 4, device)
        return self._buffers[device][:size]


def _batches(images: Sequence[Image]) -> Iterator[list[tuple[Image, Ids]]]:
    """The changed rows in batches of at most `_CHUNK_BYTES` of records: a window may have many."""
    batch: list[tuple[Image, Ids]] = []
    room = _CHUNK_BYTES
    for image in images:
        rows = image.changed()
        while len(rows):
            count = min(len(rows), room // max(1, image.record_bytes))
            if count <= 0 and batch:
                yield batch
                batch, room = [], _CHUNK_BYTES
                continue
            count = max(1, count)  # one record that is larger than a batch
            batch.append((image, rows[:count]))
            rows, room = rows[count:], room - count * image.record_bytes
    if batch:
        yield batch


def _staging(size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size] of host memory, which a CUDA device can access."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
