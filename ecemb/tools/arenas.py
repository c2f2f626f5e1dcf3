"""`ecemb arenas ls` and `rm`: lists and removes the arenas of this user."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EcembError
from ..memory.header import Found
from ..memory.scan import arenas, remove
from ..net.wording import aligned

SHOWS = ""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options and its own commands."""
    kinds = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    ls = kinds.add_parser("ls", help="list arenas of this user")
    ls.set_defaults(run=run_ls)
    add_arena_dir(ls)
    ls.add_argument("--job", help="only this job's")
    ls.add_argument("--json", action="store_true", help="as a JSON list")

    rm = kinds.add_parser("rm", help="remove arenas of this user: the job's state is lost")
    rm.set_defaults(run=run_rm, parser=rm)
    add_arena_dir(rm)
    rm.add_argument("--job", help="all of this job's")
    rm.add_argument("--host", help="only those of this host (with --job)")
    rm.add_argument("--force", action="store_true", help="also what a living process holds")
    rm.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="files that ls printed")


def add_arena_dir(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names the folder with all arenas."""
    parser.add_argument("--arena-dir", type=Path, default=Path("/dev/shm"), help="where they are (/dev/shm)")


def arenas_of(options: argparse.Namespace) -> list[Found]:
    """This user's arenas in `arena_dir`, of `job` if one is given, by job, host and rank."""

    def place(one: Found) -> tuple[str, str, int]:
        rank = rank_of(one)
        return one.job or "", one.host or "", -1 if rank is None else rank

    return sorted((one for one in arenas(options.arena_dir) if options.job in (None, one.job)), key=place)


def rank_of(found: Found) -> int | None:
    """The logical rank that an arena belongs to; None if its header can't be read."""
    return found.header.constants.rank if found.header else None


def printed(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]], table: str) -> str:
    """The text that a command prints for arenas: JSON, their table, or a line that says there are none."""
    if options.json:
        return json.dumps(rows, indent=2)
    whose = f" and job {options.job!r}" if options.job else ""
    return (
        table if rows else f"no arenas of this user{whose} in {options.arena_dir} (--arena-dir names another)"
    )


def run_ls(options: argparse.Namespace) -> int:
    """Prints one line per arena, by job, host and rank.

    Returns:
        The exit code: 0.
    """
    rows = [_row(found) for found in arenas_of(options)]
    print(printed(options, rows, _text(rows)))
    return 0


def run_rm(options: argparse.Namespace) -> int:
    """Removes the arenas of a job, or the ones at the paths.

    Returns:
        The exit code: 1 if an arena is missing or could not be removed.
    """
    if options.paths:
        if options.job is not None or options.host is not None:
            options.parser.error("it takes either paths or --job (with --host), not both")
        return _remove(options.paths, force=options.force)
    if options.job is None:
        options.parser.error("it needs --job JOB, or the paths of arenas")
    chosen = [found for found in arenas_of(options) if options.host in (None, found.host)]
    if not chosen:
        where = f"job {options.job!r}" + (f" and host {options.host!r}" if options.host else "")
        print(f"ecemb: no arenas of {where} in {options.arena_dir}: see `ecemb arenas ls`", file=sys.stderr)
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
                print(f"ecemb: {path} is not there: see `ecemb arenas ls`", file=sys.stderr)
                code = 1
        except EcembError as error:
            print(f"ecemb: {error}", file=sys.stderr)
            code = 1
    return code


def _row(found: Found) -> dict[str, Any]:
    """One arena as `ls` shows it; None for values that its header doesn't have.

    `state` is "torn" or "damaged" if the header can't be read, and `damage` says why. `pid` is the process
    that holds the arena, else the last one that attached, unless that one has closed it; `alive` says whether
    a process holds it. `joined` is the last generation that the arena was a member of.
    """
    header = found.header
    return {
        "job": found.job,
        "host": found.host,
        "rank": rank_of(found),
        "state": header.state.name if header else "torn" if found.torn else "damaged",
        "committed": header.committed if header else None,
        "prepared": header.prepared if header else None,
        "pid": found.holder or found.pid or None,
        "alive": found.holder is not None,
        "size_bytes": found.size_bytes,
        "arena_id": header.constants.arena_id if header else None,
        "joined": header.joined if header else None,
        "damage": found.damage,
        "path": str(found.path),
    }


def _text(rows: Sequence[Mapping[str, Any]]) -> str:
    named = ("job", "host", "rank", "state", "committed", "prepared", "pid")
    lines: list[list[str]] = []
    for row in rows:
        shown = ["-" if row[name] is None else str(row[name]) for name in named]
        lines.append(
            [*shown, "yes" if row["alive"] else "no", f"{row['size_bytes'] / 2**20:.1f}", row["path"]]
        )
    return aligned((*named, "alive", "MiB", "path"), lines, [row["damage"] for row in rows if row["damage"]])
