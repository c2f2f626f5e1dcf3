"""Agreement on a step: by dissemination, in one thread or beside the next body; and what a failure says.

A status, and a vote, is a fold over all ranks that goes round in ceil(log2 N) rounds: in round j rank i sends
what it has folded so far to rank i + 2^j, and waits for what rank i - 2^j sends. What a rank says stays said
(`Rank.log`), under what it is (status, deltas, vote), the count of statuses before it in this life, and the
round. A crash between two sends is a receiver that doesn't move again.

A window says nothing before its end. After a vote to abort the ranks gather dense state of the last commit
from all slots, and undo their rows. A transaction of one step then commits empty. One of several steps is
void, and they are trained again, the first aborted one as a transaction of its own.

With overlap, what follows the status runs in a thread of its own beside the next body: the same program, with
a place, a transaction and a wave of its own. A crash stops both threads, each wherever it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ecemb.memory.header import NONE

from .rank import READY, TORN, Broken, Life, Move, Rank, Thread, Wave, change
from .step import Step

FINE, ABORTED, FAILED = range(3)
YES, NO = range(2)
MARK = (TORN,)
"""What stands in the place of deltas' sizes when there will be no deltas."""

LAYS_OUT = "sizes"
"""The place of a thread that lays out deltas next, and sends them."""

STATUS, SLICES, DELTAS, VOTE = "status", "slices", "deltas", "vote"
BODY = (
    "arm",
    "arm_end",
    "capture",
    "count",
    "train",
    "extend",
    "again",
    "settle",
    "slot",
    "slot_end",
    "drains",
)
"""Where a thread is before the first round of the next status."""
ABORTING = ("abort_undo", "abort_undo_end", "empty", "empty_slot", "empty_end")
"""What an aborted step takes after the gather."""
GOING_BACK = ("abort_undo", "abort_undo_end", "back")
"""What aborted steps take after the gather, if there are several."""
AFTER_FINE = ("sizes", "receive", "late_slot", "late_slot_end", "prepare")
RECEIVES = {True: "receives", False: "receives_alone"}
"""Where a rank that has failed after the verdict takes deltas for nothing: beside another thread or not."""
SHUT = 1
"""In the place of a round: who has failed takes no deltas."""


