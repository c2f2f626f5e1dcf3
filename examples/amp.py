"""Mixed precision, gradient accumulation and learning rate schedules inside a step.

    pip install .
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/amp.py

All that changes state is in the step's body: every micro-batch, the scaler, the schedules. What belongs
neither to the model nor to an optimizer goes into `state=`. Kill any worker while it trains: the digests at
the end are those of a run that was left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

import ecemb

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=300, help="of the whole training")
parser.add_argument("--parts", type=int, default=4, help="micro-batches of a step")
parser.add_argument("--rows", type=int, default=10_000, help="of the table")
parser.add_argument("--batch", type=int, default=256, help="lines of a micro-batch")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="amp", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")
parser.add_argument("--code", default="2,1", help="n,k: any n-k of n blocks may be lost")
args = parser.parse_args()


class Clicks(nn.Module):
    """The mean of a line's eight rows, and a small network that says how likely it is clicked."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ecemb.nn.ShardedEmbeddingBag(args.rows, 16, mode="mean", device="meta")
        self.head = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids)).squeeze(1)


def lines() -> tuple[Tensor, Tensor]:
    """Made-up lines, from torch's generator, which is recovered with the rest: ids [B, 8] and clicks [B]."""
    ids = (args.rows ** torch.rand(args.batch, 8)).long() - 1
    return ids, (ids.sum(1) % 2).float()


logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
torch.sparse.check_sparse_tensor_invariants.disable()  # what is torch's default, less a warning
ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)  # the same on every rank: the model
model = Clicks()
torch.manual_seed(args.seed * ranks + rank)  # from here on, each rank has its own luck
sparse = torch.optim.Adagrad([model.table.weight], lr=0.1)
dense = torch.optim.Adam(model.head.parameters(), lr=3e-3)
warmup, decay = LinearLR(sparse, total_iters=args.steps // 10 + 1), CosineAnnealingLR(dense, T_max=args.steps)
# A table's shard is on one rank, and so is an overflow in its gradient: unlike torch.amp.GradScaler, this
# scaler tells all ranks, so that all of them leave the update out.
scaler = ShardedGradScaler("cpu", growth_interval=50)

n, k = map(int, args.code.split(","))
state = {"scaler": scaler, "warmup": warmup, "decay": decay}
guard = ecemb.protect(model, optimizers=[sparse, dense], code=ecemb.Code(n=n, k=k), state=state)
for _ in range(guard.next_step, args.steps):
    with guard.step() as step:
        sparse.zero_grad()
        dense.zero_grad()
        for _ in range(args.parts):
            ids, clicks = lines()
            with torch.autocast("cpu", dtype=torch.bfloat16):  # float16 on a GPU
                logits = model(ids)
            loss = functional.binary_cross_entropy_with_logits(logits.float(), clicks) / args.parts
            scaler.scale(loss / ranks).backward()  # the tables' gradients are summed over the ranks
        for parameter in model.head.parameters():  # and the dense ones here
            dist.all_reduce(parameter.grad)
        for optimizer in (sparse, dense):
            scaler.step(optimizer)
        scaler.update()
        warmup.step()
        decay.step()
    if rank == 0 and step.number % 50 == 0:
        rates = ", ".join(f"{schedule.get_last_lr()[0]:.2g}" for schedule in (warmup, decay))
        print(f"step {step.number}: loss {loss * args.parts:.4f}, learning rates {rates}", flush=True)

digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
digest.update(repr([scaler.state_dict(), *(schedule.get_last_lr() for schedule in (warmup, decay))]).encode())
print(f"rank {rank}: digest {digest.hexdigest()[:16]}", flush=True)
guard.close()
dist.destroy_process_group()
