"""TorchRec's DLRM on Criteo's click logs, 26 tables sharded by TorchRec, kept alive by ecemb.

    pip install '.[torchrec-cpu]' && pip install --no-deps torchrec==1.8.0    # with CUDA: '.[torchrec]'
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/torchrec_dlrm.py

Kill any worker while it trains (`kill -9 PID`): training goes on from the step that was in flight, and ends
with the same digest as if nothing had happened. Without `--data FILE` the rows are made up, in place of
Criteo's format: label, 13 integers, 26 hexadecimal categories, by tabs, any field may be empty.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import math
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM
from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

import ecemb

INTEGERS, CATEGORIES = 13, 26
FEATURES = [f"category {i}" for i in range(CATEGORIES)]

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--data", type=Path, help="a file in Criteo's format, in place of made-up rows")
parser.add_argument("--steps", type=int, default=100, help="of the whole training")
parser.add_argument("--rows", type=int, default=20_000, help="of each table; ids are hashed into them")
parser.add_argument("--dim", type=int, default=16, help="of the embeddings")
parser.add_argument("--batch", type=int, default=256, help="lines per rank and step")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="torchrec-dlrm", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")
parser.add_argument("--code", default="4,3", help="n,k: any n-k of n blocks may be lost")
args = parser.parse_args()
n, k = map(int, args.code.split(","))


class Batch(NamedTuple):
    """B lines. A malformed one has no categories, and weighs nothing."""

    integers: Tensor  # float32 [B, 13]: log(1 + value); empty and negative ones as 0
    categories: KeyedJaggedTensor  # 26 features of B bags, each of one row or, where the field is empty, none
    clicks: Tensor  # float32 [B]
    weights: Tensor  # float32 [B]: 1, or 0 for a malformed line


class Batches:
    """This rank's batches. Batch i is a function of i, and the state says which one is the next."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.next = self.malformed = 0
        self.position, self.lines = 0, iter(())

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next, "malformed": self.malformed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next, self.malformed = state["next"], state["malformed"]

    def __next__(self) -> Batch:
        number = self.next * self.ranks + self.rank
        batch = parse(self.read(number)) if args.data else made_up(number)
        self.next += 1
        self.malformed += int((batch.weights == 0).sum())
        return batch

    def read(self, number: int) -> list[str]:
        """Batch `number` of the file, which is streamed; going back means to start over."""
        first = number * args.batch
        if self.position == 0 or first < self.position:
            self.position, self.lines = 0, stream()
        lines = list(islice(self.lines, first - self.position, first - self.position + args.batch))
        self.position = first + args.batch
        return lines


def stream() -> Iterator[str]:
    """The file's lines, over and over."""
    if args.data.stat().st_size == 0:
        raise ValueError(f"{args.data} is empty")
    while True:
        with args.data.open(encoding="utf-8", errors="replace") as file:
            yield from file


def parse(lines: list[str]) -> Batch:
    integers = torch.zeros(args.batch, INTEGERS)
    rows = torch.zeros(args.batch, CATEGORIES, dtype=torch.int64)
    filled = torch.zeros(args.batch, CATEGORIES, dtype=torch.bool)
    clicks, weights = torch.zeros(args.batch), torch.zeros(args.batch)
    for b, line in enumerate(lines):
        label, *fields = line.rstrip("\r\n").split("\t")
        try:
            if label not in ("0", "1") or len(fields) != INTEGERS + CATEGORIES:
                raise ValueError(line)
            values = [int(field) if field else 0 for field in fields[:INTEGERS]]
            ids = [int(field, 16) % args.rows if field else 0 for field in fields[INTEGERS:]]
        except ValueError:
            continue
        integers[b] = torch.tensor([math.log1p(max(value, 0)) for value in values])
        rows[b] = torch.tensor(ids)
        filled[b] = torch.tensor([field != "" for field in fields[INTEGERS:]])
        clicks[b], weights[b] = float(label), 1
    return Batch(integers, jagged(rows, filled), clicks, weights)


