"""Where a worker is: a small mapped file per process, which outlives it.

The worker stores; the process that kills it, itself included, reads after its death where it was. A store is
one 8-byte word, so that a kill leaves the old value or the new one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# What a worker does, in the order in which a job does it. The table lists them by group.
PHASES = {
    "starting": "start",  # from the process's first line on: imports, most of all
    "rendezvous": "start",
    "attaching": "start",  # claiming the arena that survived
    "agreeing on a plan": "start",
    "creating an arena": "start",
    "joining": "start",
    "filling": "fresh start",
    "encoding": "fresh start",
    "going live": "fresh start",
    "deciding": "recovery",
    "undoing": "recovery",
    "redoing": "recovery",
    "rebuilding": "recovery",
    "copying replicated state": "recovery",
    "verifying": "recovery",
    "finishing recovery": "recovery",
    "restoring": "recovery",
    "between steps": "step",
    "in the body": "step",
    "backward": "step",
    "optimizer": "step",
    "capture": "step",
    "state": "step",
    "status": "step",
    "delta": "step",
    "exchange": "step",
    "prepare": "step",
    "agreement": "step",
    "apply": "step",
    "commit": "step",
    "aborting": "step",  # undoing a step that somebody voted against
    "undoing a failed step": "step",
    "waiting for rows": "rebuild",  # beside training
    "storing rows": "rebuild",
    "storing neighbouring rows": "rebuild",
    "storing parity": "rebuild",
    "pausing": "rebuild",
    "resuming": "rebuild",
    "waiting for all": "rebuild",
    "going whole": "rebuild",
    "answering": "rebuild",
    "ending the rebuild": "rebuild",
    "closing": "end",
    "after closing": "end",
}
NAMES = tuple(PHASES)
BESIDE = ("delta", "exchange", "prepare", "agreement", "apply", "commit")
"""With overlap, what a thread of its own does while the main thread is in the next step."""
STARTING = ("start", "fresh start", "recovery")
REBUILD = "rebuild"

_WORDS = (
    *("pid", "worker", "round", "start", "rank", "phase", "step", "traced", "event", "lost", "fell"),
    *("fell_ns", "resumed", "committed", "went_on_ns", "whole", "stayed"),
)
_TEXTS = {"place": (512, 512), "arena": (1024, 1024)}
_SIZE_BYTES = 4096
_POLL_S = 0.001
_AT_REST = (b"T", b"t", b"Z", b"X")  # states of a process: it does nothing any more
AWAY = ".away"  # the suffix of an arena that was put aside


class Board:
    """One worker's board. Words are integers, -1 while they have no value; texts are short.

    Words: `pid`; `worker`, torchrun's rank; `round`, a number that grows with torchrun's restarts; `start`,
    how often the job had been started, by torchrun or by workers that were replaced; `rank`, the
    logical one; `phase`, an index in `NAMES`; `step`, the step's number; `traced`, lines of code run in that
    phase; `event`, which of the run's events ended it; `lost`, 1 if its memory went with it, 0 if not, 2 if
    it was not killed but raised, 3 if torchrun was killed; `fell`, the phase it was in then, and `fell_ns`
    when; `resumed`, the step at which it went on after its start; `committed`, steps that it knows to be
    committed; `went_on_ns`, when it committed its first step in this start, or found the job finished;
    `whole`, 1 when it has heard that no rank lacks anything; `stayed`, how often its process stayed when
    another one had died. Times are of one monotonic clock. Texts:
    `place`, the line at which it ended itself; `arena`, its file.
    """

    def __init__(self, path: Path) -> None:
        """Map the board that `create` made."""
        self.path = path
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _SIZE_BYTES)
        self._words = memoryview(self._bytes).cast("q")

    @classmethod
    def create(cls, folder: Path, pid: int) -> Board:
        """Make the board of process `pid`; it appears in the folder only when it is whole."""
        unfinished = folder / f"{pid}.new"
        unfinished.write_bytes(bytes(_SIZE_BYTES))
        board = cls(unfinished)
        for word in _WORDS:
            board.set(word, -1)
        board.set("pid", pid)
        board.phase = "starting"
        board.path = unfinished.rename(folder / f"{pid}.board")
        return board

    def get(self, word: str) -> int:
        return self._words[_WORDS.index(word)]

    def set(self, word: str, value: int) -> None:
        self._words[_WORDS.index(word)] = value

    @property
    def phase(self) -> str:
        return NAMES[max(0, self.get("phase"))]

    @phase.setter
    def phase(self, name: str) -> None:
        self.set("phase", NAMES.index(name))

    def text(self, name: str) -> str:
        start, size = _TEXTS[name]
        return self._bytes[start : start + size].split(b"\0")[0].decode()

    def write(self, name: str, text: str) -> None:
        start, size = _TEXTS[name]
        self._bytes[start : start + size] = text.encode()[: size - 1].ljust(size, b"\0")

    @property
    def known_rank(self) -> int:
        """The logical rank; torchrun's before there is one."""
        rank = self.get("rank")
        return rank if rank >= 0 else self.get("worker")

    def fell(self, event: int, lost: bool, away: bool = False, phase: str | None = None) -> None:
        """Write down which event killed the process; take its memory away if that is planned.

        Args:
            event: index of the plan's event.
            lost: whether its rank's memory goes as well.
            away: put that aside, so that it may come back.
            phase: of the thread that the event came to; None for what the board says.
        """
        arena = memory_of(self)
        if lost and arena is not None:
            if away:
                arena.rename(arena.with_suffix(AWAY))
            else:
                arena.unlink(missing_ok=True)
        self.set("lost", int(lost and arena is not None))
        self.set("fell", self.get("phase") if phase is None else NAMES.index(phase))
        self.set("event", event)
        self.set("fell_ns", time.monotonic_ns())

    def went_on(self) -> None:
        """Write down when training went on, the first time."""
        if self.get("went_on_ns") < 0:
            self.set("went_on_ns", time.monotonic_ns())

    def raised(self, event: int, phase: str) -> None:
        """Write down at which event the process was made to raise."""
        self.fell(event, lost=False, phase=phase)
        self.set("lost", 2)

    def orphaned(self, event: int) -> None:
        """Write down at which event the process ended with torchrun."""
        self.fell(event, lost=False)
        self.set("lost", 3)

    @property
    def alive(self) -> bool:
        """Whether its process still runs; a zombie does not."""
        return _state(self.get("pid")) not in (b"Z", b"X")


