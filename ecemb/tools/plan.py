"""`ecemb plan`: its options with their ranges, the table of codes, and the page about one of them.

Knows no formula: `cost` and `window_cost` have the arithmetic.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..coding.code import Code
from ..errors import ConfigurationError
from ..net.wording import aligned, byte_size, counted
from .cost import CODES, MONTH_H, Estimate, after_host, after_process, compare, time_lost
from .job import Job
from .window_cost import MEMORY, WAYS_OUT, WindowCost, cost_of

SHOWS = """
For each code: how many hosts or racks (on one host: ranks) may be lost at once, any of them; memory of a rank
beyond its tables (with --device cuda, images of them included); steps of a window; the part of a step's time
that protection adds, if no rank waits for a slower one; seconds of steps that run again after a failure;
seconds from the death of a process, or of a host, until training goes on; and the chance that a month loses
data. Racks count where hosts of different racks take turns in the order of the ranks. With one --code there
is more: what training waits for, memory by its parts, what is used up first, and other settings.
Formulas and rates: ecemb/tools/window_cost.py and cost.py.
"""
_MOST, _LEAST = 1e18, 1e-9
"""The largest valid number of a `Job`, and the smallest one above 0."""
_WINDOWS_S = (10, 30, 60, 120, 300)
"""Windows that are shown beside the one that is asked for."""
_LITTLE = 0.0005
"""Waits below this part of a step are not shown."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(run=run)
    job = parser.add_argument_group("the job")
    _add_number(job, "--hosts", "hosts", least=1, whole=True, required=True, metavar="N", help="machines")
    ranks = "ranks_per_host"
    _add_number(job, "--ranks-per-host", ranks, least=1, whole=True, default="8", metavar="N", help="(8)")
    tables = "all tables, optimizer state included"
    _add_number(job, "--table-gb", "table_bytes", unit=1e9, required=True, metavar="GB", help=tables)
    row = "optimizer state included"
    _add_number(job, "--row-bytes", "row_bytes", required=True, metavar="B", help=row)
    step = "of a step without protection"
    _add_number(job, "--step-ms", "step_s", unit=1e-3, required=True, metavar="MS", help=step)
    batch = "samples of a rank in a step"
    _add_number(job, "--batch", "batch", required=True, metavar="N", help=batch)
    _add_number(
        job, "--features", "features", least=1, whole=True, metavar="N", help="tables, all alike (26)"
    )
    _add_number(job, "--ids", "ids", metavar="N", help="rows of a table that a sample looks up (1)")
    skew = "exponent of Zipf's law, by which rows are looked up; 0 for all alike (1.05)"
    _add_number(job, "--skew", "skew", least=0, metavar="A", help=skew)
    dense = "dense parameters and optimizer state (0)"
    _add_number(job, "--dense-mb", "dense_bytes", least=0, unit=1e6, metavar="MB", help=dense)
    settings = parser.add_argument_group("settings of ecemb.protect")
    shown = ", ".join(f"{code.n},{code.k}" for code in CODES)
    settings.add_argument(
        "--code", type=_code, action="append", metavar="N,K", help=f"repeat for more ({shown})"
    )
    window = "auto, a number of steps, or seconds as in '30 s' (auto)"
    settings.add_argument("--window", type=_window, default="auto", metavar="W", help=window)
    settings.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="commit beside the steps that follow, with any window (yes)",
    )
    machines = parser.add_argument_group("the machines")
    where = "where the tables are: processors of a host with GPUs have time to spare (cpu)"
    machines.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=where)
    _add_number(machines, "--cores", "cores", least=1, whole=True, metavar="N", help="of a host (96)")
    memory = "of a host (2,000)"
    _add_number(machines, "--host-memory-gb", "host_memory_bytes", unit=1e9, metavar="GB", help=memory)
    memory = "of a GPU, with --device cuda (80)"
    _add_number(machines, "--device-memory-gb", "device_memory_bytes", unit=1e9, metavar="GB", help=memory)
    network, about = "network_bytes_per_s", "of a host (100)"
    _add_number(machines, "--network-gbit", network, unit=1e9 / 8, metavar="GBIT", help=about)
    about = "between hosts, of a small message and its answer (0: not counted)"
    _add_number(machines, "--round-trip-us", "round_trip_s", least=0, unit=1e-6, metavar="US", help=about)
    _add_number(machines, "--restart-s", "restart_s", least=0, metavar="S", help="of all processes (30)")
    _add_number(machines, "--replace-s", "replace_s", least=0, metavar="S", help="of a lost host (120)")
    rate = "of the job, any fault (0.0042 lost hosts per host and day)"
    _add_number(machines, "--mtbf-hours", "mtbf_h", metavar="H", help=rate)
    racks = "in a rack, which bursts strike (no racks)"
    _add_number(machines, "--rack-hosts", "rack_hosts", least=0, whole=True, metavar="N", help=racks)
    parser.add_argument(
        "--json", action="store_true", help="as JSON: the job, the estimates, and what doesn't fit"
    )


