"""Work handed to another thread.

Owns how it is handed over: by a future that the one who will wait has in hand before the work can begin, so
that an interrupt at any moment leaves nothing running that nobody knows of.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future


def hand_over(executor: Executor, done: Future[None], act: Callable[..., object], *arguments: object) -> None:
    """Lets another thread call `act(*arguments)`, unless `done` is cancelled before it begins.

    Args:
        executor: of the threads.
        done: new; ends when the call has ended, with what it raised. Keep it before you call this.
        act: what to do.
        *arguments: for it.
    """
    executor.submit(_run, done, act, *arguments)


def _run(done: Future[None], act: Callable[..., object], *arguments: object) -> None:
    if done.set_running_or_notify_cancel():
        try:
            act(*arguments)
        except BaseException as error:  # noqa: BLE001 - the one who waits raises it
            done.set_exception(error)
        else:
            done.set_result(None)
