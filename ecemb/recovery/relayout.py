"""Plans how a job continues with another number of ranks: a pure function of the old arenas' constants.

`plan` decides T, and which old arenas undo and redo, as at any recovery. Then each row of the whole tables
moves once to each new rank that needs it: from the old arena that has it, or, if that is lost, decoded from k
survivors of its stripe. Every rank computes the plan from the same reports and compares its digest with the
others' before anything is written. Must not know: bytes, the network, the use of the rows.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence

from ..coding.placement import Placement
from ..coding.rows import Addresses, TableLayout
from ..errors import InconsistentArenas, LayoutMismatch
from .plan import RecoveryPlan


@dataclasses.dataclass(frozen=True)
class Shard:
    """Rows of a whole table that one rank holds.

    Attributes:
        key: name of the whole table, as in a checkpoint: "{table}"; "{table}/rank{r}" for a table that is
            sharded by hand; "rank_state/{r}".
        layout: layout of these rows.
        start: the first of these rows in the whole table.
    """

    key: str
    layout: TableLayout
    start: int = 0


@dataclasses.dataclass(frozen=True)
class Layout:
    """The rows of all old ranks, including lost ones.

    Attributes:
        placement: who keeps whose parity; None for one rank.
        k: number of data blocks of a rank's row space.
        shards: each rank's shards, in the order of their addresses. Each row of a table is in one shard.
    """

    placement: Placement | None
    k: int
    shards: tuple[tuple[Shard, ...], ...]

    @functools.cached_property
    def addresses(self) -> tuple[Addresses, ...]:
        """Addresses in each rank's row space."""
        return tuple(Addresses([one.layout for one in of_rank], self.k) for of_rank in self.shards)

    @functools.cached_property
    def places(self) -> dict[str, list[tuple[int, int, int]]]:
        """Key -> (first row, rank, number of the shard) of all shards with rows, ascending."""
        found: dict[str, list[tuple[int, int, int]]] = {}
        for rank, of_rank in enumerate(self.shards):
            for number, shard in enumerate(of_rank):
                if shard.layout.words:
                    found.setdefault(shard.key, []).append((shard.start, rank, number))
        return {key: sorted(places) for key, places in found.items()}


@dataclasses.dataclass(frozen=True)
class RowRange:
    """Rows of a whole table of the old layout that a new rank needs.

    Attributes:
        key: name of the whole table, as in `Shard`.
        rows: rows of the whole table.
    """

    key: str
    rows: range


@dataclasses.dataclass(frozen=True)
class Move:
    """Neighbouring rows that move from an old rank to a new rank.

    Attributes:
        key: name of the whole table, as in `Shard`.
        rows: rows of the whole table.
        rank: the old rank that has the rows.
        block: the data block of the old rank's row space that has them, 0..k-1.
        words: the words of their records in that block, counted from the block's start.
        sources: pairs (block, old rank). One pair, of this block and rank, if its memory survived; otherwise
            k survivors of the stripe, in the order of the chain that adds them up.
        target: the new rank.
    """

    key: str
    rows: range
    rank: int
    block: int
    words: range
    sources: tuple[tuple[int, int], ...]
    target: int


@dataclasses.dataclass(frozen=True)
class Relayout:
    """The actions of all ranks at a start with another number of ranks.

    Attributes:
        recovery: the recovery of the old arenas, before anything moves.
        holders: old rank -> the new rank that attaches to its arena; None if the arena is lost.
        slices: slice of the replicated state -> the old rank that sends it to all new ranks.
        moves: runs of rows, each in one block of one old rank; `chunks` cuts them.
        needed_bytes: host -> bytes that its new ranks need beside the old arenas.
    """

    recovery: RecoveryPlan
    holders: tuple[int | None, ...]
    slices: tuple[int, ...]
    moves: tuple[Move, ...]
    needed_bytes: dict[str, int]

    def held(self, rank: int) -> tuple[int, ...]:
        """The old ranks whose arenas new rank `rank` attaches to, ascending."""
        return tuple(old for old, holder in enumerate(self.holders) if holder == rank)

    def path(self, move: Move) -> tuple[int, ...]:
        """The new ranks that a move's bytes pass through: one for each source, then the target."""
        holders = (self.holders[old] for _, old in move.sources)
        return (*(rank for rank in holders if rank is not None), move.target)

    def digest(self) -> bytes:
        """16 bytes that are equal on all ranks exactly if their plans are equal."""
        parts = [dataclasses.asdict(self.recovery), self.holders, self.slices, self.needed_bytes]
        found = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16)
        for move in self.moves:
            found.update(repr(move).encode())
        return found.digest()


