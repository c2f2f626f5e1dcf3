"""A job in one process: real arenas, real protocol code, threads for ranks, and a hub for the network.

Every store to a header's word, every kernel (before it and half-way through it) and every message
is a *moment*, counted for each rank. A rank can be asked to end at any of its moments, as by SIGKILL;
the others then go on as far as they can without it. All this is deterministic: what a rank has done
when it ends depends on the moments chosen and not on the threads' timing. With overlap, a rank is two
threads, with moments of their own: when one is killed, the other stops at its next moment.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import zfec
from numpy.typing import NDArray

from ecemb.coding.code import Code
from ecemb.coding.parity import Delta, blank, class_words, parity_words, size_words
from ecemb.coding.placement import Placement
from ecemb.coding.rows import WORD_BYTES, Addresses, Column, TableLayout, arrange, split
from ecemb.errors import PeerFailure, StepFailed
from ecemb.kernels import contract
from ecemb.kernels.contract import Columns
from ecemb.kernels.reference import Reference, product
from ecemb.memory.arena import Arena
from ecemb.memory.classify import Judgement, classify
from ecemb.memory.header import NONE, Constants, Header, State, new_arena_id
from ecemb.memory.journal import ROW_JOURNALS, ParityJournal
from ecemb.memory.rank_memory import Geometry, RankMemory
from ecemb.memory.scan import Directory
from ecemb.net.collectives import Transport
from ecemb.recovery import state_slices
from ecemb.recovery.execute import Stopwatch, fill, join, recover
from ecemb.recovery.plan import RecoveryPlan, plan_recovery
from ecemb.recovery.state_slices import gathered
from ecemb.state import rank_state
from ecemb.state.flatten import measured
from ecemb.state.replicated import ReplicatedState
from ecemb.step import transaction as transaction_module
from ecemb.step.transaction import Transactions
from ecemb.step.window import Window

Words = NDArray[np.uint64]

WAIT_S = 300
BESIDE = 1000
"""Rank + this stands for the thread of a rank that commits beside the next step's body."""
STATE_BYTES = 40
WIDTH = 160
"""Of the model: enough that its weight is in several slices."""
SMALL = (TableLayout("a", 6, (Column("weight", "float32", 8),)), rank_state.layout(STATE_BYTES))
"""The rows of a rank for whom any rows do."""


class Killed(BaseException):
    """The process of this rank has ended here."""


# --- moments ------------------------------------------------------------------------------------


class Moments:
    """Counts each rank's moments, and ends it at the chosen one.

    Args:
        ends: rank -> the moment at which it is killed.
    """

    def __init__(self, ends: Mapping[int, int]) -> None:
        self.counts = Counter[int]()
        self._dead: set[int] = set()
        self._ends = dict(ends)

    def __call__(self) -> None:
        thread = int(threading.current_thread().name)
        self.counts[thread] += 1
        if self.counts[thread] >= self._ends.get(thread, 2**63):
            self._dead.add(thread % BESIDE)
        if thread % BESIDE in self._dead:
            raise Killed


_moments: Callable[[], None] | None = None


def moment() -> None:
    """The rank whose thread this is may end here."""
    if _moments is not None and threading.current_thread().name.isdigit():
        _moments()


@contextmanager
def watched(moments: Moments) -> Iterator[None]:
    global _moments
    store, store_head = Arena.set, ParityJournal._store

    def set_word(self: Arena, name: str, value: int) -> None:
        moment()
        store(self, name, value)

    def set_head(self: ParityJournal, *word: int) -> None:
        moment()
        store_head(self, *word)

    with mock.patch.object(Arena, "set", set_word), mock.patch.object(ParityJournal, "_store", set_head):
        _moments = moments
        try:
            yield
        finally:
            _moments = None


