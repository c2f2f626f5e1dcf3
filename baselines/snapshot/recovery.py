"""Snapshots in memory as a method: `baselines.rollback` saves to this machine's memory, and to partners'.

Must not know: how memory outlives the process, which snapshot is chosen.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from baselines import packing
from baselines.rollback import Rollback
from baselines.slots import Slots, Stamp
from bench.method import Costs

from .moves import carry_out
from .plan import SHARED, own, plan


class SnapshotsLost(RuntimeError):
    """Of no snapshot all parts are left."""


class SnapshotRecovery(Rollback):
    """Snapshots in the memory of this machine and of the next ranks', every so many steps. All ranks.

    The parts that all ranks share are kept by each, and sent to nobody.

    Args:
        folder: of this machine's memory, on tmpfs; the job's own, and another one on each machine.
        copies: ranks that a rank's own part is sent to.
        every: steps between snapshots; or
        mtbf: mean time between failures of the whole job, for Young's interval.

    Raises:
        ValueError: not exactly one of `every` and `mtbf`, or it is not above 0; or no copies.
    """

    def __init__(
        self, folder: Path, *, copies: int = 1, every: int | None = None, mtbf: timedelta | None = None
    ) -> None:
        super().__init__(every, mtbf)
        if copies < 1:
            raise ValueError(f"copies, of each rank's state at others, are at least 1; got {copies}")
        self._slots, self._copies = Slots(folder), copies
        self._sent_bytes = self._memory_bytes = 0

    def memory(self) -> Sequence[Path]:
        """All snapshots here, this rank's and its partners'."""
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

    def _load(self) -> tuple[int, Mapping[str, Tensor]] | None:
        """See `Rollback`.

        Raises:
            SnapshotsLost: there were snapshots, and too many machines are lost.
        """
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, self._slots.kept())
        found = plan(held)
        self._slots.forget(None if found is None else found.stamp)  # what a snapshot cut off has left
        if found is None:
            if all(stamp.step == 0 for parts in held for _, stamp in parts):
                return None  # nothing was trained yet
            present = [rank for rank, parts in enumerate(held) if parts]
            raise SnapshotsLost(
                f"of no snapshot all parts are left: only the machines of ranks {present} hold any, and "
                f"copies={self._copies} survives the loss of so many: train anew, with an empty folder"
            )
        self._sent_bytes += carry_out(found, self._slots)
        saved: dict[str, Tensor] = {}
        for name in (own(dist.get_rank()), SHARED):
            saved |= packing.unpack(self._slots.read(name, found.stamp))
        if found.moves:  # what was lost of others' copies is made again
            self._send_copies(found.stamp)
        self._note_memory()
        return found.stamp.step, saved

    def _store(self, step: int, own_: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        number = [secrets.randbits(62)]
        dist.broadcast_object_list(number, src=0)
        stamp = Stamp(step, number[0])
        for name, tensors in ((own(dist.get_rank()), own_), (SHARED, shared)):
            packing.pack(tensors, self._slots.begin(name, packing.size(tensors)))
            self._slots.seal(stamp)
        self._send_copies(stamp)
        self._note_memory()

    def _send_copies(self, stamp: Stamp) -> None:
        """Sends this rank's own part to its partners. Afterwards the snapshot is whole. All ranks."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = torch.from_numpy(self._slots.read(own(rank), stamp))
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]))
        for distance in range(1, min(self._copies, ranks - 1) + 1):
            source = (rank - distance) % ranks
            sending = dist.isend(mine, (rank + distance) % ranks)
            if (own(source), stamp) not in self._slots.kept():
                into = torch.from_numpy(self._slots.begin(own(source), int(sizes[source])))
                dist.recv(into, source)
                self._slots.seal(stamp)
            else:
                dist.recv(torch.empty(int(sizes[source]), dtype=torch.uint8), source)
            if sending is not None:
                sending.wait()
            self._sent_bytes += mine.numel()
        dist.barrier()  # the snapshot before may be overwritten from here on

    def _note_memory(self) -> None:
        self._memory_bytes = max(self._memory_bytes, self._slots.kept_bytes)
