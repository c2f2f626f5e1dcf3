"""Moves a job's memory to another number of ranks: what each worker does, in order.

    plan_move       agrees on what every new rank needs, and on one plan: nothing is written before
    settle          checks the space, and brings the old arenas to one transaction, as in a recovery
    MovedContent    fills new arenas from the old ones, as from a checkpoint at a resume

The new arenas count as soon as one of them is LIVE; the old ones stay unchanged until all are. A failure
before a new arena is LIVE makes the next start move again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..checkpoint import contents
from ..checkpoint.interface import Piece, Stored
from ..checkpoint.transfer import Source
from ..coding.placement import Share
from ..coding.rows import Column, TableLayout
from ..errors import CheckpointFailed, InconsistentArenas, NotEnoughSpace
from ..kernels.contract import Kernels, Words
from ..memory import capacity
from ..memory.arena import Arena
from ..memory.header import NONE, Word, page_aligned
from ..memory.rank_memory import Geometry, RankMemory
from ..net.wording import byte_size, counted
from ..recovery.execute import RecoveryReport
from ..recovery.relay import PROCESS_BYTES, carry
from ..recovery.relayout import Move, Relayout, RowRange, plan_relayout
from ..recovery.state_slices import compare_old, gather_old
from ..state import rank_state as rank_states
from ..state.flatten import in_front, measured, unpacked
from .create import (
    InitialContent,
    Start,
    make_room,
    new_arena_bytes,
    room_to_make_bytes,
    shared_generator,
)
from .history import OldArenas

logger: logging.Logger = logging.getLogger("ecemb")


@dataclasses.dataclass
class Moving:
    """A move, on this worker.

    Attributes:
        old: the old arenas.
        plan: the plan of the move, the same on all ranks.
        generator: generator of the old code, uint8 [n, k].
        memories: old rank -> its memory, for the old arenas that this worker holds.
        state_bytes: sizes of the replicated state: bytes in front of the tensors, and of their whole area.
        undone_rows: number of rows that this worker copied back from journals.
        redone: whether this worker redid the parity of a decided step.
        received_bytes: bytes of rows and replicated state that came to this worker.
    """

    old: OldArenas
    plan: Relayout
    generator: NDArray[np.uint8]
    memories: dict[int, RankMemory] = dataclasses.field(default_factory=dict[int, RankMemory])
    state_bytes: tuple[int, int] = (0, 0)
    undone_rows: int = 0
    redone: bool = False
    received_bytes: int = 0

    def report(self, report: RecoveryReport) -> RecoveryReport:
        """The report of the fill, completed with the facts of the move."""
        return dataclasses.replace(
            report,
            lost=self.plan.recovery.lost,
            undone_rows=self.undone_rows,
            redone=self.redone,
            rebuilt_bytes=self.received_bytes,
            moved_from=self.old.history.world_size,
        )


# --- what moves where ------------------------------------------------------------------------------


def plan_move(start: Start, old: OldArenas) -> Moving:
    """Agrees on the plan of the move. All ranks; nothing is written.

    Raises:
        InconsistentArenas: the old arenas have different generators, or the ranks computed different plans.
        LayoutMismatch: no old rank had a row that is needed.
    """
    session, transport = start.session, start.transport
    mine = [[one.key, one.rows.start, one.rows.stop] for one in _wanted(start, old)]
    text = json.dumps([mine, new_arena_bytes(start)]).encode()
    answers = [json.loads(one) for one in transport.gather(text, "sharing what moves")]
    survivors = session.roster.judgement.survivors
    found = {header.constants.rank: header.constants.arena_id for header in survivors}
    holders = [session.holders.get(found.get(rank, "")) for rank in range(old.history.world_size)]
    plan = plan_relayout(
        old.recovery,
        holders,
        old.layout,
        session.hosts,
        [[RowRange(key, range(first, last)) for key, first, last in wanted] for wanted, _ in answers],
        [size for _, size in answers],
    )
    if len(set(transport.gather(plan.digest(), "comparing moves"))) > 1:
        raise InconsistentArenas(
            "the ranks came to different plans of one move; nothing was written. Do all hosts run the same "
            "version of ecemb?"
        )

    def known() -> list[bytes]:
        return [one.region("generator").tobytes() for one in session.held]

    return Moving(old, plan, shared_generator(transport, old.history.n, old.history.k, known))


def _wanted(start: Start, old: OldArenas) -> list[RowRange]:
    """The rows of the old layout that this rank needs."""
    rank, wanted = start.session.rank, dict[RowRange, None]()
    for shard in start.world.shards:
        rows = range(shard.start, shard.start + shard.layout.rows)
        for column in shard.layout.columns if rows else ():
            for source in start.world.sources[f"{shard.key(rank)}.{column.name}"]:
                wanted[RowRange(source.table, rows)] = None
    states = contents.states_of(old.history.world_size, rank, start.transport.world_size)
    return [*wanted, *(RowRange(f"rank_state/{one}", range(1)) for one in states)]


# --- the old arenas --------------------------------------------------------------------------------


def settle(start: Start, moving: Moving, kernels: Kernels, mark: Callable[[], None]) -> None:
    """Brings the old arenas to one transaction, and makes room for the new ones. All ranks.

    The space is checked first, and nothing is written if there is too little. The old arenas then become
    members of this start's generation, so that an absent arena is stale. Arenas of an earlier move are
    removed only after that: before, a host with that move's only LIVE arena could come back.

    Args:
        start: this start.
        moving: the move; gets the old memories and the size of the replicated state.
        kernels: kernels for the arithmetic.
        mark: sets the job's `started` flag.

    Raises:
        InconsistentArenas: memory is damaged; nothing was moved.
        NotEnoughSpace: a host has no room for old and new arenas at once; nothing was written.
        PeerFailure: a peer died; the next start does this again.
    """
    session, transport, roster = start.session, start.transport, start.session.roster
    recovery = moving.plan.recovery

    def attach() -> None:
        for arena in session.held:
            memory = _opened(arena, moving, kernels)
            moving.memories[memory.rank] = memory

    transport.together("opening the old arenas", attach)
    state_bytes = _most_state_bytes(start, moving)
    transport.together("asking for space", lambda: _check_space(start, moving, state_bytes))
    for memory in moving.memories.values():
        memory.join(roster.generation, roster.generation_id)
    transport.barrier("joining the generation")
    mark()
    for memory in moving.memories.values():
        memory.mark_opened(roster.generation)

    def roll() -> None:
        for memory in moving.memories.values():
            undone, redone = memory.roll_to(recovery.transaction)
            moving.undone_rows += undone
            moving.redone |= redone

    transport.together("undo and redo", roll)
    moving.state_bytes = compare_old(moving.plan, moving.old.layout, moving.memories, transport)
    make_room(session, start.world.plan)
    transport.barrier("making room")


def _opened(arena: Arena, moving: Moving, kernels: Kernels) -> RankMemory:
    history = moving.old.history
    tables = json.loads(arena.constants.layout)["tables"]
    layouts = [*map(TableLayout.from_json, tables), rank_states.layout(history.rank_state_bytes)]
    geometry = Geometry(history.placement, arena.constants.block_words, moving.generator)
    return RankMemory(arena, layouts, geometry, kernels)


def _most_state_bytes(start: Start, moving: Moving) -> tuple[int, int]:
    """The largest sizes in old slots: bytes in front of the tensors, and of their whole area. All ranks."""

    def mine() -> bytes:
        found = [(0, 0)]
        for memory in moving.memories.values():
            labels = {memory.arena.get(word) for word in (Word.SLOT0_LABEL, Word.SLOT1_LABEL)} - {NONE}
            found += [measured(memory.slots.read(label))[:2] for label in labels]
        return json.dumps([max(sizes) for sizes in zip(*found, strict=True)]).encode()

    packed = start.transport.together("reading the size of replicated state", mine)
    each = [json.loads(one) for one in start.transport.gather(packed, "sharing the size of replicated state")]
    return max(one[0] for one in each), max(one[1] for one in each)


def _check_space(start: Start, moving: Moving, state_bytes: tuple[int, int]) -> None:
    """Raises NotEnoughSpace unless this host has memory for the new arenas beside the old ones."""
    session, world = start.session, start.world
    front_bytes, area_bytes = state_bytes
    buffers = Counter(session.hosts)
    needed = dict(moving.plan.needed_bytes)
    for rank, host in enumerate(session.hosts):
        share = Share.of(world.placement, rank)
        needed[host] += page_aligned(front_bytes + share.size_bytes(area_bytes))
    process_bytes = PROCESS_BYTES + front_bytes + area_bytes
    before = counted(moving.old.history.world_size, "rank")
    if session.rank == 0:
        each = ", ".join(f"{byte_size(size)} on {host}" for host, size in sorted(needed.items())[:8])
        logger.info(
            "the memory of %s moves to %s: beside it, new arenas take %s, and each process takes at most %s "
            "until all are there",
            before,
            counted(session.world_size, "rank"),
            each + (", ..." if len(needed) > 8 else ""),
            byte_size(process_bytes),
        )
    host = session.directory.host
    try:
        with session.directory.opened() as fd:
            total = needed[host] + buffers[host] * process_bytes - room_to_make_bytes(session, world.plan)
            capacity.check(max(0, total), fd, Path(session.directory.path))
    except NotEnoughSpace as error:
        raise NotEnoughSpace(
            f"the memory of {before} can't move to {counted(session.world_size, 'rank')}: {error} Old and "
            f"new arenas are there at the same time; the old ones are as they were: launch {before} to go on "
            f"with them, or begin from a checkpoint under another job=, with ecemb.protect(resume=)"
        ) from None


# --- the new arenas --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Into:
    """The destination in this rank's new table of values from an old column.

    Attributes:
        start: the first row of this rank's rows in the whole table.
        values: this rank's values, [rows, width]; overwritten.
        source: selects the old column's values, and their places in `values`.
        column: the old column.
        at: offset of the old column in an old record, in bytes.
    """

    start: int
    values: torch.Tensor
    source: Source
    column: Column
    at: int

    def take(self, rows: range, records: NDArray[np.uint8]) -> None:
        """Copies the values of those of these rows that this rank has.

        Args:
            rows: rows of the whole table.
            records: their old records, uint8 [rows, record bytes]; read.
        """
        low, high = max(rows.start, self.start), min(rows.stop, self.start + len(self.values))
        if low < high and self.column.row_bytes:
            part = records[low - rows.start : high - rows.start, self.at : self.at + self.column.row_bytes]
            values = contents.values_of(self.column, np.ascontiguousarray(part))
            self.values[low - self.start : high - self.start, self.source.into] = values[
                :, self.source.values
            ]


class _Arrivals:
    """Stores rows that come to this rank, and then reads rank states and replicated state as a checkpoint.

    Args:
        content: the content of the new arenas.
    """

    def __init__(self, content: MovedContent) -> None:
        world, memory, self._old = content.start.world, content.memory, content.moving.old
        self._into: dict[str, list[_Into]] = {}
        self._states: dict[int, bytes] = {}
        self._read: dict[str, torch.Tensor] = {}
        old = {one.key: one.layout for of_rank in self._old.layout.shards for one in of_rank}
        for shard, table in zip(world.shards, memory.space.tables, strict=False):
            for column, rows in zip(shard.layout.columns, table.columns, strict=True):
                values = contents.values_of(column, rows)
                for source in world.sources[f"{shard.key(memory.rank)}.{column.name}"]:
                    found = _column(old[source.table], source.column)
                    into = _Into(shard.start, values, source, *found)
                    self._into.setdefault(source.table, []).append(into)

    def on_chunk(self, move: Move, words: Words) -> None:
        """See `ecemb.recovery.relay.carry`."""
        records = words.view(np.uint8).reshape(len(move.rows), -1)
        prefix, _, rank = move.key.rpartition("/")
        if prefix == "rank_state" and move.key not in self._into:
            self._states[int(rank)] = rank_states.read(records[0, : self._old.history.rank_state_bytes])
        for into in self._into.get(move.key, ()):
            into.take(move.rows, records)

    def stored(self, job: str, state: NDArray[np.uint8]) -> Stored:
        """Prepares `read`, and returns the description of the old arenas as a checkpoint.

        Args:
            job: the job's name.
            state: the whole replicated state, uint8 [bytes]; read, also by `read`.
        """
        _, names, tensors = unpacked(state)
        front = torch.from_numpy(in_front(state).copy())
        self._read = {**dict(zip(names, tensors, strict=True)), contents.OUTLINE: front}
        sizes = [len(self._states.get(rank, b"")) for rank in range(self._old.history.world_size)]
        for rank, packed in self._states.items():
            self._read[f"rank_state/{rank}"] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return self._old.stored(job, {"outline_bytes": len(front), "rank_state_bytes": sizes})

    def read(self, stored: Stored, pieces: Sequence[Piece]) -> None:
        """See `CheckpointReader.read`."""
        for piece in pieces:
            if piece.key not in self._read:
                raise CheckpointFailed(
                    f"{stored.name} has no {piece.key!r}: run the script that started the job"
                )
            piece.tensor.copy_(self._read[piece.key])


def _column(layout: TableLayout, name: str) -> tuple[Column, int]:
    """A column, and its offset in a record in bytes."""
    at = 0
    for column in layout.columns:
        if column.name == name:
            return column, at
        at += column.row_bytes
    raise CheckpointFailed(f"table {layout.name!r} in the job's memory has no column {name!r}")


@dataclasses.dataclass(frozen=True)
class MovedContent(InitialContent):
    """The content of new arenas, from the old arenas of another number of ranks.

    Attributes:
        moving: the move, after `settle`.
        kernels: kernels for the arithmetic.
    """

    moving: Moving
    kernels: Kernels

    def fill_rows(self, stored: Stored) -> tuple[contents.Read, Stored]:
        """Fills the rows from the old arenas; see `InitialContent.fill_rows`."""
        moving, transport, memories = self.moving, self.start.transport, self.moving.memories
        arrivals = transport.together("preparing the move", lambda: _Arrivals(self))
        moving.received_bytes += carry(
            moving.plan,
            moving.old.layout,
            memories,
            moving.generator,
            transport,
            self.kernels,
            arrivals.on_chunk,
        )
        state = gather_old(moving.plan, memories, transport, *moving.state_bytes)
        moving.received_bytes += len(state)
        known = transport.together(
            "reading what moved", lambda: arrivals.stored(self.start.session.job, state)
        )
        return arrivals.read, known
