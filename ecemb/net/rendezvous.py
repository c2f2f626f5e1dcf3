"""The rendezvous: workers agree on their ranks, claim their arenas and connect (docs/protocol.md, 3.1).

torchrun may give a restarted worker another RANK, and keeps dead addresses in its store. So the workers of
every start agree on one list of workers and of the arenas on their hosts (`roster`), and `assign` computes
logical ranks from that list: ranks follow their memory, and replacement ranks get the ranks whose memory is
lost. `ecemb.session` calls this module's functions in their order. Must not know: the content of an arena.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import logging
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

# Default arguments of this module's functions keep the process group that exists at its import, which is
# otherwise at the first step of an optimizer. Imported here, before there is a group, it keeps none, and no
# gloo thread outlives destroy_process_group().
import torch.distributed.nn.functional  # noqa: F401  # pyright: ignore[reportUnusedImport]
from torch.distributed import distributed_c10d

from ..errors import ConfigurationError, RendezvousError
from ..memory.arena import Arena, close_attached
from ..memory.scan import Directory, Found
from ..state.ddp_buckets import note_made
from . import processes, replacement, staying
from .assignment import Assignment, Report, Roster, Worker, assign
from .error_file import Activity, follows, is_lost_connection
from .links import CHECK_S, Listener, Peer, connect, neighbours, own_addresses
from .roster import StoreGone, Superseded, agree, is_replaced
from .watch import FailureDetector
from .worker_exit import NEWS_S, hook

logger: logging.Logger = logging.getLogger("ecemb")

_PATIENCE_S = 5.0
"""How long a replacement waits for the other workers, besides twice its own time since its fork."""
_STUCK_S = 2.0
"""How long it waits for the end of a process that holds an arena of the job."""


def environment() -> tuple[int, int, str, int]:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun has set them.

    Raises:
        ConfigurationError: there is no torchrun environment.
    """
    address = os.environ.get("MASTER_ADDR", "")
    numbers = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if not (address and all(number.isdecimal() for number in numbers)):
        raise ConfigurationError(
            f"launch me with torchrun, e.g. `torchrun --standalone --nproc-per-node 4 --max-restarts 3 "
            f"{Path(sys.argv[0]).name}`: the environment has no usable RANK, WORLD_SIZE, MASTER_ADDR and "
            f"MASTER_PORT, which launchers of your own must set as well"
        )
    index, world_size, port = (int(number) for number in numbers)
    return index, world_size, address, port


def prepare() -> Activity:
    """Has the kernel end this process with torchrun's agent, and installs the exception hook.

    Called before any group is made.

    Returns:
        A new `Activity` of this process, which the exception hook and the failure detector read.

    Raises:
        RendezvousError: torchrun's agent has ended.
    """
    _die_with_agent()
    hook.prepare()
    hook.watch, hook.activity = None, Activity()
    replacement.join()
    note_made()
    return hook.activity


class Met(NamedTuple):
    """What the workers of a start have agreed on.

    Attributes:
        store: torchrun's.
        job_flags: the part of the store that outlives this start.
        found: the arenas of this host.
        roster: the workers and their arenas.
        assignments: of each worker, in the order of torchrun's RANK.
    """

    store: dist.Store
    job_flags: dist.Store
    found: Sequence[Found]
    roster: Roster
    assignments: tuple[Assignment, ...]


def meet(job: str, directory: Directory, timeout: datetime.timedelta) -> Met:
    """Agrees on the roster, assigns ranks, and begins to watch the other workers. All ranks.

    Begins again when a worker has died meanwhile and was replaced, which torchrun does not notice. A worker
    that is a replacement itself waits only for a while for others: if an agent or a host is lost, or a
    process can't end, only torchrun can restart the job.

    Args:
        job: name of the job.
        directory: this host's folder of arenas.
        timeout: deadline, and how long a peer may be silent afterwards.

    Returns:
        What all workers agreed on. If there are other workers, the failure detector is `hook.watch`.

    Raises:
        ArenaBusy: a living process holds an arena of this job.
        ArenaIncompatible: another version of ecemb wrote an arena of this job.
        RendezvousError: the workers did not agree before the deadline, or don't fit the arenas.
        InconsistentArenas: the arenas contradict each other.
    """
    index, world_size, address, port = environment()
    timeout_s = timeout.total_seconds()
    deadline = time.monotonic() + timeout_s
    store = connect_store(address, port, index, timeout)
    while True:
        try:
            found = directory.scan(timeout_s=_stuck_s() if replacement.follows_death() else timeout_s / 2)
            _check_ended(found)
            job_flags = dist.PrefixStore(f"ecemb/{job}", store)
            made = _assemble(job_flags, directory, found, index, world_size, timeout_s, deadline)
            return Met(store, job_flags, found, *made)
        except Superseded:
            logger.debug("a worker was replaced while the workers met: they meet again")
        except StoreGone:
            # Without a store of the agents', the store of the start before ends with its RANK 0.
            if not replacement.follows_death() or has_agents_store() or time.monotonic() > deadline:
                raise
            time.sleep(CHECK_S)
            store = connect_store(address, port, index, timeout)


