"""Snapshots in memory as a method: `baselines.rollback` saves to this machine's memory, and to others'.

Must not know: how memory outlives the process, which snapshot is chosen, what others keep.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from baselines import packing
from baselines.method import Costs
from baselines.rollback import Rollback
from baselines.slots import Slots, Stamp
from baselines.state import TrainingState

from .plan import SHARED, own
from .redundancy import Redundancy


class SnapshotsLost(RuntimeError):
    """Of no snapshot enough is left."""


class SnapshotRecovery(Rollback):
    """Snapshots in the memory of this machine and of other ranks', at an interval of steps. All ranks.

    The parts that all ranks share are kept by each, and not sent.

    Args:
        folder: of this machine's memory, on tmpfs; the job's own, and another one on each machine.
        redundancy: what others keep.
        every: steps between snapshots; or
        mtbf: mean time between failures of the whole job, for Young's interval.

    Raises:
        ValueError: not exactly one of `every` and `mtbf`, or it is not above 0.
    """

    def __init__(
        self,
        folder: Path,
        redundancy: Redundancy,
        *,
        every: int | None = None,
        mtbf: timedelta | None = None,
    ) -> None:
        super().__init__(every, mtbf, survives=redundancy.survives)
        self._slots, self._redundancy = Slots(folder), redundancy
        self._sent_bytes = self._memory_bytes = 0

    def memory(self) -> Sequence[Path]:
        """All snapshots here, and what is kept of other ranks'."""
        return self._slots.paths

    def costs(self) -> Costs:
        """Of this life until now."""
        return Costs(
            stalled_s=self._stalled.seconds,
            sent_bytes=self._sent_bytes,
            memory_bytes=self._memory_bytes,
        )

    def close(self) -> None:
        """Gives the memory back. All ranks."""
        dist.barrier()
        self._slots.remove()

    def _restore(self, state: TrainingState) -> int | None:
        """See `Rollback`.

        Raises:
            SnapshotsLost: there were snapshots, and too many machines are lost.
        """
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, self._slots.kept())
        found = self._redundancy.plan(held)
        if found is None and any(stamp.step for parts in held for _, stamp in parts):
            present = [rank for rank, parts in enumerate(held) if parts]
            raise SnapshotsLost(
                f"of no snapshot enough is left: only the machines of ranks {present} hold any, and "
                f"{self._redundancy} doesn't survive the loss of this many: start as many ranks as "
                f"before, or, if there were as many, train from the start, with an empty folder"
            )
        self._slots.forget(None if found is None else found.stamp)  # what a snapshot cut off has left
        if found is None:
            return None  # nothing was trained yet
        self._sent_bytes += self._redundancy.fetch(found, self._slots)
        saved: dict[str, Tensor] = {}
        for name in (own(dist.get_rank()), SHARED):
            saved |= packing.unpack(self._slots.read(name, found.stamp))
        self._spread(found.stamp)  # again: others may have lost it
        state.put(saved)
        return found.stamp.step

    def _store(self, step: int, state: TrainingState) -> None:
        own_, shared = state.take()
        number = [secrets.randbits(62)]
        dist.broadcast_object_list(number, src=0)
        stamp = Stamp(step, number[0])
        for name, tensors in ((own(dist.get_rank()), own_), (SHARED, shared)):
            packing.pack(tensors, self._slots.begin(name, packing.size(tensors)))
            self._slots.seal(stamp)
        self._spread(stamp)

    def _spread(self, stamp: Stamp) -> None:
        """Has others keep what they are to. Afterwards the snapshot is whole. All ranks."""
        self._sent_bytes += self._redundancy.spread(stamp, self._slots)
        dist.barrier()  # the snapshot before may be overwritten from here on
        self._memory_bytes = max(self._memory_bytes, self._slots.kept_bytes)
