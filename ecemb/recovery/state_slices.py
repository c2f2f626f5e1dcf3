"""Replicated state after a failure: compared among its holders, copied to replacements, and gathered.

Each rank's slots hold a share of its slices (`ecemb.coding.placement`). `copy_lost` sends replacement ranks
their slices, before they are LIVE. Each slice is then on all of its holders, and `gathered` sends all slices
to all ranks, in a number of rounds that grows with the logarithm of the number of ranks; an abort calls it as
well. `compare_old` and `gather_old` do the same in a move to another number of ranks, with the old ranks'
slots.

Must not know: headers, and the content of the state.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..coding.placement import ALIGN_BYTES, Placement, Share, runs
from ..coding.rows import WORD_BYTES
from ..errors import InconsistentArenas
from ..kernels.contract import Words
from ..memory.rank_memory import RankMemory, StateCopy, StateStore
from ..net.collectives import Transport
from ..state.flatten import measured
from .plan import RecoveryPlan
from .relay import Wait, chunked
from .relayout import Layout, Relayout

_FRONT = -1  # stands for the outline and numbers in front of the slices, among the numbers of slices


def compare(memory: RankMemory, transport: Transport, plan: RecoveryPlan) -> tuple[int, int]:
    """Compares the survivors' slots of the plan's transaction. All ranks.

    Returns:
        Sizes of the state: bytes in front of the tensors, and bytes of the tensors' whole area.

    Raises:
        InconsistentArenas: survivors hold different states, or a slot is damaged.
        PeerFailure: a peer died, or has a damaged slot.
    """
    is_lost = memory.rank in plan.lost
    own = transport.together(
        "reading replicated state", lambda: [] if is_lost else described(memory, plan.transaction)
    )
    texts = transport.gather(json.dumps(own).encode(), "comparing replicated state")
    answers = [json.loads(text) for text in texts]
    return compared(plan, answers, memory.geometry.placement, lambda c: _named(memory, plan, c))


def copy_lost(
    memory: RankMemory, transport: Transport, plan: RecoveryPlan, front_bytes: int, area_bytes: int
) -> int:
    """Copies the lost ranks' shares from the survivors' slots of the plan's transaction. All ranks.

    Args:
        memory: this rank's memory.
        transport: the control group.
        plan: the plan, the same on all ranks.
        front_bytes: bytes in front of the tensors, as `compare` returns them.
        area_bytes: bytes of the tensors' whole area, as `compare` returns them.

    Returns:
        Bytes that this rank received.

    Raises:
        NotEnoughSpace: the slot doesn't fit in this rank's arena.
        PeerFailure: a peer died; the next start copies again.
    """
    what, share = "copying replicated state", memory.slots.share
    edges, shares = share.edges(area_bytes), {rank: memory.share_of(rank) for rank in plan.survivors}
    is_lost, size_bytes = memory.rank in plan.lost, front_bytes + share.size_bytes(area_bytes)
    slot = memory.slots.open(plan.transaction, size_bytes) if is_lost else memory.slots.read(plan.transaction)
    parts = {_FRONT: slot[:front_bytes].view(np.uint64), **held(slot[front_bytes:], share, edges)}
    front = _FRONT, 0, len(parts[_FRONT]), plan.donor
    waits: list[Wait] = []
    for rank in plan.lost:
        for part, start, stop, source in (front, *_routes(shares, memory.share_of(rank), edges)):
            if rank == memory.rank:
                waits.append(transport.expect(parts[part][start:stop], source, what))
            elif source == memory.rank:
                waits.append(transport.send(parts[part][start:stop], rank, what))
    _wait(waits)
    if not is_lost:
        return 0
    memory.slots.seal(plan.transaction)
    return len(slot)


def gathered(memory: RankMemory, transport: Transport) -> StateStore:
    """The whole replicated state of the last committed transaction, from the slots of all ranks. All ranks.

    Returns:
        This rank's slots, if they hold the whole state; otherwise a copy in this process's memory.

    Raises:
        InconsistentArenas: this rank's slot is damaged.
        PeerFailure: a peer died, or has a damaged slot.
    """
    share, placement = memory.slots.share, memory.geometry.placement
    if placement is None or share.is_whole:
        return memory.slots
    what = "gathering replicated state"

    def begun() -> tuple[NDArray[np.uint8], int]:
        slot, front_bytes, area_bytes = _read(memory, memory.committed)
        state, edges = np.empty(front_bytes + area_bytes, np.uint8), share.edges(area_bytes)
        state[:front_bytes] = slot[:front_bytes]
        area = state[front_bytes:].view(np.uint64)
        for c, words in held(slot[front_bytes:], share, edges).items():
            area[edges[c] // WORD_BYTES : edges[c + 1] // WORD_BYTES] = words
        return state, front_bytes

    state, front_bytes = transport.together(f"{what}: this rank's", begun)
    area, edges = state[front_bytes:].view(np.uint64), share.edges(len(state) - front_bytes)
    ranks, position, size = placement.order, placement.positions[memory.rank], placement.world_size
    have = len(share.held)
    while have < size:  # each position has slices position - have + 1 .. position now
        more = min(have, size - have)
        source, to = ranks[(position - have) % size], ranks[(position + have) % size]
        lower = _chunks_of(area, edges, range(position - have - more + 1, position - have + 1))
        upper = _chunks_of(area, edges, range(position - more + 1, position + 1))
        waits = [transport.expect(words, source, what) for words in lower]
        _wait([*waits, *(transport.send(words, to, what) for words in upper)])
        have += more
    return StateCopy(state)


def compare_old(
    plan: Relayout, old: Layout, memories: Mapping[int, RankMemory], transport: Transport
) -> tuple[int, int]:
    """Compares the replicated state in the slots of the old ranks. All ranks.

    Args:
        plan: the plan, the same on all ranks.
        old: the old layout.
        memories: old rank -> its memory at the plan's transaction, for the arenas that this worker holds.
        transport: the control group of the new ranks.

    Returns:
        Sizes of the state: bytes in front of the tensors, and bytes of the tensors' whole area.

    Raises:
        InconsistentArenas: old ranks hold different states, or a slot is damaged.
        PeerFailure: a peer died, or has a damaged slot.
    """
    recovery = plan.recovery

    def mine() -> list[tuple[int, list[int]]]:
        return [(rank, described(one, recovery.transaction, every=True)) for rank, one in memories.items()]

    own = transport.together("reading replicated state", mine)
    texts = transport.gather(json.dumps(own).encode(), "comparing states")
    answers: list[list[int]] = [[]] * len(plan.holders)
    for rank, part in itertools.chain.from_iterable(map(json.loads, texts)):
        answers[rank] = part
    return compared(recovery, answers, old.placement, lambda c: f"slice {c} of {len(plan.slices)}")


def gather_old(
    plan: Relayout,
    memories: Mapping[int, RankMemory],
    transport: Transport,
    front_bytes: int,
    area_bytes: int,
) -> NDArray[np.uint8]:
    """Sends the whole replicated state of the old ranks to every new rank. All ranks.

    Args:
        plan: the plan, the same on all ranks.
        memories: as for `compare_old`.
        transport: the control group of the new ranks.
        front_bytes: bytes in front of the tensors, as `compare_old` returns them.
        area_bytes: bytes of the tensors' whole area, as `compare_old` returns them.

    Returns:
        The state as in a slot with all slices: uint8 [bytes], new.

    Raises:
        PeerFailure: a peer died; the old arenas are unchanged.
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


