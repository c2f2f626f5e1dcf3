"""`ecemb top`: the arenas of running jobs, once or live, read from their headers alone.

Invariant: a look writes nothing, takes no lock, and reads no row.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

from ..errors import ConfigurationError
from ..memory.header import Found, Word
from ..net.wording import aligned
from ..recovery.plan import Kind
from .arenas import add_arena_dir, arenas_of, next_step, printed, rank_of, states

SHOWS = """
Of each arena of this user: its state, in the words of `ecemb arenas --help`; the next step, which is the
first that is not committed; how many steps it is behind the furthest rank of its job here; how many steps are
open, that is, run without being in parity yet; the age of parity, which is the time since the last commit;
memory; the process; and the last recovery. It reads headers alone, and changes nothing.
"""
_COLOURS = {"LIVE": "green", "down": "red", "damaged": "red", "INIT": "yellow", "REBUILDING": "yellow"}


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.set_defaults(run=run)
    add_arena_dir(parser)
    parser.add_argument("--job", help="only this job's")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (1)")
    parser.add_argument("--once", action="store_true", help="look once, as plain text; so does a pipe")
    parser.add_argument("--json", action="store_true", help="look once, as a JSON list")


def run(options: argparse.Namespace) -> int:
    """Shows the arenas: live in a terminal, else once.

    Returns:
        The exit code: 1 if a single look found no arena.

    Raises:
        ConfigurationError: A live view needs rich, which is not installed.
    """

    def look() -> list[Line]:
        return lines(arenas_of(options), time.time_ns())

    if not (options.once or options.json) and sys.stdout.isatty():
        watch(look, f"ecemb top: {options.arena_dir}", max(0.1, options.interval))
        return 0
    shown = look()
    said = printed(options, [dataclasses.asdict(line) for line in shown], text(shown))
    print(said, file=None if shown or options.json else sys.stderr)
    return 0 if shown else 1


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The last start of an arena's rank.

    Attributes:
        kind: "fresh", "process", "memory" or "checkpoint", as in `ecemb.RecoveryReport`.
        step: The step that training continued from.
        seconds: Time that `ecemb.protect` took.
        ago_s: Seconds since.
    """

    kind: str
    step: int
    seconds: float
    ago_s: float


@dataclasses.dataclass(frozen=True)
class Line:
    """One arena; None for values that its header doesn't have.

    Attributes:
        job: From the folder's name.
        host: From the folder's name.
        rank: The logical rank that the memory belongs to.
        state: One of `arenas.states`.
        next_step: The first step that is not committed.
        behind: Steps that the job's furthest rank on this machine has committed and this rank hasn't.
        open: Steps whose changes are not in parity: the one in flight, and those of an open window.
        lacking_bytes: Bytes of its rows and parity that are still to be rebuilt, beside training; else 0.
        parity_age_s: Seconds since the last commit.
        size_bytes: Memory in use.
        pid: The process that holds the arena.
        recovery: The last start.
        damage: Why the header can't be read.
        path: The file.
    """

    job: str | None
    host: str | None
    rank: int | None
    state: str
    next_step: int | None
    behind: int | None
    open: int | None
    lacking_bytes: int
    parity_age_s: float | None
    size_bytes: int
    pid: int | None
    recovery: Recovery | None
    damage: str | None
    path: str


def lines(found: Sequence[Found], now_ns: int) -> list[Line]:
    """Returns one line per arena.

    Args:
        found: The arenas of this machine, or of one job on it.
        now_ns: The time, as of `time.time_ns`.
    """
    shown = list(zip(found, states(found), strict=True))
    reached: dict[str | None, int] = {}
    for one, state in shown:
        if one.header is not None and state != "stale":
            reached[one.job] = max(reached.get(one.job, one.header.committed), one.header.committed)
    return [_line(one, state, reached.get(one.job, 0), now_ns) for one, state in shown]