def _check_ended(found: Sequence[Found]) -> None:
    """Checks that the processes that this process and others replace have ended.

    Raises:
        RendezvousError: one has not; its main thread may be in a call that keeps the interpreter's lock.
    """
    held = [one for one in found if one.holder not in (None, os.getpid())]
    if held and replacement.follows_death():
        raise _given_up(
            f"process {held[0].holder} of the job holds its arena {_stuck_s():.0f} s after another one died"
        )


def _stuck_s() -> float:
    """How long to wait for processes that hold arenas: they may come back, or be ended for it."""
    return _STUCK_S + (0.0 if staying.current() is None else staying.AWAY_S)


def _given_up(why: str) -> RendezvousError:
    """The error of a replacement that leaves the restart to torchrun; not the cause in its summary."""
    replacement.leave()
    return follows(RendezvousError(f"{why}: this process ends, so that torchrun restarts all workers"))


def _assemble(
    job_flags: dist.Store,
    directory: Directory,
    found: Sequence[Found],
    index: int,
    world_size: int,
    timeout_s: float,
    deadline: float,
) -> tuple[Roster, tuple[Assignment, ...]]:
    """One attempt of `meet`.

    Raises:
        Superseded: a worker died meanwhile, and was replaced.
        StoreGone: the store does not answer any more.
    """
    patience_s = _patience_s()
    meet_by = min(deadline, time.monotonic() + patience_s) if replacement.follows_death() else deadline
    with Listener() as listener:
        addresses = own_addresses(os.environ["MASTER_ADDR"])
        stay = staying.current()
        keeps = "" if stay is None else stay.arena_id
        worker = Worker(directory.host, secrets.token_hex(8), os.getpid(), addresses, listener.port, keeps)
        reports = [report_of(directory, one) for one in found]
        try:
            roster = agree(job_flags, worker, reports, index, world_size, meet_by)
        except StoreGone:
            raise
        except RendezvousError as error:
            if time.monotonic() < meet_by or meet_by == deadline:
                raise
            raise _given_up(
                f"workers that ecemb-run should replace have not come back within {patience_s:.0f} s"
            ) from error
        assignments = assign(roster.workers, roster.reports, roster.opened)
        peers = [
            Peer(f"rank {own.rank} (host {worker.host}, pid {worker.pid})", worker.addresses, worker.port)
            for own, worker in zip(assignments, roster.workers, strict=True)
        ]
        near = {one: peers[one] for one in neighbours(index, world_size)}

        def check() -> None:
            if any(is_replaced(job_flags, roster.workers[one], one, deadline) for one in near):
                raise Superseded

        try:
            links = connect(listener, index, world_size, near, bytes.fromhex(roster.secret), deadline, check)
        except RendezvousError:
            until = time.monotonic() + (_PATIENCE_S if replacement.is_possible() else 0)
            while time.monotonic() < until:
                check()
                time.sleep(CHECK_S)
            raise
        names = [peer.name for peer in peers]
        if links:
            hook.watch = FailureDetector(links, index, names, timeout_s, hook.activity, stay)
    return roster, assignments


def _patience_s() -> float:
    """How long this process waits for others that a death has ended, in seconds.

    They run their scripts first, as this process did before its first start. A process that stays comes here
    earlier, by that time; one that could not come back begins its script later.
    """
    now = time.monotonic()
    began = now if processes.script_began is None else processes.script_began
    if processes.met_first is None:
        processes.met_first = now
    if replacement.rejoins:
        return _PATIENCE_S + staying.AWAY_S + 3 * (processes.met_first - began)
    return _PATIENCE_S + (0.0 if staying.current() is None else staying.AWAY_S) + 2 * (now - began)


