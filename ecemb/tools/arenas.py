"""`ecemb arenas ls` and `rm`: lists and removes the arenas of this user.

Owns the words for an arena's state and their meaning, which `top` shows as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import EcembError
from ..memory.header import Found, State
from ..memory.scan import arenas, remove
from ..net.wording import aligned

SHOWS = """
`ls` and `top` have the same words: LIVE, a process trains on the arena; down, none does, and a launch of the
job goes on from it; stale, the job went on without it; INIT and REBUILDING, it is being filled; FINISHED, the
job is closed; torn or damaged, its header can't be read. The next step is the first that is not committed.
"""


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


def next_step(found: Found) -> int | None:
    """An arena's first step that is not committed; None if it has no state yet, or no readable header."""
    return found.header.committed if found.header and found.header.committed >= 0 else None


def states(found: Sequence[Found]) -> list[str]:
    """A word for each arena of a machine, or of a job on it: what its memory is good for now.

    "LIVE" if a process trains on it, "down" if it is LIVE and no process holds it; "stale" if the job went on
    without it; "torn" or "damaged" if its header can't be read; else the name of its `State`.
    """
    joined: dict[str | None, int] = {}
    for one in found:
        if one.header is not None:
            joined[one.job] = max(joined.get(one.job, one.header.joined), one.header.joined)
    return [_state(one, joined.get(one.job, 0)) for one in found]


def _state(one: Found, joined: int) -> str:
    if one.header is None:
        return "torn" if one.torn else "damaged"
    if one.header.joined < joined:
        return "stale"
    return "down" if one.header.state is State.LIVE and one.holder is None else one.header.state.name


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
    found = arenas_of(options)
    rows = [_row(one, state) for one, state in zip(found, states(found), strict=True)]
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


def _row(found: Found, state: str) -> dict[str, Any]:
    """One arena as `ls` shows it; None for values that its header doesn't have.

    `state` is one of `states`; `damage` says why a header can't be read. `next_step`, `committed` and
    `prepared` are steps; the first of them is None until there is one. `pid` is the process that holds the
    arena, else the last one that attached, unless that one has closed it; `alive` says whether a process
    holds it. `joined` is the last generation that the arena was a member of.
    """
    header = found.header
    return {
        "job": found.job,
        "host": found.host,
        "rank": rank_of(found),
        "state": state,
        "next_step": next_step(found),
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
    lines: list[list[str]] = []
    for row in rows:
        pid = row["pid"] if row["alive"] else None
        values = [row["job"], row["host"], row["rank"], row["state"], row["next_step"]]
        shown = ["-" if value is None else str(value) for value in (*values, pid)]
        lines.append([*shown[:-1], f"{row['size_bytes'] / 2**20:.1f}", shown[-1], row["path"]])
    titles = ("job", "host", "rank", "state", "next step", "MiB", "pid", "path")
    return aligned(titles, lines, [row["damage"] for row in rows if row["damage"]])
