"""Carries state from the arenas of one number of ranks to the ranks of another, by the plan of `relayout`.

Rows travel in chunks, as records of the old layout. A row of a survivor is sent as it is; a lost row is added
up along a chain of survivors, as in `rebuild`, whose order and bounds hold here as well. Writes to no arena:
what a chunk means at its target is the caller's affair.

Must not know: headers, the layout of the new arenas.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ..coding.code import Code
from ..coding.rows import WORD_BYTES
from ..coding.slices import Share
from ..errors import PeerFailure
from ..group.collectives import Transport
from ..kernels.contract import Kernels, Words
from ..local.rank_memory import RankMemory
from .progress import Progress
from .rebuild import BUFFER_BYTES, CHUNK_WORDS, TOGETHER, Buffer, Wait, chunked, work_through
from .relayout import Layout, Move, Relayout, chunks
from .state_slices import compared, described, held

Land = Callable[[Move, Words], None]
"""Called with a chunk and its records, uint64 [words], which it reads."""

logger: logging.Logger = logging.getLogger("ecemb")

PROCESS_BYTES = 2 * BUFFER_BYTES
"""The most memory of one process for rows on their way: chunks, and the copies of those that it works on."""

_SAY_S = 10.0
_PART = struct.Struct("<qq")  # of one old rank: its number, and the bytes that follow


def carry(
    plan: Relayout,
    old: Layout,
    memories: Mapping[int, RankMemory],
    generator: NDArray[np.uint8],
    transport: Transport,
    kernels: Kernels,
    land: Land,
) -> int:
    """Carries all rows of the plan to the ranks that want them. All ranks.

    Args:
        plan: the same on all ranks.
        old: the old layout.
        memories: old rank -> its memory, at the plan's transaction: those that this worker holds.
        generator: uint8 [n, k], of the old code.
        transport: of the new ranks.
        kernels: for the arithmetic.
        land: takes the chunks that this rank wants.

    Returns:
        Bytes of records that this rank received, its own included.

    Raises:
        PeerFailure: a peer died; the old arenas are as they were.
    """
    weights = _Weights(generator)
    every = chunks(plan.moves, CHUNK_WORDS)
    size = sum(len(move.words) for move in plan.moves if transport.rank in plan.path(move)) * WORD_BYTES
    wanted = sum(len(move.words) for move in plan.moves if move.target == transport.rank) * WORD_BYTES
    received, said = 0, time.monotonic()
    with Progress("moving rows, this rank's part", size, shown=transport.rank == 0) as progress:
        while together := list(itertools.islice(every, TOGETHER)):
            hauls = (_Haul(move, plan, old, memories, weights, transport, kernels, land) for move in together)
            parts = ((haul, 0, len(haul.move.words)) for haul in hauls if haul.place is not None)
            received += work_through(parts, progress)
            transport.barrier("the move of rows")
            if transport.rank == 0 and time.monotonic() > said + _SAY_S:
                said = time.monotonic()
                logger.info(
                    "the move: %d percent of this rank's rows are there", 100 * received // max(1, wanted)
                )
    return received


class _Weights:
    """The factors by which sources add up to a block."""

    def __init__(self, generator: NDArray[np.uint8]) -> None:
        self._generator = generator
        self._code = Code(*generator.shape)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def of(self, move: Move) -> list[int]:
        """In the order of the move's sources; 1 for the block itself."""
        blocks = [block for block, _ in move.sources]
        if move.sources == ((move.block, move.rank),):
            return [1]
        key = (move.block, *blocks)
        if key not in self._known:
            self._known[key] = self._code.decode_weights([move.block], blocks, self._generator)[0].tolist()
        return self._known[key]


class _Haul:
    """One chunk, and this rank's place on its way.

    Attributes:
        move: the chunk.
        place: number of this rank on the way, 0 for the first; None outside of it.
    """

    def __init__(
        self,
        move: Move,
        plan: Relayout,
        old: Layout,
        memories: Mapping[int, RankMemory],
        weights: _Weights,
        transport: Transport,
        kernels: Kernels,
        land: Land,
    ) -> None:
        self.move = move
        self._old, self._memories, self._transport, self._kernels = old, memories, transport, kernels
        self._land = land
        self._what = f"the move of {move.key!r}"
        self._way = [rank for rank, _ in itertools.groupby(plan.path(move))]
        self.place = self._way.index(transport.rank) if transport.rank in self._way else None
        self._weights = weights.of(move)

    def begin(self, words: Words) -> Wait:
        """Starts to receive the sum so far; returns a wait for its arrival."""
        if not self.place:
            return lambda: None
        return self._transport.expect(words, self._way[self.place - 1], self._what)

    def go_on(self, start: int, buffer: Buffer) -> int:
        """Adds the blocks that this worker holds, and passes the sum on; returns the bytes that it keeps."""
        words, place = buffer.words, self.place or 0
        own = list(self._own())
        if not place and len(own) == 1 and own[0][0] == 1 and len(own[0][1]) == len(words):
            words = own[0][1]
        else:
            if not place:
                words[:] = 0
            for weight, block in own:
                self._kernels.mul_add_block_(words[: len(block)], block, weight)
        if place == len(self._way) - 1:
            self._land(self.move, words)
            return words.nbytes
        buffer.sent = self._transport.send(words, self._way[place + 1], self._what)
        return 0

    def _own(self) -> Iterator[tuple[int, Words]]:
        """Weights and words of the sources that this worker holds; a block may end before the chunk."""
        move, placement = self.move, self._old.placement
        stripe_class = -1 if placement is None else placement.stripe_class(move.rank, move.block)
        for (block, rank), weight in zip(move.sources, self._weights, strict=True):
            if (memory := self._memories.get(rank)) is not None:
                yield weight, memory.read_block(stripe_class, block, move.words.start, move.words.stop)


