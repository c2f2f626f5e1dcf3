"""When hosts and processes fail: drawn from a model, or replayed from a trace of a real cluster.

Two forms of trace are read, and recognized by their beginning:

- InfiniteHBD's `fault_trace.json` (github.com/stepfun-ai/InfiniteHBD-Trace): a list of events with
  `node_id`, `event_time` in days, `event_type` "fault_start" or "fault_end". Of 400 servers, those that never
  fail are not in it (published beside it). Each fault takes the host's memory (chosen: the worst case).
- LANL's failures of 1996 to 2005 as CSV (LA-UR-05-7318), by the names of its columns: `System`, `nodes`,
  `nodenumz`, `Prob Started`. Of its systems the one with the most failures is taken, or named ones, or all.

Events and lines that can't be read are counted, and never a crash; a file without any that can is refused.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from bench.harness.result import BadFile
from ecemb.tools.cost import BURST_SIZES, RackBursts
from ecemb.tools.job import Job

INFINITEHBD_SERVERS = 400
TOGETHER_H = 1 / 6
"""Faults this close to the one before are one burst (chosen: as in `ecemb.tools.cost.BURST_SIZES`)."""
_LANL = ("System", "nodes", "nodenumz", "Prob Started")
_DATES = ("%m/%d/%Y %H:%M", "%m/%d/%y %H:%M")
MOST_NODES = 1 << 20
"""Of a cluster."""
MOST_HOURS = 24 * 366 * 100
"""From the beginning of a trace, or for dates from 1990, to its last event."""
ALL = "all"
"""All systems of a file of LANL's."""
LEAST_NODES = 16
"""Of a trace: fewer are no job."""


@dataclass(frozen=True)
class Fault:
    """Something that stops the training.

    Attributes:
        hour: When.
        hosts: Whose memory is lost; none when only a process dies.
    """

    hour: float
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Hosts of one cluster, and when each of them was lost.

    Attributes:
        name: Of the file, and of the part of it that this is.
        nodes: How many there are, those that never fail included.
        hours: From the first event to the last.
        losses: (hour, node), ascending.
        skipped: Events or lines of the file that could not be read.
        system: Of LANL's, or "".
    """

    name: str
    nodes: int
    hours: float
    losses: tuple[tuple[float, int], ...]
    skipped: int
    system: str = ""


def drawn(job: Job, hours: float, rng: np.random.Generator, shape: float = 1.0) -> list[Fault]:
    """Draws the faults of a job: of hosts one by one, of several at once, and of processes.

    Args:
        job: How often, and of which kinds.
        hours: How long.
        rng: Consumed.
        shape: Of the gamma distribution of the times between faults; 1 is the exponential one, below 1 faults
            come in swarms.
    """
    rate = job.host_faults_per_h + job.process_faults_per_h
    count = int(hours * rate + 10 * np.sqrt(hours * rate / min(shape, 1)) + 50)
    times = np.cumsum(rng.gamma(shape, 1 / (shape * rate), count))
    times = times[times < hours]
    kinds = rng.random(len(times)) < job.host_faults_per_h / rate
    sizes = np.ones(len(times), np.int64)
    several = rng.random(len(times)) < job.burst_share
    chances = np.array(list(BURST_SIZES.values()))
    sizes[several] = rng.choice(list(BURST_SIZES), several.sum(), p=chances / chances.sum())
    hosts = struck(job, np.where(kinds, sizes, 0).tolist(), rng)
    return [Fault(hour, lost) for hour, lost in zip(times.tolist(), hosts, strict=True)]


def struck(job: Job, sizes: Sequence[int], rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Draws which hosts are lost together, a set of each size: rack by rack, if the job has racks."""
    bursts = RackBursts(job.hosts, min(job.rack_hosts or job.hosts, job.hosts))
    found: list[tuple[int, ...]] = [()] * len(sizes)
    for many, count in Counter(sizes).items():
        if many:
            lost = bursts.draw(rng, count, min(many, job.hosts)).tolist()
            places = [i for i, one in enumerate(sizes) if one == many]
            for i, one in zip(places, lost, strict=True):
                found[i] = tuple(one)
    return found


def replayed(trace: Trace, job: Job, rng: np.random.Generator, *, by_rack: bool) -> list[Fault]:
    """A trace as it strikes a job on some of its nodes; nodes and their order are drawn.

    Args:
        trace: The trace, of at least as many nodes as the job has hosts.
        job: How many hosts, and in which racks.
        rng: Consumed.
        by_rack: What the trace loses within `TOGETHER_H` of each other strikes the job rack by rack
            (`RackBursts`); the trace doesn't say where nodes are. Else nodes keep their identity.

    Raises:
        BadFile: The job has more hosts than the trace has nodes.
    """
    if job.hosts > trace.nodes:
        raise BadFile(
            f"{trace.name} has {trace.nodes} nodes; a job of {job.hosts} hosts can't be replayed from it"
        )
    host_of = dict(zip(rng.permutation(trace.nodes)[: job.hosts].tolist(), range(job.hosts), strict=True))
    losses = [(hour, host_of[node]) for hour, node in trace.losses if node in host_of]
    if not by_rack:
        return [Fault(hour, (host,)) for hour, host in losses]
    bursts = episodes(losses, TOGETHER_H)
    lost = struck(job, [len({host for _, host in burst}) for burst in bursts], rng)
    return [Fault(max(hour for hour, _ in burst), hosts) for burst, hosts in zip(bursts, lost, strict=True)]


def episodes(losses: Iterable[tuple[float, Any]], within_h: float) -> list[list[tuple[float, Any]]]:
    """Groups (hour, anything), ascending, as long as each is within `hours` of the one before."""
    found: list[list[tuple[float, Any]]] = []
    for one in losses:
        if found and one[0] - found[-1][-1][0] <= within_h:
            found[-1].append(one)
        else:
            found.append([one])
    return found