def boards_in(folder: Path) -> list[Board]:
    """All boards that are there; the driver of a soak removes those of starts long ago meanwhile."""
    found: list[Board] = []
    for path in folder.glob("*.board"):
        with suppress(FileNotFoundError):
            found.append(Board(path))
    return found


def memory_of(board: Board) -> Path | None:
    """The arena of a process's rank: its own, or what an earlier start left, if it has none yet."""
    if own := board.text("arena"):
        return Path(own) if Path(own).exists() else None
    boards = boards_in(board.path.parent)
    of_rank = [other for other in boards if other.known_rank == board.known_rank and other.text("arena")]
    for other in sorted(of_rank, key=lambda other: other.get("start"), reverse=True):
        if (path := Path(other.text("arena"))).exists():
            return path
    return None


def fell_together(victims: Sequence[tuple[Board, bool, str | None]], event: int, *, away: bool) -> None:
    """Kill processes as if at one moment: torchrun ends the rest as soon as it sees one of them dead.

    So all are stopped first, and all is written down and taken away before any of them is killed.

    Args:
        victims: board, whether the rank's memory goes, and the phase of the thread that the event came to
            (None for what the board says). Those that have ended already are left out; this process may be
            the last.
        event: index of the plan's event.
        away: put memory aside, so that it may come back.
    """
    alive = [victim for victim in victims if victim[0].alive]
    others = [board.get("pid") for board, _, _ in alive if board.get("pid") != os.getpid()]
    if len(others) < len(alive):
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))  # SIG_IGN, from any thread
    for pid in others:
        _signal(pid, signal.SIGSTOP)
    while any(_state(pid) not in _AT_REST for pid in others):
        time.sleep(_POLL_S)
    for board, lost, phase in alive:
        board.fell(event, lost, away, phase)
    for board, _, _ in alive:
        _signal(board.get("pid"), signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended in the meantime
        return


def _state(pid: int) -> bytes:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b"X"
    return stat[stat.rindex(b")") + 2 :].split()[0]
