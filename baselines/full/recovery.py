"""Full recovery as a method: save now and then, and after a failure go back, all ranks, and run again.

Must not know: how checkpoints are written.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from bench.method import Costs, Promise, Training

from .interval import Interval
from .state import TrainingState
from .writers import Writer, complete, place


class FullRecovery:
    """Saves everything to a folder that outlives machines, and rolls back to it. All ranks.

    The state before the first step is saved, too.

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
        self._folder, self._writer, self._keep = folder, writer, keep
        self._interval = Interval(every, mtbf)
        self._state: TrainingState | None = None
        self._next = self._saved = 0
        self._stalled_s = 0.0
        self._written_bytes = self._last_bytes = self._memory_bytes = 0
        again = None if every is None else (1 + writer.behind) * every - 1
        self.promise = Promise(bit_identical=True, steps_again=again)

    def prepare(self, training: Training) -> int:
        """Goes back to the newest complete checkpoint, or saves the first one. All ranks.

        Returns:
            The step to run next.
        """
        self._state = TrainingState(training)
        newest = [max(complete(self._folder), default=-1)]
        dist.broadcast_object_list(newest, src=0)
        if newest[0] < 0:
            self._save()
            return 0
        self._state.put(self._writer.load(place(self._folder, newest[0])))
        self._next = self._saved = newest[0]
        return self._next

    @contextmanager
    def step(self) -> Generator[None]:
        """Around a step's body; the save that is due comes after it. All ranks."""
        began = time.perf_counter()
        yield
        self._next += 1
        self._interval.stepped(time.perf_counter() - began)
        if self._interval.steps is not None and self._next - self._saved >= self._interval.steps:
            self._save()

    def memory(self) -> Sequence[Path]:
        """Nothing: files outlive machines."""
        return ()

    def costs(self) -> Costs:
        """Of this life until now."""
        return Costs(
            stalled_s=self._stalled_s,
            written_bytes=self._written_bytes,
            stored_bytes=self._last_bytes * len(complete(self._folder)),
            memory_bytes=self._memory_bytes,
        )

    def close(self) -> None:
        """Waits until what is being saved is complete. All ranks."""
        began = time.perf_counter()
        self._writer.wait()
        self._stalled_s += time.perf_counter() - began

    def _save(self) -> None:
        if self._state is None:
            raise RuntimeError("prepare() comes first")
        began = time.perf_counter()
        own, shared = self._state.take()
        self._writer.save(self._folder, self._next, own, shared, self._keep)
        seconds = time.perf_counter() - began
        self._saved = self._next
        self._stalled_s += seconds
        self._last_bytes = sum(tensor.nbytes for tensor in own.values())
        if dist.get_rank() == 0:
            self._last_bytes += sum(tensor.nbytes for tensor in shared.values())
        self._written_bytes += self._last_bytes
        self._memory_bytes = max(self._memory_bytes, self._writer.copied_bytes)
        self._interval.saved(seconds)
