"""Draws plans: who dies where. Every phase has its turn, and what is lost is always survivable.

Lines are counted in earlier runs (`Lengths`); where nothing is known yet, a guess is as good: a
worker that runs out of lines dies at the next step's beginning.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Generic, TypeVar

from failures.board import PHASES, STARTING
from failures.plan import Event, Exact, Plan, Setting, Timed, Victim

T = TypeVar("T")

GUESS_LINES = 12
TIMED_PAUSE_S = 0.05
TORN_SHARE = 0.35  # of the deaths in a phase that calls kernels: how many fall inside of one
STEPS_APART = 4

SETTINGS = [
    *(Setting(4, 4, 3, optimizer) for optimizer in ("SGD", "Adagrad", "SparseAdam")),
    *(Setting(6, 6, 4, optimizer) for optimizer in ("SGD", "Adagrad", "SparseAdam")),
    Setting(4, 3, 2, "SGD"),  # more ranks than blocks in a stripe
    Setting(5, 4, 2, "SparseAdam"),
]
KINDS = (
    ("step", "recovery", "step", "timed"),
    ("fresh", "timed", "timed start", "step"),
    ("step", "recovery", "recovery", "step"),
    ("timed", "step", "recovery", "closing"),
    ("raise", "recovery", "step", "timed"),
    ("agreed", "redo", "redo again", "step"),
    ("step", "agent", "recovery", "agent start"),
)

BEFORE_PREPARED = ("in the body", "backward", "optimizer", "capture", "state", "delta", "exchange")
AFTER_AGREED = ("apply", "commit")


class Lengths:
    """How many lines of code, and calls of kernels, a phase was seen to run.

    The longest counts: what a start runs depends on what happened before, and on the rank.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, bool, str], int] = {}

    def learn(self, setting: Setting, lines: Counter[str], calls: Counter[str]) -> None:
        """Take over what a run counted."""
        for counts, torn in ((lines, False), (calls, True)):
            for phase, count in counts.items():
                key = self._key(setting, phase, torn)
                self._seen[key] = max(count, self._seen.get(key, 0))

    def of(self, setting: Setting, phase: str, *, torn: bool) -> int:
        """The number of lines, or of calls if `torn`; 0 if none were seen."""
        return self._seen.get(self._key(setting, phase, torn), 0)

    @staticmethod
    def _key(setting: Setting, phase: str, torn: bool) -> tuple[str, bool, str]:
        optimizer = "" if PHASES[phase] in STARTING else setting.optimizer
        return phase, torn, f"{setting.ranks} {setting.n} {setting.k} {optimizer}"


class Deck(Generic[T]):
    """Cards in random order; none comes again before all others that may come have come."""

    def __init__(self, random_: random.Random, cards: Sequence[T]) -> None:
        self._random, self._cards = random_, tuple(cards)
        self._left: list[T] = []

    def draw(self, allowed: Container[T] | None = None) -> T:
        """The next one of those allowed."""
        left = [card for card in self._left if allowed is None or card in allowed]
        if not left:
            left = [card for card in self._cards if allowed is None or card in allowed]
            self._random.shuffle(left)
            self._left += left
        self._left.remove(left[0])
        return left[0]


class Dealer:
    """Draws one plan after another, from one seed.

    Args:
        seed: of all choices.
        lengths: may grow between two plans.
    """

    def __init__(self, seed: int, lengths: Lengths) -> None:
        self._random = random.Random(seed)
        self._lengths = lengths
        steps = [p for p, group in PHASES.items() if group == "step"]
        steps.remove("undoing a failed step")
        starts = [p for p, group in PHASES.items() if group in ("start", "recovery")]
        self._decks = {
            "step": Deck(self._random, steps),
            "fresh": Deck(
                self._random,
                ["creating an arena", "joining", "filling", "encoding", "going live"],
            ),
            "recovery": Deck(self._random, [p for p in starts if p != "starting"]),
        }

    def plans(self) -> Iterator[Plan]:
        """Plans without end: every setting has its turn, and in a third of them workers load data."""
        settings, kinds = Deck(self._random, SETTINGS), Deck(self._random, KINDS)
        workers = Deck(self._random, (0, 1, 2))
        while True:
            setting = dataclasses.replace(settings.draw(), workers=2 if workers.draw() == 2 else 0)
            yield _Draw(self._random, self._decks, self._lengths, setting).plan(kinds.draw())


