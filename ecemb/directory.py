"""Finding and removing arenas: what lies in a host's folder, without claiming any of it.

Owns what a scan reports. Invariant: looking changes nothing, and drops no lock that this process
has. Must not know what the regions hold; never imports torch.distributed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import folder, lock
from . import header as headers
from .errors import ArenaBusy, ArenaDamaged, ArenaIncompatible, ArenaInsecure, ConfigurationError
from .folder import Folder
from .header import Found, State

logger: logging.Logger = logging.getLogger("ecemb")

SUFFIX = ".arena"
_POLL_S = 0.02
_PATIENCE_S = 3.0  # processes that were killed are gone by then
_REMOVAL_S = 0.5


class Directory(Folder):
    """The folder of one host's arenas of one job. Missing levels are made, mode 0700.

    Args:
        arena_dir: an existing folder: /dev/shm, or any other whose files may be mapped.
        job: name of the job.
        host: name of the host, which is the failure domain.

    Attributes:
        path: where it is.

    Raises:
        ConfigurationError: a name that can't be a folder's, or no such `arena_dir`.
        ArenaInsecure: a level belongs to another user, is open to others, or is a symbolic link.
    """

    def __init__(self, arena_dir: str | Path, job: str, host: str) -> None:
        super().__init__(Path(os.path.abspath(arena_dir)), job, host)
        with self.opened(create=True):
            pass

    def scan(self, timeout_s: float) -> list[Found]:
        """All arenas of the job on this host, sorted by file name. Locks nothing, changes nothing.

        Waits up to `timeout_s` seconds while another living process holds any of them; what is
        still held then is reported with its `holder`. What this process holds is reported at once. A wait of
        some seconds is said in the log. If the holder closes its job meanwhile, its arena's tombstone is
        reported, though the file is gone: the job that is being started is finished.

        Raises:
            ArenaInsecure: a file belongs to another user, is open to others, or is no plain file.
        """
        began = time.monotonic()
        said = False
        awaited: dict[
            str, int
        ] = {}  # name -> a descriptor, by which a file can be read when its name is gone
        try:
            while True:
                looks = [_look(self, name) for name in _arena_names(self)]
                found = [one for one in looks if one is not None]
                held = [one for one in found if one.holder not in (None, os.getpid())]
                waited_s = time.monotonic() - began
                if not held or waited_s >= timeout_s:
                    return sorted(found + self._closed(awaited, found), key=lambda one: one.path)
                for one in held:
                    if (
                        one.path.name not in awaited
                        and (fd := self.open(one.path.name, os.O_RDONLY)) is not None
                    ):
                        awaited[one.path.name] = fd
                if waited_s >= _PATIENCE_S and not said:
                    said = True
                    logger.warning(
                        "%s is held by process %s; waiting for it to end, for %.0f s at most: does another "
                        "launch of job %r run?",
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
        """Arenas that were awaited, and that their job's close has removed."""
        left = {one.path.name for one in found}
        gone = [_described(fd, self, name, None, 0) for name, fd in awaited.items() if name not in left]
        return [one for one in gone if one.header is not None and one.header.state is State.FINISHED]

    def check_alone(self, generation: int) -> None:
        """Return unless another living process holds an arena that is no member of `generation`.

        At a fresh start nothing is locked yet that a second launch of the job could meet. So it is looked for
        when everybody's own arena is there: then one of the two launches, at least, sees the other's.

        Raises:
            ArenaBusy: another launch of the job begins on this host.
        """
        for found in self.scan(0):
            if found.holder not in (None, os.getpid()) and (
                found.header is None or found.header.joined != generation
            ):
                raise ArenaBusy(
                    f"job {self.job!r} is being launched a second time: {found.path} is held by process "
                    f"{found.holder}, which is none of this launch's. End one of the two, or give it "
                    f"another job="
                )


def arenas(arena_dir: str | Path) -> Iterator[Found]:
    """All arenas of this user below `arena_dir`, of whatever job and host, sorted by path.

    For the command line: what can't be trusted is reported with its `damage`, and hides nothing
    else.

    Raises:
        ConfigurationError: no such `arena_dir`.
    """
    return _walk(Path(os.path.abspath(arena_dir)), ())


def remove(found: Found | str | Path, *, force: bool = False) -> bool:
    """Remove an arena's file, and folders that are empty then. Gone already is fine.

    Args:
        found: the arena; a `Found` goes only if its path still names the same file.
        force: also when a living process holds it (which keeps its mapping until it ends).

    Returns:
        Whether it was there.

    Raises:
        ArenaBusy: a living process holds it, and `force` is not given.
        ArenaInsecure: its path can't be trusted; remove it by hand.
        ConfigurationError: the path can't be an arena's of this user.
    """
    path = found.path if isinstance(found, Found) else Path(os.path.abspath(found))
    place = folder.locate(path)
    if path.suffix != SUFFIX:
        raise ConfigurationError(
            f"{path} is not an arena: its name doesn't end in {SUFFIX}; `python -m ecemb arenas ls` "
            f"lists them"
        )
    status = place.status(path.name)
    if status is None or (isinstance(found, Found) and found.inode != status.st_ino):
        return False
    if force:
        return place.unlink(path.name, status.st_ino)
    if lock.mine(status) is not None:
        raise lock.busy(path, os.getpid())
    fd = place.open(path.name, os.O_RDWR)
    if fd is None:
        return False
    try:
        # Another process that removes it, too, holds it for an instant.
        lock.acquire(fd, path, time.monotonic() + _REMOVAL_S)
        pid, start = headers.last_holder(fd)
        lock.await_gone(fd, pid, start, path, deadline=0)
        return place.unlink(path.name, os.fstat(fd).st_ino)
    finally:
        lock.release(fd)


def _arena_names(place: Folder) -> list[str]:
    with place.opened(create=True) as fd:
        return sorted(name for name in os.listdir(fd) if name.endswith(SUFFIX))


def _look(place: Folder, name: str) -> Found | None:
    """The file `name`, without a claim; None if it is gone."""
    status = place.status(name)
    if status is None:
        return None
    mine = lock.mine(status)
    fd = place.open(name, os.O_RDONLY) if mine is None else mine
    if fd is None:
        return None
    try:
        pid, start = headers.last_holder(fd)
        holder = lock.holder(fd, pid, start) if mine is None else os.getpid()
        return _described(fd, place, name, holder, pid)
    finally:
        if mine is None:
            os.close(fd)


def _described(fd: int, place: Folder, name: str, holder: int | None, pid: int) -> Found:
    path, status = place.path / name, os.fstat(fd)
    header, damage, torn, incompatible = None, None, False, False
    words: Mapping[str, int] = {}
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
    path = folder.home(arena_dir).joinpath(*levels)
    try:
        with folder.opened(arena_dir, levels) as fd:
            names = sorted(os.listdir(fd))
    except FileNotFoundError:
        return
    except ArenaInsecure as error:
        job, host = (*levels, None, None)[:2]
        yield Found(path, 0, None, str(error), None, job=job, host=host)
        return
    if len(levels) < 2:
        for name in filter(folder.is_name, names):
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
