"""Images: the arena's copies of tables that are in other memory, such as a GPU's.

Owns the copies between a table's tensors and its image, and the marks of rows that have changed since the
image was brought up to date. A step marks rows on the device before it changes them, and reads nothing back.
When the transaction ends, `Images.take` stages copies of the marked rows on the device, and the next steps
may change the rows. The commit journals the image's rows, which still have the values from before the
transaction, and `StagedRows.store` overwrites them. From then on the image serves like rows in host memory:
deltas are taken from it, an undo writes to it, recovery rebuilds it; then it is copied back.

Invariant: between transactions, the image equals the tensors. A row of it changes only after it was
journalled, and a row that the transaction has not changed is the same in both at any time.
Must not know: engines, journals, parity.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..coding.rows import WORD_BYTES, RowSpace, Table
from ..kernels.contract import Ids

_CHUNK_BYTES = 16 << 20
_BATCH_BYTES = 2 << 20
"""Records that are stored together: they, the rows under them and the journal stay in a cache."""
_BUFFERS = 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Dtype by an element's bytes; int64 for more. Rows are gathered by element: wide elements are faster."""
_STAGED_SHARE = 16
"""Staged rows take at most 1 / _STAGED_SHARE of a device's memory; more rows are stored without staging."""


def is_off_arena(tensor: torch.Tensor) -> bool:
    """Whether a table stays where its tensor is, and the arena holds an image of it."""
    return tensor.device.type not in ("cpu", "meta")


