"""Lost blocks rebuilt in many small pieces, of which several are on their way at once."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ecemb.recovery import rebuild
from support.simulation import Machines, Wires, job_of

DONE = 2


@pytest.mark.parametrize("words", [1, 3, 64, 1 << 19])
@pytest.mark.parametrize("shape", [(2, 1, 2), (3, 2, 3), (4, 2, 4), (3, 1, 4), (4, 3, 5)])
def test_every_choice_of_ranks_is_rebuilt_in_pieces(
    shape: tuple[int, int, int], words: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(rebuild, "CHUNK_WORDS", words)
    monkeypatch.setattr(rebuild, "TOGETHER", 3)
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
    monkeypatch.setattr(rebuild, "CHUNK_WORDS", 5)
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