def make_group(
    backend: str | None,
    store: dist.Store,
    own: Assignment,
    world_size: int,
    found: Sequence[Found],
    timeout_s: float,
    patience_s: float,
    options: Mapping[str, Any],
) -> tuple[Arena | None, tuple[Arena, ...]]:
    """Claims this worker's arenas, and makes torch.distributed's default group. All ranks.

    Args:
        backend: as for torch.distributed.
        store: a store for this group alone.
        own: this worker's rank and arenas.
        world_size: number of ranks.
        found: the arenas of this host, as they were reported.
        timeout_s: how long to wait for a process that still holds the arena.
        patience_s: deadline of the group's collectives.
        options: further options of torch's `init_process_group`; those that are None are left out.

    Returns:
        This rank's arena, or None for a replacement rank; and the arenas that this worker holds for another
        number of ranks (`Assignment.held`). All are locked.

    Raises:
        RendezvousError: an arena changed, or is not on this host.
        ArenaBusy: a living process holds an arena.
    """
    try:
        arena = claim(found, own.arena_id, own.rank, timeout_s) if own.arena_id is not None else None
        held = tuple(claim(found, name, own.rank, timeout_s) for name in own.held)
        os.environ["RANK"] = str(own.rank)
        patience = datetime.timedelta(seconds=patience_s)
        dist.init_process_group(
            backend,
            store=store,
            rank=own.rank,
            world_size=world_size,
            timeout=patience,
            **{name: value for name, value in options.items() if value is not None},
        )
        hook.prepare()
    except BaseException as error:
        if hook.watch is not None:
            if is_lost_connection(error):
                hook.watch.news(NEWS_S)  # a worker may have died
            hook.watch.announce_failure()
        raise
    atexit.register(_destroy_groups, os.getpid())
    return arena, held


def end_session() -> None:
    """Ends all that `meet` and `make_group` have begun in a process that stays, but the failure detector.

    The groups are aborted. Arenas are as they are; a later start attaches them as a new process does.
    """
    atexit.unregister(_destroy_groups)
    if dist.is_initialized():
        dist.destroy_process_group()
    # A group that a death has cut off in the making has its number, and names are numbers: the others' begin
    # at 0, and ranks whose groups have other names don't find each other.
    distributed_c10d._world.group_count = 0  # pyright: ignore[reportPrivateUsage]
    close_attached()
    hook.watch, hook.activity = None, Activity()


def _destroy_groups(pid: int) -> None:
    """Destroys the groups while the interpreter is whole: gloo's threads must not outlive it (SIGABRT)."""
    if os.getpid() == pid and dist.is_initialized():  # a forked child shares its parent's sockets
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def connect_store(address: str, port: int, index: int, timeout: datetime.timedelta) -> dist.Store:
    """Connects to torchrun's own store, or to one that RANK 0 hosts if the launcher keeps none.

    Raises:
        RendezvousError: no store answers.
    """
    agents = has_agents_store()
    if agents and index == 0 and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        # Surviving agents keep the address of the first round's store and don't send it to a new agent
        # (torch 2.13); if the host of that store is lost, they even continue with a dead address.
        logger.warning(
            "torchrun was launched so that a lost host can't be replaced: a new agent gets no address of "
            "the store that the others share with their workers. Launch with --rdzv-backend c10d, and with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of every agent"
        )
    try:
        return dist.TCPStore(
            address,
            port,
            is_master=index == 0 and not agents,
            timeout=timeout,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise RendezvousError(
            f"no store answers at {address}:{port} within {timeout.total_seconds():.0f} s: "
            f"{str(error).splitlines()[0]}; is torchrun's agent alive?"
        ) from error


def has_agents_store() -> bool:
    """Whether the launcher keeps a store for its workers, which outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def report_of(directory: Directory, found: Found) -> Report:
    """The report of an arena in a host's folder, with only the `Identity` of its constants."""
    header = found.header
    if header is not None:
        header = dataclasses.replace(header, constants=header.constants.identity)
    where = directory.host, str(found.path)
    return Report(*where, header, found.damage, found.holder, found.torn, found.incompatible)


def claim(found: Sequence[Found], arena_id: str, rank: int, timeout_s: float) -> Arena:
    """Locks an arena for this worker, and checks that its header is still the reported one."""
    for one in found:
        if one.header is not None and one.header.constants.arena_id == arena_id:
            arena = Arena.attach(one, timeout_s=timeout_s)
            if arena.header() != one.header:
                raise RendezvousError(
                    f"{one.path} changed while this worker was claiming it: another process wrote to "
                    f"it; is the job running twice?"
                )
            return arena
    raise RendezvousError(
        f"rank {rank} was given arena {arena_id}, which this worker did not see on its host: "
        f"do two hosts of the job share the name? Give each one its own, init_process_group(host=)"
    )


def _die_with_agent() -> None:
    """Has the kernel kill this worker when torchrun's agent ends.

    A worker runs in a session of its own: otherwise it would continue the training after a killed agent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not processes.die_with_parent(os.getppid()):
        raise RendezvousError("torchrun's agent ended while this worker was starting: launch the job again")