def finish_all(device: torch.device) -> None:
    """Waits for all work of a device, on all its streams.

    Rows may change on a stream that the current stream does not wait for; without this wait, the image and
    its parity would hold old rows. No stream is capturing a graph here: the step's body has ended.
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

    @property
    def device(self) -> torch.device:
        """The tensors' device."""
        return self._rows[0].device

    @property
    def record_bytes(self) -> int:
        """Bytes of one row's record."""
        return self._stored.layout.record_words * WORD_BYTES

    @property
    def rows(self) -> int:
        """The number of its rows."""
        return self._stored.layout.rows

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
        most = max(1, _CHUNK_BYTES // max(1, self.record_bytes))
        for at in range(0, len(ids), most):
            self._put_rows(ids[at : at + most])

    def _put_rows(self, ids: Ids) -> None:
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
        """Overwrites the tensors, or these rows of them, with the image: several threads read it."""

        def send(lane: _Lane, column: int, start: int, own: torch.Tensor) -> None:
            lane.send(partial(self._stored.copy, column, start), own)

        self._copy(range(self.rows) if rows is None else rows, send)

    def fill(self) -> None:
        """Overwrites the image with the tensors."""

        def receive(lane: _Lane, column: int, start: int, own: torch.Tensor) -> None:
            held = torch.from_numpy(self._stored.columns[column].reshape(-1))
            lane.receive(held[start : start + len(own)], own)

        self._copy(range(self.rows), receive)

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
    def _copy(self, rows: range, move: Callable[[_Lane, int, int, torch.Tensor], None]) -> None:
        """Moves the pieces of some rows by buffers in turn: one is filled while a device copies another.

        Args:
            rows: of the table.
            move: begins a copy by way of a buffer, of a piece as `_pieces` has it.
        """
        finish_all(self.device)
        pieces = list(self._pieces(rows))
        size = max((len(own) for _, _, own in pieces), default=0)
        lanes = [_Lane(self.device, size) for _ in range(_BUFFERS)]
        for piece, lane in zip(pieces, itertools.cycle(lanes), strict=False):
            move(lane, *piece)
        for lane in lanes:
            lane.end()

    def _pieces(self, rows: range) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The bytes of some rows' columns in parts: column, first byte in the image's, and the tensor's.

        The last is uint8 [at most _CHUNK_BYTES].
        """
        for number, (column, whole) in enumerate(zip(self._stored.columns, self._rows, strict=True)):
            own = whole[rows.start : rows.stop].view(-1).view(torch.uint8)
            if own.numel():
                start = rows.start * column.shape[1]
                for at, part in enumerate(own.split(_CHUNK_BYTES)):
                    yield number, start + at * _CHUNK_BYTES, part


class Uploader:
    """Copies images to their tensors in a separate thread, while recovery still rebuilds other rows.

    The constructor waits for the devices' work so far, such as the tensors' initialisation. Leaving the block
    cancels copies that have not begun.

    Args:
        images: by their tables' numbers in the row space.
        space: the row space.
    """

    def __init__(self, images: Mapping[int, Image], space: RowSpace) -> None:
        self._images, self._space = images, space
        self._thread = ThreadPoolExecutor(1, "ecemb-upload")  # begins with its first copy
        self._begun: list[Future[None]] = []
        for device in {image.device for image in images.values()}:
            finish_all(device)

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def ready(self, start: int, stop: int) -> None:
        """Submits copies of the rows that words start..stop-1 of the row space complete; these are final.

        Words of one block are reported in ascending order, from its start on.
        """
        for index, rows in self._space.completed(start, stop) if self._images else ():
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
        self._to: torch.Tensor | None = None  # where `end` copies the buffer's bytes

    def send(self, fetch: Callable[[NDArray[np.uint8]], None], own: torch.Tensor) -> None:
        """Copies host memory to the device.

        Args:
            fetch: copies the bytes into an array of the host.
            own: uint8 [m] on the device, overwritten; it needs no buffer if it is in host memory.
        """
        if self._done is None and own.device.type == "cpu":
            fetch(own.numpy())
            return
        self.end()
        buffer = self._buffer[: len(own)]
        fetch(buffer.numpy())
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


class Images:
    """All images of a rank, and which rows of their tables have changed since they were brought up to date.

    Marks take one byte of the device's memory for each row; staged rows take the bytes of their records there
    until they are stored.

    Args:
        images: by their tables' numbers in the row space.
    """

    def __init__(self, images: Mapping[int, Image]) -> None:
        self._images = dict(sorted(images.items()))
        by_device: dict[torch.device, dict[int, Image]] = {}
        for table, image in self._images.items():
            by_device.setdefault(image.device, {})[table] = image
        self._marks = [_Marks(device, of_device) for device, of_device in by_device.items()]
        self._of = {table: marks for marks in self._marks for table in marks.first}
        self._taken: list[tuple[Image, Ids]] = []
        self._is_taking = (
            False  # also after an interrupted `take`, when it is unknown which rows have changed
        )

    def __contains__(self, table: int) -> bool:
        return table in self._images

    def __bool__(self) -> bool:
        return bool(self._images)

    def all(self) -> Mapping[int, Image]:
        """The images by table."""
        return self._images

    def mark(self, table: int, rows: torch.Tensor) -> None:
        """Marks rows that are about to change. The host doesn't wait for a CUDA device.

        Args:
            table: the table's number; row numbers may continue through the next tables of its group.
            rows: int64 [m], in any order, repeats allowed, on the table's device or on the CPU.
        """
        self._of[table].mark(table, rows)

    def take(self) -> StagedRows:
        """Stages marked rows, as they are when all work on their devices is done, and clears marks.

        Called once in a transaction, after earlier transactions are committed or undone.
        """
        self._is_taking = True
        staged = StagedRows([(marks, marks.take()) for marks in self._marks])
        self._taken = [(piece.image, piece.ids) for _, pieces in staged.pieces for piece in pieces]
        self._is_taking = False
        return staged

    def take_back(self) -> None:
        """Copies the rows of the last `take`, whose transaction was undone, from images to the tensors."""
        for image, ids in self._taken:
            image.put_rows(ids)

    def put_back(self) -> None:
        """Copies all rows that may differ from their images to the tensors, after an undo, and clears marks.

        These are the marked rows and those of the last `take`; all rows if `take` was interrupted. A copy of
        all rows after each undo would delay the step's error by the time that a device's whole memory takes.

        Raises:
            Exception: the first device's that failed; the rows of other devices were copied.
        """
        failed: list[Exception] = []
        for image in self._images.values() if self._is_taking else ():
            _attempt(failed, image.put)
        for image, ids in self._taken:
            _attempt(failed, partial(image.put_rows, ids))
        for marks in self._marks:
            _attempt(failed, marks.put_back)
        if failed:
            raise failed[0]


class StagedRows:
    """Changed rows of one transaction, by device, which its commit holds until they are in the arena."""

    def __init__(self, pieces: list[tuple[_Marks, list[_Piece]]]) -> None:
        self.pieces = pieces

    @property
    def is_held(self) -> bool:
        """Whether training may change the rows before `store`: not if they were too many to be staged."""
        return all(piece.records is not None for _, of_device in self.pieces for piece in of_device)

    @property
    def size_bytes(self) -> int:
        """Bytes of the records and of the rows' numbers."""
        return sum(
            len(piece.ids) * (8 + piece.image.record_bytes)
            for _, of_device in self.pieces
            for piece in of_device
        )

    def store(self, capture: Callable[[int, Ids], None]) -> None:
        """Stores the rows in their images. In any thread, after `store` of the transaction before.

        Args:
            capture: called with a table and rows of it (int64 [m], each once), before they are overwritten.
        """
        while self.pieces:  # each device's staged rows are freed as soon as they are stored
            marks, pieces = self.pieces.pop()
            marks.store(pieces, capture)


class _Marks:
    """The marks of one device's tables, and the rows that are staged there.

    Args:
        device: where the tables are.
        images: of the tables, by their numbers, ascending.
    """

    def __init__(self, device: torch.device, images: Mapping[int, Image]) -> None:
        self._device, self._images = device, images
        edges = list(itertools.accumulate((image.rows for image in images.values()), initial=0))
        self.first: dict[int, int] = dict(zip(images, edges, strict=False))
        # One more flag than rows: `Features.there` may give the row behind a last table without rows.
        self._flags = torch.zeros(edges[-1] + 1, dtype=torch.uint8, device=device)
        self._edges = np.array(edges, np.int64)
        self._most_bytes = math.inf
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._most_bytes = torch.cuda.get_device_properties(device).total_memory // _STAGED_SHARE
            self._stream = torch.cuda.Stream(device)
        self._buffer = _staging(0, device)

    @torch.no_grad()
    def mark(self, table: int, rows: torch.Tensor) -> None:
        """See `Images.mark`."""
        self._flags.index_fill_(0, rows.to(self._device) + self.first[table], 1)

    @torch.no_grad()
    def take(self) -> list[_Piece]:
        """See `Images.take`."""
        pieces = self._held(self._marked())
        self._flags.zero_()
        finish_all(self._device)  # the next step may mark and change rows on other streams
        return pieces

    @torch.no_grad()
    def put_back(self) -> None:
        """Copies marked rows from their images to the tensors, and clears the marks."""
        for piece in self._marked():
            piece.image.put_rows(piece.ids)
        self._flags.zero_()

    def _marked(self) -> list[_Piece]:
        """The marked rows when all work on the device is done, without copies of their records."""
        finish_all(self._device)
        numbers = self._flags[:-1].nonzero().view(-1)
        on_host = numbers.cpu().numpy()
        edges = np.searchsorted(on_host, self._edges).tolist()
        sizes = [b - a for a, b in itertools.pairwise(edges)]
        pieces: list[_Piece] = []
        for (table, image), there, (a, b) in zip(
            self._images.items(), numbers.split(sizes), itertools.pairwise(edges), strict=True
        ):
            if a < b:
                rows = there - self.first[table]
                pieces.append(_Piece(table, image, on_host[a:b] - self.first[table], rows, None))
        return pieces

    @torch.no_grad()
    def _held(self, pieces: list[_Piece]) -> list[_Piece]:
        """The pieces with copies of their records on the device; unchanged if there isn't room for all."""
        if sum(len(piece.ids) * piece.image.record_bytes for piece in pieces) > self._most_bytes:
            return pieces
        try:
            return [piece._replace(records=piece.image.records(piece.rows)) for piece in pieces]
        except torch.OutOfMemoryError:  # the training has the rest of the device
            return pieces

    def _beside(self) -> AbstractContextManager[object]:
        """Selects the device, as threads begin on device 0, and a stream without the training's work."""
        beside = ExitStack()
        if self._stream is not None:
            beside.enter_context(torch.cuda.device(self._device))
            beside.enter_context(torch.cuda.stream(self._stream))
        return beside

    def store(self, pieces: Sequence[_Piece], capture: Callable[[int, Ids], None]) -> None:
        """See `StagedRows.store`."""
        with self._beside():
            for batch in _batches(pieces):
                sizes = [len(rows) * piece.image.record_bytes for piece, rows in batch]
                if sum(sizes) > len(self._buffer):
                    self._buffer = _staging(max(sum(sizes), min(_BATCH_BYTES, 2 * sum(sizes))), self._device)
                parts = self._buffer[: sum(sizes)].split(sizes)  # whole words, so all parts are aligned
                for (piece, rows), part in zip(batch, parts, strict=True):
                    part.copy_(piece.read(rows).view(-1), non_blocking=True)
                if self._stream is not None:
                    self._stream.synchronize()
                for (piece, rows), part in zip(batch, parts, strict=True):
                    ids = piece.ids[rows.start : rows.stop]
                    capture(piece.table, ids)
                    piece.image.take(ids, part.numpy())


def _attempt(failed: list[Exception], act: Callable[[], object]) -> None:
    """Calls `act`, and adds its error to `failed`."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - other devices' rows are still copied
        failed.append(error)


class _Piece(NamedTuple):
    """Rows of one table, by its number, that have changed.

    Attributes:
        ids: int64 [m], ascending.
        rows: the same on the device.
        records: uint8 [m, record_bytes] on the device, as the rows were; None: as they are in the table.
    """

    table: int
    image: Image
    ids: Ids
    rows: torch.Tensor
    records: torch.Tensor | None

    def read(self, some: range) -> torch.Tensor:
        """The records of some of the rows, uint8 [len(some), record_bytes]."""
        if self.records is None:
            return self.image.records(self.rows[some.start : some.stop])
        return self.records[some.start : some.stop]


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[tuple[_Piece, range]]]:
    """All rows in batches of at most `_BATCH_BYTES` of records, at least one row each."""
    batch: list[tuple[_Piece, range]] = []
    room = _BATCH_BYTES
    for piece in pieces:
        at, size = 0, piece.image.record_bytes
        while at < len(piece.ids):
            if batch and room < size:
                yield batch
                batch, room = [], _BATCH_BYTES
            count = min(len(piece.ids) - at, max(1, room // max(1, size)))
            batch.append((piece, range(at, at + count)))
            at, room = at + count, room - count * size
    if batch:
        yield batch


def _staging(size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size] of host memory, pinned for a CUDA device."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
