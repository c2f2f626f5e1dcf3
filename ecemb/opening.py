"""Opens this rank's memory: agree on the layout and on the plan, then start fresh or recover.

The collective first half of `ecemb.protect`. Every check that can fail on one rank alone runs through
`Transport.together`, so that it fails on all; nothing is written before all ranks hold the same plan.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from . import kernels, rankstate
from .adapters.sparse import SparseTables
from .arena import Arena
from .code import Code
from .directory import remove
from .errors import (
    ArenaDamaged,
    ConfigurationError,
    EcembError,
    InconsistentArenas,
    LayoutMismatch,
    PlacementError,
    StateLost,
    TooManyErasures,
)
from .header import Constants, State, new_arena_id
from .memory import Geometry, RankMemory
from .parity import parity_words
from .placement import Placement
from .plan import RecoveryPlan, plan_recovery
from .rankstate import RankState, Stateful
from .recovery import RecoveryReport, Stopwatch, fill, join, recover
from .rendezvous import Session
from .replicated import ReplicatedState
from .rows import WORD_BYTES, TableLayout, cut
from .transport import Transport

logger = logging.getLogger("ecemb")

FailureDomain = Literal["auto", "host", "rank"]
_SLOT_SLACK_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked `protect` for.

    Attributes:
        model: the whole model.
        optimizers: all optimizers of the training.
        modules: the tables' modules by key.
        code: the (n, k) code.
        state: the user's objects.
        failure_domain: see `ecemb.protect`.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    modules: Mapping[str, nn.Module]
    code: Code
    state: Sequence[Stateful]
    failure_domain: FailureDomain


@dataclasses.dataclass(frozen=True)
class Opened:
    """This rank's memory, live, with everything that a transaction needs."""

    memory: RankMemory
    transport: Transport
    tables: SparseTables
    replicated: ReplicatedState
    rank_state: RankState
    report: RecoveryReport


@dataclasses.dataclass(frozen=True)
class _World:
    """What the ranks agreed on before anything was written."""

    placement: Placement | None
    plan: RecoveryPlan
    layouts: tuple[TableLayout, ...]
    block_words: tuple[tuple[int, ...], ...]
    constants: Constants


def open_memory(session: Session, request: Request) -> Opened:
    """Opens the memory of this rank. All ranks.

    Raises:
        EcembError: any of the tree; on all ranks if on one.
    """
    watch = Stopwatch()
    with watch.phase("agree"):
        patience = datetime.timedelta(seconds=session.patience_s)
        group = cast("dist.ProcessGroup", dist.new_group(backend="gloo", timeout=patience))
        transport = Transport(group, session.patience_s)
        tables, rank_state, state_bytes = transport.together(
            "checking the model and its optimizers", lambda: _checked(request)
        )
        weights = [table.weight for table in tables.tables]
        replicated = ReplicatedState(request.model, request.optimizers, weights)
        world = _agree(session, request, transport, tables, state_bytes)
    cpu = kernels.get("cpu")
    with watch.phase("attach"):
        memory = _memory(session, request, transport, world, replicated, cpu)
        rank_state.room_bytes = len(memory.rank_state)
        roster = session.roster
        join(memory, transport, roster.generation, roster.generation_id)
    if world.plan.kind == "fresh":
        try:
            transport.together(
                "looking for another launch", lambda: session.directory.check_alone(roster.generation)
            )
            report = fill(
                memory,
                transport,
                world.plan,
                lambda: _write_initial(memory, transport, tables, rank_state, replicated),
                watch,
            )
        except EcembError:
            if memory.arena.get("prepared") < 0:  # it holds nothing that the next start would use
                memory.arena.remove()
                session.arena = None
            raise
    else:
        report = recover(memory, transport, world.plan, cpu, watch)
        with watch.phase("restore"):
            transport.together("pointing to the tables", lambda: _place(memory, tables, fresh=False))
            transport.together(
                "restoring dense state", lambda: replicated.load(memory.slots, world.plan.transaction)
            )
    transport.barrier("the end of recovery")
    session.marks.set("started", str(session.roster.generation))
    _discard(session, stale=True)
    transport.barrier("the start of training")  # nobody trains before all have finished
    if world.plan.kind != "fresh":
        _warn_of_next_loss(session, world)
        # Last: nothing may draw after it.
        transport.together(
            "restoring rank state", lambda: rank_state.unpack(rankstate.read(memory.rank_state))
        )
    return Opened(memory, transport, tables, replicated, rank_state, report)


