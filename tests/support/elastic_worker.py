"""One rank of a training that goes on with another number of ranks, launch after launch.

    elastic_worker.py ROOT WAY LAUNCH HOSTS END [LOST]

The workers of a launch are on HOSTS (names with commas between them), in equal runs. With WAY "elastic", the
next launch finds the memory of this one: in step END, host LOST loses its memory and its processes. With
"durable", each launch saves after END steps, and the next one resumes under another job's name. The state
that a launch began with is in {WAY}-{LAUNCH}.begins; that of its end, unless a host was lost, in
{WAY}-{LAUNCH}.ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ecemb
from support.moves import everything

SIZES = {"users": (1001, 8), "tags": (307, 5), "few": (3, 4)}
CODES = [ecemb.Code(3, 2), ecemb.Code(2, 1)]  # the first on three hosts of two ranks, the other on two


def main(root: Path, way: str, launch: str, hosts: list[str], end: int, lost: str) -> None:
    host = hosts[int(os.environ["RANK"]) * len(hosts) // int(os.environ["WORLD_SIZE"])]
    job = "elastic" if way == "elastic" else f"durable-{launch}"
    ecemb.init_process_group("gloo", job=job, arena_dir=root, host=host)
    torch.manual_seed(1)
    tables = {name: ecemb.nn.ShardedEmbeddingBag(*size, device="meta") for name, size in SIZES.items()}
    head = nn.Linear(17, 1)
    model = nn.ModuleDict({**tables, "head": head})
    sparse = torch.optim.Adagrad([tables["users"].weight, tables["few"].weight], lr=0.1)
    adam = torch.optim.SparseAdam([tables["tags"].weight], lr=0.1)
    dense = torch.optim.Adam(head.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(dense, 0.9)
    torch.manual_seed(100 + dist.get_rank())
    more: dict[str, Any] = {"elastic": True}
    if way == "durable":
        more["resume"] = root / "saved"
    guard = ecemb.protect(
        model, optimizers=[sparse, adam, dense], code=CODES, state={"schedule": schedule}, **more
    )
    if dist.get_rank() == 0:
        print(f"{launch}: {guard.recovery}", flush=True)
    keep(root / f"{way}-{launch}.begins", guard, everything(model, head, dense))
    while way == "elastic" or guard.next_step < end:
        with guard.step() as step:
            for optimizer in (sparse, adam, dense):
                optimizer.zero_grad()
            bags = [tables[name](torch.randint(rows, (6, 3))) for name, (rows, _) in SIZES.items()]
            head(torch.cat(bags, 1)).square().mean().backward()
            for parameter in head.parameters():
                dist.all_reduce(parameter.grad)
            if step.number == end:
                break_off(root / f"ecemb-{os.geteuid()}" / job / host, host == lost)
            for optimizer in (sparse, adam, dense):
                optimizer.step()
            schedule.step()
        if not lost and guard.next_step == end:
            break
    keep(root / f"{way}-{launch}.ends", guard, everything(model, head, dense))
    if way == "durable":
        guard.save(root / "saved")
    guard.close()
    dist.destroy_process_group()


def break_off(folder: Path, is_lost: bool) -> None:
    """In the middle of a step: a host is gone with its memory."""
    if is_lost:
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)


def keep(path: Path, guard: ecemb.Guard, found: dict[str, torch.Tensor]) -> None:
    if dist.get_rank() == 0:
        torch.save({"step": torch.tensor(guard.next_step), **found}, path)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    main(
        Path(sys.argv[1]),
        *sys.argv[2:4],
        sys.argv[4].split(","),
        int(sys.argv[5]),
        sys.argv[6] if len(sys.argv) > 6 else "",
    )
