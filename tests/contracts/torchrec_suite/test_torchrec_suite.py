"""TorchRec's own model-parallel tests pass under protection, and what it shows and saves is the same.

Of its tests, one case of each, another one with another `--seed`. `python tests/contracts/torchrec_suite`
runs all of them, and docs/torchrec.md lists them.
"""

from __future__ import annotations

import importlib.metadata
import random

import pytest

from contracts.torchrec_suite.cases import CASES, Case, load, run
from contracts.torchrec_suite.forks import fork_ranks
from contracts.torchrec_suite.same import compare
from support.processes import run_ranks

TESTS = sorted({case.test for case in CASES})
DATA_TYPES = ("FP32", "FP16")


@pytest.fixture(scope="module")
def outcomes(run_seed: int) -> dict[str, str]:
    """What failed in each, "" if nothing did; TorchRec is imported once for all, in another process."""
    try:
        importlib.metadata.version("torchrec")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchrec is not installed")
    draw = random.Random(run_seed)
    chosen = [draw.choice([case for case in CASES if case.test == test]) for test in TESTS]
    (results,) = run_ranks(1, _run, chosen, group=False, deadline_s=1150)
    return results


def _run(_rank: int, chosen: list[Case]) -> dict[str, str]:
    load()
    found = {kind: fork_ranks(2, compare, kind) for kind in DATA_TYPES}
    return found | {case.test: failure and f"{case}\n{failure}" for case, failure in run(chosen).items()}


@pytest.mark.parametrize("test", TESTS)
def test_a_test_of_torchrec_passes_under_protection(test: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[test], outcomes[test]


@pytest.mark.parametrize("data_type", DATA_TYPES)
def test_what_is_shown_and_saved_is_the_same(data_type: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[data_type], outcomes[data_type]
