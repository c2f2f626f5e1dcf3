"""A LightningModule with sharded tables, kept alive by a callback.

    pip install '.[examples]'
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/lightning_bags.py

Lightning's own epochs, optimizer steps and schedules are recovered with the tables. Kill any worker while it
trains: the digests at the end are those of a run that was left alone.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
from typing import Any

import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ecemb
from ecemb.integrations.lightning import Protection

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lines", type=int, default=20_000, help="of an epoch")
parser.add_argument("--rows", type=int, default=10_000, help="of the table")
parser.add_argument("--batch", type=int, default=128, help="lines per rank")
parser.add_argument("--accumulate", type=int, default=2, help="batches of a step: gradients are added up")
parser.add_argument("--clip", type=float, default=1.0, help="the most that the dense gradients' norm may be")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="lightning", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")
parser.add_argument("--code", default="2,1", help="n,k: any n-k of n blocks may be lost")
args = parser.parse_args()


class Clicks(lightning.LightningModule):
    """A table, a head, and Adagrad for both, under a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ecemb.nn.ShardedEmbeddingBag(args.rows, 8)  # not on "meta": Lightning moves modules
        self.head = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        ids, clicks = batch
        return functional.binary_cross_entropy_with_logits(self.head(self.table(ids)).squeeze(1), clicks)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adagrad(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.98)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clips the dense gradients, which are the same on all ranks; torch can't clip sparse ones."""
        if gradient_clip_val is not None:
            nn.utils.clip_grad_norm_(self.head.parameters(), gradient_clip_val)


logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
torch.sparse.check_sparse_tensor_invariants.disable()  # what is torch's default, less a warning
ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)  # before the Trainer is made
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
ids = torch.randint(args.rows, (args.lines, 8))
lines = TensorDataset(ids, (ids.sum(1) % 2).float())
model = Clicks()
loader = DataLoader(lines, args.batch, sampler=DistributedSampler(lines, ranks, rank))

n, k = map(int, args.code.split(","))
protection = Protection(code=ecemb.Code(n=n, k=k))
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy="ddp" if ranks > 1 else "auto",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", ranks)),
    max_epochs=args.epochs,
    accumulate_grad_batches=args.accumulate,
    gradient_clip_val=args.clip,
    callbacks=[protection],  # before all other callbacks
    use_distributed_sampler=False,  # the loader has one
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
trainer.fit(model, protection.batches(loader))

digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
print(f"rank {rank}: digest {digest.hexdigest()[:16]} after {trainer.global_step} steps", flush=True)
protection.close()
dist.destroy_process_group()
