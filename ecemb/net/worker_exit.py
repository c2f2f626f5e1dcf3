"""A worker's end by an exception: its error file, its message to other ranks, its delay, and its exit.

Replaces sys.excepthook in a worker, so that the script needs no decorator. In this order:

1. After an error that another rank caused, the hook waits a moment for that rank's message, from the failure
   detector. Any error counts as caused by a death that the detector knows of: a collective of gloo may return
   without its data when a peer has died.
2. The error file is written before other ranks are informed of the error, so that torchrun shows the first
   error as the root cause, and not a consequence of it.
3. The traceback is printed, once. An attempt that ends like the attempt before, without a step in between,
   logs one line and waits before it ends, longer each time: torchrun restarts after any error, and would
   spend all its restarts within minutes. The traceback of an error that another rank caused shows only where
   this rank waited: one line is logged, and the traceback at DEBUG.
4. The failure is announced to the other ranks.
5. The end is enforced: from here on the process may be stuck (`enforce_end`). One that `ecemb-run` replaces
   ends at once, after its threads and exit handlers.

After an exception the interpreter joins all threads but daemons, and those of executors; then it runs exit
handlers, destructors, and the exit functions of the C library. Each may be stuck: a prefetcher waits for
space in a queue that stays full, a handler for a server that is gone. The process would not end, and
torchrun, which waits for its end, would never restart the job.

The hook is an object of this module, which the fork server imports before it forks workers. So the hook has
no state of a process before the worker calls `prepare`.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import NoReturn

from ..errors import PeerFailure
from . import error_file, replacement
from .error_file import Activity, cause_of, follows, is_lost_connection
from .watch import REPORT_S, FailureDetector, claim_last_line, flush, report_within, say_last_words
from .wording import short

logger: logging.Logger = logging.getLogger("ecemb")


NEWS_S = 2.0  # longest wait for the message of the rank that caused this error
_LONGEST_WAIT_S = 60.0
_LONGEST_LINE = 600  # characters of an error that another rank caused; only reasons of many ranks are longer


class ExceptHook:
    """The `sys.excepthook` of a worker, called with the exception that ends the main thread.

    Attributes:
        watch: the failure detector; None before it exists.
        activity: the process's activity, which shows whether a step has ended since the start.
    """

    def __init__(self) -> None:
        self.watch: FailureDetector | None = None
        self.activity = Activity()
        self._first = self._before = sys.__excepthook__
        self._pid: int | None = (
            None  # pid of the process that has called `prepare`; its forked children have others
        )
        self._called = False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports the exception, as the module says, and enforces the process's end."""
        if self._called:  # torch.distributed's hook, which this hook called, calls it back
            self._first(kind, error, trace)
            return
        self._called = True
        is_workers = os.getpid() == self._pid and not isinstance(error, KeyboardInterrupt)
        try:
            if is_workers and isinstance(error, Exception):
                self._fail(kind, error, trace)
            else:
                self._before(kind, error, trace)
        finally:
            self._called = False
            if is_workers:
                enforce_end()

    def _fail(self, kind: type[BaseException], error: Exception, trace: TracebackType | None) -> None:
        cause = cause_of(error)
        news: str | None = None
        if self.watch is not None and (
            cause is not None or is_lost_connection(error) or self.watch.saw_death
        ):
            news = self.watch.news(NEWS_S)
        if cause is None and news is not None:
            cause = cause_of(follows(error))
        if cause is None or self.watch is None or not self.watch.saw_death:
            replacement.leave()  # otherwise the failure detector has noted that a peer died
        name = "" if cause == "" or isinstance(error, PeerFailure) else kind.__name__
        name = "" if self.activity.steps else cause or name
        again = error_file.repeats(name) if name else 0
        self._leave_file(error, trace, name, again, news)
        try:
            if again and not error_file.is_last_attempt():
                self._delay(name, error, again)
            elif cause is not None:
                self._log_consequence(error, news)
            else:
                self._before(kind, error, trace)
        finally:
            if news is None and self.watch is not None:
                self.watch.announce_failure(short(f"{kind.__name__}: {error}", 100))

    def _delay(self, name: str, error: Exception, again: int) -> None:
        wait_s = min(2.0**again, _LONGEST_WAIT_S)
        level = logging.ERROR if os.environ.get("LOCAL_RANK", "0") == "0" else logging.DEBUG
        logger.log(
            level,
            "start %d in a row that ends by %s, next in %.0f s: %s",
            again + 1,
            name,
            wait_s,
            short(error, 90),
        )
        time.sleep(wait_s)

    def _log_consequence(self, error: Exception, news: str | None) -> None:
        """Logs an error that another rank caused; at DEBUG if the failure detector has logged the cause."""
        text = " ".join(f"{news + '; ' if news else ''}{type(error).__name__}: {error}".split())
        logger.log(
            logging.ERROR if claim_last_line() else logging.DEBUG,
            "rank %s ends: %s (the log has the traceback at level DEBUG)",
            os.environ.get("RANK", "?"),
            short(text, _LONGEST_LINE),
        )
        logger.debug("it ends here:", exc_info=error)

    def _leave_file(
        self, error: Exception, trace: TracebackType | None, name: str, again: int, news: str | None
    ) -> None:
        text = f"{type(error).__name__}: {error}"
        stack = "".join(traceback.format_exception(type(error), error, trace))
        if news:
            text = f"{news}; {text}"
            stack = f"{news}, and so this rank ended:\n{stack}"
        error_file.write(text, stack, later=cause_of(error) is not None, name=name, repeats=again)

    def prepare(self) -> None:
        """Installs this hook in this process. To be called again after another hook has replaced it."""
        if self._pid != os.getpid():
            self._pid, self._called = os.getpid(), False
            if sys.excepthook is not self:
                self._first = sys.excepthook
        if sys.excepthook is not self:
            self._before, sys.excepthook = sys.excepthook, self


