"""How many steps lie between two saves: as many as asked for, or as Young's formula says.

O_save is what training waits, for the slowest rank, as the mean over all saves of a life (chosen).

Must not know: what a save does.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from .young import young

MEASURED = 5
"""Steps of a life whose time is taken before the first interval is chosen (chosen)."""


class Mean:
    """Of all numbers so far."""

    def __init__(self) -> None:
        self.count, self._sum = 0, 0.0

    @property
    def value(self) -> float:
        """The mean; there are some."""
        return self._sum / self.count

    def add(self, number: float) -> None:
        """One more."""
        self.count += 1
        self._sum += number


class Interval:
    """The number of steps between saves; the same on all ranks.

    Args:
        every: steps; or None.
        mtbf: mean time between failures of the whole job, for Young's formula; or None.

    Attributes:
        steps: the interval; None until it can be known.
        measured: what a save and a step take the slowest rank, in seconds; None until it is known, or if
            `every` is given.

    Raises:
        ValueError: not exactly one of them is given, or it is not above 0.
    """

    def __init__(self, every: int | None, mtbf: timedelta | None) -> None:
        if (every is None) == (mtbf is None):
            raise ValueError(f"give every=, in steps, or mtbf=, for Young's interval; got {every} and {mtbf}")
        if (every is not None and every < 1) or (mtbf is not None and mtbf <= timedelta(0)):
            raise ValueError(f"every= and mtbf= are above 0; got {every} and {mtbf}")
        self.steps = every
        self.measured: tuple[float, float] | None = None
        self._mtbf = mtbf
        self._steps, self._saves = Mean(), Mean()

    def is_due(self, since: int) -> bool:
        """Whether to save, this many steps after the last save; or, if none was measured yet, to find out."""
        if self.steps is None:
            return self._steps.count >= MEASURED
        return since >= self.steps

    def stepped(self, seconds: float) -> None:
        """A step took so long, without saves. All ranks."""
        if self._mtbf is not None:
            self._steps.add(seconds)
            if self._steps.count == MEASURED:
                self._choose()

    def saved(self, seconds: float) -> None:
        """A save stalled training for so long. All ranks."""
        if self._mtbf is not None:
            self._saves.add(seconds)
            if self._steps.count >= MEASURED:
                self._choose()

    def _choose(self) -> None:
        """By what the slowest rank takes."""
        if self._mtbf is None or not self._saves.count:
            return
        slowest = torch.tensor([self._saves.value, self._steps.value], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        save_s, step_s = slowest.tolist()
        self.measured = save_s, step_s
        self.steps = max(1, round(young(save_s, self._mtbf.total_seconds()) / step_s))
