"""What `python -m ecemb top` shows: the arenas of running jobs, by their headers alone.

Invariant: looking writes nothing, takes no lock, and reads no row. Must not know what is printed where.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from .errors import ConfigurationError
from .header import Found, Header, State
from .plan import Kind

_COLOURS = {"LIVE": "green", "down": "red", "damaged": "red", "INIT": "yellow", "REBUILDING": "yellow"}


@dataclasses.dataclass(frozen=True)
class Recovery:
    """The last start of an arena's rank.

    Attributes:
        kind: "fresh", "process", "memory" or "checkpoint", as in `ecemb.RecoveryReport`.
        step: that training went on from.
        seconds: that `ecemb.protect` took.
        ago_s: seconds since.
    """

    kind: str
    step: int
    seconds: float
    ago_s: float


@dataclasses.dataclass(frozen=True)
class Line:
    """One arena; what its header can't say is None.

    Attributes:
        job: by the folder.
        host: by the folder.
        rank: the logical rank whose memory it is.
        state: of `State` by name; "down" if it is LIVE and no process holds it; "stale" if the job went on
            without it; "torn" or "damaged" if the header can't be read.
        step: the first one that is not committed.
        behind: steps that the job's furthest rank, of those seen here, has committed and this one hasn't.
        open: steps whose changes parity doesn't have: the one in flight, and those of an open window.
        parity_age_s: seconds since the last commit.
        size_bytes: memory that it takes.
        pid: the process that holds it.
        recovery: its last start.
        damage: why the header can't be read.
        path: the file.
    """

    job: str | None
    host: str | None
    rank: int | None
    state: str
    step: int | None
    behind: int | None
    open: int | None
    parity_age_s: float | None
    size_bytes: int
    pid: int | None
    recovery: Recovery | None
    damage: str | None
    path: str


def lines(found: Iterable[Found], now_ns: int) -> list[Line]:
    """What to show of arenas that a scan found, by job, host and rank.

    Args:
        found: from `directory.arenas`.
        now_ns: the time, as of `time.time_ns`.
    """
    every = list(found)
    known = [(one.job, one.header) for one in every if one.header is not None]
    joined: dict[str | None, int] = {}
    reached: dict[str | None, int] = {}
    for job, header in known:
        joined[job] = max(joined.get(job, header.joined), header.joined)
    for job, header in known:
        if header.joined == joined[job]:
            reached[job] = max(reached.get(job, header.committed), header.committed)
    shown = [_line(one, joined.get(one.job, 0), reached.get(one.job, 0), now_ns) for one in every]
    return sorted(shown, key=_place)


def _place(one: Line) -> tuple[str, str, int]:
    return one.job or "", one.host or "", -1 if one.rank is None else one.rank


def _line(one: Found, joined: int, reached: int, now_ns: int) -> Line:
    header, words = one.header, one.words
    step = age = recovery = None
    if header is not None:
        step = header.committed if header.committed >= 0 else None
        if words["committed_ns"]:
            age = max(0, now_ns - words["committed_ns"]) / 1e9
        if words["recovered_ns"] and 0 < words["recovery_kind"] <= len(get_args(Kind)):
            recovery = Recovery(
                get_args(Kind)[words["recovery_kind"] - 1],
                words["recovery_step"],
                words["recovery_us"] / 1e6,
                max(0, now_ns - words["recovered_ns"]) / 1e9,
            )
    return Line(
        job=one.job,
        host=one.host,
        rank=header.constants.rank if header else None,
        state=_state(one, header, joined),
        step=step,
        behind=None if step is None else reached - step,
        open=None if step is None else max(0, words["rows_label"] - step, words["next_label"] - step),
        parity_age_s=age,
        size_bytes=one.size_bytes,
        pid=one.holder,
        recovery=recovery,
        damage=one.damage,
        path=str(one.path),
    )


def _state(one: Found, header: Header | None, joined: int) -> str:
    if header is None:
        return "torn" if one.torn else "damaged"
    if header.joined < joined:
        return "stale"
    return "down" if header.state is State.LIVE and one.holder is None else header.state.name


_NUMBERS = ("step", "behind", "open", "parity age", "MiB")
_TITLES = ("job", "host", "rank", "state", *_NUMBERS, "pid", "last recovery")


def text(shown: Sequence[Line]) -> str:
    """Lines as a plain table."""
    return aligned(_TITLES, [_cells(one) for one in shown], [one.damage for one in shown if one.damage])


def aligned(titles: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """A plain table, in columns, with notes below it."""
    every = [titles, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(titles))]
    told = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in every]
    return "\n".join([*(line.rstrip() for line in told), *notes])


def watch(look: Callable[[], Sequence[Line]], title: str, interval_s: float, *, console: Any = None) -> None:
    """Shows lines in the terminal, over and over, until it is interrupted.

    Args:
        look: gives them.
        title: to put above them.
        interval_s: seconds from one look to the next.
        console: rich's, to write to; None for the terminal.

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
        cells = [Text(cell) for cell in _cells(one)]  # names are no markup
        cells[3].stylize(_COLOURS.get(one.state, ""))
        if one.behind:
            cells[5].stylize("yellow")
        table.add_row(*cells)
    return table


def _cells(one: Line) -> list[str]:
    numbers = [one.job, one.host, one.rank, one.state, one.step, one.behind, one.open]
    cells = ["-" if value is None else str(value) for value in numbers]
    cells.append("-" if one.parity_age_s is None else _span(one.parity_age_s))
    cells.append(f"{one.size_bytes / 2**20:.1f}")
    cells.append("-" if one.pid is None else str(one.pid))
    last = one.recovery
    told = "-"
    if last is not None:
        told = f"{last.kind}, step {last.step}, {last.seconds:.2f} s, {_span(last.ago_s)} ago"
    return [*cells, told]


def _span(seconds: float) -> str:
    """A time for people: 0.3 s, 12 s, 5 min, 7.5 h."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
