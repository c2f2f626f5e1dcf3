"""Opens this rank's memory: the collective half of `ecemb.protect`, in stages.

`open_memory` runs them from top to bottom (docs/protocol.md, 3.3):

    agree        examine the training, and agree on one plan: nothing is written before
    attach       claim or create the arena, and join the generation: nothing changes before
    begin        fill new arenas with the model, or with a checkpoint (`create`), or
    recover      undo and redo on survivors, and rebuild lost memory
    supersede    after recovery on all ranks: remove the arenas that earlier starts left
    restore      restore the state that is not rows
    report       write the result to the log and to the arenas' headers

A check that can fail on one rank alone runs through `Transport.together`, so that it fails on all.

Owns the connections that ecemb makes for itself, beside the training's own, with the session's deadline: the
control group and its notes, which carry the collectives of the protocol; the mesh of swaps, or the fabric of
`parity_backend`, which carry deltas; and those for requests of lost words. All are made by collective calls.
`Session.network` makes them.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import numpy as np
import torch
import torch.distributed as dist

from ..checkpoint.contents import JobIdentity
from ..checkpoint.interface import Stored
from ..checkpoint.saver import Saver, name_of
from ..coding.placement import Placement
from ..engines.device_image import Uploader
from ..engines.discover import Tables
from ..errors import (
    ConfigurationError,
    EcembError,
    JobFinished,
    LayoutMismatch,
    UsageError,
)
from ..kernels import contract
from ..kernels.threads import numa_nodes, share_of_processors
from ..memory.arena import Arena
from ..memory.rank_memory import RankMemory
from ..net import processes, replacement
from ..net.collectives import Fabric, Transport
from ..net.links import Peer, neighbours
from ..net.mesh import Mesh, Notes
from ..net.wording import counted, listed
from ..recovery.background import Background, partners
from ..recovery.execute import RecoveryReport, Stopwatch, details, join, recover, write_to_header
from ..recovery.plan import RecoveryPlan
from ..recovery.requester import Requester
from ..recovery.server import Server
from ..recovery.state_slices import gathered
from ..session import Session, end_for_a_new_process
from ..state import rank_state as rank_states
from ..state.rank_state import RankState
from .agree import HostFolder, World, negotiate
from .create import InitialContent, Start, begin, claim_or_create, discard_superseded
from .history import OldArenas, is_of_other_ranks, shared_history
from .moving import MovedContent, plan_move, settle
from .request import ParityBackend, Request, Training, examine_training
from .survey import Forgotten, Surveyed, survey

logger: logging.Logger = logging.getLogger("ecemb")


@dataclasses.dataclass(frozen=True)
class Opened:
    """The result of `open_memory`.

    Attributes:
        start: the start.
        memory: this rank's memory; LIVE, or REBUILDING while it is rebuilt beside training.
        saver: the durable tier.
        report: the outcome of the start.
        background: this rank's part in a rebuild beside training.
        forgotten: names objects of the script that no recovery restores; None where a recovery has begun, as
            the fresh start has named them.
    """

    start: Start
    memory: RankMemory
    saver: Saver
    report: RecoveryReport
    background: Background
    forgotten: Forgotten | None


def open_memory(session: Session, asked: Callable[[], Request]) -> Opened:
    """Opens the memory of this rank. All ranks.

    Args:
        session: this process's session.
        asked: returns the user's arguments. It may raise on one rank alone, for example if only this rank has
            no working directory for a relative path.

    Raises:
        EcembError: any error of the tree; on all ranks if on one.
        Surveyed: the script is only checked; nothing was written.
    """
    session.activity.place = "in ecemb.protect()"
    before_s = _before(session)
    with ExitStack() as if_it_fails, _naming_the_removal(session):
        opened = _open(_agree(session, asked, if_it_fails), before_s)
        if_it_fails.pop_all()
    return opened


@contextmanager
def _naming_the_removal(session: Session) -> Generator[None]:
    """Adds to each `LayoutMismatch` the command that removes the job's memory."""
    try:
        yield
    except LayoutMismatch as error:
        way_out = f"To begin again as job {session.job!r}, which gives up its memory"
        error.args = (f"{error}. {way_out}: {session.directory.removal}",)
        raise


