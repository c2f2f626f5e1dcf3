"""One rank of the model: its memory as plain values, and its program, one store at a time.

Rows are not bytes but sets of applied deltas: bit 2(t - 1) is transaction t as trained, the bit above it is
t aborted and committed empty. XOR of two sets is their delta, applying one twice takes it back: missing and
double application both show. `TORN` is the instant between two values: whatever reads it has garbage.

A process crashes by never moving again, so a program needs no transitions for that. Messages are sent
together with the store before them: nobody can see a message before receiving it, and whoever doesn't receive
it just doesn't move. A store and the sends before the next one are therefore one transition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ecemb.header import NONE, State
from ecemb.placement import Placement
from ecemb.plan import RecoveryPlan

from .rules import Rules

TORN = -1
NOTHING = 0
"""The state of a rank that has no arena."""

CREATED, JOINED, FILLED, DECIDED, REBUILT, LIVE, READY = range(1, 8)
CLOSING, CLOSED = 1000, 1001
"""What a rank has said last in this life. It only goes up, so that barriers compare numbers."""


def heads(t: int, attempt: int) -> int:
    """The heads and deltas of an attempt at transaction t."""
    return READY + 4 * t + attempt


def vote(t: int) -> int:
    """The vote on transaction t."""
    return READY + 4 * t + 3


class Rank(NamedTuple):
    """A rank's arena, and the process that works on it."""

    state: int = NOTHING
    joined: int = NONE
    gid: int = NONE
    opened: int = NONE
    committed: int = NONE
    prepared: int = NONE
    rows_label: int = NONE
    rows_count: int = 0
    rows_entry: int = TORN
    rows: int = TORN
    inbox_label: int = NONE
    inbox: tuple[int, ...] = ()
    parity_label: int = NONE
    parity_saved: tuple[int, ...] = ()
    parity: tuple[int, ...] = ()
    slots: tuple[Any, Any] = (None, None)
    # What only the checks may look at: the arena's name, the starts in which it joined and opened, and
    # whether it has ever been whole.
    name: int = 0
    since: int = 0
    changed: int = 0
    whole: bool = False
    # The process.
    pc: str = ""
    t: int = 0
    sent: int = 0
    said: tuple[tuple[int, int], ...] = ()
    old: int = TORN


class Life(NamedTuple):
    """One start of the job's workers."""

    plan: RecoveryPlan
    number: int
    generation: int
    gid: int


class Move(NamedTuple):
    """A transition of one rank.

    Attributes:
        text: what it is called in a trace.
        need: what all of `who` must have said; 0: nothing.
        who: the ranks that it waits for; None: all others.
        new: the rank after it; or a function of all ranks that returns it, None if it has to wait.
        event: what the checks must hear of.
    """

    text: str
    need: int
    who: tuple[int, ...] | None
    new: Rank | Callable[[Sequence[Rank]], Rank | None]
    event: str = ""


