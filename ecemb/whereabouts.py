"""Where this process is: in which call of which step, and for how long it has waited there for other ranks.

Owns nothing but words. They are written by the main thread, and read by the one that is asked for them.
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
    """Where the main thread of this process is.

    Attributes:
        steps: that have ended here since the process began.
        place: a phrase that is the same on all ranks that are in the same call of the same step.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.place = "before ecemb.protect()"
        self._began: float | None = None

    @property
    def waited_s(self) -> float:
        """For how long the main thread has waited for what it waits for now; 0 if it does not wait."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    @contextmanager
    def waiting(self) -> Generator[None]:
        """The body waits for other ranks. Other threads than the main one don't count."""
        if threading.current_thread() is not threading.main_thread() or self._began is not None:
            yield
            return
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None


def placed(call: _C) -> _C:
    """Makes a method of a guard known as the place where this process is while it runs."""

    @functools.wraps(call)
    def within(self: Any, *arguments: Any, **named: Any) -> Any:
        before = self._whereabouts.place
        self._whereabouts.place = f"in guard.{call.__name__}(), before step {self.next_step}"
        try:
            return call(self, *arguments, **named)
        finally:
            self._whereabouts.place = before

    return cast("_C", within)