def _open(start: Start, before_s: Mapping[str, float]) -> Opened:
    """Opens the memory of this rank, after all ranks have agreed on a plan. All ranks."""
    forgotten = Forgotten(start) if start.world.plan.begins or start.request.strict else None
    if forgotten is not None:
        start.transport.together("looking for state that no recovery restores", forgotten.name)
    with start.watch.phase("kernels"):
        own, here = start.world.processors[start.session.rank], _processors_here(start)
        threads = max(torch.get_num_threads(), share_of_processors(own, here))
        kernels = contract.get_kernels("cpu", threads)
    background, old = Background(), start.world.old
    if old is not None:
        memory, report = _moved(start, old, kernels)
    else:
        memory = _attach(start, kernels)
        if start.world.plan.begins:
            report = begin(start, memory, InitialContent(start, memory))
        else:
            report, background = _recover(start, memory)
    _supersede(start, memory)
    _restore(start, memory)
    saver = _saver(start, memory)
    report = dataclasses.replace(report, before_s=before_s)
    _report(start, memory, report)
    return Opened(start, memory, saver, report, background, forgotten)


def _processors_here(start: Start) -> list[tuple[int, ...]]:
    """The processors of each rank of this host. The first of the ranks reports those that span NUMA nodes."""
    session = start.session
    ranks = [rank for rank, host in enumerate(session.hosts) if host == session.hosts[session.rank]]
    here = [start.world.processors[rank] for rank in ranks]
    if session.rank == ranks[0] and len(ranks) > 1:
        spread = [rank for rank, own in zip(ranks, here, strict=True) if len(numa_nodes(own)) > 1]
        if spread:
            logger.info(
                "the processors of %s are on several NUMA nodes, and their memory may be far from their "
                "threads: torchrun --numa-binding=node, by numactl, binds each rank to the node of its GPU",
                listed(spread),
            )
    return here


def _moved(start: Start, old: OldArenas, kernels: contract.Kernels) -> tuple[RankMemory, RecoveryReport]:
    """Opens new memory, filled from the memory of another number of ranks. All ranks."""
    with start.watch.phase("settle"):
        moving = plan_move(start, old)
        settle(start, moving, kernels, lambda: _flag_started(start, start.session.roster.generation))
    memory = _attach(start, kernels)
    report = begin(start, memory, MovedContent(start, memory, moving, kernels))
    return memory, moving.report(report)


def _before(session: Session) -> dict[str, float]:
    """Seconds from the start of this process to this call, by phase; see `RecoveryReport.before_s`.

    In a process that stayed, from the moment at which its last session had ended.
    """
    stayed = None if session.stay is None else session.stay.began
    began, now = stayed or processes.made_at(), time.monotonic()
    seconds: dict[str, float] = {}
    if processes.script_began is not None and stayed is None:
        seconds["fork"] = max(0.0, processes.script_began - began)
        began = processes.script_began
    seconds["script"] = max(0.0, now - began - session.joined_s)
    return {**seconds, "rendezvous": session.joined_s}


def _agree(session: Session, asked: Callable[[], Request], if_it_fails: ExitStack) -> Start:
    """Examines the training and negotiates a plan; nothing is written. All ranks.

    Raises:
        JobFinished: the job has left this launch, and may continue in another one.
        UsageError: an earlier start of this launch was refused.
        Surveyed: the script is only checked, and ends here.
    """
    watch = Stopwatch()
    if session.job_flags.check(["left"]):
        raise JobFinished(
            f"job {session.job!r} has left this launch: guard.leave() has saved it to "
            f"{session.job_flags.get('left').decode()}. It does not train on here, as another launch may do "
            f"so: launch it again, with ecemb.protect(resume=)"
        )
    if session.job_flags.check(["refused"]):
        raise UsageError(
            f"an earlier start of this launch was refused, and a restart would train on without the "
            f"gradients in question: {session.job_flags.get('refused').decode()}. Then launch the job again"
        )
    with watch.phase("agree"), HostFolder(session.directory, session.hosts, session.rank) as folder:
        transport = control_group(session, notes=True)
        if_it_fails.callback(transport.hang_up)
        if session.stay is not None:
            session.stay.at_hang_up(transport.hang_up)
            session.stay.at_end(transport.disconnect)
        request, training = transport.together(
            "checking arguments, the model and its optimizers", lambda: _examined(asked, folder)
        )
        history = shared_history(session, transport)
        held = None if history is None or is_of_other_ranks(history, session) else (history.n, history.k)
        request = transport.together("choosing a code", lambda: _with_code(request, session, held, folder))
        world = negotiate(session, request, transport, training, history, folder.sees)
    if session.stay is not None:
        session.stay.at_end(training.buckets.end)
    if replacement.rejoins and (world.plan.begins or world.old is not None):
        end_for_a_new_process("the job does not go on from the memory of all ranks as they were")
    start = Start(session, request, transport, training, world, watch, earlier=session.arena)
    if session.check is not None:
        raise Surveyed(survey(start))
    return start


