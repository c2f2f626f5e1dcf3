"""One rank of a training that leaves when it is asked to, and goes on from where it was saved.

    moving_worker.py LAUNCH ROOT STORE STEPS

Runs STEPS steps (0: until it is asked to leave), and says by a file {LAUNCH}.running that it trains. What it
began with, and what it ended with, are in {LAUNCH}.begins and {LAUNCH}.ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ecemb
from support.moves import everything, store_of

JOB = "moving"


def main(launch: str, root: Path, kind: str, steps: int) -> None:
    ecemb.init_process_group("gloo", job=JOB, arena_dir=root, host=launch)  # each launch is on another host
    torch.manual_seed(1)
    sizes = {"users": (37, 8), "tags": (5, 4)}
    tables = {name: ecemb.nn.ShardedEmbeddingBag(*size, device="meta") for name, size in sizes.items()}
    head = nn.Linear(12, 1)
    model = nn.ModuleDict({**tables, "head": head})
    sparse = torch.optim.Adagrad([table.weight for table in tables.values()], lr=0.1)
    dense = torch.optim.Adam(head.parameters(), lr=0.01)
    store = store_of(kind, root)
    guard = ecemb.protect(
        model, optimizers=[sparse, dense], code=ecemb.Code(2, 1), failure_domain="rank", resume=store
    )
    first = guard.next_step
    keep(root, f"{launch}.begins", first, everything(model, head, dense))
    while not steps or guard.next_step < first + steps:
        with guard.step() as step:
            drawn = torch.Generator().manual_seed(100 * step.number + dist.get_rank())
            sparse.zero_grad()
            dense.zero_grad()
            ids = {name: torch.randint(rows, (6, 3), generator=drawn) for name, (rows, _) in sizes.items()}
            head(torch.cat([tables[name](ids[name]) for name in sizes], 1)).square().mean().backward()
            for parameter in head.parameters():
                dist.all_reduce(parameter.grad)
            sparse.step()
            dense.step()
        if guard.next_step == first + 2:
            guard.save(store)
        if guard.next_step == first + 4 and dist.get_rank() == 0:
            (root / f"{launch}.running").touch()
        if is_asked := guard.asked_to_leave():
            break
    keep(root, f"{launch}.ends", guard.next_step, everything(model, head, dense))
    if is_asked:
        guard.leave(store)
    guard.close()  # nothing, if the job has left
    dist.destroy_process_group()


def keep(root: Path, name: str, step: int, found: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        torch.save({"step": torch.tensor(step), **found}, root / name)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
