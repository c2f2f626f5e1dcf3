"""All ranks together: who may move, what dies, how a start decides, and what must never happen.

A state is a tuple of small integers, one for each rank and one for the rest, each naming a value that is kept
once. Starts are decided by ecemb itself: `plan_recovery`, `classify` and `assign` get real headers.

The search is made smaller in these ways, each of which leaves every verdict as it is:

- A crash is a rank that doesn't move again; so one transition, from anywhere, ends a life of the job, and
  whichever ranks had stopped before it are those that died earlier.
- What no later read can see is forgotten when processes end (`_dead`): journals that are void or would change
  nothing, inboxes and slots that no decision can ask for, rows that will be undone before they are read.
- In the last life, when nothing can crash any more, moves of different ranks commute, since each rank's
  program is deterministic but for votes to abort, and waits only for what stays said. One order of them is as
  good as any: the lowest rank that can move does, with all its choices. That order decides which row journal
  a step takes, and where a body is when its process ends; no verdict depends on either.
- A move that no crash could tell from none is taken before all others, together with the failures of its
  thread: it changes nothing that a later start reads, its thread has no other choice but to fail, and moves
  of other ranks, and of the other thread, commute with it. The states between lives, and how lives end, are
  the same as without this: compared for N=2, 3 and 4. While a thread has deltas to lay out, it reads what the
  other thread writes: no move of that rank is taken first.
- Generations are only compared. Where no arena is away, all are members of the last one, and it is named 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ecemb.coding.placement import Placement
from ecemb.errors import EcembError, JobFinished
from ecemb.memory.classify import classify
from ecemb.memory.header import NONE, Constants, Header, State
from ecemb.net.assignment import Report, Worker, assign
from ecemb.recovery.plan import RecoveryPlan, plan_recovery

from .apart import Apart
from .rank import CREATED, NOTHING, READY, TORN, UNSAVED, Broken, Journal, Life, Rank, change
from .rounds import LAYS_OUT, Rounds, is_over
from .rules import ALL, BUDGETS, HEARD, Config, Rules
from .transition import Next

Ids = tuple[int, ...]

CLOCK = 10
"""What a clock counts from one start to the next: far more than starts."""


class Rest(NamedTuple):
    """What is not a rank's: the store, the budgets, arenas elsewhere, and what the checks remember."""

    running: bool = False
    life: Life | None = None
    others: tuple[tuple[int, bool, Rank], ...] = ()  # rank, whether it is reachable, arena
    crashes: int = 0
    losses: int = 0
    cuts: int = 0
    aborts: int = 0
    relaunches: int = 0
    fails: int = 0
    shortages: int = 0
    choices: int = 0
    short: int = 0  # the smallest window that a journal had no room for in an earlier life
    short_now: int = 0  # and in this one
    started: int = 0  # generation, as far as this store was told; the rules say whether it was
    marked: int = 0  # the start that told it
    proposed: int = 0  # the last start's generation, as far as this store was told
    finished: bool = False
    decided: tuple[int, ...] = ()  # of each step: 0 open, 1 trained, 2 aborted
    top: int = 0  # the last transaction that anybody returned from, in a step or in a recovery
    trained: int = 0  # the last start in which a step was begun
    closed: bool = False


