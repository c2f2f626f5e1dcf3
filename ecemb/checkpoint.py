"""What a store of checkpoints does for `guard.save` and `protect(resume=)` (D10).

Owns the two protocols, `CheckpointWriter` and `CheckpointReader`, and the nouns that they exchange. A tier
that implements them can be given in place of a path. Every call is local to a rank: texts (tokens, receipts)
travel between ranks by ecemb's own transport, so that a tier needs no network.

Must not know: arenas, codes, where pieces come from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch


@dataclasses.dataclass(frozen=True)
class Piece:
    """A run of rows of one tensor of the job, as one rank holds it.

    Attributes:
        key: name of the whole tensor, the same on all ranks.
        shape: of the whole tensor.
        start: row of the whole tensor with which the piece begins.
        tensor: contiguous, on the CPU, [rows, *shape[1:]]; of shape () if the whole is.
    """

    key: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor

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
            tables, sizes.
    """

    name: str
    step: int
    facts: Mapping[str, Any]


@runtime_checkable
class CheckpointWriter(Protocol):
    """Where `guard.save` puts checkpoints. In one save, in this order:

    1. rank 0: `prepare`, which makes room for a checkpoint that no reader sees yet;
    2. every rank: `write`, which returns when its pieces would survive a power failure;
    3. rank 0: `commit`, whose last act makes the checkpoint visible, as a whole or not at all;
    4. rank 0: `retain`, which removes old checkpoints.

    If 2 or 3 fails on any rank, rank 0 calls `discard`. A process may be killed at any moment: what was
    visible stays visible and complete. When the job is closed, rank 0 calls `finish`.

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
        """Removes what a failed save has left."""
        ...

    def retain(self, keep: int) -> None:
        """Removes all but the `keep` newest complete checkpoints; never the newest."""
        ...

    def finish(self, job: str, step: int) -> None:
        """Writes down that the job was closed after `step` steps."""
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
