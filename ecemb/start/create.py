"""The creating half of a start: new arenas, their initial content, and the removal of superseded arenas.

`claim_or_create` opens this rank's arena: the arena that survived, or a new one with room for the worst
transaction. `begin` fills new arenas with the model as it is, or from a checkpoint. Invariant: nothing that a
later start could use is removed before the new arenas hold the plan's transaction.

Owns the removal of arenas that a start found and doesn't continue with. `Judgement` decides which arenas
count; an arena is removed only if the arenas of a start have superseded it, or if no start could use it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import contents
from ..checkpoint.interface import CheckpointReader, Stored
from ..checkpoint.saver import shared
from ..checkpoint.transfer import Taking
from ..coding.rows import WORD_BYTES, arrange, split
from ..errors import ConfigurationError, EcembError, InconsistentArenas
from ..kernels.contract import Kernels
from ..memory.arena import Arena, Backing, promised
from ..memory.header import CONSTANTS_OFFSET, Constants, State, page_aligned
from ..memory.journal import PARITY_HEAD_BYTES, ROW_JOURNALS
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
    """One start on this rank: the data of its stages after the agreement on a plan.

    Attributes:
        session: this process's session.
        request: the user's arguments.
        transport: the control group.
        training: the state to protect.
        world: the result of the agreement.
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
        """Whether lost rows and parity are rebuilt beside training."""
        plan = self.world.plan
        return self.request.rebuild == "background" and bool(plan.rebuild) and not plan.encode


def claim_or_create(start: Start, kernels: Kernels) -> RankMemory:
    """Opens the arena that survived, or creates a new one if the plan needs one. All ranks.

    Raises:
        InconsistentArenas: the arenas hold different generators of the code.
        NotEnoughSpace: a new arena doesn't fit.
        PeerFailure: a new arena of a peer doesn't fit; this rank's new arena is removed again.
    """
    session, world = start.session, start.world
    code = start.request.code

    def known() -> list[bytes]:
        if world.plan.begins:
            return [code.generator().tobytes()] if session.rank == 0 else []
        return [] if session.arena is None else [session.arena.region("generator").tobytes()]

    generator = shared_generator(start.transport, code.n, code.k, known)
    geometry = Geometry(world.placement, world.block_words, generator)
    own = None if world.plan.begins else start.earlier
    if own is None:
        make_room(session, world.plan)

    def open_or_create() -> tuple[Arena, Backing | None]:
        session.arena, backing = (own, None) if own is not None else _create(start)
        return session.arena, backing  # in the session, so that an error can close and remove it

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

    After an error before the transaction is prepared, the new arena is removed, as no later start could use
    it, and the session has the arena again that this rank claimed in the rendezvous.

    Args:
        start: this start, whose plan `begins`.
        memory: this rank's new arena, joined.
        content: the new arena's content.

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
    """Removes this rank's new arena, if it has one, and restores `Start.earlier` as the session's arena."""
    session = start.session
    if session.arena is not None and session.arena is not start.earlier:
        session.arena.close()
        session.arena.remove()
    session.arena = start.earlier


def shared_generator(
    transport: Transport, n: int, k: int, known: Callable[[], Sequence[bytes]]
) -> NDArray[np.uint8]:
    """A code's generator, uint8 [n, k], new, from the ranks that know it. All ranks.

    All ranks that know it send it, and all are compared, as wrong coefficients would spoil all parity.

    Args:
        transport: the control group.
        n: total blocks of the code.
        k: data blocks of the code.
        known: returns the generators in the arenas that this rank has, or a new generator.

    Raises:
        InconsistentArenas: the generators differ.
    """
    mine = transport.together("reading the generator", lambda: [text[: n * k] for text in known()])
    each = transport.gather(b"".join(dict.fromkeys(mine)), "sharing the generator")
    first = next(rank for rank, text in enumerate(each) if text)
    generator = each[first][: n * k]
    if differing := [rank for rank, text in enumerate(each) if text not in (b"", generator)]:
        raise InconsistentArenas(
            f"the code's generator in the arenas of ranks {differing} is not that of rank {first}: memory "
            f"is damaged; nothing was written. Remove the arena that is wrong (ecemb arenas rm "
            f"PATH): it counts as lost then, and is rebuilt"
        )
    return np.frombuffer(generator, np.uint8).reshape(n, k).copy()


