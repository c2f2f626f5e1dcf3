"""Memory that outlives the worker: one file per rank, mapped as a whole, claimed by a record lock.

    {arena_dir}/ecemb-{uid}/{job}/{host}/{arena id}.arena

Owns the making of these files, the claim on them, and every store to the words of the header.
Invariants: an arena that is attached is locked by this process, and no other process writes to it;
what a region says it has reserved is backed by memory, so that touching it can't fail.

Must not know what the regions hold, nor of other ranks; never imports torch.distributed.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import folder, lock, space
from . import header as headers
from .errors import ArenaDamaged, ArenaError, ConfigurationError, NotEnoughSpace, UsageError
from .folder import Folder
from .header import RESERVED, WORDS, Constants, Found, Header, State
from .mapping import map_shared

_SUFFIX = ".arena"
_GROWTH_BYTES = 1 << 20
_INDEX = {name: index for index, name in enumerate(WORDS)}

_attached: weakref.WeakSet[Arena] = weakref.WeakSet()


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
        self._inode = status.st_ino
        self._fd = fd
        self._pid = os.getpid()
        self._data: NDArray[np.uint8] | None = map_shared(fd, status.st_size)
        words = self._data[headers.WORDS_OFFSET : headers.CONSTANTS_OFFSET]
        self._words: NDArray[np.int64] | None = words.view(np.int64)

    @classmethod
    def create(
        cls,
        directory: Folder,
        constants: Constants,
        reserve: Mapping[str, int],
        *,
        state: State = State.INIT,
    ) -> Arena:
        """Make a new arena and attach to it. Its bytes are 0, its words "none".

        The file is whole before its state is stored: a crash on the way leaves a torn creation,
        which counts as lost. On an error the file is removed.

        Args:
            directory: a `Directory` of the same job.
            constants: what to write; `arena_id` is new (`new_arena_id()`).
            reserve: region -> bytes that must be backed by memory at once.
            state: INIT or REBUILDING.

        Raises:
            ConfigurationError: arguments that don't fit each other.
            NotEnoughSpace: the mount, the machine or a cgroup's limit leaves too little.
            ArenaInsecure: as for `Directory`.
            ArenaBusy: another process took the new file, or is stuck while it reserves memory.
        """
        _check_creation(directory, constants, reserve, state)
        path = directory.path / f"{constants.arena_id}{_SUFFIX}"
        try:
            fd = directory.make(path.name)
        except FileExistsError:
            raise ConfigurationError(f"{path} exists; an arena needs a new_arena_id()") from None
        try:
            lock.acquire(fd, path, deadline=0)  # nobody else knows its name
            arena = cls._fill(path, fd, constants, reserve)
            if not directory.names(path.name, os.fstat(fd).st_ino):
                raise ArenaError(f"{path} was removed by another process while it was made")
            arena._claim()
            arena.set("state", state)
        except BaseException:
            directory.unlink(path.name, os.fstat(fd).st_ino)
            lock.release(fd)
            raise
        return arena

    @classmethod
    def _fill(cls, path: Path, fd: int, constants: Constants, reserve: Mapping[str, int]) -> Arena:
        """Everything of a creation up to the last store."""
        payload = constants.encode()
        spans, total_bytes = headers.spans(constants, len(payload))
        block_bytes = max(os.fstatvfs(fd).f_bsize, headers.PAGE_BYTES)  # huge pages need whole ones
        pieces = [(0, headers.CONSTANTS_OFFSET + headers.page_aligned(len(payload)))]
        for name, size_bytes in reserve.items():
            _check_capacity(path, name, size_bytes, spans[name][1])
            pieces.append((spans[name][0], headers.page_aligned(size_bytes)))
        with space.refusals(path, total_bytes):
            os.ftruncate(fd, -(-total_bytes // block_bytes) * block_bytes)
        _allocate(path, fd, pieces)
        with space.refusals(path, total_bytes):
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
        path = found.path if isinstance(found, Found) else Path(os.path.abspath(found))
        place = folder.locate(path)
        status = place.status(path.name)
        if status is not None and lock.mine(status) is not None:
            raise lock.busy(path, os.getpid())
        fd = place.open(path.name, os.O_RDWR)
        if fd is None:
            raise _gone(path)
        try:
            lock.acquire(fd, path, deadline)
            inode = os.fstat(fd).st_ino
            known = found.inode if isinstance(found, Found) else inode
            if inode != known or not place.names(path.name, inode):
                raise _gone(path)
            pid, start = headers.last_holder(fd)
            lock.await_gone(fd, pid, start, path, deadline)
            constants, length, _ = headers.load(fd, path)
            with space.refusals(path, os.fstat(fd).st_size):
                arena = cls(path, fd, constants, length)
            for name, (_, capacity) in arena._spans.items():
                if not 0 <= arena.reserved(name) <= capacity:
                    raise ArenaDamaged(
                        f"{path}: region {name!r} says it has {arena.reserved(name)} bytes of at "
                        f"most {capacity}"
                    )
            arena._back()
            arena._claim()
        except BaseException:
            lock.release(fd)
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

        Two words can't change at once. In between the id says NONE, which `classify()` takes for
        unknown: else a crash there would look like one generation with two ids.

        Raises:
            UsageError: the arena is closed.
        """
        self.set("generation_id", headers.NONE)
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

    def filled(self, name: str, word: str) -> NDArray[np.uint8]:
        """The bytes of the region that `word` of the header says are in use, a view as of `region`.

        Raises:
            ArenaDamaged: it has not so many.
            UsageError: the arena is closed.
            ConfigurationError: no such region or word.
        """
        used, reserved = self.get(word), self.reserved(name)
        if not 0 <= used <= reserved:
            raise ArenaDamaged(
                f"{self.path} says that {used} bytes of its {name} are in use, and it has {reserved}: its "
                f"memory is damaged. {self.way_out}"
            )
        return self.region(name)[:used]

    @property
    def way_out(self) -> str:
        """What to do when the arena's bytes are damaged, for the end of an error's message."""
        return (
            f"End the job and remove it (python -m ecemb arenas rm {self.path}): then it counts as lost, "
            f"and is rebuilt"
        )

    def reserve(self, name: str, size_bytes: int, *, spare_bytes: int = _GROWTH_BYTES) -> int:
        """Have at least the first `size_bytes` of the region backed by memory.

        Grows by a quarter or `spare_bytes` at least, if that is to be had, so that calling it with
        slowly rising sizes costs little; with `spare_bytes` 0 it takes no more than asked for. What the
        region holds stays.

        Returns:
            What is reserved then, in bytes.

        Raises:
            NotEnoughSpace: more than the region's capacity, or than there is; nothing changed.
            ArenaBusy: another process is stuck while it reserves memory.
            UsageError: the arena is closed.
            ConfigurationError: no such region.
        """
        offset, capacity = self._span(name)
        before = self.reserved(name)
        if size_bytes <= before:
            return before
        _check_capacity(self.path, name, size_bytes, capacity)
        spare = max(before // 4, spare_bytes) if spare_bytes else 0
        generous = min(capacity, max(size_bytes, before + spare))
        backed = headers.page_aligned(before)
        for wanted in (generous, size_bytes):
            after = headers.page_aligned(wanted)
            try:
                _allocate(self.path, self._fd, [(offset + backed, after - backed)])
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
        _attached.discard(self)
        lock.release(self._fd)

    def is_named(self) -> bool:
        """Whether its path still names the file: else it lasts no longer than this process."""
        return folder.locate(self.path).names(self.path.name, self._inode)

    def remove(self) -> bool:
        """Remove the file, if its path still names it, and folders that are empty then.

        The memory is free when the last process that has it mapped has ended or let go of it.
        Can be called before or after `close`.

        Returns:
            Whether it was there.

        Raises:
            ArenaInsecure: its path can't be trusted any more.
        """
        return folder.locate(self.path).unlink(self.path.name, self._inode)

    def _back(self) -> None:
        """Have memory behind all that is reserved: a file that was copied may have holes where zeros were."""
        pieces = [
            (offset, headers.page_aligned(self.reserved(name))) for name, (offset, _) in self._spans.items()
        ]
        if os.fstat(self._fd).st_blocks * 512 >= sum(length for _, length in pieces):
            return
        for offset, length in pieces:
            if length > 0:
                with space.refusals(self.path, length):
                    os.posix_fallocate(self._fd, offset, length)

    def _claim(self) -> None:
        """Write down who holds it."""
        self.set("pid_start", lock.start_of(os.getpid()) or 0)
        self.set("pid", os.getpid())
        _attached.add(self)

    def _forget(self) -> None:
        """In a forked child, which has neither mapping nor lock."""
        self._data = self._words = None

    def _write(self, offset: int, content: bytes) -> None:
        if self._data is None:
            raise self._closed()
        self._data[offset : offset + len(content)] = np.frombuffer(content, np.uint8)

    def _set_reserved(self, name: str, size_bytes: int) -> None:
        capacity = self._span(name)[1]
        self._opened_words()[self._reserved_index(name)] = min(headers.page_aligned(size_bytes), capacity)

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
        if os.getpid() != self._pid:
            return UsageError(
                f"the arena {self.path} is process {self._pid}'s, and this is a forked child of it "
                f"({os.getpid()}), which has neither the memory nor the claim: use the guard, and protected "
                f"tables, in the parent"
            )
        return UsageError(f"the arena {self.path} is closed in this process; attach to it again")


def _check_creation(
    directory: Folder, constants: Constants, reserve: Mapping[str, int], state: State
) -> None:
    if constants.job != directory.job:
        raise ConfigurationError(f"an arena of job {constants.job!r} can't be made in {directory.path}")
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


def _word(name: str) -> int:
    try:
        return _INDEX[name]
    except KeyError:
        raise ConfigurationError(
            f"an arena's header has no word {name!r}; it has {', '.join(WORDS)}"
        ) from None


def _gone(path: Path) -> ArenaError:
    return ArenaError(
        f"{path} is gone, or another file now: somebody removed it after it had been found. Start the job "
        f"again: it counts as lost then"
    )


def _allocate(path: Path, fd: int, pieces: Sequence[tuple[int, int]]) -> None:
    with folder.opened(folder.locate(path).arena_dir, create=True) as turn:
        space.allocate(fd, pieces, path, turn)


def _after_fork_in_child() -> None:
    for arena in list(_attached):
        arena._forget()  # pyright: ignore[reportPrivateUsage]
    _attached.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
