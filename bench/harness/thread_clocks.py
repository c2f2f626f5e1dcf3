"""Processor time of single threads of this process, whether Python, torch or gloo has made them.

Linux alone: a thread's clock is named after its number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from unittest import mock

from ecemb.net import network

_PER_THREAD, _SCHEDULED = 4, 2  # bits of a clock's number, from the kernel's posix-timers.h


def threads() -> set[int]:
    """The numbers of all threads of this process."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def with_own_network() -> AbstractContextManager[object]:
    """A guard that is made within has a gloo thread of its own, so that its clock can be read."""
    return mock.patch.object(network, "training_devices", tuple)


class ThreadClocks:
    """Processor time of some threads.

    Args:
        numbers: of the threads, as the kernel has them (`threading.Thread.native_id`).
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._spent = dict.fromkeys(sorted(numbers), 0.0)

    def __len__(self) -> int:
        return len(self._spent)

    def read(self) -> float:
        """Seconds of all of them together; of a thread that has ended, those that were last read."""
        for number in self._spent:
            try:
                self._spent[number] = time.clock_gettime((~number << 3) | _PER_THREAD | _SCHEDULED)
            except OSError:
                continue  # it has ended
        return sum(self._spent.values())
