"""The workers of a start, and the assignment of ranks to them: pure values (docs/protocol.md, 3).

torchrun may give a restarted worker another RANK. `assign` computes logical ranks from the reports of all
workers: ranks follow their memory, and replacement ranks go to workers without memory. This module uses no
files, processes or network; `roster` packs these values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from ..errors import ArenaBusy, ArenaIncompatible, InconsistentArenas, RendezvousError
from ..memory.classify import Judgement, classify
from ..memory.header import NONE, Header


@dataclasses.dataclass(frozen=True)
class Report:
    """One arena of the job, as a worker on its host found it.

    Attributes:
        host: the host of the folder that it is in.
        path: path of the file.
        header: the arena's header, with only the `Identity` of its constants; None if it can't be read.
        damage: why the header can't be read; None if it can.
        holder: pid of a living process that still held the arena at the deadline, or None.
        torn: whether its creation was interrupted, so that it holds no data.
        incompatible: whether another version of ecemb wrote it, in a format that this version doesn't read.
    """

    host: str
    path: str
    header: Header | None
    damage: str | None
    holder: int | None
    torn: bool = False
    incompatible: bool = False


@dataclasses.dataclass(frozen=True)
class Worker:
    """One worker of this start.

    Attributes:
        host: name of its host.
        nonce: random; distinguishes the worker from the workers of earlier starts.
        pid: pid of its process.
        addresses: addresses of its listener, the likeliest first.
        port: port of its listener.
        keeps: id of the arena that its process has trained with, and gets again; "" for a new process.
    """

    host: str
    nonce: str
    pid: int = 0
    addresses: tuple[str, ...] = ()
    port: int = 0
    keeps: str = ""


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A worker's logical rank, and the memory that it claims.

    Attributes:
        rank: the logical rank.
        arena_id: id of the rank's arena; None for a replacement rank.
        held: ids of arenas that another number of ranks made, in the order of those ranks: the worker holds
            them until their rows have moved.
    """

    rank: int
    arena_id: str | None
    held: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Roster:
    """The list of workers and arenas that all workers of a start agree on.

    Attributes:
        generation: number of this start; higher than the number of every earlier start.
        generation_id: random, below 2**62.
        prefix: new prefix in the store for this start's process groups.
        finished: whether the store has the job's `finished` mark.
        workers: in the order of torchrun's RANK.
        reports: every arena found on any host, each once.
        secret: random, in hex; known to the workers of this start only.
        opened: the last generation that was opened, according to the job's `started` mark in the store; NONE
            without the mark.
    """

    generation: int
    generation_id: int
    prefix: str
    finished: bool
    workers: tuple[Worker, ...]
    reports: tuple[Report, ...] = ()
    secret: str = dataclasses.field(default="", repr=False)
    opened: int = NONE

    @property
    def started(self) -> bool:
        """Whether the store has the job's `started` mark."""
        return self.opened != NONE

    @property
    def headers(self) -> list[Header]:
        """Headers of the arenas that can be read."""
        return [report.header for report in self.reports if report.header is not None]

    @property
    def judgement(self) -> Judgement:
        """The judgement of the headers by `classify`."""
        return classify(self.headers, self.opened)


def assign(
    workers: Sequence[Worker], reports: Sequence[Report], opened: int = NONE
) -> tuple[Assignment, ...]:
    """Assigns logical ranks: ranks follow their memory, the other ranks go to workers without memory.

    A worker whose process has stayed gets its own arena again: it has kept what belongs to that rank.

    A new host gets all ranks of one lost host where their numbers are equal, so that each failure domain
    stays on one host, as the position table has it. Pure: the result is the same on all workers.

    Args:
        workers: in the order of torchrun's RANK.
        reports: every arena found on any host.
        opened: the last generation that was opened, according to the store; NONE without a mark.

    Returns:
        One assignment per worker. Without valid arenas the logical rank is torchrun's RANK. If another number
        of ranks made the arenas, no rank has an arena: workers hold the arenas of their hosts.

    Raises:
        ArenaBusy: a living process holds an arena of the job.
        ArenaIncompatible: another version of ecemb wrote an arena of the job.
        RendezvousError: the launch does not fit the arenas.
        InconsistentArenas: the arenas contradict each other.
    """
    if held := [report for report in reports if report.holder is not None]:
        names = ", ".join(f"{r.path} on {r.host} by process {r.holder}" for r in held)
        raise ArenaBusy(
            f"living processes hold arenas of this job: {names}. Another launch of the job runs, or a "
            f"worker was orphaned: end it, or give this job another name"
        )
    if other := [report for report in reports if report.incompatible]:
        raise ArenaIncompatible(
            f"{other[0].damage} (on {other[0].host}). It is neither damaged nor lost: nothing was started, "
            f"not even from a checkpoint, and nothing was removed"
        )
    survivors = classify([r.header for r in reports if r.header is not None], opened).survivors
    if not survivors:
        return tuple(Assignment(index, None) for index in range(len(workers)))
    _check_copies(reports)
    constants = survivors[0].constants
    at = {report.header.constants.arena_id: report.host for report in reports if report.header}
    if constants.world_size != len(workers):
        return _spread(workers, survivors, at)
    assignments: dict[int, Assignment] = {}
    homes: dict[str, set[str]] = {}
    for host in sorted({worker.host for worker in workers} | set(at.values())):
        here = [index for index, worker in enumerate(workers) if worker.host == host]
        kept = sorted(
            (header.constants.rank, header.constants.arena_id)
            for header in survivors
            if at[header.constants.arena_id] == host
        )
        if len(kept) > len(here):
            raise RendezvousError(
                f"host {host!r} holds the arenas of ranks {[rank for rank, _ in kept]}, and the number of "
                f"workers that this launch starts there is {len(here)}: start {len(kept)}; or, in a job with "
                f"elastic=True, launch another number of ranks; or end the launch and remove the arenas to "
                f"count as lost (ecemb arenas rm)"
            )
        ranks = {name: rank for rank, name in kept}
        own = {i: name for i in here if (name := workers[i].keeps) in ranks}
        free = [i for i in here if i not in own]
        left = [name for _, name in kept if name not in own.values()]
        for i, name in [*own.items(), *zip(free, left, strict=False)]:
            assignments[i] = Assignment(ranks[name], name)
        homes[host] = {constants.domains[rank] for rank, _ in kept} or {host}
    lost = sorted(set(range(len(workers))) - {assignment.rank for assignment in assignments.values()})
    free = [index for index in range(len(workers)) if index not in assignments]
    for index, rank in _match(free, lost, [worker.host for worker in workers], constants.domains, homes):
        assignments[index] = Assignment(rank, None)
    return tuple(assignments[index] for index in range(len(workers)))


