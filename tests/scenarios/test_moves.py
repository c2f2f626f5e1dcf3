"""`ecemb move`: a running job leaves, and another launch with other ranks goes on with its bits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from support import moves
from support.torchrec.checkpoint_runs import ROOT, assert_same

DEADLINE_S = 600.0
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
    "OMP_NUM_THREADS": "1",
}


def torchrun(root: Path, store: str, launch: str, ranks: int, steps: int = 0) -> list[str]:
    """The command that launches the training."""
    worker = ROOT / "tests/support/moving_worker.py"
    return [
        *(sys.executable, "-W", "ignore", "-m", "support.forked_torchrun", "support.moving_imports"),
        *("--nproc-per-node", str(ranks), str(worker), launch, str(root), store, str(steps)),
    ]


def started(command: list[str], root: Path, name: str) -> subprocess.Popen[str]:
    """The command as a process, with its output in a file."""
    with (root / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, text=True)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, path
        time.sleep(0.1)


@pytest.mark.parametrize("store", [pytest.param("folder", marks=pytest.mark.long), "durable"])
def test_a_job_moves_from_4_to_6_to_2_ranks_with_the_same_bits(store: str, tmp_path: Path) -> None:
    root, running = tmp_path, []
    move = [sys.executable, "-m", "ecemb", "move", "--job", "moving", "--arena-dir", str(root), "--"]
    try:
        first = started(torchrun(root, store, "first", 4), root, "first")
        running.append(first)
        wait_for(root / "first.running", first)
        second = started([*move, *torchrun(root, store, "second", 6)], root, "second")
        running.append(second)
        assert first.wait(DEADLINE_S) == 0, (root / "first.log").read_text()[-3000:]
        wait_for(root / "second.running", second)
        third = started([*move, *torchrun(root, store, "third", 2, 3)], root, "third")
        running.append(third)
        for name, process in (("second", second), ("third", third)):
            assert process.wait(DEADLINE_S) == 0, (root / f"{name}.log").read_text()[-3000:]
    finally:
        for process in running:
            moves.end(process)
    found = {path.name: torch.load(path) for path in root.glob("*.begins")}
    found |= {path.name: torch.load(path) for path in root.glob("*.ends")}
    assert found["first.begins"]["step"] == 0 and found["first.ends"]["step"] >= 4
    assert_same(found["second.begins"], found["first.ends"])
    assert_same(found["third.begins"], found["second.ends"])
    assert found["third.ends"]["step"] == found["second.ends"]["step"] + 3
    assert not list(root.rglob("*.arena")) and not list(root.rglob("leave"))
    assert "has left this machine" in (root / "second.log").read_text()