def _line(one: Found, state: str, reached: int, now_ns: int) -> Line:
    header, words, step = one.header, one.words, next_step(one)
    age = recovery = None
    if header is not None:
        if words[Word.COMMITTED_NS]:
            age = max(0, now_ns - words[Word.COMMITTED_NS]) / 1e9
        if words[Word.RECOVERED_NS] and 0 < words[Word.RECOVERY_KIND] <= len(get_args(Kind)):
            recovery = Recovery(
                get_args(Kind)[words[Word.RECOVERY_KIND] - 1],
                words[Word.RECOVERY_STEP],
                words[Word.RECOVERY_US] / 1e6,
                max(0, now_ns - words[Word.RECOVERED_NS]) / 1e9,
            )
    return Line(
        job=one.job,
        host=one.host,
        rank=rank_of(one),
        state=state,
        next_step=step,
        behind=None if step is None else reached - step,
        open=None if step is None else max(0, words[Word.ROWS_LABEL] - step, words[Word.NEXT_LABEL] - step),
        lacking_bytes=words[Word.LACKING_BYTES] if header else 0,
        parity_age_s=age,
        size_bytes=one.size_bytes,
        pid=one.holder,
        recovery=recovery,
        damage=one.damage,
        path=str(one.path),
    )


_NUMBERS = ("next step", "behind", "open", "parity age", "MiB")
_TITLES = ("job", "host", "rank", "state", *_NUMBERS, "pid", "last recovery")


def text(shown: Sequence[Line]) -> str:
    """Returns the lines as a plain table."""
    return aligned(_TITLES, [_cells(one) for one in shown], [one.damage for one in shown if one.damage])


def watch(look: Callable[[], Sequence[Line]], title: str, interval_s: float, *, console: Any = None) -> None:
    """Shows lines in the terminal until Ctrl-C.

    Args:
        look: Returns the present lines.
        title: Text above the lines.
        interval_s: Seconds between two looks.
        console: A console of rich; None for the terminal.

    Raises:
        ConfigurationError: rich is not installed.
    """
    try:
        from rich.live import Live
    except ImportError as error:
        raise ConfigurationError(
            "a live view needs rich, which is not installed: pip install 'ecemb[top]', or give --once"
        ) from error
    try:
        with Live(_table(look(), title), console=console, screen=True, auto_refresh=False) as view:
            while True:
                time.sleep(interval_s)
                view.update(_table(look(), title), refresh=True)
    except KeyboardInterrupt:
        return


def _table(shown: Sequence[Line], title: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    size = sum(one.size_bytes for one in shown) / 2**20
    notes = [one.damage for one in shown if one.damage]
    caption = "\n".join([f"{len(shown)} arenas, {size:.1f} MiB; Ctrl-C ends", *notes])
    table = Table(title=title, caption=Text(caption), title_justify="left", caption_justify="left")
    for name in _TITLES:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for one in shown:
        cells = [Text(cell) for cell in _cells(one)]  # names may contain rich's markup
        cells[3].stylize(_COLOURS.get(one.state, ""))
        if one.behind:
            cells[5].stylize("yellow")
        table.add_row(*cells)
    return table


def _cells(one: Line) -> list[str]:
    numbers = [one.job, one.host, one.rank, one.state, one.next_step, one.behind, one.open]
    cells = ["-" if value is None else str(value) for value in numbers]
    if one.lacking_bytes:
        cells[3] += f", {one.lacking_bytes / 2**20:.0f} MiB to go"
    cells.append("-" if one.parity_age_s is None else _span(one.parity_age_s))
    cells.append(f"{one.size_bytes / 2**20:.1f}")
    cells.append("-" if one.pid is None else str(one.pid))
    last = one.recovery
    recovery = "-"
    if last is not None:
        recovery = f"{last.kind}, step {last.step}, {last.seconds:.2f} s, {_span(last.ago_s)} ago"
    return [*cells, recovery]


def _span(seconds: float) -> str:
    """`0.3 s`, `12 s`, `5 min`, `7.5 h`."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
