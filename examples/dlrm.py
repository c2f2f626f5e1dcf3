"""DLRM on Criteo's click logs, 26 tables sharded over ranks, kept alive by ecemb.

    pip install .
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/dlrm.py

Kill any worker while it trains (`kill -9 PID`): training goes on from the step that was in flight,
and ends with the same bits as if nothing had happened. Without `--data FILE` the rows are made up,
in Criteo's format: label, 13 integers, 26 hexadecimal categories, by tabs, any field may be empty.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import ecemb

INTEGERS, CATEGORIES = 13, 26
OPTIMIZERS = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=10.0),
    "adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.03),
    "sparse_adam": lambda tables: torch.optim.SparseAdam(tables, lr=0.002),
}

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--data", type=Path, help="a file in Criteo's format, in place of made-up rows")
parser.add_argument("--steps", type=int, default=200, help="of the whole training")
parser.add_argument("--held-out", type=int, default=10, help="batches per rank to test on, not to train on")
parser.add_argument("--workers", type=int, default=0, help="processes per rank that read data")
parser.add_argument("--rows", type=int, default=20_000, help="of each table; ids are hashed into them")
parser.add_argument("--dim", type=int, default=16, help="of the embeddings")
parser.add_argument("--batch", type=int, default=256, help="lines per rank and step")
parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad", help="of the tables")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="dlrm", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")
parser.add_argument("--code", default="4,3", help="n,k: any n-k of n blocks may be lost")
parser.add_argument("--save", type=Path, help="folder for every rank's final state")
args = parser.parse_args()


class Batch(NamedTuple):
    """The good lines of a batch, B of them, and how many were bad."""

    integers: Tensor  # float32 [B, 13]: log(1 + value); empty and negative ones as 0
    categories: Tensor  # int64 [B, 26]: rows of the tables; empty ones as row 0
    clicks: Tensor  # float32 [B]
    malformed: int


class Rows(Dataset[Batch]):
    """Batch number i of this rank: a function of i, so that a restart takes up anywhere."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.position, self.lines = 0, iter(())

    def __getitem__(self, batch: int) -> Batch:
        number = batch * self.ranks + self.rank
        return parse(self.read(number) if args.data else made_up(number))

    def read(self, number: int) -> list[str]:
        """Batch `number` of the file, which is streamed; going back means to start over."""
        first = number * args.batch
        if self.position == 0 or first < self.position:
            self.position, self.lines = 0, self.stream()
        lines = list(islice(self.lines, first - self.position, first - self.position + args.batch))
        self.position = first + args.batch
        return lines

    def stream(self) -> Iterator[str]:
        """The file's lines: those held out come once, then the others over and over."""
        held_out = args.held_out * self.ranks * args.batch
        count = 0
        while True:
            with args.data.open(encoding="utf-8", errors="replace") as file:
                for line in islice(file, min(count, held_out), None):
                    count += 1
                    yield line
            if count <= held_out:
                raise ValueError(
                    f"{args.data} has {count} lines, and {held_out} are held out: lower --held-out"
                )


def parse(lines: list[str]) -> Batch:
    """Lines of Criteo's format as tensors; malformed lines are left out and counted."""
    clicks, integers, categories = [], [], []
    for line in lines:
        label, *fields = line.rstrip("\r\n").split("\t")
        try:
            if label not in ("0", "1") or len(fields) != INTEGERS + CATEGORIES:
                raise ValueError(line)
            values = [int(field) if field else 0 for field in fields[:INTEGERS]]
            ids = [1 + int(field, 16) % (args.rows - 1) if field else 0 for field in fields[INTEGERS:]]
        except ValueError:
            continue
        clicks.append(float(label))
        integers.append([math.log1p(max(value, 0)) for value in values])
        categories.append(ids)
    return Batch(
        torch.tensor(integers).reshape(-1, INTEGERS),
        torch.tensor(categories, dtype=torch.int64).reshape(-1, CATEGORIES),
        torch.tensor(clicks),
        len(lines) - len(clicks),
    )


def made_up(number: int) -> list[str]:
    """Lines with a signal in them: each category, and each integer, makes a click more or less likely.

    Field f has 10, 20, 40, ... up to 100,000 categories, the lower the id the more frequent, like
    Zipf's law. A line in a thousand is cut off, a field in twenty is empty, as in real logs.
    """
    random = torch.Generator().manual_seed(args.seed * 1_000_003 + number)
    field = torch.arange(CATEGORIES)
    sizes = (10 * 2 ** (field % 14)).clamp(max=100_000).double()
    ids = (sizes ** torch.rand(args.batch, CATEGORIES, generator=random).double()).long() - 1
    integers = torch.randn(args.batch, INTEGERS, generator=random).mul(2).exp().long()
    hidden = torch.sin(ids * 12.9898 + field * 78.233) * 43758.5453  # a hash to weights in [-1, 1)
    logit = (2 * (hidden - hidden.floor()) - 1).sum(1) * 0.6
    logit += (integers.double().log1p() - 1)[:, :4].sum(1) * 0.2
    clicks = torch.rand(args.batch, generator=random) < (logit - 1).sigmoid()
    hexes = (ids * 2654435761 + field * 40503) % 2**32
    empty = torch.rand(args.batch, INTEGERS + CATEGORIES, generator=random) < 0.05
    cut = torch.rand(args.batch, generator=random) < 0.001
    lines = []
    for b in range(args.batch):
        fields = [str(value) for value in integers[b].tolist()]
        fields += [f"{value:08x}" for value in hexes[b].tolist()]
        fields = ["" if gone else text for text, gone in zip(fields, empty[b].tolist(), strict=True)]
        line = "\t".join([str(int(clicks[b])), *fields])
        lines.append(line[: len(line) // 2] if cut[b] else line)
    return lines


def mlp(*sizes: int) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1])


