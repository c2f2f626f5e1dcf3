"""The space that is left for files in a folder, and its allocation: mount, machine, cgroups.

Invariant: memory is checked before it is allocated, and allocated before it is used, so that too little space
is an error with numbers, and never a later SIGBUS or OOM kill. Memory that a job can do without leaves a
reserve to the host's other processes, such as loaders of data, whose use grows unseen (`reserve_of`).
Processes of a user take turns to be promised memory, by a lock of the folder, and then allocate it at the
same time, slice by slice. A file for each allocation (`Claim`) records the bytes that it was promised and has
not allocated yet, so that no other process is promised the same bytes. Must not know the purpose of the
memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import struct
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import ArenaBusy, ConfigurationError, NotEnoughSpace
from ..kernels.threads import without_signals

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG}
_NOT_SUPPORTED = {errno.ENODEV, errno.EOPNOTSUPP, errno.ENOSYS}
SLICE_BYTES = 256 << 20
"""The most bytes that a process allocates at once, with signals blocked: this takes a fraction of a second,
even on a machine that clears pages slowly."""

RESERVE_SHARE, MOST_RESERVE_BYTES = 1 / 32, 32 << 30
"""The part of a memory, of the machine or of a cgroup, that windows and spare memory leave free, and the most
that it may be."""

_POLL_S = 0.02
_WAIT_S = 120.0  # for a turn, plus the time in which a slow machine allocates the bytes
_SLOWEST_BYTES_S = 16 << 20
_CLAIM = ".claim-"
_CLAIMED = struct.Struct("<q?")  # bytes promised and not allocated; whether a slice of them is being taken
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of a page."""


@dataclass(frozen=True)
class Limit:
    """A limit of the space: of a mount, of the machine's memory, or of a cgroup.

    Attributes:
        where: description of the limit, for messages.
        free_bytes: the space that the limit leaves.
        remedy: the way out when `free_bytes` is too little.
        reserve_bytes: the part of it that stays free where memory could be done without.
    """

    where: str
    free_bytes: int
    remedy: str
    reserve_bytes: int = 0

    @property
    def spare_bytes(self) -> int:
        """The space beside the reserve."""
        return max(0, self.free_bytes - self.reserve_bytes)


def reserve_of(memory_bytes: float) -> int:
    """Bytes of a memory that stay free for the host's other processes.

    Windows of more than one step, and growth beyond what is needed, leave them. What a job can't do without
    may take them: its tables and parity, the journals of one step, and memory that a recovery brings back.

    Args:
        memory_bytes: of the machine, or the limit of a cgroup.
    """
    return int(min(RESERVE_SHARE * memory_bytes, MOST_RESERVE_BYTES))


def check(
    needed_bytes: int, fd: int, path: Path, promised_bytes: int = 0, *, leaves_reserve: bool = False
) -> None:
    """Raises unless `needed_bytes` more can be stored in the file system of `fd`.

    Args:
        needed_bytes: bytes to store.
        fd: a file or folder in that file system.
        path: for messages.
        promised_bytes: free bytes that other processes were promised and have not allocated yet.
        leaves_reserve: whether the reserve of each limit has to stay free.

    Raises:
        NotEnoughSpace: a limit leaves less; the message has the limit, the bytes and the way out.
    """
    for limit in limits(fd, path):
        kept_bytes = limit.reserve_bytes if leaves_reserve else 0
        if limit.free_bytes - promised_bytes - kept_bytes < needed_bytes:
            promised = (
                f", of which other processes are about to take {promised_bytes}" if promised_bytes else ""
            )
            if reserve_bytes := min(limit.reserve_bytes, limit.free_bytes):
                promised += f", of which {reserve_bytes / 2**20:.1f} MiB are a reserve for the host"
            raise NotEnoughSpace(
                f"{path} needs {needed_bytes} bytes ({needed_bytes / 2**20:.1f} MiB) more, and "
                f"{limit.where} leaves {limit.free_bytes} ({limit.free_bytes / 2**20:.1f} MiB){promised}. "
                f"{limit.remedy} What earlier jobs left behind is listed by "
                "`ecemb arenas ls`."
            )


