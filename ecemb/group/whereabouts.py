"""The place of this process: its call, its step, and the time that it has waited there for other ranks.

Owns only text. The main thread writes it, and the failure detector's thread reads it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

_C = TypeVar("_C", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error of this rank's own that ended a step: no other rank caused it.

    Attributes:
        text: the error in one line.
        stack: its traceback.
        code: with which Python ends a process by it.
        at: when it was, by `time.time`.
    """

    text: str
    stack: str
    code: int
    at: float


class Whereabouts:
    """The place of this process's main thread.

    Attributes:
        failure: the error that ended a step here, if it began on this rank.
        steps: number of steps that have ended since the process began.
        place: a phrase that is the same on all ranks that are in the same call of the same step.
        began: when the main thread's present wait began, by `time.monotonic`; None if it does not wait.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.steps = 0
        self.place = "before ecemb.protect()"
        self.began: float | None = None

    @property
    def waited_s(self) -> float:
        """Duration of the main thread's present wait; 0 if it does not wait."""
        began = self.began
        return 0.0 if began is None else time.monotonic() - began

    def waiting(self) -> _Waiting:
        """Marks a `with` block as a wait for other ranks. Threads other than the main thread don't count."""
        return _Waiting(self)


class _Waiting:
    """One `with` block; a step waits for a dozen messages, and a generator for each would cost more."""

    __slots__ = ("_counts", "_where")

    def __init__(self, where: Whereabouts) -> None:
        self._where = where
        self._counts = False

    def __enter__(self) -> None:
        where = self._where
        if where.began is None and threading.current_thread() is threading.main_thread():
            self._counts, where.began = True, time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._counts:
            self._where.began = None


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
