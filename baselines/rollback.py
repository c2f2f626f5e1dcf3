"""What methods that save everything now and then, and go back to it, have in common: when, and what it costs.

Must not know: where saves are kept.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

from .interval import Interval
from .method import Promise, Training
from .state import TrainingState
from .stopwatch import Stopwatch


class Rollback(ABC):
    """After a failure, all ranks go back to the last save, and run again. The initial state is saved as well.

    Args:
        every: steps between saves; or
        mtbf: mean time between failures of the whole job, for Young's interval.
        behind: saves that may not be complete yet when training goes on.
        survives: see `Promise`.

    Attributes:
        interval: between saves.

    Raises:
        ValueError: not exactly one of `every` and `mtbf`, or it is not above 0.
    """

    def __init__(
        self, every: int | None, mtbf: timedelta | None, behind: int = 0, survives: int | None = None
    ) -> None:
        self.interval = Interval(every, mtbf)
        self._state: TrainingState | None = None
        self._next = self._saved = 0
        self._stalled = Stopwatch()
        again = None if every is None else (1 + behind) * every - 1
        self.promise = Promise(bit_identical=True, steps_again=again, survives=survives)

    @property
    def interval_steps(self) -> int | None:
        """See `Method.interval_steps`."""
        return self.interval.steps

    def prepare(self, training: Training) -> int:
        """Goes back to the last save, or makes the first one. All ranks.

        Returns:
            The step to run next.
        """
        self._state = TrainingState(training)
        with self._stalled.running():
            found = self._restore(self._state)
            self._next = 0 if found is None else found
        self._saved = self._next
        if found is None:
            self._save()
        return self._next

    @contextmanager
    def step(self) -> Generator[None]:
        """Around a step's body; the save that is due comes after it. All ranks."""
        began = time.perf_counter()
        yield
        self._next += 1
        self.interval.stepped(time.perf_counter() - began)
        if self.interval.is_due(self._next - self._saved):
            self._save()

    @abstractmethod
    def _restore(self, state: TrainingState) -> int | None:
        """Brings the state to the last save, and returns its step; None if there is none."""

    @abstractmethod
    def _store(self, step: int, state: TrainingState) -> None:
        """Saves the state. All ranks.

        Args:
            step: that comes next.
            state: read.
        """

    def _save(self) -> None:
        if self._state is None:
            raise RuntimeError("prepare() comes first")
        before = self._stalled.seconds
        with self._stalled.running():
            self._store(self._next, self._state)
        self._saved = self._next
        self.interval.saved(self._stalled.seconds - before)
