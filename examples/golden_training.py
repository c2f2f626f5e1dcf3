"""TorchRec's pipelined training loop, on made-up clicks, kept alive by ecemb.

    pip install '.[torchrec-cpu]' && pip install --no-deps torchrec==1.8.0    # with CUDA: '.[torchrec]'
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/golden_training.py

Each line that ecemb needs has a comment `# ecemb`. TrainPipelineSparseDist distributes the ids of the next
batches while a batch is trained, so it draws ahead: its iterator begins with the batch of step
`guard.next_step`. Kill any worker while it trains: the digests at the end are those of a run that was left
alone.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.streamable import Pipelineable

import ecemb  # ecemb

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=100, help="of the whole training")
parser.add_argument("--rows", type=int, default=20_000, help="of each table")
parser.add_argument("--batch", type=int, default=128, help="lines per rank and step")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="golden", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")  # ecemb
parser.add_argument("--code", default="2,1", help="n,k: any n-k of n blocks may be lost")  # ecemb
args = parser.parse_args()

FEATURES = ["user", "item", "shop", "query"]
DENSE, DIM = 8, 16


@dataclass
class Batch(Pipelineable):
    """Lines, as DLRMTrain takes them."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        parts = (self.dense_features, self.sparse_features, self.labels)
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: Any) -> None:
        for part in (self.dense_features, self.sparse_features, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(
            self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory()
        )


def batches(first: int) -> Iterator[Batch]:
    """This rank's batches from a number on. Batch i follows from i."""
    for number in count(first):
        random = torch.Generator().manual_seed(args.seed * 1_000_003 + number * ranks + rank)
        lengths = torch.randint(0, 4, (len(FEATURES) * args.batch,), generator=random)
        ids = torch.randint(args.rows, (int(lengths.sum()),), generator=random)
        dense = torch.rand(args.batch, DENSE, generator=random)
        clicks = (dense.sum(1) + torch.rand(args.batch, generator=random) > DENSE / 2).float()
        yield Batch(dense, KeyedJaggedTensor(FEATURES, ids, lengths=lengths), clicks)


ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)  # ecemb: in place of dist's
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
torch.manual_seed(args.seed)
tables = EmbeddingBagCollection(
    device=torch.device("meta"),
    tables=[
        EmbeddingBagConfig(name=name, num_embeddings=args.rows, embedding_dim=DIM, feature_names=[name])
        for name in FEATURES
    ],
)
apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.03})
dlrm = DLRM(tables, DENSE, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[32, 1])
model = DistributedModelParallel(DLRMTrain(dlrm), device=device)
dense = KeyedOptimizerWrapper(
    dict(in_backward_optimizer_filter(model.named_parameters())), lambda p: torch.optim.Adam(p, lr=1e-3)
)
optimizer = CombinedOptimizer([model.fused_optimizer, dense])
pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
n, k = map(int, args.code.split(","))  # ecemb
guard = ecemb.protect(model, optimizers=optimizer, code=ecemb.Code(n=n, k=k))  # ecemb

ahead = batches(guard.next_step)  # ecemb: batches(0) without it
for number in range(guard.next_step, args.steps):  # ecemb: range(args.steps) without it
    with guard.step():  # ecemb
        loss, _, _ = pipeline.progress(ahead)
    if rank == 0 and number % 20 == 0:
        print(f"step {number}: loss {loss.item():.4f}", flush=True)

digest = hashlib.sha256()
for name, weight in sorted(model.named_parameters()):
    digest.update(name.encode() + weight.detach().numpy().tobytes())
print(f"rank {rank}: digest {digest.hexdigest()[:16]}", flush=True)
guard.close()  # ecemb
dist.destroy_process_group()
