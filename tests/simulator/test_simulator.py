"""Some seeds of the simulator, and the defects that it finds in a few. `make simulator` runs more."""

from __future__ import annotations

import pytest

from simulator import defects, job

SEEDS = range(100)


@pytest.mark.slow
@pytest.mark.parametrize("number", SEEDS)
def test_a_job_ends_as_its_twin(number: int) -> None:
    job.run(number)


@pytest.mark.slow
def test_a_run_follows_from_its_seed() -> None:
    runs = [job.run(3) for _ in range(2)]
    assert len({(one.baton.trace, one.baton.moments, one.lives) for one in runs}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["no_agreement", "inbox_is_not_sealed", "no_undo", "failed_collective_counts"]
)
def test_a_planted_defect_is_found(name: str) -> None:
    assert defects.search(defects.DEFECTS[name], SEEDS) is not None
