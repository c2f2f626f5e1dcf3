"""Rows that change apart from the arena, as those of a GPU do: the thread behind brings them there.

It journals them after the status, and before it lays out the deltas. Those of an aborted step never come: in
the arena only rank state changes. The jobs have overlap, and windows of one step.
"""

from __future__ import annotations

from .rank import READY, TORN, Life, Move, Rank, Thread, Wave, change
from .rounds import LAYS_OUT, Rounds

BRINGS = ("capture", "count", "bring")


class Apart(Rounds):
    """What every rank does whose rows are apart from the arena."""

    def do_arm_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(me.armed, label=me.t)._replace(pc="train")
        return [Move(f"journal label := {me.t}", 0, None, new)]

    def do_train(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(dense=me.dense ^ change(me.t, 1), pc="settle")
        return [Move(f"changes rows elsewhere in step {me.t}", 0, None, new)]

    def _decides(self, me: Rank, wave: Wave) -> Rank:
        is_aborted = me.journals[me.armed].count > 0
        pc, old = (LAYS_OUT, me.old) if is_aborted else ("capture", TORN)
        return self._onward(me._replace(behind=Thread(pc, me.t, READY, (), old, wave)))

    def do_abort_undo(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(me.armed, entry=me.rows, first=me.t)
        return [Move("saves the old rank state", 0, None, new._replace(old=me.rows, pc="abort_undo_end"))]

    def do_abort_undo_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("journal count := 1", 0, None, me.journalled(me.armed, count=1)._replace(pc="empty"))]

    def do_capture(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(self._own(me), entry=me.rows, first=me.t)._replace(old=me.rows, pc="count")
        return [Move("saves the old rows", 0, None, new)]

    def do_count(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(self._own(me), count=1)._replace(pc="bring")
        return [Move("journal count := 1", 0, None, new)]

    def do_bring(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(rows=me.rows ^ change(me.t, 1), pc=LAYS_OUT)
        return [Move(f"brings rows of step {me.t}", 0, None, new)]

    def _own(self, me: Rank) -> int:
        """The journal of the thread's transaction; the next one has armed the other."""
        return next(at for at, journal in enumerate(me.journals) if journal.label == me.t)

    def _failures(self, me: Rank) -> list[Move]:
        if me.pc in BRINGS:
            return [Move("fails after FINE, says NO", 0, None, self._fails_after_fine(me), "fail")]
        return super()._failures(me)
