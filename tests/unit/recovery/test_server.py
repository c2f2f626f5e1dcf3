"""Requests, and rows and parity as of a transaction, between any two stages of the next one."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ecemb.coding.parity import class_words
from ecemb.coding.rows import Table
from ecemb.errors import InconsistentArenas
from ecemb.memory.rank_memory import RankMemory
from ecemb.recovery import server
from ecemb.recovery.server import Request, Snapshot
from support.interleaved import Ranks, Truth, grouped, runs, take_turns, windows
from support.simulation import Job, Machines, job_of

UNTIL = 3


@pytest.fixture(autouse=True)
def parts() -> Iterator[None]:
    """The record of rank state is captured in parts, though it is short."""
    with mock.patch("ecemb.coding.rows.SPLIT_BYTES", 8):
        yield


@contextmanager
def trained(root: Path, job: Job, kernel: str = "reference") -> Generator[tuple[list[RankMemory], Truth]]:
    """The memories of a job that is about to train, and what they are after each of its transactions."""
    machines = Machines(root / "base", job)
    assert not machines.run(0).failures
    with machines.copy(root / "first").memories(kernel) as memories:
        first = Ranks(job, memories, UNTIL)
        list(take_turns([first.trains(i) for i in range(job.size)], random.Random(1)))
    with machines.memories(kernel) as memories:
        yield memories, first.truth


def check(ranks: Ranks, i: int, of: int, rng: random.Random) -> tuple[bool, bool]:
    """Reads all blocks of a rank in runs, some also alone. Returns whether it gives rows, and parity."""
    placement, memory = ranks.job.placement, ranks.memories[i]
    given: dict[bool, set[bool]] = {False: set(), True: set()}
    for c in range(placement.world_size):
        for block, member in enumerate(placement.members(c)):
            if member != i:
                continue
            size = class_words(placement, memory.geometry.block_words, c)
            lengths = sorted({0, min(1, size), min(3, size), size})
            for width in rng.sample(lengths, min(2, len(lengths))):
                at = windows(size, width)
                out = np.full((len(at), width), 77, np.uint64)
                is_given = Snapshot(memory, of).read(c, block, at, out)
                given[block >= placement.k].add(is_given)
                if is_given:
                    assert np.array_equal(out, runs(ranks.block(i, c, block, of), at, width))
                for one in range(0, len(at), 1 + len(at) // 2):
                    alone = np.full((1, width), 77, np.uint64)
                    given[block >= placement.k].add(
                        Snapshot(memory, of).read(c, block, at[one : one + 1], alone)
                    )
                    assert not is_given or np.array_equal(alone, out[one : one + 1])
    (rows,), (parity,) = given[False], given[True]
    return rows, parity


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "window", "part_words"),
    [(grouped, 1, 1), (grouped, 2, 1 << 17), (job_of, 1, 1 << 17), (job_of, 2, 1)],
)
@pytest.mark.parametrize("kernel", [pytest.param("reference", marks=pytest.mark.long), "cpu"])
def test_every_word_in_every_stage(
    make: Callable[..., Job],
    kernel: str,
    window: int,
    part_words: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Also while a step is undone: the last one of the second transaction is aborted."""
    monkeypatch.setattr(server, "_PART_WORDS", part_words)
    rng = random.Random(seed)
    job = dataclasses.replace(make(4, 2, 4, rng), window=window, aborts=frozenset({(2 * window, 0)}))
    with trained(tmp_path, job, kernel) as (memories, truth):
        ranks = Ranks(job, memories, UNTIL, truth=truth)
        for i in take_turns([ranks.trains(i) for i in range(job.size)], rng):
            memory = memories[i]
            of, prepared = memory.committed, memory.prepared
            assert check(ranks, i, of, rng) == (True, memory.parity_journal.label <= of)
            if prepared > of:  # a rank that has committed it asks
                assert check(ranks, i, prepared, rng) == (True, False)
            if of:
                assert check(ranks, i, of - window, rng) == (False, False)
        for i in range(job.size):
            ranks.check(i, UNTIL * window)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_rows_of_two_open_transactions(kernel: str, tmp_path: Path, seed: int) -> None:
    """A row may be in both journals, in either, or in none."""
    rng = random.Random(seed)
    job = grouped(3, 2, 3, rng)
    with trained(tmp_path, job, kernel) as (memories, truth):
        ranks = Ranks(job, memories, UNTIL, truth=truth)
        memory = memories[0]
        for t in (1, 2):
            memory.arm(t)
            for _ in ranks.body(0, t):
                assert check(ranks, 0, 0, rng) == (True, True)
            if t == 1:
                ranks.truth[0, 1] = memory.space.read(0, memory.space.words), truth[0, 0][1]
        assert check(ranks, 0, 1, rng) == (True, False)
        memory.undo(1)
        assert check(ranks, 0, 1, rng) == (True, False)
        memory.undo(0)
        assert check(ranks, 0, 0, rng) == (True, True)