def compare_state(
    plan: Relayout,
    old: Layout,
    memories: Mapping[int, RankMemory],
    transport: Transport,
) -> tuple[int, int]:
    """Compares the replicated state that the old ranks hold. All ranks.

    Args:
        plan: the same on all ranks.
        old: the old layout.
        memories: as for `carry`.
        transport: of the new ranks.

    Returns:
        Its sizes: bytes in front of the tensors, and of the tensors' whole area.

    Raises:
        InconsistentArenas: old ranks hold different states, or a slot is damaged.
        PeerFailure: a peer died, or has a damaged slot.
    """
    recovery = plan.recovery

    def share_of(rank: int) -> Share:
        return Share.of(old.placement, rank)

    def mine() -> bytes:
        parts = {rank: described(one, recovery.transaction, every=True) for rank, one in memories.items()}
        return b"".join(_PART.pack(rank, len(part)) + part for rank, part in parts.items())

    each = transport.gather(transport.together("reading replicated state", mine), "comparing states")
    told = [b""] * len(plan.holders)
    for text in each:
        for rank, part in _parts(text, len(told)):
            told[rank] = part
    count = share_of(recovery.donor).count
    return compared(recovery, told, share_of, lambda c: f"slice {c} of {count}")


def gather_state(
    plan: Relayout,
    memories: Mapping[int, RankMemory],
    transport: Transport,
    front_bytes: int,
    area_bytes: int,
) -> NDArray[np.uint8]:
    """All of the replicated state of the old ranks, on every new rank. All ranks.

    Args:
        plan: the same on all ranks.
        memories: as for `carry`.
        transport: of the new ranks.
        front_bytes: as `compare_state` returns it.
        area_bytes: as `compare_state` returns it.

    Returns:
        uint8, as in a slot that holds all slices.

    Raises:
        PeerFailure: a peer died; the old arenas are as they were.
    """
    recovery, what = plan.recovery, "gathering replicated state"
    state = np.empty(front_bytes + area_bytes, np.uint8)
    front, area = state[:front_bytes].view(np.uint64), state[front_bytes:].view(np.uint64)
    if (donor := memories.get(recovery.donor)) is not None:
        front[:] = donor.slots.read(recovery.transaction)[:front_bytes].view(np.uint64)
    _to_all(front, plan.holders[recovery.donor], transport, what)
    edges = Share(len(plan.slices), ()).edges(area_bytes)
    for c, rank in enumerate(plan.slices):
        words = area[edges[c] // WORD_BYTES : edges[c + 1] // WORD_BYTES]
        if (memory := memories.get(rank)) is not None:
            slot = memory.slots.read(recovery.transaction)
            words[:] = held(slot[front_bytes:], memory.slots.share, edges)[c]
        _to_all(words, plan.holders[rank], transport, what)
    return state


def _parts(text: bytes, size: int) -> Iterator[tuple[int, bytes]]:
    """The descriptions of old ranks in the answer of one worker."""
    at = 0
    while at < len(text):
        rank, length = _PART.unpack(text[at : at + _PART.size])
        at += _PART.size + length
        if not (0 <= rank < size and length >= 0 and at <= len(text)):
            raise PeerFailure(
                "a rank describes replicated state in bytes that can't be read: the network is damaged, or "
                "the ranks run different versions of ecemb; restart the job"
            )
        yield rank, text[at - length : at]


def _to_all(words: Words, source: int | None, transport: Transport, what: str) -> None:
    """Sends words from one rank to all others, in chunks."""
    waits: list[Wait] = []
    for start, stop in chunked(len(words)):
        if transport.rank == source:
            others = (rank for rank in range(transport.world_size) if rank != source)
            waits += [transport.send(words[start:stop], rank, what) for rank in others]
        elif source is not None:
            waits.append(transport.expect(words[start:stop], source, what))
    for wait in waits:
        wait()
