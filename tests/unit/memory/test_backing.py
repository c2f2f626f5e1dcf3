"""Regions that are backed page by page, in any order, from memory that was promised."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ecemb.errors import NotEnoughSpace
from ecemb.memory import capacity, header
from ecemb.memory.arena import Arena, Backing, promised
from ecemb.memory.scan import Directory
from support.arena_holders import constants

PAGE = 4096
ROWS_BYTES, PARITY_BYTES = 40 * PAGE + 8, 3 * PAGE
REGIONS = (("rows", ROWS_BYTES), ("parity", PARITY_BYTES), ("journal", 1 << 20))
TOTAL_BYTES = 44 * PAGE


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path, "ctr", "a")


@pytest.fixture
def arena(directory: Directory) -> Iterator[Arena]:
    """An arena of which nothing is reserved."""
    arena = Arena.create(directory, constants(regions=REGIONS), {})
    yield arena
    arena.close()
    arena.remove()


@pytest.fixture
def backing(directory: Directory, arena: Arena) -> Backing:
    names = ("rows", "parity")
    return Backing(arena, names, promised(directory, arena.constants, names))


def backed_bytes(arena: Arena) -> int:
    return os.stat(arena.path).st_blocks * 512


def left_bytes(directory: Directory) -> int:
    """What processes of this user were promised, and have not taken."""
    turn = os.open(directory.path.parents[1], os.O_RDONLY)
    try:
        return capacity.promised_elsewhere(turn)
    finally:
        os.close(turn)


def test_runs_are_backed_and_nothing_else(directory: Directory, arena: Arena, backing: Backing) -> None:
    before = backed_bytes(arena)
    assert left_bytes(directory) == TOTAL_BYTES
    backing.ensure("rows", np.array([5 * PAGE + 1, PAGE - 8, 5 * PAGE, 30 * PAGE]), 16)
    assert backed_bytes(arena) - before == 4 * PAGE, "pages 0, 1, 5 and 30"
    assert left_bytes(directory) == TOTAL_BYTES - 4 * PAGE
    arena.region("rows")[PAGE : PAGE + 4] = 7
    backing.ensure("rows", np.array([0]), 3 * PAGE)
    backing.ensure("parity", np.array([2 * PAGE]), PAGE)
    backing.ensure("rows", np.empty(0, np.int64), 8)
    assert backed_bytes(arena) - before == 6 * PAGE
    assert arena.region("rows")[PAGE : PAGE + 5].tolist() == [7, 7, 7, 7, 0]
    assert arena.reserved("rows") == arena.reserved("parity") == 0


@pytest.mark.parametrize("page_bytes", [16 << 10, 64 << 10])
def test_a_machine_with_larger_pages(
    directory: Directory, arena: Arena, monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    """Its pages are backed and counted as wholes; an arena has the same bytes at the same places."""
    monkeypatch.setattr(header, "MEMORY_PAGE_BYTES", page_bytes, raising=False)
    names, backed = ("rows", "parity"), dict[str, set[int]](rows=set(), parity=set())
    backing = Backing(arena, names, promised(directory, arena.constants, names))
    first = {name: arena.region(name).ctypes.data - arena.region("rows").ctypes.data for name in names}
    base = header.CONSTANTS_OFFSET + header.page_aligned(len(arena.constants.encode()))
    pages = {
        name: range((base + first[name]) // page_bytes, (base + first[name] + size - 1) // page_bytes + 1)
        for name, size in (("rows", ROWS_BYTES), ("parity", PARITY_BYTES))
    }
    assert base % page_bytes and left_bytes(directory) == page_bytes * sum(map(len, pages.values()))

    def back(name: str, runs: Iterable[tuple[int, int]]) -> None:
        for start, stop in runs:
            at, end = base + first[name] + start, base + first[name] + stop
            assert 0 <= start < stop <= len(arena.region(name))
            assert start == 0 or at % page_bytes == 0
            assert stop == len(arena.region(name)) or end % page_bytes == 0
            covered = range(at // page_bytes, -(-end // page_bytes))
            assert backed[name].isdisjoint(covered)
            backed[name].update(covered)

    monkeypatch.setattr(arena, "back", back)
    for start, size in ((0, 8), (20 * PAGE + 1, 8), (ROWS_BYTES - 8, 8), (3 * PAGE, 2 * page_bytes)):
        assert start == 3 * PAGE or not backing.has("rows", np.array([start]), size).any()
        backing.ensure("rows", np.array([start]), size)
        at = base + start
        assert backed["rows"].issuperset(range(at // page_bytes, (at + size - 1) // page_bytes + 1))
        left = sum(map(len, pages.values())) - len(backed["rows"])
        assert left_bytes(directory) == page_bytes * left
        assert backing.has("rows", np.array([start + size - 1]), 1).all()
    backing.ensure_all()
    assert backed == {name: set(all_of) for name, all_of in pages.items()}
    assert left_bytes(directory) == 0


def test_runs_with_some_memory(backing: Backing) -> None:
    """One page of it is enough."""
    backing.ensure("rows", np.array([5 * PAGE, 9 * PAGE]), PAGE)
    starts = np.array([5 * PAGE - 8, 5 * PAGE - 9, 6 * PAGE - 1, 6 * PAGE, 9 * PAGE + 7, 0])
    assert backing.has("rows", starts, 9).tolist() == [True, False, True, False, True, False]
    assert backing.has("rows", np.array([4 * PAGE - 1, 6 * PAGE]), 3 * PAGE).tolist() == [True, False]
    assert backing.has("parity", np.array([0]), PARITY_BYTES).tolist() == [False]
    assert not len(backing.has("rows", np.empty(0, np.int64), 8)) and not backing.is_whole
    backing.ensure_all()
    assert backing.has("rows", starts, 8).all() and backing.is_whole


def test_in_the_end_the_regions_are_reserved(directory: Directory, arena: Arena, backing: Backing) -> None:
    backing.ensure("rows", np.array([8 * PAGE]), 3)
    before = backed_bytes(arena)
    for _ in range(2):
        backing.ensure_all()
        assert backed_bytes(arena) - before == TOTAL_BYTES - PAGE
        assert (arena.reserved("rows"), arena.reserved("parity")) == (ROWS_BYTES, PARITY_BYTES)
        assert left_bytes(directory) == 0
    backing.ensure("rows", np.array([0]), ROWS_BYTES)
    path = arena.path
    arena.close()
    again = Arena.attach(path)
    assert (again.reserved("rows"), again.reserved("journal")) == (ROWS_BYTES, 0)
    again.close()


def test_a_kernel_without_the_call(arena: Arena, backing: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecemb.memory.arena.populate_runs", lambda _, runs: list(runs))
    before = backed_bytes(arena)
    backing.ensure("rows", np.array([3 * PAGE, 39 * PAGE]), PAGE)
    assert backed_bytes(arena) - before == 2 * PAGE
    backing.ensure_all()
    assert TOTAL_BYTES <= backed_bytes(arena) - before <= TOTAL_BYTES + 8 * PAGE, "with the file system's own"


def test_a_kernel_that_refuses(arena: Arena, backing: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ecemb.memory.arena.populate_runs", lambda _, runs: list(runs))
    with monkeypatch.context() as refusing:
        refusing.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(NotEnoughSpace, match=f"needs {2 * PAGE} bytes .* No space left"):
            backing.ensure("rows", np.array([0]), 2 * PAGE)
    backing.ensure("rows", np.array([0]), 2 * PAGE)
    assert backed_bytes(arena) >= 2 * PAGE


def test_memory_is_checked_before_it_is_promised(
    directory: Directory, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, free = ("rows", "parity"), [TOTAL_BYTES]
    limit = lambda *_: [capacity.Limit("the sky", free[0], "Wait.")]  # noqa: E731
    monkeypatch.setattr(capacity, "limits", limit)
    first = promised(directory, arena.constants, names)
    with pytest.raises(NotEnoughSpace, match=f"of which other processes are about to take {TOTAL_BYTES}"):
        promised(directory, arena.constants, ("parity",))
    first.end()
    free[0] -= 1
    with pytest.raises(NotEnoughSpace, match=f"needs {TOTAL_BYTES} bytes .* the sky leaves {free[0]}"):
        promised(directory, arena.constants, names)
    assert left_bytes(directory) == 0


def test_memory_is_checked_again(
    directory: Directory, arena: Arena, backing: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slice by slice: other processes, which are promised nothing, may have taken it."""
    monkeypatch.setattr(capacity, "SLICE_BYTES", 4 * PAGE)
    monkeypatch.setattr(capacity, "limits", lambda *_: [capacity.Limit("the sky", 0, "Wait.")])
    backing.ensure("rows", np.array([0]), 4 * PAGE)
    before = backed_bytes(arena)
    with pytest.raises(NotEnoughSpace, match=f"needs {TOTAL_BYTES - 4 * PAGE} bytes"):
        backing.ensure("rows", np.array([4 * PAGE]), 1)
    assert backed_bytes(arena) == before


def test_a_forked_child_keeps_no_promise(directory: Directory, arena: Arena) -> None:
    promise = promised(directory, arena.constants, ("rows",))
    (here, there), (ready, say) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(there)
        os.write(say, b"!")
        os.read(here, 1)  # until the parent's end is closed
        os._exit(0)
    try:
        os.read(ready, 1)
        assert left_bytes(directory) == 41 * PAGE
        os.close(promise._claim._fd)  # pyright: ignore  # as when this process ends
        promise._claim._fd = None
        assert left_bytes(directory) == 0
    finally:
        promise.end()
        for end in (here, there, ready, say):
            os.close(end)
        os.waitpid(child, 0)
