"""Recovery with a part left out, or a step without one of its rules, to see that it is noticed.

Installed in workers under test, by patching. Each part of recovery must be one whose absence lets
training go on and end as if nothing were wrong. The rules are those of docs/protocol.md, 1.1. The simulator
plants the same patches, and more (`tests/simulator/defects.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ecemb.memory.journal import RowJournal
from ecemb.memory.rank_memory import RankMemory
from ecemb.recovery import execute
from ecemb.recovery.requester import Requester
from ecemb.state.rank_state import RankState
from ecemb.state.replicated import ReplicatedState
from ecemb.step.agreement import Agreement
from ecemb.step.transaction import Transactions
from failures.plan import Sabotage

Patch = tuple[Any, str, Callable[..., Any]]
"""An object, the name of one of its functions, and another function in place of that."""


def install(part: Sabotage) -> None:
    """Leave out a part of every recovery, or a rule of every step."""
    for owner, name, function in PARTS[part]():
        setattr(owner, name, function)


def no_undo() -> list[Patch]:
    """Recovery does not undo rows."""
    return [(RowJournal, "undo", lambda self: 0)]


def no_redo() -> list[Patch]:
    """Redoing a prepared transaction leaves parity as it is."""
    roll_to = RankMemory.roll_to

    def without_parity(self: RankMemory, transaction: int) -> Any:
        parity, self.parity = self.parity, None
        try:
            return roll_to(self, transaction)
        finally:
            self.parity = parity

    return [(RankMemory, "roll_to", without_parity)]


def no_generators() -> list[Patch]:
    """A start leaves torch's generator as the script has seeded it."""
    unpack = RankState.unpack

    def but_generators(self: RankState, data: bytes, **options: Any) -> None:
        state = torch.get_rng_state()
        unpack(self, data, **options)
        torch.set_rng_state(state)

    return [(RankState, "unpack", but_generators)]


def no_replicated() -> list[Patch]:
    """A start leaves dense state as the script has made it."""
    return [(ReplicatedState, "load", lambda self, slots, transaction: None)]


def no_rebuild() -> list[Patch]:
    """A replacement rank's rows and parity stay empty."""
    return [(execute, "rebuild_lost", lambda *_: 0), (execute, "_verify", lambda *_: None)]


def no_waiting() -> list[Patch]:
    """Steps read rows of a replacement rank that have not arrived."""
    return [(Requester, "ensure", lambda self, table, ids: None)]


def no_agreement() -> list[Patch]:
    """Parity is changed without knowing that all ranks have prepared."""
    return [(Agreement, "vote", lambda self, turn, what: None)]


def label_first() -> list[Patch]:
    """The journal's label is stored before its count is 0."""

    def arm(self: RowJournal, transaction: int, steps: int = 1, likely_bytes: int = 0) -> None:
        with self._lock:
            self._arena.set(self._label, transaction)
            self._arena.set(self._bytes, 0)
            self._drop()
        self._steps_left, self._ends = steps, []
        self._prefault.ask(self._region, max(likely_bytes, self._arena.reserved(self._region)))

    return [(RowJournal, "arm", arm)]


class _LateCount:
    """An arena whose word `rows_bytes` is stored only when it is asked for."""

    def __init__(self, arena: Any) -> None:
        self._arena = arena
        self._late: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arena, name)

    def get(self, name: str) -> int:
        return self._late if name == "rows_bytes" and self._late is not None else self._arena.get(name)

    def set(self, name: str, value: int) -> None:
        if name == "rows_bytes" and value:
            self._late = value
        else:
            self._late = None if name == "rows_bytes" else self._late
            self._arena.set(name, value)

    def store(self) -> None:
        if self._late is not None:
            self._arena.set("rows_bytes", self._late)


def rows_first() -> list[Patch]:
    """Rows change before the journal says that it holds their old records."""
    init, capture = RowJournal.__init__, RankMemory.capture_rank_state

    def late(self: RowJournal, arena: Any, *args: Any) -> None:
        init(self, _LateCount(arena), *args)

    def at_the_end(self: RankMemory, *args: Any) -> None:
        capture(self, *args)
        arena: Any = self.journal._arena
        arena.store()

    return [(RowJournal, "__init__", late), (RankMemory, "capture_rank_state", at_the_end)]


def prepared_first() -> list[Patch]:
    """A rank says that it is prepared before its inbox is complete."""
    decide = Transactions._decide

    def prepares(self: Transactions, transaction: int, *args: Any) -> Any:
        self._memory.arena.set("prepared", transaction)
        return decide(self, transaction, *args)

    return [(Transactions, "_decide", prepares)]


def one_journal() -> list[Patch]:
    """A transaction begins in the journal that the one before may still need."""

    def arm(self: RankMemory, transaction: int, *_: int) -> None:
        self.journal.arm(transaction)

    return [(RankMemory, "arm", arm)]


def oldest_first() -> list[Patch]:
    """Of two transactions, the older one is undone first."""

    def undo(self: RankMemory, transaction: int) -> int:
        undone = [one for one in self.journals if one.label > transaction]
        return sum(one.undo() for one in sorted(undone, key=lambda one: one.label))

    return [(RankMemory, "undo", undo)]


PARTS: dict[Sabotage, Callable[[], list[Patch]]] = {
    "undo": no_undo,
    "redo": no_redo,
    "generators": no_generators,
    "replicated": no_replicated,
    "rebuild": no_rebuild,
    "waiting": no_waiting,
    "agreement": no_agreement,
    "journal": rows_first,
    "inbox": prepared_first,
}
