"""Deltas are of what a transaction has left, whatever the next one does to the rows meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.coding.parity import unpack
from ecemb.coding.rows import Column, Table, TableLayout
from ecemb.memory import journal as outboxes
from ecemb.memory.journal import Outbox
from ecemb.memory.rank_memory import RankMemory
from support.simulation import alone

LAYOUTS = [
    TableLayout("a", 300, (Column("weight", "float32", 12), Column("sum", "float32", 4))),
    TableLayout("b", 70, (Column("weight", "bfloat16", 6),)),
    TableLayout("state", 1, (Column("state", "uint8", 40),)),
]

Words = NDArray[np.uint64]


@pytest.fixture(params=["reference", "cpu"])
def memory(request: pytest.FixtureRequest, tmp_path: Path, seed: int) -> Iterator[RankMemory]:
    with alone(tmp_path, LAYOUTS, request.param) as opened:
        rng = np.random.default_rng(seed)
        for table in opened.space.tables:
            for column in table.columns:
                column[:] = rng.integers(0, 256, column.shape, np.uint8)
        yield opened


@pytest.fixture(params=[1, 100, 1 << 20], ids=lambda size: f"parts of {size} bytes")
def parts(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small parts, so that there are many."""
    with mock.patch.object(outboxes, "PART_BYTES", request.param):
        yield


def everything(memory: RankMemory) -> Words:
    return memory.space.read(0, memory.space.words)


def train(memory: RankMemory, transaction: int, calls: int, rng: np.random.Generator) -> None:
    """One transaction of some captures."""
    memory.arm(transaction)
    for _ in range(calls):
        body(memory, rng)
    memory.capture_rank_state()
    memory.rank_state[:] = rng.integers(0, 256, 40, np.uint8)


def body(memory: RankMemory, rng: np.random.Generator) -> None:
    """Changes some rows, some of them twice."""
    for index, table in enumerate(memory.space.tables[:-1]):
        rows = rng.integers(0, table.layout.rows, rng.integers(0, table.layout.rows))
        memory.journal.capture(index, rows)
        for column in table.columns:
            column[rows] = rng.integers(0, 256, (len(rows), column.shape[1]), np.uint8)


def added(memory: RankMemory, outbox: Outbox) -> Words:
    """The deltas at their places; each place once."""
    found, times = np.zeros(memory.space.words, np.uint64), np.zeros(memory.space.words, int)
    for block, (a, b) in enumerate(itertools.pairwise(outbox.edges)):
        for delta in unpack(outbox.words[a:b]):
            assert delta.block == block
            for offset, words in zip(delta.offsets.tolist(), delta.words, strict=True):
                at = slice(
                    memory.space.bounds[block] + offset, memory.space.bounds[block] + offset + len(words)
                )
                found[at], times[at] = words, times[at] + 1
    assert times.max(initial=0) <= 1
    return found


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("calls", [0, 1, 5])
def test_deltas_of_several_captures(memory: RankMemory, calls: int, seed: int) -> None:
    rng, before = np.random.default_rng(seed), everything(memory)
    train(memory, 1, calls, rng)
    outbox = memory.outbox()
    outbox.lay_out()
    assert np.array_equal(added(memory, outbox), everything(memory) ^ before)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("calls", [1, 5])
def test_the_next_transaction_trains_while_deltas_are_laid_out(
    memory: RankMemory, calls: int, seed: int
) -> None:
    """Between any two parts it captures rows and changes them, and ends."""
    rng, before = np.random.default_rng(seed), everything(memory)
    train(memory, 1, calls, rng)
    after, outbox = everything(memory), memory.outbox()
    turns = iter(range(1000))

    def rest() -> None:
        turn = next(turns)
        if turn == 0:
            memory.arm(2)
        elif turn < 20:
            body(memory, rng)
        elif turn == 20:
            memory.capture_rank_state()
            memory.rank_state[:] = 0

    outbox.lay_out(rest)
    assert np.array_equal(added(memory, outbox), after ^ before)
    assert not np.array_equal(everything(memory), after) or next(turns) < 3


def test_rows_are_read_and_captured_under_one_lock(memory: RankMemory, seed: int) -> None:
    """Else a row could change while it is read."""
    rng = np.random.default_rng(seed)
    train(memory, 1, 3, rng)
    outbox, held = memory.outbox(), list[bool]()

    def noting(owner: type, name: str) -> mock._patch[Callable[..., object]]:
        method = getattr(owner, name)

        def note(*arguments: object) -> object:
            held.append(outbox._lock.locked())
            return method(*arguments)

        return mock.patch.object(owner, name, note)

    with noting(Table, "change"), noting(Table, "gather"):
        memory.arm(2)
        memory.journal.capture(0, np.array([1]))
        outbox.lay_out()
    assert len(held) > 2 and all(held)


def test_an_undone_transaction_leaves_the_one_before_as_it_was(memory: RankMemory, seed: int) -> None:
    """Its journal is void, and its rows are what they were."""
    rng, before = np.random.default_rng(seed), everything(memory)
    train(memory, 1, 2, rng)
    after, outbox = everything(memory), memory.outbox()
    memory.arm(2)
    body(memory, rng)
    memory.journal.undo()
    outbox.lay_out()
    assert np.array_equal(added(memory, outbox), after ^ before)
