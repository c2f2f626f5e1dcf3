"""Memory that outlives the worker: one file per rank, fully mapped, claimed by a record lock.

    {arena_dir}/ecemb-{uid}/{job}/{host}/{arena id}.arena

Owns the creation of these files, the claim on them, every store to the words of the header, and the memory of
regions. A region grows from its front (`Arena.reserve`), or is backed page by page in any order, right before
each page is written (`Backing`). These are pages of this machine, numbered from the begin of the file: if
they are larger than the format's pages, a region may begin within one.

Invariants: an arena that is attached is locked by this process, and no other process writes to it; bytes are
backed by memory before they are touched, so touching them can't fail.

The standard library's `mmap` duplicates the descriptor and closes the copy with the mapping, when the last
view is gone. Closing any descriptor of a file drops the record lock that claims it. So files are mapped here.

Must not know the content of regions, or other ranks; never imports torch.distributed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArenaDamaged, ArenaError, ConfigurationError, NotEnoughSpace, UsageError
from . import capacity, private_files
from . import header as headers
from .header import RESERVED, SUFFIX, WORDS, Constants, Found, Header, State, Word
from .private_files import Folder

_GROWTH_BYTES = 1 << 20
_INDEX = {word: index for index, word in enumerate(WORDS)}

_attached: weakref.WeakSet[Arena] = weakref.WeakSet()


class Arena:
    """One rank's memory, attached: locked, mapped, with its header checked.

    Made only by `create` or `attach`. The process holds it until `close`, or until the process ends in any
    way. A forked child has neither the mapping nor the lock: there the arena is closed. Methods that read or
    write a closed arena raise UsageError.

    Attributes:
        path: path of the arena's file.
        constants: the part of the header that never changes.
    """

    def __init__(self, path: Path, fd: int, constants: Constants, constants_bytes: int) -> None:
        """Maps the locked file `fd`. This object owns `fd` from then on."""
        self.path = path
        self.constants = constants
        self._spans, _ = headers.spans(constants, constants_bytes)
        self._reserved_index = {name: RESERVED + number for number, name in enumerate(self._spans)}
        status = os.fstat(fd)
        self._inode = status.st_ino
        self._fd = fd
        self._pid = os.getpid()
        self._growing = threading.RLock()  # one thread may grow a region while another uses it
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
        """Makes a new arena and attaches to it. Its bytes are 0, its words as of `header.initial_words`.

        The word `state` is stored last, when the file is complete: a crash before leaves a torn creation,
        which counts as lost. On an error the file is removed.

        Args:
            directory: a `Directory` of the constants' job.
            constants: the constant part of the header, with a new `arena_id` (`new_arena_id()`).
            reserve: region of the constants -> bytes to back by memory at once.
            state: INIT or REBUILDING.

        Raises:
            ConfigurationError: there is an arena of this id.
            NotEnoughSpace: the mount, the machine or the limit of a cgroup leaves too little.
            ArenaInsecure: as for `Directory`.
            ArenaBusy: another process took the new file, or is stuck while it reserves memory.
        """
        path = directory.path / f"{constants.arena_id}{SUFFIX}"
        try:
            fd = directory.make(path.name)
        except FileExistsError:
            raise ConfigurationError(f"{path} exists; an arena needs a new_arena_id()") from None
        try:
            private_files.lock(fd, path, deadline=0)  # no other process knows its name
            arena = cls._fill(path, fd, constants, reserve)
            if not directory.names(path.name, os.fstat(fd).st_ino):
                raise ArenaError(f"another process removed {path} while it was created")
            arena._claim()
            arena.set(Word.STATE, state)
        except BaseException:
            directory.unlink(path.name, os.fstat(fd).st_ino)
            private_files.unlock(fd)
            raise
        return arena

    @classmethod
    def _fill(cls, path: Path, fd: int, constants: Constants, reserve: Mapping[str, int]) -> Arena:
        """Creates the arena in the new file `fd`, all but the last store, that of the word `state`."""
        payload = constants.encode()
        spans, total_bytes = headers.spans(constants, len(payload))
        block_bytes = max(os.fstatvfs(fd).f_bsize, headers.PAGE_BYTES)  # huge pages: only whole ones
        pieces = [(0, headers.CONSTANTS_OFFSET + headers.page_aligned(len(payload)))]
        for name, size_bytes in reserve.items():
            _check_capacity(path, name, size_bytes, spans[name][1])
            pieces.append((spans[name][0], headers.page_aligned(size_bytes)))
        with capacity.refusals(path, total_bytes):
            os.ftruncate(fd, -(-total_bytes // block_bytes) * block_bytes)
        _allocate(path, fd, pieces)
        with capacity.refusals(path, total_bytes):
            arena = cls(path, fd, constants, len(payload))
        for word, value in headers.initial_words().items():
            arena.set(word, value)
        for name, size_bytes in reserve.items():
            arena._set_reserved(name, size_bytes)
        arena._write(headers.CONSTANTS_OFFSET, payload)
        arena._write(0, headers.preamble(payload))
        return arena

    @classmethod
    def attach(cls, found: Found | str | Path, *, timeout_s: float = 10.0) -> Arena:
        """Claims an arena that an earlier process left behind.

        Args:
            found: from `Directory.scan`, or the path. The path of a `Found` must still name the same file.
            timeout_s: longest wait for the end of the process that holds the arena or held it last.

        Raises:
            ArenaBusy: a living process still holds the arena, or this process holds it already.
            ArenaDamaged: its header can't be read, or its file is truncated.
            ArenaInsecure: as for `Directory`, or the file belongs to another user or is open to others.
            ArenaError: the file is gone, or its path now names another file.
            ConfigurationError: the path is not that of an arena of this user.
        """
        deadline = time.monotonic() + timeout_s
        path = found.path if isinstance(found, Found) else Path(os.path.abspath(found))
        place = private_files.locate(path)
        status = place.status(path.name)
        if status is not None and private_files.locked_here(status) is not None:
            raise private_files.busy(path, os.getpid())
        fd = place.open(path.name, os.O_RDWR)
        if fd is None:
            raise _gone(path)
        try:
            private_files.lock(fd, path, deadline)
            inode = os.fstat(fd).st_ino
            if (isinstance(found, Found) and found.inode != inode) or not place.names(path.name, inode):
                raise _gone(path)
            pid, start = headers.last_holder(fd)
            private_files.await_gone(fd, pid, start, path, deadline)
            constants, length, _ = headers.load(fd, path)
            with capacity.refusals(path, os.fstat(fd).st_size):
                arena = cls(path, fd, constants, length)
            for name, (_, room) in arena._spans.items():
                if not 0 <= arena.reserved(name) <= room:
                    raise ArenaDamaged(
                        f"{path}: region {name!r} claims {arena.reserved(name)} bytes of at most {room}"
                    )
            arena._back()
            arena._claim()
        except BaseException:
            private_files.unlock(fd)
            raise
        return arena

    def header(self) -> Header:
        """A snapshot of constants and words.

        Raises:
            ArenaDamaged: the word `state` is not a `State`.
            UsageError: the arena is closed.
        """
        return headers.snapshot(self.constants, {word: self.get(word) for word in WORDS})

    def get(self, word: Word) -> int:
        """The value of a word; `NONE` if it has none yet."""
        return self._opened_words().item(_INDEX[word])

    def word(self, word: Word) -> NDArray[np.int64]:
        """The memory of a word, int64 [1]: a view of the mapping, as `region` returns it."""
        return self._opened_words()[_INDEX[word] : _INDEX[word] + 1]

    def set(self, word: Word, value: int) -> None:
        """Stores a word: one aligned 8-byte store, that no compiler can move or split.

        Raises:
            OverflowError: `value` is not an int64.
        """
        self._opened_words()[_INDEX[word]] = value

    def check_open(self) -> None:
        """Raises if the arena can't be used: after `close`, and in a forked child.

        Raises:
            UsageError: the arena is closed.
        """
        self._opened_words()

    def join(self, generation: int, generation_id: int) -> None:
        """Stores that this arena is a member of `generation` (docs/protocol.md, 2).

        Two words can't change at once. Between the stores the id is NONE, which `classify` takes for unknown:
        otherwise a crash between them would look like one generation with two ids.

        Raises:
            UsageError: the arena is closed.
        """
        self.set(Word.GENERATION_ID, headers.NONE)
        self.set(Word.JOINED, generation)
        self.set(Word.GENERATION_ID, generation_id)

    def region(self, name: str) -> NDArray[np.uint8]:
        """The region's whole capacity as uint8 [capacity], shared memory, page aligned.

        Only the first `reserved(name)` bytes may be touched. The view, and every tensor over it, stays mapped
        after `close`, but must not be written then.

        Raises:
            UsageError: the arena is closed.
            ConfigurationError: no such region.
        """
        offset, capacity = self._span(name)
        if self._data is None:
            raise self._closed()
        return self._data[offset : offset + capacity]

    def read(self, name: str, start: int, out: NDArray[np.uint8]) -> None:
        """Copies bytes of a region into an array, as the mapping has them at this time. For any thread.

        It reads the file: through a new mapping, the kernel would first map each page, which takes several
        times as long as the copy.

        Args:
            name: of the region.
            start: first byte.
            out: uint8 [m], contiguous, overwritten; the bytes start..start+m-1 are reserved.

        Raises:
            UsageError: the arena is closed.
            ArenaDamaged: the file ends before these bytes.
            ConfigurationError: no such region.
        """
        offset, _ = self._span(name)
        self.check_open()
        done = 0
        while done < out.size:
            got = os.preadv(self._fd, [out[done:].data], offset + start + done)
            if not got:
                raise ArenaDamaged(
                    f"{self.path} ends before byte {start + out.size} of its {name}: its memory is damaged. "
                    f"{self.way_out}"
                )
            done += got

    def offset(self, name: str) -> int:
        """Where a region begins in the file, in bytes.

        Raises:
            ConfigurationError: no such region.
        """
        return self._span(name)[0]

    def reserved(self, name: str) -> int:
        """Number of bytes from the region's start that are backed by memory.

        Raises:
            UsageError: the arena is closed.
            ConfigurationError: no such region.
        """
        self._span(name)
        return self._opened_words().item(self._reserved_index[name])

    def filled(self, name: str, word: Word) -> NDArray[np.uint8]:
        """The bytes of a region that are in use, uint8: a view as of `region`.

        Args:
            name: of the region.
            word: the word of the header that counts them.

        Raises:
            ArenaDamaged: the word exceeds the reserved bytes.
            UsageError: the arena is closed.
            ConfigurationError: no such region.
        """
        used, reserved = self.get(word), self.reserved(name)
        if not 0 <= used <= reserved:
            raise ArenaDamaged(
                f"{self.path} claims that {used} bytes of its {name} are in use, but {reserved} are "
                f"reserved: its memory is damaged. {self.way_out}"
            )
        return self.region(name)[:used]

    @property
    def way_out(self) -> str:
        """The remedy for damaged bytes in this arena, for the end of an error message."""
        return (
            f"End the job and remove the arena (ecemb arenas rm {self.path}): then it counts as "
            f"lost and is rebuilt"
        )

    def reserve(self, name: str, size_bytes: int, *, spare_bytes: int = _GROWTH_BYTES) -> int:
        """Backs at least the first `size_bytes` of the region by memory.

        The region grows by at least a quarter or `spare_bytes`, if there is space beside the host's reserve
        (`capacity.reserve_of`), so that only few of many calls with slowly rising sizes have to allocate.
        With `spare_bytes` 0 it grows to `size_bytes` and no further. It keeps its content.

        Returns:
            The reserved bytes after the call.

        Raises:
            NotEnoughSpace: the region's capacity or the available space is too small; nothing changed.
            ArenaBusy: another process is stuck while it reserves memory.
            UsageError: the arena is closed.
            ConfigurationError: no such region.
        """
        before = self.reserved(name)
        if size_bytes <= before:
            return before
        with self._growing:
            return self._reserve(name, size_bytes, spare_bytes)

    def _reserve(self, name: str, size_bytes: int, spare_bytes: int) -> int:
        offset, capacity = self._span(name)
        before = self.reserved(name)
        if size_bytes <= before:
            return before
        _check_capacity(self.path, name, size_bytes, capacity)
        spare = max(before // 4, spare_bytes) if spare_bytes else 0
        generous = min(capacity, max(size_bytes, before + spare))
        backed = headers.page_aligned(before)
        for wanted in (generous, size_bytes):
            try:
                pieces = [(offset + backed, headers.page_aligned(wanted) - backed)]
                _allocate(self.path, self._fd, pieces, leaves_reserve=wanted > size_bytes)
            except NotEnoughSpace:
                if wanted == size_bytes:
                    raise
                continue
            # Stored after the bytes are backed: a crash in between loses only the knowledge that they are.
            self._set_reserved(name, wanted)
            break
        return self.reserved(name)

    def back(self, name: str, runs: Iterable[tuple[int, int]]) -> None:
        """Backs runs of a region's bytes by memory, anywhere in the region; used by `Backing`.

        Args:
            name: of the region.
            runs: start and end of each, in bytes.

        Raises:
            NotEnoughSpace: the kernel refuses.
        """
        offset, _ = self._span(name)
        left = populate_runs(self.region(name), runs)
        capacity.back(self._fd, [(offset + start, stop - start) for start, stop in left], self.path)

    def mark_backed(self, name: str) -> None:
        """Stores that all bytes of a region are backed: `reserved` is its capacity from then on."""
        self._set_reserved(name, self._span(name)[1])

    def close(self) -> None:
        """Releases the claim. The file stays; it is unmapped when its last view is gone."""
        if self._words is None:
            return
        with self._growing:
            self.set(Word.PID, 0)
            self._data = self._words = None
            _attached.discard(self)
            private_files.unlock(self._fd)

    def is_named(self) -> bool:
        """Whether the path still names the arena's file. If not, the file ends with its last mapping."""
        return private_files.locate(self.path).names(self.path.name, self._inode)

    def remove(self) -> bool:
        """Removes the file, if its path still names it, and folders that are then empty.

        The memory is free when the last process that maps it has ended or unmapped it.
        Can be called before or after `close`.

        Returns:
            Whether the file was there.

        Raises:
            ArenaInsecure: its path can no longer be trusted.
        """
        return private_files.locate(self.path).unlink(self.path.name, self._inode)

    def _back(self) -> None:
        """Backs all reserved bytes by memory again: a copy of a file may have holes in place of zeros."""
        pieces = [(at, headers.page_aligned(self.reserved(name))) for name, (at, _) in self._spans.items()]
        if os.fstat(self._fd).st_blocks * 512 < sum(length for _, length in pieces):
            capacity.back(self._fd, pieces, self.path)

    def _claim(self) -> None:
        """Stores this process as the holder."""
        self.set(Word.PID_START, private_files.start_of_process(os.getpid()) or 0)
        self.set(Word.PID, os.getpid())
        _attached.add(self)

    def _write(self, offset: int, content: bytes) -> None:
        if self._data is None:
            raise self._closed()
        self._data[offset : offset + len(content)] = np.frombuffer(content, np.uint8)

    def _set_reserved(self, name: str, size_bytes: int) -> None:
        capacity = self._span(name)[1]
        self._opened_words()[self._reserved_index[name]] = min(headers.page_aligned(size_bytes), capacity)

    def _opened_words(self) -> NDArray[np.int64]:
        if self._words is None:
            raise self._closed()
        return self._words

    def _span(self, name: str) -> tuple[int, int]:
        try:
            return self._spans[name]
        except KeyError:
            raise ConfigurationError(
                f"{self.path} has no region {name!r}; its regions are {', '.join(self._spans) or 'none'}"
            ) from None

    def _closed(self) -> UsageError:
        if os.getpid() != self._pid:
            return UsageError(
                f"the arena {self.path} belongs to process {self._pid}, and this is a forked child of it "
                f"({os.getpid()}), which has neither the memory nor the claim: use the guard, and protected "
                f"tables, in the parent"
            )
        return UsageError(f"the arena {self.path} is closed in this process; attach to it again")


