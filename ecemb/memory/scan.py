"""Finds, reports and removes arenas in the folder of a host, and requests that a job leaves its machines.

Owns the reports of a scan. Invariant: a scan claims and changes nothing, and drops no lock of this process.

Owns the request to leave: an empty file beside the job's arenas, on any of its hosts. The request stands as
long as the requesting process holds a lock of the file: if that process is killed, the kernel releases the
lock and so ends the request. The job answers at its next `Guard.asked_to_leave`.

Must not know the content of regions, nor the job's processes; never imports torch.distributed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shlex
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import ArenaBusy, ArenaDamaged, ArenaIncompatible, ArenaInsecure, ConfigurationError, EcembError
from . import header as headers
from . import private_files
from .header import SUFFIX, Found, State, Word
from .private_files import Folder

logger: logging.Logger = logging.getLogger("ecemb")

_USUAL = Path("/dev/shm")
_POLL_S = 0.02
_PATIENCE_S = 3.0  # killed processes are gone by then
_REMOVAL_S = 0.5


class Directory(Folder):
    """The folder of one host's arenas of one job. Missing levels are created with mode 0700.

    Args:
        arena_dir: an existing folder whose files can be mapped, such as /dev/shm.
        job: name of the job.
        host: name of the host, which is the failure domain.

    Attributes:
        path: path of the folder.

    Raises:
        ConfigurationError: `job` or `host` can't name a folder, or `arena_dir` doesn't exist.
        ArenaInsecure: a level belongs to another user, is open to others, or is a symbolic link.
    """

    def __init__(self, arena_dir: str | Path, job: str, host: str) -> None:
        super().__init__(Path(os.path.abspath(arena_dir)), job, host)
        with self.opened(create=True):
            pass

    @property
    def removal(self) -> str:
        """The command that removes the job's arenas on this machine."""
        elsewhere = "" if self.arena_dir == _USUAL else f" --arena-dir {shlex.quote(str(self.arena_dir))}"
        return f"ecemb arenas rm --job {self.job}{elsewhere}"

    def scan(self, timeout_s: float) -> list[Found]:
        """All arenas of the job on this host, sorted by file name. Locks nothing, changes nothing.

        Waits up to `timeout_s` seconds while another living process holds any of them. An arena that is still
        held is reported with its `holder`. Arenas of this process are reported at once. A wait of some
        seconds is logged. If the holder closes its job during the wait, it removes its arenas: their
        tombstones are reported all the same, as they show that the job is finished.

        Raises:
            ArenaInsecure: a file belongs to another user, is open to others, or is no plain file.
        """
        began = time.monotonic()
        said = False
        awaited: dict[str, int] = {}  # file name -> a descriptor, readable after the file is removed
        try:
            while True:
                looks = [_look(self, name, awaited) for name in _arena_names(self)]
                found = [one for one in looks if one is not None]
                held = [one for one in found if one.holder not in (None, os.getpid())]
                waited_s = time.monotonic() - began
                if not held or waited_s >= timeout_s:
                    return sorted(found + self._closed(awaited, found), key=lambda one: one.path)
                if waited_s >= _PATIENCE_S and not said:
                    said = True
                    logger.warning(
                        "%s is held by process %s; waiting at most %.0f s for its end. Is another "
                        "launch of job %r running?",
                        held[0].path,
                        held[0].holder,
                        timeout_s,
                        self.job,
                    )
                time.sleep(_POLL_S)
        finally:
            for fd in awaited.values():
                os.close(fd)

    def _closed(self, awaited: Mapping[str, int], found: Sequence[Found]) -> list[Found]:
        """The tombstones among awaited arenas whose files were removed during the wait.

        Args:
            awaited: file name -> a descriptor of the arena.
            found: the arenas whose files are still there.
        """
        left = {one.path.name for one in found}
        gone = [_described(fd, self, name, None, 0) for name, fd in awaited.items() if name not in left]
        return [one for one in gone if one.header is not None and one.header.state is State.FINISHED]

    def check_alone(self, generation: int) -> None:
        """Raises if another living process holds an arena that is not a member of `generation`.

        Two concurrent fresh starts of one job find no arena of each other at first. So this check comes after
        all ranks have created their arenas: then at least one of two launches finds the arenas of the other.

        Raises:
            ArenaBusy: another launch of the job begins on this host.
        """
        for found in self.scan(0):
            if found.holder not in (None, os.getpid()) and (
                found.header is None or found.header.joined != generation
            ):
                raise ArenaBusy(
                    f"job {self.job!r} is being launched a second time: {found.path} is held by process "
                    f"{found.holder}, which is not of this launch. End one of the two, or give it "
                    f"another job="
                )


def arenas(arena_dir: str | Path) -> Iterator[Found]:
    """All arenas of this user below `arena_dir`, of any job and host, sorted by path.

    For the command line: an untrusted level is reported by its `damage`, and the walk goes on.

    Raises:
        ConfigurationError: `arena_dir` doesn't exist.
    """
    return _walk(Path(os.path.abspath(arena_dir)), ())


