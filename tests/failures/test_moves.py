"""A few cells of a second failure in a move; `make moves` plays all of them."""

from __future__ import annotations

import random

from failures import moves


def test_a_second_failure_in_a_move(seed: int) -> None:
    choice = random.Random(seed)
    kinds = choice.sample(moves.KINDS, 2)
    with moves.prepared() as origin:
        for kind, stage in zip(kinds, choice.sample(list(moves.STAGES), len(kinds)), strict=True):
            moves.play(origin, moves.Cell(stage, kind), choice)