def _checked(request: Request) -> tuple[SparseTables, RankState, int]:
    tables = SparseTables(request.modules, request.optimizers)
    rank_state = RankState(request.state, tables.state, tables.set_state)
    return tables, rank_state, rankstate.room(len(rank_state.pack()))


def _agree(
    session: Session,
    request: Request,
    transport: Transport,
    tables: SparseTables,
    state_bytes: int,
) -> _World:
    code, roster = request.code, session.roster
    survivors = roster.survivors
    own = {
        "tables": [table.layout.to_json() for table in tables.tables],
        "rank_state_bytes": state_bytes,
        "code": [code.n, code.k],
    }
    asked = [[code.n, code.k], request.failure_domain]
    texts = transport.gather(json.dumps([own, asked]).encode(), "comparing layouts")
    told = [json.loads(text)[0] for text in texts]
    if len({json.dumps(json.loads(text)[1]) for text in texts}) > 1:
        raise ConfigurationError(
            f"the ranks ask for different codes or failure domains: "
            f"{ {rank: json.loads(text)[1] for rank, text in enumerate(texts)} }"
        )
    if not any(one["tables"] for one in told):
        raise ConfigurationError(
            "the model has no table to protect on any rank: build it with ecemb.nn.ShardedEmbeddingBag, or "
            "name tables that you shard by hand in tables={'user': module}"
        )
    if survivors:
        constants = survivors[0].constants
        room_bytes = json.loads(constants.layout)["rank_state_bytes"]
        placement = None
        if session.world_size > 1:
            placement = Placement(constants.n, constants.k, constants.positions)
    else:
        room_bytes = max(one["rank_state_bytes"] for one in told)
        placement = _placement(code, session, request.failure_domain)
    for one in told:
        one["rank_state_bytes"] = room_bytes
    layout_hash = hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()
    if survivors and survivors[0].constants.layout_hash != layout_hash:
        raise LayoutMismatch(_difference(session, survivors[0].constants, told[session.rank]))
    damaged = [report for report in roster.reports if report.damage and report.header is None]
    try:
        plan = plan_recovery(
            roster.headers,
            placement,
            started=roster.started,
            finished=roster.finished,
            opened=roster.opened,
        )
    except (TooManyErasures, StateLost) as error:
        if not damaged:
            raise
        broken = "; ".join(f"{report.path} on {report.host}: {report.damage}" for report in damaged)
        raise type(error)(
            f"{error}. What can't be read counts as lost, and is left as it is: {broken}"
        ) from error
    if plan.kind == "fresh" and (broken := [r for r in damaged if "cut short" not in str(r.damage)]):
        raise ArenaDamaged(
            f"no arena of the job survived, and {broken[0].path} on {broken[0].host} can't be read: "
            f"{broken[0].damage}. To begin at step 0, remove it: python -m ecemb arenas rm --job "
            f"{session.job}"
        )
    for report in damaged:
        logger.warning("%s counts as lost: %s", report.path, report.damage)
    layouts = [_layouts(one) for one in told]
    bounds = [cut(tables_of_rank, code.k) for tables_of_rank in layouts]
    block_words = tuple(tuple(np.diff(bound).tolist()) for bound in bounds)
    positions = json.dumps(placement.positions if placement is not None else []).encode()
    if len(set(transport.gather(plan.digest() + positions, "comparing plans"))) > 1:
        raise InconsistentArenas(
            "the ranks came to different plans from the same reports; nothing was written. Do all hosts "
            "run the same version of ecemb?"
        )
    ranks = range(session.world_size)
    constants = Constants(
        job=session.job,
        arena_id=new_arena_id(),
        rank=session.rank,
        world_size=session.world_size,
        n=code.n,
        k=code.k,
        positions=placement.positions if placement is not None else tuple(ranks),
        domains=survivors[0].constants.domains if survivors else session.hosts,
        layout_hash=layout_hash,
        layout=json.dumps(told[session.rank]),
        block_words=block_words,
        regions=(),
    )
    return _World(placement, plan, layouts[session.rank], block_words, constants)


