"""One rank's side of the protocol, on real arenas: steps, undo, redo, and every place to be cut off.

The messages that one rank's `lay_out` gives are handed to the keepers' `receive`, as the exchange does.
That whole jobs survive kills is the simulator's affair.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.coding.parity import Scratch, sections, unpack
from ecemb.coding.placement import Placement
from ecemb.coding.rows import Column, TableLayout
from ecemb.errors import InconsistentArenas
from ecemb.memory.arena import Arena
from ecemb.memory.rank_memory import RankMemory, encoded
from ecemb.state import rank_state
from support.simulation import (
    Job,
    Killed,
    Machines,
    Moments,
    Torn,
    alone,
    check_parity,
    deliver,
    job_of,
    watched,
)

Words = NDArray[np.uint64]
Memories = list[RankMemory]

SHAPES = [(2, 1, 2), (3, 2, 4), (4, 2, 4), (3, 1, 3), (6, 4, 7)]


@pytest.fixture(autouse=True)
def parts() -> Iterator[None]:
    """The record of rank state is captured in parts, though it is short."""
    with mock.patch("ecemb.coding.rows.SPLIT_BYTES", 8):
        yield


@pytest.fixture
def job(seed: int) -> Job:
    return job_of(4, 2, 4, random.Random(seed))


def filled(root: Path, job: Job) -> Machines:
    """A job whose initial rows and their parity are in place."""
    machines = Machines(root, job)
    assert not machines.run(0).failures
    return machines


def space(memory: RankMemory) -> Words:
    return memory.space.read(0, memory.space.words)


def change(memory: RankMemory, transaction: int, rng: random.Random) -> int:
    """Section 3, numbers 1 to 3: arm, capture, change. Gives the number of rows captured."""
    memory.arm(transaction)
    parts = np.arange(memory.space.named[-1].table.layout.rows)  # of the rank state
    captured = memory.journal.capture(len(memory.space.named) - 1, parts)
    for index, table in enumerate(memory.space.tables):
        rows = table.layout.rows
        some = sorted(rng.sample(range(rows), rng.randint(min(rows, 1), rows)))
        captured += memory.journal.capture(index, np.array(some, np.int64))
        for column in table.columns:
            for row in some[: rng.choice([len(some), len(some) // 2])]:
                column[row] = np.frombuffer(rng.randbytes(column.shape[1]), np.uint8)
    return captured


def exchange(memories: Memories) -> None:
    """Number 4: what each rank sends to the others lies in their inboxes."""
    sent = [memory.lay_out(memory.outbox()) for memory in memories]
    for receiver, memory in enumerate(memories):
        deliver(memory, {sender: one[receiver] for sender, one in enumerate(sent) if receiver in one})


def step(memories: Memories, transaction: int, rng: random.Random) -> None:
    for memory in memories:
        change(memory, transaction, rng)
    exchange(memories)
    for memory in memories:
        memory.prepare(transaction)
    for memory in memories:
        memory.apply(transaction)
        memory.commit(transaction)


def cut_off(end: int, act: Callable[[], object]) -> bool:
    """Runs `act` and ends it at its moment number `end`; returns whether it came that far."""
    killed: list[bool] = []

    def run() -> None:
        try:
            act()
        except Killed:
            killed.append(True)

    with watched(Moments({0: end})):
        thread = threading.Thread(target=run, name="0")
        thread.start()
        thread.join()
    return bool(killed)


def torn(memory: RankMemory) -> RankMemory:
    """The same memory with kernels that can be cut off half-way, and nothing remembered."""
    job = memory.space.tables
    return RankMemory(memory.arena, [table.layout for table in job], memory.geometry, Torn())


class Interleaved(Torn):
    """Such kernels, whose three lanes change rows by turns, in an order that is drawn."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        self.shared = 0

    def lanes(self, rows: int, row_bytes: int) -> int:
        return min(3, max(1, rows))

    def update_lanes_(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, dst: Any, offsets: Any, src: Any, weight: int, edges: Any, saved: Any, marks: Any
    ) -> None:
        turns = [lane for lane, (a, b) in enumerate(itertools.pairwise(edges)) for _ in range(a, b)]
        self._draw.shuffle(turns)
        at = list(edges)
        self.shared += len(turns)
        for lane in turns:
            row = slice(at[lane], at[lane] + 1)
            self._update_rows(dst, offsets[row], src[row], weight, saved[lane], marks[lane, :1])
            at[lane] += 1


def in_lanes(memory: RankMemory, seed: int) -> RankMemory:
    """The same memory with kernels that change parity in lanes, and nothing remembered."""
    layouts = [table.layout for table in memory.space.tables]
    return RankMemory(memory.arena, layouts, memory.geometry, Interleaved(seed))