def allocate(
    fd: int, pieces: Sequence[tuple[int, int]], path: Path, turn: int, *, leaves_reserve: bool = False
) -> None:
    """Backs pieces of a file by memory, after checking that there is enough for all of them.

    More than a slice is only promised in this process's turn: other processes allocate at the same time.

    Args:
        fd: the file, open for writing.
        pieces: (offset, length), both in bytes; backed pieces keep their content.
        path: path of the file, for messages.
        turn: descriptor of a folder, the same for all processes that allocate from the same space.
        leaves_reserve: as for `check`.

    Raises:
        NotEnoughSpace: a piece doesn't fit; earlier pieces may be backed.
        ArenaBusy: another process keeps its turn for longer than the allocation of any slice takes.
    """
    left_bytes = whole_bytes = sum(length for _, length in pieces)
    claim, slices = Claim(turn, path), list(_slices(pieces))
    try:
        claim.take_turn(whole_bytes, fd, leaves_reserve=leaves_reserve)
        try:
            if len(slices) > 1:
                claim.store(left_bytes, is_taking=True)
            else:
                _back_slice(fd, slices.pop()[1], path, whole_bytes)
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)
        for number, (taken_bytes, slice_) in enumerate(slices):
            if number:
                check(taken_bytes, fd, path, leaves_reserve=leaves_reserve)
            _back_slice(fd, slice_, path, whole_bytes)
            left_bytes -= taken_bytes
            claim.store(left_bytes, is_taking=True)  # after it: these bytes are free, or taken, or promised
    finally:
        claim.drop()


def _back_slice(fd: int, slice_: Sequence[tuple[int, int]], path: Path, whole_bytes: int) -> None:
    with refusals(path, whole_bytes):
        _back(fd, slice_)


def back(fd: int, pieces: Sequence[tuple[int, int]], path: Path) -> None:
    """Backs pieces of a file by memory, without a check and without a turn.

    For memory that this process has been promised (`Claim`), and for bytes that an earlier allocation of the
    file has counted.

    Args:
        fd: the file, open for writing.
        pieces: (offset, length), both in bytes; backed pieces keep their content.
        path: path of the file, for messages.

    Raises:
        NotEnoughSpace: the kernel refuses a piece; earlier pieces may be backed.
    """
    with refusals(path, sum(length for _, length in pieces)):
        for _, slice_ in _slices(pieces):
            _back(fd, slice_)


def _back(fd: int, slice_: Sequence[tuple[int, int]]) -> None:
    """Backs the pieces of one slice by memory.

    Signals are blocked: Linux kernels until 2024 end `fallocate` when a signal is pending, and free the part
    of the piece that they have backed.
    """
    with without_signals():
        for offset, length in slice_:
            os.posix_fallocate(fd, offset, length)


def promised_elsewhere(turn: int, own: Claim | None = None) -> int:
    """Bytes that other processes were promised and have not allocated yet.

    Args:
        turn: as for `allocate`.
        own: the caller's claim, which is left out; None if it has none.
    """
    return sum(left for left, _ in (own or Claim(turn, Path())).others())