def _check_capacity(path: Path, name: str, size_bytes: int, capacity: int) -> None:
    if size_bytes > capacity:
        raise NotEnoughSpace(
            f"region {name!r} of {path} has a capacity of {capacity} bytes and needs "
            f"{size_bytes}; the capacity is fixed at the job's first start"
        )


def _gone(path: Path) -> ArenaError:
    return ArenaError(
        f"{path} is gone, or is now another file: it was removed after the scan. Start the job "
        f"again: the arena then counts as lost"
    )


def _allocate(
    path: Path, fd: int, pieces: Sequence[tuple[int, int]], *, leaves_reserve: bool = False
) -> None:
    with private_files.opened(private_files.locate(path).arena_dir, create=True) as turn:
        capacity.allocate(fd, pieces, path, turn, leaves_reserve=leaves_reserve)


def _after_fork_in_child() -> None:
    """Closes the arenas in a forked child, which has neither mappings nor locks."""
    _mapped.clear()
    for arena in list(_attached):
        arena._data = arena._words = None  # pyright: ignore[reportPrivateUsage]
    _attached.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


Ids = NDArray[np.int64]


class Promise:
    """Memory that this process allocates later, in parts: checked now, and promised to no other process.

    Args:
        size_bytes: bytes of the memory.
        path: for messages.
        turn: as for `capacity.allocate`; the caller may close it afterwards.

    Raises:
        NotEnoughSpace: the bytes don't fit.
        ArenaBusy: as for `capacity.allocate`.
    """

    def __init__(self, size_bytes: int, path: Path, turn: int) -> None:
        self._path, self._turn = path, os.dup(turn)
        self._left_bytes = self._checked_bytes = size_bytes
        self._claim = capacity.Claim(self._turn, path)
        self._end = weakref.finalize(self, _give_back, self._claim, self._turn)
        try:
            self._claim.take_turn(size_bytes, self._turn)
            try:
                self._claim.store(size_bytes)
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
        except BaseException:
            self.end()
            raise

    def take(self, size_bytes: int) -> None:
        """Counts bytes as allocated; called right before their allocation.

        Once for each slice, it checks again that there is memory for all bytes that are left.

        Raises:
            NotEnoughSpace: other processes have allocated memory that was promised here.
        """
        if self._checked_bytes - self._left_bytes >= capacity.SLICE_BYTES:
            self._claim.fits(self._left_bytes, self._turn)
            self._checked_bytes = self._left_bytes
        self._left_bytes -= size_bytes
        self._claim.store(self._left_bytes)

    def end(self) -> None:
        """Releases the bytes that are promised and not allocated. May be called twice."""
        self._end()


