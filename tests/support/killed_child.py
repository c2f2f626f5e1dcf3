"""Work in a child that is killed at a chosen moment: before any call that changes files, or any line."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Collection
from types import FrameType, ModuleType
from typing import Any

CALLS = ("mkdir", "rename", "fsync", "chmod", "rmdir", "unlink", "open", "posix_fallocate")


class Moments:
    """Counts; kills this process before the `end`th, after some last words."""

    def __init__(self, end: int, last: Callable[[], None] = lambda: None) -> None:
        self._left, self._last = end, last

    def pass_by(self) -> None:
        self._left -= 1
        if not self._left:
            sys.settrace(None)
            self._last()
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, modules: Collection[ModuleType]) -> None:
        """From here on: calls of `os`, and lines of some modules."""
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name)))

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                self.pass_by()
            return line

        files = {module.__file__ for module in modules}
        if files:
            sys.settrace(lambda frame, *_: line if frame.f_code.co_filename in files else None)

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.pass_by()
            return real(*arguments, **options)

        return call


def cut_off(end: int, work: Callable[[], None], *modules: ModuleType) -> bool:
    """Does the work in a child, which is killed before its `end`th moment.

    Args:
        end: from 1 on.
        work: has no collectives, whose threads a child lacks.
        modules: whose lines are moments, beside calls that change files.

    Returns:
        Whether it was killed.
    """
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, -signal.SIGKILL):
            raise AssertionError(f"the child ended with {code}: see its output")
        return code != 0
    gc.disable()  # what earlier tests left behind may end by waiting for threads, which a child lacks
    try:
        Moments(end).watch(modules)
        work()
    except BaseException:  # noqa: BLE001 - a child of pytest must not go on
        sys.settrace(None)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(3)
    os._exit(0)
