"""Folders that nobody but this user can have made or can change.

    {arena_dir}/ecemb-{uid}/{job}/{host}

Owns how these levels are named, made, opened and removed: each is opened from the one above it,
symbolic links are refused, the owner must be this process's user and the mode 0700. Must not know
what the files in them hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .errors import ArenaInsecure, ConfigurationError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ATTEMPTS = 100
"""How often a level is made again when another process removes the empty folder meanwhile."""


def is_name(name: str) -> bool:
    """Whether `name` can be a job's or a host's: 1 to 64 letters, digits, `.`, `_`, `-`."""
    return _NAME.fullmatch(name) is not None


def check_name(what: str, name: str) -> str:
    """Return `name` if it can be a folder's.

    Raises:
        ConfigurationError: it can't; `what` says what it should name.
    """
    if not is_name(name):
        raise ConfigurationError(
            f"{what} {name!r} can't name a folder: it must be 1 to 64 of A-Z a-z 0-9 . _ - and "
            f"begin with a letter or a digit. Choose another {what}."
        )
    return name


def home(arena_dir: Path) -> Path:
    """The folder of all jobs of this user."""
    return arena_dir / f"ecemb-{os.geteuid()}"


def locate(path: Path) -> tuple[Path, str, str]:
    """(arena_dir, job, host) of the file `path`, which is absolute.

    Raises:
        ConfigurationError: no file of a job of this user can have that path.
    """
    parts = path.parents
    if (
        len(parts) < 4
        or parts[2] != home(parts[3])
        or not (is_name(parts[1].name) and is_name(parts[0].name))
    ):
        raise ConfigurationError(
            f"{path} is not a file of this user's arenas, which are "
            f"{home(Path('{arena_dir}'))}/{{job}}/{{host}}/{{arena id}}.arena"
        )
    return parts[3], parts[1].name, parts[0].name


@contextmanager
def opened(arena_dir: Path, levels: Sequence[str], *, create: bool) -> Generator[int, None, None]:
    """A descriptor of the folder `levels` of this user below `arena_dir`, while the block lasts.

    Args:
        arena_dir: absolute path of an existing folder.
        levels: names below the user's own folder: (), (job,) or (job, host).
        create: make the levels that are missing.

    Raises:
        ConfigurationError: `arena_dir` is no folder.
        ArenaInsecure: a level belongs to another user, is open to others, or is a symbolic link.
        FileNotFoundError: a level is missing, and `create` is not set.
    """
    fd = _open_again(arena_dir, levels) if create else _open(arena_dir, levels, create=False)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_again(arena_dir: Path, levels: Sequence[str]) -> int:
    """Make and open the levels; again if another process removes an empty one meanwhile."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return _open(arena_dir, levels, create=True)
    return _open(arena_dir, levels, create=True)


def _open(arena_dir: Path, levels: Sequence[str], *, create: bool) -> int:
    fd = _open_top(arena_dir)
    path = arena_dir
    for name in (home(arena_dir).name, *levels):
        path = path / name
        try:
            below = _open_level(fd, name, path, create)
        finally:
            os.close(fd)
        fd = below
    return fd


def prune(arena_dir: Path, levels: Sequence[str]) -> None:
    """Remove the folder `levels` and those above it, as far as they are empty."""
    for depth in range(len(levels), 0, -1):
        try:
            with opened(arena_dir, levels[: depth - 1], create=False) as above:
                os.rmdir(levels[depth - 1], dir_fd=above)
        except OSError:
            return


def check_ours(status: os.stat_result, path: Path, mode: int) -> None:
    """Return if the owner is this process's user, and nobody else has any right.

    Raises:
        ArenaInsecure: else; names `path`.
    """
    if status.st_uid != os.geteuid():
        raise ArenaInsecure(
            f"{path} belongs to user {status.st_uid} and not to {os.geteuid()}, this process's. "
            "Have it removed, or pass another arena_dir."
        )
    if status.st_mode & 0o777 & ~mode:
        raise ArenaInsecure(
            f"{path} has mode {status.st_mode & 0o777:04o}, it must be {mode:04o}: others could "
            f"read or change it. If you trust it, `chmod {mode:04o} {path}`; if not, remove it."
        )


def _open_top(arena_dir: Path) -> int:
    try:
        fd = os.open(arena_dir, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigurationError(
            f"arena_dir {arena_dir} is not an existing folder; make it, or pass another"
        ) from error
    status = os.fstat(fd)
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        os.close(fd)
        raise ArenaInsecure(
            f"arena_dir {arena_dir} has mode {status.st_mode & 0o7777:04o}: others could replace "
            f"folders in it. Set its sticky bit (`chmod +t {arena_dir}`), or take from others the "
            "right to write."
        )
    return fd


def _open_level(above: int, name: str, path: Path, create: bool) -> int:
    made = False
    if create:
        try:
            os.mkdir(name, 0o700, dir_fd=above)
            made = True
        except FileExistsError:
            pass
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ArenaInsecure(
                f"{path} is a symbolic link or no folder. Remove it by hand, or pass another "
                "arena_dir."
            ) from error
        if error.errno == errno.EACCES:
            raise ArenaInsecure(
                f"{path} can't be opened by user {os.geteuid()}. Have it removed, or pass another "
                "arena_dir."
            ) from error
        raise
    try:
        if made:
            os.fchmod(fd, 0o700)  # whatever the umask left of it
        check_ours(os.fstat(fd), path, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd
