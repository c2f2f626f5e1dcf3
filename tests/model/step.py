"""A step, from its first store to the commit; abort, exceptions, and the end of the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ecemb.arena.header import NONE, State

from .rank import (
    CLOSED,
    CLOSING,
    DECIDED,
    READY,
    TORN,
    Broken,
    Life,
    Move,
    Rank,
    change,
    heads,
    undone,
    vote,
)
from .start import Start


class Program(Start):
    """What every rank does, step by step."""

    sends: ClassVar[str] = "sends deltas"
    exchanged: ClassVar[str] = "has everybody's heads, and its inbox"

    # --- a step ---

    def _next(self, me: Rank) -> Rank:
        """To the next step, or to the end."""
        if me.committed < self.steps:
            return me._replace(pc="arm", t=me.committed + 1, old=TORN)
        return me._replace(pc="finish" if self.close else "done", sent=CLOSING, t=0, said=(), old=TORN)

    def do_arm(self, me: Rank, i: int, life: Life) -> list[Move]:
        need = READY if self.rules.all_live_before_training else 0
        at = self._free(me)
        if self.rules.count_before_label:
            new, text = me.journalled(at, count=0), "journal count := 0"
        else:
            new, text = me.journalled(at, label=me.t), f"journal label := {me.t}"
        return [Move(text, need, None, new._replace(pc="arm_end", said=(), armed=at), "arm")]

    def _free(self, me: Rank) -> int:
        """The row journal that the next transaction may use."""
        return 0

    def do_arm_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        first = (
            ("capture" if self.rules.entry_before_count else "count") if self.rules.capture_first else "train"
        )
        if self.rules.count_before_label:
            new, text = me.journalled(me.armed, label=me.t), f"journal label := {me.t}"
        else:
            new, text = me.journalled(me.armed, count=0), "journal count := 0"
        return [Move(text, 0, None, new._replace(pc=first, old=me.rows))]

    def do_capture(self, me: Rank, i: int, life: Life) -> list[Move]:
        new, text = me.journalled(me.armed, entry=me.old), "saves the old rows"
        if self.rules.entry_before_count:
            return [Move(text, 0, None, new._replace(pc="count"))]
        return self._captured(new, text)

    def do_count(self, me: Rank, i: int, life: Life) -> list[Move]:
        new, text = me.journalled(me.armed, count=1), "journal count := 1"
        if not self.rules.entry_before_count:
            return [Move(text, 0, None, new._replace(pc="capture"))]
        return self._captured(new, text)

    def _captured(self, new: Rank, text: str) -> list[Move]:
        if self.rules.capture_first:
            return [Move(text, 0, None, new._replace(pc="train"))]
        return self._sent(new, text)

    def do_train(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(rows=me.rows ^ change(me.t, 1))
        text = f"changes rows in step {me.t}"
        if not self.rules.capture_first:
            first = "capture" if self.rules.entry_before_count else "count"
            return [Move(text, 0, None, new._replace(pc=first))]
        return self._sent(new, text)

    def _sent(self, me: Rank, text: str) -> list[Move]:
        """The body is over."""
        return self._ends(me, self._slot(me), text)

    def _ends(self, me: Rank, saved: Rank, text: str) -> list[Move]:
        """Heads go to the others, and deltas of a rank that doesn't abort; `saved` is this one then."""
        t = me.t
        new = saved._replace(sent=heads(t, 1), pc="heads", said=((0, me.rows ^ me.old),))
        found = [Move(f"{text}, {self.sends}", 0, None, new)]
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
            told = {p: ranks[p].told(t, attempt) for p in {*others, *self.sources[i]}}
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
            return self._heard(me, tuple(said[p][1] for p in self.sources[i]))

        return [Move(self.exchanged, heads(t, attempt), who, new)]

    def _heard(self, me: Rank, inbox: tuple[int, ...]) -> Rank:
        """No rank aborts the transaction."""
        if self.rules.inbox_before_prepared:
            return me._replace(inbox=inbox, inbox_label=me.t, pc="prepare")
        return me._replace(pc="prepare")

    def do_prepare(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(prepared=me.t)
        if self.rules.inbox_before_prepared:
            return [Move(f"prepared := {me.t}, votes", 0, None, new._replace(pc="agree", sent=vote(me.t)))]
        return [Move(f"prepared := {me.t}", 0, None, new._replace(pc="late_inbox"))]

    def do_late_inbox(self, me: Rank, i: int, life: Life) -> list[Move]:
        attempt = len(me.said)

        def new(ranks: Sequence[Rank]) -> Rank | None:
            said = [ranks[p].told(me.t, attempt) for p in self.sources[i]]
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

    def _entry(self, me: Rank) -> int:
        return me.journals[me.armed].entry

    def do_agree(self, me: Rank, i: int, life: Life) -> list[Move]:
        need, who = vote(me.t), None
        if not self.rules.agreement:
            need = 0
        elif not self.rules.agreement_of_all:
            who = tuple(p for p in self.neighbours[i] if p != i)
        if len(me.said) == 2 and not self.rules.undo_before_second:
            aborted = self._entry(me) ^ me.said[1][1]
            if me.rows != aborted:
                return [Move("undoes its rows of the first attempt", need, who, me._replace(rows=aborted))]
        new = self._apply(me, me.t, 0) if self.rules.committed_after_apply else me._replace(pc="commit")
        return [Move("knows that all have prepared", need, who, new)]

    # --- the parity, of a step and of a redo ---

    def _apply(self, me: Rank, t: int, at: int) -> Rank:
        if me.sent < DECIDED:  # a redo
            if me.inbox_label != t:
                raise Broken(f"no inbox: transaction {t} is prepared, and the inbox is of {me.inbox_label}")
            me = me._replace(t=at)
            if me.parity_label == t:
                return self._resumed(me)
        return me._replace(pc="void_row" if self.rules.row_void_before_label else "parity_label")

    def _transaction(self, me: Rank, life: Life) -> int:
        return life.plan.transaction if me.sent < DECIDED else me.t

    def do_void_row(self, me: Rank, i: int, life: Life) -> list[Move]:
        pc = "parity_label" if self.rules.row_void_before_label else self._stages[0]
        return [Move("parity journal's row := none", 0, None, me._replace(parity_row=NONE, pc=pc))]

    def do_parity_label(self, me: Rank, i: int, life: Life) -> list[Move]:
        t = self._transaction(me, life)
        pc = self._stages[0] if self.rules.row_void_before_label else "void_row"
        return [Move(f"parity journal's label := {t}", 0, None, me._replace(parity_label=t, pc=pc))]

    @property
    def _stages(self) -> tuple[str, ...]:
        """What is done with each parity row, one row after another."""
        if not self.rules.parity_saved_first:
            return ("row", "half", "add", "save")
        if not self.rules.row_before_change:
            return ("save", "half", "row", "add")
        return ("save", "row", "half", "add")

    def _at(self, me: Rank, stage: str) -> int:
        """The row that a stage works on: the one that the journal names, or the one after it."""
        return me.parity_row + (self._stages.index(stage) <= self._stages.index("row"))

    def _place(self, row: int) -> int:
        return row % 2 if self.rules.rows_alternate else 0

    def _staged(self, me: Rank, stage: str, text: str, life: Life) -> list[Move]:
        """On to the next stage, the next row, or the end."""
        following = self._stages[self._stages.index(stage) + 1 :]
        if following:
            new = me._replace(pc=following[0])
        elif me.parity_row + 1 < len(me.inbox):
            new = me._replace(pc=self._stages[0])
        else:
            new = self._applied(me, life)
        return [Move(text, 0, None, new)]

    def do_save(self, me: Rank, i: int, life: Life) -> list[Move]:
        row = self._at(me, "save")
        new = me._replace(parity_saved=_with(me.parity_saved, self._place(row), (row, me.parity[row])))
        return self._staged(new, "save", f"saves parity row {row}", life)

    def do_row(self, me: Rank, i: int, life: Life) -> list[Move]:
        row = self._at(me, "row")
        return self._staged(me._replace(parity_row=row), "row", f"parity journal's row := {row}", life)

    def do_half(self, me: Rank, i: int, life: Life) -> list[Move]:
        row = self._at(me, "half")
        new = me._replace(old=me.parity[row], parity=_with(me.parity, row, TORN))
        return self._staged(new, "half", f"adds half of a delta to parity row {row}", life)

    def do_add(self, me: Rank, i: int, life: Life) -> list[Move]:
        row = self._at(me, "add")
        value = TORN if me.old == TORN else me.old ^ me.inbox[row]
        new = me._replace(old=TORN, parity=_with(me.parity, row, value))
        return self._staged(new, "add", f"adds a delta to parity row {row}", life)

    def _resumed(self, me: Rank) -> Rank:
        """A redo of parity that has begun to change."""
        if me.parity_row == NONE:
            return me._replace(pc=self._stages[0])
        return me._replace(pc="restore" if self.rules.redo_restores_first else "half")

    def do_restore(self, me: Rank, i: int, life: Life) -> list[Move]:
        row = me.parity_row
        saved, old = me.parity_saved[self._place(row)]
        old = old if saved == row else TORN
        new = me._replace(old=old, parity=_with(me.parity, row, old), pc="add")
        return [Move(f"restores parity row {row}", 0, None, new)]

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
            return [Move(f"committed := {t}", 0, None, self._committed(new), "commit")]
        return [Move(f"committed := {t}", 0, None, self._apply(new, t, 0), "early")]

    def _committed(self, me: Rank) -> Rank:
        """After the last store of a transaction."""
        return self._next(me)

    # --- abort, and failures ---

    def do_abort_undo(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(rows=undone(me.rows, TORN, me.t), pc="abort_undo_end")
        return [Move("undoes half of its rows, for an abort", 0, None, new)]

    def do_abort_undo_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        before = me.slots[(me.t - 1) % 2 if self.rules.slots_alternate else 0]
        if before is None or before[0] != me.t - 1:
            raise Broken(f"dense state: the slot of transaction {me.t - 1} holds {before}")
        new = me._replace(rows=undone(me.rows, self._entry(me), me.t), pc="second_arm")
        return [Move("undoes its rows", 0, None, new)]

    def do_second_arm(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(me.armed, count=0)
        return [Move("journal count := 0", 0, None, new._replace(pc="second_capture"))]

    def do_second_capture(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(me.armed, entry=me.rows)
        return [Move("saves the old rank state", 0, None, new._replace(pc="second_count"))]

    def do_second_count(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(me.armed, count=1)
        return [Move("journal count := 1", 0, None, new._replace(pc="second"))]

    def do_second(self, me: Rank, i: int, life: Life) -> list[Move]:
        delta = change(me.t, 2)
        new = me._replace(rows=me.rows ^ delta, said=(*me.said, (0, delta)), sent=heads(me.t, 2))
        if self.rules.undo_before_second:
            new = self._slot(new)._replace(pc="second_heads")
        else:
            undone = self._slot(new._replace(rows=self._entry(me) ^ delta))
            new = undone._replace(rows=new.rows, pc="second_heads")
        return [Move(f"rank state of the aborted step {me.t}, sends deltas", 0, None, new)]

    def _failures(self, me: Rank) -> list[Move]:
        """An exception in the body, or a peer's death noticed: the step is undone here, the process ends.

        Where there is nothing to undo, this is the same as not to move again.
        """
        if me.pc in ("failed", "failed_end") or not self._armed(me):
            return []
        if me.sent < READY:
            return []
        if me.prepared >= me.t:
            if self.rules.no_undo_after_prepared or me.pc != "agree":
                return []
            me = me._replace(prepared=me.t - 1)
            return [Move(f"fails, prepared := {me.prepared}", 0, None, me._replace(pc="failed"), "fail")]
        return [Move("fails", 0, None, me._replace(pc="failed"), "fail")]

    def _armed(self, me: Rank) -> bool:
        """Whether rows of the transaction in flight are saved, and not yet committed."""
        label, count = me.journals[me.armed][:2]
        return bool(count) and label == me.t > me.committed

    def do_failed(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [
            Move(
                "undoes half of its rows",
                0,
                None,
                me._replace(rows=undone(me.rows, TORN, me.t), pc="failed_end"),
            )
        ]

    def do_failed_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [
            Move(
                "undoes its rows, ends",
                0,
                None,
                me._replace(rows=undone(me.rows, self._entry(me), me.t), pc="ended"),
            )
        ]

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


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])
