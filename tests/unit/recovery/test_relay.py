"""Lost blocks are rebuilt, and rows moved, in many small pieces, of which several are under way at once."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ecemb.errors import PeerFailure
from ecemb.kernels.reference import Reference
from ecemb.recovery import relay
from ecemb.recovery.plan import plan_recovery
from ecemb.recovery.relayout import Layout, Move, RowRange, Shard, plan_relayout
from support.simulation import Hub, Machines, Wires, job_of

DONE = 2


@pytest.mark.slow
@pytest.mark.parametrize("words", [1, 3, 1 << 19])
@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 2, 3), (4, 2, 4), (3, 1, 4), (4, 3, 5)])
def test_every_choice_of_ranks_is_rebuilt_in_pieces(
    shape: tuple[int, int, int], words: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(relay, "CHUNK_WORDS", words)
    monkeypatch.setattr(relay, "TOGETHER", 3)
    n, k, size = shape
    base = Machines(tmp_path / "base", job_of(*shape, random.Random(seed)))
    assert not base.run(DONE).failures
    for lost in itertools.combinations(range(size), n - k):
        machines = base.copy(tmp_path / "-".join(map(str, lost)))
        for rank in lost:
            machines.lose(rank)
        life = machines.run(DONE)
        assert not life.failures
        assert life.plan.lost == lost
        machines.check(DONE)


def test_a_newcomer_receives_each_lost_word_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(relay, "CHUNK_WORDS", 5)
    machines = Machines(tmp_path / "base", job_of(4, 2, 5, random.Random(seed)))
    assert not machines.run(DONE).failures
    machines.lose(2)
    received: Counter[int] = Counter()
    expect = Wires.expect

    def counted(self: Wires, out: Any, source: int, what: str, tag: int = 0) -> Any:
        if what.startswith("the rebuild"):
            received[self.rank] += out.nbytes
        return expect(self, out, source, what, tag)

    monkeypatch.setattr(Wires, "expect", counted)
    life = machines.run(DONE)
    assert not life.failures
    job, placement = machines.job, machines.job.placement
    kept = [
        max(
            job.block_words[member][block]
            for block, member in enumerate(placement.members(stripe_class)[: placement.k])
        )
        for stripe_class, _ in placement.kept(2)
    ]
    assert received[2] == 8 * (sum(job.block_words[2]) + sum(kept))


# --- rows on their way to another number of ranks ---------------------------------------------------


class Moved:
    """Old arenas, the ranks that hold them, and what each of these gets when their rows are carried.

    Args:
        machines: the old arenas.
        lost: ranks without one.
        holders: old rank -> the new rank that attaches to its arena.
        size: number of new ranks; all want all rows.
        gone: new ranks that have ended before.
    """

    def __init__(
        self,
        machines: Machines,
        lost: Sequence[int],
        holders: Sequence[int],
        size: int,
        gone: Sequence[int] = (),
    ) -> None:
        self.job = job = machines.job
        placement = job.placement
        shards = tuple(
            tuple(Shard(f"{table.name}/rank{rank}", table) for table in job.layouts(rank))
            for rank in range(job.size)
        )
        self.old = Layout(placement, placement.k, shards)
        headers = [header for header in machines.headers() if header.constants.rank not in lost]
        recovery = plan_recovery(headers, placement, started=True, opened=machines.opened)
        wanted = [
            RowRange(shard.key, range(shard.layout.rows))
            for of_rank in shards
            for shard in of_rank[:-1]
            if shard.layout.words
        ]
        held = [None if rank in lost else holder for rank, holder in enumerate(holders)]
        self.plan = plan_relayout(recovery, held, self.old, ["host"] * size, [wanted] * size, [0] * size)
        self.records: list[dict[tuple[str, int], bytes]] = [{} for _ in range(size)]
        self.kept_bytes = [0] * size
        self.failures: dict[int, BaseException] = {}
        hub = Hub(size)
        for rank in gone:
            hub.end(rank)
        with machines.memories() as memories:
            self._memories = memories
            live = [rank for rank in range(size) if rank not in gone]
            threads = [
                threading.Thread(target=self._carry, args=(hub, rank), name=f"{rank}") for rank in live
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _carry(self, hub: Hub, rank: int) -> None:
        memories = {old: self._memories[old] for old in self.plan.held(rank)}
        wires = Wires(hub, rank, len(self.records))

        def on_chunk(move: Move, words: Any) -> None:
            for row, record in zip(move.rows, words.reshape(len(move.rows), -1), strict=True):
                assert (move.key, row) not in self.records[rank]
                self.records[rank][move.key, row] = record.tobytes()

        try:
            self.kept_bytes[rank] = relay.carry(
                self.plan, self.old, memories, self.job.geometry.generator, wires, Reference(), on_chunk
            )
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.failures[rank] = error
        finally:
            hub.end(rank)

    def expected(self) -> dict[tuple[str, int], bytes]:
        """The records of all rows."""
        records: dict[tuple[str, int], bytes] = {}
        for rank, of_rank in enumerate(self.old.shards):
            words, bases = self.job.expected(rank, DONE), self.old.addresses[rank].bases
            for shard, base in zip(of_rank[:-1], bases, strict=False):
                width = shard.layout.record_words
                for row in range(shard.layout.rows) if width else ():
                    record = words[base + row * width : base + (row + 1) * width]
                    records[shard.key, row] = record.tobytes()
        return records


@pytest.mark.slow
@pytest.mark.parametrize("words", [1, 7, 1 << 19])
@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 2, 3), (4, 2, 4), (3, 1, 4), (4, 3, 5)])
def test_a_move_brings_every_record_from_what_survives(
    shape: tuple[int, int, int], words: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(relay, "CHUNK_WORDS", words)
    monkeypatch.setattr(relay, "TOGETHER", 3)
    n, k, size = shape
    rng = random.Random(seed)
    machines = Machines(tmp_path / "base", job_of(*shape, rng))
    assert not machines.run(DONE).failures
    for lost in [(), *itertools.combinations(range(size), n - k)]:
        new = rng.choice([1, 2, size + 1])
        moved = Moved(machines, lost, [rng.randrange(new) for _ in range(size)], new)
        assert not moved.failures
        expected = moved.expected()
        assert moved.records == [expected] * new
        assert moved.kept_bytes == [sum(map(len, expected.values()))] * new


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_move_ends_on_all_ranks_when_one_has_died(gone: int, tmp_path: Path, seed: int) -> None:
    """A rank of a chain, or one that only the barrier waits for."""
    machines = Machines(tmp_path / "base", job_of(3, 2, 3, random.Random(seed)))
    assert not machines.run(DONE).failures
    moved = Moved(machines, [2], [0, 1, 1], 3, gone=[gone])
    assert moved.failures.keys() == {0, 1, 2} - {gone}
    assert all(isinstance(error, PeerFailure) for error in moved.failures.values())


@pytest.mark.parametrize("moves", [False, True])
def test_few_chunks_are_awaited_at_a_time(
    moves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "CHUNK_WORDS", 2)
    machines = Machines(tmp_path / "base", job_of(3, 2, 3, random.Random(0)))  # more chunks than are awaited
    assert not machines.run(DONE).failures
    awaited, most = Counter[int](), Counter[int]()
    expect = Wires.expect

    def counted(self: Wires, out: Any, source: int, what: str, tag: int = 0) -> Any:
        wait, counts = expect(self, out, source, what, tag), what.startswith(("the rebuild", "the move"))
        awaited[self.rank] += counts
        most[self.rank] = max(most[self.rank], awaited[self.rank])

        def waited() -> None:
            wait()
            awaited[self.rank] -= counts

        return waited

    monkeypatch.setattr(Wires, "expect", counted)
    if moves:
        assert not Moved(machines, [2], [0, 1, 1], 2).failures
    else:
        machines.lose(2)
        assert not machines.run(DONE).failures
    assert max(most.values()) == relay._AHEAD
    assert not any(awaited.values())