class _Draw:
    """One plan as it is drawn: what is lost, and what is left to be undone, after each event."""

    def __init__(
        self,
        random_: random.Random,
        decks: dict[str, Deck[str]],
        lengths: Lengths,
        setting: Setting,
    ) -> None:
        self._random, self._decks, self._lengths = random_, decks, lengths
        self._setting = setting
        self._lost: set[int] = set()  # ranks whose memory may be gone when the next start begins
        self._gone: set[int] = set()  # those of which it most likely is
        self._undo: set[int] = set()  # ranks that have something to undo then
        self._redo: set[int] = set()

    def plan(self, kinds: Sequence[str]) -> Plan:
        room = range(2, self._setting.steps - 2)
        steps = self._apart(room, len(kinds))
        events: list[Event] = []
        for kind, step in zip(kinds, steps, strict=True):
            if kind == "step":
                events.append(self._step(step))
            elif kind == "raise":
                event = self._step(step)
                victims = (dataclasses.replace(event.victims[0], lost=False),)
                events.append(dataclasses.replace(event, victims=victims, torn=False, raises=True))
                self._lost, self._gone = set(), set()
            elif kind == "agreed":
                first = self._random.randrange(self._setting.ranks)
                length = self._lengths.of(self._setting, "apply", torn=False) or GUESS_LINES
                line = self._random.randint(1, length)
                events.append(Exact((Victim(first, False),), "apply", step, line))
            elif kind in ("redo", "redo again"):
                event = self._exact("redoing", None, [events[0].victims[0].rank], begun=False)
                if kind == "redo":  # its memory is needed again
                    event = dataclasses.replace(event, victims=(Victim(event.victims[0].rank, False),))
                    self._lost, self._gone = set(), set()
                events.append(event)
            elif kind in ("timed", "agent"):
                events.append(self._timed(step, agent=kind == "agent"))
            elif kind in ("timed start", "agent start"):
                events.append(self._timed(None, agent=kind == "agent start"))
            elif kind == "closing":
                events.append(self._exact("closing", None, range(self._setting.ranks), begun=True))
            else:
                events.append(self._start(kind))
        return Plan(self._setting, tuple(events))

    def _apart(self, room: range, count: int) -> list[int]:
        """`count` steps in ascending order, with some between them: timed deaths come late."""
        slack = len(room) - STEPS_APART * count
        firsts = sorted(self._random.randrange(slack) for _ in range(count))
        return [room.start + first + STEPS_APART * i for i, first in enumerate(firsts)]

    def _step(self, step: int) -> Exact:
        phase = self._decks["step"].draw()
        return self._exact(phase, step, range(self._setting.ranks), begun=True)

    def _start(self, kind: str) -> Event:
        everybody = set(range(self._setting.ranks))
        who: dict[str, set[int]] = dict.fromkeys(PHASES, everybody)
        if kind == "recovery":
            survivors = everybody - self._gone
            newcomers = everybody if self._gone else set[int]()
            who |= {
                "attaching": survivors,
                "creating an arena": set(self._gone),
                "deciding": survivors,
                "undoing": self._undo - self._gone,
                "redoing": self._redo - self._gone,
                "rebuilding": newcomers,
                "copying replicated state": newcomers,
                "verifying": newcomers,
            }
        allowed = [phase for phase, ranks in who.items() if ranks]
        phase = self._decks[kind].draw(allowed)
        return self._exact(phase, None, sorted(who[phase]), begun=False)

    def _exact(self, phase: str, step: int | None, ranks: Sequence[int], *, begun: bool) -> Exact:
        first = self._random.choice(list(ranks))
        victims = self._victims(first, begun)
        calls = self._lengths.of(self._setting, phase, torn=True)
        torn = calls > 0 and self._random.random() < TORN_SHARE
        lines = self._lengths.of(self._setting, phase, torn=False)
        length = calls if torn else lines or GUESS_LINES
        if phase == "restoring":  # what had been lost is rebuilt
            self._gone = {victim.rank for victim in victims if victim.lost}
        if begun:
            everybody = set(range(self._setting.ranks))
            self._undo = everybody if phase in BEFORE_PREPARED else set()
            self._redo = {first} if phase in AFTER_AGREED else set()
        return Exact(victims, phase, step, self._random.randint(1, length), torn)

    def _timed(self, step: int | None, *, agent: bool) -> Event:
        first = self._random.randrange(self._setting.ranks)
        victims = self._victims(first, step is not None)
        if step is not None:
            self._undo, self._redo = set(), set()
        pause_s = self._random.random() * TIMED_PAUSE_S
        if step is not None:
            return Timed(victims, None, step, pause_s, agent)
        starts = [phase for phase, group in PHASES.items() if group in STARTING]
        return Timed(victims, self._random.choice(starts[1:]), None, pause_s, agent)

    def _victims(self, first: int, begun: bool) -> tuple[Victim, ...]:
        """Who dies together; what is lost with them stays survivable."""
        if begun:  # training has begun, so what was lost is rebuilt
            self._lost, self._gone = set(), set()
        others = [rank for rank in range(self._setting.ranks) if rank != first]
        several = self._setting.tolerated if self._random.random() < 0.6 else 1
        ranks = [first, *self._random.sample(others, several - 1)]
        victims: list[Victim] = []
        for rank in ranks:
            survivable = len(self._lost | {rank}) <= self._setting.tolerated
            lost = survivable and self._random.random() < 0.55
            if lost:
                self._lost.add(rank)
            victims.append(Victim(rank, lost))
        self._gone |= {victim.rank for victim in victims if victim.lost}
        return tuple(victims)
