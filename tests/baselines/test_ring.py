"""Rotating parity: every rank keeps as much, and any r ranks may be lost."""

from __future__ import annotations

import itertools

import pytest

from baselines.ring import Ring

RINGS = [(2, 1, 2), (3, 2, 3), (3, 2, 5), (4, 2, 4), (5, 3, 5), (4, 1, 6), (4, 2, 9)]


@pytest.mark.parametrize(("n", "k", "ranks"), RINGS)
def test_blocks_of_a_stripe_are_on_n_ranks(n: int, k: int, ranks: int) -> None:
    ring = Ring(n, k, ranks)
    for rank, block in itertools.product(range(ranks), range(k)):
        stripe, keepers = ring.stripe(rank, block), ring.keepers(rank, block)
        assert len(set(stripe)) == n and stripe[block] == rank and stripe[k:] == keepers
        assert all(ring.members(keeper, row) == stripe[:k] for row, keeper in enumerate(keepers))
        assert [ring.stripe(stripe[other], other) for other in range(k)] == [stripe] * k


@pytest.mark.parametrize(("n", "k", "ranks"), RINGS)
def test_any_r_ranks_may_be_lost(n: int, k: int, ranks: int) -> None:
    ring = Ring(n, k, ranks)
    for lost in itertools.chain(*(itertools.combinations(range(ranks), m) for m in range(ranks + 1))):
        apart = all(
            sum((rank - start) % ranks < n for rank in lost) <= n - k for start in range(ranks)
        )  # of n neighbours, no more than r
        assert ring.tolerates(lost) == apart
        assert apart or len(lost) > n - k


def test_too_few_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="n = 4"):
        Ring(4, 3, 3)
