"""Who holds a file: POSIX record locks, and whether the process that held it before is gone.

Record locks belong to the process: they end with it whatever killed it, and a forked child doesn't
keep them, where `flock` lives on in every forked child. The price: closing *any* descriptor of the
file in the process drops the lock, so a locked file must not be opened a second time.

Must not know what the files hold.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from .errors import ArenaBusy

POLL_S = 0.01

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock of Linux on 64 bits: l_type, l_whence, l_start, l_len, l_pid."""


def holder(fd: int) -> int | None:
    """The pid that holds a record lock on the file, None if no other process does.

    0 stands for a process that can't be seen from this pid namespace.
    """
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def acquire(fd: int, path: Path, deadline: float) -> None:
    """Lock the whole file of `fd` for this process; wait until `deadline` (of `time.monotonic`).

    Raises:
        ArenaBusy: another process still holds it then; names its pid.
    """
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise busy(path, holder(fd) or 0) from None
        time.sleep(POLL_S)


def release(fd: int) -> None:
    """Give the lock back; `fd` stays open."""
    fcntl.lockf(fd, fcntl.LOCK_UN)


def busy(path: Path, pid: int) -> ArenaBusy:
    """The error for a file that the living process `pid` holds (0: one that can't be seen)."""
    who = f"process {pid}" if pid else "a process of another pid namespace (another container?)"
    way_out = (
        f"Wait for it to end, or end it (`kill {pid}`)."
        if pid
        else "Wait for it to end, or end it."
    )
    return ArenaBusy(f"{path} is held by {who}, which is alive. {way_out}")


def start_of(pid: int) -> int | None:
    """When process `pid` was started, in clock ticks since boot; None if it is gone.

    A zombie without threads is gone: its memory is released, only its exit status waits.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name in brackets may hold anything
    state, threads, start = fields[0], int(fields[17]), int(fields[19])
    return None if state in b"ZX" and threads <= 1 else start


def alive(pid: int, start: int) -> bool:
    """Whether the *other* process `pid` that was started at `start` still runs."""
    return pid > 0 and pid != os.getpid() and start_of(pid) == start
