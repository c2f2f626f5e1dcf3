"""Jobs of TorchRec under torchrun, and what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]


def run(
    worker: str, ranks: int, job: str, root: Path, end: int, *more: str
) -> dict[str, dict[str, torch.Tensor]]:
    """Runs a script of this folder with these arguments; returns what it saved as `{job}.{name}`."""
    path = Path(__file__).with_name(worker)
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "support.forked_torchrun",
        "support.torchrec.fork_server_imports",
    ]
    root.mkdir(exist_ok=True)
    command += ["--nproc-per-node", str(ranks), str(path), job, str(root), str(end), *more]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return {path.suffix[1:]: torch.load(path) for path in root.glob(f"{job}.*")}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
