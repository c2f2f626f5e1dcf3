"""What a Slurm job of a scenario trains: the training of `failures/worker.py`, as its folder's files say.

`train.py` in the job's folder calls `main`. The folder is shared by all nodes: it has the plan, and receives
traces and results.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

import ecemb
from failures import worker
from failures.host_worker import opening, reach
from failures.plan import Plan
from failures.trace import Trace

SCRIPT = """\
from pathlib import Path

from cluster import training

training.main(Path(__file__).parent)
"""
OPTIONS = "options.json"
"""In the folder: `job`, `arena_dir` and `timeout_s`, all as `init_process_group` takes them; and `hosts`, of
which each takes an equal run of torchrun's RANK: one host stands for all. Without any, a node is a host."""
ROWS = 160
"""Of a table on each rank, at least: the training writes some of the first ones by hand."""


def prepare(
    folder: Path,
    plan: Plan,
    *,
    job: str = "undisturbed",
    arena_dir: str = "/dev/shm",
    hosts: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> None:
    """Write all that `main` reads, and the script that calls it."""
    for part in ("traces", "results"):
        (folder / part).mkdir(parents=True)
    plan.write(folder / "plan.json")
    options = {"job": job, "arena_dir": arena_dir, "hosts": list(hosts), "timeout_s": timeout_s}
    (folder / OPTIONS).write_text(json.dumps(options))
    (folder / "train.py").write_text(SCRIPT)


def results(folder: Path) -> dict[int, dict[str, str]]:
    """Rank -> what it ended with, of those that have ended."""
    return {int(path.stem): json.loads(path.read_text()) for path in (folder / "results").glob("*.json")}


def main(folder: Path) -> None:
    """Train to the end, or until killed; traces each life, and waits where the driver says."""
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    plan = Plan.read(folder / "plan.json")
    options = json.loads((folder / OPTIONS).read_text())
    traces: list[Trace] = []
    number = int(os.environ["RANK"])
    hosts = options["hosts"] or [socket.gethostname()]
    name = hosts[number * len(hosts) // plan.setting.ranks] if len(hosts) > 1 else hosts[0]
    worker.USERS = max(worker.USERS, ROWS * plan.setting.ranks)
    worker.ITEMS = max(worker.ITEMS, ROWS * plan.setting.ranks)

    def say(guard: ecemb.Guard, step: int) -> None:
        if not traces:
            here = folder / "traces" / f"{name}-{time.monotonic_ns()}-{os.getpid()}"
            here.mkdir()
            agent = os.environ.get("SLURM_JOB_ID", "")
            traces.append(Trace.create(here, opening(guard, agent, name, number)))
        reach(traces[0], step, folder)

    worker.ecemb.init_process_group = partial(_named, ecemb.init_process_group, options["job"])
    try:
        worker.train(
            plan.setting,
            folder / "results",
            options["arena_dir"],
            host=name,
            timeout_s=options["timeout_s"],
            say=say,
            checkpoints=folder / "checkpoints" if plan.saves else None,
            saves=plan.saves,
        )
    except ecemb.errors.JobFinished:  # killed while it was closing: its results are there
        return


def _named(init: object, name: str, backend: str, **options: object) -> None:
    """The job's name is the folder's, as two jobs of one node need two."""
    assert callable(init)
    init(backend, **{**options, "job": name})
