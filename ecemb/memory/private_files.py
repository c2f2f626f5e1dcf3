"""Folders and files that only this user, or root, can create or change, and record locks that claim files.

    {arena_dir}/ecemb-{uid}/{job}/{host}/{file}

Owns the names, creation, opening and removal of these levels: each level is opened from the level above,
symbolic links are refused, the owner must be this process's user, and the mode must be 0700 for folders and
0600 for files. `descend` opens any folder in the same way, level by level from the root on.

Owns as well the POSIX record locks that claim files, and the check whether a file's last holder has ended.
Record locks belong to the process: they end with it, whatever killed it, and a forked child doesn't inherit
them, while `flock` lives on in every forked child. The price: closing *any* descriptor of the file in the
process drops the lock. So this module remembers the files that this process has locked. Such a file must not
be opened a second time, but read by the descriptor from `mine`.

Must not know the content of files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import ArenaBusy, ArenaError, ArenaInsecure, ConfigurationError, EcembError, NotEnoughSpace

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NOT_WRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_DESCRIPTOR = {errno.EMFILE, errno.ENFILE}
_SEARCH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_LINKS = 40  # symbolic links that `descend` follows at most, as the kernel
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ATTEMPTS = 100
"""Attempts to create a level while other processes remove the empty folder."""


class Folder:
    """The folder of one host of one job. Holds no descriptor: every method opens the folder.

    Args:
        arena_dir: absolute path of an existing folder, such as /dev/shm.
        job: name of the job.
        host: name of the host, which is the failure domain.

    Attributes:
        path: path of the folder.

    Raises:
        ConfigurationError: `job` or `host` can't name a folder.
    """

    def __init__(self, arena_dir: Path, job: str, host: str) -> None:
        self.arena_dir = arena_dir
        self.job: str = check_name("job", job)
        self.host: str = check_name("host", host)
        self.path: Path = home(arena_dir) / job / host

    @contextmanager
    def opened(self, *, create: bool = False) -> Generator[int, None, None]:
        """Gives a descriptor of the folder within the block.

        Raises: as the function `opened`.
        """
        with opened(self.arena_dir, (self.job, self.host), create=create) as fd:
            yield fd

    def status(self, name: str) -> os.stat_result | None:
        """The status of the file `name`; None if there is no such file.

        Raises:
            ArenaInsecure: it belongs to another user, is open to others, or is no plain file.
        """
        path = self.path / name
        try:
            with self.opened() as fd:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise ArenaInsecure(f"{path} is a symbolic link or not a plain file. Remove it by hand.")
        _check_ours(status, path, 0o600)
        return status

    def open(self, name: str, flags: int) -> int | None:
        """A descriptor of the file `name`; None if there is no such file.

        Raises:
            ArenaInsecure: it belongs to another user, is open to others, or is no plain file.
        """
        if self.status(name) is None:
            return None
        path = self.path / name
        try:
            with self.opened() as above, _refusals(path, "opened", {errno.EROFS}):
                fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EACCES):
                raise
            reason = f"{path} can't be opened: {error.strerror}. Remove it by hand."
            raise ArenaInsecure(reason) from None
        try:
            _check_ours(os.fstat(fd), path, 0o600)
        except ArenaInsecure:
            os.close(fd)
            raise
        return fd

    def make(self, name: str) -> int:
        """Creates the file `name` and missing levels; returns its descriptor, for reading and writing.

        Raises:
            FileExistsError: the file exists.
            ArenaInsecure: a level can't be trusted.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError), self.opened(create=True) as above:
                with _refusals(self.path / name, "created"):
                    fd = os.open(name, flags, 0o600, dir_fd=above)
                os.fchmod(fd, 0o600)  # the umask may have removed bits
                return fd
        raise FileNotFoundError(errno.ENOENT, "removed as often as it was made", str(self.path))

    def names(self, name: str, inode: int) -> bool:
        """Whether `name` names the file with that inode."""
        try:
            with self.opened() as fd:
                return os.stat(name, dir_fd=fd, follow_symlinks=False).st_ino == inode
        except FileNotFoundError:
            return False

    def unlink(self, name: str, inode: int) -> bool:
        """Removes the file `name` if it has that inode, and levels that are then empty.

        Returns:
            Whether the file was there.
        """
        try:
            with self.opened() as fd:
                if os.stat(name, dir_fd=fd, follow_symlinks=False).st_ino != inode:
                    return False
                os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            return False
        self.remove_empty()
        return True

    def remove_empty(self) -> None:
        """Removes the folder of the host and that of the job, if they are empty."""
        levels = (self.job, self.host)
        for depth in (1, 0):
            try:
                with opened(self.arena_dir, levels[:depth]) as above:
                    os.rmdir(levels[depth], dir_fd=above)
            except OSError:
                break  # not empty, or gone