# --- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parity_is_the_code_of_the_rows_after_every_step(
    shape: tuple[int, int, int], kernel: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    machines = filled(tmp_path / "a", job_of(*shape, rng))
    with machines.memories(kernel) as memories:
        check_parity(memories, machines.job.placement)
        for transaction in range(1, 5):
            step(memories, transaction, rng)
            check_parity(memories, machines.job.placement)
            assert {memory.committed for memory in memories} == {transaction}


def test_rows_of_every_type_and_every_bit_pattern(tmp_path: Path, seed: int) -> None:
    """Parity is of bits: random bytes are NaNs with payloads, infinities, -0.0 and the rest."""
    columns = [(dtype, size * dim) for dtype, size in DTYPES for dim in (1, 5)]
    tables = tuple(
        TableLayout(f"{dtype}-{size}", 6, (Column("weight", dtype, size), Column("sum", "float32", 4)))
        for dtype, size in columns
    )
    rng = random.Random(seed)
    machines = filled(tmp_path / "a", Job(Placement.ranks(4, 2, 4), (tables,) * 4, seed))
    with machines.memories() as memories:
        step(memories, 1, rng)
        check_parity(memories, machines.job.placement)


DTYPES = [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8), ("int8", 1)]


def test_every_update_goes_to_r_keepers_and_to_nobody_else(tmp_path: Path, job: Job, seed: int) -> None:
    """A step sends r·U·(b + 8) bytes; no rank is sent what it doesn't need."""
    machines = filled(tmp_path / "a", job)
    with machines.memories() as memories:
        for memory in memories:
            change(memory, 1, random.Random(seed))
            messages = memory.lay_out(memory.outbox())
            outbox = memory.journal.outbox(Scratch())
            outbox.lay_out()
            changed = sum(delta.words.size for delta in unpack(outbox.words[: outbox.edges[-1]]))
            assert memory.rank not in messages
            sent = [
                (keeper, delta)
                for keeper, words in messages.items()
                for section in sections(words, job.placement.r)
                for delta in unpack(section)
            ]
            assert sum(delta.words.size for _, delta in sent) == 2 * changed
            for keeper, delta in sent:
                assert keeper in job.placement.keepers(memory.rank, delta.block)


def test_nothing_needs_space_once_a_transaction_is_prepared(tmp_path: Path, job: Job, seed: int) -> None:
    """Otherwise a full machine would leave it undecided forever."""
    machines = filled(tmp_path / "a", job)
    with machines.memories() as memories:
        for memory in memories:
            change(memory, 1, random.Random(seed))
        exchange(memories)
        for memory in memories:
            memory.prepare(1)
        reserved = [memory.arena.reserved("parity_journal") for memory in memories]
        for memory in memories:
            memory.apply(1)
        assert reserved == [memory.arena.reserved("parity_journal") for memory in memories]


def parity_of_a_step(root: Path, job: Job, seed: int, backing: object = None) -> tuple[Words, Words]:
    """The parity that rank 0 keeps before and after a step; what backs its memory may be replaced."""
    machines = filled(root, job)
    with machines.memories() as memories:
        mine = memories[0]
        if backing is not None:
            mine._backing = backing  # pyright: ignore[reportAttributeAccessIssue]
        parity = mine.arena.region("parity").view(np.uint64)
        before = parity.copy()
        step(memories, 1, random.Random(seed))
        return before, parity.copy()


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_changes_of_parity_without_memory_are_skipped(blocks: int, tmp_path: Path, seed: int) -> None:
    """Of a replacement rank: elsewhere they are as in any step, and the rest of their words gets memory."""
    rng = random.Random(seed)
    for draw in itertools.count():  # until a step changes this parity: jobs may have next to no bytes
        job, drawn = job_of(4, 2, 4, rng), rng.randrange(2**31)
        before, whole = parity_of_a_step(tmp_path / f"whole{draw}", job, drawn)
        if (whole != before).any():
            break
    with filled(tmp_path / "starts", job).memories() as memories:
        assert memories[0].parity is not None
        limit = [*memories[0].parity.starts.values(), len(whole)][blocks]
    asked: list[int] = []

    def has(_: str, starts: NDArray[np.int64], size_bytes: int) -> Any:
        return starts + size_bytes <= 8 * limit

    def ensure(_: str, starts: NDArray[np.int64], size_bytes: int) -> None:
        asked.extend((starts + size_bytes).tolist())

    backing = mock.Mock(is_whole=False, has=has, ensure=ensure)
    _, part = parity_of_a_step(tmp_path / "part", job, drawn, backing)
    assert max(asked, default=0) <= 8 * limit
    assert np.array_equal(part, np.where(np.arange(len(part)) < limit, whole, before))


