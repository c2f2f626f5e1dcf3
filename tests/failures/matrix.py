"""The matrix: what the job does x how many die there x with their memory or without; and who dies.

A row is a phase of the protocol, or a kind of death; a cell is a row, a number of victims, and whether
their memory goes with them. `Chains` draws runs that between them cover the cells: a run is a chain of
events, so that one job covers several cells. A failure in a recovery comes after one in a step, which
leaves behind what that recovery needs: something to undo, to redo, or to rebuild.

What is lost is always survivable, but in the cells of r + 1 victims with their memory: there every rank
must refuse, whereupon the memory is brought back and the job goes on.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import random
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from failures.board import PHASES, STARTING
from failures.draws import Deck, Lengths
from failures.driver import Outcome
from failures.plan import ABORT_EVERY, TIMED_STEPS, Event, Exact, Plan, Refused, Setting, Timed, Victim

EACH_STEP = (None, "in the body", "backward", "optimizer", "capture")
"""Phases of every step of a window; the others only come when it is full."""
PAIRS = 4  # failures in steps, each with one in the recovery from it, in one run
ATTEMPTS = 6  # for a cell that was missed: it had fewer lines than thought
GUESS_LINES, GUESS_CALLS = 12, 2
TIMED_PAUSE_S = 0.05

MAIN = Setting(4, 4, 2, "Adagrad")
STOCK = Setting(4, 4, 3, "SparseAdam")
OTHERS = (
    STOCK,
    # More ranks than blocks in a stripe.
    Setting(4, 3, 2, "SGD", workers=2, window=3, overlap=True),
    Setting(6, 6, 4, "Adagrad"),
    Setting(5, 4, 2, "SparseAdam", workers=2),
    Setting(4, 4, 2, "SparseAdam", window=3),
    Setting(4, 4, 2, "Adagrad", overlap=True),
    Setting(4, 4, 2, "Adagrad", apart=True),
    Setting(4, 4, 2, "Adagrad", apart=True, window=3, overlap=True),
    Setting(4, 4, 2, "Adagrad", fabric=True),
)

When = Literal["fresh", "first", "step", "last", "recovery", "end"]
Needs = Literal["", "newcomer", "undo", "rows to undo", "redo"]
NEEDS: tuple[Needs, ...] = ("", "newcomer", "undo", "rows to undo", "redo")
Who = Literal["all", "processes", "one process", "one", "torchrun"]


@dataclasses.dataclass(frozen=True)
class Row:
    """What the job does when a process dies, or how.

    Attributes:
        name: in the table.
        when: "fresh" start, "first", some or "last" "step", a "recovery", or the "end".
        phase: of `board.PHASES`; None for any.
        how: "line": at a line of code. "torn": inside a kernel. "raise": an exception instead of a death.
            "outside": at any moment, killed by another process. "torchrun": that is killed, with all workers.
        needs: what the failure before a recovery has to leave behind.
        who: which of the columns make sense.
    """

    name: str
    when: When
    phase: str | None
    how: Literal["line", "torn", "raise", "outside", "torchrun"] = "line"
    needs: Needs = ""
    who: Who = "all"


ROWS = (
    Row("fresh start: creating an arena", "fresh", "creating an arena", who="processes"),
    Row("fresh start: joining", "fresh", "joining"),
    Row("fresh start: filling", "fresh", "filling"),
    Row("fresh start: encoding", "fresh", "encoding"),
    Row("fresh start: encoding, torn", "fresh", "encoding", "torn", who="one"),
    Row("fresh start: going live", "fresh", "going live"),
    Row("the very first step", "first", None),
    *(Row(phase, "step", phase) for phase, group in PHASES.items() if group == "step"),
    Row("capture, torn", "step", "capture", "torn", who="one"),
    Row("apply, torn", "step", "apply", "torn", who="one"),
    Row("an exception in a step", "step", None, "raise", who="one process"),
    Row("a step, from outside", "step", None, "outside"),
    Row("a step, torchrun and its store", "step", None, "torchrun", who="torchrun"),
    Row("the very last step", "last", None),
    Row("starting", "recovery", "starting"),
    Row("rendezvous", "recovery", "rendezvous"),
    Row("attaching", "recovery", "attaching"),
    Row("agreeing on a plan", "recovery", "agreeing on a plan"),
    Row("creating an arena", "recovery", "creating an arena", needs="newcomer"),
    Row("joining", "recovery", "joining"),
    Row("deciding", "recovery", "deciding"),
    Row("undoing", "recovery", "undoing", needs="undo"),
    Row("undoing, torn", "recovery", "undoing", "torn", needs="rows to undo", who="one"),
    Row("redoing", "recovery", "redoing", needs="redo"),
    Row("redoing, torn", "recovery", "redoing", "torn", needs="redo", who="one"),
    Row("rebuilding", "recovery", "rebuilding", needs="newcomer"),
    Row("rebuilding, torn", "recovery", "rebuilding", "torn", needs="newcomer", who="one"),
    Row("copying replicated state", "recovery", "copying replicated state", needs="newcomer"),
    Row("verifying", "recovery", "verifying", needs="newcomer"),
    Row("finishing recovery", "recovery", "finishing recovery"),
    Row("restoring", "recovery", "restoring"),
    Row("a start, from outside", "recovery", None, "outside"),
    Row("a start, torchrun and its store", "recovery", None, "torchrun", who="torchrun"),
    Row("closing", "end", "closing"),
    Row("after closing", "end", "after closing", who="processes"),
)
ROW = {row.name: row for row in ROWS}
OTHER_ROWS = {  # row -> numbers of processes, and of processes with their memory; r stands for n - k
    "state": ("1", "1"),
    "delta": ("1", "r"),
    "exchange": ("", "r"),
    "prepare": ("1", ""),
    "apply": ("1", ""),
    "commit": ("", "1"),
    "aborting": ("1", "1"),
    "capture": ("", "r+1"),
    "redoing": ("1", ""),
    "rebuilding": ("r+1", "1"),
    "undoing": ("1", ""),
    "closing": ("1", ""),
}

BEFORE_PREPARED = ("in the body", "backward", "optimizer", "capture", "state", "status", "delta", "exchange")
ROWS_CHANGED = ("state", "status", "delta", "exchange")
UNMADE = ("starting", "rendezvous", "attaching", "agreeing on a plan", "creating an arena")
"""Phases of a recovery in which a rank whose memory is gone may have no new one to lose."""
ROLES = ("lowest", "highest", "middle", "donor", "newcomer")


Start = Literal["plain", "warm", "stays"]
"""By torchrun, by `ecemb-run`, or by that with a training that `ecemb.run` calls."""
STARTS: tuple[Start, ...] = ("warm", "stays", "plain")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A row, how many die, and whether their memory goes with them."""

    row: str
    victims: int
    memory: bool
    setting: Setting

    def __str__(self) -> str:
        setting = "" if self.setting == MAIN else f" ({self.setting.ranks} ranks, {self.setting.code})"
        return f"{self.row}: {self.victims}, {'with memory' if self.memory else 'processes'}{setting}"

    @property
    def start(self) -> Start:
        """How its workers are started: each way that of a third of the cells.

        A process that stays does not start its script again.
        """
        start = STARTS[zlib.crc32(str(self).encode()) % 3]
        return "warm" if start == "stays" and ROW[self.row].phase == "starting" else start

    @property
    def refused(self) -> bool:
        """Whether this is more than the code survives, of a job that has begun."""
        begun = ROW[self.row].when != "fresh" or ROW[self.row].phase == "going live"
        return self.memory and self.victims > self.setting.tolerated and begun

    @property
    def gone(self) -> int:
        """How many ranks will need a rebuild after it."""
        return self.victims if self.memory and not self.refused else 0


