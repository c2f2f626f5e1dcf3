"""One rank of a training that goes on with the hosts that are there, under torchrun's own elasticity.

    agents_worker.py ROOT HOST STEPS

Each rank keeps its arena below ROOT/HOST. At the end of each step's body the state goes to {step}.state, and
what a start began with to {step}-{ranks}.begins. The file `hold` has the step in which all wait.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ecemb
from support.moves import everything

SIZES = {"users": (101, 8), "tags": (37, 5)}
CODES = [ecemb.Code(3, 2), ecemb.Code(2, 1)]


def held(root: Path) -> float:
    """The step in which all ranks wait."""
    try:
        return int((root / "hold").read_text())
    except FileNotFoundError:
        return math.inf


def keep(root: Path, name: str, found: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        torch.save(found, root / f"{name}.new")
        (root / f"{name}.new").rename(root / name)


def main(root: Path, host: str, steps: int) -> None:
    ecemb.init_process_group("gloo", job="agents", arena_dir=root / host, host=host)
    torch.manual_seed(1)
    tables = {name: ecemb.nn.ShardedEmbeddingBag(*size, device="meta") for name, size in SIZES.items()}
    head = nn.Linear(13, 1)
    model = nn.ModuleDict({**tables, "head": head})
    sparse = torch.optim.Adagrad([table.weight for table in tables.values()], lr=0.1)
    dense = torch.optim.Adam(head.parameters(), lr=0.01)
    guard = ecemb.protect(model, optimizers=[sparse, dense], code=CODES, elastic=True)
    ranks, begins = dist.get_world_size(), guard.next_step
    keep(root, f"{begins}-{ranks}.begins", everything(model, head, dense))
    while guard.next_step < steps:
        with guard.step() as step:
            sparse.zero_grad()
            dense.zero_grad()
            bags = [tables[name](torch.randint(rows, (6, 3))) for name, (rows, _) in SIZES.items()]
            head(torch.cat(bags, 1)).square().mean().backward()
            for parameter in head.parameters():
                dist.all_reduce(parameter.grad)
            sparse.step()
            dense.step()
            keep(root, f"{step.number + 1}.state", everything(model, head, dense))
            name = f"{step.number}-{ranks}-{host}-{os.environ['LOCAL_RANK']}.trains"
            (root / f"{name}.new").write_text(str(os.getpid()))
            (root / f"{name}.new").rename(root / name)
            while step.number >= held(root):
                time.sleep(0.01)
    guard.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {os.getpid()} %(name)s: %(message)s")
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, without its warning
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
