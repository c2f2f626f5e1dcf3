"""Calls that run in another thread, and calls that no signal may end.

Owns the submission of the former: the caller makes its future before the call can start, so an interrupt at
any moment leaves no call running without a future to wait for. Owns the signal mask of a thread.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future

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
