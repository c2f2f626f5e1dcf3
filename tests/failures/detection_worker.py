"""A training that `test_detection.py` disturbs. Started by torchrun.

    detection_worker.py FOLDER SILENCE_S

The first start is slow in its first step; each start waits in the step after its third for the file
`FOLDER/go.START`. Each rank says where it is in `FOLDER/START.RANK`: its pid, and its step.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ecemb
from ecemb.net import rendezvous

STEPS = 12


def slow(seconds: float) -> None:
    """Busy for a second, then in a call that keeps the interpreter's lock."""
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pass
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def train(folder: Path, silence_s: float) -> None:
    start = int(os.environ["DETECTION_FIRST"]) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    detector_type = rendezvous.FailureDetector

    def detector(links: Any, index: int, names: Any, _: float, *rest: Any) -> Any:
        return detector_type(links, index, names, silence_s, *rest)

    # The rendezvous keeps its own deadline: a start takes long on a busy machine.
    rendezvous.FailureDetector = detector
    ecemb.init_process_group("gloo", job="detection", arena_dir=folder)
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.ModuleDict({"bag": ecemb.nn.ShardedEmbeddingBag(30, 4), "head": nn.Linear(4, 1)})
    sparse = torch.optim.SGD([model["bag"].weight], lr=0.1)
    dense = torch.optim.SGD(model["head"].parameters(), lr=0.1)
    guard = ecemb.protect(model, optimizers=[sparse, dense], code=ecemb.Code(2, 1))
    first = guard.next_step
    for _ in range(first, STEPS):
        with guard.step() as step:
            (folder / f"{start}.{rank}").write_text(f"{os.getpid()} {step.number}")
            if step.number == 0 and start == 0 and rank == 1:
                slow(1.25 * silence_s)
                logging.warning("was slow")
            if step.number == first + 3 and rank == 0:
                while not (folder / f"go.{start}").exists():
                    time.sleep(0.01)
            sparse.zero_grad()
            dense.zero_grad()
            model["head"](model["bag"](torch.randint(30, (4, 2)))).square().sum().backward()
            for parameter in model["head"].parameters():
                dist.all_reduce(parameter.grad)
            sparse.step()
            dense.step()
    guard.close()
    (folder / f"done.{rank}").touch()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(created)f %(levelname)s %(message)s")
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    train(Path(sys.argv[1]), float(sys.argv[2]))