def _slices(pieces: Sequence[tuple[int, int]]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Cuts pieces into slices of at most `SLICE_BYTES`: the bytes and (offset, length) parts of each."""
    slice_: list[tuple[int, int]] = []
    room_bytes = SLICE_BYTES
    for start, size_bytes in pieces:
        offset, end = start, start + size_bytes
        while offset < end:
            if not room_bytes:
                yield SLICE_BYTES, slice_
                slice_, room_bytes = [], SLICE_BYTES
            part = min(end - offset, room_bytes)
            slice_.append((offset, part))
            offset, room_bytes = offset + part, room_bytes - part
    yield SLICE_BYTES - room_bytes, slice_


class Claim:
    """The bytes that an allocation was promised and has not allocated yet.

    Stored in a file in the folder of `turn`, which only allocations of more than a slice make. It counts as
    long as it is locked: the kernel releases the lock of a process that ended, at whatever moment it was
    killed, and the next allocation that looks for claims removes the file.

    Args:
        turn: the folder's descriptor.
        path: path of the arena, for messages.
    """

    def __init__(self, turn: int, path: Path) -> None:
        self._turn, self._path = turn, path
        self._name = f"{_CLAIM}{secrets.token_hex(8)}"
        self._fd: int | None = None
        _claims.add(self)

    def take_turn(self, needed_bytes: int, fd: int, *, leaves_reserve: bool = False) -> None:
        """Waits until bytes can be promised, and for the turn, the lock of the folder.

        `fcntl.flock(turn, LOCK_UN)` ends the turn.

        Args:
            needed_bytes: bytes that this allocation needs.
            fd: a descriptor in the file system.
            leaves_reserve: as for `check`.

        Raises:
            NotEnoughSpace: the bytes don't fit.
            ArenaBusy: the wait was too long.
        """
        began = time.monotonic()
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fits = False
                try:
                    if fits := self.fits(needed_bytes, fd, leaves_reserve=leaves_reserve):
                        return
                finally:
                    if not fits:
                        fcntl.flock(self._turn, fcntl.LOCK_UN)
            others_bytes = promised_elsewhere(self._turn, self)
            if time.monotonic() - began > _WAIT_S + (needed_bytes + others_bytes) / _SLOWEST_BYTES_S:
                raise ArenaBusy(
                    f"{self._path} waited too long for another process that takes memory in "
                    f"{self._path.parents[2]}; find it with `fuser {self._path.parents[2]}`"
                ) from None
            time.sleep(_POLL_S)

    def store(self, promised_bytes: int, *, is_taking: bool = False) -> None:
        """Writes the claim for other processes.

        Args:
            promised_bytes: promised, and not allocated yet.
            is_taking: whether the process allocates a slice of these bytes before it calls `store` again.

        Raises:
            NotEnoughSpace: the file system has no space for the file of the claim.
        """
        data = _CLAIMED.pack(promised_bytes, is_taking)
        with refusals(self._path, len(data)):
            while self._fd is None:
                self._make()
            os.pwrite(self._fd, data, 0)

    def _make(self) -> None:
        """Creates the file and locks it. `_fd` stays None if another process removed it before the lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._name, flags, 0o600, dir_fd=self._turn)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        if not os.fstat(self._fd).st_nlink:
            self.forget()

    def drop(self) -> None:
        """Removes the claim."""
        if self._fd is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name, dir_fd=self._turn)
            self.forget()

    def forget(self) -> None:
        """Closes the file. A forked child has to call it as well, or the lock would last as long as it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def fits(self, needed_bytes: int, fd: int, *, leaves_reserve: bool = False) -> bool:
        """Whether bytes can be promised beside those of all other processes; False: not known now, ask again.

        A slice that another process is taking may count twice, as taken and as promised.

        Args:
            needed_bytes: to be promised to this allocation.
            fd: a descriptor in the file system.
            leaves_reserve: as for `check`.

        Raises:
            NotEnoughSpace: they don't fit, whatever of these slices is taken already.
        """
        others = self.others()
        promised_bytes = sum(left for left, _ in others)
        twice_bytes = sum(min(left, SLICE_BYTES) for left, is_taking in others if is_taking)
        for counted_bytes in sorted({promised_bytes - twice_bytes, promised_bytes}):
            try:
                check(needed_bytes, fd, self._path, counted_bytes, leaves_reserve=leaves_reserve)
            except NotEnoughSpace:
                if twice_bytes and (counted_bytes == promised_bytes or self.others() != others):
                    return False
                raise
        return True

    def others(self) -> list[tuple[int, bool]]:
        """For each other allocation in progress: the bytes promised to it, and whether it takes a slice."""
        found: list[tuple[int, bool]] = []
        for name in os.listdir(self._turn):
            if not name.startswith(_CLAIM) or name == self._name:
                continue
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._turn)
            except FileNotFoundError:  # that allocation has just ended
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                data = os.pread(fd, _CLAIMED.size, 0)
                if len(data) == _CLAIMED.size:
                    left_bytes, is_taking = _CLAIMED.unpack(data)
                    found.append((left_bytes, is_taking))
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._turn)
            finally:
                os.close(fd)
        return found


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for claim in list(_claims):
        claim.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


@contextmanager
def refusals(path: Path, needed_bytes: int) -> Generator[None, None, None]:
    """Turns the kernel's errors for lack of space, within the block, into `NotEnoughSpace`.

    Raises:
        NotEnoughSpace: the kernel refused; the message has its reason.
        ConfigurationError: the file system can't reserve space for a file or map it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            raise ConfigurationError(
                f"the file system of {path} can't reserve space for a file or map it ({error.strerror}): "
                "pass an arena_dir on one that can, such as /dev/shm"
            ) from None
        if error.errno not in _REFUSALS:
            raise
        raise NotEnoughSpace(
            f"{path} needs {needed_bytes} bytes ({needed_bytes / 2**20:.1f} MiB) more, and the "
            f"kernel says: {error.strerror}. Enlarge the file system or the limit (`ulimit -a`), "
            "or pass another arena_dir."
        ) from None


