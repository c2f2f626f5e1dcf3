"""Kernel services for a process beyond Python's own calls.

Owns prctl, this process's command line in `ps`, and the times of its start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_STARTED, _ARGUMENTS_BEGIN, _ARGUMENTS_END = 21, 47, 48  # of /proc/self/stat, counted from 0

script_began: float | None = None
"""When a forked worker began to run its script, on time.monotonic(); None in a plain start."""
met_first: float | None = None
"""When this process first came to a rendezvous, on time.monotonic()."""


def die_with_parent(parent: int) -> bool:
    """Makes the kernel kill this process when its parent ends.

    Args:
        parent: the expected parent process.

    Returns:
        Whether `parent` still is this process's parent; if not, it has ended before.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent


def is_launcher(parent: int) -> bool:
    """Whether `parent`, this process's parent, may be torchrun's agent or one of the agent's commands.

    If the agent is killed right after it has started this process, the parent is already the process that
    inherits orphans. That process differs from both: it is not in this process's session, and has not loaded
    torch, as the agent has, which gives each of its commands a session.
    """
    try:
        if os.getsid(0) != os.getpid():
            return os.getsid(parent) == os.getsid(0)
        with open(f"/proc/{parent}/maps", "rb") as file:
            return any(b"/libtorch" in line for line in file)
    except ProcessLookupError:
        return False
    except (
        OSError
    ):  # this process may not examine the parent; if the agent were process 1, this process might
        return parent != 1


def drop_pending(number: int) -> None:
    """Discards a pending, blocked signal, so that it has no effect when it is unblocked."""
    signal.signal(number, signal.signal(number, signal.SIG_IGN))  # the kernel discards an ignored signal


def leave_no_core() -> None:
    """Disables core dumps: from here on, no signal makes the kernel write this process's memory to a file."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def show_command(words: list[str]) -> None:
    """Makes `ps` and /proc show another command line, cut to the space of the original one."""
    begin, end = _stat(_ARGUMENTS_BEGIN), _stat(_ARGUMENTS_END)
    room = end - begin
    if room > 1:
        shown = b"\0".join(os.fsencode(word) for word in words)[: room - 1]
        ctypes.memmove(begin, shown + bytes(room - len(shown)), room)


def made_at() -> float:
    """When this process was forked or started, on time.monotonic(), to a hundredth of a second."""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - _stat(_STARTED) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_s


def _stat(index: int) -> int:
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[index - 2])