@dataclasses.dataclass(frozen=True)
class Rounds(Step):
    """What every rank does, in one thread or in two.

    Attributes:
        rounds: of a dissemination.
        holders: of each slice of the replicated state.
    """

    rounds: int = dataclasses.field(init=False)
    holders: Sequence[tuple[int, ...]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        size, spacing = self.placement.world_size, self.placement.r + 1
        holders = [self.placement.slice_holders(c) for c in range(size)]
        if not self.rules.slices_with_stripes:
            apart = max(1, size // spacing)
            holders = [tuple((c + apart * q) % size for q in range(spacing)) for c in range(size)]
        object.__setattr__(self, "holders", holders)
        object.__setattr__(self, "rounds", (size - 1).bit_length())

    def moves(self, me: Rank, i: int, life: Life) -> list[Move]:
        """What either thread of rank i may do next, if it is not kept waiting."""
        found: list[Move] = []
        if me.pc not in ("", "done", "ended"):
            found = [*getattr(self, "do_" + me.pc)(me, i, life), *self._failures(me)]
        if me.behind.pc in ("", "raised"):
            return found
        view = me.swapped()
        own: list[Move] = [*getattr(self, "do_" + view.pc)(view, i, life), *self._failures(view)]
        return found + [
            move._replace(text=f"behind: {move.text}", new=_swapped(move.new), behind=True) for move in own
        ]

    # --- what is said, and heard ---

    def _say(self, me: Rank, kind: str, number: int, turns: Sequence[int], value: Any) -> Rank:
        """Sends a value to the out-neighbours of some rounds; deltas, which have none, to all keepers."""
        number = number if self.rules.count_not_label else me.t
        said = {(kind, number, turn): value for turn in turns}
        if self._in_order:
            return me._replace(log=(*me.log, *said.items()))
        return me._replace(log=tuple(sorted({**dict(me.log), **said}.items())))

    def _hear(
        self, me: Rank, ranks: Sequence[Rank], source: int, kind: str, number: int, turn: int = 0
    ) -> tuple[Rank, Any]:
        """What another rank has sent here, and this rank after it has taken it; None: nothing yet."""
        wanted = kind, number if self.rules.count_not_label else me.t, turn
        if not self._in_order or kind not in (STATUS, VOTE):
            return me, next((value for tag, value in ranks[source].log if tag == wanted), None)
        rules = self.rules
        named = (
            rules.kind_in_messages and rules.kind_or_count_in_messages,
            rules.count_in_messages and rules.kind_or_count_in_messages,
            True,
        )

        def shown(tag: tuple[str, int, int]) -> tuple[object, ...]:
            in_order = tag[0] in (STATUS, VOTE)
            return in_order, *(part if yes else None for part, yes in zip(tag, named, strict=True))

        alike = [one for one in ranks[source].log if shown(one[0]) == shown(wanted)]
        key, taken = (source, shown(wanted)), dict(me.read)
        at = taken.get(key, 0)
        if at >= len(alike):
            return me, None
        tag, value = alike[at]
        if tag != wanted:
            raise Broken(f"mistaken: a message {tag} of rank {source} is taken for {wanted}")
        return me._replace(read=tuple(sorted({**taken, key: at + 1}.items(), key=str))), value

    @property
    def _in_order(self) -> bool:
        """Whether messages don't say all of what they are: then they are taken in the order of sending."""
        rules = self.rules
        return not (rules.kind_in_messages and rules.count_in_messages and rules.kind_or_count_in_messages)

    def _fails_everywhere(self, me: Rank) -> Rank:
        """Says FAILED of the next status, to the out-neighbours of all rounds at once."""
        turns = range(self.rounds if self.rules.failed_to_all_rounds else 1)
        return self._say(me, STATUS, me.number, turns, (FAILED, 0, 0, 0, 0))

    def do_extend(self, me: Rank, i: int, life: Life) -> list[Move]:
        """The next step of the window begins; or the journal has no room for it."""
        new = me.journalled(me.armed, label=me.t + 1)._replace(t=me.t + 1, pc="again")
        found = [Move(f"journal label := {me.t + 1}", 0, None, new)]
        if self.config.shortages:
            room = max(1, me.window // 2) if self.rules.halved_window_kept else 0
            short = self._fails_everywhere(me._replace(room=room))._replace(pc="failed")
            found.append(Move(f"has no room for step {me.t + 1}, says FAILED", 0, None, short, "short"))
        return found

    # --- the end of a step that has a status ---

    def do_settle(self, me: Rank, i: int, life: Life) -> list[Move]:
        """Waits until the transaction before is committed here, and raises what went wrong with it."""
        if me.behind.pc == "raised":
            return [Move("sees that the step before failed, says FAILED", 0, None, self._failing(me))]
        if me.behind.pc:
            return [] if self.rules.settled_before_inbox else self._begins_status(me, FINE, "says FINE")
        if self.rules.settled_before_slots and self.rules.slices_before_prepared and self._own_slot:
            found = [Move("has settled", 0, None, me._replace(pc="slot"))]
        else:
            found = self._begins_status(me, FINE, "has settled, says FINE")
        if self.config.aborts:
            for step in range(self._first(me), me.t + 1):
                text = f"has settled, votes to abort step {step}"
                found += self._begins_status(me, ABORTED, text, "abort", step)
        return found

    def _first(self, me: Rank) -> int:
        """The first step of the transaction that ends."""
        return me.t if self.config.window == 1 else me.journals[me.armed].first

    @property
    def _own_slot(self) -> bool:
        return self.rules.slices_before_next_body or not self.config.overlap

    def do_slot(self, me: Rank, i: int, life: Life) -> list[Move]:
        early = not self.rules.slice_label_last
        slot = (me.t, TORN) if early else None
        text = f"slot label := {me.t}" if early else "a slot is void, and half written"
        return [Move(text, 0, None, self._slotted(me, slot)._replace(pc="slot_end"))]

    def do_slot_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = self._slotted(me, (me.t, me.dense))
        return self._begins_status(new, FINE, f"slot label := {me.t}, says FINE")

    def _begins_status(self, me: Rank, flag: int, text: str, event: str = "", aborts: int = 0) -> list[Move]:
        room = self._room(me)
        new = self._first_round(me, flag, room, aborts)
        found = [Move(text, 0, None, new, event)]
        if self.config.choices and not event:
            small = self._first_round(me, flag, 1)
            found.append(Move(f"{text}, can take a window of 1", 0, None, small, "choose"))
        return found

    def _room(self, me: Rank) -> int:
        return min(one for one in (me.room, self.config.window) if one)

    def _first_round(self, me: Rank, flag: int, room: int, aborts: int = 0) -> Rank:
        fold = (flag, room, me.t, me.t, aborts or me.t + 1)
        new = me._replace(pc="status", wave=Wave(me.number, 0, fold))
        if not self.rules.window_in_fold:
            new = new._replace(said=((FINE, room),))
        return self._say(new, STATUS, me.number, (0,), fold)

    def do_status(self, me: Rank, i: int, life: Life) -> list[Move]:
        wave = me.wave
        assert wave is not None
        source = (i - (1 << wave.round)) % self.placement.world_size

        def new(ranks: Sequence[Rank]) -> Rank | None:
            heard, told = self._hear(me, ranks, source, STATUS, wave.number, wave.round)
            if told is None:
                return None
            later = range(wave.round + 1, self.rounds if self.rules.status_of_all else 1)
            if told[0] == FAILED:
                after = heard._replace(pc="failed", wave=None)
                if self.rules.failed_sent_on:
                    after = self._say(after, STATUS, wave.number, later, told)
                return after
            one = wave.fold
            fold = (
                max(one[0], told[0]),
                min(one[1], told[1]),
                min(one[2], told[2]),
                max(one[3], told[3]),
                min(one[4], told[4]) if self.rules.first_abort_in_fold else one[4],
            )
            if not later:
                return self._verdict(heard, fold)
            after = heard._replace(wave=wave._replace(round=wave.round + 1, fold=fold))
            return self._say(after, STATUS, wave.number, later[:1], fold)

        return [Move(f"has round {wave.round} of the status", 0, None, new)]

    def _verdict(self, me: Rank, fold: tuple[int, int, int, int, int]) -> Rank:
        """This rank has the status of all."""
        flag, room, lowest, highest, aborts = fold
        if lowest != highest:
            raise Broken(f"out of step: some ranks end a window with step {lowest}, some with {highest}")
        number = me.number
        kept = me.log
        settled = self.rules.settled_before_inbox and self.rules.count_not_label and not self._in_order
        if settled:  # whoever is at this status has read all before
            kept = tuple(one for one in kept if one[0][1] >= number)
        me = me._replace(number=number + 1, log=kept, wave=None)
        wave = Wave(number, 0, YES)
        me = me._replace(window=room if self.rules.window_in_fold else me.said[0][1])
        if flag == FINE:
            return self._decides(me, wave)
        if self._goes_back(me):
            return me._replace(pc="slices", wave=wave, alone=aborts)
        if self.rules.undo_before_prepared:
            return me._replace(pc="slices", wave=wave)
        delta = me.began[0] ^ change(me.t, 2) ^ me.old
        return me._replace(pc="sizes", said=((ABORTED, delta),), wave=wave)

    def _decides(self, me: Rank, wave: Wave) -> Rank:
        """What follows the status: in this thread, or beside the next body."""
        if not self.config.overlap:
            return me._replace(pc="sizes", said=((0, me.rows ^ me.old),), wave=wave)
        if me.behind.pc:  # as `settled_before_inbox` is off
            me = me._replace(pc="early_inbox", said=((0, me.rows ^ me.old),), wave=wave)
            return self._say(me, DELTAS, wave.number, (0,), me.said)
        behind = Thread(LAYS_OUT, me.t, READY, (), me.old, wave)
        return self._onward(me._replace(behind=behind))

    def do_early_inbox(self, me: Rank, i: int, life: Life) -> list[Move]:
        def new(ranks: Sequence[Rank]) -> Rank | None:
            told = self._deltas(me, ranks, i)
            return None if None in told else self._filled(me, told)._replace(pc="settle_late")

        return [Move("has sizes and deltas", 0, None, new)]

    def do_settle_late(self, me: Rank, i: int, life: Life) -> list[Move]:
        behind = Thread("prepare", me.t, READY, me.said, me.old, me.wave)
        new = self._onward(self._slot(me)._replace(behind=behind, wave=None))
        return [] if me.behind.pc else [Move("has settled, hands over", 0, None, new)]

    def _laid_out(self, me: Rank) -> tuple[int, int]:
        """The deltas of a transaction, beside the body of the next one, which may have changed the rows."""
        rows = me.rows
        for journal in me.journals if self.rules.newer_from_journal else ():
            if journal.label > me.t and journal.count:
                rows = journal.over(rows)
        return 0, rows ^ me.old

    def _onward(self, me: Rank) -> Rank:
        """With overlap: the next body, or the end."""
        return me._replace(pc="drains") if me.t in self.config.saves else self._goes_on(me)

    def _goes_on(self, me: Rank) -> Rank:
        if me.t < self.config.steps:
            return me._replace(pc="arm", t=me.t + 1, said=(), old=TORN)
        if self.rules.settled_before_close:
            return me._replace(pc="drain", t=0, said=(), old=TORN)
        return self._finishes(me)

    def do_drains(self, me: Rank, i: int, life: Life) -> list[Move]:
        """What drains a window waits for its commit."""
        if me.behind.pc == "raised":
            return [Move("sees that the step before failed, says FAILED", 0, None, self._failing(me))]
        return [] if me.behind.pc else [Move("has settled", 0, None, self._goes_on(me))]

    def do_drain(self, me: Rank, i: int, life: Life) -> list[Move]:
        if me.behind.pc == "raised":
            return [Move("sees that the last step failed", 0, None, me._replace(pc="failed"))]
        return [] if me.behind.pc else [Move("has settled", 0, None, self._next(me))]

    # --- an aborted step ---

    def _goes_back(self, me: Rank) -> bool:
        """Whether aborted steps are trained again."""
        return self._first(me) < me.t

    def do_slices(self, me: Rank, i: int, life: Life) -> list[Move]:
        assert me.wave is not None
        slot = self._whole_slot(me, me.committed)
        new = self._say(me, SLICES, me.wave.number, (0,), slot)._replace(pc="gather")
        return [Move(f"sends its slices of step {me.committed}", 0, None, new)]

    def do_gather(self, me: Rank, i: int, life: Life) -> list[Move]:
        wave = me.wave
        assert wave is not None

        def new(ranks: Sequence[Rank]) -> Rank | None:
            told = [self._hear(me, ranks, p, SLICES, wave.number)[1] for p in range(len(ranks))]
            if MARK in told:  # all hear it, so that none waits for this rank
                return self._says_no(me)._replace(pc="failed", wave=None)
            if None in told:
                return None
            gathers = self.rules.abort_gathers or self._holds_all(i)
            dense = told[i] if gathers and len({*told}) == 1 else TORN
            return me._replace(dense=dense, pc="abort_undo")

        return [Move("has all slices", 0, None, new)]

    def do_abort_undo(self, me: Rank, i: int, life: Life) -> list[Move]:
        torn = me.journals[me.armed].over(me.rows, half=True)
        return [Move("undoes half of the step", 0, None, me._replace(rows=torn, pc="abort_undo_end"))]

    def do_abort_undo_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        pc = "back" if self._goes_back(me) else "empty"
        new = me._replace(rows=me.journals[me.armed].over(me.rows), pc=pc)
        return [Move("undoes the step", 0, None, new)]

    def do_back(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me.journalled(me.armed, label=NONE)
        new = new._replace(pc="arm", t=me.committed + 1, said=(), old=TORN, wave=None)
        return [Move(f"journal label := none, begins again with step {new.t}", 0, None, new)]

    def do_empty(self, me: Rank, i: int, life: Life) -> list[Move]:
        bits = change(me.t, 2)
        dense = me.dense if me.dense == TORN else me.dense ^ bits
        new = me._replace(rows=me.rows ^ bits, dense=dense, pc="empty_slot")
        return [Move(f"rank state of the aborted step {me.t}", 0, None, new)]

    def do_empty_slot(self, me: Rank, i: int, life: Life) -> list[Move]:
        return [Move("a slot is void", 0, None, self._slotted(me, None)._replace(pc="empty_end"))]

    def do_empty_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        new, text = self._slot(me), f"slot label := {me.t}"
        assert me.wave is not None
        return [Move(text, 0, None, self._decides(new._replace(wave=None), me.wave))]

    def do_late_undo(self, me: Rank, i: int, life: Life) -> list[Move]:
        """As `undo_before_prepared` is off: after the vote."""
        bits = change(me.t, 2)
        new = me._replace(rows=me.began[0] ^ bits, dense=me.began[1] ^ bits)
        return [Move("undoes the step", 0, None, self._agreed(new))]

    # --- from the verdict to the commit ---

    def do_sizes(self, me: Rank, i: int, life: Life) -> list[Move]:
        assert me.wave is not None
        me = me if me.said else me._replace(said=(self._laid_out(me),))
        new = self._say(me, DELTAS, me.wave.number, (0,), me.said)._replace(pc="receive")
        if me.said[0][0] == ABORTED:
            bits = change(me.t, 2)  # dense state is not in the arena, and is undone
            new = self._slotted(new, (me.t, me.began[1] ^ bits))
        return [Move("sends sizes and deltas", 0, None, new)]

    def do_receive(self, me: Rank, i: int, life: Life) -> list[Move]:
        wave = me.wave
        assert wave is not None

        def new(ranks: Sequence[Rank]) -> Rank | None:
            told = self._deltas(me, ranks, i)
            if any(one == MARK for one in told):
                return self._fails_after_fine(me)
            if any(one is None for one in told) or not self._are_taken(i, wave.number, ranks):
                return None
            after = self._filled(me, told)
            if not self._own_slot:
                return after._replace(pc="late_slot")
            return after._replace(pc="prepare")

        found = [Move("has sizes and deltas", 0, None, new)]
        if not self.rules.inbox_before_prepared:
            found.append(Move("prepares early", 0, None, me._replace(pc="prepare")))
        return found

    def _are_taken(self, i: int, number: int, ranks: Sequence[Rank]) -> bool:
        """Whether all keepers take the deltas of rank i: a connection holds a limited number."""
        keepers = [ranks[k] for k in range(len(ranks)) if i in self.sources[k]]
        said = [{name for name, _ in one.log} for one in keepers]
        return all((DELTAS, number, 0) in one and (DELTAS, number, SHUT) not in one for one in said)

    def _deltas(self, me: Rank, ranks: Sequence[Rank], i: int) -> list[Any]:
        assert me.wave is not None
        return [self._hear(me, ranks, p, DELTAS, me.wave.number)[1] for p in self.sources[i]]

    def _filled(self, me: Rank, told: Sequence[Any]) -> Rank:
        return me._replace(inbox=tuple(one[0][1] for one in told), inbox_label=me.t)

    def do_late_slot(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = self._slotted(me, None)
        return [Move("a slot is void", 0, None, new._replace(pc="late_slot_end"))]

    def do_late_slot_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = self._slotted(me, (me.t, me.dense))
        if me.prepared == me.t:
            return [Move(f"slot label := {me.t}, votes", 0, None, self._votes(new))]
        return [Move(f"slot label := {me.t}", 0, None, new._replace(pc="prepare"))]

    def do_prepare(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(prepared=me.t)
        if not self.rules.slices_before_prepared:
            return [Move(f"prepared := {me.t}", 0, None, new._replace(pc="late_slot"))]
        return [Move(f"prepared := {me.t}, votes", 0, None, self._votes(new))]

    def _votes(self, me: Rank) -> Rank:
        assert me.wave is not None
        me = self._say(me, VOTE, me.wave.number, (0,), YES)
        return me._replace(pc="vote") if self.rules.agreement else self._agreed(me._replace(wave=None))

    def do_vote(self, me: Rank, i: int, life: Life) -> list[Move]:
        wave = me.wave
        assert wave is not None
        source = (i - (1 << wave.round)) % self.placement.world_size

        def new(ranks: Sequence[Rank]) -> Rank | None:
            heard, told = self._hear(me, ranks, source, VOTE, wave.number, wave.round)
            if told is None:
                return None
            later = range(wave.round + 1, self.rounds if self.rules.agreement_of_all else 1)
            if told == NO:
                after = self._say(heard, VOTE, wave.number, later, NO) if self.rules.no_sent_on else heard
                if not self.rules.no_ends_undecided:
                    return self._raises(after)
                return self._ends_process(after)
            if later:
                after = heard._replace(wave=wave._replace(round=wave.round + 1))
                return self._say(after, VOTE, wave.number, later[:1], YES)
            if me.inbox_label != me.t:  # as `inbox_before_prepared` is off
                deltas = self._deltas(me, ranks, i)
                if MARK in deltas:
                    return self._ends_process(heard)
                if None in deltas:
                    return None
                heard = self._filled(heard, deltas)
            heard = heard._replace(wave=None)
            if me.said[0][0] == ABORTED:
                return heard._replace(pc="late_undo")
            return self._agreed(heard)

        return [Move(f"has round {wave.round} of the vote", 0, None, new)]

    def _ends_process(self, me: Rank) -> Rank:
        """Both threads stop; `me` may be either's view."""
        if self.config.overlap:
            return me._replace(pc="", t=0, said=(), old=TORN, wave=None, behind=Thread("ended", 0, READY))
        return me._replace(pc="ended", wave=None)

    def _committed(self, me: Rank) -> Rank:
        if not self.config.overlap:
            return self._next(me._replace(said=()))
        return me._replace(pc="", t=0, said=(), old=TORN, wave=None)

    # --- failures ---

    def _failures(self, me: Rank) -> list[Move]:
        """What an exception does, in either thread, by how far the step has come."""
        if me.sent < READY:
            return []
        if me.pc == "slices":
            return [Move("fails before the gather, says so", 0, None, self._fails_to_gather(me), "fail")]
        if me.pc in GOING_BACK and self._goes_back(me) and self.rules.failed_after_going_back:
            return [Move("fails after the gather, says FAILED", 0, None, self._failing(me), "fail")]
        if me.pc in (*ABORTING, *GOING_BACK):
            me = self._fails_after_fine(me, beside=False)
            return [Move("fails after the status, says NO", 0, None, me, "fail")]
        if me.pc in BODY:
            return [Move("fails, says FAILED", 0, None, self._failing(me), "fail")]
        if me.pc == "status":
            return [Move("fails after its first round", 0, None, self._fails_in_status(me), "fail")]
        if me.pc in AFTER_FINE and me.prepared < me.t:
            return [Move("fails after FINE, says NO", 0, None, self._fails_after_fine(me), "fail")]
        if me.pc == "vote" and not self.rules.no_undo_after_prepared:
            new = self._raises(me._replace(prepared=me.t - 1))
            return [Move(f"fails, prepared := {new.prepared}", 0, None, new, "fail")]
        return []

    def _failing(self, me: Rank) -> Rank:
        """It has sent no round of the status: says FAILED at once, then waits for its other thread."""
        if self.rules.failed_at_once:
            me = self._fails_everywhere(me)
        if not self.rules.owed_rounds_first:
            return me._replace(pc="ended", behind=Thread(sent=READY))
        return me._replace(pc="failed")

    def _fails_in_status(self, me: Rank) -> Rank:
        """Only a peer's death ends a status: a rank that learns of it ends, and then so do the others."""
        wave = me.wave
        assert wave is not None
        if not self.rules.failed_before_first_round:
            rest = range(wave.round + 1, self.rounds)
            said = self._say(me, STATUS, wave.number, rest, (FAILED, 0, 0, 0, 0))
            return said._replace(pc="failed", wave=None)
        if not self.rules.rounds_finished_first:
            return self._fails_after_fine(me, beside=False)
        return me._replace(pc="failed", wave=None, quiet=True)

    def _fails_after_fine(self, me: Rank, *, beside: bool = True) -> Rank:
        assert me.wave is not None
        number = me.wave.number
        if self.rules.mark_for_sizes and not any(name[:2] == (DELTAS, number) for name, _ in me.log):
            me = self._say(me, DELTAS, number, (0,), MARK)
        me = self._says_no(me)
        if self.rules.failed_receives:
            return me._replace(pc=RECEIVES[beside])
        me = self._say(me, DELTAS, number, (SHUT,), MARK)
        return self._raises(me) if beside else me._replace(pc="failed", wave=None)

    def _says_no(self, me: Rank) -> Rank:
        assert me.wave is not None
        turns = range(self.rounds if self.rules.no_to_all_rounds else 1)
        return self._say(me, VOTE, me.wave.number, turns, NO)

    def _fails_to_gather(self, me: Rank) -> Rank:
        """It says so in the place of its slices, to all."""
        assert me.wave is not None
        if self.rules.failure_for_slices:
            me = self._say(me, SLICES, me.wave.number, (0,), MARK)
        return self._says_no(me)._replace(pc="failed", wave=None)

    def do_receives(self, me: Rank, i: int, life: Life, *, beside: bool = True) -> list[Move]:
        """It has failed after the verdict: takes what others send it, until its own is taken."""
        wave = me.wave
        assert wave is not None

        def new(ranks: Sequence[Rank]) -> Rank | None:
            if None in self._deltas(me, ranks, i) or not self._are_taken(i, wave.number, ranks):
                return None
            return self._raises(me) if beside else me._replace(pc="failed", wave=None)

        return [Move("receives deltas for nothing", 0, None, new)]

    def do_receives_alone(self, me: Rank, i: int, life: Life) -> list[Move]:
        return self.do_receives(me, i, life, beside=False)

    def _raises(self, me: Rank) -> Rank:
        """In the thread behind, the main thread finds the error when it next waits for it."""
        return me._replace(pc="raised" if self.config.overlap else "failed", wave=None)

    def do_failed(self, me: Rank, i: int, life: Life) -> list[Move]:
        busy = me.behind.pc not in ("", "raised")
        if busy and self.rules.settled_before_undo:
            return []
        if not self.rules.failed_at_once:
            me = self._fails_everywhere(me)
        left = [
            (one.label, at) for at, one in enumerate(me.journals) if one.count and one.label > me.committed
        ]
        if not left:
            return [] if busy else [Move("ends", 0, None, me._replace(pc="ended", behind=Thread(sent=READY)))]
        label, at = max(left)
        new = me._replace(rows=me.journals[at].over(me.rows, half=True), armed=at, pc="failed_end")
        return [Move(f"undoes half of its rows of step {label}", 0, None, new)]

    def do_failed_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(rows=me.journals[me.armed].over(me.rows))
        new = new.journalled(me.armed, label=-1)._replace(pc="failed")
        return [Move("undoes its rows", 0, None, new)]

    # --- a start ---

    def _rebuilt(self, me: Rank, i: int, life: Life, ranks: Sequence[Rank]) -> Rank:
        new = super()._rebuilt(me, i, life, ranks)
        own = self._slices(life.plan.transaction, life.plan.survivors, ranks)
        kept = self.rules.slices_before_live
        return new._replace(slots=((life.plan.transaction, own), None) if kept else (None, None))

    def do_mark(self, me: Rank, i: int, life: Life) -> list[Move]:
        """All are LIVE: dense state comes into this process, and the window's size."""
        t = life.plan.transaction
        found = super().do_mark(me, i, life)
        first = found[0].new
        assert isinstance(first, Rank)

        def new(ranks: Sequence[Rank]) -> Rank:
            if self.rules.all_fetch_slices or i in life.plan.lost:
                everybody = range(self.placement.world_size)
                dense = self._slices(
                    t, everybody if life.plan.kind == "fresh" else life.plan.survivors, ranks
                )
            else:
                dense = self._whole_slot(me, t) if self._holds_all(i) else TORN
            rooms = [rank.room for rank in ranks if rank.room]
            return first._replace(dense=dense, window=min([self.config.window, *rooms]))

        return [found[0]._replace(new=new)]

    def _holds_all(self, i: int) -> bool:
        return all(i in holders for holders in self.holders)

    def _whole_slot(self, rank: Rank, t: int) -> int:
        found = [slot for slot in rank.slots if slot and slot[0] == t]
        if len(found) != 1:
            raise Broken(f"dense state: one slot must be of transaction {t}, and they are {rank.slots}")
        return found[0][1]

    def _slices(self, t: int, alive: Sequence[int], ranks: Sequence[Rank]) -> int:
        """All slices as of transaction t."""
        values: set[int] = set()
        for c, holders in enumerate(self.holders):
            left = [rank for rank in holders if rank in alive]
            if not left:
                raise Broken(f"dense state: nobody is left who holds slice {c}, only ranks {holders} did")
            values |= {self._whole_slot(ranks[rank], t) for rank in left}
        return values.pop() if len(values) == 1 else TORN


def _swapped(
    new: Rank | Callable[[Sequence[Rank]], Rank | None],
) -> Rank | Callable[[Sequence[Rank]], Rank | None]:
    if isinstance(new, Rank):
        return new.swapped()

    def later(ranks: Sequence[Rank]) -> Rank | None:
        after = new(ranks)
        return None if after is None else after.swapped()

    return later


def is_over(rank: Rank) -> bool:
    """Whether a process that can't move has a right to: it is done, or has ended."""
    return rank.pc in ("done", "ended")
