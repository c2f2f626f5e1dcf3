"""The interface of a store of checkpoints, for `guard.save` and `protect(resume=)`.

Owns the protocols `CheckpointWriter`, `DifferentialWriter` and `CheckpointReader`, and the types that they
exchange. An object that implements them can replace a path. Every call is local to a rank: ecemb's own
transport carries texts (tokens, receipts) between ranks, so a store needs no network.

Must not know: arenas, codes, where pieces come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import CheckpointMismatch


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of rows of one tensor of the job, as one rank holds it.

    Attributes:
        key: name of the whole tensor, the same on all ranks.
        shape: of the whole tensor.
        start: row of the whole tensor at which the piece begins.
        tensor: contiguous, on the CPU, [rows, *shape[1:]]; of shape () if the whole tensor is.
        table: key of the rows' table: then `key` is "{table}.{column}", and the columns of a rank's tables
            have the same rows, if not in the same runs. None: not part of a table, and always whole.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor
    table: str | None = None

    @property
    def offsets(self) -> tuple[int, ...]:
        """The piece's begin in the whole tensor, in every dimension."""
        return (self.start, *([0] * (len(self.shape) - 1))) if self.shape else ()


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same values, whose bytes in memory are these in the order of rows.

    Shares the memory of a contiguous tensor; is a copy of a tensor with other strides (transposed, channels
    last), or with a conj or neg bit.
    """
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


@dataclasses.dataclass(frozen=True)
class Stored:
    """A complete checkpoint, as a reader found it.

    Attributes:
        name: distinguishes it from other checkpoints of the same store.
        step: number of the step to run next.
        facts: plain values (JSON) that the writer was given: format, job, lineage, step, world_size, code,
            tables (for each rank: name, number of rows of the whole table, or None if that isn't known,
            number of the rank's own rows only in that case, and name, type and width of each column), sizes.
    """

    name: str
    step: int
    facts: Mapping[str, Any]


def is_stored(place: object, newest: Stored | None, step: int, facts: Mapping[str, Any]) -> bool:
    """Whether a store has the checkpoint of a step already; for `CheckpointWriter.prepare`.

    Args:
        place: the store, for messages.
        newest: its newest checkpoint; None if there is none.
        step: of the new checkpoint.
        facts: of the new checkpoint.

    Raises:
        CheckpointMismatch: the store holds another training's checkpoints, or later steps.
    """
    if newest is None:
        return False
    if newest.facts.get("lineage") != facts["lineage"]:
        raise CheckpointMismatch(
            f"{place} holds checkpoints of another training (job {newest.facts.get('job')!r}, step "
            f"{newest.step}), which this one (job {facts['job']!r}) did not begin from: save to another "
            f"folder, or begin from it with ecemb.protect(resume=)"
        )
    if newest.step > step:
        raise CheckpointMismatch(
            f"{place} holds a checkpoint of step {newest.step}, and this training stands at step "
            f"{step}: another training continued from the same checkpoint; save to another folder"
        )
    return newest.step == step


@runtime_checkable
class CheckpointWriter(Protocol):
    """A store that `guard.save` writes to. In one save, in this order:

    1. rank 0: `prepare`, which makes room for a checkpoint that no reader sees yet;
    2. every rank: `write`, which returns when its pieces would survive a power failure;
    3. rank 0: `commit`, whose last act makes the checkpoint visible, completely or not at all;
    4. rank 0: `retain`, which removes old checkpoints.

    If any of 2 to 4 fails on any rank, rank 0 calls `discard`. A process may be killed at any moment: a
    visible checkpoint stays visible and complete. When the job is closed, rank 0 calls `finish`.

    With `asynchronous=True`, 2 to 4 run in a thread, beside the training. Errors of these calls are raised on
    all ranks, as `CheckpointFailed` unless they are ecemb's own errors.
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
            A receipt: this rank's information for `commit`.

        Raises:
            CheckpointFailed: this rank doesn't see the place that rank 0 prepared.
        """
        ...

    def commit(self, token: str, facts: Mapping[str, Any], receipts: Sequence[str]) -> None:
        """Makes the checkpoint visible; `receipts` are in the order of ranks."""
        ...

    def discard(self, token: str) -> None:
        """Removes the leftovers of a failed save; no part of a visible checkpoint."""
        ...

    def retain(self, keep: int) -> None:
        """Removes all but the `keep` newest complete checkpoints; never the newest."""
        ...

    def finish(self, job: str, step: int) -> None:
        """Records that the job was closed after `step` steps."""
        ...


@runtime_checkable
class DifferentialWriter(CheckpointWriter, Protocol):
    """A `CheckpointWriter` that stores changed rows only, and copies them itself.

    It gets further calls, on every rank:

    - `follow` in `protect(resume=)`, after `CheckpointReader.read` if the job begins from a checkpoint, else
      before its first save: changes before that call are not known;
    - `touched` from then on, in the training's thread, just before rows change;
    - `take` in each save between `prepare` and `write`, always in the training's thread; `write` then gets no
      pieces;
    - `release` when the guard is closed.
    """

    def follow(self, shards: Mapping[str, range]) -> None:
        """Begins to follow changes of rows.

        Args:
            shards: rows of the whole tables that this rank holds, by the tables' keys, as in `Piece.table`.
        """
        ...

    def touched(self, table: str, rows: torch.Tensor) -> None:
        """Marks rows that are about to change, or may differ from the stored rows.

        Args:
            table: its key.
            rows: int64 [m], m > 0, numbers within this rank's shard, in any order, repeats allowed. Read.
        """
        ...

    def take(self, token: str, rank: int, pieces: Sequence[Piece]) -> None:
        """Copies the parts of this rank's pieces (read) that `write` stores; the next step changes pieces."""
        ...

    def release(self) -> None:
        """Frees the memory of this object."""
        ...


@runtime_checkable
class CheckpointReader(Protocol):
    """A store that `protect(resume=)` reads. At a start that needs a checkpoint, in this order:

    1. every rank: `finished`, then `newest`; all ranks must find the same;
    2. every rank: `read`, several times, for its own pieces. The number of ranks may differ from the
       writer's: a piece may consist of several ranks' pieces, and of parts of them.
    """  # noqa: D415

    def finished(self, job: str) -> str | None:
        """The place of the record that the job was closed; None if it was not."""
        ...

    def newest(self) -> Stored | None:
        """The complete checkpoint of the highest step; None if there is none.

        Raises:
            CheckpointInsecure: another user could have written it.
        """
        ...

    def read(self, stored: Stored, pieces: Sequence[Piece]) -> None:
        """Overwrites the pieces' tensors with the stored values.

        Raises:
            CheckpointMismatch: the tensor is missing, or has another shape or type.
            CheckpointFailed: the checkpoint can't be read, or a part of it is missing.
            CheckpointInsecure: another user could have written it.
        """
        ...
