"""Threads: a team for the work of one call, calls handed to another thread, and calls that no signal may end.

`Team` shares the work of one call. A call returns only when all threads are done, also after an interrupt. So
the caller may store that all is written, and no thread writes later.

`hand_over` submits a call whose future the caller has made before: an interrupt at any moment leaves no call
running without a future to wait for. `without_signals` sets the signal mask of a thread. `to_the_end` is for
what other ranks wait for: it is done to its end, whatever a signal's handler raises.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Final

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
"""A thread's own: blocked, they would end the process without the dump of `faulthandler`."""
_FROM_OUTSIDE = signal.valid_signals() - _FAULTS


@contextlib.contextmanager
def without_signals() -> Generator[None, None, None]:
    """Keeps signals from this thread within the block: they are delivered at its end, or to another thread.

    For calls that the kernel ends when a signal is pending, and that begin from the start then: under an
    interval timer that is shorter than such a call, it would never be done. Keep the block short.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:  # before signals are blocked: that call runs handlers as well, which may raise
        signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_OUTSIDE)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def hand_over(executor: Executor, done: Future[None], act: Callable[..., object], *arguments: object) -> None:
    """Lets another thread call `act(*arguments)`, unless `done` is cancelled before the call starts.

    Args:
        executor: runs the call.
        done: a new future, which ends with the call and holds its exception. Keep it before this call.
        act: what to do.
        *arguments: the arguments of `act`.
    """
    executor.submit(_run, done, act, *arguments)


def _run(done: Future[None], act: Callable[..., object], *arguments: object) -> None:
    if done.set_running_or_notify_cancel():
        try:
            act(*arguments)
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
            done.set_exception(error)
        else:
            done.set_result(None)


_MOST = 10  # exceptions of signal handlers; more are no interruptions


def to_the_end(act: Callable[[], object], *ends: type[Exception]) -> None:
    """Calls `act` until it returns, and then raises what a signal handler has raised first, if one has.

    Args:
        act: goes on where it left off.
        ends: the errors with which it can't.

    Raises:
        BaseException: one of `ends`, at once; or what a handler has raised, such as KeyboardInterrupt.
    """
    raised: list[BaseException] = []
    while True:
        try:
            act()
            break
        except ends:
            raise
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            raised.append(error)
            if len(raised) > _MOST:
                raise
    if raised:
        raise raised[0]


LEAST_BYTES: Final = 1 << 18
"""The least work of a thread: waking a thread takes longer than smaller work."""


class Team:
    """Threads that share the work of kernels; the calling thread is one of them.

    Args:
        threads: their number, 1 or more.
        least_bytes: least work of a thread; a smaller call uses fewer threads.
    """

    def __init__(self, threads: int, least_bytes: int = LEAST_BYTES) -> None:
        self.threads: int = threads
        self._least_bytes = least_bytes
        self._pool = ThreadPoolExecutor(threads - 1, "ecemb-kernel") if threads > 1 else None

    def share(self, items: int, item_bytes: int, act: Callable[[int, int], object]) -> None:
        """Cuts 0..items-1 into parts, and calls `act(first, stop)` for all parts at the same time.

        Args:
            items: number of items.
            item_bytes: bytes of each item, which decide the number of parts.
            act: releases the interpreter's lock; parts write to different memory.
        """
        parts = min(self.threads, items, items * item_bytes // self._least_bytes)
        if self._pool is None or parts < 2:
            act(0, items)
            return
        edges = [items * part // parts for part in range(parts + 1)]
        others = [Future[None]() for _ in range(1, parts)]  # listed before they can start
        try:
            for part, other in enumerate(others, 1):
                hand_over(self._pool, other, act, *edges[part : part + 2])
            act(*edges[:2])
            wait(others)
        except BaseException:
            _stop(others)
            raise
        for other in others:
            other.result()


def _stop(others: list[Future[None]]) -> None:
    """Cancels calls that have not started, and waits for the others, whatever signal handlers raise.

    The caller raises the first exception. Those that follow, such as Ctrl-C again or the TimeoutError of a
    deadline, must not leave threads that still write.
    """
    while running := [other for other in others if not (other.cancel() or other.done())]:
        with contextlib.suppress(BaseException):
            wait(running)