def plan_relayout(
    recovery: RecoveryPlan,
    holders: Sequence[int | None],
    old: Layout,
    members: Sequence[str],
    wanted: Sequence[Sequence[RowRange]],
    arena_bytes: Sequence[int],
) -> Relayout:
    """Decides which old rows and slices each new rank receives, and from where. The same on every rank.

    Args:
        recovery: the result of `plan_recovery` for the old arenas.
        holders: old rank -> the new rank that attaches to its arena; None if the arena is lost.
        old: the old layout.
        members: new rank -> its host.
        wanted: new rank -> the rows that it needs.
        arena_bytes: new rank -> bytes of its new arena.

    Raises:
        InconsistentArenas: no new rank attaches to the arena of a survivor.
        LayoutMismatch: no old rank had a row that a new rank needs.
    """
    if free := [rank for rank in recovery.survivors if holders[rank] is None]:
        raise InconsistentArenas(
            f"no worker of this launch attaches to the arenas of ranks {free}, which survived: start workers "
            f"on their hosts, or remove these arenas to count them as lost (ecemb arenas rm)"
        )
    rebuilt = {(one.rank, one.block): one.sources for one in recovery.rebuild}
    moves: list[Move] = []
    for target, ranges in enumerate(wanted):
        for rows in ranges:
            for move in _moves(old, rows, target):
                sources = rebuilt.get((move.rank, move.block), move.sources)
                moves.append(dataclasses.replace(move, sources=_chain(sources, holders, target)))
    needed = dict.fromkeys(sorted(members), 0)
    for host, size in zip(members, arena_bytes, strict=True):
        needed[host] += size
    return Relayout(recovery, tuple(holders), _slices(recovery, old), tuple(moves), needed)


def chunks(moves: Iterable[Move], chunk_words: int) -> Iterator[Move]:
    """Cuts moves at rows, and lets the targets take turns, so that all links are busy.

    Args:
        moves: the moves of a plan.
        chunk_words: the most words of a chunk; a record with more is a chunk of its own.

    Yields:
        The chunks, in the order in which all ranks relay them.
    """
    queues: dict[int, list[Move]] = {}
    for move in moves:
        queues.setdefault(move.target, []).append(move)
    turns = collections.deque(
        itertools.chain.from_iterable(_cut(one, chunk_words) for one in of_target)
        for _, of_target in sorted(queues.items())
    )
    while turns:
        queue = turns.popleft()
        if (chunk := next(queue, None)) is not None:
            yield chunk
            turns.append(queue)


def _cut(move: Move, chunk_words: int) -> Iterator[Move]:
    width = len(move.words) // len(move.rows)
    step = max(1, chunk_words // width)
    for at in range(0, len(move.rows), step):
        rows = move.rows[at : at + step]
        words = move.words[at * width : (at + len(rows)) * width]
        yield dataclasses.replace(move, rows=rows, words=words)


def _chain(
    sources: Iterable[tuple[int, int]], holders: Sequence[int | None], target: int
) -> tuple[tuple[int, int], ...]:
    """Sources in an order in which a chain visits each holder once, and the target last."""

    def place(source: tuple[int, int]) -> tuple[bool, int]:
        holder = holders[source[1]]
        return holder == target, -1 if holder is None else holder

    return tuple(sorted(sources, key=place))


def _slices(recovery: RecoveryPlan, old: Layout) -> tuple[int, ...]:
    """The survivor that sends each slice, chosen evenly. With losses that parity tolerates, there is one."""
    if old.placement is None:
        return (recovery.donor,)
    alive = set(recovery.survivors)
    sent = dict.fromkeys(recovery.survivors, 0)
    found: list[int] = []
    for c in range(old.placement.world_size):
        holders = [rank for rank in old.placement.slice_holders(c) if rank in alive]
        found.append(min(holders, key=lambda rank: (sent[rank], rank)))
        sent[found[-1]] += 1
    return tuple(found)


def _moves(old: Layout, wanted: RowRange, target: int) -> Iterator[Move]:
    """The runs of the wanted rows, each in one block of one old rank, with that rank as the source.

    Raises:
        LayoutMismatch: no old rank had one of the rows.
    """
    reached = wanted.rows.start
    for start, rank, number in old.places.get(wanted.key, ()):
        shard, addresses = old.shards[rank][number], old.addresses[rank]
        first, last = max(start, reached), min(start + shard.layout.rows, wanted.rows.stop)
        if first >= last:
            continue
        if first > reached:
            break
        reached = last
        width, base = shard.layout.record_words, addresses.bases[number]
        for block, (low, high) in enumerate(itertools.pairwise(addresses.bounds)):
            one = max(base + (first - start) * width, low)
            other = min(base + (last - start) * width, high)
            if one < other:
                rows = range(start + (one - base) // width, start + (other - base) // width)
                words = range(one - low, other - low)
                yield Move(wanted.key, rows, rank, block, words, ((block, rank),), target)
    if reached < wanted.rows.stop:
        raise LayoutMismatch(
            f"rows {reached} to {wanted.rows.stop - 1} of {wanted.key!r} are wanted, and row {reached} was "
            f"on no rank of the {len(old.shards)} that held the job: run the script that started it"
        )
