"""A training that ends by an exception. Started by torchrun.

    ending_worker.py FOLDER HOW [record]

HOW is `misfit`, a code that doesn't fit the ranks: the same at each start; or `raise`, in a step of rank 1,
which then takes longer than the others to end.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

import ecemb


def train(folder: Path, how: str) -> None:
    (folder / f"start.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}").touch()
    ecemb.init_process_group("gloo", job="ending", arena_dir=folder)
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.ModuleDict({"bag": ecemb.nn.ShardedEmbeddingBag(30, 4)})
    sparse = torch.optim.SGD(model.parameters(), lr=0.1)
    code = ecemb.Code(9, 8) if how == "misfit" else ecemb.Code(3, 2)
    guard = ecemb.protect(model, optimizers=[sparse], code=code)
    if rank == 1:
        atexit.register(time.sleep, 3.0)
    for _ in range(5):
        with guard.step() as step:
            sparse.zero_grad()
            model["bag"](torch.randint(30, (4, 2))).square().sum().backward()
            sparse.step()
            if step.number == 2 and rank == 1:
                raise ValueError("the first error of all")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    run = record(train) if "record" in sys.argv else train
    run(Path(sys.argv[1]), sys.argv[2])
