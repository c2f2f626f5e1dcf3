"""Memory that outlives the worker: one file per rank, mapped as a whole, claimed by a record lock.

    {arena_dir}/ecemb-{uid}/{job}/{host}/{arena id}.arena

Owns the files, their mapping, the claim and every store to the words of the header. Invariants:

- an arena that is attached is locked by this process, and no other process writes to it;
- what a region says it has reserved is backed by memory: touching it can't fail;
- no folder or file is trusted that another user could have made or could change.

Must not know what the regions hold, nor of other ranks; never imports torch.distributed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import folder, lock, space
from . import header as headers
from .errors import (
    ArenaBusy,
    ArenaDamaged,
    ArenaError,
    ArenaInsecure,
    ConfigurationError,
    NotEnoughSpace,
    UsageError,
)
from .header import NONE, RESERVED, WORDS, Constants, Header, State
from .mapping import map_shared

_SUFFIX = ".arena"
_POLL_S = 0.02
_REMOVAL_S = 0.5
_GROWTH_BYTES = 1 << 20
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG}
_INDEX = {name: index for index, name in enumerate(WORDS)}

_held: dict[tuple[int, int], Arena] = {}
"""(device, inode) -> what this process has attached: such a file must not be opened again."""


@dataclass(frozen=True)
class Found:
    """An arena's file as `Directory.scan` saw it.

    Attributes:
        path: .../{job}/{host}/{arena id}.arena
        inode: number of its inode: the path may name another file later.
        header: what it says of itself; None if that can't be read.
        damage: why the header can't be read; None if it can.
        holder: pid of the living process that holds it (0: one of another pid namespace), or None.
        torn: its creation was cut short; it holds nothing.
        pid: the process that attached to it last, living or not; 0 if that one has closed it.
        size_bytes: memory that it takes.
    """

    path: Path
    inode: int
    header: Header | None
    damage: str | None
    holder: int | None
    torn: bool = False
    pid: int = 0
    size_bytes: int = 0


class Directory:
    """The folder of one host's arenas of one job. Missing levels are made, mode 0700.

    Args:
        arena_dir: an existing folder: /dev/shm, or any other whose files may be mapped.
        job: name of the job.
        host: name of the host, which is the failure domain.

    Raises:
        ConfigurationError: a name that can't be a folder's, or no such `arena_dir`.
        ArenaInsecure: a level belongs to another user, is open to others, or is a symbolic link.
    """

    def __init__(self, arena_dir: str | Path, job: str, host: str) -> None:
        self.arena_dir = Path(os.path.abspath(arena_dir))
        self.job = folder.check_name("job", job)
        self.host = folder.check_name("host", host)
        self.path = folder.home(self.arena_dir) / job / host
        with self.opened():
            pass

    @contextmanager
    def opened(self) -> Generator[int, None, None]:
        """A descriptor of the folder while the block lasts; made again if it was removed."""
        with folder.opened(self.arena_dir, (self.job, self.host), create=True) as fd:
            yield fd

    def scan(self, timeout_s: float) -> list[Found]:
        """All arenas of the job on this host, sorted by file name. Locks nothing, changes nothing.

        Waits up to `timeout_s` seconds while another living process holds any of them; what is
        still held then is reported with its `holder`. What this process holds is reported at once.

        Raises:
            ArenaInsecure: a file belongs to another user, is open to others, or is no plain file.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self.opened() as fd:
                looks = [_look(fd, self.path / name) for name in _arena_names(fd)]
            found = [one for one in looks if one is not None]
            waiting = any(one.holder not in (None, os.getpid()) for one in found)
            if not waiting or time.monotonic() >= deadline:
                return found
            time.sleep(_POLL_S)