def _examined(asked: Callable[[], Request], folder: HostFolder) -> tuple[Request, Training]:
    folder.lock()
    request = asked()
    return request, examine_training(request)


def _with_code(
    request: Request, session: Session, held: tuple[int, int] | None, folder: HostFolder
) -> Request:
    folder.look()
    return request.with_code_for(session.hosts, held)


def _attach(start: Start, kernels: contract.Kernels) -> RankMemory:
    """Gives this rank its arena, and makes it a member of the generation. All ranks."""
    session, backend, placement = start.session, start.request.parity_backend, start.world.placement
    if placement is not None:
        with start.watch.phase("connect"):
            start.transport.swap_mesh = swap_mesh(session, start.transport, placement)
    if backend != "tcp" and placement is not None:
        with start.watch.phase("fabric"):
            start.transport.fabric = fabric(session, backend, start.transport)
    with start.watch.phase("attach"):
        memory = claim_or_create(start, kernels)
        start.training.rank_state.room_bytes = len(memory.rank_state)
        generation, generation_id = start.world.generation, session.roster.generation_id
        join(memory, start.transport, generation, generation_id, lambda: _flag_recovery(start))
    return memory


def _flag_recovery(start: Start) -> None:
    """Sets the job's `started` flag to this generation, by which a start without any arena knows that it ran.

    A start with new arenas sets the flag when all of them are LIVE: until then, the earlier arenas count.
    """
    if not start.world.plan.begins:
        _flag_started(start, start.world.generation)


def _flag_started(start: Start, generation: int) -> None:
    start.session.job_flags.set("started", str(generation))


def _recover(start: Start, memory: RankMemory) -> tuple[RecoveryReport, Background]:
    """Brings the arenas to the plan's transaction, and points the tables to the rows in them. All ranks."""
    transport, tables, plan = start.transport, start.training.tables, start.world.plan
    background, in_background = Background(), start.in_background
    transport.together("pointing to the tables", lambda: tables.place(memory.space.tables, fresh=False))
    with Uploader(tables.images.all(), memory.space) as uploader:
        report = recover(memory, transport, plan, start.watch, uploader.ready, in_background=in_background)
        if in_background:
            with start.watch.phase("connect"):
                partners = requests(start.session, transport, plan)
                if memory.rank in plan.lost:
                    background = Requester(memory, partners, plan, start.session.activity)
                else:
                    background = Server(memory, partners, plan)
                if start.session.stay is not None:
                    start.session.stay.at_hang_up(partners.hang_up)
                    start.session.stay.at_end(background.end)
                background.start()
            with start.watch.phase("rebuild"):
                _fetch_first(memory, tables, background, uploader)
        with start.watch.phase("restore"):
            transport.together("bringing images to their tables", uploader.finish)
            tables.mark_clean()
    return report, background


def _fetch_first(memory: RankMemory, tables: Tables, background: Background, uploader: Uploader) -> None:
    """Waits for rank state, and for tables whose lookups can't wait for single rows. This rank alone."""
    if not background.is_lacking:
        return
    background.ensure(len(memory.space.tables) - 1, np.arange(memory.space.named[-1].table.layout.rows))
    for index in tables.unannounced:
        background.ensure_all(index)
        uploader.ready(*memory.space.bases[index : index + 2])


def _supersede(start: Start, memory: RankMemory) -> None:
    """Removes arenas of earlier starts, as recovery has ended on all ranks. All ranks.

    A rank returns only after all ranks have removed theirs, so no rank trains before.
    """
    start.transport.barrier("the end of recovery")
    if start.earlier is not None and start.earlier is not memory.arena:
        _remove(start.earlier)  # the arena survived, but other ranks lost more than the code survives
    for arena in start.session.held:  # the arena's rows have moved
        _remove(arena)
    start.session.held = ()
    _flag_started(start, start.world.generation)
    discard_superseded(start.session)
    start.transport.barrier("the start of training")


def _remove(arena: Arena) -> None:
    arena.close()
    try:
        arena.remove()
    except EcembError as error:
        logger.warning("%s", error)