class Model:
    """The job of a configuration, under some rules.

    Args:
        config: the job, and what may happen to it.
        rules: those that are on.
    """

    def __init__(self, config: Config, rules: Rules = ALL) -> None:
        self.config = config
        self.rules = rules
        self.placement = Placement.ranks(config.n, config.k, config.size)
        self.program = (Apart if config.apart else Rounds)(self.placement, config, rules)
        self.size = config.size
        self._exact = rules.without(*HEARD) != ALL.without(*HEARD)  # then what is read depends on the rules
        self._hurries = not (self._exact or config.apart)  # see the module's docstring
        self._values: list[Any] = []
        self._names: dict[Any, int] = {}
        self._moves: dict[tuple[int, int, int], list[tuple[Any, ...]]] = {}
        self._lives: dict[Life | None, int] = {}
        self._plans: dict[Any, Any] = {}
        self._deaths: dict[int, int] = {}

    def name(self, value: Rank | Rest) -> int:
        """The number that stands for a value."""
        found = self._names.get(value)
        if found is None:
            found = self._names[value] = len(self._values)
            self._values.append(value)
        return found

    def initial(self) -> Ids:
        """No arena yet, or all ranks LIVE at transaction 0; no rank runs."""
        c = self.config
        rest = Rest(**{name: getattr(c, name) for name in BUDGETS}, decided=(0,) * c.steps)
        if c.fresh:
            return (*[self.name(Rank())] * self.size, self.name(rest))
        ranks = [
            Rank(
                state=int(State.LIVE),
                **dict.fromkeys(("joined", "gid", "opened", "name", "since", "changed", "fill"), 1),
                committed=0,
                prepared=0,
                rows=0,
                parity=(0,) * len(self.program.sources[i]),
                slots=((0, 0), None),
                whole=True,
            )
            for i in range(self.size)
        ]
        return (*map(self.name, ranks), self.name(rest._replace(started=1, marked=1, trained=1)))

    def successors(self, state: Ids) -> list[Next]:
        """All that may happen next."""
        rest: Rest = self._values[state[-1]]
        return self._running(state, rest) if rest.running else self._down(state, rest)

    # --- a life ---

    def _running(self, state: Ids, rest: Rest) -> list[Next]:
        values, size = self._values, self.size
        ranks: list[Rank] = [values[state[i]] for i in range(size)]
        said = [rank.sent for rank in ranks]
        life = self._life(rest.life)
        found: list[Next] = []
        moved = False
        for i in range(size):
            key = (state[i], i, life)
            moves = self._moves.get(key)
            if moves is None:
                moves = self._moves[key] = self._compiled(ranks[i], i, rest.life)
            for text, need, who, new, event, behind, alone in moves:
                if need and any(said[p] < need for p in who):
                    continue
                if isinstance(new, str):
                    return [Next(text, state, new)]
                try:
                    after = new if isinstance(new, int) else self._with_others(new, ranks)
                    if after is None:
                        continue
                    rest_after = state[-1]
                    if event:
                        changed = self._heard(event, rest, i, values[after], ranks)
                        if changed is None:
                            continue
                        rest_after = self.name(changed)
                except Broken as error:
                    return [Next(text, state, str(error))]
                found.append(Next(text, (*state[:i], after, *state[i + 1 : size], rest_after)))
                moved = moved or event != "fail"
                if alone and not event and self._death(after) == self._death(state[i]):
                    return [found[-1], *self._failing(state, rest, i, moves, behind)]
            if moved and not rest.crashes:
                return found
        if not moved:
            stuck = {i: (rank.pc, rank.behind.pc) for i, rank in enumerate(ranks) if not is_over(rank)}
            if stuck and not any(rank.quiet for rank in ranks):
                return [Next("nobody can move", state, f"deadlock: {stuck}")]
        if rest.crashes:
            found.append(Next("all processes end", self._ended(state, rest)))
        return found

    def _failing(
        self, state: Ids, rest: Rest, i: int, moves: Sequence[tuple[Any, ...]], behind: bool
    ) -> list[Next]:
        """How a thread of rank i may fail instead of its only move."""
        if not rest.fails:
            return []
        after = self.name(rest._replace(fails=rest.fails - 1))
        return [
            Next(text, (*state[:i], new, *state[i + 1 : self.size], after))
            for text, _, _, new, event, other, _ in moves
            if event == "fail" and other == behind
        ]

    def _compiled(self, rank: Rank, i: int, life: Life | None) -> list[tuple[Any, ...]]:
        assert life is not None
        others = tuple(p for p in range(self.size) if p != i)
        try:
            moves = self.program.moves(rank, i, life)
        except Broken as error:
            return [(f"rank {i} moves", 0, (), str(error), "", False, False)]
        choices = [move.behind for move in moves if move.event != "fail"]
        hurries = self._hurries and rank.behind.pc != LAYS_OUT
        return [
            (
                f"rank {i} {move.text}",
                move.need,
                others if move.who is None else move.who,
                self.name(move.new) if isinstance(move.new, Rank) else move.new,
                move.event,
                move.behind,
                hurries and move.event != "fail" and choices.count(move.behind) == 1,
            )
            for move in moves
        ]

    def _with_others(self, new: Callable[[Sequence[Rank]], Rank | None], ranks: Sequence[Rank]) -> int | None:
        after = new(ranks)
        return None if after is None else self.name(after)

    def _life(self, life: Life | None) -> int:
        return self._lives.setdefault(life, len(self._lives))

    def _ended(self, state: Ids, rest: Rest) -> Ids:
        dead = [self._death(name) for name in state[:-1]]
        short = min((one for one in (rest.short, rest.short_now) if one), default=0)
        after = rest._replace(running=False, life=None, crashes=rest.crashes - 1, short=short, short_now=0)
        ranks: list[Rank] = [self._values[name] for name in dead]
        if not (after.others or after.cuts or self._exact) and _all_members(ranks):
            names = dict.fromkeys(("joined", "gid", "opened", "name", "since", "changed", "fill"), 1)
            dead = [self.name(r._replace(**names) if r.state else r) for r in ranks]
            marks = ("started", "marked", "proposed", "trained")
            after = after._replace(**{mark: min(getattr(after, mark), 1) for mark in marks})
        return (*dead, self.name(after))

    def _death(self, name: int) -> int:
        found = self._deaths.get(name)
        if found is None:
            found = self._deaths[name] = self.name(self._dead(self._values[name]))
        return found

    def _dead(self, rank: Rank) -> Rank:
        """A rank without its process, and without what no rank can read any more."""
        rank = rank.stopped()
        if rank.state == NOTHING:
            return Rank(whole=rank.whole)
        if self._exact:
            return rank
        words = ("state", "joined", "gid", "opened", "name", "since", "changed", "whole", "fill")
        if rank.state not in (State.LIVE, State.INIT) or rank.prepared < 0:
            return Rank(**{word: getattr(rank, word) for word in words})
        rank = _forgotten(rank)
        if rank.prepared <= rank.committed:
            rank = rank._replace(inbox_label=NONE, inbox=())
        if rank.parity_label <= rank.committed:
            rank = rank._replace(parity_label=NONE, parity_row=NONE, parity_saved=(UNSAVED, UNSAVED))
        else:  # the redo writes the row that the journal names; of the others, it reads no saved words
            row = rank.parity_row
            saved = [
                old if row != NONE and at == row % 2 else UNSAVED for at, old in enumerate(rank.parity_saved)
            ]
            parity = [TORN if at == row else word for at, word in enumerate(rank.parity)]
            rank = rank._replace(parity_saved=tuple(saved), parity=tuple(parity))
        kept = (rank.committed, rank.prepared)
        first, second = (slot if slot and slot[0] in kept else None for slot in rank.slots)
        return rank._replace(slots=(first, second))

    # --- between two lives ---

    def _down(self, state: Ids, rest: Rest) -> list[Next]:
        ranks: list[Rank] = [self._values[name] for name in state[:-1]]
        found: list[Next] = []

        def after(text: str, rest: Rest, i: int = -1) -> None:
            names = [self.name(Rank()) if j == i else name for j, name in enumerate(state[:-1])]
            found.append(Next(text, (*names, self.name(rest))))

        for i, rank in enumerate(ranks):
            if rank.state and rest.losses:
                after(f"the host of rank {i} is lost", rest._replace(losses=rest.losses - 1), i)
            if rank.state and rest.cuts:
                others = tuple(sorted((*rest.others, (i, False, rank))))
                after(f"the host of rank {i} is cut off", rest._replace(cuts=rest.cuts - 1, others=others), i)
        for i, back, arena in rest.others:
            if not back:
                others = tuple(sorted(((i, True, arena), *(o for o in rest.others if o != (i, back, arena)))))
                after(f"the host with an old arena of rank {i} is back", rest._replace(others=others))
        if rest.relaunches:
            left = rest.relaunches - 1
            text = "the job is launched anew, with a new store"
            after(text, rest._replace(relaunches=left, started=0, marked=0, proposed=0, finished=False))
        return found + self._start(ranks, rest, state)

    def _start(self, ranks: Sequence[Rank], rest: Rest, state: Ids) -> list[Next]:
        reported = [(i, rank) for i, rank in enumerate(ranks) if rank.state]
        reported += [(i, arena) for i, back, arena in rest.others if back]
        outcome, chosen, hollow = self._planned(reported, rest)
        text = f"a start: {_described(outcome)}"
        reason = self._judged(ranks, reported, rest, outcome, chosen)
        if reason:
            return [Next(text, state, reason)]
        if isinstance(outcome, str):
            return []
        if outcome.kind == "fresh" and (rest.trained or rest.closed):
            return []  # of all that there was, nothing is left anywhere: this is another job
        everything = [*reported, *((i, arena) for i, _, arena in rest.others)]
        number = 1 + max((max(a.since, a.name) for _, a in everything), default=0)
        opened = max([self._mark(rest), *(a.opened for _, a in reported)])
        highest = max([0, opened, *(a.joined for _, a in reported)])
        if self.rules.store_counts_generations:
            highest = max(highest, rest.proposed)
        generations = {max(1 + highest, CLOCK * number if self.rules.generation_by_clock else 0)}
        if self.config.skew:
            generations.add(highest + number)  # nanoseconds: lower, and never the same
        new: list[Rank] = []
        for i in range(self.size):
            arena = chosen.get(i)
            if arena is None:
                new.append(Rank(pc="create"))
            else:
                new.append(arena._replace(pc="join", sent=CREATED, since=number))
        left = [(i, back, arena) for i, back, arena in rest.others if not back or chosen.get(i) != arena]
        for i, rank in enumerate(ranks):  # what newcomers find on their own host, and is hollow, they remove
            spent = (i, rank) in hollow or (rank.state == State.REBUILDING and outcome.kind != "fresh")
            if rank.state and chosen.get(i) != rank and not (spent and i not in chosen):
                left.append((i, True, rank))
        found: list[Next] = []
        for generation in sorted(generations):
            fill = max((arena.fill for arena in chosen.values()), default=number)
            life = Life(outcome, number, generation, number, fill)
            kept = max(rest.top, max((arena.committed for arena in chosen.values()), default=0))
            decided = (*rest.decided[:kept], *[0] * (self.config.steps - kept))
            proposed = generation if self.rules.store_counts_generations else 0
            after = rest._replace(
                proposed=proposed, running=True, life=life, others=tuple(sorted(left)), decided=decided
            )
            found.append(Next(f"{text}; generation {generation}", (*map(self.name, new), self.name(after))))
        return found

    def _planned(
        self, reported: Sequence[tuple[int, Rank]], rest: Rest
    ) -> tuple[RecoveryPlan | str, dict[int, Rank], list[tuple[int, Rank]]]:
        """What ecemb decides, the arenas that it takes for survivors, and those that are hollow."""
        started = bool(rest.started) and self.rules.started_mark
        opened = self._mark(rest)
        finished = rest.finished and self.rules.finished_mark
        key = (tuple((i, a[:7], a.name) for i, a in reported), started, finished, opened)
        if key not in self._plans:
            headers = [self._header(i, arena) for i, arena in reported]
            told = self._told(headers)
            try:
                plan = plan_recovery(told, self.placement, started=started, finished=finished, opened=opened)
                self._seated(told, opened)
                judged = classify(told, opened)
                ids = [{h.constants.arena_id for h in part} for part in (judged.survivors, judged.hollow)]
                self._plans[key] = plan, *([h.constants.arena_id in part for h in headers] for part in ids)
            except EcembError as error:
                self._plans[key] = type(error).__name__, [], []
        outcome, taken, spent = self._plans[key]
        hollow = [one for one, yes in zip(reported, spent, strict=False) if yes]
        return outcome, {i: arena for (i, arena), yes in zip(reported, taken, strict=False) if yes}, hollow

    def _header(self, i: int, arena: Rank) -> Header:
        c = self.config
        constants = Constants(
            job="job",
            arena_id=f"{arena.name:04x}{i:04x}",
            rank=i,
            world_size=self.size,
            n=c.n,
            k=c.k,
            positions=self.placement.positions,
            domains=tuple(f"host{p}" for p in range(self.size)),
            layout_hash="",
            layout="",
            block_words=((1,) * c.k,) * self.size,
            regions=(),
            fill=arena.fill,
        )
        joined, gid, opened, committed, prepared = arena[1:6]
        return Header(constants, State(arena.state), joined, gid, opened, committed, prepared)

    def _told(self, headers: Sequence[Header]) -> list[Header]:
        """The reports; doctored where a rule about their meaning is switched off."""
        rules = self.rules
        told: list[Header] = []
        for h in headers:
            words = dict(vars(h))
            if h.state is State.REBUILDING and not rules.rebuilding_is_evidence:
                continue
            if h.state is State.INIT and not rules.initial_beside_live:
                continue
            if h.state is State.REBUILDING and not rules.rebuilding_is_lost:
                words["state"] = State.LIVE
            if not rules.stale_is_lost:
                words |= {"joined": 0, "opened": 0, "generation_id": NONE}
                words["constants"] = dataclasses.replace(h.constants, fill=0)  # which counts as opened, too
            if not rules.least_prepared:
                words["prepared"] = h.committed
            told.append(Header(**words))
        return told

    def _mark(self, rest: Rest) -> int:
        """The last generation that was opened as far as the store knows."""
        told = self.rules.started_mark and self.rules.mark_tells_generation and self.rules.stale_is_lost
        return rest.started if told and rest.started else NONE

    def _seated(self, headers: Sequence[Header], opened: int) -> None:
        """Every survivor's arena must be given to the worker on its host."""
        taken = classify(headers, opened).survivors
        at = {h.constants.rank: f"host{h.constants.rank}" for h in taken}
        reports = [Report(f"host{h.constants.rank}", h.constants.arena_id, h, None, None) for h in taken]
        workers = [Worker(f"host{p}", str(p)) for p in range(self.size)]
        for p, seat in enumerate(assign(workers, reports, opened)):
            if seat.rank != p and (taken or seat.arena_id):
                raise Broken(f"seats: the worker on host{p} is given rank {seat.rank}, not its own of {at}")

    # --- what must never happen ---

    def _judged(
        self,
        ranks: Sequence[Rank],
        reported: Sequence[tuple[int, Rank]],
        rest: Rest,
        outcome: RecoveryPlan | str,
        chosen: dict[int, Rank],
    ) -> str:
        marked = bool(rest.started) or rest.finished
        if isinstance(outcome, str):
            if outcome == JobFinished.__name__:
                return "" if rest.closed else f"false refusal: {outcome} before anybody closed the job"
            if rest.closed and marked:
                return f"false refusal: {outcome} for a job that was closed"
            changed = max([rest.marked, *(arena.changed for _, arena in reported)])
            fine = {i for i, a in reported if (a.whole or a.state == State.INIT) and a.since >= changed}
            fine |= {i for i, rank in enumerate(ranks) if rank.whole and rank.state == NOTHING}  # removed
            lost = [i for i in range(self.size) if i not in fine]
            if self.placement.tolerates(lost):
                return f"false refusal: {outcome}, and no more is lost than the memory of ranks {lost}"
            return ""
        if outcome.kind == "fresh":
            if (rest.trained or rest.closed) and (marked or reported):
                return "restart from 0: the job had trained"
            return ""
        for i, arena in chosen.items():
            if not arena.whole:
                return f"half-rebuilt: the arena of rank {i} is taken for a survivor's"
            if arena.since < rest.trained:
                return (
                    f"stale: the job went on without the arena of rank {i}, which is taken for a survivor's"
                )
        if outcome.transaction < rest.top:
            return f"lost step: step {rest.top} was committed, and all go back to {outcome.transaction}"
        if rest.closed and outcome.transaction < self.config.steps:
            return "trained after close: the job goes on"
        return ""

    def _heard(self, event: str, rest: Rest, i: int, rank: Rank, ranks: Sequence[Rank]) -> Rest | None:
        """What the checks and the store make of an event; None if it can't happen."""
        assert rest.life is not None
        if event == "fail":
            return rest._replace(fails=rest.fails - 1) if rest.fails else None
        if event == "choose":
            return rest._replace(choices=rest.choices - 1) if rest.choices else None
        if event == "short":
            if not rest.shortages:
                return None
            if 0 < rest.short <= rank.window:
                raise Broken(f"no progress: rank {i} runs out in a window of {rank.window}, as before")
            return rest._replace(shortages=rest.shortages - 1, short_now=rank.window)
        if event == "abort":
            return rest._replace(aborts=rest.aborts - 1) if rest.aborts else None
        if event == "mark":
            others = tuple(o for o in rest.others if not o[1] or o[0] != i)
            top = max(rest.top, rest.life.plan.transaction)
            return rest._replace(
                started=rest.life.generation, marked=rest.life.number, others=others, top=top
            )
        if event == "alive":
            self._check(i, rank, rest)
            return rest
        if event in ("commit", "early"):
            rest = self._decided(i, rank, rest)
            if event == "commit":
                self._check(i, rank, rest)
            return rest
        if event == "arm":
            if rest.closed:
                raise Broken(f"trained after close: rank {i} begins step {rank.t}")
            live = [p for p, other in enumerate(ranks) if other.state == State.LIVE]
            behind = [p for p in live if ranks[p].prepared < rank.committed]
            if behind:
                raise Broken(f"split: rank {i} begins step {rank.t}, ranks {behind} may go back behind it")
            if not rank.behind.pc:
                self._check(i, rank, rest)
            return rest._replace(trained=rest.life.number)
        if event == "finish":
            behind = [
                p for p, other in enumerate(ranks) if other.state and other.committed < self.config.steps
            ]
            if behind:
                raise Broken(f"closed early: ranks {behind} have not committed the last step")
            return rest._replace(closed=True)
        return rest._replace(finished=True)

    def _decided(self, i: int, rank: Rank, rest: Rest) -> Rest:
        for t in range(1, rank.committed + 1):
            variant = _standing(rank) >> 2 * (t - 1) & 3
            known = rest.decided[t - 1]
            if variant not in (1, 2):
                raise Broken(f"rows: rank {i} commits step {t}, and its rows are neither trained nor aborted")
            if known not in (0, variant):
                raise Broken(f"split: rank {i} commits step {t} otherwise than the others")
            top = max(rest.top, t) if rank.sent >= READY else rest.top
            rest = rest._replace(decided=(*rest.decided[: t - 1], variant, *rest.decided[t:]), top=top)
        return rest

    def _check(self, i: int, rank: Rank, rest: Rest) -> None:
        """Rows, parity and dense state of a rank are those of the transaction that it has committed."""
        t = rank.committed
        right = sum(change(j, variant) for j, variant in enumerate(rest.decided[:t], 1))
        if _standing(rank) != right:
            raise Broken(f"rows: rank {i} stands on step {t}, and its rows don't")
        if any(value != right for value in rank.parity):
            raise Broken(f"parity: rank {i} stands on step {t}, and its parity is not the code of the rows")
        named = [slot for slot in rank.slots if slot and slot[0] == t]
        if named != [(t, right)]:
            raise Broken(f"dense state: rank {i} stands on step {t}, and has no such dense state")