class Torn(Reference):
    """The reference kernels, in two halves with a moment before each; some runs of rows in two lanes."""

    def lanes(self, rows: int, row_bytes: int) -> int:
        return 1 + rows // 2 % 2

    def _scatter(self, table: Any, ids: Any, records: Any, column: int) -> None:
        for part in halves(ids):
            super()._scatter(table, ids[part], records[part], column)

    def _gather_records(self, columns: Columns, ids: Any, out: Words) -> None:
        for part in halves(ids):
            super()._gather_records(columns, ids[part], out[part])

    def _change_records(self, columns: Columns, ids: Any, old: Words, out: Words) -> None:
        for part in halves(ids):
            super()._change_records(columns, ids[part], old[part], out[part])

    def _gather_rows(self, src: Words, offsets: Any, out: Words) -> None:
        for part in halves(offsets):
            super()._gather_rows(src, offsets[part], out[part])

    def _mul_add_rows(self, dst: Words, offsets: Any, src: Words, weight: int) -> None:
        for part in halves(offsets):
            super()._mul_add_rows(dst, offsets[part], src[part], weight)

    def _update_rows(
        self, dst: Words, offsets: Any, src: Words, weight: int, saved: Words, mark: Any
    ) -> None:
        for offset, row in zip(offsets, src, strict=True):
            number = int(mark[0]) + 1
            for part in halves(row):
                saved[number % 2, : row.size][part] = dst[offset : offset + row.size][part]
            moment()
            mark[0] = number
            for part in halves(row):
                dst[offset : offset + row.size][part] ^= product(weight, row[part])


def halves(items: Any) -> Iterator[slice]:
    half = len(items) // 2
    for part in (slice(0, half), slice(half, None)):
        moment()
        yield part


# --- the network --------------------------------------------------------------------------------