def _restore(start: Start, memory: RankMemory) -> None:
    """Restores the state that is not rows; not at a fresh start, whose state is the script's. All ranks.

    Gradient buckets come first: their rehearsal runs the hooks of gradients, the user's and
    DistributedDataParallel's, which may draw random numbers, count, and step optimizers. The buckets' orders
    are among the scalars, so these come before.
    """
    if start.world.plan.kind == "fresh":
        return
    _warn_of_next_loss(start.session, start.world)
    transport, training = start.transport, start.training

    def scalars() -> bytes:
        packed = rank_states.read(memory.rank_state)
        training.rank_state.unpack_scalars(packed)
        return packed

    def rest() -> None:
        training.replicated.load(slots, memory.committed)
        # Rank state comes last: no random number may be drawn after its generators are restored.
        training.rank_state.unpack(packed)

    with start.watch.phase("restore"):
        packed = transport.together("restoring scalars", scalars)
        counts = bytes(len(orders) for orders in training.buckets.state())
        buckets_fit = len(set(transport.gather(counts, "comparing gradient buckets"))) == 1
    if buckets_fit and any(counts):
        with start.watch.phase("rehearse"):
            training.buckets.rehearse()
    with start.watch.phase("restore"):
        slots = gathered(memory, transport)
        transport.together("restoring dense and rank state", rest)


def _saver(start: Start, memory: RankMemory) -> Saver:
    """The durable tier of the training, with the checkpoint store that the job resumed from."""
    session, request, training = start.session, start.request, start.training
    saver = Saver(
        JobIdentity(session.job, start.world.lineage, (request.code.n, request.code.k)),
        memory,
        start.transport,
        training.replicated,
        start.world.shards,
        lambda: control_group(session),
        training.tables.listen,
    )
    saver.keep_in_mind(request.reader)
    return saver


def _report(start: Start, memory: RankMemory, report: RecoveryReport) -> None:
    """Writes the outcome of the start to the log and to the arena's header. All ranks."""
    session, stored = start.session, start.world.stored
    if session.rank == 0 and stored is not None:
        if start.world.old is None:
            _log_resumption(session, start.request, start.world, stored)
        if others := _others(start.world):
            logger.warning(
                "%s of the checkpoint are tables here: rows and their optimizer state carry over; learning "
                "rates and step counts of tables of another engine then are as the script sets them",
                others,
            )
    taking = start.world.taking
    if session.rank == 0 and taking is not None:
        place = f"{name_of(start.request.source())} ({taking.stored.name})"
        logger.info("tables %s begin with rows of %s", list(taking.names), place)
    if session.rank == 0:
        _warn_of_lost(start.training.rank_state)
    write_to_header(memory, report)
    replacement.write_widths(
        {
            one.table.widths
            for one in memory.space.named
            if one.table.layout.rows > 1 and not memory.kernels.has_loops(one.table.widths)
        }
    )
    hosts = len(set(session.hosts))
    start.request.window.take_up(memory, start.transport, hosts, overlap=start.request.overlap)
    level = logging.WARNING if report.lost else logging.INFO
    if session.rank != 0 and session.rank not in report.lost:
        level = logging.DEBUG
    logger.log(level, "rank %d: %s", session.rank, report)
    if session.rank == 0 and report.lost and start.world.old is None:
        _log_evidence(memory, report, is_expected=start.request.verify > 0)
    logger.debug("rank %d: %s", session.rank, details(report))


def _log_evidence(memory: RankMemory, report: RecoveryReport, *, is_expected: bool) -> None:
    """Says how old the evidence is on which lost memory is rebuilt; a warning if there is none at all.

    Args:
        memory: this rank's arena.
        report: of a recovery from lost memory.
        is_expected: whether parity is compared with rows beside training.
    """
    placement, is_compared = memory.geometry.placement, False
    if placement is not None and not report.in_background:
        is_compared = all(len(blocks) < placement.r for blocks in placement.erasures(report.lost).values())
    if report.verified_step is None and is_expected and not is_compared:
        logger.warning(
            "parity was last known to fit all rows, from comparisons beside training: never yet. Nor were "
            "the blocks that survived compared before the rebuild: if the script writes rows that are not "
            "declared (weight.data, numpy, a collective in place), rebuilt rows are not as it wrote them. "
            "python -m ecemb rehearse finds such writes"
        )
        return
    compared = "never yet"
    if report.verified_step is not None:
        compared = f"{counted(report.step - report.verified_step, 'step')} before the loss"
    logger.info("parity was last known to fit all rows, from comparisons beside training: %s", compared)


