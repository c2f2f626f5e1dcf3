"""How a rank's process begins: it joins, goes to T or is rebuilt, and waits for the others."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

from ecemb.coding.placement import Placement
from ecemb.memory.header import NONE, State

from .rank import (
    CREATED,
    DECIDED,
    FILLED,
    JOINED,
    LIVE,
    READY,
    REBUILT,
    TORN,
    Life,
    Move,
    Rank,
)
from .rules import Config, Rules


@dataclasses.dataclass(frozen=True)
class Start(abc.ABC):
    """What every rank does until it trains.

    Attributes:
        placement: who keeps whose parity.
        config: what is searched.
        rules: the rules of the protocol that are on.
        sources: of each rank, the ranks whose parity it keeps.
    """

    placement: Placement
    config: Config
    rules: Rules
    sources: Sequence[tuple[int, ...]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        size, k = self.placement.world_size, self.placement.k
        keepers = [sorted({q for b in range(k) for q in self.placement.keepers(p, b)}) for p in range(size)]
        sources = [tuple(p for p in range(size) if i in keepers[p]) for i in range(size)]
        object.__setattr__(self, "sources", sources)

    @abc.abstractmethod
    def _next(self, me: Rank) -> Rank:
        """To the next step, or to the end."""

    @abc.abstractmethod
    def _apply(self, me: Rank, t: int, at: int) -> Rank:
        """To what brings parity to transaction t; in a start that is number `at` of `_decide`."""

    # --- a start ---

    def do_create(self, me: Rank, i: int, life: Life) -> list[Move]:
        state = State.INIT if life.plan.kind == "fresh" else State.REBUILDING
        names = {"name": life.number, "since": life.number, "fill": life.fill}
        new = Rank(state=int(state), **names, pc="join", sent=CREATED)
        return [Move(f"creates an arena, {state.name}", 0, None, new)]

    def do_join(self, me: Rank, i: int, life: Life) -> list[Move]:
        if me.state == State.INIT and me.prepared >= 0 and self.rules.live_before_join:
            return [Move("state := LIVE", 0, None, me._replace(state=int(State.LIVE)))]
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
        undos = ("undo", "undo")
        order = ("lower", *undos, "redo") if rules.prepared_lowered_first else (*undos, "redo", "lower")
        for index in range(at, len(order)):
            what = order[index]
            if what == "lower" and me.prepared > t:
                return me._replace(pc=what, t=index)
            if what == "undo":
                me = me._replace(armed=self._newest(me) if order.index(what) == index else 1 - me.armed)
                label, count = me.journals[me.armed][:2]
                if (label > t or not rules.committed_voids_journals) and (count or self._voids(label)):
                    return me._replace(pc=what if count else "void", t=index)
            if what == "redo" and me.committed < t:
                return self._apply(me, t, index) if t else me._replace(pc="commit", t=index)
        return me._replace(sent=DECIDED, pc="verify" if life.plan.lost else "alive", t=0, armed=0)

    def _newest(self, me: Rank) -> int:
        """The row journal that is undone first."""
        labels = [journal.label for journal in me.journals]
        return labels.index(max(labels) if self.rules.newest_undone_first else min(labels))

    def _voids(self, label: int) -> bool:
        """Whether a row journal is void once it is undone: its label may come again, in the other one."""
        return self.rules.undone_is_void and label != NONE

    def do_lower(self, me: Rank, i: int, life: Life) -> list[Move]:
        t = life.plan.transaction
        return [Move(f"prepared := {t}", 0, None, self._decide(me._replace(prepared=t), life, me.t + 1))]

    def do_undo(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = me._replace(rows=me.journals[me.armed].over(me.rows, half=True), pc="undo_end")
        return [Move("undoes half of its rows", 0, None, new)]

    def do_undo_end(self, me: Rank, i: int, life: Life) -> list[Move]:
        label = me.journals[me.armed].label
        new = me._replace(rows=me.journals[me.armed].over(me.rows))
        new = new._replace(pc="void") if self._voids(label) else self._decide(new, life, me.t + 1)
        return [Move("undoes its rows", 0, None, new)]

    def do_void(self, me: Rank, i: int, life: Life) -> list[Move]:
        new = self._decide(me.journalled(me.armed, label=NONE), life, me.t + 1)
        return [Move("that journal is void", 0, None, new)]

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
        """All ranks stand on T, and what was lost is rebuilt."""
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
