"""The training of `worker.py` as a host's worker runs it; `hosts.py` starts its torchrun agents.

    host_worker.py FOLDER ARENA_DIR HOST[,HOST...]

Of several hosts, workers take one each by torchrun's RANK, in equal runs: an undisturbed run needs no more
than one agent. FOLDER holds the plan, and receives traces and results.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch

import ecemb
from ecemb.net.collectives import Transport
from failures.plan import Plan
from failures.trace import Opened, Trace
from failures.worker import train


def held(folder: Path) -> float:
    """The step past which the driver lets no worker go."""
    try:
        return int((folder / "hold").read_text())
    except FileNotFoundError:
        return math.inf


def opening(guard: ecemb.Guard, agent: str, host: str, worker: int) -> Opened:
    """How the memory of this process was opened."""
    done = guard.recovery
    return Opened(
        pid=os.getpid(),
        agent=agent,
        host=host,
        worker=worker,
        rank=int(os.environ["RANK"]),
        kind=done.kind,
        next_step=done.step,
        lost=done.lost,
        rebuilt_bytes=done.rebuilt_bytes,
    )


def reach(trace: Trace, step: int, folder: Path) -> None:
    """Notes a step, and waits while the driver holds it."""
    trace.reach(step)
    while step >= held(folder):
        time.sleep(0.01)


def hold_fills(folder: Path) -> None:
    """Keep a start with new arenas, when its own is prepared, until the driver lets it go LIVE."""
    barrier = Transport.barrier

    def held_barrier(self: Transport, what: str) -> None:
        while what == "the initial state" and (folder / "hold_fills").exists():
            (folder / f"filled-{os.getpid()}").touch()
            time.sleep(0.01)
        barrier(self, what)

    Transport.barrier = held_barrier


def main(folder: Path, arena_dir: str, hosts: list[str]) -> None:
    plan = Plan.read(folder / "plan.json")
    worker = int(os.environ["RANK"])
    host = hosts[worker * len(hosts) // plan.setting.ranks] if len(hosts) > 1 else hosts[0]
    saves = int(os.environ["ECEMB_SAVES"])
    traces: list[Trace] = []
    hold_fills(folder)

    def say(guard: ecemb.Guard, step: int) -> None:
        if not traces:
            opened = opening(guard, os.environ["ECEMB_AGENT"], host, worker)
            traces.append(Trace.create(folder / "traces", opened))
        reach(traces[0], step, folder)

    train(
        plan.setting,
        folder / "results",
        arena_dir,
        host=host,
        failure_domain="host",
        timeout_s=float(os.environ["ECEMB_TIMEOUT_S"]),
        say=say,
        checkpoints=folder / "checkpoints" if saves else None,
        saves=saves,
    )


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(name)s: %(message)s")
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    try:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","))
    except ecemb.errors.JobFinished:  # killed while it was closing: its results are there
        logging.info("the job is finished")