class Hub:
    """Messages between threads. Waiting for one from a rank that has ended raises PeerFailure."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._messages: dict[tuple[object, int, int], list[Any]] = {}
        self._ended: set[int] = set()

    def end(self, rank: int) -> None:
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()

    def put(self, what: object, source: int, to: int, value: Any) -> None:
        with self._changed:
            self._messages.setdefault((what, source, to), []).append(value)
            self._changed.notify_all()

    def take(self, what: object, source: int, to: int) -> Any:
        with self._changed:
            key = (what, source, to)
            arrived = self._changed.wait_for(lambda: self._messages.get(key) or source in self._ended, WAIT_S)
            if not arrived:
                raise TimeoutError(f"rank {to} waits for {what} from rank {source}")
            if not self._messages.get(key):
                raise PeerFailure(f"rank {source} is gone")
            return self._messages[key].pop(0)


_SWAP, _GLOO = "a swap", "over gloo"  # kinds of messages, beside notes


class _Swap:
    """`Channels` over a hub. What comes from a rank in a swap comes at once, with its head."""

    def __init__(self, wires: Wires, send: Mapping[int, Words], heads: Mapping[int, Words]) -> None:
        self._wires, self._unsent, self._wanted = wires, dict(send), dict(heads)
        self._received: dict[int, Words] = {}

    def expect(self, outs: Mapping[int, Words]) -> None:
        self._wanted.update(outs)

    def skip(self, sizes: Mapping[int, int]) -> None:
        for source in sizes:
            self._wanted.pop(source, None)

    def run(self, what: str, *, all_sent: bool = True) -> None:
        for to in list(self._unsent):
            self._wires.send_note(self._unsent[to], to, what, _SWAP)
            del self._unsent[to]
        for source, out in list(self._wanted.items()):
            if source not in self._received:
                self._received[source] = self._wires._hub.take(_SWAP, source, self._wires.rank)
            for part in halves(out):
                out[part] = self._received[source][: len(out)][part]
            self._received[source] = self._received[source][len(out) :]
            del self._wanted[source]


class Wires(Transport):
    """`Transport` over a hub. A message to each rank is sent by itself: some may get it, some not.

    Attributes:
        sent_messages: point to point.
    """

    def __init__(self, hub: Hub, rank: int, size: int) -> None:
        self.rank = rank
        self.world_size = size
        self.fabric = None
        self.sent_bytes = self.sent_messages = 0
        self._exchanges = self._barriers = 0
        self._hub = hub
        self._notes: dict[tuple[int, int], Words] = {}
        self._calls = 0

    def _swap(self, parts: Sequence[Any], what: object) -> list[Any]:
        for to, part in enumerate(parts):
            moment()
            self._hub.put(what, self.rank, to, part)
        return [self._hub.take(what, source, self.rank) for source in range(self.world_size)]

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def all_to_all(self, send: Any, what: str) -> Any:
        return np.stack(self._swap([row.copy() for row in send], self._next()))

    def vote(self, yes: bool, what: str) -> list[bool]:
        return self._swap([yes] * self.world_size, self._next())

    def gather(self, data: bytes, what: str) -> list[bytes]:
        return self._swap([data] * self.world_size, self._next())

    def send_note(self, words: Words, to: int, what: str, tag: object) -> None:
        moment()
        self.sent_bytes, self.sent_messages = self.sent_bytes + words.nbytes, self.sent_messages + 1
        self._hub.put(tag, self.rank, to, words.copy())

    def receive_note(self, out: Words, source: int, what: str, tag: int) -> None:
        if (source, tag) not in self._notes:  # or this is called again, after an interruption
            self._notes[source, tag] = self._hub.take(tag, source, self.rank)
        self._fill(out, self._notes[source, tag])

    def send(self, words: Words, to: int, what: str, tag: int = 0) -> Callable[[], None]:
        """Waits for no receiver: it may have ended."""
        self.send_note(words, to, what, (_GLOO, tag))
        return lambda: None

    def swap(self, send: Mapping[int, Words], heads: Mapping[int, Words]) -> Any:
        return _Swap(self, send, heads)

    def expect(self, out: Words, source: int, what: str, tag: int = 0) -> Callable[[], None]:
        taken: list[Words] = []

        def wait() -> None:
            if not taken:  # or this is called again, after an interruption
                taken.append(self._hub.take((_GLOO, tag), source, self.rank))
            self._fill(out, taken[0])

        return wait

    def _fill(self, out: Words, words: Words) -> None:
        assert len(words) == len(out)
        for part in halves(out):
            out[part] = words[part]


# --- what is trained ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """What a job's ranks hold, and what its steps do to it.

    Attributes:
        placement: who keeps whose parity.
        tables: rank -> its tables.
        seed: of the initial rows and of every step.
        aborts: (step, rank): the rank aborts the step, whenever it is run.
        window: steps of a transaction.
        overlap: whether a transaction is decided beside the next step's body.
    """

    placement: Placement
    tables: tuple[tuple[TableLayout, ...], ...]
    seed: int
    aborts: frozenset[tuple[int, int]] = frozenset()
    window: int = 1
    overlap: bool = False

    @property
    def size(self) -> int:
        return self.placement.world_size

    def layouts(self, rank: int) -> tuple[TableLayout, ...]:
        return (*self.tables[rank], rank_state.layout(STATE_BYTES))

    @functools.cached_property
    def block_words(self) -> tuple[tuple[int, ...], ...]:
        k = self.placement.k
        bounds = [Addresses(self.layouts(rank), k).bounds for rank in range(self.size)]
        return tuple(tuple(np.diff(edges).tolist()) for edges in bounds)

    @functools.cached_property
    def geometry(self) -> Geometry:
        generator = generator_of(Code(self.placement.n, self.placement.k))
        return Geometry(self.placement, self.block_words, generator)

    def kept(self, transaction: int) -> list[int]:
        """The steps up to `transaction` that are not aborted."""
        aborted = {step for step, _ in self.aborts}
        return [step for step in range(transaction) if step not in aborted]

    def initial(self, rank: int, table: int) -> list[NDArray[np.uint8]]:
        rng = np.random.default_rng([self.seed, rank, table])
        layout = self.tables[rank][table]
        return [rng.integers(0, 256, (layout.rows, c.row_bytes), np.uint8) for c in layout.columns]

    def touched(self, rank: int, table: int, step: int) -> list[NDArray[np.int64]]:
        """The rows that a step changes, in two lookups that overlap."""
        rng = np.random.default_rng([self.seed, rank, table, step])
        rows = self.tables[rank][table].rows
        return [np.flatnonzero(rng.random(rows) < 0.4).astype(np.int64) for _ in range(2)]

    def change(self, rows: NDArray[np.uint8], step: int) -> NDArray[np.uint8]:
        """New values: they depend on the old ones, so that a mistake is never overwritten."""
        return rows * np.uint8(3) + np.uint8(step * 7 + 1)

    @functools.cache  # noqa: B019 - a job lives as long as its test
    def expected(self, rank: int, transaction: int) -> Words:
        """The rank's row space after `transaction`, but for the rank state's record."""
        parts: list[bytes] = []
        for table, layout in enumerate(self.tables[rank]):
            columns = self.initial(rank, table)
            for step in self.kept(transaction):
                for ids in self.touched(rank, table, step):
                    for column in columns:
                        column[ids] = self.change(column[ids], step)
            for row in range(layout.rows):
                content = b"".join(column[row].tobytes() for column in columns)
                parts.append(content + bytes(-len(content) % WORD_BYTES))
        return np.frombuffer(b"".join(parts), np.uint64)


def message_of(*deltas: Delta) -> Words:
    """Deltas as they are sent."""
    sizes = [size_words(*delta.words.shape) for delta in deltas]
    out = np.empty(sum(sizes), np.uint64)
    for at, delta in zip(np.cumsum([0, *sizes]), deltas, strict=False):
        laid = blank(out[at:], delta.block, *delta.words.shape)
        laid.offsets[:], laid.words[:] = delta.offsets, delta.words
    return out


def deliver(memory: RankMemory, messages: Mapping[int, Words]) -> None:
    """What each rank sends lies in the inbox of one."""
    sizes = {sender: len(words) for sender, words in messages.items()}
    for sender, words in memory.inbox.receive(sizes).items():
        words[:] = messages[sender]


@functools.cache
def generator_of(code: Code) -> NDArray[np.uint8]:
    return code.generator()


class Position:
    """Stands in for the rank's state: a number that depends on every step that was run."""

    def __init__(self, rank: int) -> None:
        self.value = rank

    def run(self, step: int) -> None:
        self.value = (self.value * 5 + step + 1) % 2**61

    def pack(self) -> bytes:
        return self.value.to_bytes(8, "little")

    def unpack(self, data: bytes, *, positions: bool = True) -> None:
        self.value = int.from_bytes(data, "little")

    def moved(self) -> dict[str, str]:
        return {}


