"""The stores of a step: of its body, of its slot, of its parity up to the commit; and the end of the job."""

from __future__ import annotations

import abc
from typing import Any

from ecemb.memory.header import NONE, State

from .rank import CLOSED, CLOSING, DECIDED, READY, TORN, Broken, Life, Move, Rank, change
from .start import Start


class Step(Start):
    """What every rank stores, step by step."""

    def _next(self, me: Rank) -> Rank:
        """To the next step, or to the end."""
        if me.committed < self.config.steps:
            return me._replace(pc="arm", t=me.committed + 1, old=TORN)
        return self._finishes(me)

    def _finishes(self, me: Rank) -> Rank:
        pc = "finish" if self.config.close else "done"
        return me._replace(pc=pc, sent=CLOSING, t=0, said=(), old=TORN)

    # --- a window's steps ---

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
        if not self.rules.two_row_journals:
            return 0
        free = [at for at, journal in enumerate(me.journals) if journal.label <= me.committed]
        if not free:
            raise Broken(f"no journal: both are of undecided transactions, {me.journals}")
        return free[0]

    def do_arm_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        pc = self._saves if self.rules.capture_first else "train"
        if self.rules.count_before_label:
            new, text = me.journalled(me.armed, label=me.t), f"journal label := {me.t}"
        else:
            new, text = me.journalled(me.armed, count=0), "journal count := 0"
        return [Move(text, 0, None, new._replace(pc=pc, old=me.rows))]

    @property
    def _saves(self) -> str:
        """What comes first when old rows are saved."""
        return "capture" if self.rules.entry_before_count else "count"

    def do_capture(self, me: Rank, i: int, life: Life) -> list[Move]:
        new, text = me.journalled(me.armed, entry=me.old, first=me.t), "saves the old rows"
        if self.rules.entry_before_count:
            return [Move(text, 0, None, new._replace(pc="count"))]
        return [Move(text, 0, None, self._captured(new))]

    def do_count(self, me: Rank, i: int, life: Life) -> list[Move]:
        new, text = me.journalled(me.armed, count=1, first=me.t), "journal count := 1"
        if not self.rules.entry_before_count:
            return [Move(text, 0, None, new._replace(pc="capture"))]
        return [Move(text, 0, None, self._captured(new))]

    def _captured(self, me: Rank) -> Rank:
        return me._replace(pc="train") if self.rules.capture_first else self._trained(me)

    def do_train(self, me: Rank, i: int, life: Life) -> list[Move]:
        bits = change(me.t, 1)
        dense = me.dense if me.dense == TORN else me.dense ^ bits
        new = me._replace(rows=me.rows ^ bits, dense=dense, began=(me.rows, me.dense))
        new = self._trained(new) if self.rules.capture_first else new._replace(pc=self._saves)
        return [Move(f"changes rows in step {me.t}", 0, None, new)]

    def _trained(self, me: Rank) -> Rank:
        """The body is over."""
        if not self._is_whole(me):
            return me._replace(pc="extend")
        return (me if self.rules.settled_before_slots else self._slot(me))._replace(pc="settle")

    def _is_whole(self, me: Rank) -> bool:
        """Whether the window ends with this step."""
        if me.alone in (me.t, me.t + 1) and me.journals[me.armed].first <= me.alone:
            return True
        steps = me.t - me.journals[me.armed].first + 1
        return steps >= me.window or me.t == self.config.steps or me.t in self.config.saves

    def do_again(self, me: Rank, i: int, life: Life) -> list[Move]:
        count = me.t - me.journals[me.armed].first + 1
        new = me.journalled(me.armed, count=count)._replace(pc="train")
        return [Move(f"saves more old rows, journal count := {count}", 0, None, new)]

    # --- slots ---

    def _slot(self, me: Rank) -> Rank:
        return self._slotted(me, (me.t, me.dense))

    def _slotted(self, me: Rank, slot: Any) -> Rank:
        if not self.rules.slots_by_label:
            at = me.t % 2
        elif not self.rules.slots_by_arena:
            at = me.number % 2
        else:
            first = me.slots[0]
            at = int(first is not None and first[0] == me.committed)
        return me._replace(slots=(slot, me.slots[1]) if at == 0 else (me.slots[0], slot))

    # --- the parity, of a step and of a redo ---

    def _agreed(self, me: Rank) -> Rank:
        """All are known to have prepared."""
        return self._apply(me, me.t, 0) if self.rules.committed_after_apply else me._replace(pc="commit")

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
        return self._committed(me)

    def do_commit(self, me: Rank, i: int, life: Life) -> list[Move]:
        t = self._transaction(me, life)
        new = me._replace(committed=t)
        if me.sent < DECIDED:
            return [Move(f"committed := {t}", 0, None, self._decide(new, life, me.t + 1), "commit")]
        if self.rules.committed_after_apply:
            return [Move(f"committed := {t}", 0, None, self._committed(new), "commit")]
        return [Move(f"committed := {t}", 0, None, self._apply(new, t, 0), "early")]

    @abc.abstractmethod
    def _committed(self, me: Rank) -> Rank:
        """After the last store of a transaction."""

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