def _spread(
    workers: Sequence[Worker], survivors: Sequence[Header], at: Mapping[str, str]
) -> tuple[Assignment, ...]:
    """Assigns ranks if another number of ranks made the arenas, and each arena to a worker on its host.

    New ranks follow the order of the old ranks on their hosts, so that few rows change hosts. The arenas of a
    host are divided evenly among its workers.

    Args:
        workers: in the order of torchrun's RANK.
        survivors: the headers of the arenas.
        at: id of an arena -> its host.
    """
    arenas: dict[str, list[tuple[int, str]]] = {}
    for header in survivors:
        name = header.constants.arena_id
        arenas.setdefault(at[name], []).append((header.constants.rank, name))
    last = survivors[0].constants.world_size

    def place(index: int) -> tuple[int, int]:
        return min(arenas.get(workers[index].host, [(last, "")]))[0], index

    order = sorted(range(len(workers)), key=place)
    here: dict[str, list[int]] = {}
    for index in order:
        here.setdefault(workers[index].host, []).append(index)
    held: dict[int, list[str]] = {}
    for host, found in arenas.items():
        for i, (_, name) in enumerate(sorted(found)):
            held.setdefault(here[host][i * len(here[host]) // len(found)], []).append(name)
    ranks = {index: rank for rank, index in enumerate(order)}
    return tuple(Assignment(ranks[i], None, tuple(held.get(i, ()))) for i in range(len(workers)))


def _check_copies(reports: Sequence[Report]) -> None:
    """Raises InconsistentArenas if two files hold one arena: two workers would get the same rank."""
    paths: dict[str, str] = {}
    for report in reports:
        if report.header is None:
            continue
        name, path = report.header.constants.arena_id, f"{report.path} on {report.host}"
        if (other := paths.setdefault(name, path)) != path:
            raise InconsistentArenas(
                f"{other} and {path} are copies of one arena: remove the copy that shall not count "
                f"(ecemb arenas rm PATH)"
            )


def _match(
    free: list[int],
    lost: list[int],
    hosts: Sequence[str],
    domains: Sequence[str],
    homes: Mapping[str, Collection[str]],
) -> list[tuple[int, int]]:
    """Pairs free workers with lost ranks, so that few failure domains share a host.

    Args:
        free: indices of the workers without memory; emptied.
        lost: the ranks without memory, as many as `free`; emptied.
        hosts: index of a worker -> its host.
        domains: rank -> its failure domain.
        homes: host -> the domains of the ranks whose memory it has; without any, the host's own name.

    Returns:
        (index of a worker, its rank).
    """
    pairs: list[tuple[int, int]] = []

    def take(indices: list[int], ranks: list[int]) -> None:
        for index, rank in list(zip(indices, ranks, strict=False)):
            pairs.append((index, rank))
            free.remove(index)
            lost.remove(rank)

    def on(host: str) -> list[int]:
        return [index for index in free if hosts[index] == host]

    def of(domain: str) -> list[int]:
        return [rank for rank in lost if domains[rank] == domain]

    for host in sorted({hosts[index] for index in free}):  # lost ranks of a domain join its surviving ranks
        for domain in sorted(homes[host]):
            take(on(host), of(domain))
    for host in sorted({hosts[index] for index in free}):  # a new host for a lost host
        size = len(on(host))
        whole = [d for d in sorted({domains[rank] for rank in lost}) if len(of(d)) == size]
        if whole:
            take(on(host), of(whole[0]))
    by_host = sorted(free, key=lambda index: (hosts[index], index))
    take(by_host, sorted(lost, key=lambda rank: (domains[rank], rank)))
    return pairs