def _name_thread(name: str) -> None:
    threading.current_thread().name = name


class Rank:
    """One rank's process, from its start to its end."""

    def __init__(self, job: Job, memory: RankMemory, wires: Wires) -> None:
        self.job = job
        self.memory = memory
        self.wires = wires
        self.model = torch.nn.Linear(WIDTH, 1)
        self.position = Position(memory.rank)
        self.replicated = ReplicatedState(self.model, [], [])
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0)
        self.transactions = Transactions(
            memory,
            wires,
            self.replicated,
            self.position,  # pyright: ignore
            Window(job.window),
            overlap=job.overlap,
        )
        if job.overlap:
            named = (f"{BESIDE + memory.rank}",)
            self.transactions._thread = ThreadPoolExecutor(1, initializer=_name_thread, initargs=named)
        self.report = None

    def start(self, plan: RecoveryPlan, generation: int) -> None:
        """What `open_memory` does, from the arenas on."""
        join(self.memory, self.wires, generation, generation + 1000)
        if plan.begins:
            self.report = fill(self.memory, self.wires, plan, self._write_initial, Stopwatch())
        else:
            self.report = recover(self.memory, self.wires, plan, Stopwatch())
            self.replicated.load(gathered(self.memory, self.wires), plan.transaction)
        self.wires.barrier("the end of recovery")
        self.position.unpack(rank_state.read(self.memory.rank_state))

    def _write_initial(self) -> None:
        for table in range(len(self.job.tables[self.memory.rank])):
            columns = self.memory.space.tables[table].columns
            for column, values in zip(columns, self.job.initial(self.memory.rank, table), strict=True):
                column[:] = values
        self.replicated.save(self.memory.slots, 0)
        rank_state.write_(self.memory.rank_state, self.position.pack())

    def step(self, body: Callable[[Rank, int], None] | None = None) -> None:
        """What `guard.step()` does, with a user's code in it."""
        step = self.transactions.next_step
        with self._undoing():
            self.transactions.begin()
            self._train(step)
            if body is not None:
                body(self, step)
            if (step, self.memory.rank) in self.job.aborts:
                self.transactions.abort(goes_back=True)
            self.transactions.commit()

    def drain(self) -> None:
        """What `guard.save()` does first."""
        with self._undoing():
            self.transactions.drain()

    @contextmanager
    def _undoing(self) -> Iterator[None]:
        try:
            yield
        except Killed:
            raise
        except BaseException as error:
            if self.transactions.in_flight is not None:
                self.transactions.undo(error)
            raise

    def _train(self, step: int) -> None:
        for table in range(len(self.job.tables[self.memory.rank])):
            for ids in self.job.touched(self.memory.rank, table, step):
                self.transactions.capture(table, ids)
                for column in self.memory.space.tables[table].columns:
                    for part in np.array_split(ids, 2):
                        moment()
                        column[part] = self.job.change(column[part], step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5).add_(step)
        self.position.run(step)


