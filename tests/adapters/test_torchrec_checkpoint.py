"""Checkpoints of TorchRec's tables come back with the same ranks, and with others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "torchrec_checkpoint_worker.py"


def run(ranks: int, job: str, root: Path, end: int) -> dict[str, dict[str, torch.Tensor]]:
    command = [sys.executable, "-W", "ignore", "-m", "forked", "torchrec_preload"]
    root.mkdir(exist_ok=True)
    command += ["--nproc-per-node", str(ranks), str(WORKER), job, str(root), str(end)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(WORKER.parent)]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.suffix[1:]: torch.load(path) for path in root.glob(f"{job}.*")}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_checkpoint_is_resumed_with_as_many_ranks_and_with_others(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    undisturbed = run(3, "undisturbed", tmp_path / "a", 4)
    saved = run(3, "first", tmp_path / "b", 2)
    same = run(3, "second", tmp_path / "b", 4)
    assert_same(same["begins"], saved["ends"])
    assert_same(same["ends"], undisturbed["ends"])
    fewer = run(2, "third", tmp_path / "b", 5)
    assert_same(fewer["begins"], same["ends"])
