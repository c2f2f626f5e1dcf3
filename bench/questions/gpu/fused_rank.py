"""One rank of a training of TorchRec's tables on a GPU, in which ranks are killed. The script of `fused`.

In each life but the last, one rank is killed in the middle of a step, after its backward pass has changed
rows on the device; in the first life it also removes its arena. The last life writes a hash of all that was
trained.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ecemb
from bench.harness.devices import begin, settle
from bench.questions.gpu.windows import drawn_on
from bench.workloads.models import torchrec_twin
from bench.workloads.training_rank import Order, digest, protect

STEPS = 24
KILLED_IN = (7, 16)
"""The step of each life in which a rank is killed; with its memory in the first one."""


def train(order: Order, kills: int, folder: Path) -> None:
    """All steps of a life."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    device = begin(order.device, int(os.environ["RANK"])) or "cpu"
    ecemb.init_process_group(order.backend, job=order.job, arena_dir=order.arena_dir)
    rank = dist.get_rank()
    torch.manual_seed(order.seed)
    twin = torchrec_twin(order.tables, order.rows, order.dim, order.dense, device)
    batches = drawn_on(device, order, rank, 6)
    guard = protect(twin, order)
    with (folder / f"lives.{rank}").open("a") as lives:
        print(json.dumps({"life": life, "resumes": guard.next_step, "lost": guard.recovery.lost}), file=lives)
    while guard.next_step < STEPS:
        with guard.step() as step:
            twin.train(batches[step.number % len(batches)])
            if life < kills and step.number == KILLED_IN[life] and rank == 1 + life:
                settle(order.device)
                if life == 0:
                    guard._memory.arena.remove()
                (folder / f"killed.{life}").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
        stepped = folder / f"stepped.{life}.{rank}"
        if not stepped.exists():
            settle(order.device)
            stepped.write_text(str(time.time()))
    guard._drain()
    (folder / f"digest.{rank}").write_text(digest(twin.tensors()))
    guard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text())
    train(Order(**told["order"]), told["kills"], Path(sys.argv[1]).parent)
