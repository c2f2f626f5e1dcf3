"""Opens this rank's memory: agree, then start fresh, recover, or resume from a checkpoint.

The collective first half of `ecemb.protect`. Every check that can fail on one rank alone runs through
`Transport.together`, so that it fails on all; nothing is written before all ranks hold the same plan.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from . import durable, kernels, rankstate, replicas
from .adapters.tables import Tables, find
from .agreement import ParityBackend, Request, World, agree
from .arena import Arena
from .buckets import GradientBuckets, check_apart, found_in
from .checkpoint import CheckpointReader, Stored
from .code import Code
from .durable import Job
from .errors import ConfigurationError, EcembError, InconsistentArenas
from .header import State
from .journal import ROW_JOURNALS
from .leftovers import discard_superseded, make_room
from .memory import Geometry, RankMemory
from .optimizers import NamedOptimizers
from .parity import parity_words
from .plan import RecoveryPlan
from .rankstate import RankState, objects_of
from .recovery import RecoveryReport, Stopwatch, fill, headline, join, recover, tell
from .rendezvous import Session
from .replicated import ReplicatedState
from .rows import WORD_BYTES, arrange
from .saver import Saver, name_of, shared
from .survey import Surveyed, survey
from .transport import Fabric, Transport

logger: logging.Logger = logging.getLogger("ecemb")

_SLOT_SLACK_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Opened:
    """This rank's memory, live, with everything that a transaction needs."""

    memory: RankMemory
    transport: Transport
    tables: Tables
    optimizers: NamedOptimizers
    replicated: ReplicatedState
    rank_state: RankState
    saver: Saver
    report: RecoveryReport


def open_memory(session: Session, request: Request) -> Opened:
    """Opens the memory of this rank. All ranks.

    Raises:
        EcembError: any of the tree; on all ranks if on one.
    """
    watch, session.whereabouts.place = Stopwatch(), "in ecemb.protect()"
    with watch.phase("agree"):
        transport = _control_group(session)
        tables, named, buckets, replicated, rank_state, state_bytes = transport.together(
            "checking the model and its optimizers", lambda: _checked(request)
        )
        world = agree(session, request, transport, tables, state_bytes)
    if session.check is not None:
        raise Surveyed(survey(session, request, transport, tables, replicated, world))
    with watch.phase("kernels"):
        cpu = kernels.get("cpu", torch.get_num_threads())
    before = session.arena
    if request.parity_backend != "gloo" and world.placement is not None:
        with watch.phase("fabric"):
            transport.fabric = _fabric(session, request.parity_backend, transport)
    with watch.phase("attach"):
        memory = _memory(session, request, transport, world, replicated, cpu)
        rank_state.room_bytes = len(memory.rank_state)
        generation, generation_id = session.roster.generation, session.roster.generation_id
        join(memory, transport, generation, generation_id, lambda: _mark_opened(session, world.plan))
    if world.plan.begins:
        initial = _Initial(request, world, memory, transport, tables, rank_state, replicated)
        try:
            if not session.roster.judgement.survivors:  # no lock is held yet that another launch could meet
                transport.together(
                    "looking for another launch", lambda: session.directory.check_alone(generation)
                )
            report = fill(memory, transport, world.plan, initial.write, watch)
        except EcembError:
            if memory.arena.get("prepared") < 0:  # it holds nothing that the next start would use
                memory.arena.remove()
                session.arena = before
            raise
    else:
        transport.together("pointing to the tables", lambda: tables.place(memory.space.tables, fresh=False))
        with tables.putter(memory.space) as putter:
            report = recover(memory, transport, world.plan, cpu, watch, putter.ready)
            with watch.phase("restore"):
                transport.together("bringing images to their tables", putter.finish)
                tables.note()
    transport.barrier("the end of recovery")
    if before is not None and before is not memory.arena:  # what survived was not enough
        before.close()
        try:
            before.remove()
        except EcembError as error:
            logger.warning("%s", error)
    session.marks.set("started", str(session.roster.generation))
    discard_superseded(session)
    transport.barrier("the start of training")  # nobody trains before all have finished
    if world.plan.kind != "fresh":
        _warn_of_next_loss(session, world)
        with watch.phase("restore"):
            _restore(memory, transport, buckets, replicated, rank_state)
    job = Job(session.job, world.lineage, (request.code.n, request.code.k))
    saver = Saver(
        job,
        memory,
        transport,
        replicated,
        world.shards,
        lambda: _control_group(session),
        tables.listen,
    )
    saver.keep_in_mind(request.reader)
    if session.rank == 0 and world.stored is not None:
        _tell_of_resumption(session, request, world, world.stored)
    tell(memory, report)
    request.window.take_up(memory.arena, transport, len(set(session.hosts)))
    level = logging.WARNING if report.lost else logging.INFO
    if session.rank != 0 and session.rank not in report.lost:
        level = logging.DEBUG
    logger.log(level, "rank %d: %s", session.rank, headline(report))
    logger.debug("rank %d: %s", session.rank, report)
    return Opened(memory, transport, tables, named, replicated, rank_state, saver, report)


