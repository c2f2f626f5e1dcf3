"""One rank whose tables are ecemb.nn's or TorchRec's: goes on from what the other engine has saved."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torchrec
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

import ecemb
from support.moves import everything, store_of

SIZES, DIM, BATCH, STEPS = {"t0": 37, "t1": 38, "t2": 39}, 8, 6, 2
FUSED = {name: f"bags.embedding_bags.{name}" for name in SIZES}


class Fused(torch.nn.Module):
    """Tables of TorchRec: by rows, whole, and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = torchrec.EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name]
                )
                for name, rows in SIZES.items()
            ],
        )
        self.over = torch.nn.Linear(len(SIZES) * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((len(SIZES) * len(ids),), ids.shape[1])
        bags = torchrec.KeyedJaggedTensor(list(SIZES), ids.reshape(-1).repeat(len(SIZES)), lengths=lengths)
        return self.over(self.bags(bags).values())


class Plain(torch.nn.Module):
    """The same tables of ecemb.nn."""

    def __init__(self) -> None:
        super().__init__()
        for name, rows in SIZES.items():
            self.add_module(name, ecemb.nn.ShardedEmbeddingBag(rows, DIM, device="meta"))
        self.over = torch.nn.Linear(len(SIZES) * DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.over(torch.cat([getattr(self, name)(ids) for name in SIZES], 1))


def sharded() -> DistributedModelParallel:
    ranks, model = dist.get_world_size(), Fused()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.bags.parameters(), {"lr": 0.1})
    sharding = {"t0": row_wise(), "t1": table_wise(rank=ranks - 1), "t2": column_wise(ranks=[0, 1])}
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.bags, sharding, sharder=sharder, device_type="cpu", local_size=ranks, world_size=ranks
    )
    return DistributedModelParallel(
        model, plan=ShardingPlan({"bags": plan}), sharders=[sharder], device=torch.device("cpu")
    )


def main(job: str, root: Path, kind: str, engine: str) -> None:
    ecemb.init_process_group("gloo", job="engines", arena_dir=root)
    torch.manual_seed(1)
    if engine == "torchrec":
        model, sparse, renamed = sharded(), [], {then: name for name, then in FUSED.items()}
        head = model.module.over
    else:
        model = Plain()
        head, renamed = model.over, FUSED
        tables = [getattr(model, name).weight for name in SIZES]
        sparse = [torch.optim.Adagrad(tables, lr=0.1)]
    parameters = [one for name, one in model.named_parameters() if "over" in name]
    dense = torch.optim.Adam(parameters, lr=0.01)
    ranks, store = dist.get_world_size(), store_of(kind, root)
    guard = ecemb.protect(
        model,
        optimizers=[*sparse, dense],
        code=ecemb.Code(ranks, ranks - 1),
        resume=store,
        renamed=renamed,
    )
    begins = {"step": torch.tensor(guard.next_step), **everything(model, model_head(model), dense)}
    for number in range(guard.next_step, guard.next_step + STEPS):
        with guard.step():
            for one in (*sparse, dense):
                one.zero_grad()
            drawn = torch.Generator().manual_seed(100 * number + dist.get_rank())
            model(torch.randint(37, (BATCH, 3), generator=drawn)).square().mean().backward()
            for parameter in head.parameters() if engine == "plain" else ():
                dist.all_reduce(parameter.grad)
            for one in (*sparse, dense):
                one.step()
        guard.save(store)
    ends = {"step": torch.tensor(guard.next_step), **everything(model, model_head(model), dense)}
    if dist.get_rank() == 0:
        torch.save(begins, root / f"{job}.begins")
        torch.save(ends, root / f"{job}.ends")
    guard.leave(store)
    dist.destroy_process_group()


def model_head(model: torch.nn.Module) -> torch.nn.Module:
    """The dense layer as the optimizer sees it."""
    return next(module for name, module in model.named_modules() if name.rpartition(".")[2] == "over")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[4:])