def test_prepared_is_stored_after_the_inbox_is_complete(tmp_path: Path, job: Job) -> None:
    """Section 3.5: prepared means that every keeper has what a lost rank had sent."""
    machines = filled(tmp_path / "a", job)
    stores: list[str] = []
    store = Arena.set

    def seen(self: Arena, name: str, value: int) -> None:
        stores.append(name)
        store(self, name, value)

    with machines.memories() as memories:
        mine = memories[0]
        with mock.patch.object(Arena, "set", seen):
            mine.journal.arm(1)
            deliver(mine, {})
            mine.prepare(1)
            mine.apply(1)
            mine.commit(1)
    order = ["rows_bytes", "rows_label", "inbox_label", "inbox_bytes", "inbox_label", "prepared"]
    assert stores[: len(order)] == order
    assert stores[len(order) :] == ["parity_row", "parity_label", "committed_ns", "committed"]


@pytest.mark.parametrize("chunk", [1, 3, 64, 10**6])
def test_encoding_in_chunks_gives_the_same_parity(tmp_path: Path, job: Job, chunk: int) -> None:
    machines = filled(tmp_path / "a", job)
    with machines.memories() as memories:
        before = [memory.arena.region("parity").copy() for memory in memories]
        longest = max(max(words) for words in job.block_words)
        if chunk < 64:  # so that the case stays small
            longest = min(longest, 20 * chunk)
        for memory in memories:
            assert memory.parity is not None
            for _, words in memory.parity.blocks.values():
                words[:longest] = 0
        for start in range(0, longest, chunk):
            deliver_encoded(memories, start, min(start + chunk, longest))
        assert all(
            np.array_equal(memory.arena.region("parity"), old)
            for memory, old in zip(memories, before, strict=True)
        )


def deliver_encoded(memories: Memories, start: int, stop: int) -> None:
    for sender, memory in enumerate(memories):
        for keeper, words in encoded(memory, start, stop).items():
            parity = memories[keeper].parity
            assert parity is not None
            parity.update_([(sender, delta) for delta in unpack(words)])


def test_the_rank_state_is_a_record_like_any_other(tmp_path: Path, job: Job) -> None:
    machines = filled(tmp_path / "a", job)
    with machines.memories() as memories:
        before = [memory.rank_state.copy() for memory in memories]
        for memory in memories:
            memory.journal.arm(1)
            memory.capture_rank_state()
            rank_state.write_(memory.rank_state, b"another position")
        exchange(memories)
        for memory in memories:
            memory.prepare(1)
            memory.apply(1)
        check_parity(memories, job.placement)
        assert [rank_state.read(memory.rank_state) for memory in memories] == [b"another position"] * 4
        for memory, old in zip(memories, before, strict=True):
            memory.journal.undo()
            assert np.array_equal(memory.rank_state, old)


def test_only_the_parts_of_the_rank_state_that_change_are_saved_and_sent(tmp_path: Path, job: Job) -> None:
    """Written in place of a longer state, a shorter one, an equal one, and one that draws from generators."""
    rng = np.random.default_rng(1)
    with filled(tmp_path / "a", job).memories() as memories:
        states = [rng.bytes(30) for _ in memories]
        for transaction, data in enumerate(
            [states, [one[:16] for one in states], [one[:16] for one in states], states], 1
        ):
            before = [memory.rank_state.copy() for memory in memories]
            fronts = [
                rank_state.front(memory.rank_state, one) for memory, one in zip(memories, data, strict=True)
            ]
            for memory, new in zip(memories, fronts, strict=True):
                memory.arm(transaction)
                memory.write_rank_state(new)
            exchange(memories)
            for memory in memories:
                memory.prepare(transaction)
                memory.apply(transaction)
            check_parity(memories, job.placement)
            for memory, old, one in zip(memories, before, data, strict=True):
                assert (
                    rank_state.read(memory.rank_state) == one and not memory.rank_state[8 + len(one) :].any()
                )
                changed = (memory.rank_state != old).reshape(-1, 8).any(axis=1)
                assert [ids.tolist() for _, ids, _ in memory.journal.saved().chunks] == (
                    [np.flatnonzero(changed).tolist()] if changed.any() else []
                )
                kept = memory.rank_state.copy()
                memory.journal.undo()
                assert np.array_equal(memory.rank_state, old)
                memory.rank_state[:] = kept
                memory.commit(transaction)


