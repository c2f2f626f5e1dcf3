"""When a rebuild beside training asks for its next chunk: at once while processors are idle, else at a floor.

`RunDelay` measures for how long training waited for a processor, and `RebuildThrottle` decides by it. A
chunk during which training waited is followed by a rest. It ends when the processors of this host have been
idle at some looks one after another. It also ends as soon as less has come than the floor would have let
through, over the time of `_MEMORY_S`: what came while they were idle counts. Must not know: what the chunks
are of, and what competes with training.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ..coding.rows import WORD_BYTES

FLOOR_BYTES_PER_S = 5e6
"""For each processor of this process: so much comes at least, on average. A byte takes some 7 ns of them on
all ranks that it concerns (docs/results/rebuild.md), so this takes some 3.5 % of a host."""
_MEMORY_S = 1.0
"""The longest rest, whatever came before its chunk: long beside a step, in which processors may be idle and
busy by turns, and short beside a rebuild."""
BUSY_NS = 200_000
"""A wait of training for a processor, during one chunk, from which on processors count as busy."""
UNKNOWN_NS = 1 << 40
"""Added by each look at a `RunDelay` where the kernel does not count."""
_LOAD = Path("/proc/loadavg")
"""Its fourth field begins with the number of threads of the host that run or are ready to."""
_LOOK_S = 0.003
_LOOKS = 2
"""Processors are idle when this number of looks in a row, so far apart, find less than half of them in use.
At one look all ranks may just be waiting for each other's messages."""
_MOST_IN_FLIGHT = 2
"""Chunks at a time, but no more than processors: while one is added up, the next one arrives. There is one
until a chunk came that met no wait: those in flight when processors become busy hold up the next step."""


class RunDelay:
    """For how long this process's first thread, which trains, was ready to run and no processor was free.

    Linux counts it for each thread, and shows a process's first thread as the process (/proc/self/schedstat).
    Where it does not, training always waits. One thread uses the object.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._unknown_ns = 0
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def so_far_ns(self) -> int:
        """The waits since the thread began, in ns; that of a wait that still lasts is not in it."""
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


class RebuildThrottle:
    """When the next chunk is due, and how many may be in flight. For one thread."""

    def __init__(self) -> None:
        self._processors = len(os.sched_getaffinity(0))
        self._of_host = os.cpu_count() or 1
        self._floor_s = 0.0  # when the floor would have let through what has come
        self._due_s, self._idle_looks, self._is_free = 0.0, 0, False

    @property
    def most_in_flight(self) -> int:
        """Chunks that may be in flight at a time."""
        return min(_MOST_IN_FLIGHT, self._processors) if self._is_free else 1

    def wait_s(self) -> float:
        """For how long to wait before this is asked again, at most; 0: the next chunk is due."""
        left_s = self._due_s - time.monotonic()
        if left_s <= 0:
            return 0.0
        self._idle_looks = self._idle_looks + 1 if self._is_idle() else 0
        if self._idle_looks >= _LOOKS:
            self.hurry()
            return 0.0
        return min(left_s, _LOOK_S)

    def hurry(self) -> None:
        """Ends the rest."""
        self._due_s = 0.0

    def received(self, words: int, delay_ns: int) -> None:
        """Counts a chunk that was received, and begins a rest if training waited meanwhile.

        Args:
            words: of the chunk.
            delay_ns: for how long training waited for a processor meanwhile, on any rank that it concerns.
        """
        now_s = time.monotonic()
        through_s = words * WORD_BYTES / (FLOOR_BYTES_PER_S * self._processors)
        self._floor_s = min(max(self._floor_s, now_s) + through_s, now_s + max(through_s, _MEMORY_S))
        self._is_free, self._idle_looks = delay_ns < BUSY_NS, 0
        if not self._is_free:
            self._due_s = self._floor_s

    def _is_idle(self) -> bool:
        """Whether less than half of the host's processors are in use now, without this thread."""
        try:
            fields = _LOAD.read_bytes().split()
        except OSError:
            return False
        running = fields[3].partition(b"/")[0] if len(fields) > 3 else b""
        # This thread is one of them: a system that says 0 does not count.
        return running.isdigit() and 0 <= 2 * (int(running) - 1) < self._of_host
