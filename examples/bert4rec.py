"""BERT4Rec on TorchRec: hidden items of a history are guessed from those around, kept alive by ecemb.

    pip install '.[torchrec-cpu]' && pip install --no-deps torchrec==1.8.0    # with CUDA: '.[torchrec]'
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/bert4rec.py

Each line that ecemb needs has a comment `# ecemb`. An EmbeddingCollection gives a row for each item of a
history, unpooled; a small transformer reads them. Masks and dropout draw from torch's generator, which is
recovered. The validation draws as well, in `guard.evaluation()`. Kill any worker while it trains: the digests
at the end are those of a run that was left alone.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import ecemb  # ecemb

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=400, help="of the whole training")
parser.add_argument("--items", type=int, default=1000, help="of the catalogue")
parser.add_argument("--users", type=int, default=4000, help="histories per rank")
parser.add_argument("--batch", type=int, default=64, help="histories per rank and step")
parser.add_argument("--validate", type=int, default=100, help="steps between two validations")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="bert4rec", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")  # ecemb
parser.add_argument("--code", default="2,1", help="n,k: any n-k of n blocks may be lost")  # ecemb
args = parser.parse_args()
DIM, LENGTH = 32, 12
PADDING, MASK = 0, 1  # ids; items follow


class Bert4Rec(nn.Module):
    """A table of items, an encoder over their order, and scores of all items."""

    def __init__(self, table: EmbeddingCollection) -> None:
        super().__init__()
        self.table = table
        self.place = nn.Parameter(torch.randn(LENGTH, DIM) / DIM**0.5)
        layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(DIM, args.items + 2)

    def forward(self, history: Tensor) -> Tensor:
        """Scores [B, LENGTH, items + 2] of histories [B, LENGTH], padded at the end."""
        there = history != PADDING
        ids = KeyedJaggedTensor(["item"], history[there], lengths=there.sum(1))
        rows = self.table(ids)["item"].to_padded_dense(LENGTH)
        return self.scores(self.encoder(rows + self.place, src_key_padding_mask=~there))


def histories(users: int) -> Tensor:
    """Made-up histories: from its first item on, each user walks the same way through the items."""
    walk = [torch.randint(args.items, (users,))]
    for _ in range(LENGTH - 1):
        walk.append((walk[-1] * 31 + 7) % args.items)
    lengths = torch.randint(3, LENGTH + 1, (users, 1))
    return (torch.stack(walk, 1) + 2).masked_fill(torch.arange(LENGTH) >= lengths, PADDING)


def last_of(history: Tensor) -> Tensor:
    """Where the last item of each history is."""
    return torch.arange(LENGTH) == (history != PADDING).sum(1, keepdim=True) - 1


def hit_rate() -> float:
    """In how many held-out histories the last item is among the ten best guesses."""
    model.eval()
    hits = 0
    with torch.no_grad():
        for (history,) in DataLoader(held_out, args.batch):
            last = last_of(history)
            best = model(history.masked_fill(last, MASK))[last].topk(10).indices
            hits += int((best == history[last][:, None]).sum())
    model.train()
    return hits / len(held_out)


ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)  # ecemb: in place of dist's
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
size = args.items + 2
config = EmbeddingConfig(name="item", num_embeddings=size, embedding_dim=DIM, feature_names=["item"])
table = EmbeddingCollection(device=torch.device("meta"), tables=[config])
apply_optimizer_in_backward(RowWiseAdagrad, table.parameters(), {"lr": 0.1})
model = DistributedModelParallel(Bert4Rec(table), device=torch.device("cpu"))
dense = KeyedOptimizerWrapper(
    dict(in_backward_optimizer_filter(model.named_parameters())), lambda p: torch.optim.Adam(p, lr=2e-3)
)
optimizer = CombinedOptimizer([model.fused_optimizer, dense])

torch.manual_seed(args.seed * ranks + rank)  # from here on, each rank has its own users
loader = DataLoader(TensorDataset(histories(args.users)), args.batch, shuffle=True, drop_last=True)
held_out = TensorDataset(histories(4 * args.batch))
n, k = map(int, args.code.split(","))  # ecemb
guard = ecemb.protect(model, optimizers=optimizer, code=ecemb.Code(n=n, k=k))  # ecemb

batches = guard.batches(loader)  # ecemb: epoch after epoch
for number in range(guard.next_step, args.steps):  # ecemb: range(args.steps) without it
    if number % args.validate == 0:
        with guard.evaluation():  # ecemb
            hits = hit_rate()
        print(f"step {number}, rank {rank}: hit rate {hits:.3f}", flush=True)
    with guard.step():  # ecemb
        (history,) = next(batches)
        hidden = (torch.rand(history.shape) < 0.2) & (history != PADDING) | last_of(history)
        optimizer.zero_grad()
        scores = model(history.masked_fill(hidden, MASK))
        functional.cross_entropy(scores[hidden], history[hidden]).backward()
        optimizer.step()

digest = hashlib.sha256()
for name, weight in sorted(model.named_parameters()):
    digest.update(name.encode() + weight.detach().numpy().tobytes())
print(f"rank {rank}: digest {digest.hexdigest()[:16]}", flush=True)
guard.close()  # ecemb
dist.destroy_process_group()