class Arena:
    """One rank's memory, attached: locked, mapped, with its header checked.

    Made by `create` or `attach` only. Stays held until `close`, or until the process ends in
    whatever way. A forked child has neither the mapping nor the lock: there the arena is closed.

    Attributes:
        path: where its file is.
        constants: what never changes in it.
    """

    def __init__(self, path: Path, fd: int, constants: Constants, constants_bytes: int) -> None:
        """Map the locked file `fd`, which becomes this object's once it is registered."""
        self.path = path
        self.constants = constants
        self._spans, _ = headers.spans(constants, constants_bytes)
        status = os.fstat(fd)
        self._key = (status.st_dev, status.st_ino)
        self._fd = fd
        self._data: NDArray[np.uint8] | None = map_shared(fd, status.st_size)
        words = self._data[headers.WORDS_OFFSET : headers.CONSTANTS_OFFSET]
        self._words: NDArray[np.int64] | None = words.view(np.int64)

    @classmethod
    def create(
        cls,
        directory: Directory,
        constants: Constants,
        reserve: Mapping[str, int],
        *,
        state: State = State.INIT,
        timeout_s: float = 60.0,
    ) -> Arena:
        """Make a new arena and attach to it. Its bytes are 0, its words "none".

        The file is whole before its state is stored: a crash on the way leaves a torn creation,
        which counts as lost. On an error the file is removed.

        Args:
            directory: of the same job.
            constants: what to write; `arena_id` is new (`new_arena_id()`).
            reserve: region -> bytes that must be backed by memory at once.
            state: INIT or REBUILDING.
            timeout_s: how long to wait for other ranks that reserve their memory.

        Raises:
            ConfigurationError: arguments that don't fit each other.
            NotEnoughSpace: the mount, the machine or a cgroup's limit leaves too little.
            ArenaInsecure: as for `Directory`.
            ArenaBusy: another process took the new file, or reserves memory for too long.
        """
        _check_creation(directory, constants, reserve, state)
        deadline = time.monotonic() + timeout_s
        path = directory.path / f"{constants.arena_id}{_SUFFIX}"
        fd = _new_file(directory, path)
        try:
            lock.acquire(fd, path, deadline)
            arena = cls._fill(path, fd, constants, reserve, deadline)
            if not _names(path, os.fstat(fd).st_ino):
                raise ArenaError(f"{path} was removed by another process while it was made")
            arena._claim()
            arena.set("state", state)
        except BaseException:
            _discard(path, fd)
            raise
        return arena

    @classmethod
    def _fill(
        cls, path: Path, fd: int, constants: Constants, reserve: Mapping[str, int], deadline: float
    ) -> Arena:
        """Everything of a creation up to the last store."""
        payload = constants.encode()
        spans, total_bytes = headers.spans(constants, len(payload))
        block_bytes = max(os.fstatvfs(fd).f_bsize, headers.PAGE_BYTES)  # huge pages need whole ones
        pieces = [(0, headers.CONSTANTS_OFFSET + headers.page_aligned(len(payload)))]
        for name, size_bytes in reserve.items():
            _check_capacity(path, name, size_bytes, spans[name][1])
            pieces.append((spans[name][0], headers.page_aligned(size_bytes)))
        with _no_space(path, total_bytes):
            os.ftruncate(fd, -(-total_bytes // block_bytes) * block_bytes)
        _allocate(path, fd, pieces, deadline)
        with _no_space(path, total_bytes):
            arena = cls(path, fd, constants, len(payload))
        for name, value in headers.initial_words().items():
            arena.set(name, value)
        for name, size_bytes in reserve.items():
            arena._set_reserved(name, size_bytes)
        arena._write(headers.CONSTANTS_OFFSET, payload)
        arena._write(0, headers.preamble(payload))
        return arena

    @classmethod
    def attach(cls, found: Found | str | Path, *, timeout_s: float = 10.0) -> Arena:
        """Claim an arena that an earlier process left behind.

        Args:
            found: from `Directory.scan`, or the path. A `Found` must still be the same file.
            timeout_s: how long to wait for the process that holds it, or held it last, to end.

        Raises:
            ArenaBusy: a living process holds it after that time, or this process does already.
            ArenaDamaged: its header can't be read, or its file is cut.
            ArenaInsecure: as for `Directory`, or for the file.
            ArenaError: the file is gone, or its path names another one now.
            ConfigurationError: the path can't be an arena's of this user.
        """
        deadline = time.monotonic() + timeout_s
        path, inode = _identity(found)
        fd = _claim_file(path, inode, deadline)
        if fd is None:
            raise ArenaError(
                f"{path} is gone, or another file now: it was removed after it had been found"
            )
        try:
            constants, length, _ = _read_header(path, fd)
            with _no_space(path, os.fstat(fd).st_size):
                arena = cls(path, fd, constants, length)
            for name, (_, capacity) in arena._spans.items():
                if not 0 <= arena.reserved(name) <= capacity:
                    raise ArenaDamaged(
                        f"{path}: region {name!r} says it has {arena.reserved(name)} bytes of at "
                        f"most {capacity}"
                    )
            arena._claim()
        except BaseException:
            os.close(fd)
            raise
        return arena

    def header(self) -> Header:
        """A snapshot of constants and words.

        Raises:
            ArenaDamaged: the word `state` is none of `State`.
            UsageError: the arena is closed.
        """
        return headers.snapshot(self.constants, {name: self.get(name) for name in WORDS})

    def get(self, name: str) -> int:
        """The word `name` (one of `WORDS`); `NONE` if it has no value yet.

        Raises:
            UsageError: the arena is closed.
            ConfigurationError: no such word.
        """
        return int(self._opened_words()[_word(name)])

    def set(self, name: str, value: int) -> None:
        """Store the word `name`: one aligned 8-byte store, that no compiler can move or split.

        Raises:
            UsageError: the arena is closed.
            ConfigurationError: no such word.
            OverflowError: `value` is not an int64.
        """
        self._opened_words()[_word(name)] = value

    def join(self, generation: int, generation_id: int) -> None:
        """Store that this arena is a member of `generation`.

        Two words can't change at once. In between the id says NONE, which `valid()` takes for
        unknown: else a crash there would look like one generation with two ids.

        Raises:
            UsageError: the arena is closed.
        """
        self.set("generation_id", NONE)
        self.set("joined", generation)
        self.set("generation_id", generation_id)

    def region(self, name: str) -> NDArray[np.uint8]:
        """The region's whole capacity as uint8 [capacity], shared memory, page aligned.

        Only the first `reserved(name)` bytes may be touched. The view, and every tensor over it,
        stays mapped after `close`, but must not be written any more.

        Raises:
            UsageError: the arena is closed.
            ConfigurationError: no such region.
        """
        offset, capacity = self._span(name)
        if self._data is None:
            raise self._closed()
        return self._data[offset : offset + capacity]

    def reserved(self, name: str) -> int:
        """How many bytes from the region's start on are backed by memory.

        Raises:
            UsageError: the arena is closed.
            ConfigurationError: no such region.
        """
        self._span(name)
        return int(self._opened_words()[self._reserved_index(name)])

    def reserve(self, name: str, size_bytes: int, *, timeout_s: float = 60.0) -> int:
        """Have at least the first `size_bytes` of the region backed by memory.

        Grows by a quarter or 1 MiB at least, if that is to be had, so that calling it with slowly
        rising sizes costs little. What the region holds stays.

        Returns:
            What is reserved then, in bytes.

        Raises:
            NotEnoughSpace: more than the region's capacity, or than there is; nothing changed.
            ArenaBusy: another process reserves memory for longer than `timeout_s`.
            UsageError: the arena is closed.
            ConfigurationError: no such region.
        """
        offset, capacity = self._span(name)
        before = self.reserved(name)
        if size_bytes <= before:
            return before
        _check_capacity(self.path, name, size_bytes, capacity)
        generous = min(capacity, max(size_bytes, before + max(before // 4, _GROWTH_BYTES)))
        deadline = time.monotonic() + timeout_s
        backed = headers.page_aligned(before)
        for wanted in (generous, size_bytes):
            after = headers.page_aligned(wanted)
            try:
                _allocate(self.path, self._fd, [(offset + backed, after - backed)], deadline)
            except NotEnoughSpace:
                if wanted == size_bytes:
                    raise
                continue
            # Stored after the memory is there: a crash in between only forgets that it is.
            self._set_reserved(name, wanted)
            break
        return self.reserved(name)

    def close(self) -> None:
        """Give the claim back. The file stays; it is unmapped when the last view of it is gone."""
        if self._words is None:
            return
        self.set("pid", 0)
        self._data = self._words = None
        _held.pop(self._key, None)
        lock.release(self._fd)
        os.close(self._fd)

    def remove(self) -> None:
        """Remove the file, if its path still names it, and folders that are empty then.

        The memory is free when the last process that has it mapped has ended or let go of it.
        Can be called before or after `close`.
        """
        _unlink(self.path, self._key[1])

    def _claim(self) -> None:
        """Write down who holds it, and that it must not be opened again."""
        self.set("pid_start", lock.start_of(os.getpid()) or 0)
        self.set("pid", os.getpid())
        _held[self._key] = self

    def _forget(self) -> None:
        """In a forked child: its copy of the descriptor goes, the parent's lock stays."""
        self._data = self._words = None
        os.close(self._fd)

    def _write(self, offset: int, content: bytes) -> None:
        if self._data is None:
            raise self._closed()
        self._data[offset : offset + len(content)] = np.frombuffer(content, np.uint8)

    def _set_reserved(self, name: str, size_bytes: int) -> None:
        capacity = self._span(name)[1]
        self._opened_words()[self._reserved_index(name)] = min(
            headers.page_aligned(size_bytes), capacity
        )

    def _reserved_index(self, name: str) -> int:
        return RESERVED + list(self._spans).index(name)

    def _opened_words(self) -> NDArray[np.int64]:
        if self._words is None:
            raise self._closed()
        return self._words

    def _span(self, name: str) -> tuple[int, int]:
        try:
            return self._spans[name]
        except KeyError:
            raise ConfigurationError(
                f"{self.path} has no region {name!r}; it has {', '.join(self._spans) or 'none'}"
            ) from None

    def _closed(self) -> UsageError:
        return UsageError(f"the arena {self.path} is closed in this process; attach to it again")


def arenas(arena_dir: str | Path) -> Iterator[Found]:
    """All arenas of this user below `arena_dir`, of whatever job and host, sorted by path.

    For the command line: what can't be trusted is reported with its `damage` and hides nothing
    else.

    Raises:
        ConfigurationError: no such `arena_dir`.
    """
    return _walk(Path(os.path.abspath(arena_dir)), ())


def remove(found: Found | str | Path, *, force: bool = False) -> None:
    """Remove an arena's file, and folders that are empty then. Gone already is fine.

    Args:
        found: the arena; a `Found` goes only if its path still names the same file.
        force: also when a living process holds it (which keeps its mapping until it ends).

    Raises:
        ArenaBusy: a living process holds it, and `force` is not given.
        ArenaInsecure: its path can't be trusted; remove it by hand.
        ConfigurationError: the path can't be an arena's of this user.
    """
    path, inode = _identity(found)
    top, job, host = folder.locate(path)
    try:
        with folder.opened(top, (job, host), create=False) as fd:
            status = _status(fd, path)
    except FileNotFoundError:
        return
    if status is None or inode not in (None, status.st_ino):
        return
    if force:
        _unlink(path, status.st_ino)
        return
    # Another process that removes it, too, holds it for an instant.
    fd = _claim_file(path, status.st_ino, time.monotonic() + _REMOVAL_S)
    if fd is None:
        return
    try:
        _unlink(path, status.st_ino)
    finally:
        os.close(fd)


# ---------------------------------------------------------------------------------------------
# Files


def _identity(found: Found | str | Path) -> tuple[Path, int | None]:
    path, inode = (
        (found.path, found.inode)
        if isinstance(found, Found)
        else (Path(os.path.abspath(found)), None)
    )
    if path.suffix != _SUFFIX:
        raise ConfigurationError(f"{path} is not an arena: its name doesn't end in {_SUFFIX}")
    folder.locate(path)
    return path, inode


def _arena_names(fd: int) -> list[str]:
    return sorted(name for name in os.listdir(fd) if name.endswith(_SUFFIX))


def _status(fd: int, path: Path) -> os.stat_result | None:
    """What `path` is, in the folder `fd`; None if it is gone. Only a plain file of ours passes."""
    try:
        status = os.stat(path.name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise ArenaInsecure(f"{path} is a symbolic link or no plain file. Remove it by hand.")
    folder.check_ours(status, path, 0o600)
    return status


def _open(fd: int, path: Path, flags: int) -> int:
    """Open what `_status` has passed; check again that it is that."""
    try:
        opened = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EACCES):
            raise ArenaInsecure(
                f"{path} can't be opened: {error.strerror}. Remove it by hand."
            ) from error
        raise
    try:
        folder.check_ours(os.fstat(opened), path, 0o600)
    except ArenaInsecure:
        os.close(opened)
        raise
    return opened


def _read_header(path: Path, fd: int) -> tuple[Constants, int, dict[str, int]]:
    """Constants, their length in bytes, and words of the file `fd`; errors name `path`."""
    head = os.pread(fd, headers.CONSTANTS_OFFSET, 0)
    try:
        constants, length = headers.parse(
            head, lambda size: os.pread(fd, size, headers.CONSTANTS_OFFSET)
        )
        if (constants.arena_id, constants.job) != (path.stem, path.parents[1].name):
            raise ArenaDamaged(
                f"it is arena {constants.arena_id} of job {constants.job!r}: copied or renamed"
            )
        total_bytes = headers.spans(constants, length)[1]
        if os.fstat(fd).st_size < total_bytes:
            raise ArenaDamaged(
                f"it should have {total_bytes} bytes and has {os.fstat(fd).st_size}: cut off"
            )
        words = headers.words_of(head)
        headers.snapshot(constants, words)
    except ArenaDamaged as error:
        raise ArenaDamaged(f"{path}: {error}") from error
    return constants, length, words


def _look(fd: int, path: Path) -> Found | None:
    """The file `path` in the folder `fd`, without a claim; None if it is gone."""
    status = _status(fd, path)
    if status is None:
        return None
    inode, size_bytes = status.st_ino, status.st_blocks * 512
    mine = _held.get((status.st_dev, inode))
    if mine is not None:
        pid = os.getpid()
        return Found(path, inode, mine.header(), None, pid, pid=pid, size_bytes=size_bytes)
    try:
        opened = _open(fd, path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        holder, pid = _holder(opened)
        head = os.pread(opened, headers.CONSTANTS_OFFSET, 0)
        try:
            constants, _, words = _read_header(path, opened)
        except ArenaDamaged as error:
            return Found(path, inode, None, str(error), holder, headers.torn(head), pid, size_bytes)
        return Found(
            path, inode, headers.snapshot(constants, words), None, holder, False, pid, size_bytes
        )
    finally:
        os.close(opened)


def _holder(fd: int) -> tuple[int | None, int]:
    """(the living process that holds the file, the one that attached to it last)."""
    words = headers.words_of(os.pread(fd, headers.CONSTANTS_OFFSET, 0))
    pid = words.get("pid", 0)
    holder = lock.holder(fd)
    if holder is None and lock.alive(pid, words.get("pid_start", 0)):
        holder = pid  # it lost the lock by an accident, and may still write
    return holder, pid


def _claim_file(path: Path, inode: int | None, deadline: float) -> int | None:
    """Open and lock the file `path`, and wait for the process that held it before to be gone.

    Returns a descriptor; None if the file is gone, or is another than `inode`.
    """
    top, job, host = folder.locate(path)
    try:
        with folder.opened(top, (job, host), create=False) as above:
            status = _status(above, path)
            if status is None or inode not in (None, status.st_ino):
                return None
            if (status.st_dev, status.st_ino) in _held:
                raise ArenaBusy(f"{path} is attached already by this process, {os.getpid()}")
            fd = _open(above, path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        lock.acquire(fd, path, deadline)
        if os.fstat(fd).st_ino != status.st_ino or not _names(path, status.st_ino):
            os.close(fd)
            return None
        while (holder := _holder(fd)[0]) is not None:
            if time.monotonic() >= deadline:
                raise lock.busy(path, holder)
            time.sleep(_POLL_S)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _names(path: Path, inode: int) -> bool:
    """Whether `path` names the file `inode`."""
    top, job, host = folder.locate(path)
    try:
        with folder.opened(top, (job, host), create=False) as fd:
            return os.stat(path.name, dir_fd=fd, follow_symlinks=False).st_ino == inode
    except FileNotFoundError:
        return False


def _unlink(path: Path, inode: int) -> None:
    top, job, host = folder.locate(path)
    try:
        with folder.opened(top, (job, host), create=False) as fd:
            if os.stat(path.name, dir_fd=fd, follow_symlinks=False).st_ino == inode:
                os.unlink(path.name, dir_fd=fd)
    except FileNotFoundError:
        return
    folder.prune(top, (job, host))


def _walk(arena_dir: Path, levels: Sequence[str]) -> Iterator[Found]:
    path = folder.home(arena_dir).joinpath(*levels)
    try:
        with folder.opened(arena_dir, levels, create=False) as fd:
            if len(levels) < 2:
                for name in sorted(filter(folder.is_name, os.listdir(fd))):
                    yield from _walk(arena_dir, (*levels, name))
                return
            for name in _arena_names(fd):
                try:
                    found = _look(fd, path / name)
                except ArenaInsecure as error:
                    found = Found(path / name, 0, None, str(error), None)
                if found is not None:
                    yield found
    except FileNotFoundError:
        return
    except ArenaInsecure as error:
        yield Found(path, 0, None, str(error), None)


# ---------------------------------------------------------------------------------------------
# Creation and space


def _check_creation(
    directory: Directory, constants: Constants, reserve: Mapping[str, int], state: State
) -> None:
    if constants.job != directory.job:
        raise ConfigurationError(
            f"an arena of job {constants.job!r} can't be made in {directory.path}"
        )
    if state not in (State.INIT, State.REBUILDING):
        raise ConfigurationError(f"a new arena is INIT or REBUILDING, not {state!r}")
    unknown = set(reserve) - {name for name, _ in constants.regions}
    if unknown:
        raise ConfigurationError(f"reserve names regions that don't exist: {sorted(unknown)}")


def _check_capacity(path: Path, name: str, size_bytes: int, capacity: int) -> None:
    if size_bytes > capacity:
        raise NotEnoughSpace(
            f"region {name!r} of {path} was laid out for at most {capacity} bytes and needs "
            f"{size_bytes}; that bound is fixed when the job starts afresh"
        )


def _new_file(directory: Directory, path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    while True:
        try:
            with directory.opened() as above:
                fd = os.open(path.name, flags, 0o600, dir_fd=above)
        except FileExistsError:
            raise ConfigurationError(f"{path} exists; a new arena needs a new_arena_id()") from None
        except FileNotFoundError:
            continue  # the empty folder was removed between the two calls
        os.fchmod(fd, 0o600)  # whatever the umask left of it
        return fd


def _discard(path: Path, fd: int) -> None:
    """After a failed creation: remove the file, then let go of it."""
    status = os.fstat(fd)
    _held.pop((status.st_dev, status.st_ino), None)
    _unlink(path, status.st_ino)
    os.close(fd)


def _allocate(path: Path, fd: int, pieces: Sequence[tuple[int, int]], deadline: float) -> None:
    """Back the (offset, bytes) of the file by memory, after asking whether there is enough."""
    needed_bytes = sum(size for _, size in pieces)
    with _turn(path, deadline), _no_space(path, needed_bytes):
        space.check(needed_bytes, path.parent)
        for offset, size_bytes in pieces:
            if size_bytes > 0:
                os.posix_fallocate(fd, offset, size_bytes)


@contextmanager
def _turn(path: Path, deadline: float) -> Generator[None, None, None]:
    """Let one process at a time ask for space and take it.

    Else all ranks of a host would be promised the same bytes.
    """
    arena_dir = folder.locate(path)[0]
    with folder.opened(arena_dir, (), create=False) as top:
        while True:
            try:
                fcntl.flock(top, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ArenaBusy(
                        f"another process of this user reserves memory in {arena_dir} and does "
                        f"not finish; find it with `fuser {folder.home(arena_dir)}`"
                    ) from None
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(top, fcntl.LOCK_UN)


@contextmanager
def _no_space(path: Path, needed_bytes: int) -> Generator[None, None, None]:
    """Name what the kernel refuses for want of space."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise NotEnoughSpace(
            f"{path} needs {needed_bytes} bytes ({needed_bytes / 2**20:.1f} MiB) more, and the "
            f"kernel says: {error.strerror}. Enlarge the file system or the limit (`ulimit -a`), "
            "or pass another arena_dir."
        ) from error


def _word(name: str) -> int:
    try:
        return _INDEX[name]
    except KeyError:
        raise ConfigurationError(
            f"an arena's header has no word {name!r}; it has {', '.join(WORDS)}"
        ) from None


def _after_fork_in_child() -> None:
    for arena in list(_held.values()):
        arena._forget()  # pyright: ignore[reportPrivateUsage]
    _held.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
