"""Two-tower retrieval on TorchRec: users and items as vectors, close where they meet, kept alive by ecemb.

    pip install '.[torchrec-cpu]' && pip install --no-deps torchrec==1.8.0    # with CUDA: '.[torchrec]'
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/two_tower.py

Each line that ecemb needs has a comment `# ecemb`. The batch's other items are the negatives of a user. A
schedule and a running mean of the loss are in `state=`, since neither the model nor an optimizer holds them.
Kill any worker while it trains: the digests at the end are those of a run that was left alone.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import ecemb  # ecemb

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=200, help="of the whole training")
parser.add_argument("--rows", type=int, default=20_000, help="of each table")
parser.add_argument("--lines", type=int, default=20_000, help="meetings of a user and an item, per rank")
parser.add_argument("--batch", type=int, default=128, help="lines per rank and step")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="two-tower", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")  # ecemb
parser.add_argument("--code", default="2,1", help="n,k: any n-k of n blocks may be lost")  # ecemb
args = parser.parse_args()
DIM, TOWERS = 16, ("user", "item")


class TwoTower(nn.Module):
    """A table and a small network for users, and the same for items."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables
        self.towers = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM)) for name in TOWERS}
        )

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """How close each user [B] is to each item [B]: scores [B, B]."""
        rows = self.tables(ids).to_dict()
        users, items = (functional.normalize(self.towers[name](rows[name])) for name in TOWERS)
        return users @ items.T / 0.1


ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)  # ecemb: in place of dist's
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
tables = EmbeddingBagCollection(
    device=torch.device("meta"),
    tables=[
        EmbeddingBagConfig(name=name, num_embeddings=args.rows, embedding_dim=DIM, feature_names=[name])
        for name in TOWERS
    ],
)
apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.05})
model = DistributedModelParallel(TwoTower(tables), device=torch.device("cpu"))
adam = torch.optim.Adam
towers = KeyedOptimizerWrapper(
    dict(in_backward_optimizer_filter(model.named_parameters())), lambda p: adam(p, lr=1e-3)
)
optimizer = CombinedOptimizer([model.fused_optimizer, towers])
schedule = CosineAnnealingLR(towers._optimizer, T_max=args.steps)
mean = MeanMetric(sync_on_compute=False)

torch.manual_seed(args.seed * ranks + rank)  # from here on, each rank has its own lines
users = torch.randint(args.rows, (args.lines,))
loader = DataLoader(TensorDataset(users, users * 31 % args.rows), args.batch, shuffle=True, drop_last=True)
state = {"schedule": schedule, "mean": mean}  # ecemb
n, k = map(int, args.code.split(","))  # ecemb
guard = ecemb.protect(model, optimizers=optimizer, code=ecemb.Code(n=n, k=k), state=state)  # ecemb

batches = guard.batches(loader)  # ecemb: epoch after epoch
for number in range(guard.next_step, args.steps):  # ecemb: range(args.steps) without it
    with guard.step():  # ecemb
        met = torch.cat(next(batches))  # users, then items
        ids = KeyedJaggedTensor(list(TOWERS), met, lengths=torch.ones(len(met), dtype=torch.int64))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids), torch.arange(args.batch))
        loss.backward()
        optimizer.step()
        schedule.step()
        mean.update(loss.detach())
    if rank == 0 and number % 20 == 0:
        print(f"step {number}: mean loss {mean.compute():.4f}", flush=True)

digest = hashlib.sha256(repr([schedule.get_last_lr(), float(mean.compute())]).encode())
for name, weight in sorted(model.named_parameters()):
    digest.update(name.encode() + weight.detach().numpy().tobytes())
print(f"rank {rank}: digest {digest.hexdigest()[:16]}", flush=True)
guard.close()  # ecemb
dist.destroy_process_group()