# --- the decision -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Undecided:
    """Four ranks that have prepared transaction 2 and applied nothing, and what was and will be."""

    machines: Machines
    old: list[Words]
    new: list[Words]
    old_parity: list[bytes]
    new_parity: list[bytes]


def parities(memories: Sequence[RankMemory]) -> list[bytes]:
    return [memory.arena.region("parity").tobytes() for memory in memories]


@pytest.fixture
def undecided(tmp_path: Path, job: Job, seed: int) -> Undecided:
    rng = random.Random(seed)
    machines = filled(tmp_path / "a", job)
    with machines.memories() as memories:
        step(memories, 1, rng)
        old, old_parity = [space(memory) for memory in memories], parities(memories)
        for memory in memories:
            change(memory, 2, rng)
        exchange(memories)
        for memory in memories:
            memory.prepare(2)
        new = [space(memory) for memory in memories]
    done = machines.copy(tmp_path / "done")
    with done.memories() as memories:
        for memory in memories:
            memory.apply(2)
        check_parity(memories, job.placement)
        new_parity = parities(memories)
    return Undecided(machines, old, new, old_parity, new_parity)


def test_undo_twice(undecided: Undecided) -> None:
    with undecided.machines.memories() as memories:
        for _ in range(2):
            for rank, memory in enumerate(memories):
                _, redone = torn(memory).roll_to(1)
                assert not redone
                assert np.array_equal(space(memory), undecided.old[rank])
                assert memory.arena.get("prepared") == 1
        assert parities(memories) == undecided.old_parity


def test_redo_twice(undecided: Undecided) -> None:
    with undecided.machines.memories() as memories:
        for expected in (True, False):
            for rank, memory in enumerate(memories):
                undone, redone = torn(memory).roll_to(2)
                assert undone == 0
                assert redone is expected
                assert np.array_equal(space(memory), undecided.new[rank])
                assert memory.committed == 2
        assert parities(memories) == undecided.new_parity


def moments_of(undecided: Undecided, tmp_path: Path, target: int) -> Iterator[tuple[int, RankMemory]]:
    """Every moment of rank 0's decision; each on a fresh copy of the job, cut off there once."""
    end = 0
    while True:
        end += 1
        machines = undecided.machines.copy(tmp_path / f"to{target}-{end}")
        with machines.memories() as memories:
            memory = memories[0]
            came_that_far = cut_off(end, lambda: torn(memory).roll_to(target))  # noqa: B023
            if came_that_far:
                yield end, memory
        if not came_that_far:
            assert end > 3
            return


def test_undo_cut_off_anywhere_is_finished_by_the_next(undecided: Undecided, tmp_path: Path) -> None:
    for _, memory in moments_of(undecided, tmp_path, 1):
        assert memory.arena.get("committed") == 1
        torn(memory).roll_to(1)
        assert memory.arena.get("prepared") == 1
        assert np.array_equal(space(memory), undecided.old[0])
        assert parities([memory]) == undecided.old_parity[:1]


def test_undo_that_has_begun_can_never_roll_forward(undecided: Undecided, tmp_path: Path) -> None:
    """Section 4: prepared := T comes first; else a second crash finds half-undone rows prepared."""
    for _, memory in moments_of(undecided, tmp_path, 1):
        if not np.array_equal(space(memory), undecided.new[0]):
            assert memory.arena.get("prepared") == 1


