"""What a worker under test does at each moment, and its death at a chosen line of code.

`install()` wraps functions of ecemb and torch from outside, by name, so that a worker writes to its
board what it is doing; a function that was renamed is an error. If the plan has an exact event for
this start of the job, lines of code are counted with `sys.settrace`, and the worker kills itself at
the chosen one: a real SIGKILL, after removing its arena's file where its memory is to be lost. Where the plan
expects every rank to refuse, `Worker.refused` compares the survivors' bytes.

No death depends on how fast the machine is. The process that is to die with another is waited for, and is
held where the job would otherwise go on or end without it; all victims are stopped before the first of them
is killed, as torchrun ends the others as soon as it sees that. A phase that turns out shorter than the plan's
line ends the worker at its end, or in the next step that has it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ecemb
from ecemb import guard
from ecemb.kernels.contract import Kernels
from ecemb.kernels.cpu import Cpu
from ecemb.memory import arena, journal, rank_memory
from ecemb.net import rendezvous
from ecemb.recovery import background, execute, missing, relay, requester, scrub, server, throttle
from ecemb.start import create, opening
from ecemb.step import transaction
from failures import refusals, sabotage
from failures.board import BESIDE, PHASES, REBUILD, STARTING, Board, boards_in, fell_together, memory_of
from failures.plan import TIMED_STEPS, Exact, Plan, Refused, Timed

# The environment's variables that name the run's folder, the first start of this torchrun, and where
# arenas lie.
FOLDER, FIRST, ARENAS = "ECEMB_FAILURES", "ECEMB_FAILURES_FIRST", "ECEMB_ARENAS"

# Small tables are rebuilt in many pieces, so that there is something between two of them.
CHUNK_WORDS = 256

MANY_RESTARTS = 10**6  # more than torchrun's of one launch

NEVER_S = 1e6  # from one chunk of the background stream to the next

HOLD_S = 240.0  # at most: until all victims are there, or until whoever is held is killed
_POLL_S = 0.002

_SOURCES = (str(Path(ecemb.__file__).parent), str(Path(__file__).with_name("worker.py")))
_KERNELS = str(Path(ecemb.__file__).with_name("kernels"))  # torn by halves instead; compiled at each start
# Phases of a step that come but once in it.
_ONCE = (
    *("status", "exchange", "prepare", "agreement", "apply", "commit", "aborting", "undoing a failed step"),
    "closing",
    "going whole",
    "ending the rebuild",
)
_PARTS = {
    "agree": "agreement",
    "image": "state",
    "store": "delta",
    "compare": "in the body",
    "wait": "status",
    "verify": "between steps",
}  # ecemb's own names of a step's parts, where they differ


class OnPurpose(Exception):
    """What a worker raises where the plan says so."""


class Course:
    """What a thread does, and what it has done in its step: lines of code and calls of kernels, by phase.

    Args:
        phase: what it does at first.
    """

    def __init__(self, phase: str) -> None:
        self.phases = [phase]
        self.step: int | None = None
        self.lines: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.last_calls: dict[str, int] = {}
        self._steps = 0
        self._total: Counter[str] = Counter()

    def begin(self, step: int) -> None:
        """A step begins."""
        if self.step is not None:
            self._steps += 1
            self._total.update(self.lines)
        self.step = step
        self.lines.clear()
        self.last_calls = dict(self.calls)
        self.calls.clear()

    @property
    def mean(self) -> dict[str, int]:
        """Lines of a step that has ended, by phase."""
        return {phase: lines // self._steps for phase, lines in self._total.items()}


class Worker:
    """This process: its board, what it does now, and the death that is planned for it.

    With overlap there are two courses: the main thread's, and that of the thread that decides a step beside
    the next one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan = Plan.read(folder / "plan.json")
        self._round = MANY_RESTARTS * int(os.environ[FIRST]) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.start = self._count_starts()
        self.board = Board.create(folder / "boards", os.getpid())
        self.board.set("round", self._round)
        self.board.set("worker", int(os.environ["RANK"]))
        self.board.set("start", self.start)
        self.main, self.beside = Course("starting"), Course("between steps")
        self._held_at: int | None = None
        self._courses = {threading.get_ident(): self.main}
        self._has_begun = False
        self._traced: dict[str, bool] = {}
        self._take_event(met=False)

    def _take_event(self, *, met: bool) -> None:
        """Looks up what the plan has for this start, whose workers may have met."""
        events = self.plan.events
        event = events[self.start] if self.start < len(events) else None
        self.event = event if isinstance(event, Exact) else None
        self.line = self.event.line if self.event is not None else 0  # fewer, if a step had not so many
        self._timed = event if isinstance(event, Timed) else None
        self.counts = self.event is not None or (not events and not self.plan.soak)
        self.refusal = None
        if isinstance(event, Refused):
            arenas = Path(os.environ[ARENAS])
            self.refusal = refusals.Refusal(self.folder, self.start, self.board, arenas, met=met)

    def _boards(self) -> list[Board]:
        return boards_in(self.folder / "boards")

    def _count_starts(self) -> int:
        """The number of this start of the job, which torchrun doesn't know: workers may have been replaced.

        One more than that of the worker before it in the same round, between two restarts by torchrun; of the
        first worker of a round, one more than that of all rounds before, but those whose workers never met.
        """
        index, boards = int(os.environ["RANK"]), self._boards()
        own = [one for one in boards if one.get("round") == self._round and one.get("worker") == index]
        earlier = (one for one in boards if one.get("round") < self._round)
        before = own or [one for one in earlier if one.get("rank") >= 0 or one.get("event") >= 0]
        return max([int(os.environ[FIRST]), *(1 + board.get("start") for board in before)])

    def rejoin(self) -> None:
        """The training begins; again in this process, perhaps, which has stayed when another one died.

        The number of that start is known when the workers have met.
        """
        if self._has_begun:
            self.main, self.beside = Course("rendezvous"), Course("between steps")
            self._courses = {threading.get_ident(): self.main}
            self.event = self._timed = self.refusal = self._held_at = None
            for word in ("step", "resumed", "went_on_ns", "whole"):
                self.board.set(word, -1)
            self.board.phase = "rendezvous"
            self.board.set("stayed", max(0, self.board.get("stayed")) + 1)
        self._has_begun = True

    def meet(self, pids: Collection[int]) -> None:
        """The workers of a start have met: one of them, perhaps, in place of one that died meanwhile."""
        start = max(board.get("start") for board in self._boards() if board.get("pid") in pids)
        if start != self.start:
            self.start = start
            self.board.set("start", start)
            self._take_event(met=True)

    @property
    def course(self) -> Course | None:
        """The thread's; None for one that doesn't count."""
        return self._courses.get(threading.get_ident()) if self.board else None

    def turn(self, phase: str) -> None:
        """Go over to another phase on the same level."""
        if (course := self.course) is not None:
            course.phases[-1] = phase
            self.board.phase = phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A phase within the present one."""
        course = self.course
        if course is None:
            yield
            return
        course.phases.append(phase)
        self.board.phase = phase
        try:
            yield
            self.leave()
        finally:
            course.phases.pop()
            self.board.phase = course.phases[-1]
            if course is self.main and course.step is None:
                self.save("start", course.lines, course.calls)

    def leave(self) -> None:
        """A phase ends: a process that was to die later in it dies now, if the phase doesn't come again."""
        course = self.course
        if course is None or not self._is_here(course, phase := course.phases[-1]):
            return
        step = -1 if course.step is None else course.step
        late = self.event.step is not None and step > self.event.step
        if PHASES[phase] in STARTING or phase in _ONCE or late or step == self.plan.setting.steps - 1:
            self.die("its end")

    def hold(self, *phases: str) -> None:
        """The job would go on, or end: the process that is to die in these phases with another stays here."""
        event = self.event
        if event is not None and event.phase in phases and self.board.known_rank in event.ranks[1:]:
            self._stay()

    def remove(self) -> None:
        """Arenas are removed as the job closes: no rank that is to lose its memory goes past this."""
        event = self.event
        if event is None or event.phase != "closing" or not any(victim.lost for victim in event.victims):
            return
        self.hold("closing")
        self.leave()

    def _stay(self) -> None:
        """Wait to be killed."""
        deadline = time.monotonic() + HOLD_S
        while time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def opened(self, next_step: int) -> None:
        """The start is over: training goes on from this step."""
        self.board.set("resumed", next_step)
        self.turn("between steps")

    def committed(self, steps: int) -> None:
        """A step has ended, and this many are committed."""
        self.board.set("committed", steps)
        self.board.went_on()
        self.turn("between steps")

    def begin(self, step: int) -> None:
        """A step has begun: some steps after that in which a process is killed from outside, wait for it."""
        self._begin(self.main, step)
        self.board.set("step", step)
        self.turn("in the body")
        if self._timed is not None:
            if self._held_at is None:
                first = step if self._timed.step is None else max(step, self._timed.step)
                self._held_at = min(first + TIMED_STEPS - 2, self.plan.setting.steps - 1)
            if step >= self._held_at:
                self._stay()

    @contextmanager
    def deciding(self, step: int) -> Iterator[None]:
        """A step is decided beside the next one."""
        if self.counts:
            sys.settrace(self._call)
        self._courses[threading.get_ident()] = self.beside
        self._begin(self.beside, step)
        with self.during("commit"):
            yield

    def join(self) -> None:
        """A thread of a rebuild beside training does something that counts."""
        if self.board and threading.get_ident() not in self._courses:
            self._courses[threading.get_ident()] = Course("between steps")
            if self.counts:
                sys.settrace(self._call)

    def _begin(self, course: Course, step: int) -> None:
        event = self.event
        if event is not None and self._is_first() and self._where() is course:
            if event.step is None and PHASES[event.phase] not in ("end", REBUILD):
                self.die(f"{event.phase!r} had fewer lines")
            ran = (course.calls if event.torn else course.lines)[event.phase]
            if event.step is not None and event.step <= (-1 if course.step is None else course.step) and ran:
                self.line = max(1, min(self.line - 1, ran // 2))  # in the next step that has them
        course.begin(step)

    def maybe_raise(self) -> None:
        """Raise in the body, if the death to come is one while that is undone."""
        if self._is_here(self.main, "undoing a failed step"):
            raise OnPurpose("before the death in undoing it")

    def finish(self) -> None:
        """The guard is closed."""
        self.board.went_on()
        self.hold("closing", "after closing")
        if self.event is not None and self._is_first() and self.event.phase != "after closing":
            self.die(f"{self.event.phase!r} had fewer lines")
        del self.main.lines["between steps"]  # which this time are not
        self.save(
            "steps",
            {**self.main.mean, **self.beside.mean},
            {**self.main.last_calls, **self.beside.last_calls},
        )
        self.save("end", self.main.lines, self.main.calls)
        self.main.phases[:] = ["after closing"]
        self.board.phase = "after closing"

    def save(self, when: str, lines: Mapping[str, int], calls: Mapping[str, int]) -> None:
        """Say how many lines and kernels each phase ran, for plans to come."""
        if lines:
            path = self.folder / "lines" / f"{when}.{self.start}.{self.board.known_rank}.json"
            path.with_suffix(".new").write_text(json.dumps({"lines": lines, "calls": calls}))
            path.with_suffix(".new").rename(path)

    def die(self, place: str) -> None:
        """Kill the event's other victims, then this process; or raise, if that is the event."""
        phase = (self.course or self.main).phases[-1]
        self.board.write("place", place)
        if self.event.raises:
            self.event = None
            self.board.raised(self.start, phase)
            raise OnPurpose(place)
        lost = {victim.rank: victim.lost for victim in self.event.victims}
        others = self._arrived({rank: gone for rank, gone in lost.items() if rank != self.event.ranks[0]})
        fell_together(
            [(one, lost[one.known_rank], None) for one in others]
            + [(self.board, lost[self.event.ranks[0]], phase)],
            self.start,
            away=self.event.away,
        )

    def _arrived(self, lost: Mapping[int, bool]) -> list[Board]:
        """The boards of the other victims, once all have one and what they are to lose is there."""
        deadline = time.monotonic() + HOLD_S
        while True:
            others = (Board(path) for path in (self.folder / "boards").glob("*.board"))
            found = [one for one in others if one.get("start") == self.start and one.known_rank in lost]
            there = [one for one in found if not lost[one.known_rank] or memory_of(one) is not None]
            if len(there) >= len(lost) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL_S)

    def trace(self) -> None:
        """Have lines counted from here on, if this start needs it."""
        if self.counts:
            sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Look at the lines of ecemb and of the worker only."""
        name = frame.f_code.co_filename
        if (traced := self._traced.get(name)) is None:
            traced = self._traced[name] = name.startswith(_SOURCES) and not name.startswith(_KERNELS)
        return self._line if traced else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and (course := self.course) is not None:
            phase = course.phases[-1]
            course.lines[phase] += 1
            self.board.set("traced", course.lines[phase])
            if self._is_here(course, phase) and not self.event.torn:
                if course.lines[phase] >= self.line:
                    self.die(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return self._line

    def kernel(self, name: str, half: Callable[[], None]) -> None:
        """A kernel is called; `half` does half of its work."""
        if (course := self.course) is None:
            return
        phase = course.phases[-1]
        course.calls[phase] += 1
        if self._is_here(course, phase) and self.event.torn and course.calls[phase] >= self.line:
            half()
            self.die(f"in the middle of {name}")

    def refused(self, error: Exception) -> None:
        """More memory is gone than the code survives. All ranks say so; if that is planned, it comes back."""
        if self.refusal is not None:
            self.refusal.tell(error)

    def _is_here(self, course: Course, phase: str) -> bool:
        return (
            self.event is not None
            and self.event.phase == phase
            and (self.event.step is None or self.event.step <= (-1 if course.step is None else course.step))
            and self._is_first()
            and self._where() is course
        )

    def _where(self) -> Course | None:
        """The course that the event comes to; of a rebuild beside training, any."""
        if PHASES[self.event.phase] == REBUILD:
            return self.course
        return self.beside if self.plan.setting.overlap and self.event.phase in BESIDE else self.main

    def _is_first(self) -> bool:
        return self.board.known_rank == self.event.victims[0].rank

    def forget(self) -> None:
        """In a forked child, which is no rank."""
        sys.settrace(None)
        self.counts, self.event, self._timed = False, None, None
        self.board = None  # type: ignore[assignment]


def install() -> Worker:
    """Wrap everything; once, before ecemb is used."""
    worker = Worker(Path(os.environ[FOLDER]))
    os.register_at_fork(after_in_child=worker.forget)
    scrub.CHUNK_WORDS = relay.CHUNK_WORDS = CHUNK_WORDS
    rendezvous._STUCK_S = rendezvous._PATIENCE_S = HOLD_S  # however slow the machine is
    if worker.plan.sabotage is not None:
        sabotage.install(worker.plan.sabotage)
    _watch_start(worker)
    _watch_steps(worker)
    if worker.plan.setting.background:
        _watch_rebuild(worker)
    _watch_kernels(worker)
    worker.trace()
    return worker


def _watch_start(worker: Worker) -> None:
    def seats(assign: Callable[..., Any], workers: Any, *args: Any) -> Any:
        given = assign(workers, *args)
        worker.meet([one.pid for one in workers])
        worker.board.set("rank", given[worker.board.get("worker")].rank)
        return given

    def claimed(claim: Callable[..., Any], self: arena.Arena) -> Any:
        worker.board.write("arena", str(self.path))
        return claim(self)

    def filled(fill: Callable[..., Any], path: Path, *args: Any) -> Any:
        worker.board.write("arena", str(path))  # the file exists, so there is memory to lose
        with worker.during("creating an arena"):
            return fill(path, *args)

    def turning(phase: str) -> Callable[..., Any]:
        def around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with worker.during("finishing recovery" if phase == "restoring" else phase):
                result = function(*args, **kwargs)
            worker.turn(phase)
            return result

        return around

    def initialised(init: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        worker.rejoin()
        worker.leave()
        worker.hold("starting")
        with worker.during("rendezvous"):
            init(*args, **kwargs)
        sys.settrace(None)  # the worker now imports much through torch, for which it costs seconds

    def opened(open_memory: Callable[..., Any], *args: Any) -> Any:
        worker.trace()
        with worker.during("agreeing on a plan"):
            result = open_memory(*args)
        worker.opened(result.memory.committed)
        return result

    around = functools.partial(_around, worker)
    _wrap(ecemb, "init_process_group", initialised)
    _wrap(rendezvous, "assign", seats)
    around(rendezvous, "claim", "attaching")
    _wrap(arena.Arena, "_claim", claimed)
    _wrap(guard, "open_memory", opened)
    _wrap(arena.Arena, "_fill", filled)
    around(opening, "join", "joining")
    _wrap(create, "fill", turning("going live"))
    around(create.InitialContent, "write", "filling")
    around(execute, "_encode", "encoding")
    _wrap(opening, "recover", turning("restoring"))
    around(rank_memory.RankMemory, "roll_to", "deciding")
    around(journal.RowJournal, "undo", {"deciding": "undoing"})
    around(execute, "rebuild_lost", "rebuilding")
    around(execute, "copy_lost", "copying replicated state")
    around(execute, "_verify", "verifying")


def _watch_steps(worker: Worker) -> None:
    def begun(begin: Callable[..., int], self: Any) -> int:
        number = begin(self)
        worker.begin(number - 1)
        return number

    def ended(commit: Callable[..., Any], self: Any) -> Any:
        worker.leave()
        with worker.during("commit"):
            result = commit(self)
        worker.committed(self._memory.committed)
        return result

    def decided(decide: Callable[..., Any], self: Any, transaction: int, *args: Any) -> Any:
        with worker.deciding(transaction - 1):
            return decide(self, transaction, *args)

    @contextmanager
    def part(phase: Callable[..., Any], self: Any, name: str) -> Iterator[None]:
        with worker.during(_PARTS.get(name, name)), phase(self, name):
            yield

    def stepped(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with worker.during("optimizer"):
            result = step(*args, **kwargs)
        worker.maybe_raise()
        return result

    def closed(close: Callable[..., None], self: Any) -> None:
        worker.leave()
        with worker.during("closing"):
            close(self)
        worker.finish()

    def removed(remove: Callable[..., bool], self: Any) -> bool:
        if worker.main.phases[-1] == "closing":
            worker.remove()
        return remove(self)

    around = functools.partial(_around, worker)
    _wrap(arena.Arena, "remove", removed)
    _wrap(transaction.Transactions, "begin", begun)
    _wrap(transaction.Transactions, "commit", ended)
    _wrap(transaction.Transactions, "_decide_beside", decided)
    _wrap(transaction.Transactions, "phase", part)
    around(transaction.Transactions, "undo", "undoing a failed step")
    around(transaction.Transactions, "_undo_all", {"commit": "aborting"})
    around(rank_memory.RankMemory, "prepare", "prepare")
    around(rank_memory.RankMemory, "apply", {"deciding": "redoing"})
    _wrap(guard.Guard, "close", closed)
    around(torch.Tensor, "backward", "backward")
    for optimizer in (*guard_optimizers(), torch.optim.Adam):
        _wrap(optimizer, "step", stepped)


def _watch_rebuild(worker: Worker) -> None:
    """Beside training. Rows come only when they are waited for: else all come before the first step ends."""

    def around(owner: Any, name: str, phase: str) -> None:
        def joined(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            worker.join()
            with worker.during(phase):
                return function(*args, **kwargs)

        _wrap(owner, name, joined)

    missing.CHUNK_WORDS = requester.CHUNK_WORDS = CHUNK_WORDS
    throttle.BUSY_NS, throttle.FLOOR_BYTES_PER_S = 0, 1 / NEVER_S  # one chunk, and a rest
    os.environ[requester.POISON] = "1"
    for name, phase in {
        "ensure": "waiting for rows",
        "ensure_all": "waiting for all",
        "pause": "pausing",
        "resume": "resuming",
    }.items():
        around(requester.Requester, name, phase)
    around(background.Background, "end", "ending the rebuild")
    around(requester, "_go_live", "going whole")
    around(missing.Missing, "store_rows_", "storing rows")
    around(missing.Missing, "store_span_", "storing neighbouring rows")
    around(missing.Missing, "store_parity_", "storing parity")
    around(server.Snapshot, "read", "answering")


def guard_optimizers() -> tuple[type[torch.optim.Optimizer], ...]:
    """Those that may update tables."""
    return torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam


_HALVED = {
    **dict.fromkeys(("_scatter", "_gather_records"), (1, 2)),
    **dict.fromkeys(("_gather_rows", "_mul_add_rows"), (1, 2)),
    "_change_records": (1, 2, 3),
    "_mul_add_block": (0, 1),
    "_dot": (0, 2),
}
"""Kernel -> the places of its arguments that have rows or words to be worked on, which are halved."""


def _half(argument: Any) -> Any:
    """The first half of an array; of a list of arrays, that of each."""
    if isinstance(argument, list | tuple):
        return [_half(one) for one in argument]
    return argument[: len(argument) // 2]


def _watch_kernels(worker: Worker) -> None:
    known = {name for name, one in vars(Kernels).items() if callable(one) and re.match("_[a-z]", name)}
    assert known == {*_HALVED, "_update_rows", "_distinct", "_forget"}, "a kernel can't be torn"
    for name, places in _HALVED.items():

        def torn(
            kernel: Callable[..., None],
            self: Cpu,
            *args: Any,
            _name: str = name,
            _places: tuple[int, ...] = places,
        ) -> None:
            half = [_half(one) if at in _places else one for at, one in enumerate(args)]
            worker.kernel(_name[1:], lambda: kernel(self, *half))
            kernel(self, *args)

        _wrap(Cpu, name, torn)

    def row_torn(kernel: Callable[..., None], self: Cpu, *args: Any) -> None:
        """Half of the rows, and half of the next one."""
        dst, offsets, src, weight, saved, mark = args

        def half() -> None:
            at, width = len(offsets) // 2, src.shape[1]
            kernel(self, dst, offsets[:at], src[:at], weight, saved, mark)
            for offset in offsets[at : at + 1]:
                rest = dst[offset + width // 2 : offset + width]
                before = rest.copy()
                kernel(self, dst, offsets[at : at + 1], src[at : at + 1], weight, saved, mark)
                rest[:] = before

        worker.kernel("update_rows", half)
        kernel(self, *args)

    _wrap(Cpu, "_update_rows", row_torn)
    if worker.board.get("worker") % 2:  # as if this worker's rows were worth two threads
        Kernels.lanes = lambda self, rows, row_bytes: min(2, rows)


def _around(worker: Worker, owner: Any, name: str, phase: str | dict[str, str]) -> None:
    """The function is a phase; of a dict, one only within the phases that are its keys."""

    def around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = phase if isinstance(phase, str) else phase.get((worker.course or worker.main).phases[-1])
        if found is None:
            return function(*args, **kwargs)
        with worker.during(found):
            return function(*args, **kwargs)

    _wrap(owner, name, around)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(owner, name, wrapper)
