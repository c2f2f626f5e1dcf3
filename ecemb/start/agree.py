"""The agreement of all ranks before anything is written: layout, placement, plan and checkpoint.

Owns the comparison of the ranks' tables and arguments, and the choice between memory, a checkpoint and step 0
(docs/protocol.md, 3.3). A difference between ranks is an error on all of them. Must not write to any arena.

All ranks with the same host name must see the same folder of arenas (docs/assumptions.md). Two machines or
containers of one name would count as one failure domain, and a restart would look for memory on the wrong
machine. So the first rank of each name locks the folder of its host, and the other ranks of the name test for
the lock, after a collective of all ranks. A lock on a folder takes no space, ends with its process, and
leaves no file behind. `negotiate` sends the result of each rank's test to all ranks.

The checkpoint that a start begins with, or takes tables from, is compared with the model on all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from ..checkpoint import contents, saver
from ..checkpoint.contents import Shard
from ..checkpoint.interface import CheckpointReader, CheckpointWriter, Stored
from ..checkpoint.transfer import Sources, Taking, Transfer, examine, refusal
from ..coding.parity import parity_words
from ..coding.placement import ALIGN_BYTES, Placement, Share
from ..coding.rows import WORD_BYTES, Addresses, TableLayout
from ..engines.contract import EngineTable
from ..engines.discover import check_alike
from ..errors import (
    ArenaDamaged,
    CheckpointError,
    CheckpointFailed,
    ConfigurationError,
    InconsistentArenas,
    JobFinished,
    LayoutMismatch,
    RendezvousError,
    StateLost,
    TooManyErasures,
)
from ..memory.header import Constants, new_arena_id
from ..memory.private_files import Folder
from ..net.assignment import Report
from ..net.collectives import Transport
from ..net.wording import listed
from ..recovery.plan import RecoveryPlan, plan_recovery
from ..session import Session
from ..state import rank_state
from ..state.replicated import ReplicatedState
from .history import History, OldArenas, check_hand, is_of_other_ranks, pack_places
from .placement_choice import placed
from .request import Request, Training

logger: logging.Logger = logging.getLogger("ecemb")


_SHOWN_DIFFERENCES = 6  # in an error message: every table of an unrelated model differs


@dataclasses.dataclass(frozen=True)
class World:
    """The result of the agreement among the ranks, before anything is written.

    Attributes:
        placement: which ranks keep whose parity; None for one rank.
        plan: the plan of this start.
        layouts: layouts of this rank's tables, then of its rank state's record.
        block_words: number of words of every rank's data blocks, [world size][k].
        constants: constants of a new arena of this rank, without its regions.
        shards: this rank's tables with their places in the whole tables.
        lineage: random id of the training, made at the fresh start, kept by recoveries and by starts from
            checkpoints.
        stored: the checkpoint that the plan begins with; None if it begins with none.
        sources: the stored values that this rank's tables are read from if `stored` is given.
        taking: tables that a fresh start takes from another training; None if it takes none.
        lost: why memory can't be recovered, if the plan begins with a checkpoint for that reason.
        processors: of every rank, the numbers of those that it may run on.
        slot_bytes: room of the slots in the arenas that survived; 0 if none survived.
        generation: generation that the arenas of this start join.
        old: the arenas of another number of ranks that the job continues from; None if there are none.
    """

    placement: Placement | None
    plan: RecoveryPlan
    layouts: tuple[TableLayout, ...]
    block_words: tuple[tuple[int, ...], ...]
    constants: Constants
    shards: tuple[Shard, ...]
    lineage: str
    stored: Stored | None
    sources: Sources
    taking: Taking | None
    lost: str | None
    processors: tuple[tuple[int, ...], ...]
    slot_bytes: int
    generation: int
    old: OldArenas | None

    @property
    def parity_bytes(self) -> int:
        """Bytes of this rank's parity."""
        if self.placement is None:
            return 0
        return parity_words(self.placement, self.block_words, self.constants.rank) * WORD_BYTES

    def dense_bytes(self, replicated: ReplicatedState) -> int:
        """Bytes of this rank's slices of replicated state in one slot."""
        size_bytes = -(-replicated.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return Share.of(self.placement, self.constants.rank).size_bytes(size_bytes)


@dataclasses.dataclass(frozen=True)
class _Proposal:
    """One rank's message of the negotiation, as plain JSON values.

    Attributes:
        layout: the rank's tables, the room that its rank state needs, and the code; the layout's hash is of
            these.
        arguments: the rank's arguments of `protect`.
        lineage: a random id; rank 0's is the job's where a job begins.
        alike: values of the adapters that have to be the same on all ranks.
        places: for each of the rank's tables its first row in the whole table, and the whole table's rows.
        by_hand: names of the tables that `shards=` places.
        sees: whether the rank sees the folder of its host's name; see `HostFolder`.
        processors: a bit for each processor that the rank may run on, in hexadecimal.
    """

    layout: dict[str, Any]
    arguments: dict[str, Any]
    lineage: str
    alike: Any
    places: list[tuple[int, int | None]]
    by_hand: list[str]
    sees: bool | None
    processors: str

    def layouts(self, room_bytes: int) -> tuple[TableLayout, ...]:
        """Layouts of the rank's tables, and of a record of `room_bytes` for its rank state."""
        tables = [TableLayout.from_json(fields) for fields in self.layout["tables"]]
        return (*tables, rank_state.layout(room_bytes))

    def shards(self) -> list[Shard]:
        """The rank's tables with their places in the whole tables."""
        tables = zip(self.layout["tables"], self.places, strict=True)
        return [Shard(TableLayout.from_json(fields), *place) for fields, place in tables]


def negotiate(
    session: Session,
    request: Request,
    transport: Transport,
    training: Training,
    history: History | None,
    sees: bool | None,
) -> World:
    """Compares the tables and arguments of all ranks, and decides how the job continues. All ranks.

    The collectives, in their order: every rank's proposal, the checkpoint if the plan may begin with one, and
    the plans that the ranks computed. All else is a pure function of their results.

    Args:
        session: this process's session.
        request: the user's arguments.
        transport: the control group.
        training: this rank's training.
        history: history of the arenas that survived; None if none survived.
        sees: whether this rank sees the folder of its host's name; see `HostFolder`.

    Raises:
        EcembError: on all ranks; nothing was written.
    """
    shards = tuple(_shard(table, session.world_size, request.shards) for table in training.tables.tables)
    proposals = _exchange_proposals(request, transport, training, shards, sees)
    check_hosts(session.hosts, [one.sees for one in proposals])
    _check_proposals(proposals)
    placement = None if history is None else _placement_of(session, request, history, proposals)
    plan, stored, lost = _decide(
        session, request, transport, placement, "" if history is None else history.lineage
    )
    old, recovery = None, plan
    if history is not None and is_of_other_ranks(history, session) and not plan.begins:
        old, plan = OldArenas(history, plan), RecoveryPlan("move", plan.transaction)
        stored = old.stored(session.job)
    if plan.begins:
        placement = placed(request.code, session.hosts, request.failure_domain, first=session.rank == 0)
    everywhere = {table[0] for one in proposals for table in one.layout["tables"]}
    sources: Sources = {}
    if stored is not None:
        sources = check_checkpoint(session, request, transport, stored, shards, everywhere)
    taking = None
    if plan.kind == "fresh" and request.transfer is not None:
        taking = check_transfer(request, transport, shards, everywhere)
    room_bytes = _rank_state_room(history, plan, old, stored, proposals)
    layouts = [one.layouts(room_bytes) for one in proposals]
    bounds = [Addresses(of_rank, request.code.k).bounds for of_rank in layouts]
    block_words = tuple(tuple(np.diff(bound).tolist()) for bound in bounds)
    _compare_plans(transport, [plan, recovery], placement)
    lineage = _lineage(history, stored, proposals)
    own = _with_room(proposals[session.rank], room_bytes)
    if history is None or plan.begins:
        everyone = pack_places([one.shards() for one in proposals])
    else:
        everyone = history.everyone
    generation = session.roster.generation + (old is not None)
    constants = Constants(
        job=session.job,
        arena_id=new_arena_id(),
        rank=session.rank,
        world_size=session.world_size,
        n=request.code.n,
        k=request.code.k,
        positions=tuple(range(session.world_size)) if placement is None else placement.positions,
        domains=session.hosts if plan.begins or history is None else history.domains,
        layout_hash=_hash(proposals, room_bytes),
        layout=json.dumps({**own, "lineage": lineage, "everyone": everyone}),
        block_words=block_words,
        regions=(),
        fill=generation if plan.begins else session.roster.judgement.survivors[0].constants.fill,
    )
    return World(
        placement=placement,
        plan=plan,
        layouts=layouts[session.rank],
        block_words=block_words,
        constants=constants,
        shards=shards,
        lineage=lineage,
        stored=stored,
        sources=sources,
        taking=taking,
        lost=lost,
        processors=tuple(_processors(one.processors) for one in proposals),
        slot_bytes=0 if history is None else history.slot_bytes,
        generation=generation,
        old=old,
    )


def _exchange_proposals(
    request: Request, transport: Transport, training: Training, shards: Sequence[Shard], sees: bool | None
) -> list[_Proposal]:
    """Gathers every rank's proposal, in the order of the ranks. All ranks."""
    code = [request.code.n, request.code.k]
    layout = {
        "tables": [shard.layout.to_json() for shard in shards],
        "rank_state_bytes": training.state_bytes,
        "code": code,
    }
    window, mtbf, max_replay = request.window.asked
    arguments = {
        "code": code,
        "window": window,
        "mtbf": mtbf,
        "max_replay": max_replay,
        "overlap": request.overlap,
        "failure_domain": request.failure_domain,
        "parity_backend": request.parity_backend,
        "compare_every": request.compare_every,
        "verify": request.verify,
        "resume": saver.name_of(request.reader),
        "resume_required": request.resume_required,
        "elastic": request.elastic,
        "rebuild": request.rebuild,
        **request.origin(),
    }
    places = [(shard.start, shard.rows) for shard in shards]
    lineage, by_hand = secrets.token_hex(8), list(request.shards)
    mask = f"{sum(1 << processor for processor in os.sched_getaffinity(0)):x}"
    own = json.dumps([layout, arguments, lineage, training.tables.alike(), places, by_hand, sees, mask])
    return [_Proposal(*json.loads(text)) for text in transport.gather(own.encode(), "comparing layouts")]


def _processors(mask: str) -> tuple[int, ...]:
    """The numbers of the processors in a `_Proposal.processors`, ascending."""
    bits = int(mask, 16)
    return tuple(number for number in range(bits.bit_length()) if bits >> number & 1)


def _check_proposals(proposals: Sequence[_Proposal]) -> None:
    """Raises ConfigurationError if arguments differ between ranks, or no rank has a table."""
    if any(one.arguments != proposals[0].arguments for one in proposals):
        raise ConfigurationError(
            f"the ranks call ecemb.protect() with different arguments: "
            f"{ {rank: one.arguments for rank, one in enumerate(proposals)} }; call it alike on all ranks"
        )
    check_alike([one.alike for one in proposals])
    check_hand([one.shards() for one in proposals], [one.by_hand for one in proposals])
    if not any(one.layout["tables"] for one in proposals):
        raise ConfigurationError(
            "the model has no table to protect on any rank: build it with ecemb.nn.ShardedEmbeddingBag or "
            "ecemb.nn.ShardedEmbedding, or name tables that you shard by hand in tables={'user': module}. A "
            "dense nn.Embedding, as in a model that is all in DistributedDataParallel, needs no parity: "
            "every rank has a copy of it"
        )


def _placement_of(
    session: Session, request: Request, history: History, proposals: Sequence[_Proposal]
) -> Placement | None:
    """Checks that the job can continue from the arenas that survived, and returns their placement.

    Raises:
        RendezvousError: another number of ranks made them, and this start is not elastic.
        LayoutMismatch: the arenas hold another model, another code's parity, or other parts of dense state.
    """
    if is_of_other_ranks(history, session):
        if not request.elastic:
            before, now = history.world_size, session.world_size
            raise RendezvousError(
                f"job {session.job!r} had {before} ranks when it was started, and has {now} in this launch: "
                f"launch {before} (torchrun --nnodes x --nproc-per-node), let its memory move to this number "
                f"with ecemb.protect(elastic=True), or begin a new job under another name"
            )
    elif history.layout_hash != _hash(proposals, history.rank_state_bytes):
        raise LayoutMismatch(_difference(session, request, history, proposals[session.rank].layout))
    return history.placement


def _decide(
    session: Session, request: Request, transport: Transport, placement: Placement | None, lineage: str
) -> tuple[RecoveryPlan, Stored | None, str | None]:
    """Chooses where the job continues: in memory if it can, else at a checkpoint, else at step 0. All ranks.

    A host that was cut off may come back beside new hosts, after the job has continued without it and ended
    there. A checkpoint of the same training that is newer than the step that memory can be recovered to shows
    this, and is then used instead of memory.

    Returns:
        The plan; the checkpoint that it begins with, or None; and why memory can't be recovered, or None.
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
    except JobFinished:
        _repeat_finish(session, request)
        raise
    except (TooManyErasures, StateLost) as error:
        broken = "; ".join(f"{report.path} on {report.host}: {report.damage}" for report in damaged)
        lost = error.reason + (f". Arenas that can't be read count as lost: {broken}" if damaged else "")
        unread = f". Arenas that can't be read count as lost, and are kept: {broken}" if damaged else ""
        if request.reader is None:
            raise type(error)(f"{error}{unread}") from None
        stored = saver.find(request.reader, transport, session.job)
        if stored is None:
            nothing = f"resume= {saver.name_of(request.reader)} has no complete checkpoint"
            raise type(error)(f"{error}{unread} ({nothing})") from None
        plan = RecoveryPlan("checkpoint", stored.step)
    if plan.kind == "fresh" and request.reader is not None:
        stored = saver.find(request.reader, transport, session.job)
        if stored is None:
            _miss_checkpoint(session, request, request.reader)
        else:
            plan = RecoveryPlan("checkpoint", stored.step)
    if plan.kind == "memory" and not roster.started and request.reader is not None:
        newest = None
        try:
            newest = saver.find(request.reader, transport, session.job)
        except CheckpointError as error:  # the job can continue from memory without the checkpoint
            logger.warning("no checkpoint is compared with memory, which the job goes on from: %s", error)
        if newest and newest.step > plan.transaction and newest.facts.get("lineage") == lineage:
            lost = f"what is left of it is of step {plan.transaction}, and the job went on without it"
            stored, plan = newest, RecoveryPlan("checkpoint", newest.step)
    if plan.kind == "fresh":
        _check_nothing_is_damaged(session, damaged)
    for report in damaged:
        logger.warning("%s counts as lost: %s", report.path, report.damage)
    return plan, stored, lost


def _miss_checkpoint(session: Session, request: Request, reader: CheckpointReader) -> None:
    """Logs that a start at step 0 found no checkpoint to resume from.

    Raises:
        CheckpointFailed: the user requires a checkpoint.
    """
    nothing = f"resume= found no checkpoint: {saver.absence_of(reader)}"
    if request.resume_required and session.check is None:  # a check's job has another name, and no memory
        raise CheckpointFailed(
            f"{nothing}, and job {session.job!r} has no memory. With resume_required=True it doesn't begin "
            f"at step 0: correct the path, or leave resume_required out of its first launch"
        )
    logger.log(
        logging.WARNING if session.rank == 0 else logging.DEBUG,
        "%s; job %s begins at step 0 (resume_required=True refuses that)",
        nothing,
        session.job,
    )


def _repeat_finish(session: Session, request: Request) -> None:
    """Marks the job as finished in the durable tier, as `Guard.close` may have been interrupted before."""
    if session.rank == 0 and isinstance(request.reader, CheckpointWriter):
        step = max((header.committed for header in session.roster.judgement.finished), default=0)
        saver.finish(request.reader, session.job, step)


def _check_nothing_is_damaged(session: Session, damaged: Sequence[Report]) -> None:
    """Refuses a start at step 0 if an arena can't be read, as this arena may hold the job's memory.

    Raises:
        ArenaDamaged: there is such an arena.
    """
    if broken := [report for report in damaged if not report.torn]:
        raise ArenaDamaged(
            f"no arena of the job survived, and {broken[0].path} on {broken[0].host} can't be read: "
            f"{broken[0].damage}. To begin at step 0, remove it: ecemb arenas rm --job "
            f"{session.job}"
        )


def _rank_state_room(
    history: History | None,
    plan: RecoveryPlan,
    old: OldArenas | None,
    stored: Stored | None,
    proposals: Sequence[_Proposal],
) -> int:
    """Bytes of every rank's record of rank state: as in the survivors, or the most that a rank needs.

    In new arenas that continue from a checkpoint or old arenas, the ranks include those that made these.
    """
    if history is not None and not plan.begins:
        return history.rank_state_bytes
    before = [] if stored is None else [rank_state.room(size) for size in stored.facts["rank_state_bytes"]]
    if old is not None:
        before.append(old.history.rank_state_bytes)
    return max(*(one.layout["rank_state_bytes"] for one in proposals), *before, 0)


def _lineage(history: History | None, stored: Stored | None, proposals: Sequence[_Proposal]) -> str:
    """The job's lineage: that of the checkpoint or of the survivors, or a new one, proposed by rank 0."""
    if stored is not None:
        return stored.facts["lineage"]
    return proposals[0].lineage if history is None else history.lineage


def _compare_plans(transport: Transport, plans: Sequence[RecoveryPlan], placement: Placement | None) -> None:
    """Compares the plans and placements that the ranks computed: the last stage. All ranks."""
    positions = json.dumps(placement.positions if placement is not None else []).encode()
    mine = b"".join(plan.digest() for plan in plans) + positions
    if len(set(transport.gather(mine, "comparing plans"))) > 1:
        raise InconsistentArenas(
            "the ranks came to different plans from the same reports; nothing was written. Do all hosts "
            "run the same version of ecemb?"
        )


def _shard(table: EngineTable, world_size: int, by_hand: Mapping[str, tuple[int, int]]) -> Shard:
    whole = by_hand.get(table.name, table.whole(world_size))
    return Shard(table.layout) if whole is None else Shard(table.layout, *whole)


def _with_room(proposal: _Proposal, room_bytes: int) -> dict[str, Any]:
    return {**proposal.layout, "rank_state_bytes": room_bytes}


def _hash(proposals: Sequence[_Proposal], room_bytes: int) -> str:
    """Hash of all ranks' layouts, with a room of `room_bytes` for every rank's state."""
    layouts = [_with_room(one, room_bytes) for one in proposals]
    return hashlib.blake2b(json.dumps(layouts).encode(), digest_size=16).hexdigest()


def _difference(session: Session, request: Request, history: History, now: Mapping[str, Any]) -> str:
    found: list[str] = []
    if [history.n, history.k] != now["code"]:
        found.append(f"code {(history.n, history.k)} then and {tuple(now['code'])} now")
    if session.arena is not None:
        then = json.loads(session.arena.constants.layout)
        before = {one.name: one for one in map(TableLayout.from_json, then["tables"])}
        for table in map(TableLayout.from_json, now["tables"]):
            old = before.pop(table.name, None)
            if old is None:
                found.append(f"table {table.name!r} is here now, and was not then")
            elif difference := table.difference(old):
                found.append(f"table {table.name!r}: {difference}")
        found += [f"table {name!r} was there then, and is not now" for name in before]
    if len(found) > _SHOWN_DIFFERENCES:
        found[_SHOWN_DIFFERENCES:] = [f"and {len(found) - _SHOWN_DIFFERENCES} more differences"]
    difference = "; ".join(found) or "tables of other ranks differ: see their messages"
    stored = ""
    if request.reader is not None:
        stored = (
            f". With resume= as it is, a start without memory begins at the newest checkpoint in "
            f"{saver.name_of(request.reader)}, if there is one, and that has to fit this model as well"
        )
    return (
        f"the arenas of job {session.job!r} hold another model than this one ({difference}): run the script "
        f"that started the job, or give this one another job={stored}"
    )


def check_checkpoint(
    session: Session,
    request: Request,
    transport: Transport,
    stored: Stored,
    shards: tuple[Shard, ...],
    everywhere: Collection[str],
) -> Sources:
    """Compares the model with the checkpoint that the plan begins with. All ranks.

    Returns:
        The stored values that this rank's tables are read from.
    """
    found: Sources = {}
    here = session.rank, session.world_size, everywhere, request.renamed
    saver.shared(
        transport,
        f"comparing the model with {stored.name}",
        lambda: found.update(contents.check(stored, shards, *here)),
    )
    return found


def check_transfer(
    request: Request, transport: Transport, shards: tuple[Shard, ...], everywhere: Collection[str]
) -> Taking:
    """Finds the tables that the training takes from another one, and compares them with the model. All ranks.

    Raises:
        CheckpointError: there is no checkpoint, or a table doesn't fit on a rank; the same error on all.
    """
    transfer = cast("Transfer", request.transfer)
    reader = transport.together("looking at transfer=", request.source)
    stored = saver.find(reader, transport, None)
    place = saver.name_of(reader)
    if stored is None:
        raise CheckpointFailed(f"transfer= {place} has no complete checkpoint: give the folder of one")
    tables = [shard.describe() for shard in shards]

    def look() -> tuple[Taking, list[str]]:
        contents.check_format(stored)
        return examine(transfer, stored, tables, everywhere)

    taking, problems = transport.together("comparing the model with transfer=", look)
    each = transport.gather(json.dumps(problems).encode(), "sharing what doesn't fit")
    if every := list(dict.fromkeys(one for text in each for one in json.loads(text))):
        raise refusal(place, stored, every)
    return taking


class HostFolder:
    """This rank's part in the check that ranks of one host name see one folder.

    A context manager: it releases the lock when the block ends or raises.

    Args:
        folder: the folder of this rank's host.
        hosts: rank -> its host.
        rank: this rank.

    Attributes:
        sees: whether this rank sees the lock that the first rank of its host's name holds; None if that is
            not known, because the file system has no such locks, or the folder is gone or another launch's.
    """

    def __init__(self, folder: Folder, hosts: Sequence[str], rank: int) -> None:
        self.sees: bool | None = None
        self._folder = folder
        self._is_shared = hosts.count(hosts[rank]) > 1
        self._is_first = hosts.index(hosts[rank]) == rank
        self._fd: int | None = None

    def __enter__(self) -> HostFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the file system has no locks
                fcntl.flock(
                    self._fd, fcntl.LOCK_UN
                )  # close() is not enough: a forked child may have the descriptor as well
            os.close(self._fd)
            self._fd = None

    def lock(self) -> None:
        """Locks the folder, on the first rank of a host name. A collective of all ranks follows, then `look`.

        Raises:
            ArenaInsecure: a level of the folder can't be trusted.
        """
        if self._is_shared and self._is_first:
            with self._folder.opened(create=True) as fd:
                self._fd = os.dup(fd)
            with contextlib.suppress(OSError):  # another launch tests the lock, or the file system has none
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.sees = True

    def look(self) -> None:
        """Tests for the lock, on the other ranks of a name; on the first rank, for the folder that it locked.

        Raises:
            ArenaInsecure: a level of the folder can't be trusted.
        """
        if not self._is_shared:
            return
        try:
            with self._folder.opened() as fd:
                if self._fd is None:
                    self.sees = _is_locked(fd)
                elif not os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                    self.sees = None
        except FileNotFoundError:
            self.sees = None


def _is_locked(fd: int) -> bool | None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def check_hosts(hosts: Sequence[str], sees: Sequence[bool | None]) -> None:
    """Checks that ranks with the same host name see the same folder. A pure function.

    Args:
        hosts: rank -> its host.
        sees: rank -> its `HostFolder.sees`, after all ranks have called `look`.

    Raises:
        RendezvousError: ranks of one host name don't see one folder.
    """
    for host in dict.fromkeys(hosts):
        first, *others = [rank for rank, name in enumerate(hosts) if name == host]
        apart = [rank for rank in others if sees[rank] is False]
        if sees[first] and apart:
            raise RendezvousError(
                f"{listed([first, *others])} have the host name {host!r}, and {listed(apart)} can't see the "
                f"folder of rank {first} in arena_dir: these are containers or machines of one name with "
                f"memory of their own, or ranks that pass different arena_dir=. Nothing was written. Give "
                f"each of them its own name, init_process_group(host=), such as its pod's or machine's; or "
                f"let the ranks of one name share arena_dir"
            )
