"""Processes that hold arenas: what tests kill, and what they ask in the meantime."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ecemb.errors import ArenaBusy, NotEnoughSpace, UsageError
from ecemb.memory import arena as arena_module
from ecemb.memory import capacity, private_files
from ecemb.memory.arena import Arena
from ecemb.memory.header import Constants, new_arena_id
from ecemb.memory.scan import Directory
from support.fork_server import fork_server

DEADLINE_S = 300.0
ROWS_BYTES = 3 * 4096 + 8


def constants(**changes: Any) -> Constants:
    """Valid constants of a small arena, with `changes`."""
    fields: dict[str, Any] = {
        "job": "ctr",
        "arena_id": new_arena_id(),
        "rank": 0,
        "world_size": 4,
        "n": 4,
        "k": 3,
        "positions": (0, 2, 1, 3),
        "domains": ("a", "a", "b", "b"),
        "layout_hash": "0123abcd",
        "layout": '{"tables": []}',
        "block_words": ((1, 2, 3),) * 4,
        "regions": (("generator", 12), ("rows", ROWS_BYTES), ("journal", 1 << 33), ("none", 0)),
        "fill": 1,
    }
    return Constants(**{**fields, **changes})


def create(directory: Directory, **changes: Any) -> Arena:
    """A new small arena."""
    return Arena.create(directory, constants(**changes), {"generator": 12, "rows": ROWS_BYTES})


class Holder:
    """A process that runs `function(pipe, *args)`. Ends at the latest with the test."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = fork_server()
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=function, args=(there, *args), daemon=True)
        self.process.start()
        there.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, question: Any = None) -> Any:
        """What the process answers."""
        self.pipe.send(question)
        return self.told()

    def told(self) -> Any:
        """What the process says next."""
        assert self.pipe.poll(DEADLINE_S), "the process doesn't answer"
        return self.pipe.recv()

    def ended(self) -> int | None:
        """Wait for the end: the exit code, minus the signal if one killed it."""
        self.process.join(DEADLINE_S)
        return self.process.exitcode

    def kill(self) -> None:
        """SIGKILL; it is gone when this returns."""
        self.process.kill()
        self.process.join(DEADLINE_S)


@contextlib.contextmanager
def holding(function: Callable[..., None], *args: Any) -> Iterator[Holder]:
    """A `Holder` for as long as the block lasts."""
    holder = Holder(function, *args)
    try:
        yield holder
    finally:
        holder.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until `condition()`, or fail."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        os.sched_yield()


def hold(pipe: Connection, path: Path) -> None:
    """Attach; close when asked."""
    arena = Arena.attach(path)
    pipe.send("attached")
    pipe.recv()
    arena.close()
    pipe.send("closed")
    pipe.recv()


def try_to_attach(pipe: Connection, path: Path) -> None:
    """When asked, attach and close again; tells the lock's holder if it is another process."""
    while True:
        pipe.recv()
        try:
            Arena.attach(path, timeout_s=0).close()
        except ArenaBusy:
            with path.open("rb") as file:
                pipe.send(private_files.holder_of(file.fileno(), 0, 0))
        else:
            pipe.send(None)


def hold_with_child(pipe: Connection, path: Path) -> None:
    """Attach, then fork a child that lives on, like a DataLoader worker."""
    arena = Arena.attach(path)
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    pipe.send(child)
    pipe.recv()
    arena.close()


def lose_lock(pipe: Connection, path: Path) -> None:
    """Attach, then drop the lock by the accident that POSIX has in store for us."""
    arena = Arena.attach(path)
    os.close(os.open(path, os.O_RDONLY))
    arena.region("rows")[0] = 1  # it may still write
    pipe.send("lost")
    pipe.recv()


def touch_in_child(pipe: Connection, path: Path) -> None:
    """Attach and fork: what becomes of a child that touches the mapping, and of one that asks."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    arena = Arena.attach(path)
    rows = arena.region("rows")
    answers: list[int] = []
    for touch in (lambda: int(rows[0]), lambda: arena.get("state"), lambda: arena.region("rows")):
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            try:
                touch()
            except UsageError:
                os._exit(7)
            os._exit(0)
        answers.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    pipe.send(answers)
    pipe.recv()


def die_in_creation(pipe: Connection, arena_dir: Path, where: str, of: Constants) -> None:
    """Create, and be killed at the first call of `where`."""
    _die_at(where)
    Arena.create(Directory(arena_dir, "ctr", "a"), of, {"rows": ROWS_BYTES})
    pipe.send("alive")


def die_in_growth(pipe: Connection, path: Path, grow: Mapping[str, int], where: str) -> None:
    """Attach and grow, then be killed at the first call of `where` of the next growth."""
    arena = Arena.attach(path)
    for name, size_bytes in grow.items():
        arena.region(name)[: arena.reserve(name, size_bytes)] = 0xA5
    _die_at(where)
    arena.reserve("journal", arena.reserved("journal") + 1)
    pipe.send("alive")


def reserve(pipe: Connection, path: Path, size_bytes: int) -> None:
    """Attach, then reserve when asked; says whether there was space."""
    arena = Arena.attach(path)
    pipe.send("attached")
    pipe.recv()
    try:
        pipe.send(arena.reserve("journal", size_bytes))
    except NotEnoughSpace:
        pipe.send(None)
    pipe.recv()


def _die_at(where: str) -> None:
    owner: Any
    owner, name = {
        "ftruncate": (os, "ftruncate"),
        "check": (capacity, "check"),
        "posix_fallocate": (os, "posix_fallocate"),
        "map_shared": (arena_module, "map_shared"),
        "set_reserved": (Arena, "_set_reserved"),
        "write": (Arena, "_write"),
        "claim": (Arena, "_claim"),
    }[where.removeprefix("after ")]
    real = getattr(owner, name)

    def die(*args: Any, **options: Any) -> None:
        if where.startswith("after "):
            real(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, die)
