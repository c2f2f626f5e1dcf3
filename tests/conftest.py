"""Markers of all tests, and what many tests stand on."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from support import reach

pytest_plugins = ["support.arena_folder", "support.seeds", "support.skips"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as `&` of a script leaves it to what it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton's functions are made


BY_PATH = {
    "processes": ("unit/launch/", "unit/tools/test_check.py", "unit/tools/test_rehearse_run.py"),
    "torchrec": ("torchrec",),
    "slow": (
        "scenarios/test_undeclared.py",
        "scenarios/test_resume.py",
        "baselines/cpr/test_recovery.py",
        "baselines/float_parity/test_drift.py",
        "bench/test_cpr.py",
        "bench/test_drift.py",
        "bench/test_quantization.py",
    ),
    "long": ("failures/test_moves.py",),  # scenarios move jobs as well
}
"""Marker -> parts of paths below tests/. All tests there run scripts or commands, or take long."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Markers follow from the names that a test reaches, or from its path."""
    if not isinstance(item, pytest.Function):
        return
    names = {item.originalname, *item.fixturenames, *([item.cls.__name__] if item.cls else [])}
    where = item.path.relative_to(Path(__file__).parent).as_posix()
    by_path = {kind for kind, parts in BY_PATH.items() if any(part in where for part in parts)}
    for kind in sorted(by_path | reach.kinds(item.path, frozenset(names))):
        item.add_marker(kind)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of what changed come first, as they fail most often.

    Then those of tests that take long, so that at the end no worker waits long for another one.
    """
    slow = {one.path for one in items if any(one.get_closest_marker(kind) for kind in BY_PATH)}
    changed = _changed()
    items.sort(key=lambda item: (item.path not in changed, item.path not in slow))


def _changed() -> set[Path]:
    """Files that differ from the last commit but one, and where the tests of such a module are."""
    root = Path(__file__).parents[1]
    try:
        told = subprocess.run(
            ["git", "diff", "--name-only", "--relative", "HEAD~1"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        ).stdout.split()
    except OSError:  # no git
        return set()
    modules = [Path(name).relative_to("ecemb") for name in told if name.startswith("ecemb/")]
    tests = [root / "tests/unit" / module.with_name(f"test_{module.name}") for module in modules]
    return {*(root / name for name in told), *tests}


def pytest_collection_finish() -> None:
    """What is there by now stays: tests that collect garbage need not go through all of it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def checked_sparse_tensors() -> Iterator[None]:
    """Torch warns once, in Adagrad's step, unless its checks are switched on or off."""
    with torch.sparse.check_sparse_tensor_invariants():
        yield


@pytest.fixture
def kept_generators() -> Iterator[None]:
    """Leaves the process's generators as they were."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone, for all tests of a module."""
    from support.torchrec import models

    with models.one_rank():
        yield
