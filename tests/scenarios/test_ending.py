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
import logging, os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
import torch.distributed as dist
import ecemb
from ecemb.net import worker_exit

logging.basicConfig(format="%(levelname)s %(message)s")
arenas, how = sys.argv[1:]
worker_exit.GRACE_S = 1
ecemb.init_process_group("gloo", job=how, arena_dir=arenas)
model = torch.nn.ModuleDict({"table": ecemb.nn.ShardedEmbeddingBag(50, 8, device="meta", name="table")})
sparse = torch.optim.Adagrad(model["table"].parameters(), lr=0.1)
guard = ecemb.protect(model, optimizers=[sparse], code=ecemb.Code(n=2, k=1), failure_domain="rank")
rank = dist.get_rank()
if rank == 0 and "exit" not in how:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends it, when the other has ended
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


@pytest.fixture(scope="module")
def place() -> Iterator[Home]:
    with home() as made:
        made.environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        made.write("ends.py", ENDS)
        yield made


def launch(place: Home, how: str, *, warm: bool) -> tuple[str, dict[str, Any]]:
    """The log of a launch that fails, and the error files by local rank."""
    logs, start = place.folder / how, place.command(options=["--no-replace"]) if warm else [sys.executable]
    options = ["--nproc-per-node=2", f"--log-dir={logs}", "--monitor-interval=0.05"]
    code, _, log = place.torchrun(*options, *start, "ends.py", str(place.arena_dir), how)
    assert code == 1, log
    return log, {
        path.parent.name: json.loads(path.read_text())["message"] for path in logs.rglob("error.json")
    }


def test_sys_exit_in_a_step_is_the_cause_and_keeps_its_code(place: Home) -> None:
    log, files = launch(place, "exit-blocked", warm=False)
    summary = log.partition("Root Cause")[2]
    assert "rank      : 0 (local_rank: 0)" in summary and "exitcode  : 3 " in summary, log
    assert files["0"]["message"] == "SystemExit: 3", log
    assert "a step of this rank failed by SystemExit: 3" in log
    assert "PeerFailure: rank 1" not in log
    assert log.count("job exit-blocked was not closed") == 1


def test_a_forced_end_says_that_the_memory_stays(place: Home) -> None:
    log, files = launch(place, "raise-blocked", warm=True)
    assert log.count("can't end by itself within 1 s") == 1, log
    assert log.count("job raise-blocked was not closed") == 1, log
    assert files["0"]["message"] == "ValueError: of rank 0"


def test_a_collective_of_the_scripts_fails_in_one_line_when_its_peer_has_died(place: Home) -> None:
    log, files = launch(place, "gone", warm=True)
    own = log.partition(" failed (exitcode")[0]  # before torchrun's own report
    assert "rank 1 (host" in own and ") died; " in own and "Traceback" not in own, log
    message = files["0"]["message"]
    assert "rank 1 (host" in message and ") died; " in message
