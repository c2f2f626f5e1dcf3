"""One rank that trains a TorchRec model under Check-N-Run, from its last checkpoint on."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ecemb
from baselines.check_n_run.recovery import CheckNRun
from baselines.method import Training
from support.torchrec.checkpoint_worker import batch, build, whole


def main(job: str, root: Path, end: int) -> None:
    ecemb.init_process_group("gloo", job=job, arena_dir=root)
    model = build()
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if "over" in n or "t3" in n], lr=0.01)
    method = CheckNRun(root / "saved", root / "memory", policy="one_shot", every=1, process=False)
    begin = method.prepare(Training(model, [model.fused_optimizer, dense]))
    begins = whole(model)
    if dist.get_rank() == 0 and begin:
        torch.save(begins, root / f"{job}.begins")
    for step in range(begin, end):
        with method.step():
            dense.zero_grad()
            model(batch(step)).backward()
            dense.step()
    method.close()
    ends = whole(model)
    if dist.get_rank() == 0:
        torch.save(ends, root / f"{job}.ends")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
