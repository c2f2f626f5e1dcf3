"""A job whose ranks take turns in one process, between any two stages of their steps.

`Ranks` trains; ranks that are replaced begin with garbage, and get their rows and parity from the others
meanwhile, piece by piece. What a turn does depends on earlier rows only, so another job without any
replacement says what all of it has to be.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ecemb.coding.code import Code
from ecemb.coding.placement import Placement
from ecemb.coding.rows import Column, TableLayout
from ecemb.memory.rank_memory import RankMemory
from ecemb.recovery.missing import Missing
from ecemb.recovery.server import Snapshot

from .simulation import Job, deliver

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
Ready = Callable[[], bool]
Truth = Mapping[tuple[int, int], tuple[Words, Mapping[int, Words]]]
"""Rank and transaction -> the rank's row space, and its parity by class."""


def always() -> bool:
    return True


def grouped(n: int, k: int, size: int, rng: random.Random) -> Job:
    """Groups of tables with padded records, one of them empty; other numbers of rows on each rank."""
    tables = tuple(
        (
            TableLayout(
                "alone", rng.randint(1, 9), (Column("weight", "float32", 12), Column("sum", "float32", 4))
            ),
            *(
                TableLayout(f"g{i}", rows, (Column("weight", "bfloat16", 6), Column("sum", "uint8", 4)), "g")
                for i, rows in enumerate((rng.randint(0, 3), 0, rng.randint(1, 6), rng.randint(1, 6)))
            ),
            TableLayout("wide", rng.randint(1, 3), (Column("weight", "float32", 44),)),
            TableLayout("none", 3, ()),
        )
        for _ in range(size)
    )
    return Job(Placement.ranks(n, k, size), tables, rng.randrange(2**31))


def take_turns(actors: Sequence[Iterator[Ready]], rng: random.Random) -> Iterator[int]:
    """Lets one actor after another go on, any that is ready, until all have ended; yields its number."""
    waiting: dict[int, Ready] = dict.fromkeys(range(len(actors)), always)
    while waiting:
        ready = [i for i, is_ready in waiting.items() if is_ready()]
        assert ready, f"actors {list(waiting)} wait for each other"
        i = rng.choice(ready)
        try:
            waiting[i] = next(actors[i])
        except StopIteration:
            del waiting[i]
        yield i