def create(
    directory: Directory,
    rank: int,
    layouts: Sequence[TableLayout],
    geometry: Geometry,
    state: State = State.INIT,
    fill: int = 1,
) -> Arena:
    """A new arena, with room for a step that changes every row."""
    placement, size = geometry.placement, len(geometry.block_words)
    parity, inbox = 0, 1 << 16
    if placement is not None:
        parity = parity_words(placement, geometry.block_words, rank) * WORD_BYTES
        for c, _ in placement.kept(rank):
            longest = class_words(placement, geometry.block_words, c)
            inbox += (8 * longest + 8) * placement.k * WORD_BYTES
    _, rows = arrange(layouts)
    journal = sum(t.rows * (3 + t.record_words) for t in map(split, layouts)) * WORD_BYTES
    fixed = {"rows": rows, "parity": parity}
    growing = {**dict.fromkeys(ROW_JOURNALS, journal), "inbox": inbox, "parity_journal": 2 * inbox}
    n, k = geometry.generator.shape
    constants = Constants(
        job="job",
        arena_id=new_arena_id(),
        rank=rank,
        world_size=size,
        n=n,
        k=k,
        positions=placement.positions if placement is not None else (0,),
        domains=tuple(f"host{r}" for r in range(size)),
        layout_hash="",
        layout="",
        block_words=geometry.block_words,
        regions=tuple({**fixed, **growing, "slot0": 1 << 14, "slot1": 1 << 14}.items()),
        fill=fill,
    )
    return Arena.create(directory, constants, fixed, state=state)


@contextmanager
def alone(root: Path, layouts: Sequence[TableLayout], kernel: str = "reference") -> Iterator[RankMemory]:
    """The memory of a world of one rank: rows and journals, and no parity."""
    geometry = Geometry(None, ((sum(t.words for t in layouts),),), generator_of(Code(2, 1)))
    arena = create(Directory(root, "job", "alone"), 0, layouts, geometry)
    try:
        yield RankMemory(arena, layouts, geometry, contract.get_kernels(kernel))
    finally:
        arena.close()


def begun(memory: RankMemory, wires: Wires, *, overlap: bool = False) -> Transactions:
    """The transactions of a rank that is `alone`, at its fresh start."""
    replicated, position = ReplicatedState(torch.nn.Linear(1, 1), [], []), Position(0)
    replicated.save(memory.slots, 0)
    rank_state.write_(memory.rank_state, position.pack())
    memory.arena.set("prepared", 0)
    memory.commit(0)
    return Transactions(memory, wires, replicated, position, overlap=overlap)  # pyright: ignore


