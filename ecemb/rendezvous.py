"""Identity: which worker is which rank, and whose memory it gets (D7; protocol.md, section 2).

torchrun may give a restarted worker another RANK, and reuses its store with dead addresses in it. So the
workers of every start agree on one list of who is there and what memory their hosts hold (`rollcall`), and
`assign` gives out logical ranks from that list: ranks follow their memory, newcomers take what is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import datetime
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

# Its default arguments keep the group that exists when it is imported, which is at the first step of an
# optimizer: imported here, before there is one, no gloo thread outlives destroy_process_group().
import torch.distributed.nn.functional  # noqa: F401  # pyright: ignore[reportUnusedImport]

from . import rollcall
from .arena import Arena
from .buckets import note_made
from .directory import Directory, Found
from .ending import hook
from .errors import (
    ConfigurationError,
    NotInitialized,
    RendezvousError,
    UsageError,
)
from .folder import check_name
from .links import own_addresses
from .meeting import Listener, Peer, connect
from .roster import Report, Roster, Seat, Worker, assign
from .watch import Watch
from .whereabouts import Whereabouts
from .words import counted, listed

logger: logging.Logger = logging.getLogger("ecemb")

CHECKED = ".check"
"""Ends the name of a job that is only checked."""
_CHECKED_NAME = 50  # characters of a job's name that are left in that of its check
_PATIENCE_S = 1800.0  # torch's own default
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Check:
    """That the script is only checked: it starts as a job that no memory is of.

    Attributes:
        host: stands for the hostname; None for the real one.
    """

    host: str | None = None


@dataclasses.dataclass
class Session:
    """What `init_process_group` leaves for `protect`.

    Attributes:
        job: the job's name.
        directory: this host's folder of arenas.
        rank: the logical rank.
        world_size: number of ranks.
        hosts: rank -> host of its worker now.
        roster: what all workers agreed on.
        arena: this rank's arena, locked; None for a newcomer.
        marks: the part of the store that outlives this start.
        timeout_s: how long a peer may be silent, and deadline of every wait but collectives.
        patience_s: deadline of collectives: a peer that is not silent is only slow.
        watch: watches the other ranks; None if there are none.
        whereabouts: where this process is in the training.
        protected: whether a guard has been made.
        check: that the script is only checked, and ends where it calls `protect`; else None.
    """

    job: str
    directory: Directory
    rank: int
    world_size: int
    hosts: tuple[str, ...]
    roster: Roster
    arena: Arena | None
    marks: dist.Store
    timeout_s: float
    patience_s: float
    watch: Watch | None
    whereabouts: Whereabouts
    protected: bool = False
    check: Check | None = None


_check: Check | None = None
_session: Session | None = None
_pid = 0
"""The process that has initialised the groups."""


def check_only(check: Check | None) -> None:
    """From here on, starts of this process are checks; with None, they are starts again."""
    global _check
    _check = check


def current() -> Session:
    """The session of this process.

    Raises:
        NotInitialized: `init_process_group` has not been called.
    """
    if _session is None:
        raise NotInitialized(
            "call ecemb.init_process_group(backend, job=...) first, in place of "
            "torch.distributed.init_process_group: it gives this worker its rank and its memory"
        )
    return _session


def init_process_group(
    backend: str | None = None,
    *,
    job: str,
    arena_dir: str | os.PathLike[str] = "/dev/shm",
    host: str | None = None,
    timeout: datetime.timedelta = datetime.timedelta(seconds=120),
) -> None:
    """Initialises torch.distributed's default group with ranks that follow their memory. All ranks.

    Takes the place of torch.distributed.init_process_group in a script launched by torchrun, and works
    across torchrun's restarts. Sets the environment's RANK to the logical rank; `dist.get_rank()` agrees.

    Args:
        backend: as torch.distributed's, e.g. "gloo".
        job: name of the job: a relaunch with the same name finds its arenas. Letters, digits, . _ -
        arena_dir: where arenas lie; must outlive the workers and be local to the host.
        host: name of the failure domain and of the arenas' folder; the hostname by default. Several
            torchrun agents on one machine stand for hosts by passing different ones.
        timeout: deadline of the rendezvous; from then on, a peer of which nothing was heard for so long
            counts as dead. A peer that is only slow doesn't: its process says every second that it is there,
            whatever its interpreter does, and collectives wait for it for half an hour, or for `timeout` if
            that is longer. A process that dies is noticed at once; one on a host that lost its power or its
            network, or that is stopped, after `timeout`.

    Raises:
        ConfigurationError: no torchrun environment, or a bad name or path.
        UsageError: torch.distributed is initialised already.
        ArenaBusy: a living process holds an arena of this job.
        ArenaIncompatible: another version of ecemb wrote an arena of this job.
        RendezvousError: the workers did not agree before the deadline, or don't fit the arenas.
        InconsistentArenas: the arenas contradict each other.
    """
    global _session, _pid
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed is initialised already: call ecemb.init_process_group in place of "
            "torch.distributed.init_process_group, not after it"
        )
    index, world_size = _environment()
    timeout_s = timeout.total_seconds()
    if timeout_s <= 0:
        raise ConfigurationError(f"timeout must be positive; it is {timeout_s} s")
    _die_with_agent()
    hook.prepare()
    hook.watch, hook.whereabouts = None, Whereabouts()
    note_made()
    if _check is not None:
        check_name("job", job)
        job, host = f"{job[:_CHECKED_NAME]}{CHECKED}", host or _check.host
    directory = Directory(Path(arena_dir), job, socket.gethostname() if host is None else host)
    deadline = time.monotonic() + timeout_s
    store = _store(index, timeout)
    found = directory.scan(timeout_s=timeout_s / 2)
    marks = dist.PrefixStore(f"ecemb/{job}", store)
    with Listener() as listener:
        addresses = own_addresses(os.environ["MASTER_ADDR"])
        worker = Worker(directory.host, secrets.token_hex(8), os.getpid(), addresses, listener.port)
        reports = [_report(directory, one) for one in found]
        roster = rollcall.agree(marks, worker, reports, index, world_size, deadline)
        seats = assign(roster.workers, roster.reports, roster.opened)
        hook.watch = watch = _watch(listener, roster, seats, index, timeout_s, deadline, hook.whereabouts)
    seat = seats[index]
    hosts = {s.rank: w.host for s, w in zip(seats, roster.workers, strict=True)}
    patience_s = max(timeout_s, _PATIENCE_S)
    try:
        arena = _claim(found, seat, timeout_s) if seat.arena_id is not None else None
        os.environ["RANK"] = str(seat.rank)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"ecemb/{job}/{roster.prefix}", store),
            rank=seat.rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=patience_s),
        )
        hook.prepare()
    except BaseException:
        if watch is not None:
            watch.fail()
        raise
    _pid = os.getpid()
    atexit.register(_leave)
    _session = Session(
        job=job,
        directory=directory,
        rank=seat.rank,
        world_size=world_size,
        hosts=tuple(hosts[rank] for rank in range(world_size)),
        roster=roster,
        arena=arena,
        marks=marks,
        timeout_s=timeout_s,
        patience_s=patience_s,
        watch=watch,
        whereabouts=hook.whereabouts,
        check=_check,
    )
    held = [s.rank for s in seats if s.arena_id is not None]
    logger.log(
        logging.INFO if seat.rank == 0 else logging.DEBUG,
        "job %s: %s on %s; the memory of %s was found",
        job,
        counted(world_size, "rank"),
        counted(len(set(hosts.values())), "host"),
        listed(held) if 0 < len(held) < world_size else "all ranks" if held else "no rank",
    )
    if seat.rank != index:
        logger.info("torchrun's rank %d is rank %d, to follow its memory", index, seat.rank)


def _watch(
    listener: Listener,
    roster: Roster,
    seats: Sequence[Seat],
    index: int,
    timeout_s: float,
    deadline: float,
    whereabouts: Whereabouts,
) -> Watch | None:
    """Links this worker with its neighbours, and begins to watch them."""
    peers = [
        Peer(f"rank {seat.rank} (host {worker.host}, pid {worker.pid})", worker.addresses, worker.port)
        for seat, worker in zip(seats, roster.workers, strict=True)
    ]
    links = connect(listener, index, peers, bytes.fromhex(roster.secret), deadline)
    names = [peer.name for peer in peers]
    return Watch(links, index, names, timeout_s, whereabouts=whereabouts) if links else None


def _leave() -> None:
    """Ends the groups while the interpreter is whole: gloo's threads must not outlive it (SIGABRT)."""
    if os.getpid() == _pid and dist.is_initialized():  # a forked child shares its parent's sockets
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _environment() -> tuple[int, int]:
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise ConfigurationError(
            f"the environment has no usable {error}: launch the script with torchrun, e.g. "
            f"`torchrun --standalone --nproc-per-node 4 --max-restarts 3 {Path(sys.argv[0]).name}`"
        ) from error


