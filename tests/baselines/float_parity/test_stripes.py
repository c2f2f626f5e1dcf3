"""Blocks cover all rows, and any r ranks' blocks are sums of what the others have."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from baselines.float_parity.coefficients import vandermonde
from baselines.float_parity.stripes import ParityLost, Shape, Stripes, cut, length
from baselines.ring import Ring

SHAPES: list[tuple[Shape, ...]] = [
    ((7, 3), (2, 5)),
    ((1, 4),),
    (),
    ((100, 2), (1, 64), (3, 1)),
    ((0, 9), (5, 2)),
]
LONG = 300
"""Numbers, at least, of each shape."""


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_blocks_have_every_row_once(shapes: tuple[Shape, ...], k: int) -> None:
    blocks = cut(shapes, k)
    assert len(blocks) == k
    rows = [
        (segment.table, segment.first + row, segment.width)
        for block in blocks
        for segment in block
        for row in range(segment.rows)
    ]
    assert rows == [(table, row, width) for table, (rows, width) in enumerate(shapes) for row in range(rows)]
    for block in blocks:
        starts = [segment.start for segment in block]
        assert starts == [0, *(segment.stop for segment in block)][: len(block)]
    widest = max((width for _, width in shapes), default=0)
    share = sum(rows * width for rows, width in shapes) / k
    assert all(length(block) <= share + widest + 1 for block in blocks)


@pytest.mark.parametrize(
    ("ranks", "n", "k"), [(2, 2, 1), (3, 3, 2), (5, 3, 2), (4, 4, 2), (5, 5, 3), (6, 4, 1)]
)
def test_lost_blocks_are_sums_of_the_others(ranks: int, n: int, k: int) -> None:
    ring = Ring(n, k, ranks)
    stripes = Stripes(ring, tuple(SHAPES[rank % len(SHAPES)] for rank in range(ranks)))
    matrix = vandermonde(n - k, k)
    random = np.random.default_rng(ranks)
    data, parity = np.zeros((ranks, k, LONG)), np.zeros((ranks, n - k, LONG))
    for rank, block in itertools.product(range(ranks), range(k)):
        size = length(stripes.blocks[rank][block])
        data[rank, block, :size] = random.normal(size=size)
        for row, keeper in enumerate(ring.keepers(rank, block)):
            assert stripes.parity_lengths(keeper)[row] >= size
            parity[keeper, row] += matrix[row, block] * data[rank, block]
    for lost in itertools.chain(*(itertools.combinations(range(ranks), m) for m in range(1, n - k + 1))):
        for rank, block in itertools.product(lost, range(k)):
            total = np.zeros(LONG)
            for term in stripes.terms(matrix, rank, block, lost):
                assert term.rank not in lost
                held = parity[term.rank, term.row] if term.block is None else data[term.rank, term.block]
                total += term.weight * held
            np.testing.assert_allclose(total, data[rank, block], atol=1e-9)
    with pytest.raises(ParityLost, match="with an empty folder"):
        stripes.terms(matrix, 0, 0, [0, *ring.keepers(0, 0)])