class Machines:
    """Where the arenas of a job lie: one host for each rank.

    Args:
        root: an empty folder.
        job: what is trained.
    """

    def __init__(self, root: Path, job: Job) -> None:
        root.mkdir(exist_ok=True)
        self.root = root
        self.job = job
        self.generation = 0
        self.opened = NONE  # the mark in the store
        self._plan: RecoveryPlan | None = None
        self._planned_from: list[Header] = []  # the headers that this plan is of
        self._directories: dict[int, Directory] = {}

    def copy(self, root: Path) -> Machines:
        """The same job, as it is now, in another place."""
        shutil.copytree(self.root, root)
        other = type(self)(root, self.job)
        other.generation, other.opened = self.generation, self.opened
        return other

    def directory(self, rank: int) -> Directory:
        if rank not in self._directories:
            self._directories[rank] = Directory(self.root, "job", f"host{rank}")
        return self._directories[rank]

    def headers(self) -> list[Header]:
        found = [one for r in range(self.job.size) for one in self.directory(r).scan(timeout_s=0)]
        return [one.header for one in found if one.header is not None]

    def plan(self) -> RecoveryPlan:
        """What the next start would do, if nothing else were lost before it."""
        if self._plan is None:
            self._planned_from = self.headers()
            self._plan = plan_recovery(
                self._planned_from, self.job.placement, started=self.opened != NONE, opened=self.opened
            )
        return self._plan

    def lose(self, rank: int) -> None:
        """The host is gone, with its memory."""
        self._plan = None
        for found in self.directory(rank).scan(timeout_s=0):
            found.path.unlink()

    def run(
        self,
        until: int,
        ends: Mapping[int, int] | None = None,
        body: Callable[[Rank, int], None] | None = None,
    ) -> Life:
        """One start of the job's workers, up to transaction `until`, or as far as they come."""
        self.generation += 1
        plan = self.plan()
        self._plan = None
        judged = classify(self._planned_from, self.opened)
        kept = {header.constants.arena_id for header in judged.survivors}
        hub = Hub(self.job.size)
        geometry = self.job.geometry
        moments = Moments(ends or {})
        ranks: dict[int, Rank] = {}
        begun: list[Rank] = []
        failures: dict[int, BaseException] = {}
        arenas: dict[int, Arena] = {}

        def worker(rank: int) -> None:
            stays = False
            try:
                arenas[rank] = self._open(rank, plan, judged)
                memory = RankMemory(arenas[rank], self.job.layouts(rank), geometry, Torn())
                one = Rank(self.job, memory, Wires(hub, rank, self.job.size))
                begun.append(one)
                one.start(plan, self.generation)
                self.opened = self.generation
                self._discard(rank, kept)
                one.wires.barrier("the start of training")
                ranks[rank] = one
                while True:
                    while one.transactions.next_step < until:
                        one.step(body)
                    one.drain()
                    if one.transactions.next_step >= until:  # else a step of the last window was aborted
                        break
            except Killed as error:
                failures[rank] = error
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                failures[rank] = error
                stays = rank in ranks and not _follows_a_death(error)
            finally:
                if not stays:  # else the process goes on: it has told all others, and none may wait for it
                    hub.end(rank)

        threads = [
            threading.Thread(target=worker, args=(rank,), name=str(rank), daemon=True)
            for rank in range(self.job.size)
        ]
        with watched(moments), mock.patch.object(transaction_module, "end_process", _end_process):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(2 * WAIT_S)
                assert not thread.is_alive(), "a rank hangs"
            for one in begun:
                one.transactions.close()
        begun_arenas = [arena for arena in arenas.values() if arena.header().state is not State.INIT]
        committed = max((arena.get("committed") for arena in begun_arenas), default=-1)
        for arena in arenas.values():
            arena.close()
        return Life(plan, ranks, failures, dict(moments.counts), committed)

    def _discard(self, rank: int, kept: set[str]) -> None:
        """After a recovery, arenas that were stale when it began are of no use to any rank."""
        for found in self.directory(rank).scan(timeout_s=0):
            if found.path.stem not in kept and found.holder is None:
                found.path.unlink()

    def _open(self, rank: int, plan: RecoveryPlan, judged: Judgement) -> Arena:
        directory = self.directory(rank)
        kept = {header.constants.arena_id for header in judged.survivors}
        hollow = {header.constants.arena_id for header in judged.hollow}
        for found in directory.scan(timeout_s=0):
            if found.path.stem in kept and not plan.begins:
                return Arena.attach(found)
            rebuilding = found.header is not None and found.header.state is State.REBUILDING
            if found.torn or found.path.stem in hollow or (rebuilding and not plan.begins):
                found.path.unlink()
        state = State.INIT if plan.begins else State.REBUILDING
        fill = self.generation if plan.begins else judged.survivors[0].constants.fill
        layouts, geometry = self.job.layouts(rank), self.job.geometry
        return create(directory, rank, layouts, geometry, state, fill)

    # --- is everything as it would be without any failure? ---

    @contextmanager
    def memories(self, kernel: str = "reference") -> Iterator[list[RankMemory]]:
        """All ranks' memory as it is, opened by this process while the block lasts."""
        arenas = [Arena.attach(self.directory(r).scan(timeout_s=0)[0]) for r in range(self.job.size)]
        try:
            yield [
                RankMemory(arena, self.job.layouts(rank), self.job.geometry, contract.get_kernels(kernel))
                for rank, arena in enumerate(arenas)
            ]
        finally:
            for arena in arenas:
                arena.close()

    def check(self, transaction: int) -> None:
        """Compares rows, rank state, replicated state and parity of all ranks, byte by byte."""
        with self.memories() as memories:
            dense: dict[int, bytes] = {}  # by the bytes that are in front of the tensors, and by slices
            for rank, memory in enumerate(memories):
                assert memory.arena.header().state is State.LIVE
                assert memory.committed == memory.arena.get("prepared") == transaction
                expected = self.job.expected(rank, transaction)
                rows = memory.space.read(0, len(expected))
                assert np.array_equal(rows, expected), f"rows of rank {rank}"
                position = Position(rank)
                for step in self.job.kept(transaction):
                    position.run(step)
                assert rank_state.read(memory.rank_state) == position.pack(), f"state of rank {rank}"
                for c, part in slices_of(memory, transaction).items():
                    assert dense.setdefault(c, part) == part, f"replicated state of rank {rank}"
            slices = range(memories[0].slots.share.count)
            value = np.float32(1)
            for step in self.job.kept(transaction):
                value = value * np.float32(1.5) + np.float32(step)
            area = b"".join(dense[c] for c in slices)
            assert area == value.tobytes() * WIDTH + value.tobytes().ljust(64, b"\0"), "replicated state"
            check_parity(memories, self.job.placement)


