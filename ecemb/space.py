"""How much memory can still be had under a folder, and taking it: mount, machine, cgroups.

Invariant: memory is asked for before it is taken, and taken before it is used, so that too little
is an error with numbers, and never a SIGBUS or an OOM kill later. Must not know what it is for.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import ArenaBusy, ConfigurationError, NotEnoughSpace

_MEMORY_FILESYSTEMS = {"tmpfs", "ramfs"}
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG}
_NOT_SUPPORTED = {errno.ENODEV, errno.EOPNOTSUPP, errno.ENOSYS}
_POLL_S = 0.02
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of a page."""


@dataclass(frozen=True)
class Limit:
    """One thing that bounds the space.

    Attributes:
        where: what it is, for a person.
        free_bytes: what it leaves.
        way_out: what to do when that is too little.
    """

    where: str
    free_bytes: int
    way_out: str


def check(needed_bytes: int, fd: int, path: Path) -> None:
    """Return if `needed_bytes` more can be stored in the file system of `fd`, which `path` names.

    Raises:
        NotEnoughSpace: some limit leaves less; names it, the bytes and the way out.
    """
    for limit in limits(fd, path):
        if limit.free_bytes < needed_bytes:
            raise NotEnoughSpace(
                f"{path} needs {needed_bytes} bytes ({needed_bytes / 2**20:.1f} MiB) more, and "
                f"{limit.where} leaves {limit.free_bytes} ({limit.free_bytes / 2**20:.1f} MiB). "
                f"{limit.way_out} What earlier jobs left behind is listed by "
                "`python -m ecemb arenas ls`."
            )


def allocate(fd: int, pieces: Sequence[tuple[int, int]], path: Path, turn: int, deadline: float) -> None:
    """Back pieces of a file by memory, after asking whether there is enough for all of them.

    Args:
        fd: the file, open for writing.
        pieces: (offset, length), both in bytes; what is backed already keeps its content.
        path: the file's, for messages.
        turn: descriptor of a folder that all processes pass which allocate from the same space:
            they take turns, else each would be promised the same bytes.
        deadline: of `time.monotonic`; how long to wait for the turn.

    Raises:
        NotEnoughSpace: for one of them; those before it may be backed.
        ArenaBusy: the turn didn't come.
    """
    needed_bytes = sum(length for _, length in pieces)
    while True:
        try:
            fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise ArenaBusy(
                    f"{path} waited in vain for another process that takes memory in "
                    f"{path.parents[2]}; find it with `fuser {path.parents[2]}`"
                ) from None
        time.sleep(_POLL_S)
    try:
        check(needed_bytes, fd, path)
        with refusals(path, needed_bytes):
            for offset, length in pieces:
                if length > 0:
                    os.posix_fallocate(fd, offset, length)
    finally:
        fcntl.flock(turn, fcntl.LOCK_UN)


@contextmanager
def refusals(path: Path, needed_bytes: int) -> Generator[None, None, None]:
    """Turn what the kernel refuses for want of space, while the block lasts, into one error.

    Raises:
        NotEnoughSpace: with the kernel's own reason.
        ConfigurationError: the file system can't do what an arena needs.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            raise ConfigurationError(
                f"the file system of {path} can't reserve space for a file or map it ({error.strerror}): "
                "pass an arena_dir on one that can, such as /dev/shm"
            ) from error
        if error.errno not in _REFUSALS:
            raise
        raise NotEnoughSpace(
            f"{path} needs {needed_bytes} bytes ({needed_bytes / 2**20:.1f} MiB) more, and the "
            f"kernel says: {error.strerror}. Enlarge the file system or the limit (`ulimit -a`), "
            "or pass another arena_dir."
        ) from error


def limits(fd: int, path: Path, root: Path = Path("/")) -> list[Limit]:
    """All that bounds what can be stored in the file system of `fd`, which `path` names.

    Memory counts only if that file system lives in memory. `root` is where /proc and /sys are found
    (tests put files of their own there).
    """
    found = [mount_limit(fd, path)]
    if _filesystem(fd, root) in _MEMORY_FILESYSTEMS:
        found += [machine_limit(root), *cgroup_limits(root)]
    return [limit for limit in found if limit is not None]


def mount_limit(fd: int, path: Path) -> Limit | None:
    """What the file system itself leaves; None if it is mounted without a size."""
    stats = os.fstatvfs(fd)
    if stats.f_blocks == 0:
        return None
    return Limit(
        f"the file system of {path.parent}",
        stats.f_bavail * stats.f_frsize,
        "Enlarge it (`mount -o remount,size=…`, `docker run --shm-size=…`), or pass another arena_dir.",
    )


def machine_limit(root: Path = Path("/")) -> Limit | None:
    """What the machine's memory and swap leave; None if it doesn't say."""
    text = _read(root / "proc/meminfo")
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines() if ":" in line}
    if "MemAvailable" not in values:
        return None
    free_bytes = values["MemAvailable"] + values.get("SwapFree", 0)
    return Limit(
        "the memory of this machine",
        free_bytes,
        "End what else uses it, or spread over more hosts.",
    )


def cgroup_limits(root: Path = Path("/")) -> list[Limit]:
    """What each cgroup of this process, up to the root's, leaves of its memory limit (v1 and v2).

    Page cache that a group could drop doesn't count as used.
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
    )


def _cgroup_folders(root: Path, kind: str, path: str) -> list[Path]:
    """The folder of the cgroup `path` and of its parents, as far as they are mounted here."""
    for mount in _mounts(root):
        if mount.kind != kind or (kind == "cgroup" and "memory" not in mount.options.split(",")):
            continue
        inside = PurePosixPath(path)
        # In a container the mount may begin at the container's own group, which then is its root.
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
    """The text of a small kernel file; empty where the kernel doesn't have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
