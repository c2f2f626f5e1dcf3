"""Check-N-Run as ecemb's durable tier: what `guard.save` and `protect(resume=)` take in place of a path.

    tier = DurableTier("s3://bucket/job", Path("/dev/shm/job"), weights=Scheme("adaptive", 4))
    guard = ecemb.protect(model, ..., resume=tier)
    ...
    guard.save(tier, asynchronous=True)

Parity survives what is likely, so a checkpoint is for the rest, and each may be small: the rows that have
changed since the last one, as ecemb's own capture finds them, exactly or quantized; all else, generators
and positions in the data among it, exactly. It is restored into any number of ranks. Exact rows come back
bit by bit, quantized ones as near as their scheme says: what is trained after a full loss is then as near,
and not the same. If `weights` are the restores that the job expects, those are full losses alone: what parity
recovers is not restored from here.

The first save is full, and so is the first one after a start that went on from memory, which doesn't know
what had changed before it, and the one after a save that failed. `asynchronous=True` writes in a thread.
Either way training waits for a copy of what is written, so `memory` needs room for it: for all tables, now
and then.

What lies in the target is JSON and plain tensors, with checksums, and no pickle: who can write there can
spoil a training, and run nothing.

Parameters: chunks of 16 MiB (chosen); rank 0 waits half a minute to see what the others say that they have
written (chosen).

Must not know: arenas, process groups.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ecemb import errors
from ecemb.checkpoint import Piece, Stored, is_stored

from .buffer import Buffer, Rows, clear
from .codec import schemes_of
from .manifest import (
    OWN,
    Facts,
    Manifest,
    OtherFormat,
    Receipt,
    drawn,
    facts_of,
    manifest_path,
    number_of,
    text_of,
)
from .policy import policy_of
from .quantize_scheme import EXACT, Scheme
from .restoring import AnotherTraining, Damaged, Shard, chain, last_chain, rest, rows
from .store import store_at
from .tracking import TouchedRows
from .writing import CHUNK_BYTES, CheckpointFailed, Part, above_zero, clean, complete, heard, put

_FINISHED: Final = "finished-"
_SIGHT_S: Final = 30.0
_SAVE_AGAIN: Final = (
    "The checkpoints before it are as they were, and the training can go on: call guard.save() again, whose "
    "checkpoint is full then"
)
_START_AGAIN: Final = "Nothing there was changed: see that the storage answers, and start again"


class DurableTier:
    """A job's checkpoints in one place: an `ecemb.checkpoint.DifferentialWriter` and a `CheckpointReader`.

    Args:
        target: a folder that all ranks see, or any URL that fsspec knows; of this job alone.
        memory: folder of this rank's machine alone, on tmpfs, for the copy; the job's own. Copies of
            processes that are dead are removed when a tier is made, and when a job looks for checkpoints.
        policy: of `policy.POLICIES`.
        weights: how they are stored; or how many restores the job expects, by which `choose_bits` says how.
        states: how per-row optimizer state is stored.
        bytes_per_s: a rank writes at most this much, on average; None: as fast as it goes.
        chunk_bytes: rows of an object take at most this many, but for one row.
        progress: progress bars on stderr.
        options: of fsspec's file system.

    Raises:
        ValueError: no such policy, scheme or protocol; a number that isn't above 0, or, of restores, below 0.
        ImportError: a package is missing that the protocol needs.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        memory: str | os.PathLike[str],
        *,
        policy: str = "intermittent",
        weights: Scheme | float = EXACT,
        states: Scheme = EXACT,
        bytes_per_s: float | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        progress: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        above_zero(chunk_bytes=chunk_bytes, bytes_per_s=bytes_per_s)
        schemes_of(weights, states, 0)  # raises
        self._name, self._policy = policy, policy_of(policy)
        self._weights, self._states = weights, states
        self._place = os.fspath(target) if "://" in os.fspath(target) else os.path.abspath(target)
        self._store = store_at(self._place, options)
        self._memory = Path(memory)
        clear(self._memory)
        self._settings: dict[str, Any] = {
            "chunk_bytes": chunk_bytes,
            "bytes_per_s": bytes_per_s,
            "progress": progress,
        }
        self._buffer: Buffer | None = None
        self._part: Part | None = None
        self._shards: dict[str, range] = {}
        self._touched: dict[str, TouchedRows] = {}
        self._last: Facts | None = None  # of rank 0: what a differential checkpoint may stand on
        self._sent = ""  # of rank 0: the checkpoint whose manifest was sent last, if it arrived or not
        self._restores: int | None = None
        self._read: list[Manifest] = []
        self._read_rows: list[tuple[str, Tensor]] = []
        self._read_rest: dict[str, Tensor] = {}

    def __str__(self) -> str:
        return self._place

    def follow(self, shards: Mapping[str, range]) -> None:
        """See `DifferentialWriter`."""
        self._shards = dict(shards)
        self._touched = {key: TouchedRows(len(held)) for key, held in shards.items()}
        self._last = self._restores = None
        if self._read:
            last = self._read[-1].facts
            self._restores = last.restores + 1
            known = all(key in shards for key, _ in self._read_rows)
            if last.policy == self._name and known:  # else the next one is full: it knows of other rows
                self._last = last
                for key, numbers in self._read_rows if not self._policy.is_chained else ():
                    self._touched[key].touch(numbers - shards[key].start)
        self._read, self._read_rows, self._read_rest = [], [], {}

    def touched(self, table: str, rows: Tensor) -> None:
        """See `DifferentialWriter`."""
        self._touched[table].touch(rows)

    def prepare(self, step: int, facts: Mapping[str, Any]) -> str:
        """See `CheckpointWriter`.

        Raises:
            CheckpointMismatch: the store holds another training's checkpoints, later steps, or other things.
            CheckpointFailed: the checkpoints there stand on some that are gone; or the storage fails.
        """
        with self._told("looking for earlier checkpoints", _SAVE_AGAIN):
            found = self._newest()
            if is_stored(self, _stored(found), step, facts):
                return ""
            last, self._last = self._last, None  # what fails from here on makes the next one full
            if last is not None and (
                _whole(last.about) != _whole(facts) or chain(self._store, last.name) is None
            ):
                last = None  # it has tables of other names or columns, or it was removed
            is_full = last is None or self._policy.takes_full(last.sizes)
            restores = self._restores
            if restores is None:
                restores = found[-1].facts.restores if found else 0
            made = Facts(
                number=1 + max((number_of(path) or 0 for path in self._store.paths()), default=0),
                nonce=drawn(),
                step=step,
                world_size=facts["world_size"],
                policy=self._name,
                needs=() if is_full or last is None else self._policy.needs(last.name, last.needs),
                sizes=() if is_full or last is None else last.sizes,
                tables=_tables(facts),
                schemes=schemes_of(self._weights, self._states, restores),
                restores=restores,
                about=facts,
            )
        return text_of(made).decode()

    def take(self, token: str, rank: int, pieces: Sequence[Piece]) -> None:
        """See `DifferentialWriter`.

        Raises:
            CheckpointFailed: there is no room for the copy.
        """
        facts = facts_of(token.encode())
        if self._buffer is None:
            self._buffer = Buffer(self._memory / f"rank-{rank}")
        own = {piece.key: piece.tensor for piece in pieces if piece.table is None}
        try:
            copy = self._buffer.fill(list(self._rows(facts, pieces)), {OWN: own})
        except OSError as error:
            raise errors.CheckpointFailed(
                f"{self._buffer.path} has no room for a copy of what step {facts.step}'s checkpoint takes "
                f"({error.strerror or error}): give memory= on a tmpfs that has; a full checkpoint takes as "
                f"much as the tables"
            ) from error
        if not facts.needs or self._policy.is_chained:
            for touched in self._touched.values():
                touched.clear()
        self._part = Part(facts, rank, copy, **self._settings)

    def write(self, token: str, rank: int, world_size: int, pieces: Sequence[Piece]) -> str:
        """See `CheckpointWriter`. The receipt goes by the store: so rank 0 sees that it is the same one.

        Raises:
            CheckpointFailed: the storage fails.
        """
        part, self._part = self._part, None
        if part is None or part.facts != facts_of(token.encode()):
            raise RuntimeError("take() comes before write()")
        with self._told(f"writing the checkpoint of step {part.facts.step}", _SAVE_AGAIN):
            put(part, self._store)
        return ""

    def commit(self, token: str, facts: Mapping[str, Any], receipts: Sequence[str]) -> None:
        """See `CheckpointWriter`.

        Raises:
            CheckpointFailed: rank 0 doesn't see what another rank has written; or the storage fails.
        """
        made = facts_of(token.encode())
        with self._told(f"completing the checkpoint of step {made.step}", _SAVE_AGAIN):
            found = heard(made, self._store, _SIGHT_S)
            if made.needs:
                made = replace(made, sizes=(*made.sizes, _changed(made, found)))
            self._sent = made.name
            complete(made, found, self._store)
        self._last = made

    def discard(self, token: str) -> None:
        """See `CheckpointWriter`.

        A manifest that was sent without an answer may still arrive, after this has removed it. It has to find
        its chunks then: the retention of the next save removes them.
        """
        name = facts_of(token.encode()).name
        if self._last is not None and self._last.name == name:  # it is whole, and only retention failed
            return
        paths = [] if self._sent == name else self._store.paths()
        self._store.remove([manifest_path(name), *(path for path in paths if path.startswith(f"{name}/"))])

    def retain(self, keep: int) -> None:
        """See `CheckpointWriter`. What the newest ones stand on stays as well.

        Raises:
            CheckpointFailed: the storage fails. The new checkpoint is whole.
        """
        with self._told(
            "removing earlier checkpoints",
            "The new checkpoint is whole, and the training can go on: the next guard.save() removes them",
        ):
            clean(self._store, keep)

    def release(self) -> None:
        """See `DifferentialWriter`."""
        if self._buffer is not None:
            self._buffer.remove()
        self._buffer = None
        self._touched.clear()

    def finish(self, job: str, step: int) -> None:
        """See `CheckpointWriter`."""
        self._store.put(f"{_FINISHED}{job}", json.dumps({"job": job, "step": step}).encode())

    def finished(self, job: str) -> str | None:
        """See `CheckpointReader`.

        Raises:
            CheckpointFailed: the storage fails.
        """
        with self._told(f"looking whether job {job} is finished", _START_AGAIN):
            try:
                self._store.get(f"{_FINISHED}{job}")
            except FileNotFoundError:
                return None
        return f"{self}/{_FINISHED}{job}"

    def newest(self) -> Stored | None:
        """See `CheckpointReader`.

        Raises:
            CheckpointMismatch: what lies there was not written by `guard.save` to a `DurableTier`.
            CheckpointFailed: the checkpoints there stand on some that are gone; or the storage fails.
        """
        clear(self._memory)
        with self._told("looking for the newest checkpoint", _START_AGAIN):
            return _stored(self._newest())

    @torch.no_grad()
    def read(self, stored: Stored, pieces: Sequence[Piece]) -> None:
        """See `CheckpointReader`."""
        with self._told(f"reading checkpoint {stored.name}", _START_AGAIN):
            if not self._read or self._read[-1].name != stored.name:
                found = chain(self._store, stored.name)
                if found is None:
                    raise errors.CheckpointFailed(
                        f"{self} has no whole checkpoint {stored.name} any more: it was removed, or "
                        f"what it stands on; the next start takes the newest one that is whole"
                    )
                self._read, self._read_rows, self._read_rest = found, [], {}
            shards = [
                Shard(one.table, one.start, len(one.tensor), one.shape[0], {_column(one): one.tensor})
                for one in pieces
                if one.table is not None and len(one.tensor)
            ]
            if shards:
                rows(self._store, self._read, shards, self._note, progress=self._settings["progress"])
            for piece in pieces:
                if piece.table is None:
                    self._put_back(piece)

    def _note(self, shard: Shard, numbers: Tensor) -> None:
        """Rows that the checkpoint restored has, on top of a full one."""
        self._read_rows.append((shard.table, numbers + shard.start))

    def _put_back(self, piece: Piece) -> None:
        """Overwrites what is no row."""
        last = self._read[-1]
        if not self._read_rest:
            self._read_rest = rest(self._store, last, range(last.facts.world_size))
        found = self._read_rest.get(piece.key)
        if found is None:
            raise errors.CheckpointMismatch(
                f"{last.name} in {self} has no tensor {piece.key!r}, which this training needs"
            )
        if (found.dtype, found.shape) != (piece.tensor.dtype, piece.tensor.shape):
            raise errors.CheckpointMismatch(
                f"{piece.key!r} of {last.name} in {self} is {found.dtype} of shape {tuple(found.shape)}, and "
                f"this training needs {piece.tensor.dtype} of shape {piece.shape}"
            )
        piece.tensor.copy_(found)

    def _rows(self, facts: Facts, pieces: Sequence[Piece]) -> Iterator[Rows]:
        """What a checkpoint takes of the pieces: of a table, all columns together, in all their runs."""
        of_table: dict[str, list[Piece]] = {}
        for piece in pieces:
            if piece.table is not None:
                of_table.setdefault(piece.table, []).append(piece)
        for key, parts in of_table.items():
            numbers = self._touched[key].numbers() + self._shards[key].start if facts.needs else None
            edges = {edge for part in parts for edge in (part.start, part.start + len(part.tensor))}
            for first, stop in pairwise(sorted(edges)):
                tensors = {
                    _column(part): part.tensor[first - part.start : stop - part.start]
                    for part in parts
                    if part.start <= first and stop <= part.start + len(part.tensor)
                }
                within = None
                if numbers is not None:
                    begin, end = torch.searchsorted(numbers, torch.tensor([first, stop])).tolist()
                    within = numbers[begin:end] - first
                yield Rows(key, first, tensors, within)

    def _newest(self) -> list[Manifest]:
        """The newest whole checkpoint after all that it stands on; nothing if there is none."""
        found = last_chain(self._store) or []
        if found and not found[-1].facts.about:
            raise errors.CheckpointMismatch(
                f"{found[-1].name} in {self} was written by another user of Check-N-Run, not guard.save(): "
                f"go on from it with what has written it, or name another target"
            )
        paths = [] if found else self._store.paths()
        if others := [one for one in paths if number_of(one) is None and not one.startswith(_FINISHED)]:
            raise errors.CheckpointMismatch(
                f"{self} holds {others[0]!r}, and no checkpoint of Check-N-Run: name a target of the job's "
                f"own; what guard.save(path) has written is resumed with resume=path"
            )
        return found

    @contextmanager
    def _told(self, what: str, way_out: str) -> Generator[None]:
        """Turns what these modules, and clients of object storage, raise into ecemb's errors."""
        try:
            yield
        except errors.EcembError:
            raise
        except (OtherFormat, AnotherTraining) as error:
            raise errors.CheckpointMismatch(f"{self}: {error}") from error
        except (CheckpointFailed, Damaged) as error:
            raise errors.CheckpointFailed(f"{self}: {error}") from error
        except Exception as error:  # of any class
            raise errors.CheckpointFailed(
                f"{self}: {what} failed: {type(error).__name__}: {error}. {way_out}"
            ) from error