class Ranks:
    """The memories of a job's ranks, and what they do in turns.

    Args:
        job: what is trained.
        memories: of all ranks.
        until: the number of transactions.
        replaced: ranks that begin with garbage.
        truth: what rows and parity have to be; what is read for replaced ranks is compared with it.

    Attributes:
        truth: as given; without, it is written down here.
        missing: what each replaced rank lacks.
        gone: how often a rank could not give what it was asked for.
    """

    def __init__(
        self,
        job: Job,
        memories: Sequence[RankMemory],
        until: int,
        replaced: Collection[int] = (),
        truth: Truth | None = None,
    ) -> None:
        self.job, self.memories, self.until = job, memories, until
        self.truth: dict[tuple[int, int], tuple[Words, Mapping[int, Words]]] = dict(truth or {})
        self._is_first = truth is None
        self.missing = {i: Missing(memories[i]) for i in replaced}
        for i in replaced:
            for table in memories[i].space.tables:
                for column in table.columns:
                    column[:] = 0xFF
            parity = memories[i].parity
            assert parity is not None
            for _, words in parity.blocks.values():
                words[:] = 0xDEADBEEF
        self.gone = 0
        self._ended = [0] * job.size
        self._sent: dict[tuple[int, int], dict[int, Words]] = {}
        self._wanted: dict[int, list[tuple[int, Ids]]] = {i: [] for i in replaced}
        for i in range(job.size):
            self._write_down(i, 0)

    def _write_down(self, i: int, transaction: int) -> None:
        memory = self.memories[i]
        if self._is_first and memory.parity is not None:
            parity = {c: words.copy() for c, (_, words) in memory.parity.blocks.items()}
            self.truth[i, transaction] = memory.space.read(0, memory.space.words), parity

    def check(self, i: int, transaction: int) -> None:
        """Compares all rows and all parity of a rank."""
        memory, (rows, parity) = self.memories[i], self.truth[i, transaction]
        assert memory.parity is not None
        assert np.array_equal(memory.space.read(0, memory.space.words), rows), f"rows of rank {i}"
        for c, (_, words) in memory.parity.blocks.items():
            assert np.array_equal(words, parity[c]), f"parity of class {c} on rank {i}"

    def block(self, i: int, stripe_class: int, block: int, transaction: int) -> Words:
        """What a block of a rank has to be."""
        rows, parity = self.truth[i, transaction]
        if block >= self.job.placement.k:
            return parity[stripe_class]
        return rows[slice(*self.memories[i].space.bounds[block : block + 2])]

    # --- training ---

    def trains(self, i: int) -> Iterator[Ready]:
        """One rank's transactions, of `job.window` steps each; the last step may be aborted."""
        job, memory, ranks = self.job, self.memories[i], range(self.job.size)
        for t in range(1, self.until + 1):
            last = t * job.window
            for step in range(last - job.window + 1, last + 1):
                if step == last - job.window + 1:
                    memory.arm(step, job.window)
                else:
                    memory.journal.extend(step)
                yield from self.body(i, step)
            if any(step == last for step, _ in job.aborts):
                memory.journal.empty()
                yield always
            parts = np.arange(memory.space.named[-1].table.layout.rows)
            yield from self._ensure(i, len(memory.space.tables) - 1, parts)
            memory.capture_rank_state()
            memory.rank_state[:8] = np.random.default_rng([i, last]).integers(0, 256, 8, np.uint8)
            self._ended[i] = last
            yield lambda last=last: min(self._ended) >= last
            self._sent[i, last] = memory.lay_out(memory.outbox())
            yield lambda last=last: all((other, last) in self._sent for other in ranks)
            messages = [self._sent[other, last] for other in ranks]
            deliver(memory, {source: one[i] for source, one in enumerate(messages) if i in one})
            memory.prepare(last)
            yield lambda last=last: min(one.prepared for one in self.memories) >= last
            memory.apply(last)
            yield always
            memory.commit(last)
            self._write_down(i, last)
            yield always

    def body(self, i: int, step: int) -> Iterator[Ready]:
        """Captures rows of each table and changes them."""
        memory = self.memories[i]
        yield always
        for table in range(len(self.job.tables[i])):
            one = memory.space.named[table]
            owner, first = one.owner, one.rows.start
            for ids in self.job.touched(i, table, step):
                yield from self._ensure(i, owner, ids + first)
                memory.journal.capture(owner, ids + first)
                yield always
                for column in memory.space.tables[table].columns:
                    column[ids] = self.job.change(column[ids], step)
                yield always

    def _ensure(self, i: int, table: int, ids: Ids) -> Iterator[Ready]:
        if (missing := self.missing.get(i)) is not None and len(missing.lacks(table, ids)):
            self._wanted[i].append((table, ids))
            yield lambda: not len(missing.lacks(table, ids))

    # --- rows and parity on their way ---

    def arrives(self, i: int, rng: random.Random) -> Iterator[Ready]:
        """Gets rows and parity of a replaced rank: those that a step waits for, or any."""
        memory, missing = self.memories[i], self.missing[i]
        while not missing.is_whole():
            yield lambda: self._is_settled(i, memory.committed)
            of, before = memory.committed, missing.bytes_left
            if self._wanted[i]:
                table, ids = self._wanted[i].pop(0)
                width = memory.space.named[table].table.layout.record_words
                lacking = missing.lacks(table, ids)
                for block, rows, offsets in missing.place(table, lacking):
                    records = yield from self._ask(i, block, offsets, width, of, rng)
                    if records is not None:
                        missing.store_rows_(table, rows, records)
                if len(missing.lacks(table, ids)):
                    self._wanted[i].append((table, ids))
            elif (chunk := missing.next_chunk(some_of(len(memory.space.named), rng))) is not None:
                at = np.array([chunk.start])
                words = yield from self._ask(i, chunk.block, at, chunk.stop - chunk.start, of, rng)
                if words is not None and chunk.is_parity:
                    missing.store_parity_(chunk.stripe_class, chunk.start, words[0])
                elif words is not None:
                    missing.store_span_(chunk.block, chunk.start, words[0])
                else:
                    missing.rewind()
            elif not missing.is_whole():
                missing.rewind()
            assert missing.bytes_left <= before

    def _is_settled(self, i: int, of: int) -> bool:
        return self.memories[i].committed == self.memories[i].prepared == of

    def _ask(
        self, i: int, block: int, offsets: Ids, width: int, of: int, rng: random.Random
    ) -> Generator[Ready, None, Words | None]:
        """Adds up k blocks, each read in a turn of its own; None if they may not be stored."""
        placement, memory = self.job.placement, self.memories[i]
        n, k = placement.n, placement.k
        c = placement.stripe_class(i, block) if block < k else placement.kept(i)[block - k][0]
        members = placement.members(c)
        sources = rng.sample([b for b in range(n) if members[b] not in self.missing], k)
        weights = Code(n, k).decode_weights([block], sources, memory.geometry.generator)[0]
        total, out = np.zeros((2, len(offsets), width), np.uint64)
        for source, weight in zip(sources, weights.tolist(), strict=True):
            yield always
            holder = members[source]
            if not Snapshot(self.memories[holder], of).read(c, source, offsets, out):
                self.gone += 1
                return None
            right = runs(self.block(holder, c, source, of), offsets, width)
            assert not self._is_settled(i, of) or np.array_equal(out, right), f"block {source} of class {c}"
            memory.kernels.mul_add_block_(total.reshape(-1), out.reshape(-1), weight)
        yield always
        if not self._is_settled(i, of):
            return None
        assert np.array_equal(total, runs(self.block(i, c, block, of), offsets, width))
        return total


def some_of(count: int, rng: random.Random) -> list[int]:
    return rng.sample(range(count), rng.randrange(count + 1))


def runs(words: Words, offsets: Ids, width: int) -> Words:
    """Runs of words, with zeros beyond their end."""
    found = np.zeros((len(offsets), width), np.uint64)
    for run, at in enumerate(offsets.tolist()):
        part = words[at : at + width]
        found[run, : len(part)] = part
    return found


def windows(words: int, width: int) -> Ids:
    """Every place at which a run begins, from the last to the first, and some again."""
    places = range(words - width, -1, -1)
    return np.array([*places, *itertools.islice(places, 2)], np.int64)