def slices_of(memory: RankMemory, transaction: int) -> dict[int, bytes]:
    """What a rank's slot holds, by slice; -1: what is in front of the slices."""
    slot, share = memory.slots.read(transaction), memory.slots.share
    front_bytes, area_bytes, _ = measured(slot)
    held = state_slices.held(slot[front_bytes:], share, share.edges(area_bytes))
    return {-1: slot[:front_bytes].tobytes(), **{c: words.tobytes() for c, words in held.items()}}


@dataclasses.dataclass(frozen=True)
class Life:
    """What came of one start.

    Attributes:
        plan: what the ranks did first.
        ranks: those that got as far as training.
        failures: rank -> what ended it before its time.
        moments: rank -> how many moments it had.
        committed: the highest transaction that any rank had committed at the end; -1 if none is LIVE yet, as
            an INIT arena alone is ignored.
    """

    plan: RecoveryPlan
    ranks: dict[int, Rank]
    failures: dict[int, BaseException]
    moments: dict[int, int]
    committed: int

    def unexpected(self) -> dict[int, BaseException]:
        """What ended a rank other than its own kill, or that of a peer."""
        return {
            rank: error
            for rank, error in self.failures.items()
            if not isinstance(error, (Killed, KeyboardInterrupt, PeerFailure, StepFailed))
        }


def _follows_a_death(error: BaseException | None) -> bool:
    """Whether it, or what it interrupted, is that a peer is gone: then this process ends as well."""
    while error is not None and not isinstance(error, PeerFailure):
        error = error.__context__
    return error is not None


def _end_process(transaction: int, error: BaseException) -> None:
    raise Killed from error


def check_parity(memories: Sequence[RankMemory], placement: Placement) -> None:
    """All parity is what zfec, or a plain XOR, makes of the rows."""
    for c in range(placement.world_size):
        members = placement.members(c)
        data = [
            memories[rank].space.read(*memories[rank].space.bounds[block : block + 2])
            for block, rank in enumerate(members[: placement.k])
        ]
        for row, words in enumerate(parity_of(data, placement.n)):
            keeper = memories[members[placement.k + row]]
            assert keeper.parity is not None
            assert np.array_equal(keeper.parity.block(c), words), f"parity {row} of class {c}"


def parity_of(data: Sequence[Words], n: int) -> list[Words]:
    """The oracle: zfec's encoder; XOR for one parity block, copies for one data block.

    Args:
        data: a stripe's k data blocks; shorter ones count as padded with zeros.
        n: blocks in the stripe.
    """
    k, size = len(data), max(len(block) for block in data)
    data = [np.concatenate([block, np.zeros(size - len(block), np.uint64)]) for block in data]
    if n - k == 1:
        return [np.bitwise_xor.reduce(np.stack(data))]
    if k == 1:
        return [data[0]] * (n - 1)
    encoded = zfec.Encoder(k, n).encode([block.tobytes() for block in data])
    return [np.frombuffer(bytes(block), np.uint64) for block in encoded[k:]]


# --- jobs to try --------------------------------------------------------------------------------


def job_of(n: int, k: int, size: int, rng: random.Random, rows: int = 9) -> Job:
    """Tables of odd widths, 0 as well, different on every rank; some are empty, some ranks have none."""
    tables: list[tuple[TableLayout, ...]] = []
    for rank in range(size):
        count = 0 if rank == 1 and size > 2 else rng.randrange(1, 3)
        tables.append(
            tuple(
                TableLayout(
                    f"table{i}",
                    rng.choice([0, rng.randrange(1, rows), rows]) if i else rng.randrange(1, rows),
                    tuple(
                        rank_state.Column(f"c{j}", "uint8", rng.choice([0, 2, 4, 6, 8, 12, 20]))
                        for j in range(rng.randrange(1, 4))
                    ),
                )
                for i in range(count)
            )
        )
    positions = tuple(rng.sample(range(size), size))
    return Job(Placement(n, k, positions), tuple(tables), rng.randrange(2**31))
