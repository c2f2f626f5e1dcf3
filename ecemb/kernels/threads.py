"""Threads: teams for the work of one call, calls in another thread, and calls that complete despite signals.

Also whether this host has processors for them (`share_of_processors` and `IdleProcessors`), and where
(`numa_nodes`).

`Team` shares the work of one call. A call returns only when all threads are done, also after an interrupt. So
the caller may then store that all is written: no thread writes later.

`hand_over` submits a call for which the caller has made a future before: an interrupt at any moment leaves no
call running without a future to wait for. `without_signals` sets the signal mask of a thread. `to_the_end`
completes a call that other ranks wait for, whatever exceptions signal handlers raise.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from fractions import Fraction
from pathlib import Path
from typing import Final

_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
"""Signals of faults of a thread itself: blocked, they would end the process without `faulthandler`'s dump."""
_FROM_OUTSIDE = signal.valid_signals() - _FAULTS


@contextlib.contextmanager
def without_signals() -> Generator[None, None, None]:
    """Blocks signals in this thread within the block: they are delivered at its end, or to another thread.

    For system calls that a pending signal ends, and that have to start again from the begin: under an
    interval timer shorter than such a call, it would never complete. Keep the block short.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:  # the call that blocks signals runs pending handlers as well, which may raise
        signal.pthread_sigmask(signal.SIG_BLOCK, _FROM_OUTSIDE)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def hand_over(executor: Executor, done: Future[None], act: Callable[..., object], *arguments: object) -> None:
    """Lets another thread call `act(*arguments)`, unless `done` is cancelled before the call starts.

    Args:
        executor: runs the call.
        done: a new future, to which the caller already has a reference; it is done when the call has
            returned, and holds the call's exception.
        act: the function.
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


_MOST = 10  # exceptions that `to_the_end` takes for those of signal handlers


def to_the_end(act: Callable[[], object], *ends: type[Exception]) -> None:
    """Calls `act` until it returns, and then raises the first exception of a signal handler, if any.

    Args:
        act: called again after an exception, when it has to go on where it was interrupted.
        ends: errors after which `act` can't go on.

    Raises:
        BaseException: one of `ends`, at once; or, at the end, the first exception that interrupted `act`,
            such as KeyboardInterrupt; or the last one, after more than 10.
    """
    raised: list[BaseException] = []
    while True:
        try:
            act()
            break
        except ends:
            raise
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            raised.append(error)
            if len(raised) > _MOST:
                raise
    if raised:
        raise raised[0]


LEAST_BYTES: Final = 1 << 18
"""The least bytes of work for a thread: to wake a thread takes longer than smaller work."""


class Team:
    """Threads that share the work of kernels; the calling thread is one of them.

    Args:
        threads: number of threads, 1 or more.
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
            act: releases the interpreter's lock; its calls write to different memory.
        """
        parts = self.parts(items, item_bytes)
        edges = [items * part // parts for part in range(parts + 1)]
        self.each(parts, lambda part: act(*edges[part : part + 2]))

    def parts(self, items: int, item_bytes: int) -> int:
        """The number of threads that share this work, 1 or more.

        Args:
            items: number of items.
            item_bytes: bytes of each.
        """
        return max(1, min(self.threads, items, items * item_bytes // self._least_bytes))

    def each(self, parts: int, act: Callable[[int], object]) -> None:
        """Calls `act(part)` for the parts 0..parts-1, at the same time if there are as many threads.

        Args:
            parts: number of parts, 1 or more.
            act: releases the interpreter's lock; its calls write to different memory.
        """
        if self._pool is None:
            for part in range(parts):
                act(part)
            return
        others = [Future[None]() for _ in range(1, parts)]  # made before the calls can start
        try:
            for part, other in enumerate(others, 1):
                hand_over(self._pool, other, act, part)
            act(0)
            wait(others)
        except BaseException:
            _stop(others)
            raise
        for other in others:
            other.result()


def _stop(others: list[Future[None]]) -> None:
    """Cancels calls that have not started, and waits for the others, whatever signal handlers raise.

    The caller raises the first exception. Later exceptions, such as a second Ctrl-C or the TimeoutError of a
    deadline, must not leave threads that still write.
    """
    while running := [other for other in others if not (other.cancel() or other.done())]:
        with contextlib.suppress(BaseException):
            wait(running)


MOST_THREADS: Final = 8
"""The most threads that `share_of_processors` gives: some processors stay for what loads and copies data.
Parity journals have as many lanes (`ecemb.memory.journal.ParityJournal`)."""


def share_of_processors(own: Collection[int], of_host: Sequence[Collection[int]]) -> int:
    """The number of threads for one of the processes that share the processors of a host, 1 to 8.

    Args:
        own: numbers of the processors that this process may run on.
        of_host: the same for each of the processes on the host, this one among them. A launcher may have
            bound them to NUMA nodes, or each to processors of its own.
    """
    users = Counter(itertools.chain.from_iterable(of_host))
    share = sum(Fraction(1, max(1, users[processor])) for processor in own)
    return max(1, min(MOST_THREADS, int(share)))


def numa_nodes(processors: Collection[int], root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """The NUMA nodes that some processors belong to, ascending; empty where the kernel does not say.

    Args:
        processors: their numbers.
        root: the kernel's folder of nodes (tests have their own).
    """
    found: list[int] = []
    for folder in root.glob("node[0-9]*"):
        try:
            parts = (folder / "cpulist").read_text().strip().split(",")
        except OSError:
            continue
        for first, _, last in (part.partition("-") for part in parts if part):
            if any(int(first) <= processor <= int(last or first) for processor in processors):
                found.append(int(folder.name[len("node") :]))
                break
    return sorted(found)


LOOK_S: Final = 0.003
"""The least time between two looks of `IdleProcessors`, in seconds."""
_LOOKS = 2
_LOAD = Path("/proc/loadavg")
"""The fourth field of this file begins with the number of the host's threads that run or are ready to."""


class IdleProcessors:
    """Looks whether processors of this host are idle. Used by one thread, which itself does not count.

    They are if `_LOOKS` looks in a row, at least `LOOK_S` apart, find less than half of them in use: in a
    single look all ranks may just be waiting for each other's messages.
    """

    def __init__(self) -> None:
        self._of_host = os.cpu_count() or 1
        self._looks, self._next_s = 0, -math.inf

    def are_idle(self) -> bool:
        """Whether processors are idle, as the latest looks found; looks again if the last one is too old."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            self._looks = self._looks + 1 if self._less_than_half_run() else 0
        return self._looks >= _LOOKS

    def forget(self) -> None:
        """Forgets earlier looks."""
        self._looks, self._next_s = 0, -math.inf

    def _less_than_half_run(self) -> bool:
        try:
            fields = _LOAD.read_bytes().split()
        except OSError:
            return False
        running = fields[3].partition(b"/")[0] if len(fields) > 3 else b""
        # This thread is one of the running threads: a system that reports 0 does not count them.
        return running.isdigit() and 0 <= 2 * (int(running) - 1) < self._of_host