def _give_back(claim: capacity.Claim, turn: int) -> None:
    claim.drop()
    os.close(turn)


class Backing:
    """Backs regions of one arena page by page, in any order. Threads may share an object.

    Args:
        arena: just created; nothing of the regions is reserved.
        names: of the regions.
        promise: of memory for all of the regions; ended when all of it is allocated.

    Attributes:
        is_whole: whether all pages of all regions are backed.
    """

    def __init__(self, arena: Arena, names: Sequence[str], promise: Promise) -> None:
        self._arena, self._promise = arena, promise
        self._lock = threading.Lock()
        self._page_bytes = headers.MEMORY_PAGE_BYTES
        self._backed = {
            name: np.zeros(len(headers.memory_pages(arena.offset(name), len(arena.region(name)))), np.bool_)
            for name in names
        }
        self.is_whole: bool = False

    def has(self, name: str, starts: Ids, size_bytes: int) -> NDArray[np.bool_]:
        """For each run of a region's bytes, whether at least one page of it is backed.

        Args:
            name: of the region.
            starts: int64 [m], the bytes at which the runs begin, in any order; read.
            size_bytes: of each run, 1 or more.

        Returns:
            bool [m], new.
        """
        pages, edges = self._pages(name, starts, size_bytes)
        return np.logical_or.reduceat(self._backed[name][pages], edges)

    def ensure(self, name: str, starts: Ids, size_bytes: int) -> None:
        """Backs runs of a region's bytes.

        Args:
            name: of the region.
            starts: int64 [m], the bytes at which the runs begin, in any order; read.
            size_bytes: of each run, 1 or more.

        Raises:
            NotEnoughSpace: the promised memory is not there any more; no content has changed.
        """
        if self.is_whole:
            return
        backed, (pages, _) = self._backed[name], self._pages(name, starts, size_bytes)
        if len(lacking := pages[~backed[pages]]):
            with self._lock:
                lacking = np.unique(lacking)
                self._back(name, lacking[~backed[lacking]])

    def ensure_all(self) -> None:
        """Backs all other pages, and stores in the arena that the regions are reserved.

        Raises:
            NotEnoughSpace: the promised memory is not there any more.
        """
        if self.is_whole:
            return
        with self._lock:
            for name, backed in self._backed.items():
                self._back(name, np.flatnonzero(~backed))
                self._arena.mark_backed(name)
            self.is_whole = True
        self._promise.end()

    def _back(self, name: str, pages: Ids) -> None:
        """Backs pages that are not backed yet (int64 [m], ascending, distinct). The caller holds the lock."""
        if not len(pages):
            return
        apart = np.diff(pages, prepend=-2, append=-2) != 1  # before each page, and behind the last one
        before = self._before(name)
        starts = np.maximum(pages[apart[:-1]] * self._page_bytes - before, 0)
        stops = (pages[apart[1:]] + 1) * self._page_bytes - before
        stops = np.minimum(stops, len(self._arena.region(name)))
        self._promise.take(len(pages) * self._page_bytes)
        self._arena.back(name, zip(starts.tolist(), stops.tolist(), strict=True))
        self._backed[name][pages] = True

    def _pages(self, name: str, starts: Ids, size_bytes: int) -> tuple[Ids, Ids]:
        """The pages of runs, run by run (int64 [p]), and the index of each run's first page in them."""
        starts = starts + self._before(name)
        first = starts // self._page_bytes
        counts = (starts + size_bytes - 1) // self._page_bytes - first + 1
        edges = np.cumsum(counts) - counts
        return np.repeat(first - edges, counts) + np.arange(counts.sum()), edges

    def _before(self, name: str) -> int:
        """Bytes of a region's first page that come before the region."""
        return self._arena.offset(name) % self._page_bytes