def _mark_opened(session: Session, plan: RecoveryPlan) -> None:
    """Tells the store which generation is opened, so that it knows even if no arena of it is seen again.

    A start with new arenas is opened when all of them are LIVE: until then, what was there before counts.
    """
    if not plan.begins:
        session.marks.set("started", str(session.roster.generation))


def _restore(
    memory: RankMemory,
    transport: Transport,
    buckets: GradientBuckets,
    replicated: ReplicatedState,
    rank_state: RankState,
) -> None:
    """Puts back what is not rows, and gradient buckets, whose rehearsal comes before the rest. All ranks.

    It runs the hooks of gradients, the user's and DistributedDataParallel's: they may draw, count, and step
    optimizers. The buckets' orders are scalars.
    """
    packed = transport.together("reading rank state", lambda: rankstate.read(memory.rank_state))
    transport.together("restoring scalars", lambda: rank_state.unpack_scalars(packed))
    counts = bytes(len(orders) for orders in buckets.state())
    if len(set(transport.gather(counts, "comparing gradient buckets"))) == 1 and any(counts):
        buckets.rehearse()
    transport.together("restoring dense state", lambda: replicated.load(memory.slots, memory.committed))
    transport.together("restoring rank state", lambda: rank_state.unpack(packed))  # nothing may draw after it


def _control_group(session: Session) -> Transport:
    patience = datetime.timedelta(seconds=session.patience_s)
    group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=patience))
    transport = Transport(group, session.patience_s)
    transport.whereabouts = session.whereabouts
    return transport


def _fabric(session: Session, backend: ParityBackend, transport: Transport) -> Fabric:
    device, name = transport.together("looking for a device", lambda: _device(backend))
    used = transport.gather(name, "comparing devices")
    if shared_by := [rank for rank, one in enumerate(used) if used.count(one) > 1]:
        raise ConfigurationError(
            f"parity_backend={backend!r} needs a device of its own for each rank, and ranks {shared_by} "
            f"share theirs: call torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count()) before "
            f"ecemb.protect(), or leave parity_backend out"
        )
    patience = datetime.timedelta(seconds=session.patience_s)
    group = cast("dist.ProcessGroup", dist.new_group(backend=backend, timeout=patience))
    return Fabric(group, device, session.patience_s)


def _device(backend: ParityBackend) -> tuple[torch.device, bytes]:
    """Where a backend's messages are sent from, and a name that no other device has."""
    if torch.cuda.is_available() and dist.is_backend_available(backend):
        device = torch.device("cuda", torch.cuda.current_device())
        return device, str(torch.cuda.get_device_properties(device).uuid).encode()
    raise ConfigurationError(
        f"parity_backend={backend!r} needs a CUDA device for each rank and a torch that was built with "
        f"{backend}; one of them is missing here: leave parity_backend out, and deltas go over gloo"
    )