def made_up(number: int) -> Batch:
    """Rows with a signal in them: each category, and each integer, makes a click more or less likely.

    Field f has 10, 20, 40, ... up to 100,000 categories, the lower the id the more frequent, like
    Zipf's law. A field in twenty is empty, as in real logs.
    """
    random = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    field = torch.arange(CATEGORIES)
    sizes = (10 * 2 ** (field % 14)).clamp(max=100_000).double()
    ids = (sizes ** torch.rand(args.batch, CATEGORIES, generator=random).double()).long() - 1
    filled = torch.rand(args.batch, CATEGORIES, generator=random) >= 0.05
    integers = torch.randn(args.batch, INTEGERS, generator=random).mul(2).exp().long().float().log1p()
    hidden = torch.sin(ids * 12.9898 + field * 78.233) * 43758.5453  # a hash to weights in [-1, 1)
    logit = ((2 * (hidden - hidden.floor()) - 1) * filled).sum(1) * 0.6 + (integers - 1)[:, :4].sum(1) * 0.2
    clicks = (torch.rand(args.batch, generator=random) < (logit - 1).sigmoid()).float()
    rows = (ids * 2654435761 + field * 40503) % 2**32 % args.rows
    return Batch(integers, jagged(rows, filled), clicks, torch.ones(args.batch))


def jagged(rows: Tensor, filled: Tensor) -> KeyedJaggedTensor:
    """Rows, int64 [B, 26], where they are filled, feature after feature."""
    return KeyedJaggedTensor(FEATURES, rows.T[filled.T], lengths=filled.T.reshape(-1).int())


def bits(thing: Any) -> Iterator[bytes]:
    """All that this rank holds of a state_dict, in a fixed order."""
    if isinstance(thing, dict):
        for key in sorted(thing):
            yield from bits(thing[key])
    elif hasattr(thing, "local_shards"):
        for shard in thing.local_shards():
            yield from bits(shard.tensor)
    else:
        yield thing.detach().numpy().tobytes() if isinstance(thing, Tensor) else repr(thing).encode()


logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", force=True)
for noisy in ("torchrec", "torch.fx"):
    logging.getLogger(noisy).setLevel(logging.ERROR)
warnings.simplefilter("ignore", FutureWarning)  # TorchRec's own calls
torch.set_num_threads(1)
ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)
rank, ranks = dist.get_rank(), dist.get_world_size()
batches = Batches(rank, ranks)

torch.manual_seed(args.seed)
tables = EmbeddingBagCollection(
    device=torch.device("meta"),
    tables=[
        EmbeddingBagConfig(
            name=f"table {i}", num_embeddings=args.rows, embedding_dim=args.dim, feature_names=[feature]
        )
        for i, feature in enumerate(FEATURES)
    ],
)
apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.03})
model = DistributedModelParallel(
    DLRM(tables, INTEGERS, dense_arch_layer_sizes=[64, args.dim], over_arch_layer_sizes=[64, 1]),
    device=torch.device("cpu"),
)
dense = KeyedOptimizerWrapper(
    dict(in_backward_optimizer_filter(model.named_parameters())),
    lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
)
optimizer = CombinedOptimizer([model.fused_optimizer, dense])
guard = ecemb.protect(model, optimizers=optimizer, code=ecemb.Code(n, k), state=batches, window="auto")


@guard.step()
def train() -> Tensor:
    batch = next(batches)
    optimizer.zero_grad()
    logits = model(batch.integers, batch.categories).squeeze(1)
    loss = functional.binary_cross_entropy_with_logits(logits, batch.clicks, batch.weights)
    loss.backward()
    optimizer.step()
    return loss


while batches.next < args.steps:
    loss = train()
    if rank == 0 and (batches.next % 20 == 0 or batches.next == args.steps):
        print(f"{args.job}: step {batches.next}, loss {loss.item():.4f}", flush=True)

# The same bits, the same digest, however often the training was killed.
mine = hashlib.sha256()
for part in bits({"model": model.state_dict(), "optimizer": optimizer.state_dict()}):
    mine.update(part)
everyones: list[tuple[str, int]] = [("", 0)] * ranks
dist.all_gather_object(everyones, (mine.hexdigest(), batches.malformed))
if rank == 0:
    digests, malformed = zip(*everyones, strict=True)
    print(f"malformed lines left out: {sum(malformed)}")
    print(f"digest: {hashlib.sha256(''.join(digests).encode()).hexdigest()[:16]}", flush=True)
guard.close()
dist.destroy_process_group()
