"""The creating half of a start: new arenas, what they are filled with, and the old ones that they supersede.

`claim_or_create` gives this rank its arena: the one that survived, or a new one, laid out with room for the
worst transaction. `begin` fills new arenas with the model as it is, or from a checkpoint. Invariant: nothing
that a later start could use is removed before the new arenas hold the plan's transaction.

Owns the removal of arenas that a start found and doesn't go on with. `Judgement` says what counts; nothing is
removed that the arenas of a start have not superseded, or that could still be of use.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import contents
from ..checkpoint.interface import CheckpointReader, Stored
from ..checkpoint.saver import shared
from ..checkpoint.transfer import Taking
from ..coding.code import Code
from ..coding.parity import parity_words
from ..coding.placement import ALIGN_BYTES, Share
from ..coding.rows import WORD_BYTES, arrange, split
from ..errors import ConfigurationError, EcembError, InconsistentArenas
from ..kernels.contract import Kernels
from ..memory.arena import Arena, Backing, promised
from ..memory.header import CONSTANTS_OFFSET, Constants, State, page_aligned
from ..memory.journal import ROW_JOURNALS
from ..memory.rank_memory import Geometry, RankMemory
from ..memory.scan import remove
from ..net.assignment import Report
from ..net.collectives import Transport
from ..recovery.execute import RecoveryReport, Stopwatch, fill
from ..recovery.plan import RecoveryPlan
from ..session import Session
from ..state import rank_state as rank_states
from ..state.replicated import ReplicatedState
from ..step import agreement
from .agree import World
from .request import Request, Training

logger: logging.Logger = logging.getLogger("ecemb")


_SLOT_SLACK_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Start:
    """One start on this rank: what its stages share once all ranks hold the same plan.

    Attributes:
        session: this process's.
        request: what the user asked for.
        transport: the control group.
        training: what is protected.
        world: what the ranks agreed on.
        watch: wall time by phase.
        earlier: the arena that this rank claimed in the rendezvous; None for a replacement rank.
    """

    session: Session
    request: Request
    transport: Transport
    training: Training
    world: World
    watch: Stopwatch
    earlier: Arena | None

    @property
    def in_background(self) -> bool:
        """Whether what was lost is rebuilt beside training."""
        plan = self.world.plan
        return self.request.rebuild == "background" and bool(plan.rebuild) and not plan.encode


def claim_or_create(start: Start, kernels: Kernels) -> RankMemory:
    """Opens the arena that survived, or creates one where the plan needs a new one. All ranks.

    Raises:
        InconsistentArenas: the arenas hold different generators of the code.
        NotEnoughSpace: a new arena doesn't fit.
        PeerFailure: that of a peer doesn't; this rank's is removed again.
    """
    session, world = start.session, start.world
    generator = _generator(start.request.code, session, start.transport, world.plan)
    geometry = Geometry(world.placement, world.block_words, generator)
    own = None if world.plan.begins else start.earlier
    if own is None:
        make_room(session, world.plan)

    def open_or_create() -> tuple[Arena, Backing | None]:
        session.arena, backing = (own, None) if own is not None else _create(start, geometry)
        return session.arena, backing  # the session closes it, whatever happens next

    try:
        arena, backing = start.transport.together("opening the arenas", open_or_create)
    except Exception:
        _give_up(start)
        raise
    if own is None:
        arena.region("generator")[:] = generator.reshape(-1)
    return RankMemory(arena, world.layouts, geometry, kernels, backing)


def begin(start: Start, memory: RankMemory, content: InitialContent) -> RecoveryReport:
    """Fills new arenas with the plan's transaction. All ranks.

    An error before the transaction is prepared removes the new arena, as no later start could use it, and
    leaves this rank with the arena that it came with.

    Args:
        start: this start, whose plan `begins`.
        memory: this rank's new arena, joined.
        content: what it is filled with.

    Raises:
        EcembError: on all ranks.
    """
    session, transport = start.session, start.transport
    try:
        if not session.roster.judgement.survivors:  # no lock is held yet that another launch could meet
            transport.together(
                "looking for another launch",
                lambda: session.directory.check_alone(session.roster.generation),
            )
        return fill(memory, transport, start.world.plan, content.write, start.watch)
    except Exception:
        if memory.prepared < 0:
            _give_up(start)
        raise


def _give_up(start: Start) -> None:
    """Removes this rank's new arena, if it has one, which no later start could use."""
    session = start.session
    if session.arena is not None and session.arena is not start.earlier:
        session.arena.close()
        session.arena.remove()
    session.arena = start.earlier


