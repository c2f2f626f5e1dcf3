"""The rival: rows reach the replicas of other ranks, and only those that changed travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from baselines.live_copies import Replication, joined, split
from baselines.rows import distinct
from support.processes import run_ranks


def test_tables_that_lie_side_by_side_are_joined() -> None:
    whole, states = torch.arange(60.0).reshape(10, 6), torch.arange(10.0)
    side_by_side = [[whole[:4], states[:4]], [whole[4:], states[4:]]]
    (one,) = joined(side_by_side)
    assert (one.rows, one.record_bytes) == (10, 28)
    assert one.columns[0].tolist() == whole.tolist() and one.columns[1].tolist() == states.tolist()
    apart = joined([*side_by_side, [torch.zeros(3, 6), torch.zeros(3)]])
    assert [shard.rows for shard in apart] == [10, 3]
    assert [shard.rows for shard in joined([[whole[:4]], [whole[5:]]])] == [4, 5]


def test_rows_are_split_by_shards() -> None:
    shards = joined([[torch.zeros(rows, 2)] for rows in (3, 0, 4)])
    rows = np.array([0, 2, 3, 6])
    assert [ids.tolist() for ids in split(rows, shards)] == [[0, 2], [], [0, 3]]


@pytest.mark.parametrize("values", [[], [4], [1, 2, 9], [9, 1, 1, 2, 9]])
def test_distinct(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))


@pytest.mark.parametrize(("r", "window"), [(1, 1), (2, 1), (1, 3)])
def test_replicas_follow_the_rows(r: int, window: int) -> None:
    run_ranks(4, follow, r, window)


def follow(r: int, window: int) -> None:
    rank = dist.get_rank()
    rows = 20 + rank  # shards need not be equal
    generator = torch.Generator().manual_seed(rank)
    tables = [[torch.rand(rows, 8, generator=generator), torch.rand(rows)] for _ in range(2)]
    changed = np.empty(0, np.int64)
    replication = Replication(tables, lambda: changed, r, window)
    assert sorted(replication.replicas) == sorted((rank - i) % 4 for i in range(1, r + 1))
    for step in range(3):
        ids = torch.tensor([step, 7, 7 + rank])
        for weight, state in tables:
            weight[ids] += 1
            state[ids] -= 1
        changed = np.concatenate([ids.numpy(), ids.numpy() + rows])
        replication.step()
    assert replication.copied_rows == 3 // window * 2 * len({7, 7 + rank}) + 2 * 3
    assert replication.sent_bytes > r * replication.copied_rows * 36
    every: list[list[list[list[float]]]] = [[]] * 4
    dist.all_gather_object(every, [[tensor.tolist() for tensor in table] for table in tables])
    for source, shards in replication.replicas.items():
        assert [[column.tolist() for column in shard.columns] for shard in shards] == every[source]