def home(arena_dir: Path) -> Path:
    """The folder of all jobs of this user."""
    return arena_dir / f"ecemb-{os.geteuid()}"


def is_name(name: str) -> bool:
    """Whether `name` can name a job or a host."""
    return _NAME.fullmatch(name) is not None


def check_name(what: str, name: str) -> str:
    """Returns `name` if it can name a job or a host; `what` says which of the two.

    Raises:
        ConfigurationError: it can't name one.
    """
    if not isinstance(name, str) or not is_name(name):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(
            f"{what} {name!r} can't name a folder: it must be 1 to 64 of A-Z a-z 0-9 . _ - and "
            f"begin with a letter or a digit. Choose another {what}."
        )
    return name


def locate(path: Path) -> Folder:
    """The folder of the file `path`, which is absolute.

    Raises:
        ConfigurationError: the path is not that of a file of a job of this user.
    """
    above = path.parents
    if (
        len(above) < 4
        or above[2] != home(above[3])
        or not (is_name(above[1].name) and is_name(above[0].name))
    ):
        raise ConfigurationError(
            f"{path} is not an arena file of this user; the path of an arena is "
            f"{home(Path('{arena_dir}'))}/{{job}}/{{host}}/{{arena id}}.arena, "
            f"as `ecemb arenas ls` lists them"
        )
    return Folder(above[3], above[1].name, above[0].name)


def lost_name(path: Path) -> str:
    """The text for a log line or error when an arena's file was removed while the job runs."""
    return (
        f"{path} was removed while the job runs (by hand, or by systemd's RemoveIPC= when its user logs "
        f"out): this process goes on, but its memory ends with it, and a restart counts it as lost"
    )


@contextmanager
def opened(
    arena_dir: Path, levels: Sequence[str] = (), *, create: bool = False
) -> Generator[int, None, None]:
    """Gives a descriptor of the folder `levels` below `home(arena_dir)` within the block.

    Args:
        arena_dir: absolute path of an existing folder.
        levels: (), (job,) or (job, host).
        create: whether to create missing levels.

    Raises:
        ConfigurationError: `arena_dir` is not a folder.
        ArenaInsecure: a level belongs to another user, is open to others, or is a symbolic link.
        FileNotFoundError: a level is missing, and `create` is not set.
    """
    fd = _open_again(arena_dir, levels) if create else _open(arena_dir, levels, create=False)
    try:
        yield fd
    finally:
        os.close(fd)


