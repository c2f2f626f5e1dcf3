"""The rate of a rebuild beside training: unlimited while processors are idle, otherwise at least a floor.

`RunDelay` measures for how long training waited for a processor, and `RebuildThrottle` decides by it when the
next chunk is requested. A chunk during which training waited is followed by a rest. The rest ends when the
processors of this host are idle. It also ends when fewer bytes have come
over the last `_MEMORY_S` than the floor allows; bytes that came while processors were idle count. Must not
know: the content of chunks, and what competes with training.
"""

from __future__ import annotations

import contextlib
import os
import time

from ..coding.rows import WORD_BYTES
from ..kernels.threads import LOOK_S, IdleProcessors

FLOOR_BYTES_PER_S = 5e6
"""The least rate of a rebuild, on average, for each processor of this process. A byte takes some 7 ns of
processor time, summed over the ranks that send or receive it (docs/results/rebuild.md), so this rate takes
some 3.5 % of a host."""
_MEMORY_S = 1.0
"""The longest rest, unless the floor needs a longer one for a single chunk. It is long beside a step, in
which processors may be idle and busy by turns, and short beside a rebuild."""
BUSY_NS = 200_000
"""Processors count as busy if training waited at least this long for a processor during one chunk."""
UNKNOWN_NS = 1 << 40
"""The wait that each call of `RunDelay.so_far_ns` adds if the kernel does not measure it."""
_MOST_IN_FLIGHT = 2
"""Most chunks in flight, but no more than processors: while one is added up, the next one arrives. Only one
is in flight after a chunk during which training waited, as chunks that are in flight when processors become
busy delay the next step."""


class RunDelay:
    """Measures how long this process's first thread, which trains, was ready to run and had no processor.

    Linux counts this for each thread; /proc/self/schedstat has the count of the process's first thread.
    Without this file, each measurement reports a long wait. Used by one thread.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._unknown_ns = 0
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def so_far_ns(self) -> int:
        """Time of all waits since the thread began, in ns, without a wait that still lasts."""
        if self._fd is not None:
            fields = os.pread(self._fd, 128, 0).split()
            if len(fields) > 1:
                return int(fields[1])
        self._unknown_ns += UNKNOWN_NS
        return self._unknown_ns

    def close(self) -> None:
        """Closes the file; waits are unknown from here on."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class RebuildThrottle:
    """Decides when the next chunk is due, and how many may be in flight. Used by one thread."""

    def __init__(self) -> None:
        self._processors = len(os.sched_getaffinity(0))
        self._idle = IdleProcessors()
        self._floor_s = 0.0  # moment at which the floor's rate would have allowed all bytes received so far
        self._due_s, self._is_free = 0.0, False

    @property
    def most_in_flight(self) -> int:
        """The most chunks that may be in flight at a time."""
        return min(_MOST_IN_FLIGHT, self._processors) if self._is_free else 1

    def wait_s(self) -> float:
        """The longest time to wait before the next call, in seconds; 0 if the next chunk is due."""
        left_s = self._due_s - time.monotonic()
        if left_s <= 0:
            return 0.0
        if self._idle.are_idle():
            self.hurry()
            return 0.0
        return min(left_s, LOOK_S)

    def hurry(self) -> None:
        """Ends the current rest."""
        self._due_s = 0.0

    def received(self, words: int, delay_ns: int) -> None:
        """Counts a received chunk, and begins a rest if training waited during it.

        Args:
            words: number of words of the chunk.
            delay_ns: the longest time that training waited for a processor during the chunk, on this rank or
                a holder.
        """
        now_s = time.monotonic()
        through_s = words * WORD_BYTES / (FLOOR_BYTES_PER_S * self._processors)
        self._floor_s = min(max(self._floor_s, now_s) + through_s, now_s + max(through_s, _MEMORY_S))
        self._is_free = delay_ns < BUSY_NS
        self._idle.forget()
        if not self._is_free:
            self._due_s = self._floor_s