def _checked(
    request: Request,
) -> tuple[Tables, NamedOptimizers, GradientBuckets, ReplicatedState, RankState, int]:
    tables, optimizers = find(request.model, request.modules, request.optimizers)
    _check_state(objects_of(request.state), tables.parameters)
    averaged = found_in(request.model, tables.averaged)
    check_apart(averaged, tables.parameters)
    buckets = GradientBuckets([*averaged, *tables.averaged])
    replicated = ReplicatedState(request.model, optimizers, tables.parameters, tables.aside)
    every = [*request.optimizers, *optimizers]
    named = NamedOptimizers(request.model, tables.stepped, tables.parameters, every, request.without)

    def scalars() -> dict[str, Any]:
        return {"tables": tables.state(), "buckets": buckets.state()}

    def set_scalars(state: dict[str, Any]) -> None:
        tables.set_state(state["tables"])
        buckets.set_state(state["buckets"])

    rank_state = RankState(request.state, scalars, set_scalars)
    return tables, named, buckets, replicated, rank_state, rankstate.room(len(rank_state.pack()))


def _check_state(state: Mapping[str | int, object], own: Sequence[nn.Parameter]) -> None:
    """Refuses what would overwrite tables, and their optimizers' state, when it comes back."""
    tables = {id(parameter) for parameter in own}
    for key, item in state.items():
        held: list[Any] = []
        way_out = "leave it out, model= is saved anyway"
        if isinstance(item, nn.Module):
            held = list(item.parameters())
        elif isinstance(item, torch.optim.Optimizer):
            held = [parameter for group in item.param_groups for parameter in group["params"]]
            way_out = "name it in optimizers= alone"
        if any(id(parameter) in tables for parameter in held):
            raise ConfigurationError(
                f"state= object {key!r} ({type(item).__name__}) holds parameters of protected tables, which "
                f"come back by themselves, and its load_state_dict() would overwrite them: {way_out}"
            )


def _memory(
    session: Session,
    request: Request,
    transport: Transport,
    world: World,
    replicated: ReplicatedState,
    cpu: kernels.Kernels,
) -> RankMemory:
    generator = _generator(request.code, session, transport, world.plan)
    geometry = Geometry(world.placement, world.block_words, generator)
    mine = None if world.plan.begins else session.arena
    if mine is None:
        make_room(session, world.plan)
    arena = transport.together(
        "opening the arenas", lambda: mine or _create(session, world, geometry, replicated)
    )
    if mine is None:
        arena.region("generator")[:] = generator.reshape(-1)
    session.arena = arena
    return RankMemory(arena, world.layouts, geometry, cpu)


def _generator(code: Code, session: Session, transport: Transport, plan: RecoveryPlan) -> NDArray[np.uint8]:
    """The code's generator, from one rank: built by rank 0 at a fresh start, else from the donor's arena.

    All survivors show theirs: wrong coefficients would spoil all parity.
    """
    source = max(plan.donor, 0)

    def own() -> bytes:
        if session.arena is not None and not plan.begins:
            return session.arena.region("generator").tobytes()
        return code.generator().tobytes() if plan.begins and session.rank == source else b""

    told = transport.gather(transport.together("building the generator", own), "sharing the generator")
    differing = [rank for rank, text in enumerate(told) if text and text != told[source]]
    if differing:
        raise InconsistentArenas(
            f"the code's generator in the arenas of ranks {differing} is not that of rank {source}: memory "
            f"is damaged; nothing was written. Remove the arena that is wrong (python -m ecemb arenas rm "
            f"PATH): it counts as lost then, and is rebuilt"
        )
    flat = np.frombuffer(told[source], np.uint8)
    return flat[: code.n * code.k].reshape(code.n, code.k).copy()


def _create(session: Session, world: World, geometry: Geometry, replicated: ReplicatedState) -> Arena:
    reserved, growing = _sizes(session, world, geometry, replicated)
    regions = tuple({**reserved, **growing}.items())
    constants = dataclasses.replace(world.constants, regions=regions)
    state = State.INIT if world.plan.begins else State.REBUILDING
    return Arena.create(session.directory, constants, reserved, state=state)


