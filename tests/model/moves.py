"""Starts with another number of ranks: two layouts, and a crash between any two stores of a move.

The third part of the model. A job has one rank on each host, and every start may have another number of
ranks: with the number that the arenas have it recovers, and with another one it moves. A step has its rows,
its parity and its two words. Processes end at any transition, hosts lose their memory, are cut off and come
back, and the store may be new. Judgement, plan and relayout are ecemb's own.

A start has the numbers g and g + 1: the old arenas join g, and new ones begin a history of g + 1. Numbers are
only compared: between two starts they are made small again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ecemb.coding.placement import Placement
from ecemb.coding.rows import Column, TableLayout
from ecemb.errors import EcembError
from ecemb.memory.classify import classify
from ecemb.memory.header import NONE, Constants, Header, State
from ecemb.recovery.plan import RecoveryPlan, plan_recovery
from ecemb.recovery.relayout import Layout, Relayout, RowRange, Shard, plan_relayout

from .rank import Broken
from .rules import ALL, Rules
from .transition import Next

JOINED, OPENED, DECIDED, FILLED, LIVE, READY = range(1, 7)
"""What a rank has said last in this life."""

TORN = -7
"""Bytes that are of no transaction."""

FIRST, SAVED = 1, 1
"""The number of the start before the search begins, and the transaction that it stands on."""

_BUDGETS = ("crashes", "losses", "cuts", "relaunches")
_ROWS = 12  # of the model's table: some for each block of each rank


@dataclasses.dataclass(frozen=True)
class Moves:
    """What is searched: a job, and how much may happen to it.

    Attributes:
        size: ranks at first.
        codes: (ranks, n, k) for each number of ranks that a start may have; n is 0 for one rank.
        steps: the last step that is trained.
        crashes: how often the job's processes die, any of them at any moment each time.
        losses: hosts whose memory goes, in all.
        cuts: hosts that are cut off, in all; each comes back at any later start, or never.
        relaunches: how often the job is launched again, with a new store.
    """

    size: int = 3
    codes: tuple[tuple[int, int, int], ...] = ((2, 2, 1), (3, 3, 2))
    steps: int = 2
    crashes: int = 2
    losses: int = 0
    cuts: int = 0
    relaunches: int = 0

    def __str__(self) -> str:
        sizes = ", ".join(f"N={size} n={n} k={k}" if n else f"N={size}" for size, n, k in self.codes)
        counts = [f"{getattr(self, name)} {name}" for name in _BUDGETS if getattr(self, name)]
        words = [f"from N={self.size}", f"{self.steps} steps", *counts]
        return f"moves between {sizes}: {', '.join(words)}"


class Arena(NamedTuple):
    """An arena: its header, and the transactions that its rows and its parity are of."""

    rank: int
    size: int
    state: int
    fill: int
    joined: int = NONE
    opened: int = NONE
    committed: int = NONE
    prepared: int = NONE
    rows: int = TORN
    parity: int = TORN


class Process(NamedTuple):
    """A process: the arena that it goes on with, or moves from; the one that it moves to."""

    own: Arena | None
    new: Arena | None
    pc: str
    said: int = 0
    step: int = 0


class Life(NamedTuple):
    """One start: its numbers, its plan in short, and the rank of each host; -1 for a host without one."""

    moves: bool
    number: int
    fill: int
    size: int
    transaction: int
    lost: tuple[int, ...]
    ranks: tuple[int, ...]
    sources: frozenset[int]


class World(NamedTuple):
    """All hosts, the store, the budgets, and what the checks remember."""

    hosts: tuple[tuple[Arena, ...], ...]
    away: tuple[bool, ...]
    processes: tuple[Process | None, ...]
    life: Life | None = None
    crashes: int = 0
    losses: int = 0
    cuts: int = 0
    relaunches: int = 0
    started: int = FIRST  # the store's mark
    top: int = SAVED  # the last transaction that anybody returned from
    trained: int = FIRST  # the number with which a step was begun last
    needed: tuple[bool, ...] = ()  # hosts whose memory may count, since all were ready last
    gone: int = 0  # of these, how many have lost it


class MovesModel:
    """The starts of a configuration, under some rules.

    Args:
        config: the job, and what may happen to it.
        rules: those that are on.
    """

    def __init__(self, config: Moves, rules: Rules = ALL) -> None:
        self.config = config
        self.rules = rules
        self.codes = {size: (n, k) for size, n, k in config.codes}
        self.placements = {size: Placement.ranks(n, k, size) if n else None for size, n, k in config.codes}
        self.least_r = min(n - k for _, n, k in config.codes)
        self.count = max(self.codes) + 1
        self._decisions: dict[object, RecoveryPlan | str] = {}
        self._sources: dict[object, frozenset[int]] = {}

    def initial(self) -> World:
        """All ranks stand on one transaction, and no rank runs."""
        c = self.config
        arena = Arena(0, c.size, State.LIVE, FIRST, FIRST, FIRST, SAVED, SAVED, SAVED, SAVED)
        first = [(arena._replace(rank=rank),) for rank in range(c.size)]
        spare = self.count - c.size
        return World(
            hosts=(*first, *[()] * spare),
            away=(False,) * self.count,
            processes=(None,) * self.count,
            needed=(*[True] * c.size, *[False] * spare),
            **{name: getattr(c, name) for name in _BUDGETS},
        )

    def successors(self, world: World) -> list[Next]:
        """All that may happen next."""
        return list(self._running(world) if world.life is not None else self._down(world))

    # --- between two lives ---

    def _down(self, world: World) -> Iterator[Next]:
        for i, arenas in enumerate(world.hosts):
            if arenas and world.losses:
                gone = world.gone + world.needed[i]
                needed = _put(world.needed, i, False)
                lost = world._replace(losses=world.losses - 1, gone=gone, needed=needed)
                lost = lost._replace(hosts=_put(world.hosts, i, ()), away=_put(world.away, i, False))
                yield Next(f"the memory of host {i} is lost", lost)
            if arenas and world.cuts and not world.away[i]:
                cut = world._replace(away=_put(world.away, i, True), cuts=world.cuts - 1)
                yield Next(f"host {i} is cut off", cut)
            if world.away[i]:
                yield Next(f"host {i} is back", world._replace(away=_put(world.away, i, False)))
        if world.relaunches:
            again = world._replace(relaunches=world.relaunches - 1, started=0)
            yield Next("the job is launched again, with a new store", again)
        for size in self.codes:
            yield from self._start(world, size)

    def _start(self, world: World, size: int) -> Iterator[Next]:
        here = [i for i, arenas in enumerate(world.hosts) if arenas and not world.away[i]]
        empty = [i for i, arenas in enumerate(world.hosts) if not arenas]
        if len(here) > size or len(here) + len(empty) < size:
            return
        members = [*here, *empty[: size - len(here)]]
        found = tuple(sorted(arena for i in here for arena in world.hosts[i]))
        outcome = self._decided(found, world.started)
        text = f"a start of {size}: {_described(outcome)}"
        if reason := self._judged(world, found, outcome):
            yield Next(text, world, reason)
            return
        if isinstance(outcome, str) or self._forgotten(world, found, outcome):
            return
        yield self._begin(world, size, members, found, outcome, text)

    def _begin(
        self,
        world: World,
        size: int,
        members: list[int],
        found: tuple[Arena, ...],
        plan: RecoveryPlan,
        text: str,
    ) -> Next:
        """A start that goes on in memory: who has which arena and rank."""
        survivors = set(
            classify([self._header(i, arena) for i, arena in enumerate(found)], self._mark(world)).survivors
        )
        chosen = {arena for i, arena in enumerate(found) if self._header(i, arena) in survivors}
        donor = next(iter(chosen))
        number = 1 + max(self._numbers(world))
        moves = donor.size != size
        ranks = self._ranks(world, members, chosen, donor.size, moves=moves)
        hosts, processes = list(world.hosts), list(world.processes)
        for i in members:
            own = next((arena for arena in world.hosts[i] if arena in chosen), None)
            hosts[i] = tuple(arena for arena in world.hosts[i] if arena is not own)
            pc = "join" if own else "await" if moves else "create"
            if moves and not self.rules.leftovers_after_open:
                pc = "clean"
            processes[i] = Process(own, None, pc)
        fill = donor.fill if not moves else number + 1 if self.rules.new_fill_is_higher else number
        sources = self._relayout(plan, donor.size, size) if moves else frozenset(plan.survivors)
        life = Life(moves, number, fill, size, plan.transaction, plan.lost, tuple(ranks), sources)
        after = world._replace(hosts=tuple(hosts), processes=tuple(processes), life=life)
        return Next(f"{text}; generation {number}", after)

    def _ranks(
        self, world: World, members: list[int], chosen: set[Arena], size: int, *, moves: bool
    ) -> list[int]:
        """Rank of each host: ranks follow their memory; in a move, in the order of old ranks."""
        old = {i: arena.rank for i in members for arena in world.hosts[i] if arena in chosen}
        ranks = [-1] * self.count
        if moves:
            for rank, i in enumerate(sorted(members, key=lambda i: (old.get(i, size), i))):
                ranks[i] = rank
            return ranks
        free = iter(sorted(set(range(size)) - set(old.values())))
        for i in members:
            ranks[i] = old[i] if i in old else next(free)
        return ranks

    def _numbers(self, world: World) -> Iterator[int]:
        yield from (world.started, world.trained)
        for arena in (arena for arenas in world.hosts for arena in arenas):
            yield from (arena.joined, arena.opened, arena.fill)

    def _mark(self, world: World) -> int:
        return world.started or NONE

    def _decided(self, found: tuple[Arena, ...], started: int) -> RecoveryPlan | str:
        key = (found, started)
        if key not in self._decisions:
            self._decisions[key] = self._decide(found, started)
        return self._decisions[key]

    def _decide(self, found: tuple[Arena, ...], started: int) -> RecoveryPlan | str:
        headers = [self._header(i, arena) for i, arena in enumerate(found)]
        try:
            judged = classify(headers, started or NONE)
            survivors = judged.survivors
            live = {a.fill for a in found if a.state == State.LIVE and a.joined >= judged.opened}
            if len(live) > 1 and not self.rules.joined_is_not_opened:
                return "InconsistentArenas"
            size = survivors[0].constants.world_size if survivors else self.config.size
            placement = self.placements[size]
            plan = plan_recovery(headers, placement, started=bool(started), opened=started or NONE)
        except EcembError as error:
            return type(error).__name__
        return "fresh" if plan.kind == "fresh" else plan

    def _relayout(self, plan: RecoveryPlan, old: int, new: int) -> frozenset[int]:
        """The old ranks that the new ones read from, by ecemb's plan."""
        key = (plan.digest(), old, new)
        if key not in self._sources:
            self._sources[key] = frozenset(
                rank for move in self._plan(plan, old, new).moves for _, rank in move.sources
            )
        return self._sources[key]

    def _plan(self, plan: RecoveryPlan, old: int, new: int) -> Relayout:
        table = TableLayout("rows", _ROWS, (Column("weight", "float32", 8),))
        shards = tuple((Shard("rows", table, rank * _ROWS),) for rank in range(old))
        holders = [0 if rank in plan.survivors else None for rank in range(old)]
        wanted = [[RowRange("rows", range(old * _ROWS))]] * new
        layout = Layout(self.placements[old], max(1, self.codes[old][1]), shards)
        return plan_relayout(plan, holders, layout, ["host"] * new, wanted, [0] * new)

    def _header(self, index: int, arena: Arena) -> Header:
        n, k = self.codes[arena.size]
        constants = Constants(
            job="job",
            arena_id=f"{index:08x}",
            rank=arena.rank,
            world_size=arena.size,
            n=n or 2,
            k=k or 1,
            positions=tuple(range(arena.size)),
            domains=tuple(f"host{p}" for p in range(arena.size)),
            layout_hash="",
            layout="",
            block_words=((1,) * (k or 1),) * arena.size,
            regions=(),
            fill=arena.fill,
        )
        words = {name: getattr(arena, name) for name in ("joined", "opened", "committed", "prepared")}
        return Header(constants, State(arena.state), generation_id=arena.joined, **words)

    # --- what must never happen ---

    def _judged(self, world: World, found: tuple[Arena, ...], outcome: RecoveryPlan | str) -> str:
        absent = sum(n and away for n, away in zip(world.needed, world.away, strict=True))
        enough = world.gone + absent <= self.least_r
        if outcome == "fresh":
            return "restart from 0: the job had trained" if enough or world.started else ""
        if isinstance(outcome, str):
            return f"false refusal: {outcome}, and no more is lost than parity survives" if enough else ""
        if outcome.transaction < world.top and not self._forgotten(world, found, outcome):
            return f"lost step: step {world.top} was committed, and all go back to {outcome.transaction}"
        return ""

    def _forgotten(self, world: World, found: Iterable[Arena], outcome: RecoveryPlan) -> bool:
        """Whether nothing that is seen shows that the job went on, as the store is new."""
        relaunched = world.relaunches < self.config.relaunches
        return relaunched and all(arena.joined < world.trained for arena in found)

    # --- a life ---

    def _running(self, world: World) -> Iterator[Next]:
        assert world.life is not None
        moved = False
        for i, me in enumerate(world.processes):
            if me is None or me.pc == "done":
                continue
            act: Callable[[World, Life, int, Process], Next | None] = getattr(self, f"_do_{me.pc}")
            try:
                after = act(world, world.life, i, me)
            except Broken as error:
                after = Next("moves", world, str(error))
            if after is not None:
                yield after._replace(text=f"host {i} {after.text}")
                moved = True
                if not world.crashes:
                    return  # what different ranks do commutes: one order is searched
        if not moved and any(me.pc != "done" for me in world.processes if me):
            yield Next("nobody can move", world, f"deadlock: {[me.pc for me in world.processes if me]}")
        if world.crashes:
            yield Next("all processes end", self._ended(world))

    def _ended(self, world: World) -> World:
        hosts = [
            tuple(sorted((*arenas, *(one for one in (me.own, me.new) if one)))) if me else arenas
            for arenas, me in zip(world.hosts, world.processes, strict=True)
        ]
        after = world._replace(hosts=tuple(hosts), processes=(None,) * self.count, life=None)
        return _renumbered(after._replace(crashes=world.crashes - 1))

    def _all_said(self, world: World, what: int) -> bool:
        return all(me.said >= what for me in world.processes if me)

    def _now(self, world: World, i: int, me: Process, text: str, **changed: object) -> Next:
        after = me._replace(**changed)  # pyright: ignore[reportArgumentType]
        return Next(text, world._replace(processes=_put(world.processes, i, after)))

    # a recovery, with as many ranks

    def _do_create(self, world: World, life: Life, i: int, me: Process) -> Next:
        own = Arena(life.ranks[i], life.size, State.REBUILDING, life.fill)
        rest = tuple(arena for arena in world.hosts[i] if arena.state != State.REBUILDING)
        world = world._replace(hosts=_put(world.hosts, i, rest))
        return self._now(world, i, me, "creates an arena, REBUILDING", own=own, pc="join")

    def _do_rebuild(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not all(one.said >= DECIDED for one in world.processes if one and one.pc != "rebuild"):
            return None
        t = self._decoded(world, life)
        own = _own(me)._replace(committed=t, prepared=t, rows=t, parity=t)
        return self._now(world, i, me, "is rebuilt", own=own, pc="live", said=DECIDED)

    # a move

    def _do_await(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        """A host without an old arena."""
        if not self._all_opened(world):
            return None
        return self._now(world, i, me, "has no old arena", pc="clean", said=DECIDED)

    def _all_opened(self, world: World) -> bool:
        return all(me.said >= OPENED for me in world.processes if me and me.own)

    def _do_clean(self, world: World, life: Life, i: int, me: Process) -> Next:
        """Removes what an earlier move left here. Old arenas of this move are members of its generation."""
        spent = (State.INIT, State.REBUILDING)
        rest = tuple(arena for arena in world.hosts[i] if arena.state not in spent)
        world = world._replace(hosts=_put(world.hosts, i, rest))
        early = not self.rules.leftovers_after_open and me.said < OPENED
        pc = ("join" if me.own else "await") if early else "make"
        return self._now(world, i, me, "removes what an earlier move left", pc=pc)

    def _do_make(self, world: World, life: Life, i: int, me: Process) -> Next:
        new = Arena(life.ranks[i], life.size, State.INIT, life.fill)
        return self._now(world, i, me, "creates an arena, INIT", new=new, pc="enter")

    def _do_enter(self, world: World, life: Life, i: int, me: Process) -> Next:
        new = _new(me)._replace(joined=life.fill, opened=life.fill)
        return self._now(world, i, me, f"joined, opened := {life.fill}", new=new, pc="copy")

    def _do_copy(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if self.rules.decided_before_copy and not self._all_said(world, DECIDED):
            return None
        t = self._decoded(world, life)
        new = _new(me)._replace(rows=t, parity=t, prepared=life.transaction)
        said = FILLED if me.said >= DECIDED else me.said
        pc = "filled" if self.rules.old_until_all_live else "drop"
        return self._now(world, i, me, "has copied, prepared := T", new=new, pc=pc, said=said)

    def _do_drop(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        """Where `old_until_all_live` is off: when all have copied."""
        if not self._all_said(world, FILLED):
            return None
        return self._now(world, i, me, "removes its old arena", own=None, pc="filled")

    def _decoded(self, world: World, life: Life) -> int:
        """What copies or decodes of the sources are of: T, or garbage."""
        ranks = [one.own for one in world.processes if one and one.own and one.own.rank in life.sources]
        parts = {arena.rows for arena in ranks}
        if life.lost:
            parts |= {arena.parity for arena in ranks}
        fine = parts == {life.transaction} and {arena.rank for arena in ranks} == life.sources
        return life.transaction if fine else TORN

    def _do_filled(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if self.rules.all_moved_before_live and not self._all_said(world, FILLED):
            return None
        new = _new(me)._replace(committed=life.transaction)
        return self._now(world, i, me, "committed := T", new=new, pc="new_live")

    def _do_new_live(self, world: World, life: Life, i: int, me: Process) -> Next:
        needed = tuple(
            one or process is not None for one, process in zip(world.needed, world.processes, strict=True)
        )
        world = world._replace(needed=needed)
        new = _new(me)._replace(state=State.LIVE)
        return self._now(world, i, me, "state := LIVE", new=new, pc="mark", said=LIVE)

    # both

    def _do_join(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if life.moves and not self.rules.old_join_the_move:
            return self._now(world, i, me, "does not join", pc="lower", said=OPENED)
        if any(one.pc == "create" for one in world.processes if one):
            return None
        if _own(me).state == State.INIT and self.rules.live_before_join:
            return self._now(world, i, me, "state := LIVE", own=_own(me)._replace(state=State.LIVE))
        own = _own(me)._replace(joined=life.number)
        return self._now(world, i, me, f"joined := {life.number}", own=own, pc="open", said=JOINED)

    def _do_open(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if any(one.said < JOINED for one in world.processes if one and one.own):
            return None
        world = world._replace(started=life.number)
        world = _without_absent(world)
        own = _own(me)._replace(opened=life.number)
        pc = "rebuild" if own.rank in life.lost else "lower"
        return self._now(world, i, me, f"opened := {life.number}", own=own, pc=pc, said=OPENED)

    def _do_lower(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        own = _own(me)._replace(prepared=life.transaction)
        return self._now(world, i, me, "prepared := T", own=own, pc="undo")

    def _do_undo(self, world: World, life: Life, i: int, me: Process) -> Next:
        t = life.transaction
        own = _own(me)
        if own.committed > t or not t <= own.prepared or own.rows not in (t, t + 1):
            raise Broken("false refusal: what is to be undone or redone is not there")
        own = own._replace(committed=t, rows=t, parity=t)
        pc = "clean" if life.moves else "live"
        return self._now(world, i, me, "undoes and redoes", own=own, pc=pc, said=DECIDED)

    def _do_live(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, DECIDED):
            return None
        own = _own(me)._replace(state=State.LIVE)
        return self._now(world, i, me, "state := LIVE", own=own, pc="mark", said=LIVE)

    def _do_mark(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, LIVE):
            return None
        world = world._replace(started=max(world.started, _number(life)))
        return self._now(world, i, me, "sets the started mark", pc="discard")

    def _do_discard(self, world: World, life: Life, i: int, me: Process) -> Next:
        world = world._replace(hosts=_put(world.hosts, i, ()))
        own = me.new or _own(me)
        return self._ready(self._now(world, i, me, "removes all others", own=own, new=None), i)

    def _ready(self, after: Next, i: int) -> Next:
        """The rank begins to train. When all have come so far, nothing but their own memory is needed."""
        world, life = after.state, after.state.life
        me = world.processes[i]
        assert me is not None
        assert life is not None
        me = me._replace(pc="step", said=READY, step=life.transaction + 1)
        own = _own(me)
        if {own.rows, own.parity, own.committed} != {life.transaction}:
            raise Broken(f"rows: rank {own.rank} trains on with {own}")
        world = world._replace(processes=_put(world.processes, i, me))
        if self._all_said(world, READY):
            needed = tuple(process is not None for process in world.processes)
            world = world._replace(needed=needed, gone=0)
        return Next(after.text, self._onward(world, i))

    def _onward(self, world: World, i: int) -> World:
        me = world.processes[i]
        assert me is not None
        pc = "done" if me.step > self.config.steps else "step"
        return world._replace(processes=_put(world.processes, i, me._replace(pc=pc)))

    # a step

    def _do_step(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        said = READY + 3 * (me.step - life.transaction)
        if not self._all_said(world, said - 3 if me.step > life.transaction + 1 else READY):
            return None
        own = _own(me)._replace(rows=me.step)
        world = world._replace(trained=_number(life))
        return self._now(world, i, me, f"changes rows in step {me.step}", own=own, pc="prepare", said=said)

    def _do_prepare(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, me.said):
            return None
        own = _own(me)._replace(prepared=me.step)
        said = me.said + 1
        return self._now(world, i, me, f"prepared := {me.step}", own=own, pc="commit", said=said)

    def _do_commit(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, me.said):
            return None
        own = _own(me)._replace(parity=me.step, committed=me.step)
        text, step = f"committed := {me.step}", me.step + 1
        after = self._now(world, i, me, text, own=own, pc="step", said=me.said + 1, step=step)
        world = after.state._replace(top=max(world.top, me.step))
        return Next(after.text, self._onward(world, i))


def _without_absent(world: World) -> World:
    """The memory of hosts that are not in this start counts no more, as it goes on without them."""
    absent = sum(n and one is None for n, one in zip(world.needed, world.processes, strict=True))
    needed = tuple(n and one is not None for n, one in zip(world.needed, world.processes, strict=True))
    return world._replace(needed=needed, gone=world.gone + absent)


def _number(life: Life) -> int:
    """The number that training goes on with."""
    return life.fill if life.moves else life.number


def _own(me: Process) -> Arena:
    assert me.own is not None
    return me.own


def _new(me: Process) -> Arena:
    assert me.new is not None
    return me.new


def _put(values: tuple, i: int, new: object) -> tuple:  # pyright: ignore[reportMissingTypeArgument,reportUnknownParameterType]
    return (*values[:i], new, *values[i + 1 :])  # pyright: ignore[reportUnknownVariableType]


def _renumbered(world: World) -> World:
    """The world between two lives; numbers of starts, which are only compared, as small as can be.

    Neighbours stay neighbours, and others not: a start takes two.
    """
    numbers = {world.started, world.trained}
    for arena in (arena for arenas in world.hosts for arena in arenas):
        numbers.update((arena.joined, arena.opened, arena.fill))
    small = {NONE: NONE, 0: 0}
    last = 0
    for number in sorted(numbers - {NONE, 0}):
        last = small[number] = last + 1

    def renumbered(arena: Arena) -> Arena:
        return arena._replace(**{name: small[getattr(arena, name)] for name in ("joined", "opened", "fill")})

    return world._replace(
        hosts=tuple(tuple(sorted(map(renumbered, arenas))) for arenas in world.hosts),
        started=small[world.started],
        trained=small[world.trained],
    )


def _described(outcome: RecoveryPlan | str) -> str:
    if isinstance(outcome, str):
        return outcome
    return f"T = {outcome.transaction}, ranks {list(outcome.lost)} are lost"
