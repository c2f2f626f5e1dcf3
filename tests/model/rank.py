"""One rank of the model: its memory as plain values, its threads, and what it may do next.

Rows are not bytes but sets of applied transactions: bit 2(t - 1) is transaction t as trained, the bit above
it is t aborted and committed empty. XOR of two sets is their delta, applying one twice takes it back: missing
and double application both show. A transaction stands in them twice: once in the row that all transactions
change, and once, `ROW` bits above, in a row that no other one does. `TORN` is the instant between two values,
and what no rank has written: whatever reads it has garbage.

A process crashes by never moving again, so a program needs no transitions for that. Messages are sent
together with the store before them: no rank can see a message before receiving it, and a rank that doesn't
receive it just doesn't move. A store and the sends before the next one are therefore one transition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ecemb.memory.header import NONE
from ecemb.recovery.plan import RecoveryPlan

TORN = -1
UNSAVED = (NONE, TORN)
"""A place of the parity journal without old words: the row that they are of, and the words."""
NOTHING = 0
"""The state of a rank that has no arena."""

ROW = 16
SHARED = (1 << ROW) - 1

CREATED, JOINED, FILLED, DECIDED, REBUILT, LIVE, READY, CLOSING, CLOSED = range(1, 10)
"""What a thread has said last in this life. It only goes up, so that barriers compare numbers."""


def change(t: int, variant: int) -> int:
    """What transaction t changes in the rows: 1, as trained; 2, aborted and committed empty."""
    bit = variant << 2 * (t - 1)
    return bit | bit << ROW


class Journal(NamedTuple):
    """A row journal: the transaction that its label names, its count, and the rows as they were before.

    The count says of how many steps of a window it has rows, the first of which is `first`.
    """

    label: int = NONE
    count: int = 0
    entry: int = TORN
    first: int = 0

    def over(self, rows: int, *, half: bool = False) -> int:
        """Rows after the old records are copied back over them; `half`: while they are."""
        entry = TORN if half else self.entry
        own = (1 << 2 * self.count) - 1 << ROW + 2 * (self.first - 1)
        saved = SHARED | own
        return rows & ~saved | entry & saved


class Wave(NamedTuple):
    """A dissemination that a thread is in.

    Attributes:
        number: how many statuses this life had before its status.
        round: the one whose message comes next.
        fold: of all that this rank has heard and said.
    """

    number: int
    round: int
    fold: Any


class Thread(NamedTuple):
    """A thread of a rank's process: where it is, in which transaction, and what it has sent to the others."""

    pc: str = ""
    t: int = 0
    sent: int = 0
    said: tuple[tuple[int, int], ...] = ()
    old: int = TORN
    wave: Wave | None = None


class Rank(NamedTuple):
    """A rank's arena, and the process that works on it."""

    state: int = NOTHING
    joined: int = NONE
    gid: int = NONE
    opened: int = NONE
    committed: int = NONE
    prepared: int = NONE
    fill: int = 0
    journals: tuple[Journal, Journal] = (Journal(), Journal())
    rows: int = TORN
    inbox_label: int = NONE
    inbox: tuple[int, ...] = ()
    parity_label: int = NONE
    parity_row: int = NONE
    parity_saved: tuple[tuple[int, int], ...] = (UNSAVED, UNSAVED)
    parity: tuple[int, ...] = ()
    slots: tuple[Any, Any] = (None, None)
    room: int = 0  # the largest window that this rank's journal has room for; 0: it has never run out
    # What only the checks may look at: the arena's name, the starts in which it joined and opened, and
    # whether it has ever been whole.
    name: int = 0
    since: int = 0
    changed: int = 0
    whole: bool = False
    # The process: its main thread, as in `Thread`; the row journal of its transaction; and the thread that
    # decides the transaction before, if there is one.
    pc: str = ""
    t: int = 0
    sent: int = 0
    said: tuple[tuple[int, int], ...] = ()
    old: int = TORN
    wave: Wave | None = None
    armed: int = 0
    behind: Thread = Thread()
    # And: the number of statuses that have ended, what it has said, dense state, the window's size, rows and
    # dense state when the step began, and whether it ended by a peer's death.
    number: int = 0
    log: tuple[tuple[tuple[str, int, int], Any], ...] = ()
    dense: int = 0
    window: int = 0
    alone: int = 0  # the step that is a transaction of its own, as it was aborted in a longer one
    began: tuple[int, int] = (0, 0)
    read: tuple[tuple[Any, int], ...] = ()  # messages taken by source, if they don't say what they are
    quiet: bool = False

    def stopped(self) -> Rank:
        """The arena, without its process."""
        return self._replace(**_NO_PROCESS)

    def swapped(self) -> Rank:
        """The same rank, with the other thread in the place of the main one."""
        main = Thread(self.pc, self.t, self.sent, self.said, self.old, self.wave)
        return self._replace(**self.behind._asdict(), behind=main)

    def journalled(self, at: int, **words: int) -> Rank:
        """This rank with other words in a row journal."""
        new = self.journals[at]._replace(**words)
        return self._replace(journals=(new, self.journals[1]) if at == 0 else (self.journals[0], new))


_NO_PROCESS: dict[str, Any] = {
    name: Rank._field_defaults[name] for name in Rank._fields[Rank._fields.index("pc") :]
}


class Life(NamedTuple):
    """One start of the job's workers."""

    plan: RecoveryPlan
    number: int
    generation: int
    gid: int
    fill: int


class Move(NamedTuple):
    """A transition of one rank.

    Attributes:
        text: what it is called in a trace.
        need: what all of `who` must have said; 0: nothing.
        who: the ranks that it waits for; None: all others.
        new: the rank after it; or a function of all ranks that returns it, None if it has to wait.
        event: what the checks must hear of.
        behind: whether it is a move of the thread behind.
    """

    text: str
    need: int
    who: tuple[int, ...] | None
    new: Rank | Callable[[Sequence[Rank]], Rank | None]
    event: str = ""
    behind: bool = False


class Broken(Exception):
    """Something that must never happen did."""