def _store(index: int, timeout: datetime.timedelta) -> dist.Store:
    """torchrun's own store, or one that RANK 0 hosts where the launcher keeps none."""
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigurationError(
            f"the environment has no usable {error}: torchrun sets it; launchers of your own must, too"
        ) from error
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if agents and index == 0 and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        # Surviving agents keep the address of the first round's store and don't tell it to a new agent
        # (torch 2.13); if its host is the one that is lost, they even go on with a dead address.
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


def _report(directory: Directory, found: Found) -> Report:
    header = found.header
    if header is not None:
        header = dataclasses.replace(header, constants=header.constants.identity)
    where = directory.host, str(found.path)
    return Report(*where, header, found.damage, found.holder, found.torn, found.incompatible)


def _claim(found: Sequence[Found], seat: Seat, timeout_s: float) -> Arena:
    """Locks the arena of this worker's seat, and checks that it is still what was reported."""
    for one in found:
        if one.header is not None and one.header.constants.arena_id == seat.arena_id:
            arena = Arena.attach(one, timeout_s=timeout_s)
            if arena.header() != one.header:
                raise RendezvousError(
                    f"{one.path} changed while this worker was claiming it: another process wrote to "
                    f"it; is the job running twice?"
                )
            return arena
    raise RendezvousError(
        f"rank {seat.rank} was given arena {seat.arena_id}, which this worker did not see on its host: "
        f"do two hosts of the job share the name? Give each one its own, init_process_group(host=)"
    )


def _die_with_agent() -> None:
    """Workers run in sessions of their own: without this, a killed agent leaves them training on."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise RendezvousError("torchrun's agent ended while this worker was starting: launch the job again")
