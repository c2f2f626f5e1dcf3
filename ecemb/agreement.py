"""What all ranks agree on before anything is written: layout, placement, plan, and which checkpoint.

Owns the comparison of what the ranks report and ask for, and the choice between going on from memory, from a
checkpoint, and from step 0. Whatever differs is an error on all ranks. Must not write to any arena.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from . import durable, rankstate, saver
from .adapters.engine import EngineTable
from .adapters.tables import Tables, check_alike
from .checkpoint import CheckpointReader, CheckpointWriter, Stored
from .code import Code
from .durable import Shard
from .errors import (
    ArenaDamaged,
    ConfigurationError,
    InconsistentArenas,
    JobFinished,
    LayoutMismatch,
    PlacementError,
    StateLost,
    TooManyErasures,
)
from .header import Constants, new_arena_id
from .history import History, shared_history
from .placement import Placement
from .plan import RecoveryPlan, plan_recovery, plan_resume
from .rankstate import Stateful
from .rendezvous import Session
from .roster import Roster
from .rows import TableLayout, cut
from .transaction import COMPARE_EVERY
from .transport import Transport
from .window import Window

logger: logging.Logger = logging.getLogger("ecemb")

FailureDomain = Literal["auto", "host", "rank"]
ParityBackend = Literal["gloo", "nccl"]

_SHOWN_DIFFERENCES = 6  # of a model: one that is another altogether differs in every table


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked `protect` for.

    Attributes:
        model: the whole model.
        optimizers: all optimizers of the training.
        modules: modules of tables that are sharded by hand, by key.
        code: the (n, k) code.
        state: the user's objects, as they were given.
        window: steps of a transaction.
        overlap: whether a transaction is decided beside the next one's body.
        failure_domain: see `ecemb.protect`.
        parity_backend: what deltas go over.
        reader: where to find a checkpoint, or None.
        without: parameters, and modules, that no optimizer changes.
        compare_every: commits between two comparisons of replicated state among the ranks.

    Raises:
        ConfigurationError: an attribute breaks a rule.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    modules: Mapping[str, nn.Module]
    code: Code
    state: Mapping[str, Stateful] | Sequence[Stateful] | Stateful | None
    window: Window
    overlap: bool
    failure_domain: FailureDomain
    parity_backend: ParityBackend = "gloo"
    reader: CheckpointReader | None = None
    without: Sequence[nn.Module | nn.Parameter] = ()
    compare_every: int = COMPARE_EVERY

    def __post_init__(self) -> None:
        if self.failure_domain not in ("auto", "host", "rank"):
            raise ConfigurationError(
                f"failure_domain is 'auto', 'host' or 'rank'; it is {self.failure_domain!r}"
            )
        if not isinstance(self.code, Code):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"code= takes an ecemb.Code, e.g. Code(n=4, k=3); it is {self.code!r}")
        if not isinstance(self.overlap, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"overlap= is True or False; it is {self.overlap!r}")
        if type(self.compare_every) is not int or self.compare_every < 1:
            raise ConfigurationError(
                f"compare_every= is a number of commits, 1 or more: {self.compare_every!r}"
            )
        if self.parity_backend not in ("gloo", "nccl"):
            raise ConfigurationError(f"parity_backend is 'gloo' or 'nccl'; it is {self.parity_backend!r}")
        if self.parity_backend == "nccl" and self.overlap:
            raise ConfigurationError(
                "parity_backend='nccl' with overlap=True: deltas would be sent while the next step's "
                "training uses NCCL, too, and two of its communicators in use at the same time may wait for "
                "each other for ever. Leave one of the two out: over gloo, deltas go beside the next step"
            )


@dataclasses.dataclass(frozen=True)
class World:
    """What the ranks agreed on before anything was written.

    Attributes:
        placement: who keeps whose parity; None for one rank.
        plan: what this start does.
        layouts: this rank's tables, and its rank state's record.
        block_words: [world size][k], words of every rank's data blocks.
        constants: for a new arena of this rank, but for its regions.
        shards: where this rank's tables stand in the whole ones.
        lineage: random, made at the fresh start, kept by recoveries and by starts from checkpoints.
        stored: the checkpoint that the plan begins with, or None.
        lost: why memory can't be recovered, if that is why the plan begins with a checkpoint.
        slot_bytes: room of the slots in the arenas that survived; 0 without any.
    """

    placement: Placement | None
    plan: RecoveryPlan
    layouts: tuple[TableLayout, ...]
    block_words: tuple[tuple[int, ...], ...]
    constants: Constants
    shards: tuple[Shard, ...]
    lineage: str
    stored: Stored | None
    lost: str | None
    slot_bytes: int


def agree(
    session: Session,
    request: Request,
    transport: Transport,
    tables: Tables,
    state_bytes: int,
) -> World:
    """Compares what all ranks have and ask for, and decides how the job goes on. All ranks.

    Args:
        session: this process's.
        request: what the user asked for.
        transport: the control group.
        tables: this rank's tables.
        state_bytes: room for this rank's packed state.

    Raises:
        EcembError: on all ranks; nothing was written.
    """
    code, then = request.code, shared_history(session, transport)
    shards = tuple(_shard(table, session.world_size) for table in tables.tables)
    own = {
        "tables": [table.layout.to_json() for table in tables.tables],
        "rank_state_bytes": state_bytes,
        "code": [code.n, code.k],
    }
    window, mtbf = request.window.asked
    asked = {
        "code": [code.n, code.k],
        "window": window,
        "mtbf": mtbf,
        "overlap": request.overlap,
        "failure_domain": request.failure_domain,
        "parity_backend": request.parity_backend,
        "compare_every": request.compare_every,
        "resume": saver.name_of(request.reader),
    }
    mine = json.dumps([own, asked, secrets.token_hex(8), tables.alike()])
    texts = transport.gather(mine.encode(), "comparing layouts")
    told = [json.loads(text)[0] for text in texts]
    if len({json.dumps(json.loads(text)[1]) for text in texts}) > 1:
        raise ConfigurationError(
            f"the ranks call ecemb.protect() with different arguments: "
            f"{ {rank: json.loads(text)[1] for rank, text in enumerate(texts)} }; call it alike on all ranks"
        )
    check_alike([json.loads(text)[3] for text in texts])
    if not any(one["tables"] for one in told):
        raise ConfigurationError(
            "the model has no table to protect on any rank: build it with ecemb.nn.ShardedEmbeddingBag, or "
            "name tables that you shard by hand in tables={'user': module}"
        )
    placement, lineage = None, json.loads(texts[0])[2]
    needed_bytes = room_bytes = max(one["rank_state_bytes"] for one in told)
    if then is not None:
        room_bytes, lineage = then.rank_state_bytes, then.lineage
        if session.world_size > 1:
            placement = Placement(then.n, then.k, then.positions)
        if then.layout_hash != _hash(told, room_bytes):
            raise LayoutMismatch(_difference(session, then, told[session.rank]))
    plan, stored, lost = _decide(session, request, transport, placement)
    if plan.begins:
        placement = _placement(code, session, request.failure_domain)
        room_bytes = needed_bytes
    if stored is not None:
        rank, size = session.rank, session.world_size
        everywhere = {table[0] for one in told for table in one["tables"]}
        saver.shared(
            transport,
            f"comparing the model with {stored.name}",
            lambda: durable.check(stored, shards, rank, size, everywhere) or "",
        )
        lineage = stored.facts["lineage"]
        room_bytes = max(room_bytes, *map(rankstate.room, stored.facts["rank_state_bytes"]))
    layout_hash = _hash(told, room_bytes)
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
        domains=session.hosts if plan.begins or then is None else then.domains,
        layout_hash=layout_hash,
        layout=json.dumps({**told[session.rank], "lineage": lineage}),
        block_words=block_words,
        regions=(),
        fill=_fill(session.roster, plan),
    )
    own_layouts, slot_bytes = layouts[session.rank], 0 if then is None else then.slot_bytes
    return World(
        placement, plan, own_layouts, block_words, constants, shards, lineage, stored, lost, slot_bytes
    )


def _fill(roster: Roster, plan: RecoveryPlan) -> int:
    return roster.generation if plan.begins else roster.judgement.survivors[0].constants.fill


def _shard(table: EngineTable, world_size: int) -> Shard:
    whole = table.whole(world_size)
    return Shard(table.layout) if whole is None else Shard(table.layout, *whole)


def _hash(told: Sequence[dict[str, Any]], room_bytes: int) -> str:
    """Of all ranks' layouts; gives all the same room for rank state."""
    for one in told:
        one["rank_state_bytes"] = room_bytes
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