def cells(*patterns: str, device: str = "cpu") -> list[Cell]:
    """All cells whose name matches, in the table's order; those with images with tables on this device."""
    found = [Cell(row.name, count, memory, MAIN) for row in ROWS for count, memory in _columns(row)]
    for setting in (dataclasses.replace(one, device=device if one.apart else "cpu") for one in OTHERS):
        sizes = {"1": 1, "r": setting.tolerated, "r+1": setting.tolerated + 1}
        rows = {row: numbers for row, numbers in OTHER_ROWS.items() if _happens(ROW[row], setting)}
        for row, numbers in rows.items():
            for number, memory in zip(numbers, (False, True), strict=True):
                if number:
                    found.append(Cell(row, sizes[number], memory, setting))
    return [cell for cell in found if any(fnmatch.fnmatch(str(cell), one) for one in patterns or ("*",))]


def _happens(row: Row, setting: Setting) -> bool:
    """Whether runs of a setting have the row's phase. Rows that are apart are captured as part of "delta"."""
    return row.phase != "capture" or not setting.apart


def _columns(row: Row) -> list[tuple[int, bool]]:
    r = MAIN.tolerated
    counts = {
        "all": [(count, memory) for memory in (False, True) for count in range(1, r + 2)],
        "processes": [(count, False) for count in range(1, r + 2)],
        "one process": [(1, False)],
        "one": [(1, False), (1, True)],
        "torchrun": [(r + 1, False), *((count, True) for count in range(1, r + 2))],
    }
    return counts[row.who]