def test_rows_that_change_while_they_are_read(tmp_path: Path, seed: int) -> None:
    """Those may change that were captured, and none is captured meanwhile."""
    rng = random.Random(seed)
    job = grouped(3, 2, 3, rng)
    with trained(tmp_path, job) as (memories, truth):
        ranks, memory = Ranks(job, memories, UNTIL, truth=truth), memories[0]
        gather, held = Table.gather, list[bool]()
        memory.arm(1)
        for _ in ranks.body(0, 1):
            seen = memory.journal.saved().seen

            def changing(self: Table, ids: Any, out: Any, seen: Any = seen) -> None:
                held.append(memory.rows_lock.locked())
                gather(self, ids, out)
                for owner, rows in seen.items():
                    bits = np.unpackbits(rows.seen.view(np.uint8), bitorder="little")
                    for column in memory.space.named[owner].table.columns:
                        column[np.flatnonzero(bits)] += 1

            with mock.patch.object(Table, "gather", changing):
                assert check(ranks, 0, 0, rng) == (True, True)
        assert held and all(held)


def test_parity_that_changes_while_it_is_read(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    job = grouped(3, 2, 3, rng)
    with trained(tmp_path, job) as (memories, truth):
        ranks = Ranks(job, memories, 1, truth=truth)
        actors = [ranks.trains(i) for i in range(job.size)]
        turns = take_turns(actors, rng)
        memory, kernels = memories[0], memories[0].kernels
        while min(one.prepared for one in memories) < 1:
            next(turns)
        c, _ = job.placement.kept(0)[0]
        assert memory.parity is not None
        size = len(memory.parity.block(c))
        out, gather_rows = np.empty((1, size), np.uint64), kernels.gather_rows

        def applying(*arguments: Any) -> None:
            gather_rows(*arguments)
            with mock.patch.object(kernels, "gather_rows", gather_rows):
                memory.apply(1)

        with mock.patch.object(kernels, "gather_rows", applying):
            assert not Snapshot(memory, 0).read(c, 2, np.zeros(1, np.int64), out)


def test_a_thread_reads_while_another_trains(tmp_path: Path, seed: int) -> None:
    """What it is given is right, whatever moment it came at."""
    rng = random.Random(seed)
    job = grouped(3, 2, 3, rng)
    with trained(tmp_path, job, "cpu") as (memories, truth):
        ranks = Ranks(job, memories, UNTIL, truth=truth)
        errors, ended, reads = list[BaseException](), threading.Event(), [0]

        def reading() -> None:
            try:
                while True:
                    is_last = ended.is_set()
                    for i in range(job.size):
                        read_all(i)
                    if is_last:
                        return
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                errors.append(error)

        def read_all(i: int) -> None:
            for c in range(job.size):
                for block, member in enumerate(job.placement.members(c)):
                    if member == i:
                        size = class_words(job.placement, memories[i].geometry.block_words, c)
                        out, of = np.empty((1, size), np.uint64), memories[i].committed
                        at = np.zeros(1, np.int64)
                        if Snapshot(memories[i], of).read(c, block, at, out):
                            reads[0] += 1
                            assert np.array_equal(out, runs(ranks.block(i, c, block, of), at, size))

        thread = threading.Thread(target=reading)
        thread.start()
        try:
            list(take_turns([ranks.trains(i) for i in range(job.size)], rng))
        finally:
            ended.set()
            thread.join()
        assert not errors and reads[0]
        for i in range(job.size):
            ranks.check(i, UNTIL)


def test_what_a_rank_does_not_have(tmp_path: Path, seed: int) -> None:
    job = grouped(3, 2, 4, random.Random(seed))
    with trained(tmp_path, job) as (memories, _):
        memory = memories[0]
        kept, _ = job.placement.kept(0)[0]
        own = job.placement.stripe_class(0, 0)
        size = class_words(job.placement, memory.geometry.block_words, own)
        wrong = [
            (own, 1, [0], 1),
            (own, -1, [0], 1),
            (own, 3, [0], 1),
            (-1, 0, [0], 1),
            (4, 0, [0], 1),
            (kept, 0, [0], 1),
            (own, 0, [-1], 1),
            (own, 0, [0, size], 1),
            (own, 0, [0], size + 1),
            (own, 0, [2**63 - 1], 1),
        ]
        for c, block, offsets, width in wrong:
            out = np.full((len(offsets), width), 7, np.uint64)
            with pytest.raises(InconsistentArenas, match="restart the job"):
                Snapshot(memory, 0).read(c, block, np.array(offsets), out)
            assert (out == 7).all()
        assert Snapshot(memory, 0).read(own, 0, np.empty(0, np.int64), np.empty((0, 3), np.uint64))


def test_rows_are_undone_under_the_lock(tmp_path: Path, seed: int) -> None:
    """Else a row could be put back while it is read."""
    job = grouped(3, 2, 3, random.Random(seed))
    with trained(tmp_path, job) as (memories, truth):
        ranks, memory = Ranks(job, memories, UNTIL, truth=truth), memories[0]
        scatter, held = Table.scatter_, list[bool]()

        def noting(self: Table, *arguments: Any) -> None:
            held.append(memory.rows_lock.locked())
            scatter(self, *arguments)

        with mock.patch.object(Table, "scatter_", noting):
            for undo in (memory.journal.empty, lambda: memory.undo(0)):
                memory.arm(1)
                memory.capture_rank_state()
                list(ranks.body(0, 1))
                undo()
                ranks.check(0, 0)
        assert len(held) > 1 and all(held)


def test_rows_that_a_table_of_a_group_has_journalled_itself(tmp_path: Path) -> None:
    job = grouped(3, 2, 3, random.Random(1))
    with trained(tmp_path, job, "cpu") as (memories, _):
        memory, placement, space = memories[0], job.placement, memories[0].space
        of, before = memory.committed, space.read(0, space.words)
        table, _ = next((i, one.rows.start) for i, one in enumerate(space.named) if one.rows.start)
        ids = np.arange(space.named[table].table.layout.rows)
        memory.arm(of + 1, 1)
        memory.journal.capture(table, ids)
        space.named[table].table.scatter_(ids, ~space.named[table].table.read(0, len(ids)))
        assert not np.array_equal(space.read(0, space.words), before)
        for block, (low, high) in enumerate(itertools.pairwise(space.bounds)):
            c = next(c for c in range(placement.world_size) if placement.members(c)[block] == memory.rank)
            out = np.zeros((high - low, 1), np.uint64)
            assert Snapshot(memory, of).read(c, block, np.arange(high - low), out)
            assert np.array_equal(out[:, 0], before[low:high])


# --- requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_of",
    [
        Request(0, 0, 0, 0, 1),
        Request(0, 0, 0, 1, 0),
        Request(0, 0, 0, -1, -1),
        Request(0, 0, -1, 1, 1),
        Request(0, 0, 0, 2, (server.CHUNK_WORDS >> 1) + 1),
        Request(0, 0, 0, 1 << 62, 1 << 62),
        Request(0, 0, 0, 1, 1, -1),
    ],
)
def test_what_no_rank_asks_for_is_refused_before_anything_is_reserved(request_of: Request) -> None:
    with pytest.raises(InconsistentArenas, match="asks for"):
        Request.of_words(request_of.words)


def test_a_request_is_what_its_message_says() -> None:
    for request in (Request(3, 2, 1 << 40, 4, 5, 6), Request()):
        assert Request.of_words(request.words) == request
