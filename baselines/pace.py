"""A bandwidth that is kept to: storage as slow as one's own, on a machine whose disk is a page cache.

Must not know: what is written or read.
"""

from __future__ import annotations

import time


class Pace:
    """Who has moved bytes waits until it was allowed to have.

    Args:
        bytes_per_s: allowed on average since this was made; None: any.

    Raises:
        ValueError: it is not above 0.
    """

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s= is above 0, or None; got {bytes_per_s}")
        self._bytes_per_s = bytes_per_s
        self._began, self._moved_bytes = time.monotonic(), 0

    def wait(self, size_bytes: int) -> None:
        """Called when this many more bytes were written, or read."""
        self._moved_bytes += size_bytes
        if self._bytes_per_s is not None:
            due = self._began + self._moved_bytes / self._bytes_per_s
            time.sleep(max(0.0, due - time.monotonic()))
