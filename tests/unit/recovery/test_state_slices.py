"""Replicated state of which each rank's arena holds some slices: compared, copied and gathered."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from ecemb.errors import InconsistentArenas, PeerFailure
from ecemb.recovery import relay
from support.simulation import WIDTH, Machines, job_of

DONE = 2
SHAPES = [(2, 1, 2), (2, 1, 5), (3, 2, 3), (4, 2, 7), (3, 1, 4), (4, 3, 9)]


def begun(root: Path, shape: tuple[int, int, int], seed: int) -> Machines:
    """A job that has done two steps."""
    machines = Machines(root / "base", job_of(*shape, random.Random(seed), rows=3))
    assert not machines.run(DONE).failures
    machines.check(DONE)
    return machines


@pytest.mark.parametrize("shape", SHAPES)
def test_every_restarted_rank_has_all_of_it(
    shape: tuple[int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """Ranks that kept their memory, and replacements; in pieces of a few words."""
    monkeypatch.setattr(relay, "CHUNK_WORDS", 3)
    n, k, size = shape
    machines = begun(tmp_path, shape, seed)
    value = np.float32(1)
    for step in range(DONE):
        value = value * np.float32(1.5) + np.float32(step)
    for lost in ((), tuple(random.Random(seed).sample(range(size), n - k))):
        for rank in lost:
            machines.lose(rank)
        life = machines.run(DONE)
        assert not life.failures and life.plan.lost == tuple(sorted(lost))
        for one in life.ranks.values():
            assert one.model.weight.tolist() == [[float(value)] * WIDTH]
            assert one.model.bias.tolist() == [float(value)]
        machines.check(DONE)


@pytest.mark.parametrize("shape", [(2, 1, 5), (4, 2, 7)])
def test_a_slot_has_r_and_1_slices(shape: tuple[int, int, int], tmp_path: Path, seed: int) -> None:
    n, k, size = shape
    with begun(tmp_path, shape, seed).memories() as memories:
        shares = [memory.slots.share for memory in memories]
        assert {(share.count, len(share.held)) for share in shares} == {(size, n - k + 1)}
        held = [memory.arena.get("slot0_bytes") for memory in memories]
        front_bytes = {
            memory.arena.get("slot0_bytes") - memory.slots.share.size_bytes(4 * WIDTH + 64)
            for memory in memories
        }
        assert len(front_bytes) == 1 and sum(held) == size * front_bytes.pop() + (n - k + 1) * (
            4 * WIDTH + 64
        )


@pytest.mark.parametrize("lost", [(), (0,)])
def test_holders_that_differ_are_named(lost: tuple[int, ...], tmp_path: Path, seed: int) -> None:
    """Otherwise all ranks would go on with the bytes of one of them."""
    machines = begun(tmp_path, (2, 1, 5), seed)
    placement = machines.job.placement
    c = next(c for c in range(1, 5) if 0 not in placement.slice_holders(c))  # slices are of two units or more
    with machines.memories() as memories:
        one = memories[placement.slice_holders(c)[1]]
        slot = one.slots.read(DONE)
        at = sum(len(run) for run in one.slots.share.runs(4 * WIDTH + 64))
        edges, held = one.slots.share.edges(4 * WIDTH + 64), one.slots.share.held
        before = sum(edges[other + 1] - edges[other] for other in held if other < c)
        slot[len(slot) - at + before] ^= 1
    for rank in lost:
        machines.lose(rank)
    life = machines.run(DONE)
    assert set(life.failures) == set(range(5))
    assert {type(error) for error in life.failures.values()} <= {InconsistentArenas, PeerFailure}
    first, second = sorted(placement.slice_holders(c))
    for error in life.failures.values():
        if isinstance(error, InconsistentArenas):
            assert f"ranks {first} and {second} hold different replicated state" in str(error)
            assert f"slice {c} of 5" in str(error)
    survivors = [life.failures[rank] for rank in range(5) if rank not in lost]
    assert any("which is of weight" in str(error) for error in survivors)
