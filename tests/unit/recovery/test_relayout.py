"""The plan of a move to another number of ranks, for all small numbers, codes and losses.

Each plan is carried out on bytes: parity of random rows is made with the code, lost ranks are forgotten, and
every move reads or decodes its words. So a row that arrives is the right one, or the test fails.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.checkpoint.contents import states_of
from ecemb.coding.code import Code, multiply
from ecemb.coding.parity import class_words
from ecemb.coding.placement import Placement
from ecemb.coding.rows import Addresses, Column, TableLayout
from ecemb.errors import InconsistentArenas, LayoutMismatch, StateLost, TooManyErasures
from ecemb.memory.header import Constants, Header, State
from ecemb.recovery.plan import RecoveryPlan, plan_recovery
from ecemb.recovery.relayout import Layout, Move, Relayout, RowRange, Shard, chunks, plan_relayout

Words = NDArray[np.uint64]
ROWS = {"user": (23, 2), "item": (9, 3), "tiny": (1, 1)}  # rows, and words of a record
STATE_WORDS = 4


def table(name: str, rows: int, words: int) -> TableLayout:
    return TableLayout(name, rows, (Column("weight", "uint8", words * 8),))


def parts(rows: int, size: int) -> list[range]:
    """Ranges of ceil(rows / size) rows, as ecemb.nn has them; the last ones may be empty."""
    step = -(-rows // size)
    return [range(min(i * step, rows), min((i + 1) * step, rows)) for i in range(size)]


def shards(size: int) -> tuple[tuple[Shard, ...], ...]:
    """Row-wise tables, one table that is whole on the last rank, and rank states."""
    found: list[tuple[Shard, ...]] = []
    for rank in range(size):
        own = [
            Shard(name, table(name, len(part), words), part.start)
            for name, (rows, words) in ROWS.items()
            for part in [parts(rows, size)[rank]]
        ]
        if rank == size - 1:
            own.insert(1, Shard("whole", table("whole", 5, 2)))
        found.append((*own, Shard(f"rank_state/{rank}", table("state", 1, STATE_WORDS))))
    return tuple(found)


def wants(old: int, new: int) -> list[list[RowRange]]:
    """As `shards` of the new layout."""
    return [
        [
            *(RowRange(one.key, range(one.start, one.start + one.layout.rows)) for one in of_rank[:-1]),
            *(RowRange(f"rank_state/{one}", range(1)) for one in states_of(old, rank, new)),
        ]
        for rank, of_rank in enumerate(shards(new))
    ]


def layout(placement: Placement | None, size: int, k: int) -> Layout:
    return Layout(placement, k, shards(size))


def decided(placement: Placement | None, size: int, lost: Iterable[int], code: Code) -> RecoveryPlan:
    positions = tuple(range(size)) if placement is None else placement.positions
    headers = [
        Header(
            Constants(
                "job", f"{rank:08x}", rank, size, tuple("abcdefgh"[:size]), 1, code.n, code.k, positions, "",
                "", ((1,) * code.k,) * size, (),
            ),
            State.LIVE, joined=1, generation_id=1, opened=1, committed=5, prepared=5,
        )
        for rank in range(size)
        if rank not in lost
    ]  # fmt: skip
    return plan_recovery(headers, placement, started=True)


def held_by(recovery: RecoveryPlan, size: int, new: int) -> list[int | None]:
    """Arenas go round the new ranks."""
    return [
        recovery.survivors.index(rank) % new if rank in recovery.survivors else None for rank in range(size)
    ]


class Memory:
    """The rows and parity of old ranks, as numbers, and nothing of those that are lost."""

    def __init__(self, old: Layout, code: Code, lost: Sequence[int]) -> None:
        rng = np.random.default_rng(1)
        self.generator = code.generator()
        self.code, self.old = code, old
        self.tables: dict[str, Words] = {}
        self.blocks: dict[tuple[int, int], Words] = {}  # (rank, block): rows
        for rank, of_rank in enumerate(old.shards):
            words: list[Words] = []
            for shard in of_rank:
                layout = shard.layout
                rows = rng.integers(0, 2**63, (layout.rows, layout.record_words), np.int64).view(np.uint64)
                words.append(rows.reshape(-1))
                whole = self.tables.setdefault(shard.key, np.zeros((99, layout.record_words), np.uint64))
                whole[shard.start : shard.start + layout.rows] = rows
            space = np.concatenate(words)
            bounds = Addresses([shard.layout for shard in of_rank], old.k).bounds
            for block in range(old.k):
                self.blocks[rank, block] = space[bounds[block] : bounds[block + 1]]
        if old.placement is not None:
            self._encode(old.placement)
        for key in list(self.blocks):
            if key[0] in lost:
                del self.blocks[key]

    def _encode(self, placement: Placement) -> None:
        lengths = [
            [len(self.blocks[rank, b]) for b in range(self.old.k)] for rank in range(len(self.old.shards))
        ]
        for c in range(placement.world_size):
            members = placement.members(c)
            size = class_words(placement, lengths, c)
            for block in range(placement.k, placement.n):
                self.blocks[members[block], block] = self.sum(
                    [(b, members[b]) for b in range(placement.k)], self.generator[block], range(size)
                )

    def sum(self, sources: Sequence[tuple[int, int]], weights: Sequence[int], words: range) -> Words:
        total = np.zeros(len(words) * 8, np.uint8)
        for (block, rank), weight in zip(sources, weights, strict=True):
            own = self.blocks[rank, block][words.start : words.stop].view(np.uint8)
            total[: len(own)] ^= multiply(own, np.full(len(own), weight, np.uint8))
        return total.view(np.uint64)

    def fetch(self, move: Move) -> Words:
        """The records of a move, from survivors only."""
        if len(move.sources) == 1:
            assert move.sources == ((move.block, move.rank),) or self.old.k == 1
        weights = [1]
        if move.sources != ((move.block, move.rank),):
            available = [block for block, _ in move.sources]
            weights = self.code.decode_weights([move.block], available, self.generator)[0].tolist()
        return self.sum(move.sources, weights, move.words).reshape(len(move.rows), -1)


def check(plan: Relayout, memory: Memory, wanted: Sequence[Sequence[RowRange]], chunk_words: int) -> None:
    """Every row that a rank wants arrives at it once, and is the right one."""
    arrived: dict[tuple[int, str, int], int] = {}
    for chunk in chunks(plan.moves, chunk_words):
        assert len(chunk.words) <= max(chunk_words, len(chunk.words) // len(chunk.rows))
        assert all(plan.holders[rank] is not None for _, rank in chunk.sources)
        records = memory.fetch(chunk)
        assert np.array_equal(records, memory.tables[chunk.key][chunk.rows.start : chunk.rows.stop])
        for row in chunk.rows:
            arrived[chunk.target, chunk.key, row] = arrived.get((chunk.target, chunk.key, row), 0) + 1
    expected = {
        (rank, want.key, row) for rank, of_rank in enumerate(wanted) for want in of_rank for row in want.rows
    }
    assert arrived == dict.fromkeys(expected, 1)


def placements(size: int) -> Iterator[tuple[Placement | None, Code]]:
    if size == 1:
        yield None, Code(2, 1)
    for n in range(2, size + 1):
        for k in range(1, n):
            yield Placement.ranks(n, k, size), Code(n, k)
            if n == 2:
                yield Placement(n, k, tuple(reversed(range(size)))), Code(n, k)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_row_arrives_once_whatever_is_lost(size: int) -> None:
    for placement, code in placements(size):
        old = layout(placement, size, code.k)
        for count in range(size + 1):
            for lost in itertools.combinations(range(size), count):
                tolerated = not lost if placement is None else placement.tolerates(lost)
                if not tolerated:
                    with pytest.raises(StateLost if count == size else TooManyErasures):
                        decided(placement, size, lost, code)
                    continue
                recovery = decided(placement, size, lost, code)
                memory = Memory(old, code, lost)
                for new in range(1, 7):
                    wanted = wants(size, new)
                    holders = held_by(recovery, size, new)
                    plan = plan_relayout(recovery, holders, old, ["a"] * new, wanted, [0] * new)
                    check(plan, memory, wanted, 5)
                    assert plan.recovery.transaction == 5


@pytest.mark.parametrize("hosts", [("a", "a", "b", "b", "c", "c"), ("a", "b", "c", "a", "b", "c")])
@pytest.mark.parametrize("dead", ["a", "b", "c"])
def test_six_ranks_on_three_hosts_become_four_and_six_again(hosts: tuple[str, ...], dead: str) -> None:
    code = Code(3, 2)
    placement = Placement.plan(3, 2, hosts)
    lost = [rank for rank, host in enumerate(hosts) if host == dead]
    recovery = decided(placement, 6, lost, code)
    old, new = layout(placement, 6, 2), itertools.count()
    holders = [None if rank in lost else next(new) for rank in range(6)]
    members = [host for host in hosts if host != dead]
    plan = plan_relayout(recovery, holders, old, members, wants(6, 4), [100, 120, 140, 160])
    check(plan, Memory(old, code, lost), wants(6, 4), 8)
    expected = dict.fromkeys(members, 0)
    for host, size in zip(members, [100, 120, 140, 160], strict=True):
        expected[host] += size
    assert plan.needed_bytes == expected
    assert set(plan.slices) <= set(recovery.survivors)

    four = Placement.interleaved(2, 1, members)
    again = decided(four, 4, (), Code(2, 1))
    grown = plan_relayout(again, range(4), layout(four, 4, 1), hosts, wants(4, 6), [100] * 6)
    check(grown, Memory(layout(four, 4, 1), Code(2, 1), ()), wants(4, 6), 8)
    assert {len(move.sources) for move in grown.moves} == {1}


def test_one_worker_may_hold_several_arenas() -> None:
    placement, code = Placement.ranks(3, 2, 4), Code(3, 2)
    recovery = decided(placement, 4, [3], code)
    plan = plan_relayout(recovery, [0, 0, 0, None], layout(placement, 4, 2), ["a"], wants(4, 1), [7])
    assert plan.held(0) == (0, 1, 2)
    assert {plan.path(move) for move in plan.moves} == {(0, 0), (0, 0, 0)}
    check(plan, Memory(layout(placement, 4, 2), code, [3]), wants(4, 1), 100)


def test_a_chain_visits_each_holder_once_and_the_target_last() -> None:
    placement, code = Placement.ranks(5, 4, 6), Code(5, 4)
    recovery = decided(placement, 6, [2], code)
    holders = [0, 1, None, 0, 1, 1]
    plan = plan_relayout(recovery, holders, layout(placement, 6, 4), ["a", "b"], wants(6, 2), [0, 0])
    assert any(len(move.sources) == 4 for move in plan.moves)
    for move in plan.moves:
        visited = [rank for rank, _ in itertools.groupby(plan.path(move))]
        assert len(visited) == len(set(visited))


def test_all_slices_of_replicated_state_have_a_sender_that_holds_them() -> None:
    placement, code = Placement.ranks(4, 2, 5), Code(4, 2)
    for lost in itertools.combinations(range(5), 2):
        recovery = decided(placement, 5, lost, code)
        given = (recovery, held_by(recovery, 5, 1), layout(placement, 5, 2), ["a"], wants(5, 1), [0])
        plan = plan_relayout(*given)
        assert len(plan.slices) == 5
        for c, rank in enumerate(plan.slices):
            assert rank in placement.slice_holders(c)
            assert rank not in lost


def test_targets_take_turns() -> None:
    placement = Placement.ranks(2, 1, 2)
    recovery = decided(placement, 2, (), Code(2, 1))
    plan = plan_relayout(recovery, [0, 1], layout(placement, 2, 1), ["a", "b", "c"], wants(2, 3), [0] * 3)
    first = [chunk.target for chunk in itertools.islice(chunks(plan.moves, 4), 6)]
    assert first == [0, 1, 2, 0, 1, 2]


def test_a_row_that_no_rank_had_is_refused() -> None:
    placement = Placement.ranks(2, 1, 2)
    recovery = decided(placement, 2, (), Code(2, 1))
    old = layout(placement, 2, 1)
    for want, row in ((RowRange("user", range(20, 24)), 23), (RowRange("other", range(1)), 0)):
        with pytest.raises(LayoutMismatch, match=f"of '{want.key}' are wanted, and row {row} was on no rank"):
            plan_relayout(recovery, [0, 1], old, ["a", "b"], [[want], []], [0, 0])
    holes = dataclasses.replace(old, shards=((), old.shards[1]))
    with pytest.raises(LayoutMismatch, match="rows 0 to 22 of 'user' are wanted, and row 0 was on no rank"):
        plan_relayout(recovery, [0, 1], holes, ["a", "b"], [[RowRange("user", range(23))], []], [0, 0])


def test_an_arena_that_nobody_attaches_to_is_refused() -> None:
    placement = Placement.ranks(2, 1, 2)
    recovery = decided(placement, 2, (), Code(2, 1))
    with pytest.raises(InconsistentArenas, match=r"attaches to the arenas of ranks \[1\], which survived"):
        plan_relayout(recovery, [0, None], layout(placement, 2, 1), ["a"], wants(2, 1), [0])


def test_the_digest_tells_plans_apart() -> None:
    placement = Placement.ranks(2, 1, 2)
    recovery = decided(placement, 2, (), Code(2, 1))
    old = layout(placement, 2, 1)
    given = (recovery, [0, 1], old, ["a", "b", "c"], wants(2, 3))
    plan = plan_relayout(*given, [1, 1, 1])
    assert plan.digest() == plan_relayout(*given, [1, 1, 1]).digest()
    assert plan.digest() != plan_relayout(*given, [1, 1, 2]).digest()
    assert plan.digest() != dataclasses.replace(plan, moves=plan.moves[1:]).digest()