@dataclasses.dataclass(frozen=True)
class Chain:
    """A run, and the cells that it covers: by the index of the event."""

    plan: Plan
    cells: dict[int, Cell]
    roles: dict[int, str]


class Chains:
    """Draws runs until every cell has been covered.

    Args:
        seed: of all choices.
        lengths: may grow between two runs.
        wanted: the cells; each is covered at least once.
        forked: workers are forked (`forked_torchrun`), except those of `STOCK`, which torchrun starts, and
            those of warm cells.
    """

    def __init__(self, seed: int, lengths: Lengths, wanted: Sequence[Cell], *, forked: bool = True) -> None:
        self._random = random.Random(seed)
        self._lengths = lengths
        self._forked = forked
        self._left = list(wanted)
        self._start: Start = "plain"  # of the run that is being drawn
        self._random.shuffle(self._left)
        self._attempts = Counter[Cell]()
        self._roles = Deck(self._random, ROLES)
        self._numbers = Counter[Setting]()
        phases = [p for p, group in PHASES.items() if group == "step"]
        self._phases = Deck(
            self._random, [p for p in phases if p not in ("aborting", "undoing a failed step")]
        )

    def __iter__(self) -> Iterator[Chain]:
        while self._left:
            first = min(self._left, key=lambda cell: (cell.setting != MAIN, cell.start))
            setting, self._start = first.setting, first.start
            number = self._numbers[setting]
            self._numbers[setting] += 1
            loading = 2 if setting.workers or number % 3 == 2 else 0
            chain = self._chain(setting, dataclasses.replace(setting, workers=loading))
            forked = self._forked and setting != STOCK
            warm, stays = self._start != "plain", self._start == "stays"
            plan = dataclasses.replace(chain.plan, forked=forked, warm=warm, stays=stays)
            yield dataclasses.replace(chain, plan=plan)

    def missed(self, cell: Cell) -> bool:
        """A cell was not covered, after all; returns whether it will be tried again."""
        self._attempts[cell] += 1
        if self._attempts[cell] < ATTEMPTS:
            self._left.append(cell)
            return True
        return False

    def _chain(self, setting: Setting, trained: Setting) -> Chain:
        """Some cells of one setting, in the order in which one job can meet them."""
        draw = _Draw(self._random, self._lengths, self._roles, self._phases, self._attempts, trained)
        for cell in self._take(setting, "fresh", 2):
            draw.add(cell)
            if cell.refused:  # maybe it isn't: then the job begins anew, and has no room for more
                return draw.chain()
        for cell in self._take(setting, "first", 1):
            draw.add(cell)
        count = 0
        while count < PAIRS and not draw.full and (found := self._take(setting, "recovery", 1)):
            draw.add(self._before(found[0]))
            draw.add(found[0])
            count += 1
        while count < 2 * PAIRS and not draw.full and (found := self._take(setting, "step", 1)):
            draw.add(found[0])
            count += 1
        for when in ("last", "end"):
            for cell in self._take(setting, when, 1):
                draw.add(cell)
        return draw.chain()

    def _take(self, setting: Setting, when: str, most: int) -> list[Cell]:
        """Some cells that are left; a fresh start that goes live is the last one of its chain."""
        left = [cell for cell in self._left if cell.setting == setting and cell.start == self._start]
        found = [cell for cell in left if ROW[cell.row].when == when]
        found.sort(key=lambda cell: NEEDS.index(ROW[cell.row].needs), reverse=True)  # while there are fits
        live = [cell for cell in found if ROW[cell.row].phase == "going live"]
        found = [cell for cell in found if cell not in live][:most] + live[:1]
        for cell in found:
            self._left.remove(cell)
        return found

    def _before(self, recovery: Cell) -> Cell:
        """A failure in a step that leaves behind what a failure in recovery needs: one not done yet, if any.

        Of those that fit, one that few other recoveries could do with.
        """
        rows = [row for row in ROWS if _happens(row, recovery.setting)]
        every = [Cell(row.name, *column, recovery.setting) for row in rows for column in _columns(row)]
        again = [c for c in every if c.victims <= recovery.setting.tolerated and ROW[c.row].how == "line"]
        again = self._random.sample(again, len(again))
        for there in ([cell for cell in self._left if cell.start == self._start], again):
            steps = [
                cell
                for cell in there
                if cell.setting == recovery.setting and ROW[cell.row].when == "step" and _fits(cell, recovery)
            ]
            if steps:
                cell = min(steps, key=lambda cell: sum(_leaves(cell, needs) for needs in NEEDS))
                if cell in self._left and cell.start == self._start:
                    self._left.remove(cell)
                return cell
        raise ValueError(f"no failure leaves behind what {recovery} needs")