def remove(found: Found | str | Path, *, force: bool = False) -> bool:
    """Removes an arena's file, if it exists, and folders that are then empty.

    Args:
        found: the arena; the file of a `Found` is removed only if its path still names it.
        force: whether to remove an arena that a living process holds; that process keeps its mapping.

    Returns:
        Whether the arena was there.

    Raises:
        ArenaBusy: a living process holds the arena, and `force` is not set.
        ArenaInsecure: its path can't be trusted; remove it by hand.
        ConfigurationError: the path is not that of an arena of this user.
    """
    path = found.path if isinstance(found, Found) else Path(os.path.abspath(found))
    place = private_files.locate(path)
    if path.suffix != SUFFIX:
        raise ConfigurationError(
            f"{path} is not an arena: its name doesn't end in {SUFFIX}; `ecemb arenas ls` lists them"
        )
    status = place.status(path.name)
    if status is None or (isinstance(found, Found) and found.inode != status.st_ino):
        return False
    if force:
        return place.unlink(path.name, status.st_ino)
    if private_files.locked_here(status) is not None:
        raise private_files.busy(path, os.getpid())
    fd = place.open(path.name, os.O_RDWR)
    if fd is None:
        return False
    try:
        # Another process that removes it at the same time holds the lock for an instant.
        private_files.lock(fd, path, time.monotonic() + _REMOVAL_S)
        pid, start = headers.last_holder(fd)
        private_files.await_gone(fd, pid, start, path, deadline=0)
        return place.unlink(path.name, os.fstat(fd).st_ino)
    finally:
        private_files.unlock(fd)


def _arena_names(place: Folder) -> list[str]:
    with place.opened(create=True) as fd:
        return sorted(name for name in os.listdir(fd) if name.endswith(SUFFIX))


def _look(place: Folder, name: str, awaited: dict[str, int] | None = None) -> Found | None:
    """Reports the arena in file `name` without claiming it; None if the file is gone.

    If another process holds the arena, a descriptor is added to `awaited`, as the file may be removed before
    the next scan.
    """
    status = place.status(name)
    if status is None:
        return None
    mine = private_files.locked_here(status)
    fd = place.open(name, os.O_RDONLY) if mine is None else mine
    if fd is None:
        return None
    try:
        pid, start = headers.last_holder(fd)
        holder = private_files.holder_of(fd, pid, start) if mine is None else os.getpid()
        found = _described(fd, place, name, holder, pid)
        if awaited is not None and mine is None and holder is not None and name not in awaited:
            awaited[name] = os.dup(fd)
        return found
    finally:
        if mine is None:
            os.close(fd)


def _described(fd: int, place: Folder, name: str, holder: int | None, pid: int) -> Found:
    path, status = place.path / name, os.fstat(fd)
    header, damage, torn, incompatible = None, None, False, False
    words: Mapping[Word, int] = {}
    try:
        constants, _, words = headers.load(fd, path)
        header = headers.snapshot(constants, words)
    except ArenaDamaged as error:
        damage = str(error)
        torn = headers.torn(os.pread(fd, headers.CONSTANTS_OFFSET, 0))
    except ArenaIncompatible as error:
        damage, incompatible = str(error), True
    return Found(
        path=path,
        inode=status.st_ino,
        header=header,
        damage=damage,
        holder=holder,
        torn=torn,
        incompatible=incompatible,
        pid=pid,
        size_bytes=status.st_blocks * 512,
        job=place.job,
        host=place.host,
        words=words if header else {},
    )


def _walk(arena_dir: Path, levels: Sequence[str]) -> Iterator[Found]:
    path = private_files.home(arena_dir).joinpath(*levels)
    try:
        with private_files.opened(arena_dir, levels) as fd:
            names = sorted(os.listdir(fd))
    except FileNotFoundError:
        return
    except ArenaInsecure as error:
        job, host = (*levels, None, None)[:2]
        yield Found(path, 0, None, str(error), None, job=job, host=host)
        return
    if len(levels) < 2:
        for name in filter(private_files.is_name, names):
            yield from _walk(arena_dir, (*levels, name))
        return
    place = Folder(arena_dir, *levels)
    for name in names:
        if name.endswith(SUFFIX):
            try:
                found = _look(place, name)
            except ArenaInsecure as error:
                found = Found(path / name, 0, None, str(error), None, job=levels[0], host=levels[1])
            if found is not None:
                yield found


LEAVE_REQUEST = "leave"
_LOCK_PATIENCE_S = 5.0  # a rank that looks at the request holds its lock for a moment
_LOCK_POLL_S = 0.01


@contextmanager
def asking_to_leave(place: Folder) -> Generator[None, None, None]:
    """Requests within the block that the job leaves; removes the file of the request after it.

    Raises:
        ArenaError: the file can't be created.
        ConfigurationError: another process has requested it already.
    """
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while (fd := _locked(place)) is None:
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"another process asks job {place.job!r} to leave {place.host} already (it holds "
                f"{place.path / LEAVE_REQUEST}): wait for it, or end it"
            )
        time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        with contextlib.suppress(EcembError):  # a file that stays is no request without the lock
            place.unlink(LEAVE_REQUEST, os.fstat(fd).st_ino)
        os.close(fd)


def is_asked_to_leave(place: Folder) -> bool:
    """Whether a living process requests on this host that the job leaves.

    Raises:
        ArenaInsecure: the file, or a folder above it, belongs to another user.
    """
    if (fd := place.open(LEAVE_REQUEST, os.O_RDONLY)) is None:
        return False
    try:
        return not _locks(fd, fcntl.LOCK_SH)
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # a child that was forked meanwhile has a copy of the descriptor
        os.close(fd)


def withdraw_request(place: Folder) -> None:
    """Removes the file of the request, and folders that are then empty."""
    if (status := place.status(LEAVE_REQUEST)) is not None:
        place.unlink(LEAVE_REQUEST, status.st_ino)


def _locked(place: Folder) -> int | None:
    """Opens the file of the request, created if necessary, and locks it; None if it is locked elsewhere."""
    try:
        fd = place.make(LEAVE_REQUEST)
    except FileExistsError:
        fd = place.open(LEAVE_REQUEST, os.O_RDWR)
    if fd is None:
        return None
    if _locks(fd, fcntl.LOCK_EX) and place.names(LEAVE_REQUEST, os.fstat(fd).st_ino):
        return fd
    os.close(fd)
    return None


def _locks(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
