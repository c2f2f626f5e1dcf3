"""Calls that run in another thread.

Owns the submission of such a call: the caller makes its future before the call can start, so an interrupt at
any moment leaves no call running without a future to wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future


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
