"""Memory for regions that fill up in any order: backed page by page, right before it is written.

Owns the pages of such regions that are backed, and the promise that there is memory for the others.
Pages are this machine's, counted in the file: a region may begin within one that is larger than the format's.
Invariant: a page is backed before it is touched, so touching it can't fail. Must not know what fills the
regions.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import capacity, private_files
from . import header as headers
from .arena import Arena
from .header import Constants
from .private_files import Folder

Ids = NDArray[np.int64]


class Promise:
    """Bytes that this process takes later, in parts: checked now, and promised to no other process meanwhile.

    Args:
        size_bytes: their number.
        path: for messages.
        turn: as for `capacity.allocate`; it may be closed after this.

    Raises:
        NotEnoughSpace: they don't fit.
        ArenaBusy: as for `capacity.allocate`.
    """

    def __init__(self, size_bytes: int, path: Path, turn: int) -> None:
        self._path, self._turn = path, os.dup(turn)
        self._left_bytes = self._checked_bytes = size_bytes
        self._claim = capacity.Claim(self._turn, path)
        self._end = weakref.finalize(self, _give_back, self._claim, self._turn)
        try:
            self._claim.take_turn(size_bytes, again=False)
            try:
                self._check()
                self._claim.store(size_bytes, waiting=False)
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)
        except BaseException:
            self.end()
            raise

    def take(self, size_bytes: int) -> None:
        """Counts bytes as taken, right before they are; checks what is left again, slice by slice.

        Raises:
            NotEnoughSpace: other processes have taken what was promised here.
        """
        if self._checked_bytes - self._left_bytes >= capacity.SLICE_BYTES:
            self._check()
            self._checked_bytes = self._left_bytes
        self._left_bytes -= size_bytes
        self._claim.store(self._left_bytes, waiting=False)

    def end(self) -> None:
        """Promises nothing any more."""
        self._end()

    def _check(self) -> None:
        capacity.check(
            self._left_bytes, self._turn, self._path, capacity.promised_elsewhere(self._turn, self._claim)
        )


def _give_back(claim: capacity.Claim, turn: int) -> None:
    claim.drop()
    os.close(turn)


class Backing:
    """Backs regions of one arena, of which nothing is reserved at first. Threads may share an object.

    Args:
        arena: just created; the regions are not reserved.
        names: of the regions.
        promise: of memory for all of them; ended here.
    """

    def __init__(self, arena: Arena, names: Sequence[str], promise: Promise) -> None:
        self._arena, self._promise = arena, promise
        self._lock = threading.Lock()
        self._page_bytes = headers.MEMORY_PAGE_BYTES
        self._backed = {
            name: np.zeros(len(headers.memory_pages(arena.offset(name), len(arena.region(name)))), np.bool_)
            for name in names
        }
        self._is_whole = False

    @property
    def is_whole(self) -> bool:
        """Whether all pages of all regions are backed."""
        return self._is_whole

    def has(self, name: str, starts: Ids, size_bytes: int) -> NDArray[np.bool_]:
        """Of which runs of a region's bytes some page is backed.

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
            NotEnoughSpace: there is no memory any more for what was promised; nothing else has changed.
        """
        if self._is_whole:
            return
        backed, (pages, _) = self._backed[name], self._pages(name, starts, size_bytes)
        if len(lacking := pages[~backed[pages]]):
            with self._lock:
                lacking = np.unique(lacking)
                self._back(name, lacking[~backed[lacking]])

    def ensure_all(self) -> None:
        """Backs all that is left, and says in the arena that the regions are reserved.

        Raises:
            NotEnoughSpace: there is no memory any more for what was promised.
        """
        if self._is_whole:
            return
        with self._lock:
            for name, backed in self._backed.items():
                self._back(name, np.flatnonzero(~backed))
                self._arena.mark_backed(name)
            self._is_whole = True
        self._promise.end()

    def _back(self, name: str, pages: Ids) -> None:
        """Backs pages that are not (int64 [m], ascending, distinct); with the lock held."""
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
        """The pages of runs, run by run, and for each run the place of its first page among them."""
        starts = starts + self._before(name)
        first = starts // self._page_bytes
        counts = (starts + size_bytes - 1) // self._page_bytes - first + 1
        edges = np.cumsum(counts) - counts
        return np.repeat(first - edges, counts) + np.arange(counts.sum()), edges

    def _before(self, name: str) -> int:
        """Bytes of a region's first page that come before the region."""
        return self._arena.offset(name) % self._page_bytes


def promised(directory: Folder, constants: Constants, names: Sequence[str]) -> Promise:
    """Promises memory for regions of an arena that is going to be made, which `Backing` backs.

    Raises:
        NotEnoughSpace: it doesn't fit.
        ArenaBusy: another process is stuck while it reserves memory.
    """
    spans, _ = headers.spans(constants, len(constants.encode()))
    pages = sum(len(headers.memory_pages(*spans[name])) for name in names)
    with private_files.opened(directory.arena_dir, create=True) as turn:
        return Promise(pages * headers.MEMORY_PAGE_BYTES, directory.path / "new arena", turn)