def _open_again(arena_dir: Path, levels: Sequence[str]) -> int:
    """Creates and opens the levels; tries again if another process removes an empty level meanwhile."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            return _open(arena_dir, levels, create=True)
    try:
        return _open(arena_dir, levels, create=True)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{home(arena_dir).joinpath(*levels)} can't be created: {error.strerror}. Pass an arena_dir in "
            f"which folders can be created and stay."
        ) from None


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


def _open_top(arena_dir: Path) -> int:
    try:
        with _refusals(arena_dir, "opened", set()):
            fd = os.open(arena_dir, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise ConfigurationError(
            f"arena_dir {arena_dir} is not an existing folder; create it, or pass another"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"arena_dir {arena_dir} can't be opened by user {os.geteuid()}: {error.strerror}; pass another"
        ) from None
    try:
        _check_above(os.fstat(fd), arena_dir, _insecure_top)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _insecure_top(text: str) -> ArenaInsecure:
    return ArenaInsecure(f"arena_dir {text}. Pass another, if you can't change it")


def _open_level(above: int, name: str, path: Path, create: bool) -> int:
    if create:
        with contextlib.suppress(FileExistsError), _refusals(path, "created"):
            os.mkdir(name, 0o700, dir_fd=above)
            _open_up(above, name)
    try:
        with _refusals(path, "opened", set()):
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise ArenaInsecure(
                f"{path} is a symbolic link or not a folder. Remove it by hand, or pass another arena_dir."
            ) from None
        if error.errno == errno.EACCES:
            raise ArenaInsecure(
                f"{path} can't be opened by user {os.geteuid()}. Have it removed, or pass another arena_dir."
            ) from None
        raise
    try:
        _check_ours(os.fstat(fd), path, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


_ALL_USERS = ["0", "0", "4294967295"]
"""The uid_map of a process in the initial user namespace."""


def descend(path: Path, refused: Callable[[str], EcembError], *, create: bool = False) -> int:
    """Opens a folder, and all levels above it, each from the level above.

    Each level is checked by its descriptor, as sshd checks the levels above a key: it must belong to root or
    to this user, and no other user may write to it, unless its sticky bit keeps other users from replacing
    its entries. Groups of this process may write to a level, as in a project's folder, or under umask 002 in
    one of the user's own group. A member of such a group could replace the folder that is opened by another
    folder of this user; a folder of its own is refused, if the caller checks the owner. All other users can't
    do even this. Symbolic links are followed here, not by the kernel: a link must belong to root or to this
    user, and the folder that it lies in is checked as well.

    Args:
        path: absolute.
        refused: makes the error for a level that other users can change, from a text about it.
        create: whether to make missing levels; no other user can write to these.

    Returns:
        A descriptor of the folder, with O_PATH: for opening and creating entries, not for listing or syncing.

    Raises:
        OSError: a level is missing, or is no folder, or can't be opened.
    """
    fd, at = os.open("/", _SEARCH), Path("/")
    left, links = list(path.parts[:0:-1]), 0
    groups = {os.getegid(), *os.getgroups()}
    try:
        _check_above(os.fstat(fd), at, refused, groups)
        while left:
            name = left.pop()
            if create:
                make_level(fd, name)
            target = _link(fd, name, at / name, refused)
            if target is None:
                below, at = os.open(name, _SEARCH, dir_fd=fd), Path(os.path.normpath(at / name))
            else:
                links += 1
                if links > _LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                left += reversed(target.relative_to(target.anchor).parts)
                below = os.open(target.anchor or ".", _SEARCH, dir_fd=fd)
                at = Path(target.anchor) if target.anchor else at
            os.close(fd)
            fd = below
            _check_above(os.fstat(fd), at, refused, groups)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_level(above: int, name: str) -> None:
    """Creates a folder if it is missing, with a mode that lets no other user write, and syncs `above`.

    Args:
        above: descriptor of the folder above.
        name: of the folder.
    """
    try:
        os.stat(name, dir_fd=above, follow_symlinks=False)
        return
    except FileNotFoundError:
        pass
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o777 & ~_OTHERS_WRITE, dir_fd=above)
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=above)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _link(above: int, name: str, path: Path, refused: Callable[[str], EcembError]) -> Path | None:
    """The target of a symbolic link that belongs to root or to this user; None if it is not a link.

    Raises `refused` if the link belongs to another user.
    """
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=above)
    try:
        status = os.fstat(fd)
        if not stat.S_ISLNK(status.st_mode):
            return None
        if status.st_uid not in (0, os.geteuid()):
            raise refused(f"{path} is a symbolic link of user {status.st_uid}, who can let it show elsewhere")
        return Path(os.readlink("", dir_fd=fd))
    finally:
        os.close(fd)


def _check_above(
    status: os.stat_result,
    path: Path,
    refused: Callable[[str], EcembError],
    groups: Collection[int] = (),
) -> None:
    """Raises `refused` if a user other than root and this one, outside of `groups`, could replace entries.

    Args:
        status: of the folder.
        path: of the folder, for the message.
        refused: makes the error.
        groups: ids of groups whose members may write.
    """
    if status.st_uid not in (0, os.geteuid()) and _is_known(status.st_uid):
        raise refused(
            f"{path} belongs to user {status.st_uid}, who can replace what is in it, whatever its sticky "
            f"bit: its owner must be root or this process's user, {os.geteuid()}"
        )
    others = stat.S_IWOTH if status.st_gid in groups else _OTHERS_WRITE
    if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        raise refused(
            f"{path} has mode {status.st_mode & 0o7777:04o}, so that others can replace what is in it (take "
            f"their right to write with `chmod go-w {path}`, or set its sticky bit with `chmod +t`)"
        )


def _is_known(uid: int) -> bool:
    """Whether `uid` identifies a file's owner in this user namespace.

    The overflow id doesn't: the kernel shows it for every owner without a number in this namespace, such as
    the host's root in a rootless container. In the initial namespace it is an ordinary user.
    """
    try:
        users = Path("/proc/self/uid_map").read_text().split()
        overflow = int(Path("/proc/sys/kernel/overflowuid").read_text())
    except FileNotFoundError:  # a kernel without such namespaces
        return True
    return uid != overflow or users == _ALL_USERS


@contextmanager
def _refusals(
    path: Path, what: str, not_writable: Collection[int] = _NOT_WRITABLE
) -> Generator[None, None, None]:
    """Turns the kernel's errors for lack of rights, space or descriptors into errors of ecemb."""
    try:
        yield
    except OSError as error:
        if error.errno in not_writable:
            raise ConfigurationError(
                f"{path} can't be {what} by user {os.geteuid()}: {error.strerror}. Pass an arena_dir that "
                "this user may write to."
            ) from None
        if error.errno in _FULL:
            raise NotEnoughSpace(
                f"{path} can't be {what}: {error.strerror}. Its file system has no block or no inode left "
                "(`df -h`, `df -i`): make room, or pass another arena_dir."
            ) from None
        if error.errno in _NO_DESCRIPTOR:
            raise ArenaError(
                f"{path} can't be {what}: {error.strerror}. Raise the limit (`ulimit -n`), or find the "
                f"process that keeps these files open."
            ) from None
        raise


