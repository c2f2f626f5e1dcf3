"""The examples end with the same bits, and say the same of it, started by python and by `ecemb-run`."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.warm_starts import Home, home

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {  # ranks, arguments, what it imports
    "by_hand": (2, "--steps 6 --users 40 --items 30 --lines 96 --dim 4 --batch 8", "torch"),
    "loaders": (2, "--steps 6 --lines 60 --rows 50 --batch 6 --workers 2", "torchdata"),
    "lightning_bags": (2, "--epochs 1 --lines 38 --rows 50 --batch 4", "pytorch_lightning"),
    "torchrec_dlrm": (4, "--steps 4 --batch 8", "torchrec"),
}
LONG = ("by_hand", "loaders", "torchrec_dlrm")  # the last one is also killed, in test_examples_torchrec


def digests(here: Home, name: str, job: str, command: list[str]) -> list[str]:
    """The lines with digests that a training's ranks print."""
    ranks, arguments, _ = SCRIPTS[name]
    launch = [f"--nproc-per-node={ranks}", "--monitor-interval=0.01", "--max-restarts=1"]
    script = [str(ROOT / "examples" / f"{name}.py"), *arguments.split(), "--job", job]
    code, out, err = here.torchrun(*launch, *command, *script, changed={"OMP_NUM_THREADS": "1"})
    assert code == 0, err
    assert "starts cold" not in err
    return sorted(line for line in out.splitlines() if "digest" in line)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in SCRIPTS]
)
def test_an_example_ends_with_the_same_bits_cold_and_warm(name: str) -> None:
    if find_spec(SCRIPTS[name][2]) is None:
        pytest.skip(f"needs {SCRIPTS[name][2]} (CONTRIBUTING.md)")
    jobs = [f"warm-examples-{uuid.uuid4().hex}" for _ in range(2)]
    with home() as here:
        try:
            cold = digests(here, name, jobs[0], [sys.executable])
            warm = digests(here, name, jobs[1], here.command(options=()))
        finally:
            for job in jobs:
                shutil.rmtree(f"/dev/shm/ecemb-{os.geteuid()}/{job}", ignore_errors=True)
    assert cold and warm == [line.replace(jobs[0], jobs[1]) for line in cold]