def _layouts(told: Mapping[str, list[list[object]]]) -> tuple[TableLayout, ...]:
    tables = [TableLayout.from_json(fields) for fields in told["tables"]]
    return (*tables, rankstate.layout(int(str(told["rank_state_bytes"]))))


def _placement(code: Code, session: Session, domain: FailureDomain) -> Placement | None:
    hosts = session.hosts
    if len(hosts) == 1:
        logger.warning(
            "one rank has nobody to keep its parity: it survives crashes of its process, and not "
            "the loss of its memory"
        )
        return None
    if domain == "host":
        return Placement.plan(code.n, code.k, hosts)
    ranks = Placement.ranks(code.n, code.k, len(hosts))
    if domain == "rank":
        return ranks
    try:
        return Placement.plan(code.n, code.k, hosts)
    except PlacementError as error:
        spread = Placement.interleaved(code.n, code.k, hosts)
        fragile = spread.fragile(hosts)
        if session.rank == 0:
            others = f", and so for {len(fragile) - 1} other hosts" if len(fragile) > 1 else ""
            logger.warning(
                "parity is spread over ranks, not over hosts: %s. failure_domain='host' says which codes "
                "would fit, 'rank' silences this",
                f"the loss of host {fragile[0]!r} alone would be more than the code survives{others}"
                if fragile
                else f"the loss of any one host is survived, but not that of any r = {code.r} at once",
            )
            logger.debug("%s", error)
        return spread


def _difference(session: Session, started: Constants, now: Mapping[str, object]) -> str:
    what: list[str] = []
    if [started.n, started.k] != now["code"]:
        what.append(f"code {(started.n, started.k)} then and {tuple(now['code'])} now")  # pyright: ignore[reportArgumentType]
    if session.arena is not None:
        then = json.loads(session.arena.header().constants.layout)
        tables = {table[0]: table for table in then["tables"]}
        for table in now["tables"]:  # pyright: ignore[reportGeneralTypeIssues,reportUnknownVariableType]
            before = tables.pop(table[0], None)  # pyright: ignore[reportUnknownArgumentType]
            if before != table:
                what.append(f"table {table} now, and {before or 'none of this name'} then")
        what += [f"table {table} then, and none of this name now" for table in tables.values()]
    difference = "; ".join(what) or "tables of other ranks differ: see their messages"
    return (
        f"the arenas of job {session.job!r} hold another model than this one ({difference}): run the script "
        f"that started the job, or give this one another job="
    )


def _memory(
    session: Session,
    request: Request,
    transport: Transport,
    world: _World,
    replicated: ReplicatedState,
    cpu: kernels.Kernels,
) -> RankMemory:
    generator = _generator(request.code, session, transport, world.plan)
    geometry = Geometry(world.placement, world.block_words, generator)
    newcomer = session.arena is None
    if newcomer:
        _discard(session, stale=False)
    arena = transport.together(
        "opening the arenas",
        lambda: session.arena or _create(session, world, geometry, replicated),
    )
    if newcomer:
        arena.region("generator")[:] = generator.reshape(-1)
    session.arena = arena
    return RankMemory(arena, world.layouts, geometry, cpu)


def _generator(code: Code, session: Session, transport: Transport, plan: RecoveryPlan) -> NDArray[np.uint8]:
    """The code's generator, from one rank: built by rank 0 at a fresh start, else from the donor's arena.

    Building it imports galois, which would keep all ranks of a host busy for seconds. All survivors show
    theirs: wrong coefficients would spoil all parity.
    """
    source = max(plan.donor, 0)

    def own() -> bytes:
        if session.arena is not None:
            return session.arena.region("generator").tobytes()
        return _built(code) if plan.kind == "fresh" and session.rank == source else b""

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


