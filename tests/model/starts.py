"""Starts of a job whose hosts leave and return: which headers count, whatever an earlier start left behind.

The second part of the model. The first (`system`) has every store of a step, and few starts. Here a step is
its two words, `prepared` and `committed`, and what happens around starts is whole: resumes from a checkpoint
and closes that are killed anywhere, tombstones of an earlier run of the same name, arenas of another format,
hosts that are cut off and come back in any order, losses, a new store. Judgement and plan are ecemb's own.

A start's number is its generation, higher than all before it (what clocks and stores do to that is the first
part's), and is the generation's id. Numbers are only compared: between two starts they are made small again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ecemb.coding.placement import Placement
from ecemb.errors import EcembError, InconsistentArenas, JobFinished
from ecemb.memory.classify import classify
from ecemb.memory.header import NONE, Constants, Header, State
from ecemb.recovery.plan import RecoveryPlan, plan_recovery

from .rank import Broken
from .rules import ALL, Rules
from .transition import Next

CREATED, JOINED, OPENED, DECIDED, REBUILT, LIVE, MARKED, READY = range(1, 9)
CLOSING, CLOSED = 100, 101
"""What a rank has said last in this life."""

_BUDGETS = ("crashes", "losses", "cuts", "relaunches", "resumes", "formats")

SAVED = 1
"""The transaction of the checkpoint that a resume begins with."""


@dataclasses.dataclass(frozen=True)
class Starts:
    """What is searched: a job, and how much may happen to it.

    Attributes:
        n: blocks in a stripe.
        k: data blocks in a stripe.
        size: ranks.
        steps: the last step that is trained.
        crashes: how often the job's processes die, any of them at any moment each time.
        losses: hosts whose memory goes, in all.
        cuts: hosts that are cut off in all; each comes back at any later start, or never.
        relaunches: how often the job is launched again, with a new store.
        resumes: how many starts may begin from the checkpoint, which is of transaction `SAVED`.
        formats: how many arenas are met by an ecemb of another format.
        tombstones: how many hosts hold a tombstone of an earlier run; each comes into the job at any start.
        close: whether the job is closed after the last step.
        fresh: whether the search begins before the fresh start, or with all ranks LIVE at `SAVED`.
    """

    n: int = 2
    k: int = 1
    size: int = 2
    steps: int = 2
    crashes: int = 2
    losses: int = 0
    cuts: int = 0
    relaunches: int = 0
    resumes: int = 0
    formats: int = 0
    tombstones: int = 0
    close: bool = False
    fresh: bool = False

    def __str__(self) -> str:
        job = f"starts of N={self.size} n={self.n} k={self.k}, {self.steps} steps"
        names = (*_BUDGETS, "tombstones")
        counts = [f"{getattr(self, name)} {name}" for name in names if getattr(self, name)]
        words = [name for name in ("close", "fresh") if getattr(self, name)]
        return ", ".join([job, *counts, *words])


class Arena(NamedTuple):
    """An arena's header; `foreign` if it is met by an ecemb of another format."""

    rank: int
    state: int
    fill: int
    joined: int = NONE
    opened: int = NONE
    committed: int = NONE
    prepared: int = NONE
    foreign: bool = False

    def whole(self) -> bool:
        """Whether it holds all of a transaction."""
        return self.state in (State.LIVE, State.FINISHED) or (self.state == State.INIT and self.prepared >= 0)


class Process(NamedTuple):
    """A rank's process and the arena that it holds; between two lives the arena on its host."""

    arena: Arena | None = None
    pc: str = ""
    said: int = 0
    step: int = 0


class Life(NamedTuple):
    """One start: its plan in short, its number, the fill of its new arenas, and what may make room."""

    begins: bool
    transaction: int
    lost: tuple[int, ...]
    number: int
    fill: int
    hollow: frozenset[Arena]


class World(NamedTuple):
    """All ranks, arenas elsewhere, the store, the budgets, and what the checks remember."""

    ranks: tuple[Process, ...]
    others: tuple[tuple[bool, Arena], ...] = ()  # whether its host is here; its rank's host
    life: Life | None = None
    crashes: int = 0
    losses: int = 0
    cuts: int = 0
    relaunches: int = 0
    resumes: int = 0
    formats: int = 0
    started: int = 0  # the store's mark: a start's number, and whether the job is finished
    finished: bool = False
    top: int = 0  # the last transaction that anybody returned from
    trained: int = 0  # the last start in which a step was begun
    recovered: int = 0  # the last start in which a recovery began to change anything
    closed: bool = False


