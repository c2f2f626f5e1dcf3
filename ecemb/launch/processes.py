"""Kernel services for a process beyond Python's own calls.

Owns prctl and the command line that others see of this process.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_ARGUMENTS_BEGIN, _ARGUMENTS_END = 47, 48  # of /proc/self/stat, counted from 0


def die_with_parent(parent: int) -> bool:
    """Makes the kernel kill this process when its parent ends.

    Args:
        parent: the expected parent process.

    Returns:
        Whether it still is the parent; if not, it has ended before.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def leave_no_core() -> None:
    """From here on, no signal makes the kernel write this process's memory to a file."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def show_command(words: list[str]) -> None:
    """Makes `ps` and /proc show another command line, cut to the space of the original one."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    begin, end = (int(fields[index - 2]) for index in (_ARGUMENTS_BEGIN, _ARGUMENTS_END))
    room = end - begin
    if room > 1:
        shown = b"\0".join(os.fsencode(word) for word in words)[: room - 1]
        ctypes.memmove(begin, shown + bytes(room - len(shown)), room)