class Broken(Exception):
    """Something that must never happen did."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What every rank does.

    Attributes:
        placement: who keeps whose parity.
        steps: how many steps are trained.
        rules: the rules of the protocol that are on.
        close: whether the job is closed at the end.
        aborts: whether a step may be aborted.
    """

    placement: Placement
    steps: int
    rules: Rules
    close: bool
    aborts: bool

    def __post_init__(self) -> None:
        size, k = self.placement.world_size, self.placement.k
        keepers = [sorted({q for b in range(k) for q in self.placement.keepers(p, b)}) for p in range(size)]
        sources = [tuple(p for p in range(size) if i in keepers[p]) for i in range(size)]
        neighbours = [tuple(sorted({*keepers[i], *sources[i]})) for i in range(size)]
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "neighbours", neighbours)

    sources: Sequence[tuple[int, ...]] = dataclasses.field(init=False)
    neighbours: Sequence[tuple[int, ...]] = dataclasses.field(init=False)

    def moves(self, me: Rank, i: int, life: Life) -> list[Move]:
        """What rank i may do next, if it is not kept waiting."""
        if me.pc in ("", "done", "ended"):
            return []
        found: list[Move] = getattr(self, "do_" + me.pc)(me, i, life)
        return found + self._failures(me)

    # --- a start ---

    def do_create(self, me: Rank, i: int, life: Life) -> list[Move]:
        state = State.INIT if life.plan.kind == "fresh" else State.REBUILDING
        new = Rank(state=int(state), name=life.number, since=life.number, pc="join", sent=CREATED)
        return [Move(f"creates an arena, {state.name}", 0, None, new)]

    def do_join(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(joined=life.generation)
        if self.rules.id_void_while_joining:  # then the instant between is as good as after it
            new = new._replace(gid=life.gid, pc="open", sent=JOINED)
        else:
            new = new._replace(pc="join_id")
        return [Move(f"joined := {life.generation}", CREATED, None, new)]

    def do_join_id(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("generation_id", 0, None, me._replace(gid=life.gid, pc="open", sent=JOINED))]

    def do_open(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = JOINED if self.rules.all_joined_before_opened else 0
        text = "everybody has joined"
        new = me
        if self.rules.opened_before_changes:
            new, text = self._opened(me, life), f"opened := {life.generation}"
        if life.plan.kind == "fresh":
            new = new._replace(pc="fill")
        elif i not in life.plan.lost:
            new = self._decide(new, life, 0)
        elif self.rules.live_last:
            new = new._replace(pc="rebuild", sent=DECIDED)
        else:
            new = new._replace(pc="newcomer_commit", sent=DECIDED)
        return [Move(text, need, None, new)]

    def _opened(self, me: Rank, life: Life) -> Rank:
        return me._replace(opened=life.generation, changed=life.number)

    def do_fill(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("fills its rows", 0, None, me._replace(rows=0, sent=FILLED, pc="encode"))]

    def do_encode(self, me: Rank, i: int, life: Life) -> list[Move]:
        def new(ranks: Sequence[Rank]) -> Rank:
            parity = tuple(ranks[p].rows for p in self.sources[i])
            return me._replace(parity=parity, slots=((0, 0), None), pc="fill_prepare")

        return [Move("encodes the initial rows", FILLED, None, new)]

    def do_fill_prepare(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(prepared=0, whole=True, sent=DECIDED, pc="fill_commit")
        return [Move("prepared := 0", 0, None, new)]

    def do_fill_commit(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = DECIDED if self.rules.all_filled_before_live else 0
        return [Move("committed := 0", need, None, me._replace(committed=0, pc="alive"))]

    def _decide(self, me: Rank, life: Life, at: int) -> Rank:
        """The next thing that a survivor has to do for T, from number `at` of the list on."""
        t, rules = life.plan.transaction, self.rules
        order = ("lower", "undo", "redo") if rules.prepared_lowered_first else ("undo", "redo", "lower")
        for index in range(at, 3):
            what = order[index]
            if what == "lower" and me.prepared > t:
                return me._replace(pc=what, t=index)
            if what == "undo" and me.rows_count and (me.rows_label > t or not rules.committed_voids_journals):
                return me._replace(pc=what, t=index)
            if what == "redo" and me.committed < t:
                return self._apply(me, t, index) if t else me._replace(pc="commit", t=index)
        return me._replace(sent=DECIDED, pc="verify" if life.plan.lost else "alive", t=0)

    def do_lower(self, me: Rank, i: int, life: Life) -> list[Move]:
        t = life.plan.transaction
        return [Move(f"prepared := {t}", 0, None, self._decide(me._replace(prepared=t), life, me.t + 1))]

    def do_undo(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("undoes half of its rows", 0, None, me._replace(rows=TORN, pc="undo_end"))]

    def do_undo_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = self._decide(me._replace(rows=me.rows_entry), life, me.t + 1)
        return [Move("undoes its rows", 0, None, new)]

    def do_rebuild(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = DECIDED if self.rules.all_decided_before_rebuild else JOINED
        pc = "verify" if self.rules.live_last else "verified"
        text = "is rebuilt from parity"
        return [Move(text, need, None, lambda r: self._rebuilt(me, i, life, r)._replace(pc=pc, sent=REBUILT))]

    def _rebuilt(self, me: Rank, i: int, life: Life, ranks: Sequence[Rank]) -> Rank:
        blocks: dict[int, int] = {}
        parity: dict[int, int] = {}
        for task in life.plan.rebuild:
            if task.rank == i:
                values = self._decoded(task.stripe_class, task.sources, ranks)
                if task.block < self.placement.k:
                    blocks[task.block] = values[i]
                else:
                    for p, value in values.items():
                        parity[p] = value if parity.get(p, value) == value else TORN
        values_of_rows = set(blocks.values())
        rows = values_of_rows.pop() if len(values_of_rows) == 1 else TORN
        slots = ranks[life.plan.donor].slots
        return me._replace(rows=rows, parity=tuple(parity[p] for p in self.sources[i]), slots=slots)

    def _decoded(
        self, stripe_class: int, sources: Sequence[tuple[int, int]], ranks: Sequence[Rank]
    ) -> dict[int, int]:
        """What k blocks of a stripe say of all its k data blocks; all is garbage if they don't agree."""
        k = self.placement.k
        members = self.placement.members(stripe_class)[:k]
        told: dict[int, set[int]] = {p: set() for p in members}
        for block, rank in sources:
            if block < k:
                told[rank].add(ranks[rank].rows)
            else:
                for p in members:
                    kept = dict(zip(self.sources[rank], ranks[rank].parity, strict=False))
                    told[p].add(kept.get(p, TORN))
        fine = all(len(values) == 1 and TORN not in values for values in told.values())
        return {p: values.pop() if fine else TORN for p, values in told.items()}

    def do_verify(self, me: Rank, i: int, life: Life) -> list[Move]:
        """Everybody stands on T, and what was lost is rebuilt."""
        lost = life.plan.lost
        if i in lost:
            new = me._replace(committed=life.plan.transaction, pc="newcomer_prepare")
            return [Move(f"committed := {new.committed}", REBUILT, tuple(p for p in lost if p != i), new)]
        return [Move("all blocks are rebuilt", REBUILT, lost, self._alive(me), "alive")]

    def do_verified(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("all blocks are rebuilt", REBUILT, life.plan.lost, self._alive(me), "alive")]

    def do_newcomer_commit(self, me: Rank, i: int, life: Life) -> list[Move]:
        t = life.plan.transaction
        return [Move(f"committed := {t}", 0, None, me._replace(committed=t, pc="newcomer_prepare"))]

    def do_newcomer_prepare(self, me: Rank, i: int, life: Life) -> list[Move]:
        t, pc = life.plan.transaction, "alive" if self.rules.live_last else "live_early"
        return [Move(f"prepared := {t}", 0, None, me._replace(prepared=t, pc=pc))]

    def do_live_early(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("state := LIVE", 0, None, me._replace(state=int(State.LIVE), pc="rebuild"))]

    def _alive(self, me: Rank) -> Rank:
        return me._replace(state=int(State.LIVE), whole=True, sent=LIVE, pc="mark")

    def do_alive(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = DECIDED if life.plan.kind == "process" else 0
        text = "state := LIVE" if me.state != State.LIVE else "everybody stands on T"
        return [Move(text, need, None, self._alive(me), "alive")]

    def do_mark(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = LIVE if self.rules.all_live_before_training else 0
        new = me if self.rules.opened_before_changes else self._opened(me, life)
        return [Move("sets the started mark", need, None, self._next(new._replace(sent=READY)), "mark")]

    # --- a step ---

    def _next(self, me: Rank) -> Rank:
        """To the next step, or to the end."""
        if me.committed < self.steps:
            return me._replace(pc="arm", t=me.committed + 1, old=TORN)
        return me._replace(pc="finish" if self.close else "done", sent=CLOSING, t=0, said=(), old=TORN)

    def do_arm(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = READY if self.rules.all_live_before_training else 0
        if self.rules.count_before_label:
            new, text = me._replace(rows_count=0, pc="arm_end"), "journal count := 0"
        else:
            new, text = me._replace(rows_label=me.t, pc="arm_end"), f"journal label := {me.t}"
        return [Move(text, need, None, new._replace(said=()), "arm")]

    def do_arm_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        first = (
            ("capture" if self.rules.entry_before_count else "count") if self.rules.capture_first else "train"
        )
        if self.rules.count_before_label:
            new, text = me._replace(rows_label=me.t), f"journal label := {me.t}"
        else:
            new, text = me._replace(rows_count=0), "journal count := 0"
        return [Move(text, 0, None, new._replace(pc=first, old=me.rows))]

    def do_capture(self, me: Rank, i: int, life: Life) -> list[Move]:
        new, text = me._replace(rows_entry=me.old), "saves the old rows"
        if self.rules.entry_before_count:
            return [Move(text, 0, None, new._replace(pc="count"))]
        return self._captured(new, text)

    def do_count(self, me: Rank, i: int, life: Life) -> list[Move]:
        new, text = me._replace(rows_count=1), "journal count := 1"
        if not self.rules.entry_before_count:
            return [Move(text, 0, None, new._replace(pc="capture"))]
        return self._captured(new, text)

    def _captured(self, new: Rank, text: str) -> list[Move]:
        if self.rules.capture_first:
            return [Move(text, 0, None, new._replace(pc="train"))]
        return self._sent(new, text)

    def do_train(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(rows=me.rows ^ 1 << 2 * (me.t - 1))
        text = f"changes rows in step {me.t}"
        if not self.rules.capture_first:
            first = "capture" if self.rules.entry_before_count else "count"
            return [Move(text, 0, None, new._replace(pc=first))]
        return self._sent(new, text)

    def _sent(self, me: Rank, text: str) -> list[Move]:
        """The body is over: replicated state goes to its slot, heads and deltas to the others."""
        t = me.t
        new = self._slot(me)._replace(sent=heads(t, 1), pc="heads", said=((0, me.rows ^ me.old),))
        found = [Move(text + ", sends deltas", 0, None, new)]
        if self.aborts:
            new = me._replace(sent=heads(t, 1), pc="heads", said=((2, 0),))
            found.append(Move(text + ", and votes to abort", 0, None, new, "abort"))
        return found

    def _slot(self, me: Rank) -> Rank:
        at = me.t % 2 if self.rules.slots_alternate else 0
        slots = tuple((me.t, me.rows) if j == at else slot for j, slot in enumerate(me.slots))
        return me._replace(slots=(slots[0], slots[1]))

    def do_heads(self, me: Rank, i: int, life: Life) -> list[Move]:
        return self._exchange(me, i, 1)

    def do_second_heads(self, me: Rank, i: int, life: Life) -> list[Move]:
        return self._exchange(me, i, 2)

    def _exchange(self, me: Rank, i: int, attempt: int) -> list[Move]:
        t = me.t
        size = self.placement.world_size
        everyone = self.rules.heads_from_all
        who = None if everyone else self.neighbours[i]
        if attempt == 2 and not self.rules.attempt_in_heads:
            who = tuple(p for p in self.sources[i] if p != i)  # heads it has already; deltas it waits for

        def new(ranks: Sequence[Rank]) -> Rank | None:
            others = [p for p in (range(size) if who is None else who) if p != i]
            told = {p: _said(ranks[p], t, attempt) for p in {*others, *self.sources[i]}}
            told[i] = me.said[attempt - 1]
            said = {p: one for p, one in told.items() if one is not None}
            if len(said) < len(told):
                return None
            if attempt == 1 and any(flag == 2 for flag, _ in said.values()):
                if self.rules.abort_stops_prepare:
                    pc = "abort_undo" if self.rules.undo_before_second else "second"
                    return me._replace(pc=pc)
                inbox = tuple(said[p][1] for p in self.sources[i])
                return me._replace(inbox=inbox, inbox_label=t, pc="prepare_aborted")
            inbox = tuple(said[p][1] for p in self.sources[i])
            if self.rules.inbox_before_prepared:
                return me._replace(inbox=inbox, inbox_label=t, pc="prepare")
            return me._replace(pc="prepare")

        return [Move("has everybody's heads, and its inbox", heads(t, attempt), who, new)]

    def do_prepare(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(prepared=me.t)
        if self.rules.inbox_before_prepared:
            return [Move(f"prepared := {me.t}, votes", 0, None, new._replace(pc="agree", sent=vote(me.t)))]
        return [Move(f"prepared := {me.t}", 0, None, new._replace(pc="late_inbox"))]

    def do_late_inbox(self, me: Rank, i: int, life: Life) -> list[Move]:
        attempt = len(me.said)

        def new(ranks: Sequence[Rank]) -> Rank | None:
            said = [_said(ranks[p], me.t, attempt) for p in self.sources[i]]
            inbox = tuple(one[1] for one in said if one is not None)
            if len(inbox) < len(said):
                return None
            return me._replace(inbox=inbox, inbox_label=me.t, pc="agree", sent=vote(me.t))

        return [Move("fills its inbox, votes", 0, None, new)]

    def do_prepare_aborted(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(prepared=me.t, pc="agree_aborted", sent=vote(me.t))
        return [Move(f"prepared := {me.t}, votes", 0, None, new)]

    def do_agree_aborted(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(prepared=me.t - 1, pc="abort_undo")
        return [Move(f"is outvoted, prepared := {me.t - 1}", vote(me.t), None, new)]

    def do_agree(self, me: Rank, i: int, life: Life) -> list[Move]:
        need, who = vote(me.t), None
        if not self.rules.agreement:
            need = 0
        elif not self.rules.agreement_of_all:
            who = tuple(p for p in self.neighbours[i] if p != i)
        if len(me.said) == 2 and me.rows != me.rows_entry ^ me.said[1][1]:  # only with a rule switched off
            new = me._replace(rows=me.rows_entry ^ me.said[1][1])
            return [Move("undoes its rows of the first attempt", need, who, new)]
        new = self._apply(me, me.t, 0) if self.rules.committed_after_apply else me._replace(pc="commit")
        return [Move("knows that all have prepared", need, who, new)]

    # --- the parity, of a step and of a redo ---

    def _apply(self, me: Rank, t: int, at: int) -> Rank:
        if me.sent < DECIDED:  # a redo
            if me.inbox_label != t:
                raise Broken(f"no inbox: transaction {t} is prepared, and the inbox is of {me.inbox_label}")
            me = me._replace(t=at)
            if me.parity_label == t:
                return me._replace(pc="restore" if self.rules.redo_restores_first else "first_delta")
        return me._replace(pc="save" if self.rules.parity_saved_first else "first_delta")

    def _transaction(self, me: Rank, life: Life) -> int:
        return life.plan.transaction if me.sent < DECIDED else me.t

    def do_save(self, me: Rank, i: int, life: Life) -> list[Move]:
        t = self._transaction(me, life)
        new = me._replace(parity_saved=me.parity, parity_label=t)
        text = f"parity journal is saved, label := {t}"
        if self.rules.parity_saved_first:
            return [Move(text, 0, None, new._replace(pc="first_delta"))]
        return [Move(text, 0, None, self._applied(new, life))]

    def do_restore(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(parity=me.parity_saved, pc="first_delta")
        return [Move("restores the old parity", 0, None, new)]

    def do_first_delta(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(parity=_add(me.parity, me.inbox, 0, 1), pc="last_deltas")
        return [Move("adds a delta to its parity", 0, None, new)]

    def do_last_deltas(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(parity=_add(me.parity, me.inbox, 1, len(me.inbox)))
        text = "adds the last delta to its parity"
        if not self.rules.parity_saved_first:
            return [Move(text, 0, None, new._replace(pc="save"))]
        return [Move(text, 0, None, self._applied(new, life))]

    def _applied(self, me: Rank, life: Life) -> Rank:
        if me.sent < DECIDED or self.rules.committed_after_apply:
            return me._replace(pc="commit")
        return self._next(me)

    def do_commit(self, me: Rank, i: int, life: Life) -> list[Move]:
        t = self._transaction(me, life)
        new = me._replace(committed=t)
        if me.sent < DECIDED:
            return [Move(f"committed := {t}", 0, None, self._decide(new, life, me.t + 1), "commit")]
        if self.rules.committed_after_apply:
            return [Move(f"committed := {t}", 0, None, self._next(new), "commit")]
        return [Move(f"committed := {t}", 0, None, self._apply(new, t, 0), "early")]

    # --- abort, and failures ---

    def do_abort_undo(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(rows=TORN, pc="abort_undo_end")
        return [Move("undoes half of its rows, for an abort", 0, None, new)]

    def do_abort_undo_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        before = me.slots[(me.t - 1) % 2 if self.rules.slots_alternate else 0]
        if before is None or before[0] != me.t - 1:
            raise Broken(f"dense state: the slot of transaction {me.t - 1} holds {before}")
        new = me._replace(rows=me.rows_entry, pc="second_arm")
        return [Move("undoes its rows", 0, None, new)]

    def do_second_arm(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("journal count := 0", 0, None, me._replace(rows_count=0, pc="second_capture"))]

    def do_second_capture(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("saves the old rank state", 0, None, me._replace(rows_entry=me.rows, pc="second_count"))]

    def do_second_count(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("journal count := 1", 0, None, me._replace(rows_count=1, pc="second"))]

    def do_second(self, me: Rank, i: int, life: Life) -> list[Move]:
        delta = 2 << 2 * (me.t - 1)
        new = me._replace(rows=me.rows ^ delta, said=(*me.said, (0, delta)), sent=heads(me.t, 2))
        if self.rules.undo_before_second:
            new = self._slot(new)._replace(pc="second_heads")
        else:
            undone = self._slot(new._replace(rows=me.rows_entry ^ delta))
            new = undone._replace(rows=new.rows, pc="second_heads")
        return [Move(f"rank state of the aborted step {me.t}, sends deltas", 0, None, new)]

    def _failures(self, me: Rank) -> list[Move]:
        """An exception in the body, or a peer's death noticed: the step is undone here, the process ends.

        Where there is nothing to undo, this is the same as not to move again.
        """
        if me.pc in ("failed", "failed_end") or not (me.rows_count and me.rows_label == me.t > me.committed):
            return []
        if me.sent < READY:
            return []
        if me.prepared >= me.t:
            if self.rules.no_undo_after_prepared or me.pc != "agree":
                return []
            me = me._replace(prepared=me.t - 1)
            return [Move(f"fails, prepared := {me.prepared}", 0, None, me._replace(pc="failed"), "fail")]
        return [Move("fails", 0, None, me._replace(pc="failed"), "fail")]

    def do_failed(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("undoes half of its rows", 0, None, me._replace(rows=TORN, pc="failed_end"))]

    def do_failed_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("undoes its rows, ends", 0, None, me._replace(rows=me.rows_entry, pc="ended"))]

    # --- the end ---

    def do_finish(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = CLOSING if self.rules.barrier_before_finished else 0
        new = me._replace(pc="finished_mark")
        if self.rules.tombstone:
            return [Move("state := FINISHED", need, None, new._replace(state=int(State.FINISHED)), "finish")]
        return [Move("everybody is done", need, None, new, "finish")]

    def do_finished_mark(self, me: Rank, i: int, life: Life) -> list[Move]:
        text = "sets the finished mark" if self.rules.finished_mark else "sets no mark"
        return [Move(text, 0, None, me._replace(sent=CLOSED, pc="remove"), "finished")]

    def do_remove(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = CLOSED if self.rules.all_finished_before_removal else 0
        return [Move("removes its arena", need, None, Rank(pc="done", sent=CLOSED, whole=True))]


def _said(rank: Rank, t: int, attempt: int) -> tuple[int, int] | None:
    """(flag, delta) of a rank's heads. One that went on without waiting had sent them long ago."""
    if rank.sent > vote(t):
        return 0, attempt << 2 * (t - 1)
    return rank.said[attempt - 1] if len(rank.said) >= attempt else None


def _add(parity: tuple[int, ...], deltas: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
    return tuple(
        old if old == TORN or not start <= j < stop else old ^ delta
        for j, (old, delta) in enumerate(zip(parity, deltas, strict=True))
    )
