"""The place of this process: its call, its step, and the time that it has waited there for other ranks.

Owns only text. The main thread writes it, and the failure detector's thread reads it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

_C = TypeVar("_C", bound=Callable[..., Any])


class Whereabouts:
    """The place of this process's main thread.

    Attributes:
        steps: number of steps that have ended since the process began.
        place: a phrase that is the same on all ranks that are in the same call of the same step.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.place = "before ecemb.protect()"
        self._began: float | None = None

    @property
    def waited_s(self) -> float:
        """Duration of the main thread's present wait; 0 if it does not wait."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Marks the body as a wait for other ranks. Threads other than the main thread don't count."""
        if threading.current_thread() is not threading.main_thread() or self._began is not None:
            yield
            return
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None


def placed(call: _C) -> _C:
    """Makes a method of a guard the place of this process while it runs."""

    @functools.wraps(call)
    def within(self: Any, *arguments: Any, **named: Any) -> Any:
        before = self._whereabouts.place
        self._whereabouts.place = f"in guard.{call.__name__}(), before step {self.next_step}"
        try:
            return call(self, *arguments, **named)
        finally:
            self._whereabouts.place = before

    return cast("_C", within)
