"""One kernel's work shared among threads of this process.

A call returns when all of them are done, whatever interrupts it: nothing is written behind the caller's back
once it may store that all is written.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from ..threads import hand_over

LEAST_BYTES: Final = 1 << 18
"""For a thread of its own: less is done sooner than another thread is woken."""


class Team:
    """Some threads, the caller's among them.

    Args:
        threads: how many; 1 or more.
        least_bytes: for each, or fewer have work.
    """

    def __init__(self, threads: int, least_bytes: int = LEAST_BYTES) -> None:
        self.threads: int = threads
        self._least_bytes = least_bytes
        self._pool = ThreadPoolExecutor(threads - 1, "ecemb-kernel") if threads > 1 else None

    def share(self, items: int, item_bytes: int, act: Callable[[int, int], object]) -> None:
        """Calls `act(first, stop)` on parts of 0..items-1 at the same time, on all of them between them.

        Args:
            items: how many.
            item_bytes: of each, which tell how many parts pay.
            act: drops the interpreter's lock; parts write to different memory.
        """
        parts = min(self.threads, items, items * item_bytes // self._least_bytes)
        if self._pool is None or parts < 2:
            act(0, items)
            return
        edges = [items * part // parts for part in range(parts + 1)]
        others = [Future[None]() for _ in range(1, parts)]  # known before they can begin
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
    """Lets nothing begin any more, and waits for what has; another Ctrl-C has to wait, too."""
    while True:
        try:
            wait([other for other in others if not other.cancel()])
            return
        except KeyboardInterrupt:
            continue