def _stored(found: Sequence[Manifest]) -> Stored | None:
    return Stored(found[-1].name, found[-1].facts.step, found[-1].facts.about) if found else None


def _column(piece: Piece) -> str:
    """Of its table."""
    return piece.key.removeprefix(f"{piece.table}.")


def _tables(about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What `Facts.tables` says, from the facts that `guard.save` gives."""
    found: dict[str, dict[str, Any]] = {}
    for rank, tables in enumerate(about["tables"]):
        for name, whole_rows, own_rows, columns in tables:
            key = name if whole_rows is not None else f"{name}/rank{rank}"
            tensors = {column: [dtype, [width]] for column, dtype, width in columns}
            found[key] = {"rows": own_rows if whole_rows is None else whole_rows, "tensors": tensors}
    return found


def _whole(about: Mapping[str, Any]) -> dict[str, Any]:
    """The tables whose order over ranks is known: rows and columns by name."""
    return {
        table[0]: [table[1], table[3]]
        for of_rank in about["tables"]
        for table in of_rank
        if table[1] is not None
    }


def _changed(facts: Facts, receipts: Sequence[Receipt]) -> float:
    """The part of all tables' bytes that a checkpoint has rows of, as they were before they were stored."""
    row_bytes = {
        key: sum(_row_bytes(*described) for described in table["tensors"].values())
        for key, table in facts.tables.items()
    }
    chunks = [chunk for receipt in receipts for chunk in receipt.chunks if chunk.is_rows]
    whole = sum(table["rows"] * row_bytes[key] for key, table in facts.tables.items())
    return sum(chunk.rows * row_bytes[chunk.table] for chunk in chunks) / max(1, whole)


def _row_bytes(dtype: str, shape: Sequence[int]) -> int:
    return getattr(torch, dtype).itemsize * math.prod(shape)
