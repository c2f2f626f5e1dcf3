"""Word vectors: skip-gram with negative sampling, tables sharded over ranks, kept alive by ecemb.

    pip install .
    torchrun --standalone --nproc-per-node 4 --max-restarts 3 examples/word2vec.py

Kill any worker while it trains (`kill -9 PID`): training goes on from the step that was in flight,
and ends with the same bits as if nothing had happened. Started by `ecemb-run`, the other workers'
processes stay, and call `train` again. The text is CPython's own language
reference, or `--text FILE`. With `--checkpoints FOLDER`, examples/serve.py answers from the vectors
while they are trained. With `--elastic`, a launch with another number of ranks goes on from memory.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections import Counter
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import ecemb
from ecemb.place import Place

OPTIMIZERS = {
    "sgd": lambda tables: torch.optim.SGD(tables, lr=100.0),
    "adagrad": lambda tables: torch.optim.Adagrad(tables, lr=0.1),
    "sparse_adam": lambda tables: torch.optim.SparseAdam(tables, lr=0.005),
}
POLICIES = ("one_shot", "consecutive", "intermittent")  # of Check-N-Run

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--text", type=Path, help="a text to read instead of CPython's reference")
parser.add_argument("--steps", type=int, default=600, help="of the whole training")
parser.add_argument("--dim", type=int, default=64, help="of the vectors")
parser.add_argument("--batch", type=int, default=256, help="centre words per rank and step")
parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adagrad", help="of the tables")
parser.add_argument("--seed", type=int, default=1, help="of the model, and of what is drawn")
parser.add_argument("--job", default="word2vec", help="the job's name: same name, same memory")
parser.add_argument("--arena-dir", default="/dev/shm", help="folder of the job's memory")
parser.add_argument("--code", default="4,3", help="n,k: any n-k of n blocks may be lost")
parser.add_argument("--elastic", action="store_true", help="go on with any number of ranks")
parser.add_argument("--save", type=Path, help="folder for every rank's final state")
parser.add_argument("--checkpoints", type=Path, help="folder to save to, for examples/serve.py")
parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
parser.add_argument(
    "--changes", choices=POLICIES, help="save changed rows only (in a clone of the repository)"
)
parser.add_argument("--words", default="list,class,float,raise,import", help="neighbours to show")
args = parser.parse_args()

WINDOW = 3  # context words on each side of a centre
NEGATIVES = 12  # words per centre that are not its context
Kept: TypeAlias = tuple[Tensor, list[str], Tensor, Tensor, "SkipGram", Optimizer, Optimizer]


def read_words(text: str, seed: int) -> tuple[Tensor, list[str], Tensor]:
    """(the text as word numbers [T], the words by number, their noise weights [V]).

    Rare words are dropped and frequent ones thinned out, as in Mikolov et al. 2013.
    """
    words = re.findall(r"[^\W\d]+", text.lower())
    counts = Counter(words)
    vocabulary = [word for word, count in counts.most_common() if count >= 3]
    number = {word: i for i, word in enumerate(vocabulary)}
    text_ids = torch.tensor([number[word] for word in words if word in number])
    frequency = torch.tensor([counts[word] for word in vocabulary]) / len(text_ids)
    random = torch.Generator().manual_seed(seed)
    kept = torch.rand(len(text_ids), generator=random) < (1e-3 / frequency[text_ids]).sqrt()
    return text_ids[kept], vocabulary, frequency**0.75


class SkipGram(nn.Module):
    """Two sharded tables, and a small dense layer that is the same on all ranks."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()

        def small(rows: Tensor, generator: torch.Generator) -> None:
            rows.uniform_(-0.5 / dim**0.5, 0.5 / dim**0.5, generator=generator)

        # On "meta" nothing is allocated: protect() puts the shards where they outlive the process.
        table = partial(ecemb.nn.ShardedEmbeddingBag, vocabulary, dim, device="meta", init=small)
        self.centres = table(name="centres")
        self.contexts = table(name="contexts")
        self.project = nn.Linear(dim, dim)

    def forward(self, centres: Tensor, others: Tensor) -> Tensor:
        """Scores [B, C] of centre words [B] beside other words [B, C]: how likely do they meet?"""
        left = self.project(self.centres(centres[:, None]))
        right = self.contexts(others.reshape(-1, 1)).view(*others.shape, -1)
        return torch.einsum("bd,bcd->bc", left, right)


