"""The end of a failed process, whatever keeps the interpreter from its end.

After an exception the interpreter joins all threads but daemons, and those of executors; then it runs exit
handlers, destructors, and the exit functions of the C library. Each may be stuck: a prefetcher waits for room
in a queue that stays full, a handler for a server that is gone. The process would live on, and torchrun
would never restart the job: it waits for an end.

Must not know: why the process failed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

from .failure_detector import REPORT_S, report_within
from .hard_exit import say_last_words

logger: logging.Logger = logging.getLogger("ecemb")

GRACE_S = 10.0
"""From the failure to the hard exit of a process that has not ended by itself.

Twice what libraries need: torch's DataLoader waits 5 s for each of its workers. Less than the 30 s after
which torchrun kills a worker that it has asked to end.
"""
_EXIT_FAILED = 1  # of an interpreter that an exception ends
_SIGEV_THREAD = 2


class _Grace:
    """When the grace of this process begins: at its failure, or at the end of the last save after that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves = 0
        self._has_failed = False

    @contextmanager
    def after(self) -> Generator[None, None, None]:
        """See `before_end`."""
        with self._lock:
            self._saves += 1
        try:
            yield
        finally:
            with self._lock:
                self._saves -= 1
                if self._has_failed and not self._saves:
                    _begin()

    def fail(self) -> None:
        """Begins the grace, once nothing is being saved."""
        with self._lock:
            if not (self._saves or self._has_failed):
                _begin()
            self._has_failed = True


_grace = _Grace()


def before_end() -> AbstractContextManager[None]:
    """A block that a failed process waits for: it ends by itself, as a save, whose waits have deadlines."""
    return _grace.after()


def enforce_end() -> None:
    """Ends this failed process with code 1 after `GRACE_S`, unless it has ended before. Returns at once.

    The grace begins when the last block of `before_end` has ended. Nothing happens where the script's own
    code called the hook, or a prompt did: then the process goes on.

    A thread of Python's names the cause. It can't run any more once the interpreter destroys its objects, nor
    while a call keeps the interpreter's lock: then a timer of the C library ends the process.
    """
    if _goes_on(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
        return
    _grace.fail()
    _flush()  # the hard exit doesn't


def _goes_on(caller: FrameType) -> bool:
    """Whether the hook was called by running code, or by a prompt, and not by the interpreter at its end."""
    script = vars(sys.modules["__main__"])
    is_running = any(
        frame.f_code.co_name == "<module>" and frame.f_globals is script
        for frame, _ in traceback.walk_stack(caller)
    )
    return is_running or bool(sys.flags.inspect) or hasattr(sys, "ps1")


def _begin() -> None:
    _exit_after(GRACE_S + REPORT_S)
    with suppress(RuntimeError):  # no more threads: the timer remains
        threading.Thread(target=_end_late, name="ecemb-end", daemon=True).start()


def _end_late() -> None:
    threading.Event().wait(GRACE_S)
    report_within(REPORT_S, _report)
    os._exit(_EXIT_FAILED)


def _report() -> None:
    logger.error(
        "this process has failed, and can't end by itself within %.0f s: %s; ending it with code %d, so that "
        "torchrun restarts the job (end threads and executors in a `finally`, or make the threads daemons)",
        GRACE_S,
        ", ".join(_unfinished()),
        _EXIT_FAILED,
    )
    say_last_words()
    logging.shutdown()
    _flush()


def _unfinished() -> list[str]:
    """Where the main thread is, and each thread that the interpreter waits for."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    threads = {thread.ident: thread for thread in threading.enumerate() if not thread.daemon}
    main = threading.main_thread()
    threads[main.ident] = main
    places = [
        f"{thread.name} is in {_place(frames[ident])}"
        for ident, thread in threads.items()
        if ident is not None and ident in frames
    ]
    if main.ident not in frames:
        places.append(f"{main.name} is past the script, in code of a C library, such as an exit handler")
    return places


def _place(frame: FrameType) -> str:
    """The innermost call outside of Python's library, else the innermost one."""
    library = os.path.dirname(os.__file__) + os.sep
    for each, line in traceback.walk_stack(frame):
        name = each.f_code.co_filename
        if not name.startswith((library, "<")) or "-packages" + os.sep in name:
            return f"{each.f_code.co_name} ({name}:{line})"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a closed pipe, a closed stream, none
            stream.flush()


class _Sigevent(ctypes.Structure):
    """struct sigevent of the C library on 64-bit Linux, for SIGEV_THREAD."""

    _fields_ = (
        ("value", ctypes.c_void_p),  # union sigval
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("unused", ctypes.c_long * 4),
    )


def _exit_after(delay_s: float) -> None:
    """Has the C library call `_exit`, in a thread of its own. A forked child doesn't inherit the timer."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "timer_create"):
        library = ctypes.CDLL("librt.so.1", use_errno=True)  # glibc before 2.34
    function = ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p)
    event = _Sigevent(_EXIT_FAILED, 0, _SIGEV_THREAD, function)
    timer = ctypes.c_void_p()
    when = (ctypes.c_long * 4)(0, 0, int(delay_s), int(delay_s % 1 * 1e9))  # struct itimerspec: once
    if library.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) or (
        library.timer_settime(timer, 0, when, None)
    ):
        logger.warning("no timer can enforce this process's end: %s", os.strerror(ctypes.get_errno()))
