"""One rank that trains TorchRec's tables under one method after the other, run by torchrun.

    torchrun … tests/support/torchrec/methods_worker.py FOLDER METHOD ...

No method protects the first training, and no worker is killed in it. Each method's is cut off once, and goes
on in the next life of the job. What a rank ends with is FOLDER/METHOD/end.RANK.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import ecemb
from baselines.method import Training
from bench.methods.life import Failure, live
from bench.methods.registry import METHODS, Place
from bench.workloads.models import torchrec_twin
from bench.workloads.training_rank import WARM_UP, digest, draw

STEPS = 9
CLICKS = SimpleNamespace(tables=2, rows=40, lookups=2, batch=6, skew=1.0, seed=3)
FAILURE = Failure(step=6, ranks=(1,))


def train(folder: Path, name: str, failures: list[Failure]) -> None:
    """A life of a training, after steps in which DistributedDataParallel settles how it sums."""
    for part in ("files", "ledgers", "memory"):
        (folder / name / part).mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank()
    batches = draw(CLICKS, rank, STEPS + WARM_UP)
    torch.manual_seed(1)
    twin = torchrec_twin(CLICKS.tables, CLICKS.rows, 8, "small")
    for batch in batches[STEPS:]:
        twin.train(batch)
    live(
        METHODS[name](Place(folder / name / "files", folder / name / "memory" / str(rank))),
        Training(twin.model, twin.optimizers, samples=CLICKS.batch * dist.get_world_size()),
        lambda number: twin.train(batches[number]),
        STEPS,
        rank=rank,
        folder=folder / name / "ledgers",
        failures=failures,
    )
    (folder / name / f"end.{rank}").write_text(digest(twin.tensors()))


def main() -> None:
    torch.set_num_threads(1)
    folder, methods = Path(sys.argv[1]), sys.argv[2:]
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    (folder / "arenas").mkdir(exist_ok=True, mode=0o700)
    ecemb.init_process_group(
        "gloo", job="methods", arena_dir=folder / "arenas", timeout=timedelta(seconds=300)
    )
    train(folder, ["nothing", *methods][life], [])
    if life < len(methods):
        train(folder, methods[life], [FAILURE])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
