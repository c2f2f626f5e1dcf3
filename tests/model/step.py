"""A step, from its first store to the commit; abort, exceptions, and the end of the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ecemb.arena.header import State

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


def _add(parity: tuple[int, ...], deltas: tuple[int, ...], start: int, stop: int) -> tuple[int, ...]:
    return tuple(
        old if old == TORN or not start <= j < stop else old ^ delta
        for j, (old, delta) in enumerate(zip(parity, deltas, strict=True))
    )