def _decide(
    session: Session, request: Request, transport: Transport, placement: Placement | None
) -> tuple[RecoveryPlan, Stored | None, str | None]:
    """Memory wins, then a checkpoint, then step 0. All ranks.

    Returns:
        The plan; the checkpoint that it begins with, if any; and why memory can't be recovered, if it can't.
    """
    roster, stored, lost = session.roster, None, None
    damaged = [report for report in roster.reports if report.damage and report.header is None]
    try:
        plan = plan_recovery(
            roster.headers,
            placement,
            started=roster.started,
            finished=roster.finished,
            opened=roster.opened,
        )
    except JobFinished:  # the close may have been cut off before it told the durable tier
        if session.rank == 0 and isinstance(request.reader, CheckpointWriter):
            step = max((header.committed for header in roster.judgement.finished), default=0)
            saver.finish(request.reader, session.job, step)
        raise
    except (TooManyErasures, StateLost) as error:
        broken = "; ".join(f"{report.path} on {report.host}: {report.damage}" for report in damaged)
        lost = error.reason + (f". What can't be read counts as lost: {broken}" if damaged else "")
        text = (
            f"{error}. What can't be read counts as lost, and is left as it is: {broken}"
            if damaged
            else str(error)
        )
        if request.reader is None:
            raise type(error)(text) from error
        stored = saver.find(request.reader, transport, session.job)
        if stored is None:
            nothing = f"resume= {saver.name_of(request.reader)} has no complete checkpoint"
            raise type(error)(f"{text} ({nothing})") from error
        plan = plan_resume(stored.step)
    if plan.kind == "fresh" and request.reader is not None:
        stored = saver.find(request.reader, transport, session.job)
        plan = plan if stored is None else plan_resume(stored.step)
    if plan.kind == "fresh" and (broken := [r for r in damaged if not r.torn]):
        raise ArenaDamaged(
            f"no arena of the job survived, and {broken[0].path} on {broken[0].host} can't be read: "
            f"{broken[0].damage}. To begin at step 0, remove it: python -m ecemb arenas rm --job "
            f"{session.job}"
        )
    for report in damaged:
        logger.warning("%s counts as lost: %s", report.path, report.damage)
    return plan, stored, lost


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


def _difference(session: Session, started: History, now: Mapping[str, Any]) -> str:
    what: list[str] = []
    if [started.n, started.k] != now["code"]:
        what.append(f"code {(started.n, started.k)} then and {tuple(now['code'])} now")
    if session.arena is not None:
        then = json.loads(session.arena.constants.layout)
        before = {one.name: one for one in map(TableLayout.from_json, then["tables"])}
        for table in map(TableLayout.from_json, now["tables"]):
            old = before.pop(table.name, None)
            if old is None:
                what.append(f"table {table.name!r} is here now, and was not then")
            elif difference := table.difference(old):
                what.append(f"table {table.name!r}: {difference}")
        what += [f"table {name!r} was there then, and is not now" for name in before]
    if len(what) > _SHOWN_DIFFERENCES:
        what[_SHOWN_DIFFERENCES:] = [f"and {len(what) - _SHOWN_DIFFERENCES} more differences"]
    difference = "; ".join(what) or "tables of other ranks differ: see their messages"
    return (
        f"the arenas of job {session.job!r} hold another model than this one ({difference}): run the script "
        f"that started the job, or give this one another job="
    )
