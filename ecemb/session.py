"""The session: the result of `ecemb.init_process_group`, which `ecemb.protect` in the same process uses.

Owns the public call that begins a start, and this process's only session. The steps of the rendezvous are in
`net.rendezvous`; this module calls them in order.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .errors import ConfigurationError, EcembError, NotInitialized, UsageError
from .memory.arena import Arena
from .memory.private_files import check_name
from .memory.scan import Directory
from .net import rendezvous, replacement, staying
from .net.assignment import Assignment, Roster
from .net.error_file import Activity
from .net.network import Network
from .net.staying import Stay
from .net.watch import FailureDetector, end_process
from .net.wording import counted, listed

logger: logging.Logger = logging.getLogger("ecemb")

CHECKED = ".check"
"""Suffix of the job's name in a check."""
_CHECKED_NAME = 50  # characters of the job's name before the suffix
_PATIENCE_S = 1800.0  # torch's default timeout of collectives


@dataclasses.dataclass(frozen=True)
class Check:
    """A check of the script: a start under another job's name, which has no arenas.

    Attributes:
        host: name of the host if the script passes none; None for the hostname.
    """

    host: str | None = None


@dataclasses.dataclass
class Session:
    """One start of the job, in this process.

    Attributes:
        job: the job's name.
        directory: this host's folder of arenas.
        rank: the logical rank.
        world_size: number of ranks.
        hosts: rank -> host of its worker now.
        addresses: rank -> addresses of that host, the likeliest first.
        roster: the workers and their arenas, as all workers agreed.
        arena: this rank's arena, locked; None for a replacement rank.
        held: locked arenas of another number of ranks, until their rows have moved.
        holders: id of such an arena -> rank of the worker that holds it, on all hosts.
        job_flags: the part of the store that outlives this start.
        timeout_s: silence after which a peer counts as dead, and deadline of every wait but collectives, in
            seconds.
        patience_s: deadline of collectives, in seconds; longer, as a peer that is not silent is only slow.
        watch: failure detector for the other ranks; None if there are none.
        activity: current activity of this process's main thread.
        joined_s: duration of `init_process_group`, in seconds.
        protected: whether `protect` has made a guard.
        network: makes the connections among the ranks; a simulation hands over its own.
        check: set if the script is only checked: it ends where it calls `protect`; otherwise None.
        stay: how this process stays after another worker's death; None if its script does not provide for it.
    """

    job: str
    directory: Directory
    rank: int
    world_size: int
    hosts: tuple[str, ...]
    addresses: tuple[tuple[str, ...], ...]
    roster: Roster
    arena: Arena | None
    job_flags: dist.Store
    timeout_s: float
    patience_s: float
    watch: FailureDetector | None
    activity: Activity
    held: tuple[Arena, ...] = ()
    holders: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    joined_s: float = 0.0
    protected: bool = False
    network: Network = dataclasses.field(default_factory=Network)
    check: Check | None = None
    stay: Stay | None = None


_check: Check | None = None
_session: Session | None = None


def is_begun() -> bool:
    """Whether `init_process_group` has been called in this process."""
    return _session is not None


