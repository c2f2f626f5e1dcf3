"""Data from a DataLoader with workers, none of it lost or met twice, whenever a rank dies.

    pip install '.[examples]'
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/loaders.py

`guard.batches(loader)` takes torch's DataLoader and torchdata's StatefulDataLoader, and commits the position
in the data with the step. This one reads a stream, an IterableDataset that says where it is. Kill any worker
while it trains: the digests at the end, of the model and of all lines' numbers in their order, are those of a
run that was left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import ecemb

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=300, help="of the whole training")
parser.add_argument("--lines", type=int, default=20_000, help="of an epoch")
parser.add_argument("--rows", type=int, default=10_000, help="of the table")
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--workers", type=int, default=2, help="processes per rank that read")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="loaders", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")
parser.add_argument("--code", default="2,1", help="n,k: any n-k of n blocks may be lost")
args = parser.parse_args()


class Stream(IterableDataset[tuple[int, Tensor, float]]):
    """This rank's lines, as a file would give them: number, ids, click. Workers take turns."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.next = 0

    def __iter__(self) -> Iterator[tuple[int, Tensor, float]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = range(self.rank * workers + worker, args.lines, self.ranks * workers)
        while self.next < len(mine):
            number = mine[self.next]
            self.next += 1  # before the line is given: the state is that after it
            ids = torch.randint(args.rows, (8,), generator=torch.Generator().manual_seed(number))
            yield number, ids, float(ids.sum() % 2)
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Seen:
    """A checksum of all lines that were trained on, in their order."""

    def __init__(self) -> None:
        self.digest = ""

    def add(self, numbers: Tensor) -> None:
        self.digest = hashlib.sha256(f"{self.digest}{numbers.tolist()}".encode()).hexdigest()

    def state_dict(self) -> dict[str, str]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.digest = state["digest"]


logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
torch.sparse.check_sparse_tensor_invariants.disable()  # what is torch's default, less a warning
ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
table = ecemb.nn.ShardedEmbeddingBag(args.rows, 8, device="meta", name="ids")
model = nn.Sequential(table, nn.Linear(8, 1))
sparse = torch.optim.SparseAdam([table.weight], lr=0.01)
dense = torch.optim.SGD(model[1].parameters(), lr=0.1)
seen = Seen()

n, k = map(int, args.code.split(","))
guard = ecemb.protect(model, optimizers=[sparse, dense], code=ecemb.Code(n=n, k=k), state=seen)
loader = StatefulDataLoader(Stream(rank, ranks), batch_size=args.batch, num_workers=args.workers)
batches = guard.batches(loader)  # endless: epoch after epoch
for _ in range(guard.next_step, args.steps):
    with guard.step() as step:
        numbers, ids, clicks = next(batches)  # inside the step that it belongs to
        sparse.zero_grad()
        dense.zero_grad()
        loss = functional.binary_cross_entropy_with_logits(model(ids).squeeze(1), clicks.float())
        (loss / ranks).backward()
        for parameter in model[1].parameters():
            dist.all_reduce(parameter.grad)
        sparse.step()
        dense.step()
        seen.add(numbers)
    if rank == 0 and step.number % 50 == 0:
        print(f"step {step.number}, epoch {batches.epoch}: loss {loss:.4f}", flush=True)

digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
print(f"rank {rank}: digest {digest.hexdigest()[:16]} {seen.digest[:16]}", flush=True)
guard.close()
dist.destroy_process_group()
