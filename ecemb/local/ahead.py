"""Memory for the journals before they need it: in a thread, so that no step waits for it.

A region that grows gets new pages from the kernel, which clears them, and each page's first write is a page
fault. Both take longer than copying rows to it. So a journal asks ahead, and this module backs the bytes and
maps their pages beside the training. Nothing depends on it: what isn't ready when it is needed is made ready
then.

Must not know: what the regions hold.
"""

from __future__ import annotations

import logging
import threading

from ..arena.arena import Arena, populate
from ..errors import EcembError

logger: logging.Logger = logging.getLogger("ecemb")


class Ahead:
    """Grows regions of one arena in a thread that ends when there is nothing left to do.

    Args:
        arena: attached.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._asked: dict[str, int] = {}
        self._ready: dict[str, int] = {}
        self._todo: dict[str, int] = {}
        self._thread: threading.Thread | None = None

    def ready(self, region: str) -> int:
        """Bytes from the region's start that are backed and mapped, as far as was asked here."""
        return self._ready.get(region, 0)

    def ask(self, region: str, size_bytes: int) -> None:
        """Makes the first `size_bytes` of a region ready, soon; at most its capacity. Returns at once.

        Where there is too little space, nothing happens: who needs the bytes gets the error.
        """
        size_bytes = min(size_bytes, len(self._arena.region(region)))
        with self._lock:
            if size_bytes <= self._asked.get(region, 0):
                return
            self._asked[region] = self._todo[region] = size_bytes
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="ecemb-ahead", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # a limit of the system
                    logger.debug("%d bytes of %s are not made ready ahead: %s", size_bytes, region, error)
                    self._todo.clear()
                else:
                    self._thread = thread  # which waits for this lock

    def wait(self) -> None:
        """Waits until all that was asked for is done."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._thread = None
                    return
                region, size_bytes = self._todo.popitem()
            try:
                self._arena.reserve(region, size_bytes, spare_bytes=0)
                populate(self._arena.region(region)[self.ready(region) : size_bytes])
                self._ready[region] = size_bytes
            except (EcembError, OSError) as error:
                logger.debug("%d bytes of %s are not made ready ahead: %s", size_bytes, region, error)