def _built(code: Code) -> bytes:
    """The generator's bytes, built here.

    The threads that galois starts change torch's number of them, and so what the sums of this training
    round to; a restart, which builds nothing, would end elsewhere.
    """
    threads = torch.get_num_threads()
    try:
        return code.generator().tobytes()
    finally:
        torch.set_num_threads(threads)


def _create(session: Session, world: _World, geometry: Geometry, replicated: ReplicatedState) -> Arena:
    rows = sum(layout.memory_bytes for layout in world.layouts)
    journal = sum(layout.rows * (3 + layout.record_words) for layout in world.layouts) * WORD_BYTES
    parity, inbox = 0, session.world_size * WORD_BYTES
    if geometry.placement is not None:
        placement = geometry.placement
        parity = parity_words(placement, geometry.block_words, session.rank) * WORD_BYTES
        for stripe_class, _ in placement.kept(session.rank):
            members = placement.members(stripe_class)[: placement.k]
            words = sum(geometry.block_words[rank][block] for block, rank in enumerate(members))
            inbox += (3 * words + 5 * placement.k) * WORD_BYTES
    slot = 16 * replicated.size_bytes + _SLOT_SLACK_BYTES
    if survivors := session.roster.survivors:  # room for whatever the donor's slot holds
        slot = max(slot, dict(survivors[0].constants.regions)["slot0"])
    sizes = {"generator": geometry.generator.size, "rows": rows, "parity": parity}
    growing = {"row_journal": journal, "inbox": inbox, "parity_journal": inbox}
    slots = {"slot0": slot, "slot1": slot}
    constants = dataclasses.replace(world.constants, regions=tuple({**sizes, **growing, **slots}.items()))
    state = State.INIT if world.plan.kind == "fresh" else State.REBUILDING
    return Arena.create(session.directory, constants, sizes, state=state, timeout_s=session.timeout_s)


def _place(memory: RankMemory, tables: SparseTables, *, fresh: bool) -> None:
    for table, stored in zip(tables.tables, memory.space.tables, strict=False):
        table.place(stored.columns, fresh=fresh)


def _write_initial(
    memory: RankMemory,
    transport: Transport,
    tables: SparseTables,
    rank_state: RankState,
    replicated: ReplicatedState,
) -> None:
    transport.together("initialising the tables", lambda: _place(memory, tables, fresh=True))
    transport.together("saving replicated state", lambda: replicated.save(memory.slots, 0))
    _compare_replicas(memory, transport, replicated)
    rankstate.write_(memory.rank_state, rank_state.pack())


def _compare_replicas(memory: RankMemory, transport: Transport, replicated: ReplicatedState) -> None:
    digest = replicated.digest(memory.slots, 0).to_bytes(8, "little")
    told = transport.gather(digest, "comparing replicated state")
    if len(set(told)) > 1:
        groups = {rank: one.hex() for rank, one in enumerate(told)}
        raise ConfigurationError(
            f"dense parameters, buffers or optimizer options differ between ranks (checksums {groups}): "
            f"seed all ranks alike, or broadcast the model from rank 0, before ecemb.protect(); tables "
            f"that you shard by hand belong in tables="
        )


def _discard(session: Session, *, stale: bool) -> None:
    """Removes arenas of this host that count as lost: half-made ones, and with `stale` all others."""
    kept = {header.constants.arena_id for header in session.roster.survivors}
    for report in session.roster.reports:
        header = report.header
        if report.host != session.directory.host:
            continue
        if header is not None and header.constants.arena_id in kept:
            continue
        if stale or header is None or header.state in (State.INIT, State.REBUILDING):
            try:
                remove(Path(report.path))
            except EcembError as error:
                logger.warning("%s", error)


def _warn_of_next_loss(session: Session, world: _World) -> None:
    """Says which host present now may not be lost, if at the fresh start any one could have been."""
    placement = world.placement
    if placement is None or session.rank != 0 or placement.fragile(world.constants.domains):
        return
    for host in sorted(map(str, placement.fragile(session.hosts))):
        ranks = [rank for rank, at in enumerate(session.hosts) if at == host]
        logger.warning("the loss of host %s (ranks %s) would be more than the code survives", host, ranks)
