"""`ecemb plan`: its options with their ranges, and the table of estimates.

Knows no formula: `cost` has the arithmetic.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from ..coding.code import Code
from ..net.wording import aligned, byte_size, counted
from .cost import CODES, MONTH_H, Estimate, Job, compare

SHOWS = """
For each code: how many hosts or racks (on one host: ranks) may be lost at once, any of them; memory of a rank
beyond its tables; bytes that it sends in a step; the part of a step's time that this takes, if no rank waits
for a slower one; seconds from the death of a process, or of a host, until training goes on; and the chance
that a month loses data. Racks count where hosts of different racks take turns in the order of the ranks.
Formulas: ecemb/tools/cost.py.
"""
_MOST, _LEAST = 1e18, 1e-9
"""The largest valid number of a `Job`, and the smallest one above 0."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(run=run)
    needed = parser.add_argument_group("the job")
    _add_number(needed, "--hosts", "hosts", least=1, whole=True, required=True, metavar="N", help="machines")
    ranks = "ranks_per_host"
    _add_number(needed, "--ranks-per-host", ranks, least=1, whole=True, default="8", metavar="N", help="(8)")
    tables = "all tables, optimizer state included"
    _add_number(needed, "--table-gb", "table_bytes", unit=1e9, required=True, metavar="GB", help=tables)
    touched = "of a rank in a step"
    _add_number(needed, "--touched-rows", "touched_rows", least=0, required=True, metavar="N", help=touched)
    row = "optimizer state included"
    _add_number(needed, "--row-bytes", "row_bytes", required=True, metavar="B", help=row)
    step = "of a step without protection"
    _add_number(needed, "--step-ms", "step_s", unit=1e-3, required=True, metavar="MS", help=step)
    dense = "dense parameters and optimizer state (0)"
    _add_number(needed, "--dense-mb", "dense_bytes", least=0, unit=1e6, metavar="MB", help=dense)
    machines = parser.add_argument_group("the machines")
    network, about = "network_bytes_per_s", "of a host (100)"
    _add_number(machines, "--network-gbit", network, unit=1e9 / 8, default="100", metavar="GBIT", help=about)
    _add_number(machines, "--restart-s", "restart_s", least=0, metavar="S", help="of all processes (30)")
    _add_number(machines, "--replace-s", "replace_s", least=0, metavar="S", help="of a lost host (120)")
    rate = "of the job, any fault (0.0042 lost hosts per host and day)"
    _add_number(machines, "--mtbf-hours", "mtbf_h", metavar="H", help=rate)
    racks = "in a rack, which bursts strike (no racks)"
    _add_number(machines, "--rack-hosts", "rack_hosts", least=0, whole=True, metavar="N", help=racks)
    shown = ", ".join(f"{code.n},{code.k}" for code in CODES)
    parser.add_argument(
        "--code", type=_code, action="append", metavar="N,K", help=f"repeat for more ({shown})"
    )
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


def run(options: argparse.Namespace) -> int:
    """Prints the estimates of the asked codes, or of the default ones that fit.

    Returns:
        The exit code: 0.

    Raises:
        ConfigurationError: There are too many ranks.
        PlacementError: No code fits.
    """
    given = {name: value for name, value in vars(options).items() if name in Job.__dataclass_fields__}
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
    return 0


def text(job: Job, estimates: Sequence[Estimate]) -> str:
    """Returns the job in two lines, and a table with one line per code."""
    titles = ("code", "survives", "memory/rank", "sent/step", "overhead", "process", "host", "loss/month")
    lines = [_cells(estimate) for estimate in estimates]
    return f"{_job(job)}\n\n{aligned(titles, lines, right=titles[2:])}"


def _job(job: Job) -> str:
    hours = 1 / (job.host_faults_per_h + job.process_faults_per_h)
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
    return (
        f"{counted(job.hosts, 'host')} x {counted(job.ranks_per_host, 'rank')}, "
        f"{byte_size(job.table_bytes)} of tables, "
        f"{job.touched_rows:,.0f} rows of {job.row_bytes:,.0f} B touched "
        f"per rank and step of {job.step_s * 1e3:,.0f} ms, "
        f"{job.network_bytes_per_s * 8 / 1e9:,.0f} Gbit/s per host\na fault every {hours:,.1f} h; {lost}"
    )


def _cells(estimate: Estimate) -> tuple[str, ...]:
    holds = estimate.survives > 0
    lost = counted(estimate.survives or estimate.n - estimate.k, estimate.spread)
    return (
        f"({estimate.n}, {estimate.k})",
        f"any {lost}{'' if holds else ', no host'}",
        f"{byte_size(estimate.memory_bytes)} (+{estimate.memory_over_tables:.0%})",
        byte_size(estimate.step_bytes),
        f"{estimate.overhead:.1%}",
        f"{estimate.process_recovery_s:,.0f} s",
        f"{estimate.host_recovery_s:,.0f} s" if holds else "lost",
        f"{estimate.loss_per_month:.2g}",
    )
