"""Full recovery as a method: what `baselines.rollback` saves goes to files that outlive machines.

Must not know: how they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from baselines.method import Costs
from baselines.rollback import Rollback
from baselines.state import TrainingState

from .writers import Writer, complete, place


class CheckpointUnreadable(RuntimeError):
    """A checkpoint's files are not as they were written."""


class FullRecovery(Rollback):
    """Saves everything to a folder that outlives machines, and rolls back to it. All ranks.

    Bytes are the tensors' as written, and the files' as stored.

    Args:
        folder: of the job's checkpoints, on a file system that all ranks share.
        writer: how they are written.
        every: steps between saves; or
        mtbf: mean time between failures of the whole job, for Young's interval.
        keep: complete checkpoints that stay.

    Raises:
        ValueError: not exactly one of `every` and `mtbf`, or it is not above 0.
    """

    def __init__(
        self,
        folder: Path,
        writer: Writer,
        *,
        every: int | None = None,
        mtbf: timedelta | None = None,
        keep: int = 2,
    ) -> None:
        super().__init__(every, mtbf, writer.behind)
        self._folder, self._writer, self._keep = folder, writer, keep
        self._written_bytes = self._memory_bytes = 0

    def memory(self) -> Sequence[Path]:
        """Nothing: files outlive machines."""
        return ()

    def costs(self) -> Costs:
        """Of this life until now."""
        return Costs(
            stalled_s=self._stalled.seconds,
            written_bytes=self._written_bytes,
            stored_bytes=self._writer.stored_bytes(self._folder),
            memory_bytes=self._memory_bytes,
        )

    def close(self) -> None:
        """Waits until what is being saved is complete. All ranks."""
        with self._stalled.running():
            self._writer.wait()
        dist.barrier()

    def _restore(self, state: TrainingState) -> int | None:
        """See `Rollback`.

        Raises:
            CheckpointUnreadable: what ought to be the last save is none.
        """
        newest = [max(complete(self._folder), default=-1)]
        dist.broadcast_object_list(newest, src=0)
        if newest[0] < 0:
            return None
        path = place(self._folder, newest[0])
        try:
            saved = self._writer.load(path)
        except (Exception, CheckpointException) as error:
            raise CheckpointUnreadable(
                f"{path} can't be read: it is damaged, or of fewer ranks. Start as many as wrote it, or move "
                f"it away: then training goes back to the checkpoint before it"
            ) from error
        state.put(saved)
        return newest[0]

    def _store(self, step: int, state: TrainingState) -> None:
        own, shared = state.take()
        self._writer.save(self._folder, step, own, shared, self._keep)
        written = [*own.values(), *(shared.values() if dist.get_rank() == 0 else ())]
        self._written_bytes += sum(tensor.nbytes for tensor in written)
        self._memory_bytes = max(self._memory_bytes, self._writer.copied_bytes)
