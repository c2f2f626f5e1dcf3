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
from contextlib import suppress
from types import FrameType

from .failure_detector import REPORT_S, report_within

logger: logging.Logger = logging.getLogger("ecemb")

GRACE_S = 10.0
"""From the failure to the hard exit of a process that has not ended by itself.

Twice what libraries need: torch's DataLoader waits 5 s for each of its workers. Less than the 30 s after
which torchrun kills a worker that it has asked to end.
"""
_EXIT_FAILED = 1  # of an interpreter that an exception ends
_SIGEV_THREAD = 2


def enforce_end() -> None:
    """Ends this failed process with code 1 after `GRACE_S`, unless it has ended before. Returns at once.

    A thread of Python's names the cause. It can't run any more once the interpreter destroys its objects, nor
    while a call keeps the interpreter's lock: then a timer of the C library ends the process.
    """
    _exit_after(GRACE_S + REPORT_S)
    with suppress(RuntimeError):  # no more threads: the timer remains
        threading.Thread(target=_end_late, name="ecemb-end", daemon=True).start()
    _flush()  # the hard exit doesn't


def _end_late() -> None:
    threading.Event().wait(GRACE_S)
    report_within(REPORT_S, _report)
    os._exit(_EXIT_FAILED)


def _report() -> None:
    logger.error(
        "this process failed %.0f s ago, and can't end by itself: %s; ending it with code %d, so that "
        "torchrun restarts the job (end threads and executors in a `finally`, or make the threads daemons)",
        GRACE_S,
        ", ".join(_unfinished()),
        _EXIT_FAILED,
    )
    logging.shutdown()
    _flush()


def _unfinished() -> list[str]:
    """Where the main thread is, and each thread that the interpreter waits for."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    threads = {thread.ident: thread for thread in threading.enumerate() if not thread.daemon}
    threads[threading.main_thread().ident] = threading.main_thread()
    return [
        f"{thread.name} is in {_place(frames[ident])}"
        for ident, thread in threads.items()
        if ident is not None and ident in frames
    ]


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
