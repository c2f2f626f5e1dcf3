"""A process of the question about a host: `python work.py ORDER`, with an order and an answer as JSON.

It runs the host's share of one rank's work, with tensors in host memory that stand for a device's. It imports
ecemb from PYTHONPATH, so it also measures an older commit's clone; so it imports nothing of bench, and uses
only what both have.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from ecemb.coding.code import Code
from ecemb.coding.parity import class_words, parity_words
from ecemb.coding.placement import Placement
from ecemb.coding.rows import WORD_BYTES, Addresses, Column, TableLayout, arrange, split
from ecemb.engines.device_image import Image, Images
from ecemb.kernels.contract import get_kernels
from ecemb.memory.arena import Arena
from ecemb.memory.header import Constants, State, new_arena_id
from ecemb.memory.journal import ROW_JOURNALS
from ecemb.memory.rank_memory import Geometry, RankMemory
from ecemb.memory.scan import Directory, remove
from ecemb.net.mesh import Channels, Mesh
from ecemb.recovery.background import Background
from ecemb.state import rank_state
from ecemb.step.transaction import OffArenaRows

RANK = 0
STATE_BYTES = 4096
"""Of the rank state's record, which this work leaves as it is."""


class Spent(NamedTuple):
    """Attributes: processor time of all threads, and wall time, both in seconds."""

    core_s: float
    wall_s: float


class Clock:
    """Sums processor time and wall time by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, Spent] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        wall, core = time.perf_counter(), time.process_time()
        yield
        core, wall = time.process_time() - core, time.perf_counter() - wall
        before = self.phases.get(name, Spent(0.0, 0.0))
        self.phases[name] = Spent(before.core_s + core, before.wall_s + wall)


def layouts_of(order: Mapping[str, Any]) -> list[TableLayout]:
    """Tables with a weight of 2 bytes an element, and one number of an optimizer for each row."""
    columns = (Column("weight", "float16", 2 * order["dim"]), Column("sum", "float32", 4))
    tables = [TableLayout(f"t{i}", order["rows"] // order["tables"], columns) for i in range(order["tables"])]
    return [*tables, rank_state.layout(STATE_BYTES)]


def opened(order: Mapping[str, Any], layouts: list[TableLayout]) -> tuple[Arena, Geometry]:
    """A new arena of rank 0, among ranks with equal tables."""
    n, k = order["n"], order["k"]
    placement = Placement.ranks(n, k, n)
    bounds = Addresses(layouts, k).bounds
    block_words = (tuple(b - a for a, b in itertools.pairwise(bounds)),) * n
    geometry = Geometry(placement, block_words, Code(n, k).generator())
    inbox = 1 << 16
    for c, _ in placement.kept(RANK):
        inbox += (8 * class_words(placement, block_words, c) + 8) * k * WORD_BYTES
    journal = sum(one.rows * (3 + one.record_words) for one in map(split, layouts)) * WORD_BYTES
    fixed = {
        "rows": arrange(layouts)[1],
        "parity": parity_words(placement, block_words, RANK) * WORD_BYTES,
    }
    growing = {**dict.fromkeys(ROW_JOURNALS, journal), "inbox": inbox, "parity_journal": 2 * inbox}
    constants = Constants(
        job=order["job"],
        arena_id=new_arena_id(),
        rank=RANK,
        world_size=n,
        n=n,
        k=k,
        positions=placement.positions,
        domains=tuple(f"host{rank}" for rank in range(n)),
        layout_hash="",
        layout="",
        block_words=block_words,
        regions=tuple({**fixed, **growing, "slot0": 1 << 14, "slot1": 1 << 14}.items()),
        fill=1,
    )
    directory = Directory(order["arena_dir"], order["job"], order["host"])
    return Arena.create(directory, constants, fixed, state=State.INIT), geometry


@contextmanager
def removed_at_end(arena: Arena) -> Generator[None]:
    """Removes the arena's file at the end."""
    try:
        yield
    finally:
        arena.close()
        remove(arena.path, force=True)