def _standing(rank: Rank) -> int:
    """A rank's rows without what the step has changed that begins before the last one is decided."""
    journal = rank.journals[rank.armed]
    if rank.sent >= READY and rank.behind.sent and journal.count and journal.label == rank.t > rank.committed:
        return journal.over(rank.rows)
    return rank.rows


def _forgotten(rank: Rank) -> Rank:
    """A rank without row journals that change nothing, and without rows that will be undone in any case."""
    rows = rank.rows
    for at in sorted((0, 1), key=lambda at: -rank.journals[at].label):
        journal = rank.journals[at]
        after = journal.over(rows) if journal.count and journal.label > rank.committed else rows
        if after == rows:
            rank = rank.journalled(at, **Journal()._asdict())
        elif journal.label > rank.prepared:
            rank = rank._replace(rows=journal.over(rank.rows, half=True))
        rows = after
    return rank


def _all_members(ranks: Sequence[Rank]) -> bool:
    """Whether all arenas that can survive are members of the last generation that was opened."""
    opened = max((rank.opened for rank in ranks if rank.state), default=0)
    can = [
        rank
        for rank in ranks
        if rank.state == State.LIVE or (rank.state == State.INIT and rank.prepared >= 0)
    ]
    return all(rank.joined >= opened for rank in can)


def _described(outcome: RecoveryPlan | str) -> str:
    if isinstance(outcome, str):
        return f"refused, {outcome}"
    if outcome.kind == "fresh":
        return "fresh"
    lost = f", ranks {list(outcome.lost)} are lost" if outcome.lost else ""
    return f"all go to transaction {outcome.transaction}{lost}"