def _read(memory: RankMemory, transaction: int) -> tuple[NDArray[np.uint8], int, int]:
    """This rank's slot of a transaction, bytes in front of the tensors, and bytes of the tensors' whole area.

    Raises:
        InconsistentArenas: the slot is damaged, or its size doesn't fit its share.
    """
    slot = memory.slots.read(transaction)
    front_bytes, area_bytes, _ = measured(slot)
    if len(slot) != (size := front_bytes + memory.slots.share.size_bytes(area_bytes)):
        raise InconsistentArenas(
            f"a slot with slices of replicated state has {len(slot)} bytes, and needs {size}: the arena's "
            f"memory is damaged. {memory.arena.way_out}"
        )
    return slot, front_bytes, area_bytes


def described(memory: RankMemory, transaction: int, *, every: bool = False) -> list[int]:
    """This rank's slot, described for `compared`: its two sizes, and checksums of the slices in it.

    There are no checksums if each rank holds all slices, as each rank then restores its own: the end of the
    first step compares the ranks.

    Args:
        memory: a survivor's memory.
        transaction: the transaction from which all ranks continue.
        every: whether to return checksums in any case, as ranks restore slices of other ranks.
    """
    slot, front_bytes, area_bytes = _read(memory, transaction)
    share = memory.slots.share
    slices = held(slot[front_bytes:], share, share.edges(area_bytes))
    checksums = [] if share.is_whole and not every else [zlib.crc32(slices[c].data) for c in share.held]
    return [front_bytes, area_bytes, *checksums]


