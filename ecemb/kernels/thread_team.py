"""The work of one kernel call, shared among threads of this process.

A call returns only when all threads are done, also after an interrupt. So the caller may store that all is
written, and no thread writes later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from .._threads import hand_over

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
