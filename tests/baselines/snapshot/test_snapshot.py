"""Snapshots: which one is chosen, what comes back of it, what parity gives back.

Ranks that are killed with their memory are in tests/contracts/test_methods.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from baselines.method import Training
from baselines.ring import Ring
from baselines.slots import Slots, Stamp
from baselines.snapshot import Coded, Copies, SnapshotRecovery, SnapshotsLost
from baselines.snapshot.plan import SHARED, Move, Plan, own, parity, plan, plan_coded
from baselines.snapshot.redundancy import Redundancy
from support.processes import run_ranks


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
    method = SnapshotRecovery(folder, Copies(), every=2)
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
    for _ in range(2):  # and are not forgotten
        with pytest.raises(SnapshotsLost, match="with an empty folder"):
            trained(tmp_path, 5)
    method.close()
    assert not method.memory() and trained(tmp_path, 1)[0] == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Copies(0), "at least 1"),
        (lambda: Coded(3, 3), "1 <= k < n"),
        (lambda: Coded(3, 0), "1 <= k < n"),
        (lambda: Coded(257, 5), "1 <= k < n"),
    ],
)
def test_what_survives_nothing_is_refused(make: Callable[[], Redundancy], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(("ranks", "n", "k"), [(3, 3, 2), (4, 4, 2), (5, 3, 2)])
def test_parity_stands_in_for_r_machines(ranks: int, n: int, k: int) -> None:
    stamp, ring = Stamp(8, 3), Ring(n, k, ranks)
    for lost in itertools.chain(*(itertools.combinations(range(ranks), m) for m in range(ranks + 1))):
        there = [
            [] if rank in lost else [(name, stamp) for name in (SHARED, own(rank), parity(rank))]
            for rank in range(ranks)
        ]
        found = plan_coded(there, ring)
        assert (found is not None) == (ring.tolerates(lost) and len(lost) < ranks)
        if found is not None:
            assert (found.stamp, found.lost) == (stamp, lost)
            assert {move.target for move in found.moves} == set(lost)
            assert all(move.name == SHARED and move.source not in lost for move in found.moves)


def test_parity_that_is_not_there_is_not_counted_on() -> None:
    old, cut_off, ring = Stamp(4, 7), Stamp(8, 2), Ring(3, 2, 3)
    there = [[(name, old) for name in (SHARED, own(rank), parity(rank))] for rank in range(3)]
    for rank in range(3):
        there[rank] += [(SHARED, cut_off), (own(rank), cut_off)]
    assert plan_coded(there, ring) == Plan(cut_off, ())  # only processes died
    there[1] = []
    found = plan_coded(there, ring)
    assert found is not None and (found.stamp, found.lost) == (old, (1,))


def lost_and_decoded(folder: Path, n: int, k: int, lost: tuple[int, ...]) -> None:
    """Each rank's own part is of another length; some machines are lost, and get theirs back."""
    rank, stamp, code = dist.get_rank(), Stamp(3, 5), Coded(n, k)
    slots = Slots(folder / str(rank))
    content = np.random.default_rng(rank).integers(0, 256, 1000 + 37 * rank).astype(np.uint8)
    for name, part in ((own(rank), content), (SHARED, np.full(9, 4, np.uint8))):
        slots.begin(name, len(part))[:] = part
        slots.seal(stamp)
    assert code.spread(stamp, slots) == (n - k) * k * -(-(1000 + 37 * (dist.get_world_size() - 1)) // k)
    dist.barrier()
    if rank in lost:
        slots.remove()
        slots = Slots(folder / str(rank))
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, slots.kept())
    found = code.plan(held)
    assert found is not None and found.lost == lost
    code.fetch(found, slots)
    assert slots.read(own(rank), stamp).tobytes() == content.tobytes()
    assert slots.read(SHARED, stamp).tolist() == [4] * 9


@pytest.mark.parametrize(("n", "k", "lost"), [(4, 3, (2,)), (4, 2, (0, 3)), (2, 1, (1, 3))])
def test_lost_parts_are_decoded(n: int, k: int, lost: tuple[int, ...], tmp_path: Path) -> None:
    run_ranks(4, lost_and_decoded, tmp_path, n, k, lost)
