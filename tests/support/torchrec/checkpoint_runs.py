"""Jobs of TorchRec under torchrun, and what they leave."""

from __future__ import annotations

from pathlib import Path

import torch

from support import agents
from support.torchrec.runs import IMPORTS

ROOT = Path(__file__).resolve().parents[3]


def run(
    worker: str, ranks: int, job: str, root: Path, end: int, *more: str
) -> dict[str, dict[str, torch.Tensor]]:
    """Runs a script of this folder with these arguments; returns what it saved as `{job}.{name}`."""
    path = Path(__file__).with_name(worker)
    root.mkdir(exist_ok=True)
    arguments = ["--nproc-per-node", str(ranks), str(path), job, str(root), str(end), *more]
    log = root / f"{job}-log"
    code = agents.start(IMPORTS, arguments, log).wait(600)
    assert code == 0, log.read_text()[-3000:]
    return {path.suffix[1:]: torch.load(path) for path in root.glob(f"{job}.*")}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name