def _fits(step: Cell, recovery: Cell) -> bool:
    """Whether a failure in a step leaves behind what one in recovery needs, and also takes away."""
    row, needs = ROW[recovery.row], ROW[recovery.row].needs
    if recovery.memory and _unmade(row):
        # One arena has to be left: with none, a start refuses with StateLost, and says nothing of erasures.
        most = recovery.setting.ranks - 1 if recovery.refused else recovery.setting.tolerated
        there = step.gone - (row.phase == "creating an arena")  # one of them has a file by then: the first
        return _leaves(step, needs) and max(there, 0) + recovery.victims <= most
    again = needs == "newcomer" and row.how != "torn"  # a newcomer runs no kernel
    if recovery.gone and step.gone + (not again) > recovery.setting.tolerated:
        return False  # those who go would be too many, but for those who are gone already
    return _leaves(step, needs)


def _unmade(row: Row) -> bool:
    """Whether a replacement rank may have no memory yet when a process dies there."""
    return row.when == "recovery" and (row.phase is None or row.phase in UNMADE)


def _leaves(step: Cell, needs: Needs) -> bool:
    phase = ROW[step.row].phase if ROW[step.row].how in ("line", "torn") else ""
    fits = {
        "": True,
        "newcomer": step.gone > 0,
        # Of whoever was killed there: others may have heard of it, and undone the step by themselves.
        "undo": phase in BEFORE_PREPARED and not step.gone,
        "rows to undo": phase in ROWS_CHANGED and not step.gone,
        "redo": phase == "apply" and not step.gone,
    }
    return fits[needs]


