"""The cut of replicated state into slices."""

from __future__ import annotations

import itertools
import random

import pytest

from ecemb.coding.placement import ALIGN_BYTES, WHOLE, Placement, Share, runs


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("units", [0, 1, 2, 5, 63, 64, 1000])
def test_slices_cover_every_byte_once_and_begin_where_no_element_is_cut(count: int, units: int) -> None:
    edges = Share(count, (0,)).edges(units * ALIGN_BYTES)
    assert edges[0] == 0 and edges[-1] == units * ALIGN_BYTES and len(edges) == count + 1
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    assert all(size >= 0 and size % ALIGN_BYTES == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= ALIGN_BYTES


def test_neighbouring_slices_are_one_run() -> None:
    edges = [0, 64, 128, 128, 192]
    assert runs(edges, [0, 1]) == [range(128)]
    assert runs(edges, [3, 0]) == [range(128, 192), range(64)]
    assert runs(edges, [2]) == []
    assert runs(edges, [1, 2, 3]) == [range(64, 192)]


@pytest.mark.parametrize(("n", "k", "size"), [(2, 1, 2), (2, 1, 5), (4, 2, 7), (3, 1, 3), (6, 5, 6)])
def test_every_slice_is_held_by_r_and_1_ranks(n: int, k: int, size: int, seed: int) -> None:
    positions = tuple(random.Random(seed).sample(range(size), size))
    placement = Placement(n, k, positions)
    shares = [Share.of(placement, rank) for rank in range(size)]
    for c in range(size):
        holders = {rank for rank, share in enumerate(shares) if c in share.held}
        assert holders == set(placement.slice_holders(c)) and len(holders) == n - k + 1
    assert all(share.is_whole == (size == n - k + 1) for share in shares)
    area_bytes = 1000 * ALIGN_BYTES
    assert sum(share.size_bytes(area_bytes) for share in shares) == (n - k + 1) * area_bytes


def test_one_rank_holds_the_whole() -> None:
    assert Share.of(None, 0) == WHOLE
    assert WHOLE.is_whole and WHOLE.runs(640) == [range(640)] and WHOLE.size_bytes(640) == 640