def _open_up(above: int, name: str) -> None:
    """Sets the mode of a new folder: the umask may have left too few rights to open it."""
    fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
    try:
        if os.fstat(fd).st_uid == os.geteuid():  # else another folder took its place; _check_ours refuses it
            os.chmod(f"/proc/self/fd/{fd}", 0o700)
    finally:
        os.close(fd)


def _check_ours(status: os.stat_result, path: Path, mode: int) -> None:
    if status.st_uid != os.geteuid():
        raise ArenaInsecure(
            f"{path} belongs to user {status.st_uid}, not to this process's user {os.geteuid()}. "
            "Have it removed, or pass another arena_dir."
        )
    if status.st_mode & 0o777 & ~mode:
        raise ArenaInsecure(
            f"{path} has mode {status.st_mode & 0o777:04o}, and must have {mode:04o}: others could "
            f"read or change it. If you trust it, `chmod {mode:04o} {path}`; if not, remove it."
        )


_POLL_S = 0.01

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock of Linux on 64 bits: l_type, l_whence, l_start, l_len, l_pid."""

_mine: dict[tuple[int, int], int] = {}
"""(device, inode) of each file that this process has locked -> its descriptor."""


def lock(fd: int, path: Path, deadline: float) -> None:
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


def unlock(fd: int) -> None:
    """Closes `fd`, which releases the lock of `lock`."""
    _mine.pop(_key(os.fstat(fd)), None)
    os.close(fd)


def locked_here(status: os.stat_result) -> int | None:
    """The descriptor by which this process has locked the file with `status`, or None."""
    return _mine.get(_key(status))


def holder_of(fd: int, pid: int, start: int) -> int | None:
    """The pid of the other living process that has locked the file, or that attached to it last.

    The last process may have lost its lock by accident, and still write.

    Args:
        fd: of the file.
        pid: pid of the process that attached to the file last.
        start: start of that process, as `start_of_process`.

    Returns:
        None if there is no such process; 0 if the process is invisible in this pid namespace.
    """
    locker = _locker(fd)
    return pid if locker is None and _alive(pid, start) else locker


def await_gone(fd: int, pid: int, start: int, path: Path, deadline: float) -> None:
    """Waits until `deadline` for the end of the process that attached to the locked file `fd` last.

    Raises:
        ArenaBusy: the process still lives.
    """
    while holder_of(fd, pid, start) is not None:
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


def start_of_process(pid: int) -> int | None:
    """The start of process `pid`, in clock ticks since boot; None if it is gone.

    A zombie without threads counts as gone: its memory is released, and only its exit status is left.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()  # the name in brackets may hold anything
    state, threads, start = fields[0], int(fields[17]), int(fields[19])
    return None if state in b"ZX" and threads <= 1 else start


def _alive(pid: int, start: int) -> bool:
    return pid > 0 and pid != os.getpid() and start_of_process(pid) == start


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
