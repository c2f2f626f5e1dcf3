"""What happens beside the training: a copy is written chunk by chunk, and rank 0 makes the checkpoint whole.

Ranks tell rank 0 through the store itself what they have written, so that no collective runs beside the
training's. The manifest is rank 0's last word: only then is the checkpoint there, for all ranks at once.

Must not know: tables' modules, process groups.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from baselines import packing
from baselines.files import mapped

from .buffer import CopiedRows, Copy, seen
from .chunks import packed
from .codec import kind_of, stored
from .manifest import (
    SHARED,
    Chunk,
    Facts,
    Manifest,
    NotWhole,
    Receipt,
    chunk_path,
    manifest_path,
    receipt_of,
    receipt_path,
    text_of,
)
from .progress import bar
from .quantize_scheme import Scheme
from .restoring import whole
from .retention import leftovers
from .store import Store

_POLL_S: Final = 0.02, 1.0
"""How long rank 0 waits before it looks again: at first, and at most."""


class CheckpointFailed(RuntimeError):
    """A checkpoint was not written. Those before it are untouched."""


@dataclass(frozen=True)
class Job:
    """One rank's part of one checkpoint.

    Attributes:
        facts: what all ranks agree on.
        rank: this one.
        copy: what is to be written.
        chunk_bytes: rows of a chunk take at most so many, but for one row.
        bytes_per_s: at most so many are written, on average; None: as fast as it goes.
        keep: whole checkpoints that stay.
        patience_s: how long rank 0 waits for the others.
        progress: a progress bar on stderr.
    """

    facts: Facts
    rank: int
    copy: Copy
    chunk_bytes: int
    bytes_per_s: float | None
    keep: int
    patience_s: float
    progress: bool


def write(job: Job, store: Store) -> Receipt:
    """Writes a rank's part; on rank 0, makes the checkpoint whole, and removes what is no longer needed.

    Raises:
        CheckpointFailed: another rank failed, or wasn't heard of; rank 0 only.
    """
    name = job.facts.name
    try:
        receipt = Receipt(job.rank, tuple(_written(job, store)))
    except Exception as error:
        store.put(receipt_path(name, job.rank), text_of(Receipt(job.rank, error=repr(error))))
        raise
    store.put(receipt_path(name, job.rank), text_of(receipt))
    if job.rank == 0:
        receipts = tuple(_heard(job, store))
        store.put(manifest_path(name), text_of(Manifest(job.facts, receipts)))
        store.remove(leftovers(store.paths(), whole(store), job.keep))
    return receipt


class Pace:
    """Keeps to a bandwidth: who has written waits until it was allowed to.

    Args:
        bytes_per_s: allowed; None: any.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._began, self._written_bytes = time.monotonic(), 0

    def wait(self, size_bytes: int) -> None:
        """So many bytes were written."""
        self._written_bytes += size_bytes
        if self._bytes_per_s is not None:
            due = self._began + self._written_bytes / self._bytes_per_s
            time.sleep(max(0.0, due - time.monotonic()))


def _written(job: Job, store: Store) -> Iterator[Chunk]:
    """Writes all chunks."""
    data = mapped(Path(job.copy.path))
    pace = Pace(job.bytes_per_s)
    title = f"checkpoint of step {job.facts.step}, rank {job.rank}"
    with bar(title, job.copy.size_bytes, shown=job.progress) as done:
        for number, (chunk, content, taken_bytes) in enumerate(_chunks(job, data)):
            path = chunk_path(job.facts.name, job.rank, number)
            store.put(path, content.data)
            pace.wait(len(content))
            done(taken_bytes)
            yield replace(chunk, path=path, size_bytes=len(content), crc=zlib.crc32(content))


def _chunks(job: Job, data: packing.Bytes) -> Iterator[tuple[Chunk, packing.Bytes, int]]:
    """What is written, and how many bytes of the copy it is."""
    for kind, span in job.copy.rest.items():
        if kind != SHARED or job.rank == 0:
            content = seen(data, span).numpy()
            yield Chunk("", 0, 0, kind), content, len(content)
    schemes = {kind: Scheme(**fields) for kind, fields in job.facts.schemes.items()}
    for rows in job.copy.tables:
        row_bytes = sum(span.size_bytes for span in rows.tensors.values()) // max(1, rows.rows)
        step = max(1, job.chunk_bytes // max(1, row_bytes))
        for at in range(0, rows.rows, step):
            yield _chunk(rows, data, slice(at, min(at + step, rows.rows)), schemes)


def _chunk(
    rows: CopiedRows, data: packing.Bytes, part: slice, schemes: Mapping[str, Scheme]
) -> tuple[Chunk, packing.Bytes, int]:
    if rows.numbers is None:
        numbers = torch.arange(part.start, part.stop)
    else:
        numbers = seen(data, rows.numbers)[part]
    numbers = numbers + rows.start
    tensors = {name: seen(data, span)[part] for name, span in rows.tensors.items()}
    parts = {name: stored(tensor, schemes[kind_of(name)]) for name, tensor in tensors.items()}
    chunk = Chunk("", 0, 0, rows.table, True, int(numbers[0]), int(numbers[-1]), len(numbers))
    return chunk, packed(numbers, parts), sum(tensor.nbytes for tensor in tensors.values())


def _heard(job: Job, store: Store) -> Iterator[Receipt]:
    """What all ranks have written, as soon as they have; rank 0."""
    deadline = time.monotonic() + job.patience_s
    for rank in range(job.facts.world_size):
        pause_s, most_s = _POLL_S
        while (receipt := _receipt(store, receipt_path(job.facts.name, rank))) is None:
            if time.monotonic() > deadline:
                raise CheckpointFailed(
                    f"checkpoint {job.facts.name}: rank {rank} has written nothing {job.patience_s:.0f} s "
                    f"after rank 0 was done: all ranks must see the same store; see what it waits for, or "
                    f"raise patience_s="
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
        if receipt.error:
            raise CheckpointFailed(f"checkpoint {job.facts.name} failed on rank {rank}: {receipt.error}")
        yield receipt


def _receipt(store: Store, path: str) -> Receipt | None:
    try:
        return receipt_of(store.get(path))
    except (FileNotFoundError, NotWhole):
        return None
