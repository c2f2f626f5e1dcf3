"""For how long the thread that trains was ready to run, and no processor was free.

Linux counts it for each thread, and shows a process's first thread as the process (/proc/self/schedstat).
Where it does not, training always waits. Must not know: what competes with training, and does less.
"""

from __future__ import annotations

import contextlib
import os

UNKNOWN_NS = 1 << 40
"""Added by each look where the kernel does not count."""


class Delays:
    """The waits of this process's first thread. One thread uses the object."""

    def __init__(self) -> None:
        self._fd: int | None = None
        self._unknown_ns = 0
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def so_far_ns(self) -> int:
        """Its waits for a processor since it began, in ns; that of a wait that still lasts is not in it."""
        if self._fd is not None:
            fields = os.pread(self._fd, 128, 0).split()
            if len(fields) > 1:
                return int(fields[1])
        self._unknown_ns += UNKNOWN_NS
        return self._unknown_ns

    def close(self) -> None:
        """Ends the object."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
