"""The holder of a file: POSIX record locks, and whether the process that held it before is gone.

Record locks belong to the process: they end with it, whatever killed it, and a forked child doesn't inherit
them, while `flock` lives on in every forked child. The price: closing *any* descriptor of the file in the
process drops the lock. So this module remembers the files that this process has locked. Such a file must not
be opened a second time, but read by the descriptor from `mine`.

Must not know the content of files.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

from ..errors import ArenaBusy

_POLL_S = 0.01

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock of Linux on 64 bits: l_type, l_whence, l_start, l_len, l_pid."""

_mine: dict[tuple[int, int], int] = {}
"""(device, inode) of each file that this process has locked -> its descriptor."""


def acquire(fd: int, path: Path, deadline: float) -> None:
    """Locks the whole file of `fd` for this process; waits until `deadline` (of `time.monotonic`).

    Raises:
        ArenaBusy: another process still holds it; the message has its pid.
    """
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise busy(path, _locker(fd) or 0) from None
            time.sleep(_POLL_S)
        else:
            _mine[_key(os.fstat(fd))] = fd
            return


def release(fd: int) -> None:
    """Releases the lock of `acquire`, and closes `fd`."""
    _mine.pop(_key(os.fstat(fd)), None)
    os.close(fd)


def mine(status: os.stat_result) -> int | None:
    """The descriptor by which this process has locked the file with `status`, or None."""
    return _mine.get(_key(status))


def holder(fd: int, pid: int, start: int) -> int | None:
    """The pid of the other living process that has locked the file, or that used it last.

    The latter (`pid`, started at `start`) may have lost its lock by accident, and still write.

    Returns:
        None if there is no such process; 0 if the process is invisible in this pid namespace.
    """
    locker = _locker(fd)
    return pid if locker is None and _alive(pid, start) else locker


def await_gone(fd: int, pid: int, start: int, path: Path, deadline: float) -> None:
    """Waits until `deadline` for the end of the process that used the locked file `fd` last.

    Raises:
        ArenaBusy: the process still lives.
    """
    while holder(fd, pid, start) is not None:
        if time.monotonic() >= deadline:
            raise busy(path, pid)
        time.sleep(_POLL_S)


def busy(path: Path, pid: int) -> ArenaBusy:
    """The error for a file that the living process `pid` holds (0: an invisible process)."""
    if pid == os.getpid():
        return ArenaBusy(f"{path} is already attached by this process ({pid}). Close it first.")
    if pid == 0:
        return ArenaBusy(
            f"{path} is held by a living process of another pid namespace (another container?). "
            "Wait for it to end, or end it there."
        )
    return ArenaBusy(f"{path} is held by the living process {pid}. Wait for it, or `kill {pid}`.")


def start_of(pid: int) -> int | None:
    """The start of process `pid`, in clock ticks since boot; None if it is gone.

    A zombie without threads is gone: its memory is released, only its exit status waits.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name in brackets may hold anything
    state, threads, start = fields[0], int(fields[17]), int(fields[19])
    return None if state in b"ZX" and threads <= 1 else start


def _alive(pid: int, start: int) -> bool:
    return pid > 0 and pid != os.getpid() and start_of(pid) == start


def _locker(fd: int) -> int | None:
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request))
    return None if kind == fcntl.F_UNLCK else max(pid, 0)


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _after_fork_in_child() -> None:
    for fd in _mine.values():
        os.close(fd)  # the child's copy; the lock is the parent's and stays
    _mine.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
