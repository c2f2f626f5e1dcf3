"""The pace of a commit beside training: some work, then a rest, so that no step is slowed down much.

Owns how long the thread of a commit rests between two parts of its work. Nothing rests while training waits
for the commit. Must not know: what the work is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SHARE = 0.04
"""Of a processor: what a commit takes of it while it rests between its parts. Less would keep a transaction
undecided for longer, and more of its rows would change before their deltas are laid out."""
AT_ONCE_S = 0.005
"""Processor time of a commit before its first rest: that of a window of few rows."""

_work: Callable[[], float] = time.thread_time


class Pace:
    """Shares the processor between training and the thread that commits."""

    def __init__(self) -> None:
        self._waiting = threading.Event()
        self._spent_s = self._last_s = 0.0

    def begin(self) -> None:
        """A commit is about to be handed to its thread; by the thread that trains, when none is pending."""
        self._waiting.clear()

    def start(self) -> None:
        """The commit begins, in its thread."""
        self._spent_s, self._last_s = 0.0, _work()

    def rest(self) -> None:
        """Part of the work is done; by its thread."""
        now_s = _work()
        part_s = now_s - self._last_s
        self._spent_s += part_s
        if self._spent_s > AT_ONCE_S:
            self._waiting.wait(part_s * (1 / SHARE - 1))
        self._last_s = _work()

    def hurry(self) -> None:
        """Training waits: no more rests until the next commit."""
        self._waiting.set()