def promised(directory: Folder, constants: Constants, names: Sequence[str]) -> Promise:
    """Promises memory for regions of an arena that is not created yet, for `Backing`.

    Raises:
        NotEnoughSpace: the regions don't fit.
        ArenaBusy: another process is stuck while it reserves memory.
    """
    spans, _ = headers.spans(constants, len(constants.encode()))
    pages = sum(len(headers.memory_pages(*spans[name])) for name in names)
    with private_files.opened(directory.arena_dir, create=True) as turn:
        return Promise(pages * headers.MEMORY_PAGE_BYTES, directory.path / "new arena", turn)


def close_attached() -> None:
    """Closes all arenas that this process has attached. No thread may use them any more."""
    for arena in list(_attached):
        arena.close()


_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MOST_LOCKED_BYTES = 1 << 16
"""A run of this size or less is backed without releasing the interpreter's lock: to acquire it again would
take longer."""
_with_lock = ctypes.PyDLL(None, use_errno=True)
_with_lock.madvise.argtypes = _libc.madvise.argtypes


class _Mapping:
    """Keeps `size_bytes` of a file mapped for as long as it lives. NumPy's views keep it alive."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED | _MAP_NORESERVE, fd, 0)
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        weakref.finalize(self, _unmap, address, size_bytes, os.getpid()).atexit = False
        if _libc.madvise(address, size_bytes, mmap.MADV_DONTFORK) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (address, False),
        }


_mapped: weakref.WeakValueDictionary[tuple[int, int, int], _Mapping] = weakref.WeakValueDictionary()
"""(device, inode, size) -> the mapping of this file; while it is mapped, no other file has the inode."""


def map_shared(fd: int, size_bytes: int) -> NDArray[np.uint8]:
    """The file of `fd` as writable uint8 [size_bytes], shared with all processes that map it.

    A file that is mapped in this process is not mapped again: tables that a process keeps in an arena, while
    it closes and attaches the arena, keep their pages.

    The file is unmapped when the last view of the array is gone; `fd` may be closed earlier. A forked child
    doesn't have the mapping: touching a view there ends the child with SIGSEGV.

    Raises:
        OSError: the kernel refuses; the error has its reason.
    """
    status = os.fstat(fd)
    name = status.st_dev, status.st_ino, size_bytes
    if (mapping := _mapped.get(name)) is None:
        mapping = _mapped[name] = _Mapping(fd, size_bytes)
    return np.asarray(mapping)


def populate(mapped: NDArray[np.uint8]) -> None:
    """Pages in a part of a mapping (uint8 [m]), so that no later access faults. No content changes.

    All of the part must be backed by memory. Other threads may write to it meanwhile.
    """
    if mapped.size and populate_runs(mapped, [(0, mapped.size)]):
        np.bitwise_or.reduce(mapped[:: mmap.PAGESIZE])  # for older kernels: reading maps a page as well


def populate_runs(mapped: NDArray[np.uint8], runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Backs runs of bytes of a mapping by memory, and maps their pages: no content changes.

    Args:
        mapped: uint8 [m], a part of a mapping.
        runs: start and end of each, in bytes.

    Returns:
        The runs that the kernel has not backed and mapped, as it lacks the call or the memory.
    """
    address, page = mapped.__array_interface__["data"][0], mmap.PAGESIZE
    left: list[tuple[int, int]] = []
    for start, stop in runs:
        first = (address + start) // page * page
        size_bytes = address + stop - first
        madvise = (_with_lock if size_bytes <= _MOST_LOCKED_BYTES else _libc).madvise
        if madvise(first, size_bytes, _MADV_POPULATE_WRITE) != 0:
            left.append((start, stop))
    return left


def _unmap(address: int, size_bytes: int, pid: int) -> None:
    # A forked child doesn't have the mapping: another mapping may have its address there.
    if os.getpid() == pid:
        _libc.munmap(address, size_bytes)
