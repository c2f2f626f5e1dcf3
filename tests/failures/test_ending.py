"""How a real job ends by an exception: torchrun names the first error, and stops restarting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from failures.driver import ROOT

DEADLINE_S = 600.0
RANKS = 3


def launched(folder: Path, *arguments: str, restarts: int) -> str:
    """What a launch that fails has written."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}", "--monitor-interval=0.05"]
    command += [str(Path(__file__).with_name("ending_worker.py")), str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == 1, ended.stderr
    return ended.stdout + ended.stderr


def test_an_error_that_comes_again_is_said_once_and_waited_after(tmp_path: Path) -> None:
    log = launched(tmp_path, "misfit", restarts=3)
    assert len(list(tmp_path.glob("start.*.0"))) == 4
    again = re.findall(r"ERROR (start \d in a row that ends by PlacementError, next in \d s): .+", log)
    assert again == [
        f"start {n} in a row that ends by PlacementError, next in {2 ** (n - 1)} s" for n in (2, 3)
    ]
    starts = re.split(r"ERROR start \d in a row", log)
    assert len(starts) == 3 and not re.search(r"Traceback|errors.PlacementError: ", starts[1], re.MULTILINE)
    assert re.search(r"^\[rank0\]: ecemb.errors.PlacementError: ", starts[0], re.MULTILINE)
    last = starts[2].partition("Root Cause")
    assert re.search(
        r"^\[rank0\]: ecemb.errors.PlacementError: ", last[0], re.MULTILINE
    )  # nobody starts again
    assert "PlacementError: " in last[2]
    assert all(len(line) < 200 for line in log.splitlines() if line.startswith("ERROR start"))


@pytest.mark.parametrize("decorated", [False, True])
def test_the_first_error_is_the_root_cause_whoever_ends_first(decorated: bool, tmp_path: Path) -> None:
    log = launched(tmp_path, "raise", *(["record"] if decorated else []), restarts=0)
    root = log.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"^  rank      : 1 ", root, re.MULTILINE), log
    assert "ValueError: the first error of all" in root
    assert "line " in root and "ending_worker.py" in root