def _generator(code: Code, session: Session, transport: Transport, plan: RecoveryPlan) -> NDArray[np.uint8]:
    """The code's generator, from one rank: rank 0 builds it at a fresh start; else the donor's arena has it.

    All survivors show theirs, as wrong coefficients would spoil all parity.
    """
    source = max(plan.donor, 0)

    def own() -> bytes:
        if session.arena is not None and not plan.begins:
            return session.arena.region("generator").tobytes()
        return code.generator().tobytes() if plan.begins and session.rank == source else b""

    each = transport.gather(transport.together("building the generator", own), "sharing the generator")
    differing = [rank for rank, text in enumerate(each) if text and text != each[source]]
    if differing:
        raise InconsistentArenas(
            f"the code's generator in the arenas of ranks {differing} is not that of rank {source}: memory "
            f"is damaged; nothing was written. Remove the arena that is wrong (python -m ecemb arenas rm "
            f"PATH): it counts as lost then, and is rebuilt"
        )
    flat = np.frombuffer(each[source], np.uint8)
    return flat[: code.n * code.k].reshape(code.n, code.k).copy()


def _create(start: Start, geometry: Geometry) -> tuple[Arena, Backing | None]:
    """A new arena. If its rows and parity come beside training, they are promised memory, and have none."""
    session, world = start.session, start.world
    constants, reserved = _laid_out(session, world, geometry, start.training.replicated)
    state = State.INIT if world.plan.begins else State.REBUILDING
    if not start.in_background:
        return Arena.create(session.directory, constants, reserved, state=state), None
    later = [name for name in ("rows", "parity") if reserved.pop(name)]
    promise = promised(session.directory, constants, later)
    try:
        arena = Arena.create(session.directory, constants, reserved, state=state)
    except BaseException:
        promise.end()
        raise
    return arena, Backing(arena, later, promise)


def new_arena_bytes(start: Start) -> int:
    """Memory that this rank's new arena takes at once: all but slots, journals and inbox."""
    session, world = start.session, start.world
    code = start.request.code
    geometry = Geometry(world.placement, world.block_words, np.zeros((code.n, code.k), np.uint8))
    constants, reserved = _laid_out(session, world, geometry, start.training.replicated)
    head = CONSTANTS_OFFSET + page_aligned(len(constants.encode()))
    return head + sum(map(page_aligned, reserved.values()))


def _laid_out(
    session: Session, world: World, geometry: Geometry, replicated: ReplicatedState
) -> tuple[Constants, dict[str, int]]:
    """The constants of a new arena, and the bytes of the regions that are reserved at once."""
    reserved, growing = _sizes(session, world, geometry, replicated)
    regions = tuple({**reserved, **growing}.items())
    return dataclasses.replace(world.constants, regions=regions), reserved


