"""Snapshots in memory as a method: `baselines.rollback` saves to this machine's memory, and to others'.

Must not know: how memory outlives the process, which snapshot is chosen, what others keep.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from threading import Thread
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


class _Sending:
    """A snapshot on its way to the others, in a thread."""

    def __init__(
        self, redundancy: Redundancy, stamp: Stamp, slots: Slots, group: dist.ProcessGroup | None
    ) -> None:
        self._work = (stamp, slots, group)
        self._redundancy = redundancy
        self._sent_bytes = 0
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, name="snapshot", daemon=True)  # a peer may never answer
        self._thread.start()

    def finish(self) -> int:
        """Waits for its end, and returns the bytes that were sent; raises what it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._sent_bytes

    def _run(self) -> None:
        try:
            self._sent_bytes = self._redundancy.spread(*self._work)
        except Exception as error:  # noqa: BLE001 - raised by `finish`
            self._error = error


class SnapshotRecovery(Rollback):
    """Snapshots in the memory of this machine and of other ranks', at an interval of steps. All ranks.

    The parts that all ranks share are kept by each, and not sent.

    What is sent may go beside the next steps, as GEMINI does it: training waits for the copy to this
    machine's memory, and, before the next snapshot, for the others to have this one. GEMINI sends in the idle
    spans of the network, which it has measured; here messages go when they can (chosen).

    Args:
        folder: of this machine's memory, on tmpfs; the job's own, and another one on each machine.
        redundancy: what others keep.
        every: steps between snapshots; or
        mtbf: mean time between failures of the whole job, for Young's interval.
        beside: what others keep is sent beside the next steps.

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
        beside: bool = False,
    ) -> None:
        super().__init__(every, mtbf, behind=int(beside), survives=redundancy.survives)
        self._slots, self._redundancy = Slots(folder), redundancy
        self._beside = beside
        self._sending: _Sending | None = None
        self._group: dist.ProcessGroup | None = None
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
        self._finish()
        dist.barrier()
        self._slots.remove()

    def _restore(self, state: TrainingState) -> int | None:
        """See `Rollback`.

        Raises:
            SnapshotsLost: there were snapshots, and too many machines are lost.
        """
        if self._beside:
            group = dist.new_group(backend="gloo")  # for messages beside those of training
            self._group = group if isinstance(group, dist.ProcessGroup) else None
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
        self._finish()
        own_, shared = state.take()
        number = [secrets.randbits(62)]
        dist.broadcast_object_list(number, src=0)
        stamp = Stamp(step, number[0])
        for name, tensors in ((own(dist.get_rank()), own_), (SHARED, shared)):
            packing.pack(tensors, self._slots.begin(name, packing.size(tensors)))
            self._slots.seal(stamp)
        if self._beside:
            self._sending = _Sending(self._redundancy, stamp, self._slots, self._group)
        else:
            self._spread(stamp)

    def _finish(self) -> None:
        """Waits until what goes beside training is with the others. All ranks."""
        if self._sending is None:
            return
        sending, self._sending = self._sending, None
        self._sent_bytes += sending.finish()
        dist.barrier()  # as in `_spread`
        self._memory_bytes = max(self._memory_bytes, self._slots.kept_bytes)

    def _spread(self, stamp: Stamp) -> None:
        """Has others keep what they are to. Afterwards the snapshot is whole. All ranks."""
        self._sent_bytes += self._redundancy.spread(stamp, self._slots)
        dist.barrier()  # the snapshot before may be overwritten from here on
        self._memory_bytes = max(self._memory_bytes, self._slots.kept_bytes)
