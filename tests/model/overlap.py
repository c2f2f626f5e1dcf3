"""A step whose exchange, agreement and commit run in a thread of their own, beside the next one's body.

What is not here is as without overlap: the thread behind runs the same program from the inbox to the commit,
with a place, a transaction and messages of its own. A crash stops both threads, each wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .rank import CLOSING, TORN, Life, Move, Rank, Thread, change, deltas, heads, undone
from .step import Program


class Overlapped(Program):
    """What every rank does, in two threads."""

    row_journals = 2
    sends = "lays out deltas, sends heads"
    exchanged = "has everybody's heads, hands over"

    def moves(self, me: Rank, i: int, life: Life) -> list[Move]:
        """What either thread of rank i may do next, if it is not kept waiting."""
        found = super().moves(me, i, life)
        if me.behind.pc in ("", "raised"):
            return found
        view = me.swapped()
        own: list[Move] = getattr(self, "do_" + view.pc)(view, i, life)
        if view.prepared < view.t:
            own = [*own, Move("fails", 0, None, view._replace(pc="raised"), "fail")]
        return found + [
            move._replace(text=f"behind: {move.text}", new=_swapped(move.new), behind=True) for move in own
        ]

    # --- the main thread ---

    def _free(self, me: Rank) -> int:
        pending = me.journals[0].label == me.t - 1 > me.committed
        return int(pending and self.rules.two_row_journals)

    def _sent(self, me: Rank, text: str) -> list[Move]:
        """The body is over: what comes next needs the transaction before to be committed here."""
        if not self.rules.settled_before_slots:
            me = self._slot(me)
        if self._waits:
            return [Move(text, 0, None, me._replace(pc="settle"))]
        return self._ends(me, me, text)

    @property
    def _waits(self) -> bool:
        return self.rules.settled_before_heads and self.rules.settled_before_inbox

    def do_settle(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [] if me.behind.pc else self._ends(me, self._slot(me), "has settled")

    def _heard(self, me: Rank, inbox: tuple[int, ...]) -> Rank:
        if not self.rules.settled_before_inbox:
            me = me._replace(inbox=inbox, inbox_label=me.t)
        return self._hand_over(me) if self._waits else me._replace(pc="settle_late")

    def do_settle_late(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = self._hand_over(self._slot(me))
        return [] if me.behind.pc else [Move("has settled, hands over", 0, None, new)]

    def do_abort_undo(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [] if me.behind.pc else super().do_abort_undo(me, i, life)

    def _hand_over(self, me: Rank) -> Rank:
        pc, sent = "receive" if self.rules.settled_before_inbox else "prepare", deltas(me.t)
        if not self.rules.deltas_before_next:
            pc, sent = "gather", heads(me.t, 2)
        return self._onward(me._replace(behind=Thread(pc, me.t, sent, me.said, me.old)))

    def _onward(self, me: Rank) -> Rank:
        if me.t < self.steps:
            return me._replace(pc="arm", t=me.t + 1, said=(), old=TORN)
        if self.rules.settled_before_close:
            return me._replace(pc="drain", t=0, said=(), old=TORN)
        return me._replace(pc="finish" if self.close else "done", sent=CLOSING, t=0, said=(), old=TORN)

    def do_drain(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [] if me.behind.pc else [Move("has settled", 0, None, self._next(me))]

    # --- the thread behind ---

    def do_gather(self, me: Rank, i: int, life: Life) -> list[Move]:
        delta = me.rows ^ undone(me.rows, me.old, me.t)
        new = me._replace(said=(*me.said[:-1], (0, delta)), sent=deltas(me.t), pc="receive")
        return [Move("lays out deltas, sends them", 0, None, new)]

    def do_receive(self, me: Rank, i: int, life: Life) -> list[Move]:
        def new(ranks: Sequence[Rank]) -> Rank:
            inbox = tuple(ranks[p].behind.said[-1][1] for p in self.sources[i])
            return me._replace(inbox=inbox, inbox_label=me.t, pc="prepare")

        who = tuple(p for p in self.sources[i] if p != i)
        return [Move("has its inbox", deltas(me.t), who, new)]

    def _committed(self, me: Rank) -> Rank:
        return me._replace(pc="", t=0, said=(), old=TORN)

    # --- failures ---

    def _failures(self, me: Rank) -> list[Move]:
        """An exception in the body, or one that was raised behind, as soon as the main thread sees it."""
        if me.pc.startswith("failed") or not (self._armed(me) or me.behind.pc == "raised"):
            return []
        return [Move("fails", 0, None, me._replace(pc="failed"), "fail")]

    def do_failed(self, me: Rank, i: int, life: Life) -> list[Move]:
        if me.behind.pc not in ("", "raised") and self.rules.settled_before_undo:
            return []
        return super().do_failed(me, i, life) if self._armed(me) else self.do_failed_before(me, i, life)

    def do_failed_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(rows=undone(me.rows, self._entry(me), me.t), pc="failed_before")
        return [Move("undoes its rows", 0, None, new)]

    def do_failed_before(self, me: Rank, i: int, life: Life) -> list[Move]:
        saved = me.behind.t in [journal.label for journal in me.journals]
        if not saved or me.prepared >= me.behind.t:
            return [Move("ends", 0, None, me._replace(pc="ended"))]
        new = me._replace(rows=undone(me.rows, TORN, me.behind.t), pc="failed_before_end")
        return [Move(f"undoes half of its rows of step {me.behind.t}", 0, None, new)]

    def do_failed_before_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        label, _, entry, _ = next(journal for journal in me.journals if journal.label == me.behind.t)
        new = me._replace(rows=undone(me.rows, entry, label), pc="ended")
        return [Move(f"undoes its rows of step {label}, ends", 0, None, new)]


class Apart(Overlapped):
    """Rows change apart from the arena. The thread behind journals and changes them there, after the heads.

    No rank votes to abort: such steps bring their rows before their heads.
    """

    def do_arm_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        moves = super().do_arm_end(me, i, life)
        return [
            move._replace(new=move.new._replace(pc="train")) for move in moves if isinstance(move.new, Rank)
        ]

    def do_train(self, me: Rank, i: int, life: Life) -> list[Move]:
        return self._sent(me, f"changes rows elsewhere in step {me.t}")

    def _slot(self, me: Rank) -> Rank:
        """Dense state goes to its slot before rows come to the arena."""
        return super()._slot(me._replace(rows=me.rows ^ change(me.t, 1)))._replace(rows=me.rows)

    def _hand_over(self, me: Rank) -> Rank:
        first = "capture" if self.rules.capture_first else "bring"
        return self._onward(me._replace(behind=Thread(first, me.t, heads(me.t, 2), me.said, TORN)))

    def do_capture(self, me: Rank, i: int, life: Life) -> list[Move]:
        old = me.rows if self.rules.capture_first else me.old
        new = me.journalled(self._own(me), entry=old)._replace(old=old, pc="count")
        return [Move("saves the old rows", 0, None, new)]

    def do_count(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(self._own(me), count=1)
        after = "bring" if self.rules.capture_first else "gather"
        return [Move("journal count := 1", 0, None, new._replace(pc=after))]

    def do_bring(self, me: Rank, i: int, life: Life) -> list[Move]:
        after = "gather" if self.rules.capture_first else "capture"
        new = me._replace(rows=me.rows ^ change(me.t, 1), old=me.rows, pc=after)
        return [Move(f"brings rows of step {me.t}", 0, None, new)]

    def _own(self, me: Rank) -> int:
        """The journal of the thread's transaction; the next one has armed the other."""
        return next((at for at, journal in enumerate(me.journals) if journal.label == me.t), 0)

    def do_failed(self, me: Rank, i: int, life: Life) -> list[Move]:
        """Rows of the body's own step are not in the arena."""
        if me.behind.pc not in ("", "raised") and self.rules.settled_before_undo:
            return []
        return self.do_failed_before(me, i, life)

    def do_failed_before(self, me: Rank, i: int, life: Life) -> list[Move]:
        if not any(journal.label == me.behind.t and journal.count for journal in me.journals):
            return [Move("ends", 0, None, me._replace(pc="ended"))]
        return super().do_failed_before(me, i, life)


def _swapped(
    new: Rank | Callable[[Sequence[Rank]], Rank | None],
) -> Rank | Callable[[Sequence[Rank]], Rank | None]:
    if isinstance(new, Rank):
        return new.swapped()

    def later(ranks: Sequence[Rank]) -> Rank | None:
        after = new(ranks)
        return None if after is None else after.swapped()

    return later