def _create(start: Start) -> tuple[Arena, Backing | None]:
    """Creates an arena. If rows and parity are rebuilt beside training, their memory is only promised."""
    session = start.session
    constants, reserved = _laid_out(start)
    state = State.INIT if start.world.plan.begins else State.REBUILDING
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
    """Bytes that this rank's new arena takes at once: all regions but slots, journals and inbox."""
    constants, reserved = _laid_out(start)
    head = CONSTANTS_OFFSET + page_aligned(len(constants.encode()))
    return head + sum(map(page_aligned, reserved.values()))


def _laid_out(start: Start) -> tuple[Constants, dict[str, int]]:
    """The constants of a new arena, and the bytes of the regions that are reserved at once; others grow."""
    world, code, placement = start.world, start.request.code, start.world.placement
    _, rows = arrange(world.layouts)
    journal = sum(one.rows * (3 + one.record_words) for one in map(split, world.layouts)) * WORD_BYTES
    inbox = 0
    if placement is not None:
        for stripe_class, _ in placement.kept(start.session.rank):
            members = placement.members(stripe_class)[: placement.k]
            words = sum(world.block_words[rank][block] for block, rank in enumerate(members))
            inbox += 5 * words * WORD_BYTES  # the worst case: single words change, each with its own head
        inbox += (placement.n - 1) * (2 + placement.r * (1 + placement.r)) * WORD_BYTES
    dense = world.dense_bytes(start.training.replicated)
    slot = max(16 * dense + _SLOT_SLACK_BYTES, world.slot_bytes)  # room for the donor's slot
    reserved = {"generator": code.n * code.k, "rows": rows, "parity": world.parity_bytes}
    growing = {
        **dict.fromkeys(ROW_JOURNALS, journal),
        "inbox": inbox,
        "parity_journal": PARITY_HEAD_BYTES + 2 * inbox,
    }
    regions = {**reserved, **growing, "slot0": slot, "slot1": slot}
    return dataclasses.replace(world.constants, regions=tuple(regions.items())), reserved


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
        """Writes rows, rank state, and the slot of the plan's transaction into the new arenas. All ranks."""
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
        """Overwrites rows with rows of another training. All ranks."""
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
            This rank's packed rank state.
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
        """Fills the rows from the checkpoint, or the old arenas, that the plan begins with. All ranks.

        Returns:
            The function that reads replicated state and rank states, and the checkpoint to pass to it.
        """
        reader, world = cast("CheckpointReader", self.start.request.reader), self.start.world
        shared(
            self.start.transport,
            f"reading rows of {stored.name}",
            lambda: contents.restore_rows(reader, stored, self.memory, world.shards, world.sources),
        )
        return reader.read, stored


def _compare_replicas(transport: Transport, replicated: ReplicatedState) -> None:
    """Raises ConfigurationError if the digest of dense state differs between ranks. All ranks."""
    digest = replicated.digest().to_bytes(8, "little")
    if len(set(transport.gather(digest, "comparing replicated state"))) > 1:
        differs = agreement.compare_replicas(replicated.whole(), transport)
        raise ConfigurationError(
            f"dense parameters, buffers or optimizer options differ between ranks ({differs}): "
            f"seed all ranks alike, or broadcast the model from rank 0, before ecemb.protect(); tables "
            f"that you shard by hand belong in tables="
        )


_BLOCK_BYTES = 512  # bytes of a block in `st_blocks`


def make_room(session: Session, plan: RecoveryPlan) -> None:
    """Removes arenas of this host that no start can use, before this start's own are LIVE.

    These are hollow arenas; beside survivors, arenas of replacements that were not rebuilt to the end; and in
    a move, whose old arenas have opened this start's generation, arenas that an earlier move made, which are
    stale from here on.
    """
    for report in _spent(session, plan):
        _remove(session, report)


def room_to_make_bytes(session: Session, plan: RecoveryPlan) -> int:
    """Bytes that `make_room` frees on this host."""
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
    """Removes the arenas that the arenas of this start have superseded on this host.

    Called when recovery has ended on all ranks: the arenas of this start have opened a generation that is
    higher than that of any other arena here, and arenas that can't be read counted as lost.
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