def _add_number(
    group: argparse.ArgumentParser | Any,
    option: str,
    attribute: str,
    *,
    least: float = _LEAST,
    unit: float = 1,
    whole: bool = False,
    **shown: Any,
) -> None:
    """Adds an option for an attribute of a `Job`, in the option's own unit; `Job` has the other defaults."""
    low, high = least / unit, _MOST / unit
    from_to = "above 0, at most" if 0 < low < 1 else f"from {low:g} to"
    rule = f"a {'whole ' if whole else ''}number {from_to} {high:g}"

    def number(text: str) -> float:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"it takes {rule}; got {text!r}")
        return value * unit

    shown.setdefault("default", argparse.SUPPRESS)
    group.add_argument(option, dest=attribute, type=number, **shown)


def _code(text: str) -> Code:
    try:
        n, k = (int(part) for part in text.split(","))
        return Code(n, k)
    except ValueError as error:  # also the errors that Code raises
        raise argparse.ArgumentTypeError(
            f"a code is N,K with 1 <= K < N <= 256, for example 4,3; got {text!r}"
        ) from error


def _window(text: str) -> str | int | float:
    """Parses "auto", steps (an int), or seconds (a float)."""
    if text == "auto":
        return text
    parts = re.fullmatch(r"([0-9]+|[0-9]*\.[0-9]+)( ?s)?", text)
    value = float(parts[1]) if parts else 0.0
    is_time = bool(parts and parts[2])
    if not (_LEAST if is_time else 1) <= value <= _MOST or not (is_time or value.is_integer()):
        raise argparse.ArgumentTypeError(
            f"a window is auto, a whole number of steps from 1 on, or a time such as '30 s'; got {text!r}"
        )
    return value if is_time else int(value)


def run(options: argparse.Namespace) -> int:
    """Prints the estimates of the asked codes, or of the default ones that fit.

    Returns:
        The exit code: 0.

    Raises:
        ConfigurationError: There are too many ranks, or an option is given without the one that it goes with.
        PlacementError: No code fits.
    """
    given = {name: value for name, value in vars(options).items() if name in Job.__dataclass_fields__}
    if options.device == "cpu" and "device_memory_bytes" in given:
        raise ConfigurationError(
            "--device-memory-gb goes with --device cuda; the device is cpu: leave it out"
        )
    if isinstance(options.window, float):
        given["window"] = max(1, round(options.window / options.step_s))
    job = Job(**given)
    estimates, refused = compare(job, options.code or ())
    if options.json:
        found = [dataclasses.asdict(estimate) for estimate in estimates]
        print(json.dumps({"job": dataclasses.asdict(job), "estimates": found, "refused": refused}, indent=2))
        return 0
    print(text(job, estimates))
    if refused:
        print(f"\ndo not fit: {', '.join(refused)}")
        if options.code:
            print("\n".join(refused.values()))
    if len(options.code or ()) == 1:
        print(f"\n{page(job, estimates[0])}")
    return 0


def text(job: Job, estimates: Sequence[Estimate]) -> str:
    """Returns the job in three lines, and a table with one line per code."""
    titles = (
        "code",
        "survives",
        "memory/rank",
        "window",
        "overhead",
        "replays",
        "process",
        "host",
        "loss/month",
    )
    lines = [_cells(job, estimate) for estimate in estimates]
    return f"{_job(job)}\n\n{aligned(titles, lines, right=titles[2:])}"


def _job(job: Job) -> str:
    hours = job.mtbf_s / 3600
    bursts = f"filling racks of {job.rack_hosts}" if job.rack_hosts else "any"
    losses = job.host_faults_per_h * MONTH_H
    lost = (
        f"{losses:,.1f} times a month hosts are lost, {job.burst_share:.0%} of them several at once, {bursts}"
    )
    if job.hosts == 1:
        lost = (
            f"{losses:.2g} times a month the host is lost, with all rows and parity: the job then begins at "
            f"a checkpoint (protect(resume=))"
        )
    rows = job.changed_rows()
    trip = f", {job.round_trip_s * 1e6:,.3g} us there and back" if job.round_trip_s else ""
    return (
        f"{counted(job.hosts, 'host')} x {counted(job.ranks_per_host, 'rank')}, "
        f"{byte_size(job.table_bytes)} of tables on {job.device}, "
        f"{job.cores:,} cores, {byte_size(job.host_memory_bytes)} and "
        f"{job.network_bytes_per_s * 8 / 1e9:,.0f} Gbit/s per host{trip}\n"
        f"a step of {job.step_s * 1e3:,.4g} ms changes {rows:,.0f} rows of {job.row_bytes:,.0f} B of a rank, "
        f"{byte_size(rows * job.row_bytes)}\n"
        f"a fault every {hours:,.1f} h; {lost}"
    )


