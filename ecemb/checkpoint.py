"""What a store of checkpoints does for `guard.save` and `protect(resume=)` (D10).

Owns the protocols `CheckpointWriter`, `DifferentialWriter` and `CheckpointReader`, and the nouns that they
exchange. A tier that implements them can be given in place of a path. Every call is local to a rank: texts
(tokens, receipts) travel between ranks by ecemb's own transport, so that a tier needs no network.

Must not know: arenas, codes, where pieces come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from .errors import CheckpointMismatch


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of rows of one tensor of the job, as one rank holds it.

    Attributes:
        key: name of the whole tensor, the same on all ranks.
        shape: of the whole tensor.
        start: row of the whole tensor with which the piece begins.
        tensor: contiguous, on the CPU, [rows, *shape[1:]]; of shape () if the whole is.
        table: key of the table that the rows are of: `key` is "{table}.{column}" then, and the columns of a
            rank's tables have the same rows, if not in the same runs. None: of no table, and always whole.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor
    table: str | None = None

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the piece begins in the whole tensor, in every dimension."""
        return (self.start, *([0] * (len(self.shape) - 1))) if self.shape else ()


@dataclasses.dataclass(frozen=True)
class Stored:
    """A complete checkpoint, as a reader found it.

    Attributes:
        name: tells it from others of the same store.
        step: number of the step to run next.
        facts: plain values (JSON) that the writer was given: format, job, lineage, step, world_size, code,
            tables (for each rank: name, rows of the whole or None, else rows of the rank's own, and name,
            type and width of each column), sizes.
    """

    name: str
    step: int
    facts: Mapping[str, Any]


def is_stored(place: object, newest: Stored | None, step: int, facts: Mapping[str, Any]) -> bool:
    """Whether a store has the checkpoint of a step already; for `CheckpointWriter.prepare`.

    Args:
        place: the store, for messages.
        newest: its newest checkpoint.
        step: of the checkpoint that is to be written.
        facts: of that one.

    Raises:
        CheckpointMismatch: the store holds another training's checkpoints, or later steps.
    """
    if newest is None:
        return False
    if newest.facts.get("lineage") != facts["lineage"]:
        raise CheckpointMismatch(
            f"{place} holds checkpoints of another training (job {newest.facts.get('job')!r}, step "
            f"{newest.step}), which this one (job {facts['job']!r}) didn't begin from: save to another "
            f"folder, or begin from it with ecemb.protect(resume=)"
        )
    if newest.step > step:
        raise CheckpointMismatch(
            f"{place} holds a checkpoint of step {newest.step}, and this training stands at step "
            f"{step}: another one goes on from the same checkpoint; save to another folder"
        )
    return newest.step == step


@runtime_checkable
class CheckpointWriter(Protocol):
    """Where `guard.save` puts checkpoints. In one save, in this order:

    1. rank 0: `prepare`, which makes room for a checkpoint that no reader sees yet;
    2. every rank: `write`, which returns when its pieces would survive a power failure;
    3. rank 0: `commit`, whose last act makes the checkpoint visible, as a whole or not at all;
    4. rank 0: `retain`, which removes old checkpoints.

    If any of 2 to 4 fails on any rank, rank 0 calls `discard`. A process may be killed at any moment: what
    was visible stays visible and complete. When the job is closed, rank 0 calls `finish`.

    With `asynchronous=True`, 2 to 4 run in a thread, beside the training. What these calls raise is raised on
    all ranks, as `CheckpointFailed` unless it is one of ecemb's own errors.
    """  # noqa: D415

    def prepare(self, step: int, facts: Mapping[str, Any]) -> str:
        """Makes room for the checkpoint of a step.

        Returns:
            A token that names the place for all ranks; "" if this very checkpoint is stored already.

        Raises:
            CheckpointMismatch: the store holds another training's checkpoints, or later steps.
        """
        ...

    def write(self, token: str, rank: int, world_size: int, pieces: Sequence[Piece]) -> str:
        """Stores this rank's pieces (read).

        Returns:
            A receipt: what `commit` has to know of them.

        Raises:
            CheckpointFailed: this rank doesn't see the place that rank 0 prepared.
        """
        ...

    def commit(self, token: str, facts: Mapping[str, Any], receipts: Sequence[str]) -> None:
        """Makes the checkpoint visible; `receipts` are in the order of ranks."""
        ...

    def discard(self, token: str) -> None:
        """Removes what a failed save has left; nothing of a checkpoint that became visible."""
        ...

    def retain(self, keep: int) -> None:
        """Removes all but the `keep` newest complete checkpoints; never the newest."""
        ...

    def finish(self, job: str, step: int) -> None:
        """Writes down that the job was closed after `step` steps."""
        ...


@runtime_checkable
class DifferentialWriter(CheckpointWriter, Protocol):
    """A `CheckpointWriter` that stores which rows have changed, and takes its own copy of them.

    It is called besides, on every rank:

    - `follow` in `protect(resume=)`, after `CheckpointReader.read` if the job begins from a checkpoint, else
      before its first save: what happened before it is not known;
    - `touched` from then on, in the training's thread, just before rows change;
    - `take` in each save between `prepare` and `write`, always in the training's thread; `write` gets no
      pieces then;
    - `release` when the guard is closed.
    """

    def follow(self, shards: Mapping[str, range]) -> None:
        """From here on, is told which rows change.

        Args:
            shards: rows of the whole tables that this rank holds, by the tables' keys, as in `Piece.table`.
        """
        ...

    def touched(self, table: str, rows: torch.Tensor) -> None:
        """Rows are about to change, or may be other than they were when they were stored.

        Args:
            table: its key.
            rows: int64 [m], m > 0, numbers within this rank's shard, in any order, repeats allowed. Read.
        """
        ...

    def take(self, token: str, rank: int, pieces: Sequence[Piece]) -> None:
        """Copies of this rank's pieces (read) what `write` is to store; the next step changes them."""
        ...

    def release(self) -> None:
        """Gives back the memory that it takes."""
        ...


@runtime_checkable
class CheckpointReader(Protocol):
    """Where `protect(resume=)` finds checkpoints. At a start that needs one, in this order:

    1. every rank: `finished`, then `newest`; all ranks must find the same;
    2. every rank: `read`, several times, for what it needs. The number of ranks may be another than the
       writer's: a piece may be made of several ranks' pieces, and only of parts of them.
    """  # noqa: D415

    def finished(self, job: str) -> str | None:
        """Where it is written that the job was closed; None if it was not."""
        ...

    def newest(self) -> Stored | None:
        """The complete checkpoint of the highest step; None if there is none.

        Raises:
            CheckpointInsecure: others could have written it.
        """
        ...

    def read(self, stored: Stored, pieces: Sequence[Piece]) -> None:
        """Overwrites the pieces' tensors with what was stored.

        Raises:
            CheckpointMismatch: no such tensor, or one of another shape or type.
            CheckpointFailed: it can't be read, or not all of it is there.
            CheckpointInsecure: others could have written it.
        """
        ...