def limits(fd: int, path: Path, root: Path = Path("/")) -> list[Limit]:
    """All limits of the space in the file system of `fd`, which `path` names.

    Limits of memory count only if that file system is in memory. `root` is the folder of /proc and /sys
    (tests put their own files there).
    """
    found = [mount_limit(fd, path)]
    if _filesystem(fd, root) in _MEMORY_FILESYSTEMS:
        found += [machine_limit(root), *cgroup_limits(root)]
    return [limit for limit in found if limit is not None]


def mount_limit(fd: int, path: Path) -> Limit | None:
    """The free space of the file system of `fd`; None if it is mounted without a size."""
    stats = os.fstatvfs(fd)
    if stats.f_blocks == 0:
        return None
    return Limit(
        f"the file system of {path.parent}",
        stats.f_bavail * stats.f_frsize,
        "Enlarge it (`mount -o remount,size=…`, `docker run --shm-size=…`), or pass another arena_dir.",
    )


def machine_limit(root: Path = Path("/")) -> Limit | None:
    """The available memory and swap of the machine; None if the kernel doesn't report them."""
    text = _read(root / "proc/meminfo")
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines() if ":" in line}
    if "MemAvailable" not in values:
        return None
    free_bytes = values["MemAvailable"] + values.get("SwapFree", 0)
    return Limit(
        "the memory of this machine",
        free_bytes,
        "End other processes that use it, or spread over more hosts.",
        reserve_of(values.get("MemTotal", 0)),
    )


def cgroup_limits(root: Path = Path("/")) -> list[Limit]:
    """The rest of the memory limit of each cgroup (v1 and v2) of this process, up to the root.

    Page cache that the kernel can drop doesn't count as used.
    """
    found: list[Limit] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            kind, names = "cgroup2", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            kind, names = "cgroup", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        for folder in _cgroup_folders(root, kind, path):
            limit = _cgroup_limit(folder, *names)
            if limit is not None:
                found.append(limit)
    return found


def _cgroup_limit(folder: Path, limit_name: str, usage_name: str, prefix: str) -> Limit | None:
    limit_text, usage_text = _read(folder / limit_name).strip(), _read(folder / usage_name).strip()
    if not limit_text.isdigit() or not usage_text.isdigit() or int(limit_text) >= _UNLIMITED:
        return None
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    cache = sum(int(stat.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))
    used = max(int(usage_text) - cache, 0)
    return Limit(
        f"the memory limit in {folder / limit_name} ({limit_text} bytes, {used} in use)",
        max(int(limit_text) - used, 0),
        "Raise the limit of the container or job, or spread over more hosts.",
        reserve_of(int(limit_text)),
    )


def _cgroup_folders(root: Path, kind: str, path: str) -> list[Path]:
    """The folders of the cgroup `path` and of its parents that are mounted here."""
    for mount in _mounts(root):
        if mount.kind != kind or (kind == "cgroup" and "memory" not in mount.options.split(",")):
            continue
        inside = PurePosixPath(path)
        # In a container, the root of the mount may be the container's own group.
        relative = inside.relative_to(mount.root) if inside.is_relative_to(mount.root) else PurePosixPath()
        top = root / mount.point.relative_to("/")
        return [top / relative, *((top / parent) for parent in relative.parents)][: len(relative.parts) + 1]
    return []


@dataclass(frozen=True)
class _Mount:
    device: str
    root: PurePosixPath
    point: PurePosixPath
    kind: str
    options: str


def _mounts(root: Path) -> list[_Mount]:
    """The lines of /proc/self/mountinfo, the latest mount first."""
    found: list[_Mount] = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        _, _, device, mount_root, point = left.split()[:5]
        words = right.split()
        found.append(_Mount(device, PurePosixPath(mount_root), PurePosixPath(point), words[0], words[-1]))
    return found[::-1]


def _filesystem(fd: int, root: Path) -> str | None:
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    return next((mount.kind for mount in _mounts(root) if mount.device == name), None)


def _read(path: Path) -> str:
    """The text of a small kernel file; empty if the kernel doesn't have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