def _cells(job: Job, estimate: Estimate) -> tuple[str, ...]:
    holds = estimate.survives > 0
    lost = counted(estimate.survives or estimate.n - estimate.k, estimate.spread)
    window = estimate.window
    return (
        f"({estimate.n}, {estimate.k})",
        f"any {lost}{'' if holds else ', no host'}",
        f"{byte_size(estimate.memory_bytes)} (+{estimate.memory_over_tables:.0%})",
        f"{window.steps:,}",
        _percent(window.overhead),
        _seconds(_again_s(job, window)),
        f"{estimate.process_recovery_s:,.0f} s",
        f"{estimate.host_recovery_s:,.0f} s" if holds else "lost",
        f"{estimate.loss_per_month:.2g}",
    )


def page(job: Job, estimate: Estimate) -> str:
    """Returns what there is to say about one code: waits, memory, what is used up, and other settings."""
    window = estimate.window
    whose = 'as "auto" chooses it' if job.window == "auto" else "as given"
    waits = [(name, wait / window.window_s) for name, wait in window.waits_s.items()]
    waits = sorted((one for one in waits if one[1] >= _LITTLE), key=lambda one: -one[1])
    said = ", ".join(f"{name} {_percent(part)}" for name, part in waits) or "nothing of note"
    code = Code(estimate.n, estimate.k)
    change = f"{byte_size(window.changed_bytes)} of a rank's {byte_size(job.table_bytes / job.ranks)} change"
    again = f"{counted(round(window.replayed_steps), 'step')}, which take {_seconds(_again_s(job, window))}"
    lines = [
        f"window of {counted(window.steps, 'step')}, {whose}: {_seconds(window.window_s)}, in which {change}",
        f"training waits: {said}",
        f"a failure takes back {window.replayed_steps / window.steps:.2g} windows: {again}",
        f"to the next step after the death of a process: {_times(after_process(job, window))}",
        f"after the death of a host: {_times(after_host(job, code))}",
        f"host memory of a rank: {_sizes(window.memory_bytes)}",
        f"host memory of a host: {byte_size(window.host_bytes)}; {byte_size(window.reserve_bytes)} stay free",
    ]
    if window.device_bytes:
        lines.append(f"device memory of a rank: {_sizes(window.device_bytes)}")
    titles = ("what is used", "part", "less with")
    used = [(name, _percent(part), WAYS_OUT[name]) for name, part in window.used.items()]
    lines += ["", aligned(titles, used, right=("part",)), "", _settings(job, code)]
    return "\n".join(lines)


def _settings(job: Job, code: Code) -> str:
    """The table of other windows, with `overlap` and without: those first with which least time is lost."""
    titles = (
        "settings",
        "window",
        "overhead",
        "replays",
        "host memory",
        "time lost",
        "training waits most for",
    )
    windows = {1, *(max(1, round(seconds / job.step_s)) for seconds in _WINDOWS_S)}
    found: list[tuple[float, tuple[str, ...]]] = []
    for overlap in (True, False):
        for steps in ("auto", *sorted(windows)):
            other = dataclasses.replace(job, window=steps, overlap=overlap)
            cost = cost_of(other, code)
            lost = time_lost(other, code, cost)
            named = f"window={steps!r}, overlap={overlap}".replace("'", '"')
            cells = (
                *(named, _seconds(cost.window_s), _percent(cost.overhead), _seconds(_again_s(job, cost))),
                *(
                    byte_size(cost.host_bytes),
                    _percent(lost),
                    max(cost.waits_s, key=lambda name: cost.waits_s[name]),
                ),
            )
            if cost.used[MEMORY] <= 1:
                found.append((lost, cells))
    if not found:
        return "no window has room in the hosts' memory: " + WAYS_OUT[MEMORY]
    found.sort(key=lambda one: one[0])
    return aligned(titles, [cells for _, cells in found], right=titles[1:6])


def _again_s(job: Job, window: WindowCost) -> float:
    """Seconds of the steps that run again after a failure."""
    return window.replayed_steps * job.step_s * (1 + window.overhead)


def _sizes(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {byte_size(size)}" for name, size in parts.items())


def _times(parts: Mapping[str, float]) -> str:
    """The sum of some times, and each of them."""
    each = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in parts.items())
    return f"{_seconds(sum(parts.values()))} ({each})"


def _percent(part: float) -> str:
    return f"{part:,.1%}" if part < 1 else f"{part:,.0%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2g} s" if seconds < 10 else f"{seconds:,.0f} s"