def _sizes(
    session: Session, world: World, geometry: Geometry, replicated: ReplicatedState
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the regions that are reserved at once, and the most that the other regions may grow to."""
    _, rows = arrange(world.layouts)
    journal = sum(one.rows * (3 + one.record_words) for one in map(split, world.layouts)) * WORD_BYTES
    parity = inbox = 0
    if geometry.placement is not None:
        placement = geometry.placement
        parity = parity_words(placement, geometry.block_words, session.rank) * WORD_BYTES
        for stripe_class, _ in placement.kept(session.rank):
            members = placement.members(stripe_class)[: placement.k]
            words = sum(geometry.block_words[rank][block] for block, rank in enumerate(members))
            inbox += 5 * words * WORD_BYTES  # the worst case: single words change, each with its own head
        inbox += (placement.n - 1) * (2 + placement.r * (1 + placement.r)) * WORD_BYTES
    share = Share.of(geometry.placement, session.rank)
    dense = share.size_bytes(-(-replicated.size_bytes // ALIGN_BYTES) * ALIGN_BYTES)
    slot = max(16 * dense + _SLOT_SLACK_BYTES, world.slot_bytes)  # room for the donor's slot
    reserved = {"generator": geometry.generator.size, "rows": rows, "parity": parity}
    growing = {**dict.fromkeys(ROW_JOURNALS, journal), "inbox": inbox, "parity_journal": 2 * inbox}
    return reserved, {**growing, "slot0": slot, "slot1": slot}


@dataclasses.dataclass(frozen=True)
class InitialContent:
    """The content of new arenas: the model as it is, or a checkpoint.

    Attributes:
        start: this start.
        memory: this rank's new arena.
    """

    start: Start
    memory: RankMemory

    def write(self) -> None:
        """Writes rows, rank state, and the slot of the plan's transaction. All ranks."""
        transport, training = self.start.transport, self.start.training
        transaction = self.start.world.plan.transaction
        if self.start.world.stored is None:
            transport.together(
                "initialising the tables",
                lambda: training.tables.place(self.memory.space.tables, fresh=True),
            )
            packed = None
            if self.start.world.taking is not None:
                self._take(self.start.world.taking)
        else:
            packed = self._restore(self.start.world.stored)
        transport.together(
            "saving replicated state", lambda: training.replicated.save(self.memory.slots, transaction)
        )
        _compare_replicas(transport, training.replicated)
        rank_states.write_(self.memory.rank_state, training.rank_state.pack() if packed is None else packed)

    def _take(self, taking: Taking) -> None:
        """Overwrites rows with those of another training. All ranks."""
        start = self.start

        def act() -> str:
            reader, shards = start.request.source(), start.world.shards
            contents.take(reader, taking, self.memory, shards)
            start.training.tables.put()
            return ""

        shared(start.transport, f"reading tables of {taking.stored.name}", act)

    def _restore(self, stored: Stored) -> bytes:
        """Fills rows, and restores dense state and rank state. All ranks.

        Returns:
            This rank's packed state.
        """
        transport, training, memory = self.start.transport, self.start.training, self.memory
        transport.together(
            "placing the tables", lambda: training.tables.place(memory.space.tables, fresh=False)
        )
        read, stored = self.fill_rows(stored)
        parts = memory.rank, transport.world_size, training.replicated, training.rank_state
        scalars: list[bytes] = []

        def act() -> str:
            scalars.append(contents.restore_state(read, stored, *parts))
            training.tables.put()
            return ""

        shared(transport, f"reading {stored.name}", act)
        of_ranks = transport.gather(scalars[0], "sharing the tables' scalars")

        def pack() -> bytes:
            training.rank_state.take_scalars(scalars[0], of_ranks)
            return training.rank_state.pack()

        return transport.together("restoring the tables' scalars", pack)

    def fill_rows(self, stored: Stored) -> tuple[contents.Read, Stored]:
        """Fills the rows from what the plan begins with. All ranks.

        Returns:
            What reads replicated state and rank states, and the checkpoint as that has it.
        """
        reader, world = cast("CheckpointReader", self.start.request.reader), self.start.world
        shared(
            self.start.transport,
            f"reading rows of {stored.name}",
            lambda: contents.restore_rows(reader, stored, self.memory, world.shards, world.sources) or "",
        )
        return reader.read, stored


def _compare_replicas(transport: Transport, replicated: ReplicatedState) -> None:
    """Compares dense state among the ranks, by digest. All ranks."""
    digest = replicated.digest().to_bytes(8, "little")
    if len(set(transport.gather(digest, "comparing replicated state"))) > 1:
        differs = agreement.compare_replicas(replicated.whole(), transport)
        raise ConfigurationError(
            f"dense parameters, buffers or optimizer options differ between ranks ({differs}): "
            f"seed all ranks alike, or broadcast the model from rank 0, before ecemb.protect(); tables "
            f"that you shard by hand belong in tables="
        )


_BLOCK_BYTES = 512  # of `st_blocks`


def make_room(session: Session, plan: RecoveryPlan) -> None:
    """Removes arenas of this host that hold nothing, before this start's own are LIVE.

    Beside survivors, a replacement's arena that was not rebuilt to the end holds nothing new. Beside arenas
    that move and have opened this start's generation, neither do those that an earlier move made: they are
    stale from here on.
    """
    for report in _spent(session, plan):
        _remove(session, report)


def room_to_make_bytes(session: Session, plan: RecoveryPlan) -> int:
    """Memory that `make_room` frees on this host."""
    here = [report.path for report in _spent(session, plan) if report.host == session.directory.host]
    found = [os.stat(path).st_blocks * _BLOCK_BYTES for path in here if os.path.exists(path)]
    return sum(found)


def _spent(session: Session, plan: RecoveryPlan) -> Iterator[Report]:
    """The arenas of all hosts that `make_room` removes."""
    survivors = {header.constants.arena_id for header in session.roster.judgement.survivors}
    half_made = () if plan.begins else (State.REBUILDING,)
    if plan.kind == "move":
        half_made = (State.INIT, State.REBUILDING)
    spent = {header.constants.arena_id for header in session.roster.judgement.hollow}
    for report in session.roster.reports:
        header = report.header
        if header is None:
            hollow = report.torn
        else:
            name = header.constants.arena_id
            hollow = name in spent or (header.state in half_made and name not in survivors)
        if hollow:
            yield report


def discard_superseded(session: Session) -> None:
    """Removes what the arenas of this start have superseded on this host; all of them are LIVE.

    They have opened a generation that is higher than every other arena's here has joined, and what can't be
    read counted as lost.
    """
    kept = {header.constants.arena_id for header in session.roster.judgement.survivors}
    for report in session.roster.reports:
        if report.header is None or report.header.constants.arena_id not in kept:
            _remove(session, report)


def _remove(session: Session, report: Report) -> None:
    if report.host == session.directory.host:
        try:
            remove(Path(report.path))
        except EcembError as error:
            logger.warning("%s", error)