class DLRM(nn.Module):
    """Naumov et al. 2019: embeddings and a dense vector, their dot products, an MLP on top."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()

        def small(values: Tensor, generator: torch.Generator) -> None:
            values.uniform_(-(dim**-0.5), dim**-0.5, generator=generator)

        # On "meta" nothing is allocated: protect() puts the shards where they outlive the process.
        table = partial(ecemb.nn.ShardedEmbeddingBag, rows, dim, device="meta", init=small)
        self.tables = nn.ModuleList(table(name=f"category {i}") for i in range(CATEGORIES))
        self.bottom = mlp(INTEGERS, 64, dim)
        self.top = mlp(dim + CATEGORIES * (CATEGORIES + 1) // 2, 64, 1)
        pairs = torch.tril_indices(CATEGORIES + 1, CATEGORIES + 1, offset=-1)
        self.register_buffer("pairs", pairs, persistent=False)

    def forward(self, integers: Tensor, categories: Tensor) -> Tensor:
        """Logits [B] of clicks, from integers [B, 13] and categories [B, 26]."""
        dense = self.bottom(integers)
        embedded = [table(categories[:, i : i + 1]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *embedded], dim=1)
        dots = (vectors @ vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, dots], dim=1)).squeeze(1)


class Tally:
    """How many malformed lines this rank has met; protect() keeps it with the rest."""

    def __init__(self) -> None:
        self.malformed = 0

    def state_dict(self) -> dict[str, int]:
        return {"malformed": self.malformed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.malformed = state["malformed"]


def auc(logits: Tensor, clicks: Tensor) -> float:
    """Probability that a click scores higher than a non-click; ties count half."""
    _, place, counts = logits.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]
    positive = clicks.sum()
    above = ranks[clicks == 1].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (len(clicks) - positive)))


logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # what is torch's default, less a warning
ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(args.seed)  # the same on every rank: model and optimizers
model = DLRM(args.rows, args.dim)
dense_parameters = [*model.bottom.parameters(), *model.top.parameters()]
sparse = OPTIMIZERS[args.optimizer](model.tables.parameters())
dense = torch.optim.Adam(dense_parameters, lr=1e-3)
tally = Tally()

n, k = map(int, args.code.split(","))
code = ecemb.Code(n=n, k=k)
# Many steps are committed together: a failure runs at most 60 s of them again, to the same bits.
guard = ecemb.protect(model, optimizers=[sparse, dense], code=code, state=tally, window="auto", max_replay=60)

# Batches 0, 1, ... are held out, training takes those after. A loader draws a seed for its workers
# when it begins: from a generator of its own, so that a restart changes nothing in torch's.
batches = DataLoader(
    Rows(rank, ranks),
    batch_size=None,
    sampler=range(args.held_out + guard.next_step, args.held_out + args.steps),
    num_workers=args.workers,
    multiprocessing_context="fork" if args.workers else None,
    generator=torch.Generator(),
)
for batch in batches:
    with guard.step() as step:
        sparse.zero_grad()
        dense.zero_grad()
        logits = model(batch.integers, batch.categories)
        loss = functional.binary_cross_entropy_with_logits(logits, batch.clicks, reduction="sum")
        # The mean over all ranks' lines. Tables' gradients are summed over ranks, dense ones here.
        (loss / (args.batch * ranks)).backward()
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in dense_parameters])
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat, [parameter.grad for parameter in dense_parameters])
        sparse.step()
        dense.step()
        tally.malformed += batch.malformed
    if rank == 0 and (step.number % 50 == 0 or step.number == args.steps - 1):
        print(f"step {step.number}: loss {loss.item() / args.batch:.4f}", flush=True)

held_out = [Rows(rank, ranks)[i] for i in range(args.held_out)]
with torch.no_grad():
    mine = [(model(batch.integers, batch.categories), batch.clicks) for batch in held_out]
everyones: list[tuple[Tensor, Tensor, int]] = [None] * ranks
dist.all_gather_object(everyones, (*(torch.cat(part) for part in zip(*mine, strict=True)), tally.malformed))
if rank == 0:
    logits, clicks, malformed = zip(*everyones, strict=True)
    logits, clicks = torch.cat(logits), torch.cat(clicks)
    log_loss = functional.binary_cross_entropy_with_logits(logits, clicks)
    print(f"malformed lines left out in training: {sum(malformed)}")
    print(f"held out: {len(clicks)} lines, log loss {log_loss:.4f}, AUC {auc(logits, clicks):.4f}")
if args.save:
    args.save.mkdir(parents=True, exist_ok=True)
    final = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, optimizer in {"sparse": sparse, "dense": dense}.items():
        for i, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                final[f"{name}.{i}.{key}"] = torch.as_tensor(value).clone()
    final["rng"] = torch.get_rng_state()
    final["malformed"] = torch.tensor(tally.malformed)
    torch.save(final, args.save / f"rank{rank}.pt")
guard.close()
dist.destroy_process_group()
