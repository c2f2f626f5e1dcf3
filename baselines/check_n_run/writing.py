"""What happens beside the training: a copy is written chunk by chunk, and rank 0 makes the checkpoint whole.

`write` is all of it; `put`, `heard`, `complete` and `clean` are its parts, for who has its own order of them.

Ranks report to rank 0 through the store itself what they have written, so that no collective runs beside the
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
from baselines.pace import Pace

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

CHUNK_BYTES: Final = 1 << 24
"""Of rows in an object, by default."""
_POLL_S: Final = 0.02, 1.0
"""How long rank 0 waits before it looks again: at first, and at most."""


class CheckpointFailed(RuntimeError):
    """A checkpoint was not written. Those before it are untouched."""


@dataclass(frozen=True)
class Part:
    """One rank's part of one checkpoint.

    Attributes:
        facts: what all ranks agree on.
        rank: this one.
        copy: what is to be written.
        chunk_bytes: rows of a chunk take at most this many, but for one row.
        bytes_per_s: at most this many are written, on average; None: as fast as it goes.
        progress: a progress bar on stderr.
    """

    facts: Facts
    rank: int
    copy: Copy
    chunk_bytes: int
    bytes_per_s: float | None
    progress: bool


@dataclass(frozen=True)
class WriteTask(Part):
    """One rank's part, and on rank 0 what follows.

    Attributes:
        keep: whole checkpoints that stay.
        patience_s: how long rank 0 waits for the others.
    """

    keep: int
    patience_s: float


def above_zero(**settings: float | None) -> None:
    """Raises ValueError unless each is above 0, or None."""
    for name, value in settings.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name}= is above 0; got {value}")


def write(job: WriteTask, store: Store) -> Receipt:
    """Writes a rank's part; on rank 0, makes the checkpoint whole, and removes what is no longer needed.

    Raises:
        CheckpointFailed: another rank failed, or wasn't heard of; rank 0 only.
    """
    receipt = put(job, store)
    if job.rank == 0:
        complete(job.facts, heard(job.facts, store, job.patience_s), store)
        clean(store, job.keep)
    return receipt


def put(part: Part, store: Store) -> Receipt:
    """Writes a rank's part, and then that it has."""
    path = receipt_path(part.facts.name, part.rank)
    try:
        receipt = Receipt(part.rank, tuple(_written(part, store)))
    except Exception as error:
        store.put(path, text_of(Receipt(part.rank, error=repr(error))))
        raise
    store.put(path, text_of(receipt))
    return receipt


def heard(facts: Facts, store: Store, patience_s: float) -> tuple[Receipt, ...]:
    """What all ranks have written, as soon as they have.

    Raises:
        CheckpointFailed: a rank failed, or wasn't heard of in time.
    """
    return tuple(_heard(facts, store, patience_s))


def complete(facts: Facts, receipts: tuple[Receipt, ...], store: Store) -> None:
    """Makes a checkpoint whole; one rank."""
    store.put(manifest_path(facts.name), text_of(Manifest(facts, receipts)))


def clean(store: Store, keep: int) -> None:
    """Removes all that none of the `keep` newest whole checkpoints needs."""
    store.remove(leftovers(store.paths(), whole(store), keep))


def _written(part: Part, store: Store) -> Iterator[Chunk]:
    """Writes all chunks."""
    data = mapped(Path(part.copy.path))
    pace = Pace(part.bytes_per_s)
    title = f"checkpoint of step {part.facts.step}, rank {part.rank}"
    with bar(title, part.copy.size_bytes, shown=part.progress) as done:
        for number, (chunk, content, taken_bytes) in enumerate(_chunks(part, data)):
            path = chunk_path(part.facts.name, part.rank, number)
            store.put(path, content.data)
            pace.wait(len(content))
            done(taken_bytes)
            yield replace(chunk, path=path, size_bytes=len(content), crc=zlib.crc32(content))


def _chunks(part: Part, data: packing.Bytes) -> Iterator[tuple[Chunk, packing.Bytes, int]]:
    """What is written, and how many bytes of the copy it is."""
    for kind, span in part.copy.rest.items():
        if kind != SHARED or part.rank == 0:
            content = seen(data, span).numpy()
            yield Chunk("", 0, 0, kind), content, len(content)
    schemes = {kind: Scheme(**fields) for kind, fields in part.facts.schemes.items()}
    for rows in part.copy.tables:
        row_bytes = sum(span.size_bytes for span in rows.tensors.values()) // max(1, rows.rows)
        step = max(1, part.chunk_bytes // max(1, row_bytes))
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


def _heard(facts: Facts, store: Store, patience_s: float) -> Iterator[Receipt]:
    deadline = time.monotonic() + patience_s
    for rank in range(facts.world_size):
        pause_s, most_s = _POLL_S
        while (receipt := _receipt(store, receipt_path(facts.name, rank))) is None:
            if time.monotonic() > deadline:
                raise CheckpointFailed(
                    f"checkpoint {facts.name}: rank {rank} has written nothing {patience_s:.0f} s "
                    f"after rank 0 was done: all ranks must see the same store; see what it waits for, or "
                    f"give it more time"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
        if receipt.error:
            raise CheckpointFailed(f"checkpoint {facts.name} failed on rank {rank}: {receipt.error}")
        yield receipt


def _receipt(store: Store, path: str) -> Receipt | None:
    try:
        return receipt_of(store.get(path))
    except (FileNotFoundError, NotWhole):
        return None
