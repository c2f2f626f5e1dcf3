"""The command line: `python -m ecemb arenas ls` and `python -m ecemb arenas rm`.

Owns what is printed, and the exit codes: 0 done, 1 refused or nothing there, 2 not understood.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from .directory import arenas, remove
from .errors import EcembError
from .header import Found


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
    parser.add_argument("--version", action="version", version=f"ecemb {_version()}")
    parts = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    about = "memory that workers left behind on this machine, or hold"
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


def _version() -> str:
    try:
        return importlib.metadata.version("ecemb")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


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
        print(f"no arenas of this user{f' and job {job!r}' if job else ''} in {arena_dir}")
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
    lines: list[tuple[str, ...]] = [(*titles, "path")]
    for row in rows:
        values = (row.job, row.host, row.rank, row.state, row.committed, row.prepared, row.pid)
        shown = ["-" if value is None else str(value) for value in values]
        alive = "yes" if row.alive else "no"
        lines.append((*shown, alive, f"{row.size_bytes / 2**20:.1f}", row.path))
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    texts: list[str] = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        texts.append("  ".join([*cells, line[-1]]))
    return "\n".join([*texts, *(row.damage for row in rows if row.damage)])


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends it without a traceback
    sys.exit(main())