@pytest.mark.slow
def test_redo_cut_off_anywhere_is_finished_by_the_next(undecided: Undecided, tmp_path: Path) -> None:
    """Torn parity: the row that is half changed is restored first, and the rest of the inbox follows."""
    for end, memory in moments_of(undecided, tmp_path, 2):
        cut_off(end // 2 + 1, lambda: torn(memory).roll_to(2))  # noqa: B023 - and once more
        torn(memory).roll_to(2)
        assert memory.committed == 2
        assert np.array_equal(space(memory), undecided.new[0])
        assert parities([memory]) == undecided.new_parity[:1]


@pytest.mark.slow
def test_apply_cut_off_anywhere_is_redone(undecided: Undecided, tmp_path: Path) -> None:
    end, came_that_far = 0, True
    while came_that_far:
        end += 1
        machines = undecided.machines.copy(tmp_path / str(end))
        with machines.memories() as memories:
            memory = memories[2]

            def go_on(memory: RankMemory = memory) -> None:
                torn(memory).apply(2)
                torn(memory).commit(2)

            came_that_far = cut_off(end, go_on)
            torn(memory).roll_to(2)
            assert parities([memory]) == undecided.new_parity[2:3]
            assert np.array_equal(space(memory), undecided.new[2])


@pytest.mark.slow
def test_lanes_cut_off_anywhere_are_redone_by_any_number_of_threads(
    undecided: Undecided, tmp_path: Path, seed: int
) -> None:
    """The redo is cut off as well, and then goes on with lanes, or without."""
    end, came_that_far, shared = 0, True, 0
    while came_that_far:
        end += 1
        machines = undecided.machines.copy(tmp_path / str(end))
        with machines.memories() as memories:
            for rank in (0, 2):
                memory = in_lanes(memories[rank], seed + end)
                memory.prepare(2)

                def go_on(memory: RankMemory = memory) -> None:
                    memory.apply(2)
                    memory.commit(2)

                came_that_far = cut_off(end, go_on)
                assert isinstance(memory.kernels, Interleaved)
                shared += memory.kernels.shared
                redo = (torn, lambda one: in_lanes(one, seed))
                cut_off(end // 3 + 1, lambda: redo[end % 2](memory).roll_to(2))  # noqa: B023
                redo[end // 2 % 2](memory).roll_to(2)
                assert parities([memory]) == undecided.new_parity[rank : rank + 1]
                assert np.array_equal(space(memory), undecided.new[rank])
    assert shared


def test_lanes_give_the_parity_that_one_thread_gives(undecided: Undecided, seed: int) -> None:
    with undecided.machines.memories() as memories:
        for rank, memory in enumerate(memories):
            shared = in_lanes(memory, seed)
            shared.prepare(2)
            shared.apply(2)
            assert parities([memory]) == undecided.new_parity[rank : rank + 1]


def test_a_transaction_that_is_decided_stays(undecided: Undecided) -> None:
    """Labels <= committed are ignored: a parity journal of a committed transaction is never undone."""
    with undecided.machines.memories() as memories:
        for memory in memories:
            memory.apply(2)
            memory.commit(2)
        for memory in memories:
            assert torn(memory).roll_to(2) == (0, False)
        assert parities(memories) == undecided.new_parity
        assert all(
            np.array_equal(space(memory), new) for memory, new in zip(memories, undecided.new, strict=True)
        )


def test_committed_above_the_decision_stops_and_writes_nothing(undecided: Undecided) -> None:
    with undecided.machines.memories() as memories:
        memory = memories[0]
        memory.apply(2)
        memory.commit(2)
        words = {name: memory.arena.get(name) for name in ("committed", "prepared", "rows_label")}
        with pytest.raises(InconsistentArenas, match="rank 0 has committed transaction 2"):
            memory.roll_to(1)
        assert words == {name: memory.arena.get(name) for name in words}
        assert np.array_equal(space(memory), undecided.new[0])


def test_a_step_that_only_armed_and_captured_is_undone(tmp_path: Path, job: Job, seed: int) -> None:
    machines = filled(tmp_path / "a", job)
    with machines.memories() as memories:
        memory = memories[0]
        before = space(memory)
        captured = change(memory, 1, random.Random(seed))
        undone, redone = torn(memory).roll_to(0)
        assert not redone
        assert undone == captured
        assert np.array_equal(space(memory), before)


def test_the_initial_state_that_was_prepared_is_committed_as_it_is(tmp_path: Path, job: Job) -> None:
    """Section 2: transaction 0 came by no inbox; an arena INIT and prepared beside a LIVE one has it."""
    machines = filled(tmp_path / "a", job)
    with machines.memories() as memories:
        memory = memories[0]
        memory.arena.set("committed", -1)
        before = space(memory)
        assert torn(memory).roll_to(0) == (0, True)
        assert memory.committed == 0
        assert np.array_equal(space(memory), before)
        check_parity(memories, job.placement)


# --- a world of one rank ------------------------------------------------------------------------


def test_one_rank_alone_survives_the_crash_of_its_process(tmp_path: Path, seed: int) -> None:
    layouts = [TableLayout("a", 9, (Column("weight", "float32", 12),)), rank_state.layout(40)]
    rng = random.Random(seed)
    with alone(tmp_path, layouts) as memory:
        memory.commit(0)
        memory.arena.set("prepared", 0)
        before = space(memory)
        change(memory, 1, rng)
        new = space(memory)
        assert memory.lay_out(memory.outbox()) == {}
        deliver(memory, {})
        assert torn(memory).roll_to(0)[1] is False
        assert np.array_equal(space(memory), before)
        memory.space.write_(0, new)
        memory.prepare(1)
        assert torn(memory).roll_to(1) == (0, True)
        assert memory.committed == 1
        assert np.array_equal(space(memory), new)
        assert encoded(memory, 0, 100) == {}