def read(path: Path, system: str = "") -> list[Trace]:
    """Reads the traces of a file of one of the two forms.

    Args:
        path: The file.
        system: Of LANL's: numbers with commas between, or `ALL` for each that a job can be replayed from; by
            default the one with the most failures.

    Raises:
        BadFile: It can't be read, has no fault in it that can, or is of too few nodes or too short; or there
            is no such system.
    """
    try:
        text = path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise BadFile(f"--trace {path}: {error.strerror or error}; give the path of a file") from error
    if text.lstrip()[:1] in ("[", "{"):
        return [_usable(path, _infinitehbd(path, text))]
    systems = {trace.system: trace for trace in _lanl(path, text)}
    named = system.split(",") if system not in ("", ALL) else []
    if missing := [name for name in named if name not in systems]:
        raise BadFile(
            f"--system {','.join(missing)}: {path} has the systems {', '.join(systems)}; name some, or {ALL}"
        )
    if system == ALL:
        named = [name for name, one in systems.items() if one.nodes >= LEAST_NODES and one.hours]
    most = max(systems, key=lambda name: len(systems[name].losses))
    return [_usable(path, systems[name]) for name in named or [most]]


def _usable(path: Path, found: Trace) -> Trace:
    if not found.losses:
        raise BadFile(
            f"--trace {path} has no fault that can be read ({found.skipped} lines can't): give InfiniteHBD's "
            f"fault_trace.json, or LANL's failures as CSV with the columns {', '.join(_LANL)}"
        )
    if found.nodes < LEAST_NODES or not found.hours:
        raise BadFile(
            f"--trace {found.name} has {found.nodes} nodes and goes over {found.hours:g} hours; a job that "
            f"is replayed from it takes {LEAST_NODES} nodes or more, and some time"
        )
    return found


def _infinitehbd(path: Path, text: str) -> Trace:
    try:
        events = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"--trace {path} begins like JSON and isn't: {error}") from error
    starts: list[tuple[float, str]] = []
    last = 0.0
    skipped = 0
    for event in cast(list[Any], events) if isinstance(events, list) else [events]:
        try:
            hour, kind, node = 24 * float(event["event_time"]), event["event_type"], str(event["node_id"])
        except (TypeError, KeyError, ValueError, OverflowError):
            skipped += 1
            continue
        if kind not in ("fault_start", "fault_end") or not 0 <= hour <= MOST_HOURS:
            skipped += 1
            continue
        last = max(last, hour)
        if kind == "fault_start":
            starts.append((hour, node))
    return _trace(path.name, starts, INFINITEHBD_SERVERS, last, skipped)


def _lanl(path: Path, text: str) -> list[Trace]:
    rows = _rows(text)
    heads = [name.strip().lower() for name in next(rows, None) or ()]
    places = [
        next((i for i, name in enumerate(heads) if name.startswith(start.lower())), None) for start in _LANL
    ]
    missing = [start for start, place in zip(_LANL, places, strict=True) if place is None]
    if missing:
        raise BadFile(
            f"--trace {path} is neither JSON nor LANL's CSV: it has no column {', '.join(missing)}; give "
            "InfiniteHBD's fault_trace.json, or LANL's failures"
        )
    by_system: dict[str, list[tuple[float, str]]] = {}
    nodes: Counter[str] = Counter()
    skipped = 0
    for row in rows:
        try:
            system, many, node, date = (row[place].strip() for place in cast(list[int], places))
            hour, count, number = _hours(date), int(many), int(node)
        except (IndexError, ValueError):
            skipped += 1
            continue
        if not (0 <= number < MOST_NODES and 0 < count <= MOST_NODES):
            skipped += 1
            continue
        nodes[system] = max(nodes[system], count)
        by_system.setdefault(system, []).append((hour, str(number)))
    if not by_system:
        return [Trace(path.name, 0, 0.0, (), skipped)]
    found: list[Trace] = []
    for system, losses in by_system.items():
        first = min(hour for hour, _ in losses)
        starts = [(hour - first, node) for hour, node in losses]
        name = f"{path.name}, system {system}"
        found.append(_trace(name, starts, nodes[system], max(starts)[0], skipped, system))
    return found


def _rows(text: str) -> Iterator[list[str]]:
    """Each line by itself, so that a quote that nothing closes costs one; those that are no CSV are empty."""
    for line in text.splitlines():
        if line.strip():
            try:
                yield next(csv.reader([line]))
            except csv.Error:
                yield []


def _trace(
    name: str, starts: list[tuple[float, str]], nodes: int, hours: float, skipped: int, system: str = ""
) -> Trace:
    numbers = {node: i for i, node in enumerate(sorted({node for _, node in starts}))}
    losses = sorted((hour, numbers[node]) for hour, node in starts)
    return Trace(name, max(nodes, len(numbers)), hours, tuple(losses), skipped, system)


def _hours(date: str) -> float:
    for form in _DATES:
        try:
            hours = (datetime.strptime(date, form) - datetime(1990, 1, 1)).total_seconds() / 3600
        except ValueError:
            continue
        if 0 <= hours <= MOST_HOURS:
            return hours
    raise ValueError(f"no date: {date!r}")


def sets_by_size(groups: Iterable[Iterable[int]]) -> Mapping[int, NDArray[np.int64]]:
    """Sets of hosts, by how many they are: int64 [sets, size]."""
    found: dict[int, list[list[int]]] = {}
    for group in groups:
        one = sorted(set(group))
        if one:
            found.setdefault(len(one), []).append(one)
    return {size: np.array(sets, np.int64) for size, sets in found.items()}
