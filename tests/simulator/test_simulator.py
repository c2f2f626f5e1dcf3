"""Some seeds of the simulator, and the defects that it finds in a few. `make simulator` runs more."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_each_defect_has_a_seed_or_a_test() -> None:
    """`python tests/simulator defects` has searched for each, and writes the seeds."""
    seeds = json.loads(defects.FOUND.read_text())
    assert sorted([*seeds, *defects.TESTS]) == sorted(defects.DEFECTS)
    assert all(
        (Path(__file__).parents[2] / test.partition("::")[0]).is_file() for test in defects.TESTS.values()
    )
