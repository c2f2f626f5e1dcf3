"""Scripts that end in the middle of a step, under torchrun: who is named, with which code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.warm_starts import Home, home

ROOT = Path(__file__).resolve().parents[2]

ENDS = """
import logging, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist
import ecemb

logging.basicConfig(format="%(levelname)s %(message)s")
arenas, how = sys.argv[1:]
ecemb.init_process_group("gloo", job="ends", arena_dir=arenas)
model = torch.nn.ModuleDict({"table": ecemb.nn.ShardedEmbeddingBag(50, 8, device="meta", name="table")})
sparse = torch.optim.Adagrad(model["table"].parameters(), lr=0.1)
guard = ecemb.protect(model, optimizers=[sparse], code=ecemb.Code(n=2, k=1), failure_domain="rank")
rank = dist.get_rank()
if "blocked" in how:
    ThreadPoolExecutor(1).submit(threading.Event().wait)
while True:
    with guard.step() as step:
        sparse.zero_grad()
        model["table"](torch.randint(0, 50, (16, 3))).square().sum().backward()
        sparse.step()
        if step.number == 2 and rank == 0 and "exit" in how:
            sys.exit(3)
        if step.number == 2 and rank == 0 and "raise" in how:
            raise ValueError("of rank 0")
    if step.number == 2 and "gone" in how:
        if rank == 1:
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(3))
"""


@pytest.fixture
def place() -> Iterator[Home]:
    with home() as made:
        made.write("ends.py", ENDS)
        yield made


def launch(place: Home, how: str, monitor_s: float) -> tuple[str, dict[str, Any]]:
    """The log of a launch that fails, and the error files by local rank."""
    options = ["--standalone", "--nproc-per-node=2", "--log-dir=logs", f"--monitor-interval={monitor_s}"]
    code, _, log = place.run(
        [sys.executable, "-m", "torch.distributed.run", *options, "ends.py", str(place.arena_dir), how],
        changed={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert code == 1, log
    files = {
        path.parent.name: json.loads(path.read_text())["message"] for path in place.folder.rglob("error.json")
    }
    return log, files


def test_sys_exit_in_a_step_is_the_cause_and_keeps_its_code(place: Home) -> None:
    log, files = launch(place, "exit blocked", 0.1)
    summary = log.partition("Root Cause")[2]
    assert "rank      : 0 (local_rank: 0)" in summary and "exitcode  : 3 " in summary, log
    assert files["0"]["message"] == "SystemExit: 3", log
    assert "a step of this rank failed by SystemExit: 3" in log
    assert "PeerFailure: rank 1" not in log
    assert log.count("job ends was not closed") == 1


def test_a_forced_end_says_that_the_memory_stays(place: Home) -> None:
    """torchrun looks after its workers more rarely than that."""
    log, files = launch(place, "raise blocked", 30)
    assert log.count("can't end by itself within 10 s") == 1, log
    assert log.count("job ends was not closed") == 1, log
    assert files["0"]["message"] == "ValueError: of rank 0"


def test_a_collective_of_the_scripts_fails_in_one_line_when_its_peer_has_died(place: Home) -> None:
    log, files = launch(place, "gone", 30)
    own = log.partition("torch/distributed/")[0]  # before torchrun's own report
    assert "rank 1 (host" in own and ") died; " in own and "Traceback" not in own, log
    message = files["0"]["message"]
    assert "rank 1 (host" in message and ") died; " in message
