"""A request that a job leaves its machines: an empty file beside its arenas, on any of its hosts.

It stands as long as the process that asks holds a lock of it: the kernel ends the request of a process that
is killed. The job answers at its next `Guard.asked_to_leave`. Owns the file's name. Must not know the job's
processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager

from ..errors import ConfigurationError, EcembError
from .private_files import Folder

NAME = "leave"
_PATIENCE_S = 5.0  # a rank that looks at the request holds its lock for a moment
_POLL_S = 0.01


@contextmanager
def asking(place: Folder) -> Generator[None, None, None]:
    """The request stands within the block, and the file is gone after it.

    Raises:
        ArenaError: the file can't be made.
        ConfigurationError: another process asks.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while (fd := _locked(place)) is None:
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"another process asks job {place.job!r} to leave {place.host} already (it holds "
                f"{place.path / NAME}): wait for it, or end it"
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        with contextlib.suppress(EcembError):  # without the lock it is no request
            place.unlink(NAME, os.fstat(fd).st_ino)
        os.close(fd)


def is_asked(place: Folder) -> bool:
    """Whether the request stands on this host.

    Raises:
        ArenaInsecure: the file, or a folder above it, is another user's.
    """
    if (fd := place.open(NAME, os.O_RDONLY)) is None:
        return False
    try:
        return not _locks(fd, fcntl.LOCK_SH)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor too
        os.close(fd)


def withdraw(place: Folder) -> None:
    """Removes the file, and folders that are then empty."""
    if (status := place.status(NAME)) is not None:
        place.unlink(NAME, status.st_ino)


def _locked(place: Folder) -> int | None:
    """The descriptor of the file, made if necessary, with its lock; None if another process has that."""
    try:
        fd = place.make(NAME)
    except FileExistsError:
        fd = place.open(NAME, os.O_RDWR)
    if fd is None:
        return None
    if _locks(fd, fcntl.LOCK_EX) and place.names(NAME, os.fstat(fd).st_ino):
        return fd
    os.close(fd)
    return None


def _locks(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return False
    return True