def _warn_of_lost(state: RankState) -> None:
    """Warns of objects and metrics whose state no recovery restores."""
    if state.empty:
        logger.warning(
            "%s: state_dict() is empty, so nothing of it comes back after a failure if it stays empty: give "
            "an object whose state_dict() has its state",
            ", ".join(state.empty),
        )
    if state.growing:
        logger.warning(
            "%s: a metric of the model that lists all samples begins empty after a failure: use its binned "
            "form (thresholds=), or give it in state= and reset it often, since its room is fixed",
            ", ".join(f"{name} ({type(metric).__name__})" for name, metric in state.growing.items()),
        )


def _log_resumption(session: Session, request: Request, world: World, stored: Stored) -> None:
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
            "the checkpoint in %s was saved by %s, and this job has %d: tables are sharded again, "
            "dense state carries over, data positions begin again",
            place,
            counted(size, "rank"),
            session.world_size,
        )
        logger.debug(
            "generators and state= objects come from the checkpoint on ranks below %d",
            min(size, session.world_size),
        )


def _others(world: World) -> list[str]:
    """Names of stored tables from which tables of this rank with another name or other columns are read."""
    pairs = world.sources.items()
    found = {one.table: 0 for key, sources in pairs for one in sources if one.key != key}
    return list(found)


def _warn_of_next_loss(session: Session, world: World) -> None:
    placement = world.placement
    if placement is None or session.rank != 0 or placement.fragile(world.constants.domains):
        return
    for host in sorted(map(str, placement.fragile(session.hosts))):
        ranks = [rank for rank, at in enumerate(session.hosts) if at == host]
        logger.warning("the loss of host %s (%s) would be more than the code survives", host, listed(ranks))


_WHOLE_REBUILD_S = 30 * 86400.0
"""How long a holder waits for a request, in seconds."""


def control_group(session: Session, *, notes: bool = False) -> Transport:
    """Makes a gloo group of all ranks, separate from the training's collectives. All ranks.

    Args:
        session: This process's session.
        notes: Whether the group has notes, which carry the rounds of steps and of `barrier`.
    """
    transport = session.network.control_group(session.patience_s)
    transport.activity = session.activity
    if notes:
        near = neighbours(session.rank, session.world_size)
        transport.notes = Notes(_mesh(session, transport, near, b"notes"))
    return transport


def swap_mesh(session: Session, transport: Transport, placement: Placement) -> Mesh:
    """Connects this rank with those that it sends deltas to or receives deltas from. All ranks."""
    near = {*placement.recipients(session.rank), *placement.senders(session.rank)}
    return _mesh(session, transport, sorted(near), b"streams")


def _mesh(session: Session, transport: Transport, near: Sequence[int], purpose: bytes) -> Mesh:
    """Connects this rank with some other ranks. All ranks.

    Args:
        session: this process's session.
        transport: the control group.
        near: the other ranks; each of them has this rank in its own `near`.
        purpose: appended to the secret of the handshake; different for each mesh.
    """

    def peer(rank: int, port: int) -> Peer:
        return Peer(f"rank {rank} (host {session.hosts[rank]})", session.addresses[rank], port)

    secret = bytes.fromhex(session.roster.secret) + purpose
    # The longer deadline: a peer may only be busy.
    return session.network.mesh(transport, near, peer, secret, session.patience_s, session.activity)


def requests(session: Session, transport: Transport, plan: RecoveryPlan) -> Mesh:
    """Connects this rank with its partners in a rebuild beside training. All ranks."""
    made = _mesh(session, transport, partners(plan, session.rank), b"requests")
    # A holder may get no request while other blocks are rebuilt; the failure detector knows which rank died.
    if session.rank not in plan.lost:
        made.timeout_s = _WHOLE_REBUILD_S
    return made


def fabric(session: Session, backend: ParityBackend, transport: Transport) -> Fabric:
    """Makes a group of all ranks that sends from each rank's own device. All ranks.

    Args:
        session: this process's session.
        backend: the group's backend.
        transport: the control group.

    Raises:
        ConfigurationError: a rank has no device, or ranks share one.
    """
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
    """The device that a backend sends from, and a name that is unique to the device.

    Raises:
        ConfigurationError: there is no CUDA device, or torch lacks the backend.
    """
    if torch.cuda.is_available() and dist.is_backend_available(backend):
        device = torch.device("cuda", torch.cuda.current_device())
        return device, str(torch.cuda.get_device_properties(device).uuid).encode()
    raise ConfigurationError(
        f"parity_backend={backend!r} needs a CUDA device for each rank and a torch that was built with "
        f"{backend}; one of them is missing here: leave parity_backend out, and deltas go over TCP"
    )