def check_only(check: Check | None) -> None:
    """Makes later starts of this process checks; None makes them plain starts."""
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
    device_id: torch.device | int | None = None,
    pg_options: Any = None,
) -> None:
    """Initialises torch.distributed's default group with ranks that follow their memory. All ranks.

    Takes the place of torch.distributed.init_process_group in a script launched by torchrun, and works
    across torchrun's restarts. Sets the environment's RANK to the logical rank; `dist.get_rank()` agrees.

    Args:
        backend: as torch.distributed's, e.g. "gloo".
        job: name of the job: a relaunch with the same name finds its arenas. Letters, digits, . _ -
        arena_dir: folder of the arenas; must outlive the workers and be local to the host.
        host: name of the failure domain and of the arenas' folder; the hostname by default. Several
            torchrun agents on one machine stand for hosts by passing different names.
        timeout: deadline of the rendezvous, and then the silence after which a peer counts as dead. A slow
            peer is not silent: its process sends a sign of life every second, whatever its interpreter does,
            and collectives wait for it for half an hour, or for `timeout` if that is longer. The death of a
            process is noticed at once; a host without power or network, and a stopped process, after
            `timeout`.
        device_id: as torch.distributed's, the device of this process: NCCL then connects at once. It may
            follow LOCAL_RANK, which belongs to the process; the rank is not known before this call.
        pg_options: as torch.distributed's, for the default group; ecemb's own groups do not use them.

    Raises:
        ConfigurationError: no torchrun environment, or a bad name or path.
        UsageError: torch.distributed is initialised already.
        ArenaBusy: a living process holds an arena of this job.
        ArenaIncompatible: another version of ecemb wrote an arena of this job.
        RendezvousError: the workers did not agree before the deadline, or don't fit the arenas.
        InconsistentArenas: the arenas contradict each other.
    """
    global _session
    began = time.monotonic()
    if dist.is_initialized():
        raise UsageError(
            "torch.distributed is initialised already: call ecemb.init_process_group in place of "
            "torch.distributed.init_process_group, not after it"
        )
    index, world_size, *_ = rendezvous.environment()
    timeout_s = timeout.total_seconds()
    if timeout_s <= 0:
        raise ConfigurationError(f"timeout must be positive; it is {timeout_s} s")
    activity = rendezvous.prepare()
    if _check is not None:
        check_name("job", job)
        job, host = f"{job[:_CHECKED_NAME]}{CHECKED}", host or _check.host
    directory = Directory(Path(arena_dir), job, socket.gethostname() if host is None else host)
    atexit.register(_remove_empty, directory)
    if (stay := staying.current()) is not None:
        stay.at_end(partial(_end, os.environ["RANK"]))
    store, job_flags, found, roster, assignments = rendezvous.meet(job, directory, timeout)
    own = assignments[index]
    if stay is not None and stay.rank not in (None, own.rank):
        end_for_a_new_process(f"this process was rank {stay.rank}, and its memory is lost")
    patience_s = max(timeout_s, _PATIENCE_S)
    group_store = dist.PrefixStore(f"ecemb/{job}/{roster.prefix}", store)
    options: dict[str, Any] = {"device_id": device_id, "pg_options": pg_options}
    arena, held = rendezvous.make_group(
        backend, group_store, own, world_size, found, timeout_s, patience_s, options
    )
    workers = {one.rank: worker for one, worker in zip(assignments, roster.workers, strict=True)}
    by_rank = [workers[rank] for rank in range(world_size)]
    _session = Session(
        job=job,
        directory=directory,
        rank=own.rank,
        world_size=world_size,
        hosts=tuple(worker.host for worker in by_rank),
        addresses=tuple(worker.addresses for worker in by_rank),
        roster=roster,
        arena=arena,
        job_flags=job_flags,
        timeout_s=timeout_s,
        patience_s=patience_s,
        watch=rendezvous.hook.watch,
        activity=activity,
        held=held,
        holders={name: one.rank for one in assignments for name in one.held},
        joined_s=time.monotonic() - began,
        check=_check,
        stay=stay,
    )
    _log_start(_session, index, assignments)


def end_for_a_new_process(why: str) -> NoReturn:
    """Ends this process, which has stayed after a death, because only a new one can go on from here.

    `ecemb-run` replaces it, and the other ranks take it for dead.
    """
    replacement.peer_died()
    end_process(f"{why}; what it has kept is of no use any more")
    raise AssertionError  # not reached


def _end(index: str) -> None:
    """Ends this process's session, but for what `ecemb.protect` has made. The process stays.

    Args:
        index: torchrun's RANK.
    """
    global _session
    _session = None
    rendezvous.end_session()
    atexit.unregister(_remove_empty)
    os.environ["RANK"] = index


def _remove_empty(directory: Directory) -> None:
    """Removes the job's folders if they hold no arena, as after a start that was refused."""
    with contextlib.suppress(EcembError):
        directory.remove_empty()


def _log_start(session: Session, index: int, assignments: Sequence[Assignment]) -> None:
    held = [one.rank for one in assignments if one.arena_id is not None]
    found = listed(held) if 0 < len(held) < session.world_size else "all ranks" if held else "no rank"
    if session.holders:
        survivors = session.roster.judgement.survivors
        before = survivors[0].constants.world_size
        found = f"{listed(sorted(one.constants.rank for one in survivors))} of {counted(before, 'rank')}"
    logger.log(
        logging.INFO if session.rank == 0 else logging.DEBUG,
        "job %s: %s on %s; the memory of %s was found",
        session.job,
        counted(session.world_size, "rank"),
        counted(len(set(session.hosts)), "host"),
        found,
    )
    if session.rank != index:
        logger.info("torchrun's rank %d is rank %d, to follow its memory", index, session.rank)
