"""Snapshots in one process: which one is chosen, and what comes back of it.

Real ranks that are killed with their memory are in tests/contracts/test_methods.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from baselines.slots import Stamp
from baselines.snapshot import SnapshotRecovery, SnapshotsLost
from baselines.snapshot.plan import SHARED, Move, own, plan
from bench.method import Training


def held(stamp: Stamp, ranks: int, copies: int) -> list[list[tuple[str, Stamp]]]:
    """A whole snapshot."""
    return [
        [(SHARED, stamp), *((own((rank - i) % ranks), stamp) for i in range(copies + 1))]
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(("ranks", "copies"), [(3, 1), (4, 2), (5, 1), (2, 1)])
def test_as_many_machines_as_there_are_copies_may_be_lost(ranks: int, copies: int) -> None:
    stamp = Stamp(8, 3)
    for lost in itertools.chain(*(itertools.combinations(range(ranks), n) for n in range(ranks + 1))):
        there = held(stamp, ranks, copies)
        for rank in lost:
            there[rank] = []
        neighbours = any(
            {(rank + i) % ranks for i in range(copies + 1)} <= set(lost) for rank in range(ranks)
        )
        if (found := plan(there)) is None:
            assert neighbours and len(lost) > copies
            continue
        assert not neighbours and found.stamp == stamp
        moved = {(move.name, move.target) for move in found.moves}
        assert moved == {(name, rank) for rank in lost for name in (own(rank), SHARED)}
        assert all((move.name, stamp) in there[move.source] for move in found.moves)


def test_the_newest_whole_snapshot_is_chosen() -> None:
    old, cut_off, other = Stamp(4, 7), Stamp(8, 2), Stamp(8, 1)
    there = held(old, 3, 1)
    there[0] += [(own(0), cut_off), (SHARED, cut_off)]
    there[1] += [(own(1), other), (own(2), cut_off)]
    found = plan(there)
    assert found is not None and (found.stamp, found.moves) == (old, ())
    there[1] += [(own(1), cut_off)]
    found = plan(there)
    assert found is not None and found.stamp == cut_off
    assert found.moves == (Move(SHARED, 0, 1), Move(own(2), 1, 2), Move(SHARED, 0, 2))
    assert plan([[], []]) is None


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(folder: Path, steps: int) -> tuple[int, nn.Linear, SnapshotRecovery]:
    """One life of a training that adds one to its weights in each step."""
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    method = SnapshotRecovery(folder, every=2)
    begin = method.prepare(Training(model, []))
    for _ in range(begin, steps):
        with method.step(), torch.no_grad():
            model.weight += 1
    return begin, model, method


@pytest.mark.usefixtures("_alone")
def test_lost_snapshots_are_never_a_start_from_nothing(tmp_path: Path) -> None:
    assert trained(tmp_path, 1)[0] == 0
    (tmp_path / "own-0.0.slot").unlink()
    assert trained(tmp_path, 5)[0] == 0  # nothing was lost but the initial state
    begin, model, method = trained(tmp_path, 5)
    assert begin == 4 and model.weight.tolist() == [[5, 5]]
    costs = method.costs()
    assert costs.memory_bytes > 0 and costs.stalled_s > 0 and not costs.sent_bytes and not costs.written_bytes
    for path in tmp_path.glob("own-0.*"):
        path.unlink()
    with pytest.raises(SnapshotsLost, match="with an empty folder"):
        trained(tmp_path, 5)
    method.close()
    assert not method.memory() and trained(tmp_path, 1)[0] == 0


def test_no_copies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="copies"):
        SnapshotRecovery(tmp_path, copies=0, every=1)
