"""What this process holds, for tests that show that something leaves nothing behind.

Things are named, not counted: what earlier tests left may end at any time, and would hide a loss then, or
look like one.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress


def descriptors() -> Counter[str]:
    """What is open: sockets, pipes and files by their own names."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return found


def threads() -> set[threading.Thread]:
    """The threads that Python knows."""
    return set(threading.enumerate())


def tasks() -> set[str]:
    """All threads, by the kernel's numbers."""
    return set(os.listdir("/proc/self/task"))
