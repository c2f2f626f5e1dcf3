"""What TorchRec shows, saves and predicts is the same, bit for bit, with a guard and without.

One process set trains a model as it is and a model with a guard on the same batches. Between the two,
checkpoints of torch.distributed.checkpoint are handed over in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLES = ("row_wise", "table_wise", "column_wise", "data_parallel", "table_row_wise")
ROWS, WIDTH, BAGS = 53, 8, 16


def compare(rank: int, world_size: int, folder: str, data_type: str) -> None:
    """All that this module is about, for one data type of the tables; on every rank."""
    import torch
    import torch.distributed.checkpoint as dcp

    import ecemb

    ecemb.init_process_group("gloo", job="same", arena_dir=folder)
    plain, plain_optimizer = _model(rank, world_size, data_type)
    for number in range(3):
        _train(plain, plain_optimizer, _batch(number, rank))
    assert _evaluate(plain, rank).isfinite().all()

    # saved without a guard, loaded before there is one
    dcp.save(_state(plain, plain_optimizer), checkpoint_id=Path(folder) / "plain")
    guarded, guarded_optimizer = _model(rank, world_size, data_type)
    dcp.load(_state(guarded, guarded_optimizer), checkpoint_id=Path(folder) / "plain")
    code = ecemb.Code(n=world_size, k=world_size - 1)
    guard = ecemb.protect(guarded, optimizers=guarded_optimizer, code=code, failure_domain="rank")
    _same((plain, plain_optimizer), (guarded, guarded_optimizer), rank)
    for number in range(3, 6):
        _train(plain, plain_optimizer, _batch(number, rank))
        with guard.step():
            _train(guarded, guarded_optimizer, _batch(number, rank))
        _same((plain, plain_optimizer), (guarded, guarded_optimizer), rank)

    # saved under a guard, loaded without one
    dcp.save(_state(guarded, guarded_optimizer), checkpoint_id=Path(folder) / "guarded")
    other, other_optimizer = _model(rank, world_size, data_type)
    dcp.load(_state(other, other_optimizer), checkpoint_id=Path(folder) / "guarded")
    _same((plain, plain_optimizer), (other, other_optimizer), rank)
    for number in range(6, 8):
        _train(other, other_optimizer, _batch(number, rank))
        with guard.step():
            _train(guarded, guarded_optimizer, _batch(number, rank))
    _same((other, other_optimizer), (guarded, guarded_optimizer), rank)
    assert guard.scrub().wrong_words == 0
    guard.close()
    torch.distributed.barrier()


def _model(rank: int, world_size: int, data_type: str) -> tuple[Any, Any]:
    import torch
    import torchrec
    from torch import nn
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.types import DataType

    torch.manual_seed(11)
    bags = torchrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            torchrec.EmbeddingBagConfig(
                name=name,
                embedding_dim=WIDTH,
                num_embeddings=ROWS,
                feature_names=[f"feature_{name}"],
                data_type=DataType[data_type],
            )
            for name in TABLES
        ],
    )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bags
            self.over = nn.Sequential(nn.Linear(WIDTH * len(TABLES), 4), nn.LayerNorm(4), nn.Linear(4, 1))

        def forward(self, features: Any) -> torch.Tensor:
            return self.over(self.bags(features).values().float())

    fused = [bag.weight for name, bag in bags.embedding_bags.items() if name != "data_parallel"]
    _apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, fused, {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    ways = {
        "row_wise": sharding_plan.row_wise(),
        "table_wise": sharding_plan.table_wise(rank=world_size - 1),
        "column_wise": sharding_plan.column_wise(ranks=[0, world_size - 1]),
        "data_parallel": sharding_plan.data_parallel(),
        "table_row_wise": sharding_plan.table_row_wise(host_index=0),
    }
    plan = sharding_plan.construct_module_sharding_plan(
        bags, ways, sharder=sharder, device_type="cpu", local_size=world_size, world_size=world_size
    )
    model = torchrec.distributed.DistributedModelParallel(
        Model(), plan=ShardingPlan({"bags": plan}), sharders=[sharder], device=torch.device("cpu")
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    # its state is there from the beginning, so that there is something to load into
    adagrad = KeyedOptimizerWrapper(dense, lambda given: torch.optim.Adagrad(given, lr=0.01, eps=1e-3))
    return model, CombinedOptimizer([model.fused_optimizer, adagrad])


def _batch(number: int, rank: int) -> Any:
    import torch
    import torchrec

    draw = torch.Generator().manual_seed(1000 * number + rank)
    lengths = torch.randint(0, 4, (len(TABLES) * BAGS,), generator=draw)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
    return torchrec.KeyedJaggedTensor([f"feature_{name}" for name in TABLES], values, lengths=lengths)


def _train(model: Any, optimizer: Any, batch: Any) -> None:
    model.train()
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def _evaluate(model: Any, rank: int) -> Any:
    import torch

    model.eval()
    with torch.no_grad():
        return model(_batch(99, rank))


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _same(left: tuple[Any, Any], right: tuple[Any, Any], rank: int) -> None:
    import torch

    assert torch.equal(_evaluate(left[0], rank), _evaluate(right[0], rank)), "evaluation differs"
    ours, theirs = dict(_leaves(_state(*left), "")), dict(_leaves(_state(*right), ""))
    assert ours.keys() == theirs.keys()
    assert any("momentum" in key for key in ours), list(ours)
    for key, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[key].dtype, key
            assert value.numpy().tobytes() == theirs[key].numpy().tobytes(), f"{key} differs"
        else:
            assert value == theirs[key], f"{key} differs: {value} and {theirs[key]}"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{path}/{key}")
    elif hasattr(value, "local_shards"):
        for shard in value.local_shards():
            yield f"{path}{shard.metadata.shard_offsets}", shard.tensor.detach()
    elif isinstance(value, torch.Tensor):
        yield path, value.detach()
    else:
        yield path, value
