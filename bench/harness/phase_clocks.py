"""Processor time of a guard's phases, each on the clock of the thread that runs it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

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

        @contextmanager
        def clocked(name: str) -> Generator[None]:
            began, self.now = time.thread_time(), name
            try:
                with phase(name):
                    yield
            finally:
                self.now = ""
                self.spent_s[name] = self.spent_s.get(name, 0.0) + time.thread_time() - began

        setattr(transactions, "phase", clocked)  # noqa: B010 - of this object alone