def _sizes(
    session: Session, world: World, geometry: Geometry, replicated: ReplicatedState
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the regions that are reserved at once, and the most that the others may grow to."""
    _, rows = arrange(world.layouts)
    journal = sum(layout.rows * (3 + layout.record_words) for layout in world.layouts) * WORD_BYTES
    parity, inbox = 0, session.world_size * WORD_BYTES
    if geometry.placement is not None:
        placement = geometry.placement
        parity = parity_words(placement, geometry.block_words, session.rank) * WORD_BYTES
        for stripe_class, _ in placement.kept(session.rank):
            members = placement.members(stripe_class)[: placement.k]
            words = sum(geometry.block_words[rank][block] for block, rank in enumerate(members))
            inbox += 5 * words * WORD_BYTES  # single words change, each with a head of its own
    slot = 16 * replicated.size_bytes + _SLOT_SLACK_BYTES
    slot = max(slot, world.slot_bytes)  # room for whatever the donor's slot holds
    reserved = {"generator": geometry.generator.size, "rows": rows, "parity": parity}
    growing = {**dict.fromkeys(ROW_JOURNALS, journal), "inbox": inbox, "parity_journal": inbox}
    return reserved, {**growing, "slot0": slot, "slot1": slot}


@dataclasses.dataclass(frozen=True)
class _Initial:
    """Fills new arenas: with the model as it is, or from a checkpoint."""

    request: Request
    world: World
    memory: RankMemory
    transport: Transport
    tables: Tables
    rank_state: RankState
    replicated: ReplicatedState

    def write(self) -> None:
        """Rows, rank state, and the slot of the plan's transaction. All ranks."""
        transport, transaction = self.transport, self.world.plan.transaction
        if self.world.stored is None:
            transport.together(
                "initialising the tables",
                lambda: self.tables.place(self.memory.space.tables, fresh=True),
            )
            read: list[bytes] = []
        else:
            read = self._read(self.world.stored)
        transport.together(
            "saving replicated state", lambda: self.replicated.save(self.memory.slots, transaction)
        )
        _compare_replicas(self.memory, transport, self.replicated, transaction)
        rankstate.write_(self.memory.rank_state, read[0] if read else self.rank_state.pack())

    def _read(self, stored: Stored) -> list[bytes]:
        """From the checkpoint: rows, dense state, rank state; all ranks. Gives this rank's packed state."""
        reader = cast("CheckpointReader", self.request.reader)
        size = self.transport.world_size
        parts = (self.memory, self.world.shards, self.replicated, self.rank_state, size)
        read: list[bytes] = []

        def act() -> str:
            self.tables.place(self.memory.space.tables, fresh=False)
            read.append(durable.restore(reader, stored, *parts))
            self.tables.put()
            return ""

        shared(self.transport, f"reading {stored.name}", act)
        return read


def _compare_replicas(
    memory: RankMemory, transport: Transport, replicated: ReplicatedState, transaction: int
) -> None:
    digest = replicated.digest(memory.slots, transaction).to_bytes(8, "little")
    told = transport.gather(digest, "comparing replicated state")
    if len(set(told)) > 1:
        differs = replicas.compare(memory.slots.read(transaction), transport)
        raise ConfigurationError(
            f"dense parameters, buffers or optimizer options differ between ranks ({differs}): "
            f"seed all ranks alike, or broadcast the model from rank 0, before ecemb.protect(); tables "
            f"that you shard by hand belong in tables="
        )


def _tell_of_resumption(session: Session, request: Request, world: World, stored: Stored) -> None:
    place = f"{name_of(request.reader)} ({stored.name})"
    if world.lost is not None:
        survivors = session.roster.judgement.survivors
        reached = max((header.committed for header in survivors), default=-1)
        again = "no step is lost"
        if reached < 0:
            again = "it is not known how many steps are lost"
        elif reached > stored.step:
            again = f"steps {stored.step} to {reached - 1} are lost, and are run again"
        logger.warning("memory is lost (%s): resumed from the checkpoint in %s; %s", world.lost, place, again)
    size = stored.facts["world_size"]
    if size != session.world_size:
        logger.warning(
            "the checkpoint in %s was saved by %d ranks, and these are %d: tables are sharded anew, and "
            "dense state carries over; data positions don't, and generators and state= objects only to ranks "
            "below %d",
            place,
            size,
            session.world_size,
            min(size, session.world_size),
        )


def _warn_of_next_loss(session: Session, world: World) -> None:
    placement = world.placement
    if placement is None or session.rank != 0 or placement.fragile(world.constants.domains):
        return
    for host in sorted(map(str, placement.fragile(session.hosts))):
        ranks = [rank for rank, at in enumerate(session.hosts) if at == host]
        logger.warning("the loss of host %s (ranks %s) would be more than the code survives", host, ranks)