hook = ExceptHook()
"""The hook of this process."""


GRACE_S = 10.0
"""Time between the failure and the hard exit of a process that has not ended by itself.

Twice the time that libraries need: torch's DataLoader waits 5 s for each of its workers. Less than the 30 s
after which torchrun kills a worker that it has asked to end.
"""
_EXIT_FAILED = 1  # exit code of an interpreter that an exception ends
_SIGEV_THREAD = 2


class _Grace:
    """Begins the grace of this process: at its failure, or when the last save in progress has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves = 0
        self._has_failed = False

    @contextmanager
    def after(self) -> Generator[None, None, None]:
        """Marks a `with` block that a failed process completes before its grace begins, such as a save.

        The block must end by itself: all of its waits need a deadline.
        """
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
        """Begins the grace when no block of `after` runs any more."""
        with self._lock:
            if not (self._saves or self._has_failed):
                _begin()
            self._has_failed = True


_grace = _Grace()
before_end = _grace.after


def enforce_end() -> None:
    """Ends this failed process with code 1 after `GRACE_S`, unless it has ended before. Returns at once.

    Does not return in a process that is replaced: it ends here, without the destruction of its objects. In
    others the grace begins when the last block of `before_end` has ended. Does nothing if the script's own
    code or an interactive prompt called the hook: then the process goes on.

    A Python thread logs what keeps the process from ending, and ends it. That thread can't run once the
    interpreter destroys its objects, nor while a call keeps the interpreter's lock: then a timer of the C
    library ends the process.
    """
    if _goes_on(sys._getframe(1)):  # pyright: ignore[reportPrivateUsage]
        return
    _grace.fail()
    flush()
    if replacement.is_due():
        _end_by_itself()


def _end_by_itself() -> NoReturn:
    """Ends this process as the interpreter does, but for the destruction of its objects. The main thread.

    All ranks wait for the process that replaces this one, and destruction takes tenths of a second. The
    failure detector ends the process if threads or exit handlers take longer than its grace.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] # joins threads, and ends executors
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    flush()
    os._exit(_EXIT_FAILED)


def _goes_on(caller: FrameType) -> bool:
    """Whether the process goes on: if code of the script or a prompt called the hook, not the interpreter."""
    script = vars(sys.modules["__main__"])
    is_running = any(
        frame.f_code.co_name == "<module>" and frame.f_globals is script
        for frame, _ in traceback.walk_stack(caller)
    )
    return is_running or bool(sys.flags.inspect) or hasattr(sys, "ps1")


def _begin() -> None:
    _exit_after(GRACE_S + REPORT_S)
    with suppress(RuntimeError):  # no thread can be started any more: the timer ends the process
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


def _unfinished() -> list[str]:
    """The places of the main thread and of each thread that the interpreter waits for, for the log."""
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
    """The innermost call outside of Python's standard library; the innermost call if there is none."""
    library = os.path.dirname(os.__file__) + os.sep
    for each, line in traceback.walk_stack(frame):
        name = each.f_code.co_filename
        if not name.startswith((library, "<")) or "-packages" + os.sep in name:
            return f"{each.f_code.co_name} ({name}:{line})"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


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
    """Has the C library call `_exit` after a delay, in its own thread. A forked child lacks the timer."""
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
