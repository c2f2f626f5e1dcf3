"""A training in which a rank makes another call than the rest. Started by torchrun.

    straggler_worker.py FOLDER HOW

HOW is `save`: rank 0 alone saves after the second step; or `short`: rank 1 ends after the second step.
No wait is long for the ranks before all of them wait where this leaves them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ecemb
from ecemb.net import watch, worker_exit

RANKS = 3


def await_all(folder: Path, how: str, rank: int) -> None:
    """Beside the training: once all ranks wait where they hang, waits soon count as long."""
    one, place = {"save": (0, "in guard.save()"), "short": (1, "in guard.close()")}[how]
    expected, where = place if rank == one else "at the end of step 2", worker_exit.hook.activity
    while not (where.place.startswith(expected) and where.waited_s > 0):
        time.sleep(0.01)
    (folder / f"there.{rank}").touch()
    while len(list(folder.glob("there.*"))) < RANKS:
        time.sleep(0.01)
    watch.WAIT_S = 1.0


def train(folder: Path, how: str) -> None:
    watch.WAIT_S = watch._ANSWER_S = 1e6
    ecemb.init_process_group("gloo", job="straggler", arena_dir=folder)
    rank = dist.get_rank()
    threading.Thread(target=await_all, args=(folder, how, rank), daemon=True).start()
    torch.manual_seed(1)
    model = nn.ModuleDict({"bag": ecemb.nn.ShardedEmbeddingBag(30, 4)})
    sparse = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = ecemb.protect(model, optimizers=[sparse], code=ecemb.Code(3, 2))
    for _ in range(2 if (how, rank) == ("short", 1) else 5):
        with guard.step() as step:
            sparse.zero_grad()
            torch.ones(4, 4, requires_grad=True).sum().backward()
            if step.number < 2:  # whose lookup and backward all ranks take part in
                model["bag"](torch.randint(30, (4, 2))).square().sum().backward()
                sparse.step()
        if how == "save" and rank == 0 and step.number == 1:
            guard.save(folder / "checkpoints")
    guard.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    train(Path(sys.argv[1]), sys.argv[2])