class _Connected(NamedTuple):
    """A connection in the place of a `Link`."""

    peer: int
    socket: socket.socket

    def release(self) -> socket.socket:
        """Hands the socket over."""
        return self.socket


def connections(count: int) -> tuple[Mesh, Channels]:
    """This process's connections with itself over TCP: 2i sends to 2i + 1."""
    links: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for i in range(count):
            here = socket.create_connection(server.getsockname())
            there, _ = server.accept()
            for peer, one in ((2 * i, here), (2 * i + 1, there)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                links.append(_Connected(peer, one))
    mesh = Mesh(links, 0, 2 * count, 600.0)
    return mesh, mesh.channels()


def windows(order: Mapping[str, Any]) -> dict[str, Any]:
    """Commits windows of changed rows of tables on a "device", and clocks each phase of the host's work."""
    layouts = layouts_of(order)
    arena, geometry = opened(order, layouts)
    with removed_at_end(arena):
        memory = RankMemory(arena, layouts, geometry, get_kernels("cpu", order["threads"]))
        generator = torch.Generator().manual_seed(order["seed"])
        tables = [
            [
                torch.randint(0, 255, (one.rows, column.row_bytes), dtype=torch.uint8, generator=generator)
                for column in one.columns
            ]
            for one in layouts[:-1]
        ]
        images = Images({i: Image(memory.space.tables[i], one) for i, one in enumerate(tables)})
        for image in images.all().values():
            image.fill()
        memory.mark_prepared(0)
        memory.commit(0)
        parts = _parts(order)
        mesh, channels = connections(len(parts))
        found: list[dict[str, Spent]] = []
        for window in range(1, order["windows"] + 2):
            clock = Clock()
            _change(order, images, tables, window)
            _commit(memory, images, channels, parts, window, clock.phase)
            memory._prefault.wait()
            found.append(clock.phases)
        changed_bytes = order["changed"] // order["tables"] * order["tables"] * (2 * order["dim"] + 4)
        answer = {
            "changed_bytes": changed_bytes,
            "windows": [{name: list(spent) for name, spent in one.items()} for one in found[1:]],
            "digest": _digest(arena),
        }
        mesh.close()
    return answer


def _parts(order: Mapping[str, Any]) -> dict[int, range]:
    """Sender -> its blocks whose parity rank 0 keeps."""
    placement = Placement.ranks(order["n"], order["k"], order["n"])
    return {sender: placement.recipients(sender)[RANK] for sender in placement.senders(RANK)}


def _change(order: Mapping[str, Any], images: Images, tables: list[list[torch.Tensor]], window: int) -> None:
    """Changes rows of each table, the same number in each window."""
    generator = torch.Generator().manual_seed(order["seed"] * 1000 + window)
    count = order["changed"] // order["tables"]
    for number, columns in enumerate(tables):
        rows = len(columns[0])
        ids = (torch.arange(count) * (rows / count)).long()  # apart, and others in each window
        ids = (ids + torch.randint(0, rows, (1,), generator=generator)) % rows
        images.mark(number, ids)
        for column in columns:
            noise = torch.randint(0, 255, (count, column.shape[1]), dtype=torch.uint8, generator=generator)
            column[ids] = noise


def _commit(
    memory: RankMemory,
    images: Images,
    channels: Channels,
    parts: Mapping[int, range],
    window: int,
    phase: Callable[[str], AbstractContextManager[None]],
) -> None:
    """The work of `Transactions` from the end of a window's last body to its commit, without agreement."""
    memory.arm(window)
    memory._prefault.wait()
    rows = OffArenaRows(images, Background(), lambda _: nullcontext())
    with phase("take"):
        rows.take(memory.journal)
    changed = rows.hand_over(memory.journal)
    gc.disable()
    with phase("store"):
        rows.store(changed)
    outbox = memory.outbox(changed.journal)
    with phase("delta"):
        memory.lay_out(outbox)
    sent = {s: outbox.words[outbox.edges[b.start] : outbox.edges[b.stop]] for s, b in parts.items()}
    with phase("exchange"):
        inbox = memory.inbox.receive({sender: len(words) for sender, words in sent.items()})
        for i, sender in enumerate(sent):
            if len(sent[sender]):
                channels.send(2 * i, sent[sender])
                channels.expect({2 * i + 1: inbox[sender]})
        channels.run("the exchange")
    with phase("prepare"):
        memory.prepare(window)
    with phase("apply"):
        memory.apply(window)
    memory.commit(window)
    gc.enable()


def _digest(arena: Arena) -> str:
    """Of rows and parity: the same for all numbers of threads, and all commits."""
    total = hashlib.blake2b(digest_size=16)
    for name in ("rows", "parity"):
        total.update(arena.region(name))
    return total.hexdigest()


def copies(order: Mapping[str, Any]) -> dict[str, Any]:
    """Plain copies of as many bytes as a window changes, in order, by one thread."""
    size = order["changed"] * (2 * order["dim"] + 4)
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    found: list[dict[str, Spent]] = []
    for _ in range(order["windows"] + 1):
        clock = Clock()
        with clock.phase("copy"):
            np.copyto(target, source)
        found.append(clock.phases)
    return {"changed_bytes": size, "windows": [{k: list(v) for k, v in one.items()} for one in found[1:]]}


def put(order: Mapping[str, Any]) -> dict[str, Any]:
    """Puts a whole table back from an arena that this process has just attached, beside a plain copy."""
    layouts = layouts_of({**order, "tables": 1})
    arena, _ = opened(order, layouts)
    path, region = arena.path, arena.region("rows")
    noise = np.random.default_rng(order["seed"]).bytes(1 << 20)
    for at in range(0, len(region), len(noise)):
        part = region[at : at + len(noise)]
        part[:] = np.frombuffer(noise, np.uint8)[: len(part)]
    del region
    arena.close()
    size = sum(one.row_bytes for one in layouts[0].columns) * layouts[0].rows
    tensors = [torch.zeros(layouts[0].rows, one.row_bytes, dtype=torch.uint8) for one in layouts[0].columns]
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
    taken: dict[str, list[list[float]]] = {"put-back": [], "plain copy": []}
    for _ in range(order["windows"]):
        gc.collect()
        arena = Arena.attach(path)
        geometry = Geometry(None, ((sum(one.words for one in layouts),),), Code(2, 1).generator())
        memory = RankMemory(arena, layouts, geometry, get_kernels("cpu", order["threads"]))
        for one in tensors:
            one.zero_()
        image = Image(memory.space.tables[0], tensors)
        clock = Clock()
        with clock.phase("put-back"):
            image.put()
        stored = memory.space.tables[0].columns
        same = all(np.array_equal(a, b.numpy()) for a, b in zip(stored, tensors, strict=True))
        with clock.phase("plain copy"):
            np.copyto(target, source)
        for name, spent in clock.phases.items():
            taken[name].append(list(spent))
        del image, memory, stored
        arena.close()
        if not same:
            break
    remove(path, force=True)
    return {"size_bytes": size, "taken": taken, "same": same}


def allocate(order: Mapping[str, Any]) -> dict[str, Any]:
    """Creates an arena when a line comes, as a rank of a fresh host does; when it began and ended."""
    layouts = layouts_of(order)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    core = time.process_time()
    arena, _ = opened(order, layouts)
    ended, core = time.monotonic(), time.process_time() - core
    size = sum(arena.reserved(name) for name in ("rows", "parity"))
    print("made", flush=True)
    sys.stdin.readline()
    with removed_at_end(arena):
        return {"size_bytes": size, "began_s": began, "ended_s": ended, "core_s": core}


WORK = {"windows": windows, "copies": copies, "put": put, "allocate": allocate}


def main() -> None:
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    print(json.dumps(WORK[order["work"]](order)), flush=True)


if __name__ == "__main__":
    main()
