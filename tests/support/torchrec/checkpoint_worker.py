"""One rank that trains a TorchRec model, saves it, or resumes it with another number of ranks.

A job whose name begins with "differential" resumes from the differential checkpoints of the others. The job
"elastic" saves nothing, and its memory moves.
"""

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
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan

import ecemb
from baselines.check_n_run.durable import DurableTier

ROWS, DIM = 37, 8


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = torchrec.EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                torchrec.EmbeddingBagConfig(
                    name=f"t{i}", embedding_dim=DIM, num_embeddings=ROWS + i, feature_names=[f"f{i}"]
                )
                for i in range(4)
            ],
        )
        self.over = torch.nn.Linear(4 * DIM, 1)

    def forward(self, batch: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.bags(batch).values()).square().mean()


def build() -> DistributedModelParallel:
    ranks = dist.get_world_size()
    torch.manual_seed(1)
    model = Model()
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, model.bags.parameters(), {"lr": 0.1})
    sharding = {
        "t0": row_wise(),
        "t1": table_wise(rank=ranks - 1),
        "t2": column_wise(ranks=[0, 1]),
        "t3": data_parallel(),
    }
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.bags, sharding, sharder=sharder, device_type="cpu", local_size=ranks, world_size=ranks
    )
    return DistributedModelParallel(
        model, plan=ShardingPlan({"bags": plan}), sharders=[sharder], device=torch.device("cpu")
    )


def batch(step: int) -> torchrec.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.randint(0, 3, (4 * 6,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return torchrec.KeyedJaggedTensor([f"f{i}" for i in range(4)], values, lengths=lengths)


def whole(model: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """All tables and dense parameters, and the fused optimizer's state, put together from all ranks."""
    parts: list[object] = []
    state = {**model.state_dict(), **model.fused_optimizer.state_dict()["state"]}
    for name, value in state.items():
        values = value.items() if isinstance(value, dict) else [("", value)]
        for key, tensor in values:
            shards = tensor.local_shards() if hasattr(tensor, "local_shards") else None
            if shards is None:
                parts.append((name, [0] * tensor.dim(), tensor.detach().clone()))
            else:
                parts += [(name + key, s.metadata.shard_offsets, s.tensor.detach().clone()) for s in shards]
    told: list[list[object]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, parts)
    found: dict[str, torch.Tensor] = {}
    for name, offsets, tensor in sorted(
        (part for of_rank in told for part in of_rank), key=lambda part: (part[0], part[1])
    ):
        found[f"{name}{offsets}" if tensor.dim() > 1 and offsets[1:] != [0] else name] = torch.cat(
            [found[name], tensor] if name in found and offsets[:1] != [0] else [tensor]
        )
    return found


def main(job: str, root: Path, end: int) -> None:
    ecemb.init_process_group("gloo", job=job, arena_dir=root)
    model = build()
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if "over" in n or "t3" in n], lr=0.01)
    ranks = dist.get_world_size()
    tier = DurableTier(root / "differential", root / "memory", policy="consecutive")
    resume = tier if job.startswith("differential") else root / "saved"
    stays = job == "elastic"
    code = ecemb.Code(ranks, ranks - 1)
    guard = ecemb.protect(model, optimizers=dense, code=code, resume=None if stays else resume, elastic=stays)
    if dist.get_rank() == 0:
        print("from step", guard.next_step, flush=True)
    name = "begins" if guard.next_step else "nothing"
    begins = whole(model)
    if dist.get_rank() == 0:
        torch.save(begins, root / f"{job}.{name}")
    for step in range(guard.next_step, end):
        with guard.step():
            dense.zero_grad()
            model(batch(step)).backward()
            dense.step()
        if not stays:
            guard.save(tier)
    if not stays:
        guard.save(root / "saved")
    ends = whole(model)
    if dist.get_rank() == 0:
        torch.save(ends, root / f"{job}.ends")
    if not stays:
        guard.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
