"""The command line: `python -m ecemb plan`, `check`, `top`, `arenas ls` and `rm`, and `run`: `ecemb-run`.

Owns what is printed, and the exit codes: 0 done, 1 refused or nothing there, 2 not understood.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[1:2] == ["run"]:  # which has no time for what `plan` imports
    from .launch.stub import main as run

    run(sys.argv[2:])

import argparse
import dataclasses
import json
import math
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from . import __version__, top
from .code import Code
from .directory import arenas, remove
from .errors import ConfigurationError, EcembError, PeerFailure
from .header import Found
from .planner import CODES, Job, bounds, compare, table


@dataclasses.dataclass(frozen=True)
class Row:
    """One arena as `ls` shows it; what its header can't say is None.

    Attributes:
        job: by the folder.
        host: by the folder.
        rank: the logical rank whose memory it is.
        state: of `State`, by name; "torn" or "damaged" if the header can't be read.
        committed: last committed transaction.
        prepared: last prepared transaction.
        pid: the process that holds it, else the one that attached last; None if that closed it.
        alive: whether a living process holds it.
        size_bytes: memory that it takes.
        arena_id: its random name.
        joined: generation that it was last a member of.
        damage: why the header can't be read.
        path: the file.
    """

    job: str | None
    host: str | None
    rank: int | None
    state: str
    committed: int | None
    prepared: int | None
    pid: int | None
    alive: bool
    size_bytes: int
    arena_id: str | None
    joined: int | None
    damage: str | None
    path: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; None for the process's own.

    Returns:
        The exit code.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if options.command == "plan":
            return _plan(options)
        if options.command == "check":
            return _check(options)
        if options.command == "top":
            return _top(options)
        if options.command == "ls":
            return _list(options.arena_dir, options.job, as_json=options.json)
        if options.paths:
            if options.job is not None or options.host is not None:
                parser.error("rm takes either paths or --job (with --host), not both")
            return _remove(options.paths, force=options.force)
        if options.job is None:
            parser.error("rm needs --job JOB, or the paths of arenas")
        return _remove_job(options.arena_dir, options.job, options.host, force=options.force)
    except EcembError as error:
        print(f"ecemb: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ecemb", description="Tools of ecemb.")
    parser.add_argument("--version", action="version", version=f"ecemb {__version__}")
    parts = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_plan(parts.add_parser("plan", help=_PLAN, description=_PLAN.capitalize() + ".", epilog=_PLAN_SHOWS))
    _add_check(
        parts.add_parser("check", help=_CHECK, description=_CHECK.capitalize() + ".", epilog=_CHECK_SHOWS)
    )
    _add_top(parts.add_parser("top", help=_TOP, description=_TOP.capitalize() + ".", epilog=_TOP_SHOWS))
    about = "memory that workers left behind on this machine, or hold"
    parts.add_parser("run", help="run a script warm, as ecemb-run does", add_help=False)
    commands = parts.add_parser("arenas", help=about, description=about.capitalize() + ".")
    kinds = commands.add_subparsers(dest="command", required=True, metavar="COMMAND")

    ls = kinds.add_parser("ls", help="list arenas of this user")
    _add_arena_dir(ls)
    ls.add_argument("--job", help="only this job's")
    ls.add_argument("--json", action="store_true", help="as a JSON list")

    rm = kinds.add_parser("rm", help="remove arenas of this user: the job's state is lost")
    _add_arena_dir(rm)
    rm.add_argument("--job", help="all of this job's")
    rm.add_argument("--host", help="only those of this host (with --job)")
    rm.add_argument("--force", action="store_true", help="also what a living process holds")
    rm.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files that ls printed")
    return parser


_PLAN = "what codes would cost a job, and what they would survive"
_PLAN_SHOWS = """
For each code: how many hosts or racks (on one host: ranks) may be lost at once, any of them; memory of a rank
beyond its tables; bytes that it sends in a step; the part of a step's time that this takes, if no rank waits
for a slower one; seconds from the death of a process, or of a host, until training goes on; and the chance
that a month loses data. Racks count where hosts of different racks take turns in the order of the ranks.
Formulas: ecemb/planner.py.
"""


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.set_defaults(command="plan")
    needed = plan.add_argument_group("the job")
    _add_number(needed, "--hosts", "hosts", whole=True, metavar="N", help="machines")
    _add_number(needed, "--ranks-per-host", "ranks_per_host", 8, whole=True, metavar="N", help="(8)")
    tables = "all tables, optimizer state included"
    _add_number(needed, "--table-gb", "table_bytes", unit=1e9, metavar="GB", help=tables)
    _add_number(needed, "--touched-rows", "touched_rows", metavar="N", help="of a rank in a step")
    _add_number(needed, "--row-bytes", "row_bytes", metavar="B", help="optimizer state included")
    _add_number(needed, "--step-ms", "step_s", unit=1e-3, metavar="MS", help="of a step without protection")
    dense = "dense parameters and optimizer state (0)"
    _add_number(needed, "--dense-mb", "dense_bytes", 0, unit=1e6, metavar="MB", help=dense)
    machines = plan.add_argument_group("the machines")
    network, about = "network_bytes_per_s", "of a host (100)"
    _add_number(machines, "--network-gbit", network, 100, unit=1e9 / 8, metavar="GBIT", help=about)
    _add_number(machines, "--restart-s", "restart_s", 30, metavar="S", help="of all processes (30)")
    _add_number(machines, "--replace-s", "replace_s", 120, metavar="S", help="of a lost host (120)")
    rate = "of the job, any fault (0.0042 lost hosts per host and day)"
    _add_number(machines, "--mtbf-hours", "mtbf_h", None, metavar="H", help=rate)
    racks = "in a rack, which bursts strike (no racks)"
    _add_number(machines, "--rack-hosts", "rack_hosts", 0, whole=True, metavar="N", help=racks)
    shown = ", ".join(f"{code.n},{code.k}" for code in CODES)
    plan.add_argument("--code", type=_code, action="append", metavar="N,K", help=f"repeat for more ({shown})")
    plan.add_argument(
        "--json", action="store_true", help="as JSON: the job, the estimates, and what doesn't fit"
    )


_REQUIRED = object()


def _add_number(
    group: argparse.ArgumentParser | Any,
    option: str,
    attribute: str,
    default: object = _REQUIRED,
    *,
    unit: float = 1,
    whole: bool = False,
    **shown: Any,
) -> None:
    """An option for a number of a `Job`: its range is the attribute's, in the option's own unit."""
    low, high = (bound / unit for bound in bounds(attribute))
    least = "above 0, at most" if 0 < low < 1 else f"from {low:g} to"
    rule = f"a {'whole ' if whole else ''}number {least} {high:g}"

    def number(text: str) -> float:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"it takes {rule}; got {text!r}")
        return value

    given = {"required": True} if default is _REQUIRED else {"default": default}
    group.add_argument(option, type=number, **given, **shown)


def _code(text: str) -> Code:
    try:
        n, k = (int(part) for part in text.split(","))
        return Code(n, k)
    except ValueError as error:  # also what ecemb raises on purpose
        raise argparse.ArgumentTypeError(
            f"a code is N,K with 1 <= K < N <= 256, for example 4,3; got {text!r}"
        ) from error


def _plan(options: argparse.Namespace) -> int:
    job = Job(
        hosts=options.hosts,
        ranks_per_host=options.ranks_per_host,
        table_bytes=options.table_gb * 1e9,
        touched_rows=options.touched_rows,
        row_bytes=options.row_bytes,
        step_s=options.step_ms / 1e3,
        network_bytes_per_s=options.network_gbit * 1e9 / 8,
        restart_s=options.restart_s,
        replace_s=options.replace_s,
        mtbf_h=options.mtbf_hours,
        rack_hosts=options.rack_hosts,
        dense_bytes=options.dense_mb * 1e6,
    )
    estimates, refused = compare(job, options.code or ())
    if options.json:
        found = [dataclasses.asdict(one) for one in estimates]
        print(json.dumps({"job": dataclasses.asdict(job), "estimates": found, "refused": refused}, indent=2))
        return 0
    print(table(job, estimates))
    if refused:
        print(f"\ndo not fit: {', '.join(refused)}")
        if options.code:
            print("\n".join(refused.values()))
    return 0


_CHECK = "run a script up to its ecemb.protect(), and show what that would protect, and what not"
_CHECK_SHOWS = """
The script runs as a job of its own and ends where it calls ecemb.protect(); no memory of any job is touched.
Shown are the protected tables, what is the same on all ranks, what is kept for each rank, objects with state
that come back with nothing, memory, and what may be lost. The exit code is 1 where protect would refuse.
On several machines, launch it as the training is launched: torchrun ... -m ecemb check SCRIPT.
"""


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="check")
    parser.add_argument("--hosts", type=int, default=1, metavar="N", help="to stand for, on this machine (1)")
    parser.add_argument(
        "--ranks-per-host", type=int, metavar="N", help="needed unless torchrun has started this process"
    )
    parser.add_argument("--as-host", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="what torchrun would start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")


def _check(options: argparse.Namespace) -> int:
    from . import check  # it takes torch.distributed along, which the other commands don't need

    if "RANK" not in os.environ:
        if options.hosts < 1 or (options.ranks_per_host or 0) < 1:
            raise ConfigurationError(
                "`check` takes the job's ranks: give --ranks-per-host N (and --hosts N), from 1 on, or "
                "launch it as the training is: torchrun --nproc-per-node N -m ecemb check SCRIPT"
            )
        shown = ["--json"] if options.json else []
        return check.launch(options.hosts, options.ranks_per_host, shown, options.script, options.arguments)
    rank = os.environ["RANK"]
    try:
        found = check.run(options.script, options.arguments, options.as_host)
    except EcembError as error:
        if rank == "0" or not isinstance(error, PeerFailure):
            print(f"ecemb: refused on rank {rank}: {error}", file=sys.stderr)
        return 1
    if rank == "0":
        print(
            json.dumps(dataclasses.asdict(found), indent=2) if options.json else check.text(found), flush=True
        )
    return 0


_TOP = "watch running jobs: a live view of their arenas on this machine"
_TOP_SHOWS = """
Of each arena of this user: the step that is next to be committed; how many steps it is behind the furthest
rank of its job that is seen here; how many steps are open, that is, run without being in parity yet; the age
of parity, which is the time since the last commit; memory; the process; and the last recovery. It reads
headers alone, and changes nothing.
"""


def _add_top(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command="top")
    _add_arena_dir(parser)
    parser.add_argument("--job", help="only this job's")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (1)")
    parser.add_argument("--once", action="store_true", help="look once, as plain text; so does a pipe")
    parser.add_argument("--json", action="store_true", help="look once, as a JSON list")


def _top(options: argparse.Namespace) -> int:
    def look() -> list[top.Line]:
        found = (one for one in arenas(options.arena_dir) if options.job in (None, one.job))
        return top.lines(found, time.time_ns())

    if not (options.once or options.json) and sys.stdout.isatty():
        top.watch(look, f"ecemb top: {options.arena_dir}", max(0.1, options.interval))
        return 0
    shown = look()
    if options.json:
        print(json.dumps([dataclasses.asdict(one) for one in shown], indent=2))
    elif shown:
        print(top.text(shown))
    else:
        print(_none_in(options.arena_dir, options.job), file=sys.stderr)
    return 0 if shown else 1


def _none_in(arena_dir: Path, job: str | None) -> str:
    return f"no arenas of this user{f' and job {job!r}' if job else ''} in {arena_dir}"


def _add_arena_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arena-dir", type=Path, default=Path("/dev/shm"), help="where they are (/dev/shm)")


def _list(arena_dir: Path, job: str | None, *, as_json: bool) -> int:
    rows = [_row(found) for found in arenas(arena_dir) if job in (None, found.job)]
    rows.sort(key=lambda row: (row.job or "", row.host or "", -1 if row.rank is None else row.rank))
    if as_json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    elif rows:
        print(_table(rows))
    else:
        print(_none_in(arena_dir, job))
    return 0


def _remove_job(arena_dir: Path, job: str, host: str | None, *, force: bool) -> int:
    chosen = [
        found for found in arenas(arena_dir) if found.job == job and (host is None or found.host == host)
    ]
    if not chosen:
        where = f"job {job!r}" + (f" and host {host!r}" if host else "")
        print(f"ecemb: no arenas of {where} in {arena_dir}; try `ls`", file=sys.stderr)
        return 1
    return _remove(chosen, force=force)


def _remove(chosen: Iterable[Found | Path], *, force: bool) -> int:
    """Remove what can be; the rest is told and makes the exit code 1."""
    code = 0
    for one in chosen:
        path = one.path if isinstance(one, Found) else one
        try:
            if remove(one, force=force):
                print(f"removed {path}")
            else:
                print(f"ecemb: {path} is not there", file=sys.stderr)
                code = 1
        except EcembError as error:
            print(f"ecemb: {error}", file=sys.stderr)
            code = 1
    return code


def _row(found: Found) -> Row:
    header = found.header
    state = header.state.name if header else "torn" if found.torn else "damaged"
    return Row(
        job=found.job,
        host=found.host,
        rank=header.constants.rank if header else None,
        state=state,
        committed=header.committed if header else None,
        prepared=header.prepared if header else None,
        pid=found.holder or found.pid or None,
        alive=found.holder is not None,
        size_bytes=found.size_bytes,
        arena_id=header.constants.arena_id if header else None,
        joined=header.joined if header else None,
        damage=found.damage,
        path=str(found.path),
    )


def _table(rows: Sequence[Row]) -> str:
    titles = ("job", "host", "rank", "state", "committed", "prepared", "pid", "alive", "MiB")
    lines: list[list[str]] = []
    for row in rows:
        values = (row.job, row.host, row.rank, row.state, row.committed, row.prepared, row.pid)
        shown = ["-" if value is None else str(value) for value in values]
        alive = "yes" if row.alive else "no"
        lines.append([*shown, alive, f"{row.size_bytes / 2**20:.1f}", row.path])
    return top.aligned((*titles, "path"), lines, [row.damage for row in rows if row.damage])


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends it without a traceback
    sys.exit(main())