Decision = tuple[RecoveryPlan | str, frozenset[Arena], frozenset[Arena]]
"""What a start does, or the name of what it raises; survivors; arenas that may make room."""

OLD, FIRST = 1, 2
"""Numbers of the earlier run's last start, and of the start before the search begins."""


class StartsModel:
    """The starts of a configuration, under some rules.

    Args:
        config: the job, and what may happen to it.
        rules: those that are on.
    """

    def __init__(self, config: Starts, rules: Rules = ALL) -> None:
        self.config = config
        self.rules = rules
        self.placement = Placement.ranks(config.n, config.k, config.size)
        self._decisions: dict[object, Decision] = {}

    def initial(self) -> World:
        """No arena yet, or all ranks LIVE; no rank runs."""
        c = self.config
        old = Arena(0, State.FINISHED, OLD, OLD, OLD, c.steps, c.steps)
        world = World(
            ranks=(Process(),) * c.size,
            others=tuple((False, old._replace(rank=rank)) for rank in range(c.tombstones)),
            **{
                name: getattr(c, name)
                for name in ("crashes", "losses", "cuts", "relaunches", "resumes", "formats")
            },
        )
        if c.fresh:
            return world
        live = Arena(0, State.LIVE, FIRST, FIRST, FIRST, SAVED, SAVED)
        ranks = tuple(Process(live._replace(rank=rank)) for rank in range(c.size))
        return world._replace(ranks=ranks, started=FIRST, trained=FIRST, top=SAVED)

    def successors(self, world: World) -> list[Next]:
        """All that may happen next."""
        return list(self._running(world) if world.life is not None else self._down(world))

    # --- between two lives ---

    def _down(self, world: World) -> Iterator[Next]:
        for i, (arena, *_) in enumerate(world.ranks):
            if arena is None:
                continue
            ranks = _put(world.ranks, i, Process())
            rest = tuple(one for one in world.others if not one[0] or one[1].rank != i)
            if world.losses:
                left = world._replace(ranks=ranks, losses=world.losses - 1)
                yield Next(f"the memory of rank {i} is lost", left)
                if rest != world.others:
                    yield Next(f"the host of rank {i} is lost", left._replace(others=rest))
            if world.cuts:
                away = ((False, one) for here, one in world.others if here and one.rank == i)
                others = _sorted((*rest, *away, (False, arena)))
                yield Next(
                    f"the host of rank {i} is cut off",
                    world._replace(ranks=ranks, cuts=world.cuts - 1, others=others),
                )
            if world.formats and not arena.foreign:
                other = _put(world.ranks, i, Process(arena._replace(foreign=True)))
                yield Next(
                    f"the host of rank {i} has an ecemb of another format",
                    world._replace(ranks=other, formats=world.formats - 1),
                )
            if arena.foreign:
                own = _put(world.ranks, i, Process(arena._replace(foreign=False)))
                yield Next(f"the host of rank {i} has its own ecemb again", world._replace(ranks=own))
        for here, arena in world.others:
            if not here:
                left = list(world.others)
                left.remove((False, arena))
                others = _sorted((*left, (True, arena)))
                yield Next(f"a host with {_named(arena)} is there", world._replace(others=others))
        if world.relaunches:
            yield Next(
                "the job is launched again, with a new store",
                world._replace(relaunches=world.relaunches - 1, started=0, finished=False),
            )
        yield from self._start(world, resume=False)
        if world.resumes:
            yield from self._start(world, resume=True)

    def _start(self, world: World, *, resume: bool) -> Iterator[Next]:
        here = [arena for is_here, arena in world.others if is_here]
        found = _sorted_arenas([*(rank.arena for rank in world.ranks if rank.arena), *here])
        outcome, survivors, hollow = self._decided(world, found)
        if resume:
            if outcome not in ("TooManyErasures", "StateLost", "fresh"):
                return  # as without it
            outcome = RecoveryPlan("checkpoint", SAVED)
        text = f"a start{' with resume=' if resume else ''}: {_described(outcome)}"
        reason = self._judged(world, found, outcome, survivors)
        if reason:
            yield Next(text, world, reason)
        if (
            reason
            or (isinstance(outcome, str) and outcome != "fresh")
            or self._forgotten(world, found, outcome, survivors)
        ):
            return
        begins = isinstance(outcome, str) or outcome.begins
        transaction = 0 if isinstance(outcome, str) else outcome.transaction
        lost = () if isinstance(outcome, str) else outcome.lost
        chosen = {} if begins else {arena.rank: arena for arena in survivors}
        arenas = [*(rank.arena for rank in world.ranks if rank.arena), *(arena for _, arena in world.others)]
        known = [
            OLD,
            world.started,
            world.trained,
            world.recovered,
            *(max(a.joined, a.opened, a.fill) for a in arenas),
        ]
        number = 1 + max(known)
        given = max((arena.fill for arena in chosen.values()), default=number)
        fill = given if self.rules.fill_of_donor else number
        others = [one for one in world.others if one not in [(True, arena) for arena in chosen.values()]]
        ranks: list[Process] = []
        for i, rank in enumerate(world.ranks):
            if rank.arena and chosen.get(i) != rank.arena:
                others.append((True, rank.arena))
            ranks.append(Process(chosen[i], "join", CREATED) if i in chosen else Process(None, "room"))
        after = world._replace(
            ranks=tuple(ranks),
            others=_sorted(others),
            life=Life(begins, transaction, lost, number, fill, hollow),
            top=min(world.top, transaction),  # less than before only if nobody could tell, or in a resume
            resumes=world.resumes - resume,
        )
        yield Next(f"{text}; generation {number}", after)

    def _decided(self, world: World, found: tuple[Arena, ...]) -> Decision:
        """What ecemb decides, the arenas that it takes for survivors, and those that may make room."""
        started = world.started if self.rules.started_mark else 0
        finished = world.finished and self.rules.finished_mark
        key = (found, started, finished)
        if key not in self._decisions:
            self._decisions[key] = self._decide(found, found, started, finished)
        return self._decisions[key]

    def _decide(
        self, found: tuple[Arena, ...], told: tuple[Arena | None, ...], started: int, finished: bool
    ) -> Decision:
        if self.rules.other_format_stops and any(arena.foreign for arena in found):
            return "ArenaIncompatible", frozenset(), frozenset()
        told, mark = self._doctored(told, started or NONE)
        headers = [self._header(i, arena) for i, arena in enumerate(told) if arena and not arena.foreign]
        if not self.rules.finished_not_stale and any(a.state == State.FINISHED for a in found):
            return "JobFinished", frozenset(), frozenset()
        try:
            judged = classify(headers, mark)
        except InconsistentArenas as error:
            return type(error).__name__, frozenset(), frozenset()
        survivors = frozenset(found[int(h.constants.arena_id, 16)] for h in judged.survivors)
        hollow = frozenset(found[int(h.constants.arena_id, 16)] for h in judged.hollow)
        if not self.rules.kept_until_superseded:
            hollow = frozenset(a for a in found if a.foreign or a.state in (State.INIT, State.REBUILDING))
        try:
            plan = plan_recovery(
                headers, self.placement, started=bool(started), finished=finished, opened=mark
            )
        except EcembError as error:
            return type(error).__name__, survivors, hollow
        return "fresh" if plan.kind == "fresh" else plan, survivors, hollow

    def _doctored(self, found: tuple[Arena | None, ...], mark: int) -> tuple[tuple[Arena | None, ...], int]:
        """The reports where a rule about their meaning is switched off; None in place of what has no say."""
        rules = self.rules
        arenas = [arena for arena in found if arena]
        born = {arena.fill for arena in arenas if arena.state != State.INIT}
        live = {arena.fill for arena in arenas if arena.state == State.LIVE}

        def told(arena: Arena | None) -> Arena | None:
            if arena is None or arena.state != State.INIT:
                return arena
            if not rules.prepared_is_evidence and arena.fill not in born:
                return None
            if not rules.initial_beside_rebuilding and arena.fill not in live:
                return None
            return arena

        if not rules.unsettled_is_silent:
            mark = max([mark, *(arena.opened for arena in arenas if arena.fill not in born)])
        return tuple(told(arena) for arena in found), mark

    def _header(self, index: int, arena: Arena) -> Header:
        c = self.config
        constants = Constants(
            job="job",
            arena_id=f"{index:08x}",
            rank=arena.rank,
            world_size=c.size,
            n=c.n,
            k=c.k,
            positions=self.placement.positions,
            domains=tuple(f"host{p}" for p in range(c.size)),
            layout_hash="",
            layout="",
            block_words=((1,) * c.k,) * c.size,
            regions=(),
            fill=arena.fill,
        )
        words = {name: getattr(arena, name) for name in ("joined", "opened", "committed", "prepared")}
        return Header(constants, State(arena.state), generation_id=arena.joined, **words)

    # --- what must never happen ---

    def _truth(self, world: World, found: Iterable[Arena]) -> tuple[bool, int, bool]:
        """What is there: whether anything shows that the job began, which start went on, and what is enough.

        Arenas of another format count here: they hold what they held.
        """
        of_job = [arena for arena in found if arena.fill > OLD]
        born = {arena.fill for arena in of_job if arena.state != State.INIT}
        shown = bool(world.started or born or any(a.state == State.INIT and a.prepared > 0 for a in of_job))
        known = max([world.started, *(max(a.opened, self._began(a)) for a in of_job if a.fill in born)])
        whole = [a for a in of_job if a.fill in born and a.whole() and a.joined >= known]
        lost = set(range(self.config.size)) - {a.rank for a in whole}
        one = (
            len({self._began(a) for a in whole}) == 1
        )  # else two histories went on apart, and a refusal is right
        return shown, known, one and self.placement.tolerates(sorted(lost))

    def _began(self, arena: Arena) -> int:
        """In which start the arena's history began; without `fill_of_donor`, search with one history only."""
        return arena.fill if self.rules.fill_of_donor else FIRST

    def _judged(
        self,
        world: World,
        found: tuple[Arena, ...],
        outcome: RecoveryPlan | str,
        survivors: frozenset[Arena],
    ) -> str:
        shown, known, enough = self._truth(world, found)
        if outcome == "ArenaIncompatible":
            return ""
        if outcome == JobFinished.__name__:
            return "false finish: nobody closed the job" if shown and not world.closed else ""
        if world.closed:
            return self._judged_closed(world, found, known, outcome)
        if isinstance(outcome, str) and outcome != "fresh":
            if enough or not shown:
                return f"false refusal: {outcome}, and no more is lost than parity survives"
            return ""
        if isinstance(outcome, str) or outcome.begins:
            if enough:
                return "lost step: memory is thrown away, and no more is lost than parity survives"
            if outcome == "fresh" and shown and world.trained:
                return "restart from 0: the job had trained"
            return ""
        if half := [arena.rank for arena in survivors if not arena.whole()]:
            return f"half-rebuilt: the arenas of ranks {half} are taken for survivors'"
        if stale := [arena.rank for arena in survivors if arena.joined < known]:
            return (
                f"stale: the job went on without the arenas of ranks {stale}, which are taken for survivors'"
            )
        if len({arena.fill for arena in survivors}) > 1:
            return "two histories: rows of one, and parity of the other"
        if outcome.transaction < world.top and max(arena.joined for arena in survivors) >= world.trained:
            return f"lost step: step {world.top} was committed, and all go back to {outcome.transaction}"
        return ""

    def _judged_closed(
        self, world: World, found: tuple[Arena, ...], known: int, outcome: RecoveryPlan | str
    ) -> str:
        if isinstance(outcome, RecoveryPlan) and not outcome.begins:
            if outcome.transaction >= self.config.steps:
                return ""  # it closes again, and nothing is trained
        counts = any(a.state == State.FINISHED and a.fill > OLD and a.joined >= known for a in found)
        if not world.finished and not counts:
            return ""
        if isinstance(outcome, str) and outcome != "fresh":
            return f"false refusal: {outcome} for a job that was closed"
        return "trained after close: the job goes on"

    def _forgotten(
        self, world: World, found: tuple[Arena, ...], outcome: RecoveryPlan | str, survivors: frozenset[Arena]
    ) -> bool:
        """Whether nothing that is seen shows what this start would need to know, and no rank could know."""
        if isinstance(outcome, RecoveryPlan) and not outcome.begins:
            if world.closed and outcome.transaction < self.config.steps:
                return True
            return self._relaunched(world) and any(arena.joined < world.recovered for arena in survivors)
        return world.closed or (
            outcome == "fresh" and bool(world.trained) and not self._truth(world, found)[0]
        )

    def _relaunched(self, world: World) -> bool:
        return world.relaunches < self.config.relaunches

    # --- a life ---

    def _running(self, world: World) -> Iterator[Next]:
        moved = False
        for i, me in enumerate(world.ranks):
            if me.pc in ("", "done"):
                continue
            move: Callable[[World, Life, int, Process], Next | None] = getattr(self, f"_do_{me.pc}")
            assert world.life is not None
            try:
                after = move(world, world.life, i, me)
            except Broken as error:
                after = Next(f"rank {i} moves", world, str(error))
            if after is not None:
                yield after._replace(text=f"rank {i} {after.text}")
                moved = True
                if not world.crashes:
                    return  # moves of different ranks commute: one order of them is searched
        if not moved and any(rank.pc != "done" for rank in world.ranks):
            yield Next("nobody can move", world, f"deadlock: {[rank.pc for rank in world.ranks]}")
        if world.crashes:
            yield Next("all processes end", _renumbered(world._replace(crashes=world.crashes - 1)))

    def _all_said(self, world: World, what: int) -> bool:
        return all(rank.said >= what for rank in world.ranks)

    def _moves(self, world: World, i: int, me: Process, pc: str, text: str, **words: int) -> Next:
        """A store to its arena, and what it says then."""
        said = words.pop("said", me.said)
        step = words.pop("step", me.step)
        arena = me.arena._replace(**words) if me.arena is not None else None
        return Next(text, world._replace(ranks=_put(world.ranks, i, Process(arena, pc, said, step))))

    def _do_room(self, world: World, life: Life, i: int, me: Process) -> Next:
        def spent(arena: Arena) -> bool:
            return arena in life.hollow or (arena.state == State.REBUILDING and not life.begins)

        gone = [one for here, one in world.others if here and one.rank == i and spent(one)]
        everywhere = (*(rank.arena for rank in world.ranks if rank.arena), *(one for _, one in world.others))
        live = {arena.fill for arena in everywhere if arena.state == State.LIVE}
        if used := [one for one in gone if one.whole() and one.fill in live]:
            raise Broken(f"thrown away: {_named(used[0])}, of which another one is LIVE")
        rest = tuple(one for one in world.others if not (one[0] and one[1] in gone))
        ranks = _put(world.ranks, i, Process(None, "create"))
        return Next("removes what is hollow", world._replace(ranks=ranks, others=rest))

    def _do_create(self, world: World, life: Life, i: int, me: Process) -> Next:
        arena = Arena(i, State.INIT if life.begins else State.REBUILDING, life.fill)
        ranks = _put(world.ranks, i, Process(arena, "join", CREATED))
        return Next(f"creates an arena, {State(arena.state).name}", world._replace(ranks=ranks))

    def _do_join(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if self.rules.live_before_join and me.arena and me.arena.state == State.INIT and me.arena.whole():
            return self._moves(world, i, me, "join", "state := LIVE", state=int(State.LIVE))
        if self._all_said(world, CREATED):
            return self._moves(world, i, me, "open", "joined", joined=life.number, said=JOINED)
        return None

    def _do_open(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, JOINED):
            return None
        if not life.begins and self.rules.mark_before_changes:
            world = world._replace(started=life.number)
        if not life.begins:
            world = world._replace(recovered=life.number)
        pc = "prepare" if life.begins else "rebuild" if i in life.lost else "lower"
        return self._moves(world, i, me, pc, "opened", opened=life.number, said=OPENED)

    def _do_prepare(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, OPENED):
            return None
        return self._moves(world, i, me, "filled", "prepared", prepared=life.transaction, said=REBUILT)

    def _do_filled(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, REBUILT):
            return None
        return self._moves(world, i, me, "live", "committed", committed=life.transaction)

    def _do_lower(self, world: World, life: Life, i: int, me: Process) -> Next:
        t = life.transaction
        return self._moves(world, i, me, "redo", f"prepared := {t}", prepared=t)

    def _do_redo(self, world: World, life: Life, i: int, me: Process) -> Next:
        t = life.transaction
        return self._moves(world, i, me, "live", f"committed := {t}", committed=t, said=REBUILT)

    def _do_rebuild(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        survivors = [rank for p, rank in enumerate(world.ranks) if p not in life.lost]
        if any(rank.said < REBUILT for rank in survivors):
            return None
        t = life.transaction
        return self._moves(world, i, me, "live", "is rebuilt", committed=t, prepared=t, said=REBUILT)

    def _do_live(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, REBUILT):
            return None
        return self._moves(world, i, me, "mark", "state := LIVE", state=int(State.LIVE), said=LIVE)

    def _do_mark(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, LIVE):
            return None
        after = self._moves(world, i, me, "discard", "sets the started mark")
        return after._replace(state=after.state._replace(started=life.number))

    def _do_discard(self, world: World, life: Life, i: int, me: Process) -> Next:
        rest = tuple(one for one in world.others if not one[0] or one[1].rank != i)
        after = self._moves(
            world, i, me, "step", "removes what is superseded", said=READY, step=life.transaction + 1
        )
        return after._replace(state=self._next(after.state._replace(others=rest), i))

    def _next(self, world: World, i: int) -> World:
        """To the next step, or to the end."""
        me = world.ranks[i]
        if me.step > self.config.steps:
            me = me._replace(pc="finish" if self.config.close else "done", said=CLOSING)
        else:
            me = me._replace(pc="step", said=READY + 2 * me.step)
        return world._replace(ranks=_put(world.ranks, i, me))

    def _do_step(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        t = me.step
        if not self._all_said(world, READY + 2 * t):
            return None
        if world.closed:
            raise Broken(f"trained after close: rank {i} begins step {t}")
        after = self._moves(world, i, me, "commit", f"prepared := {t}", prepared=t, said=READY + 2 * t + 1)
        return after._replace(state=after.state._replace(trained=life.number))

    def _do_commit(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        t = me.step
        if not self._all_said(world, READY + 2 * t + 1):
            return None
        after = self._moves(world, i, me, "step", f"committed := {t}", committed=t, step=t + 1)
        return after._replace(state=self._next(after.state._replace(top=max(world.top, t)), i))

    def _do_finish(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, CLOSING):
            return None
        state = int(State.FINISHED if self.rules.tombstone else State.LIVE)
        after = self._moves(world, i, me, "finished", "state := FINISHED", state=state)
        return after._replace(state=after.state._replace(closed=True))

    def _do_finished(self, world: World, life: Life, i: int, me: Process) -> Next:
        after = self._moves(world, i, me, "remove", "sets the finished mark", said=CLOSED)
        return after._replace(state=after.state._replace(finished=True))

    def _do_remove(self, world: World, life: Life, i: int, me: Process) -> Next | None:
        if not self._all_said(world, CLOSED):
            return None
        ranks = _put(world.ranks, i, Process(None, "done", CLOSED))
        return Next("removes its arena", world._replace(ranks=ranks))


def _put(ranks: tuple[Process, ...], i: int, new: Process) -> tuple[Process, ...]:
    return (*ranks[:i], new, *ranks[i + 1 :])


def _sorted(others: Iterable[tuple[bool, Arena]]) -> tuple[tuple[bool, Arena], ...]:
    return tuple(sorted(others))


def _sorted_arenas(arenas: Iterable[Arena]) -> tuple[Arena, ...]:
    return tuple(sorted(arenas))


def _renumbered(world: World) -> World:
    """The world between two lives; numbers of starts, which are only compared, as small as can be."""
    arenas = [*(rank.arena for rank in world.ranks if rank.arena), *(arena for _, arena in world.others)]
    numbers = {OLD, world.started, world.trained, world.recovered}
    numbers.update(number for arena in arenas for number in (arena.joined, arena.opened, arena.fill))
    small = {NONE: NONE, 0: 0, **{n: i for i, n in enumerate(sorted(numbers - {NONE, 0}), 1)}}

    def renumbered(arena: Arena) -> Arena:
        words = {name: small[getattr(arena, name)] for name in ("joined", "opened", "fill")}
        return arena._replace(**words)

    return world._replace(
        ranks=tuple(Process(renumbered(rank.arena)) if rank.arena else Process() for rank in world.ranks),
        others=_sorted((here, renumbered(arena)) for here, arena in world.others),
        life=None,
        started=small[world.started],
        trained=small[world.trained],
        recovered=small[world.recovered],
    )


def _named(arena: Arena) -> str:
    return f"the {State(arena.state).name} arena of rank {arena.rank} of fill {arena.fill}"


def _described(outcome: RecoveryPlan | str) -> str:
    if outcome == "fresh":
        return "fresh"
    if isinstance(outcome, str):
        return f"refused, {outcome}"
    if outcome.begins:
        return "resumed from the checkpoint"
    lost = f", ranks {list(outcome.lost)} are lost" if outcome.lost else ""
    return f"all go to transaction {outcome.transaction}{lost}"
