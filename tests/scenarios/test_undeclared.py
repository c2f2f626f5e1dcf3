"""Rows that were written undeclared stay as they are: their parity is made again, with kills at every moment.

All other kills are the simulator's (tests/simulator/), whose scripts declare what they write.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from ecemb.errors import UndeclaredWrite
from support.simulation import Machines, Rank, check_parity, job_of

DONE = 3  # transactions before the life in which ranks are killed


def write_undeclared(rank: Rank, step: int) -> None:
    """What the guard does when it notices that a row was written behind its back."""
    if rank.memory.rank == 0 and step == DONE:
        rank.memory.space.tables[0].columns[0][0] ^= np.uint8(1)
        rank.memory.arena.set("undeclared", 1)
        raise UndeclaredWrite("on purpose")


@pytest.mark.parametrize(("shape", "share"), [((2, 1, 2), 2), ((4, 2, 4), 9)])
def test_every_rank_killed_while_parity_is_encoded_again(
    shape: tuple[int, int, int], share: int, arena_dir: Path, seed: int
) -> None:
    rng = random.Random(seed)
    base = Machines(arena_dir / "base", job_of(*shape, rng))
    assert not base.run(DONE).failures
    life = base.run(DONE + 1, body=write_undeclared)
    assert type(life.failures[0]) is UndeclaredWrite
    assert base.plan().encode
    moments = base.copy(arena_dir / "rehearsal").run(DONE).moments
    every = [(rank, end) for rank, count in sorted(moments.items()) for end in range(1, count + 1)]
    for rank, end in every[rng.randrange(share) :: share]:
        machines = base.copy(arena_dir / f"{rank}-{end}")
        others = {one: rng.randint(1, count) for one, count in moments.items() if rng.random() < 0.3}
        ends = {**others, rank: end}
        machines.run(DONE, ends)
        assert not machines.run(DONE + 1).failures, ends
        assert not machines.plan().encode
        with machines.memories() as memories:
            check_parity(memories, machines.job.placement)