def build() -> Kept:
    """The same on every rank: text, model, optimizers."""
    torch.manual_seed(args.seed)
    text, vocabulary, noise = read_words(
        args.text.read_text("utf-8") if args.text else "\n".join(topics.topics.values()), args.seed
    )
    order = WINDOW + torch.randperm(len(text) - 2 * WINDOW)
    model = SkipGram(len(vocabulary), args.dim)
    sparse = OPTIMIZERS[args.optimizer]([model.centres.weight, model.contexts.weight])
    dense = torch.optim.Adam(model.project.parameters(), lr=1e-3)
    return text, vocabulary, noise, order, model, sparse, dense


def train(place: Place) -> None:
    """The training; called again in this process when another worker has died."""
    ecemb.init_process_group("gloo", job=args.job, arena_dir=args.arena_dir)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text, vocabulary, noise, order, model, sparse, dense = place.keep("model", build)
    near = torch.tensor([i for i in range(-WINDOW, WINDOW + 1) if i != 0])
    dense_parameters = list(model.project.parameters())
    torch.manual_seed(args.seed * ranks + rank)  # from here on, each rank has its own luck

    n, k = map(int, args.code.split(","))
    codes = [ecemb.Code(n=n, k=k)]
    if args.elastic:  # where there are too few ranks for it: as many blocks as ranks, one of parity
        codes += [ecemb.Code(n=size, k=size - 1) for size in range(n - 1, 1, -1)]
    durable = args.checkpoints
    if durable and args.changes:
        from baselines.check_n_run.durable import DurableTier

        durable = DurableTier(durable, f"{args.arena_dir}/{args.job}-copies", policy=args.changes)
    guard = ecemb.protect(model, optimizers=[sparse, dense], code=codes, resume=durable, elastic=args.elastic)

    for _ in range(guard.next_step, args.steps):
        with guard.step() as step:
            # Where in the text: by the step's number. Which negatives: by torch's generator, and that
            # is recovered with the rest.
            first = (step.number * ranks + rank) * args.batch
            at = order[torch.arange(first, first + args.batch) % len(order)]
            positive = text[at[:, None] + near]
            negative = torch.multinomial(noise, args.batch * NEGATIVES, replacement=True)
            others = torch.cat([positive, negative.view(args.batch, -1)], dim=1)
            meets = torch.zeros(others.shape)
            meets[:, : len(near)] = 1

            sparse.zero_grad()
            dense.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(model(text[at], others), meets)
            (loss / ranks).backward()  # the tables' gradients are summed over the ranks
            for parameter in dense_parameters:  # and the dense layer's here
                dist.all_reduce(parameter.grad)
            sparse.step()
            dense.step()
        if rank == 0 and (step.number % 50 == 0 or step.number == args.steps - 1):
            print(f"step {step.number}: loss {loss.item():.4f}", flush=True)
        if durable and guard.next_step % args.every == 0:
            guard.save(durable, asynchronous=True)

    # A lookup takes all ranks; rank 0 shows what came out.
    with torch.no_grad():
        vectors = functional.normalize(model.centres(torch.arange(len(vocabulary))[:, None]))
    if rank == 0:
        for word in filter(vocabulary.__contains__, args.words.split(",")):
            closeness = vectors @ vectors[vocabulary.index(word)]
            nearest = [vocabulary[i] for i in closeness.topk(8).indices[1:]]
            print(f"{word}: {' '.join(nearest)}", flush=True)
    if args.save:
        args.save.mkdir(parents=True, exist_ok=True)
        final = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for name, optimizer in {"sparse": sparse, "dense": dense}.items():
            for i, state in optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    final[f"{name}.{i}.{key}"] = torch.as_tensor(value).clone()
        final["rng"] = torch.get_rng_state()
        torch.save(final, args.save / f"rank{rank}.pt")
    guard.close()
    dist.destroy_process_group()


logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
torch.set_num_threads(1)
torch.sparse.check_sparse_tensor_invariants.disable()  # what is torch's default, less a warning
ecemb.run(train)