class _Draw:
    """One run as it is drawn: what is lost, and what is left to be undone, after each event."""

    def __init__(
        self,
        random_: random.Random,
        lengths: Lengths,
        roles: Deck[str],
        phases: Deck[str],
        attempts: Counter[Cell],
        setting: Setting,
    ) -> None:
        self._random, self._lengths, self._role_deck, self._phases = random_, lengths, roles, phases
        self._attempts, self._setting = attempts, setting
        self._events: list[Event] = []
        self._cells: dict[int, Cell] = {}
        self._roles: dict[int, str] = {}
        self._step = 1  # the next event in a step is after this one
        self._lost: set[int] = set()  # ranks whose memory may be gone when the next start begins
        self._redo: set[int] = set()  # who was killed when it had something to redo, or to undo
        self._undo: set[int] = set()

    def chain(self) -> Chain:
        return Chain(Plan(self._setting, tuple(self._events)), self._cells, self._roles)

    @property
    def full(self) -> bool:
        """Whether the steps may not suffice for one more."""
        return self._step + TIMED_STEPS + ABORT_EVERY > self._setting.steps - 2

    def add(self, cell: Cell) -> None:
        """Add the event of a cell, and the refusal that follows it, if any."""
        row = ROW[cell.row]
        if row.when != "recovery":
            self._lost = set()
        lost = set(self._lost)
        first = self._first(cell, row)
        ranks = self._victims(cell, first)
        victims = tuple(Victim(rank, cell.memory) for rank in ranks)
        self._cells[len(self._events)] = cell
        event = self._event(cell, row, victims)
        self._events.append(event)
        if row.when != "recovery":
            self._redo = {first} if event.phase == "apply" else set()
            self._undo = {first} if event.phase in BEFORE_PREPARED else set()
        if cell.refused:
            unless = {"going live": "fresh", "closing": "finished"}.get(row.phase or "", "")
            self._events.append(Refused(tuple(sorted(lost | set(ranks))), unless))
        elif cell.memory and (row.when != "fresh" or row.phase == "going live"):
            self._lost = lost | set(ranks)

    def _event(self, cell: Cell, row: Row, victims: tuple[Victim, ...]) -> Exact | Timed:
        step = self._next_step(row)
        if row.how in ("outside", "torchrun"):
            starts = [phase for phase, group in PHASES.items() if group in STARTING]
            phase = self._random.choice(starts[1:]) if step is None else None
            pause_s = self._random.random() * TIMED_PAUSE_S
            return Timed(victims, phase, step, pause_s, row.how == "torchrun", cell.refused)
        phase = row.phase or self._phases.draw()
        torn = row.how == "torn"
        known = self._lengths.of(self._setting, phase, torn=torn)
        length = known or (GUESS_CALLS if torn else GUESS_LINES)
        if phase == "after closing":
            length = 1
        line = self._random.randint(1, max(1, length >> (2 * self._attempts[cell])))
        return Exact(victims, phase, step, line, torn, row.how == "raise", cell.refused)

    def _next_step(self, row: Row) -> int | None:
        if row.when in ("first", "last"):
            return 0 if row.when == "first" else self._setting.steps - 1
        if row.when != "step":
            return None
        self._step += 1
        window = 1 if row.phase in EACH_STEP else self._setting.window
        while (self._step % ABORT_EVERY == ABORT_EVERY - 1) != (row.phase == "aborting") or (
            self._step % window != window - 1
        ):
            self._step += 1
        step = self._step
        self._step += TIMED_STEPS if row.how in ("outside", "torchrun") else 1
        return step

    def _first(self, cell: Cell, row: Row) -> int:
        """The victim that finds the line: in a role that is due, among those who come there."""
        everybody = set(range(self._setting.ranks))
        survivors, donor = everybody - self._lost, min(everybody - self._lost)
        allowed = everybody
        if row.when == "recovery":
            allowed = {
                "attaching": survivors,
                "creating an arena": self._lost,
                "deciding": survivors,
                "undoing": self._undo,
                "redoing": self._redo,
                "copying replicated state": {*self._lost, donor},
            }.get(row.phase or "", survivors if row.how == "torn" else everybody)
            if cell.memory and _unmade(row) and row.phase != "creating an arena":
                allowed = allowed - self._lost
            elif cell.gone and len(self._lost) >= self._setting.tolerated:
                allowed = allowed & self._lost
        last = self._setting.ranks - 1
        roles = {
            "lowest": {0},
            "highest": {last},
            "middle": set(range(1, last)),
            "donor": {donor},
            "newcomer": self._lost,
        }
        role = self._role_deck.draw([role for role, ranks in roles.items() if ranks & allowed])
        self._roles[len(self._events)] = role
        return self._random.choice(sorted(roles[role] & allowed))

    def _victims(self, cell: Cell, first: int) -> list[int]:
        """Who dies together; with their memory, those who have lost it before come first, if it is new."""
        others = [rank for rank in range(self._setting.ranks) if rank != first]
        self._random.shuffle(others)
        if cell.memory and _unmade(ROW[cell.row]):
            others.sort(key=lambda rank: rank in self._lost)
        elif cell.memory:
            others.sort(key=lambda rank: rank not in self._lost)
        return [first, *others[: cell.victims - 1]]


def hits(chain: Chain, outcome: Outcome) -> set[int]:
    """The events of a chain that met their cells."""
    found: set[int] = set()
    for index, cell in chain.cells.items():
        event = chain.plan.events[index]
        deaths = {death.rank: death for death in outcome.deaths if death.event == index}
        if isinstance(event, Refused) or not deaths:
            continue
        what = "memory" if cell.memory else "process"
        dead = {rank for rank, death in deaths.items() if death.what == what}
        planned = {victim.rank for victim in event.victims}
        if isinstance(event, Timed) and event.agent:
            met = not cell.memory or dead == planned
        elif isinstance(event, Exact) and event.raises:
            met = {death.what for death in deaths.values()} == {"exception"}
        else:
            met = dead == planned == set(deaths)
        if met and isinstance(event, Exact):
            first = deaths[event.victims[0].rank]
            met = first.phase == event.phase and (not event.torn or first.place.startswith("in the middle"))
            if event.phase == "starting":  # each was held there
                met = met and {death.phase for death in deaths.values()} == {event.phase}
        if met and cell.refused:
            after = chain.plan.events[index + 1]
            met = index + 1 in outcome.refused or (isinstance(after, Refused) and after.unless != "")
        if met:
            found.add(index)
    return found
