"""One fresh seed for each run of the tests, printed; `--seed` repeats a run."""

from __future__ import annotations

import gc
import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions are made


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=None,
        help="seed of every random choice in the tests (default: a new one)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**31)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (repeat with --seed {config.option.seed})"


def pytest_collection_finish() -> None:
    """What is there by now stays: tests that collect garbage need not go through all of it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed: from the run's seed and the test's name, whatever ran before it."""
    value = random.Random(f"{request.config.option.seed}:{request.node.nodeid}").randrange(2**31)
    print(f"seed of this test: {value}")
    return value
