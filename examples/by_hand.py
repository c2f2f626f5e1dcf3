"""Matrix factorisation over tables that the script shards by hand, kept alive by ecemb.

    pip install .
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/by_hand.py

Row i of a table lies on rank i % ranks, as that rank's local row i // ranks, in a plain nn.Embedding that is
named in `tables=`. Kill any worker while it trains: the digests at the end are those of a run that was left
alone. The ratings are made up, or MovieLens' by `--ratings ml-100k/u.data` (user, item, rating, time).
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ecemb

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--ratings", type=Path, help="a file of ratings, by tabs, instead of made-up ones")
parser.add_argument("--steps", type=int, default=600, help="of the whole training")
parser.add_argument("--users", type=int, default=2000)
parser.add_argument("--items", type=int, default=1000)
parser.add_argument("--lines", type=int, default=100_000, help="ratings to make up")
parser.add_argument("--dim", type=int, default=16)
parser.add_argument("--batch", type=int, default=512, help="ratings per rank and step")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="by-hand", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")
parser.add_argument("--code", default="2,1", help="n,k: any n-k of n blocks may be lost")
args = parser.parse_args()


def exchange(values: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """All ranks: gives rank p its `send[p]` rows of `values`; returns what came, by rank."""
    came = values.new_empty(sum(receive), *values.shape[1:])
    dist.all_to_all_single(came, values, receive, send)
    return came


class Exchange(torch.autograd.Function):
    """`exchange` for rows; its backward takes their gradients the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.send, ctx.receive = send, receive
        return exchange(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        return exchange(gradients.contiguous(), ctx.receive, ctx.send), None, None


class Sharded(nn.Module):
    """A table of which this rank holds rows rank, rank + ranks, rank + 2 * ranks, ..."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.ranks = dist.get_world_size()
        mine = range(dist.get_rank(), rows, self.ranks)
        self.local = nn.Embedding(len(mine), dim, sparse=True)  # what `tables=` names
        nn.init.normal_(self.local.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [B, dim] of ids [B]. All ranks, each with its own ids, in the same order of tables."""
        owner = ids % self.ranks
        order = torch.argsort(owner, stable=True)  # the ids of one owner become neighbours
        asked = torch.bincount(owner, minlength=self.ranks)
        wanted = exchange(asked, [1] * self.ranks, [1] * self.ranks)  # how many each rank asks of this one
        send, receive = wanted.tolist(), asked.tolist()
        local_ids = exchange(ids[order] // self.ranks, receive, send)
        rows = Exchange.apply(self.local(local_ids), send, receive)  # to those who asked
        return rows[torch.argsort(order)]


class Factors(nn.Module):
    """A rating is the product of two rows, whose last columns are biases, and a mean that all ranks share."""

    def __init__(self, users: int, items: int, dim: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.tensor(3.0))
        self.users = Sharded(users, dim + 1)
        self.items = Sharded(items, dim + 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user, item = self.users(users), self.items(items)
        return self.mean + (user[:, :-1] * item[:, :-1]).sum(1) + user[:, -1] + item[:, -1]


def ratings() -> tuple[Tensor, Tensor, Tensor]:
    """Users [R], items [R] and ratings [R], the same on all ranks."""
    if args.ratings:
        fields = [line.split("\t") for line in args.ratings.read_text("utf-8").splitlines()]
        users, items = (torch.tensor([int(line[i]) for line in fields]) for i in (0, 1))
        return users, items, torch.tensor([float(line[2]) for line in fields])
    own = torch.Generator().manual_seed(args.seed)
    users = torch.randint(args.users, (args.lines,), generator=own)
    items = torch.randint(args.items, (args.lines,), generator=own)
    left, right = (torch.randn(rows, 3, generator=own) for rows in (args.users, args.items))
    return users, items, (3 + (left[users] * right[items]).sum(1)).clamp(1, 5)


logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
torch.sparse.check_sparse_tensor_invariants.disable()  # what is torch's default, less a warning
ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed * ranks + rank)  # each rank has rows of its own; the mean begins as a constant
users, items, stars = ratings()
model = Factors(int(users.max()) + 1, int(items.max()) + 1, args.dim)
sparse = torch.optim.Adagrad([model.users.local.weight, model.items.local.weight], lr=0.1)
dense = torch.optim.SGD([model.mean], lr=0.1)
lines = TensorDataset(users, items, stars)
loader = DataLoader(lines, args.batch, sampler=DistributedSampler(lines, ranks, rank), drop_last=True)

n, k = map(int, args.code.split(","))
tables = {"users": model.users.local, "items": model.items.local}  # shards: other rows on each rank
guard = ecemb.protect(model, optimizers=[sparse, dense], tables=tables, code=ecemb.Code(n=n, k=k))
batches = guard.batches(loader)
for _ in range(guard.next_step, args.steps):
    with guard.step() as step:
        users, items, stars = next(batches)
        sparse.zero_grad()
        dense.zero_grad()
        loss = (model(users, items) - stars).square().mean()
        # Each rank's loss is a mean over its own batch. An owner adds up what all ranks send for a row, so
        # that this is the mean over all batches:
        (loss / ranks).backward()
        dist.all_reduce(model.mean.grad)  # and this is the same sum, of what no rank owns
        sparse.step()
        dense.step()
    if rank == 0 and step.number % 50 == 0:
        print(f"step {step.number}, epoch {batches.epoch}: loss {loss:.4f}", flush=True)

digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
print(f"rank {rank}: digest {digest.hexdigest()[:16]}", flush=True)
guard.close()
dist.destroy_process_group()
