"""Parity rows that several threads change at the same time (docs/protocol.md, 1.1, 8), searched.

The fifth part of the model: one keeper, whose parity every transaction changes row by row, in runs. Threads
share a run, each with a lane of the parity journal. Every store is a transition: of a line's words, of a
row's old words, of its number, of one half of the row and of the other. Threads move independently, and a
crash ends all of them, so that the stores that happened are a prefix of each thread's. The next start reads
the journal, as any number of threads, and may be cut off as well.

A parity row is the set of the deltas that it has, so a delta that is missing, or that came twice, shows.
The model has no word for the rest of a rank: every transaction in it is prepared.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ecemb.memory.header import NONE

from .rank import TORN, Broken
from .rules import ALL, Rules
from .transition import Next

Op = tuple[Any, ...]
"""A store: its name and its numbers."""
Ops = tuple[Op, ...]
UNSAVED = (NONE, TORN)


@dataclasses.dataclass(frozen=True)
class Lanes:
    """What is searched: what a keeper applies, and how often it is killed.

    Attributes:
        runs: the parity rows of each run of a transaction; every run begins at the first row of parity.
        threads: the most threads of a start; it has 1 or more.
        transactions: that are applied.
        crashes: how often the process dies.
        do_overlap: whether all rows of a run are the same words of parity.
    """

    runs: tuple[int, ...] = (1, 3)
    threads: int = 2
    transactions: int = 1
    crashes: int = 1
    do_overlap: bool = False

    @property
    def size(self) -> int:
        """Ranks."""
        return 1

    def __str__(self) -> str:
        rows = " and ".join(map(str, self.runs))
        kind = "rows that overlap" if self.do_overlap else "rows"
        job = f"a keeper of up to {self.threads} threads, {self.transactions} steps, runs of {rows} {kind}"
        return f"{job}, {self.crashes} crashes"


class Line(NamedTuple):
    """A lane in the journal: the row that changes, or has changed last; its first row; the row after it."""

    mark: int = NONE
    first: int = 0
    stop: int = 0


class Keeper(NamedTuple):
    """The words of an arena, and of the process what it has still to store, thread by thread.

    The main thread's are `main`; those of the others that share a run, `others`. Without `main` there is no
    process. `threads` is how many this start has.
    """

    parity: tuple[int, ...]
    saved: tuple[tuple[tuple[int, int], ...], ...]
    lines: tuple[Line, ...]
    label: int = 0
    row: int = NONE
    whole: int = 0
    count: int = 0
    committed: int = 0
    threads: int = 0
    main: Ops = ()
    others: tuple[Ops, ...] = ()
    crashes: int = 0


class LanesModel:
    """The stores of a configuration, under some rules.

    Args:
        config: what is applied, and how much may happen.
        rules: those that are on.
    """

    def __init__(self, config: Lanes, rules: Rules = ALL) -> None:
        self.config, self.rules = config, rules
        self.rows = sum(config.runs)

    def initial(self) -> Keeper:
        """Nothing is applied."""
        c = self.config
        parity = (0,) * (1 if c.do_overlap else max(c.runs))
        return Keeper(parity, ((UNSAVED,) * 2,) * c.threads, (Line(),) * c.threads, crashes=c.crashes)

    def successors(self, keeper: Keeper) -> list[Next]:
        """All that may happen next."""
        if not keeper.main:
            if keeper.committed == self.config.transactions:
                return []
            return [self._start(keeper, threads) for threads in range(1, self.config.threads + 1)]
        found: list[Next] = []
        if keeper.main[0][0] != "wait" or not any(keeper.others):
            op, *rest = keeper.main
            found.append(self._move(keeper._replace(main=tuple(rest)), op, None))
        for i, ops in enumerate(keeper.others):
            if ops:
                others = _with(keeper.others, i, ops[1:])
                found.append(self._move(keeper._replace(others=others), ops[0], i))
        if keeper.crashes:
            found.append(Next("the process is killed", _ended(keeper._replace(crashes=keeper.crashes - 1))))
        return found

    def _start(self, keeper: Keeper, threads: int) -> Next:
        text = f"a start with {threads} threads"
        try:
            return Next(text, self._begun(keeper._replace(threads=threads)))
        except Broken as broken:
            return Next(text, keeper, str(broken))

    def _move(self, keeper: Keeper, op: Op, thread: int | None) -> Next:
        text = " ".join(map(str, op if op[0] != "spawn" else op[:1]))
        text = text if thread is None else f"thread {thread + 1}: {text}"
        try:
            return Next(text, getattr(self, f"do_{op[0]}")(keeper, thread, *op[1:]))
        except Broken as broken:
            return Next(text, keeper, str(broken))

    # --- what a process is to store ---

    def _begun(self, keeper: Keeper) -> Keeper:
        """The next transaction, from the begin or from where its journal says."""
        t = keeper.committed + 1
        if keeper.label != t:
            return keeper._replace(main=(*self._label(t), *self._from(keeper, 0), ("commit", t)))
        ops: list[Op] = []
        done = keeper.row + 1
        if done < keeper.whole:  # cut off between the two stores that end lanes
            done = keeper.whole
            ops.append(("row", done - 1))
        is_whole = self.rules.whole_rows_stay and done <= keeper.whole
        if self.rules.lanes_end_first and (lines := self._interrupted(keeper, done)):
            for lane, line in enumerate(lines):
                if line.mark >= line.first:
                    ops += self._restored(line.mark, lane)
                ops += self._each(range(line.mark + 1, line.stop), lane)
            done = lines[-1].stop
            ops += self._closed(done)
        elif done and not is_whole:
            ops += self._restored(done - 1, 0)
        return keeper._replace(main=(*ops, *self._from(keeper, done), ("commit", t)))

    def _label(self, t: int) -> Ops:
        whole: Ops = (("whole", 0),)
        void: Ops = tuple(("mark", lane, NONE) for lane in range(self.config.threads))
        before: Ops = ()
        before += whole if self.rules.whole_void_before_label else ()
        before += void if self.rules.lanes_void_before_label else ()
        after = tuple(op for op in (*whole, *void) if op not in before)
        return (("row", NONE), *before, ("label", t), *after)

    def _interrupted(self, keeper: Keeper, done: int) -> Sequence[Line]:
        """The open lanes, if one of them names a row."""
        lines = keeper.lines[: keeper.count]
        if not any(line.mark >= line.first >= done for line in lines):
            return ()
        first = done
        for line in lines:
            if not line.first == first <= line.mark + 1 <= line.stop <= self.rows:
                raise Broken(f"false refusal: the journal has the lanes {lines} after row {done - 1}")
            first = line.stop
        return lines

    def _from(self, keeper: Keeper, done: int) -> Iterator[Op]:
        """The stores of all rows from `done` on, run by run."""
        start = 0
        for rows in self.config.runs:
            at, start = max(start, done), start + rows
            if at < start:
                lanes = min(keeper.threads, start - at)
                if self.config.do_overlap and self.rules.lane_rows_apart:
                    lanes = 1
                yield from self._run(at, start, lanes) if lanes > 1 else self._each(range(at, start), None)

    def _run(self, at: int, stop: int, lanes: int) -> Iterator[Op]:
        """A run whose threads share its rows; the main thread is the first of them."""
        edges = [at + (stop - at) * lane // lanes for lane in range(lanes + 1)]
        work = [self._each(range(edges[lane], edges[lane + 1]), lane) for lane in range(lanes)]
        if self.rules.lanes_void_first:
            yield from (("mark", lane, NONE) for lane in range(self.config.threads))
        yield ("count", lanes)
        for lane in range(lanes):
            first, stop_ = edges[lane : lane + 2]
            yield from (("first", lane, first), ("stop", lane, stop_), ("mark", lane, first - 1))
            if lane and not self.rules.lines_before_lanes:
                yield ("spawn", work[lane])
        if self.rules.lines_before_lanes:
            yield from (("spawn", ops) for ops in work[1:])
        yield from work[0]
        if self.rules.lanes_done_before_whole:
            yield ("wait",)
        yield from self._closed(stop)

    def _closed(self, stop: int) -> Ops:
        whole, row = ("whole", stop), ("row", stop - 1)
        return (whole, row) if self.rules.whole_before_row else (row, whole)

    def _each(self, rows: range, lane: int | None) -> Ops:
        """Stores of some rows in order, in a lane, or by the one thread outside of lanes."""
        own = lane or 0
        place = own if self.rules.lane_places else 0
        return tuple(
            op
            for row in rows
            for op in (
                ("save", row, place),
                ("row", row) if lane is None else ("mark", own, row),
                ("half", row),
            )
        )

    def _restored(self, row: int, lane: int) -> Ops:
        return (("restore", row, lane if self.rules.lane_places else 0), ("half", row))

    # --- the stores ---

    def _place(self, row: int) -> int:
        """The row of parity of a row's number."""
        for rows in self.config.runs:
            if row < rows:
                return 0 if self.config.do_overlap else row
            row -= rows
        raise Broken(f"false refusal: there is no row {row}")

    def do_row(self, keeper: Keeper, thread: int | None, row: int) -> Keeper:
        return keeper._replace(row=row)

    def do_whole(self, keeper: Keeper, thread: int | None, whole: int) -> Keeper:
        return keeper._replace(whole=whole)

    def do_label(self, keeper: Keeper, thread: int | None, label: int) -> Keeper:
        return keeper._replace(label=label)

    def do_count(self, keeper: Keeper, thread: int | None, count: int) -> Keeper:
        return keeper._replace(count=count)

    def do_first(self, keeper: Keeper, thread: int | None, lane: int, value: int) -> Keeper:
        return keeper._replace(lines=_with(keeper.lines, lane, keeper.lines[lane]._replace(first=value)))

    def do_stop(self, keeper: Keeper, thread: int | None, lane: int, value: int) -> Keeper:
        return keeper._replace(lines=_with(keeper.lines, lane, keeper.lines[lane]._replace(stop=value)))

    def do_mark(self, keeper: Keeper, thread: int | None, lane: int, value: int) -> Keeper:
        return keeper._replace(lines=_with(keeper.lines, lane, keeper.lines[lane]._replace(mark=value)))

    def do_spawn(self, keeper: Keeper, thread: int | None, ops: Ops) -> Keeper:
        return keeper._replace(others=(*keeper.others, ops))

    def do_wait(self, keeper: Keeper, thread: int | None) -> Keeper:
        return keeper._replace(others=())

    def do_save(self, keeper: Keeper, thread: int | None, row: int, place: int) -> Keeper:
        saved = _with(keeper.saved[place], row % 2, (row, keeper.parity[self._place(row)]))
        return keeper._replace(saved=_with(keeper.saved, place, saved))

    def do_restore(self, keeper: Keeper, thread: int | None, row: int, place: int) -> Keeper:
        saved, old = keeper.saved[place][row % 2]
        value = old if saved == row else TORN
        return keeper._replace(parity=_with(keeper.parity, self._place(row), value))

    def do_half(self, keeper: Keeper, thread: int | None, row: int) -> Keeper:
        """The first half; the second is the thread's next store."""
        at = self._place(row)
        old = keeper.parity[at]
        value = TORN if old == TORN else old ^ self._delta(keeper.committed + 1, row)
        keeper = keeper._replace(parity=_with(keeper.parity, at, TORN))
        following: Op = ("add", row, value)
        if thread is None:
            return keeper._replace(main=(following, *keeper.main))
        return keeper._replace(others=_with(keeper.others, thread, (following, *keeper.others[thread])))

    def do_add(self, keeper: Keeper, thread: int | None, row: int, value: int) -> Keeper:
        return keeper._replace(parity=_with(keeper.parity, self._place(row), value))

    def do_commit(self, keeper: Keeper, thread: int | None, t: int) -> Keeper:
        """Checks all rows; then the next transaction begins."""
        expected = [0] * len(keeper.parity)
        for s in range(1, t + 1):
            for row in range(self.rows):
                expected[self._place(row)] ^= self._delta(s, row)
        if keeper.parity != tuple(expected):
            raise Broken(f"parity: {keeper.parity} is not that of transaction {t}, {tuple(expected)}")
        keeper = keeper._replace(committed=t)
        return _ended(keeper) if t == self.config.transactions else self._begun(keeper)

    @functools.cache  # noqa: B019 - as long as the model
    def _delta(self, t: int, row: int) -> int:
        return 1 << ((t - 1) * self.rows + row)


def _ended(keeper: Keeper) -> Keeper:
    return keeper._replace(main=(), others=(), threads=0)


def _with(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])
