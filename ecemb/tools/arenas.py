"""`python -m ecemb arenas ls` and `rm`: lists and removes the arenas of this user."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import EcembError
from ..memory.header import Found
from ..memory.scan import arenas, remove
from ..net.wording import aligned

HELP = "memory that workers left behind on this machine, or hold"
SHOWS = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One arena as `ls` shows it; None where its header does not say.

    Attributes:
        job: From the folder's name.
        host: From the folder's name.
        rank: The logical rank that the memory belongs to.
        state: Name of a `State`; "torn" or "damaged" if the header can't be read.
        committed: Last committed transaction.
        prepared: Last prepared transaction.
        pid: The process that holds the arena, else the last one that attached; None if that one closed it.
        alive: Whether a living process holds it.
        size_bytes: Memory in use.
        arena_id: Its random name.
        joined: The last generation that it was a member of.
        damage: Why the header can't be read.
        path: The file.
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


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options and its own commands."""
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    ls = kinds.add_parser("ls", help="list arenas of this user")
    ls.set_defaults(run=run_ls)
    add_arena_dir(ls)
    ls.add_argument("--job", help="only this job's")
    ls.add_argument("--json", action="store_true", help="as a JSON list")

    rm = kinds.add_parser("rm", help="remove arenas of this user: the job's state is lost")
    rm.set_defaults(run=run_rm)
    add_arena_dir(rm)
    rm.add_argument("--job", help="all of this job's")
    rm.add_argument("--host", help="only those of this host (with --job)")
    rm.add_argument("--force", action="store_true", help="also what a living process holds")
    rm.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files that ls printed")


def add_arena_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names the folder with all arenas."""
    parser.add_argument("--arena-dir", type=Path, default=Path("/dev/shm"), help="where they are (/dev/shm)")


def run_ls(options: argparse.Namespace) -> int:
    """Prints one line per arena, by job, host and rank.

    Returns:
        The exit code: 0.
    """
    rows = [_row(found) for found in arenas(options.arena_dir) if options.job in (None, found.job)]
    rows.sort(key=lambda row: (row.job or "", row.host or "", -1 if row.rank is None else row.rank))
    if options.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    elif rows:
        print(_text(rows))
    else:
        print(no_arenas(options.arena_dir, options.job))
    return 0


def run_rm(options: argparse.Namespace) -> int:
    """Removes the arenas of a job, or the ones at the paths.

    Returns:
        The exit code: 1 if an arena is missing or could not be removed.

    Raises:
        argparse.ArgumentError: Both paths and a job are given, or neither.
    """
    if options.paths:
        if options.job is not None or options.host is not None:
            raise argparse.ArgumentError(None, "rm takes either paths or --job (with --host), not both")
        return _remove(options.paths, force=options.force)
    if options.job is None:
        raise argparse.ArgumentError(None, "rm needs --job JOB, or the paths of arenas")
    job, host = options.job, options.host
    chosen = [found for found in arenas(options.arena_dir) if found.job == job and host in (None, found.host)]
    if not chosen:
        where = f"job {job!r}" + (f" and host {host!r}" if host else "")
        print(f"ecemb: no arenas of {where} in {options.arena_dir}; try `ls`", file=sys.stderr)
        return 1
    return _remove(chosen, force=options.force)


def _remove(chosen: Iterable[Found | Path], *, force: bool) -> int:
    """Removes arenas one by one; prints each failure, which makes the exit code 1."""
    code = 0
    for arena in chosen:
        path = arena.path if isinstance(arena, Found) else arena
        try:
            if remove(arena, force=force):
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


def _text(rows: Sequence[Row]) -> str:
    titles = ("job", "host", "rank", "state", "committed", "prepared", "pid", "alive", "MiB", "path")
    lines: list[list[str]] = []
    for row in rows:
        values = (row.job, row.host, row.rank, row.state, row.committed, row.prepared, row.pid)
        shown = ["-" if value is None else str(value) for value in values]
        alive = "yes" if row.alive else "no"
        lines.append([*shown, alive, f"{row.size_bytes / 2**20:.1f}", row.path])
    return aligned(titles, lines, [row.damage for row in rows if row.damage])


def no_arenas(arena_dir: Path, job: str | None) -> str:
    """Returns the line that stands for an empty table of arenas."""
    return f"no arenas of this user{f' and job {job!r}' if job else ''} in {arena_dir}"
