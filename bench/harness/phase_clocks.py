"""Processor time of a guard's phases, each on the clock of the thread that runs it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import ecemb


class PhaseClocks:
    """Clocks the phases of a guard, from now on.

    Args:
        guard: The guard of this process.

    Attributes:
        spent_s: phase -> seconds of processor time.
        now: The phase that runs, or ran last in any thread; "" between phases.
    """

    def __init__(self, guard: ecemb.Guard) -> None:
        self.spent_s: dict[str, float] = {}
        self.now = ""
        transactions = guard._transactions
        phase = transactions.phase

        def clocked(name: str) -> _Clocked:
            return _Clocked(self, name, phase(name))

        setattr(transactions, "phase", clocked)  # noqa: B010 - of this object alone


class _Clocked:
    """One phase; a generator would add to what it measures."""

    __slots__ = ("_began", "_clocks", "_inner", "_name")

    def __init__(self, clocks: PhaseClocks, name: str, inner: AbstractContextManager[None]) -> None:
        self._clocks, self._name, self._inner, self._began = clocks, name, inner, 0.0

    def __enter__(self) -> None:
        self._began, self._clocks.now = time.thread_time(), self._name
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        spent_s = self._clocks.spent_s
        self._clocks.now = ""
        spent_s[self._name] = spent_s.get(self._name, 0.0) + time.thread_time() - self._began