def compared(
    plan: RecoveryPlan,
    answers: Sequence[Sequence[int]],
    placement: Placement | None,
    named: Callable[[int], str],
) -> tuple[int, int]:
    """Compares the descriptions of the survivors' slots.

    Args:
        plan: the recovery plan of these ranks.
        answers: rank -> the result of `described`; empty for lost ranks.
        placement: the placement, which decides the slices of each rank; None for one rank.
        named: number of a slice -> text for an error message.

    Returns:
        Sizes of the state: bytes in front of the tensors, and bytes of the tensors' whole area.

    Raises:
        InconsistentArenas: survivors have different sizes or slices.
    """
    front_bytes, area_bytes = sizes = answers[plan.donor][:2]
    if any(size < 0 or size % ALIGN_BYTES for size in sizes):
        raise InconsistentArenas(
            f"rank {plan.donor} announces replicated state of {sizes} bytes: the network is "
            f"damaged, or the ranks run different versions of ecemb; restart the job"
        )
    known: dict[int, tuple[int, int]] = {}  # slice -> its first holder, and the checksum there
    for rank in plan.survivors:
        if answers[rank][:2] != sizes:
            raise _differing(plan, plan.donor, rank, "its names, shapes or options")
        for c, checksum in zip(Share.of(placement, rank).held, answers[rank][2:], strict=False):
            holder, first = known.setdefault(c, (rank, checksum))
            if first != checksum:
                raise _differing(plan, holder, rank, named(c))
    return front_bytes, area_bytes


def _named(memory: RankMemory, plan: RecoveryPlan, c: int) -> str:
    """Text with a slice's number, and on survivors with the names of its first and last tensor."""
    text = f"slice {c} of {memory.slots.share.count}"
    if memory.rank in plan.lost:
        return text
    _, area_bytes, places = measured(memory.slots.read(plan.transaction))
    start, stop = memory.slots.share.edges(area_bytes)[c : c + 2]
    first = [name for name, at in places if at <= start][-1]
    names = [first, *(name for name, at in places if start < at < stop)]
    return f"{text}, which is of {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else "")


def _differing(plan: RecoveryPlan, one: int, other: int, what: str) -> InconsistentArenas:
    return InconsistentArenas(
        f"ranks {one} and {other} hold different replicated state (dense parameters, buffers, optimizer "
        f"state) after step {plan.transaction - 1}, in {what}: the ranks had trained apart, or memory is "
        f"damaged. Remove the arena that is wrong (ecemb arenas rm PATH): it counts as lost then, "
        f"and is rebuilt. Or resume from a checkpoint: ecemb.protect(resume=)"
    )


def held(slices: NDArray[np.uint8], share: Share, edges: Sequence[int]) -> dict[int, Words]:
    """The slices in a slot: number -> words, uint64, views.

    Args:
        slices: the slot's bytes behind the outline and numbers, uint8.
        share: the share of slices in the slot.
        edges: the bounds of all slices in the tensors' area, in bytes.
    """
    sizes = [edges[c + 1] - edges[c] for c in share.held]
    starts = itertools.accumulate(sizes, initial=0)
    return {
        c: slices[at : at + size].view(np.uint64)
        for c, at, size in zip(share.held, starts, sizes, strict=False)
    }


def _routes(
    shares: dict[int, Share], share: Share, edges: Sequence[int]
) -> Iterator[tuple[int, int, int, int]]:
    """The chunks that a lost rank receives, in order: (slice, start and stop in its words, source rank)."""
    for c in share.held:
        holders = itertools.cycle([rank for rank, one in shares.items() if c in one.held])
        words = (edges[c + 1] - edges[c]) // WORD_BYTES
        for (start, stop), source in zip(chunked(words), holders, strict=False):
            yield c, start, stop, source


def _chunks_of(area: Words, edges: Sequence[int], slices: Iterable[int]) -> Iterator[Words]:
    """The words of some slices, whose numbers count modulo all slices, in chunks: views."""
    for run in runs(edges, [c % (len(edges) - 1) for c in slices]):
        words = area[run.start // WORD_BYTES : run.stop // WORD_BYTES]
        yield from (words[start:stop] for start, stop in chunked(len(words)))


def _wait(waits: Iterable[Wait]) -> None:
    for wait in waits:
        wait()


def _to_all(words: Words, source: int | None, transport: Transport, what: str) -> None:
    """Sends words from one rank to all others, in chunks. All ranks.

    Args:
        words: uint64; read on the source, overwritten on all other ranks.
        source: the rank that sends.
        transport: the control group.
        what: name of the wait in errors.
    """
    waits: list[Wait] = []
    for start, stop in chunked(len(words)):
        if transport.rank == source:
            others = (rank for rank in range(transport.world_size) if rank != source)
            waits += [transport.send(words[start:stop], rank, what) for rank in others]
        elif source is not None:
            waits.append(transport.expect(words[start:stop], source, what))
    _wait(waits)
