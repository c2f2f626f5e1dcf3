"""The models that `bench.overhead` trains: tables of one engine under the dense part of a DLRM.

A model of TorchRec looks as its users write it. torchrec is imported when such a model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ecemb

INTEGERS = 13
BOTTOM = (512, 256)
TOP = (512, 512, 256)
TABLES_LR, DENSE_LR = 0.02, 0.005


class Batch(NamedTuple):
    """One rank's samples in one step.

    Attributes:
        integers: float32 [batch, INTEGERS].
        ids: int64 [tables, batch], one row of each table for each sample.
        clicks: float32 [batch, 1].
    """

    integers: Tensor
    ids: Tensor
    clicks: Tensor


class Twin:
    """A model with its optimizers.

    Args:
        model: Called with a batch's integers and what `feed` makes of its ids.
        optimizers: Of the whole training.
        feed: Makes the model's input of ids.
        tables: Returns the tables' local tensors, weights and optimizer state.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        feed: Callable[[Tensor], Any],
        tables: Callable[[], list[Tensor]],
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self._feed = feed
        self._tables = tables

    def train(self, batch: Batch) -> None:
        """One step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        logits = self.model(batch.integers, self._feed(batch.ids))
        functional.binary_cross_entropy_with_logits(logits, batch.clicks).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def tensors(self) -> list[Tensor]:
        """All that training changes on this rank: the tables, then the dense parameters."""
        dense = [value for name, value in self.model.named_parameters() if "dense" in name]
        return [*self._tables(), *dense]


class Dense(nn.Module):
    """DLRM without its tables: integers through a perceptron, dot products with the embeddings, another."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        pairs = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.bottom = perceptron(INTEGERS, *BOTTOM, dim)
        self.top = nn.Sequential(perceptron(dim + pairs.shape[1], *TOP), nn.Linear(TOP[-1], 1))

    def forward(self, integers: Tensor, embedded: Tensor) -> Tensor:
        """Logits [batch, 1] of integers [batch, INTEGERS] and embeddings [batch, tables, dim]."""
        bottom = self.bottom(integers)
        vectors = torch.cat([bottom.unsqueeze(1), embedded], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], dim=1))


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, each followed by a ReLU."""
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def torchrec_twin(tables: int, rows: int, dim: int) -> Twin:
    """Tables of TorchRec, sharded by rows over all ranks, with row-wise Adagrad inside backward."""
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.keyed import KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = torchrec.EmbeddingBagCollection(
                device=torch.device("meta"),
                tables=[
                    torchrec.EmbeddingBagConfig(
                        name=f"t{i}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"f{i}"]
                    )
                    for i in range(tables)
                ],
            )
            self.dense = Dense(tables, dim)

        def forward(self, integers: Tensor, ids: torchrec.KeyedJaggedTensor) -> Tensor:
            return self.dense(integers, self.tables(ids).values().reshape(-1, tables, dim))

    def feed(ids: Tensor) -> torchrec.KeyedJaggedTensor:
        lengths = torch.ones(ids.numel(), dtype=torch.int64)
        return torchrec.KeyedJaggedTensor(features, ids.reshape(-1), lengths=lengths)

    features = [f"f{i}" for i in range(tables)]
    bare = Model()
    _apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, bare.tables.parameters(), {"lr": TABLES_LR})
    ranks = dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        bare.tables,
        {f"t{i}": row_wise() for i in range(tables)},
        sharder=sharder,
        device_type="cpu",
        local_size=ranks,
        world_size=ranks,
    )
    model = DistributedModelParallel(
        bare, plan=ShardingPlan({"tables": plan}), sharders=[sharder], device=torch.device("cpu")
    )
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda given: torch.optim.Adagrad(given, lr=DENSE_LR))

    def tensors() -> list[Tensor]:
        states = model.fused_optimizer.state_dict()["state"]
        shown = [value for key, value in sorted(model.state_dict().items()) if "embedding_bags" in key]
        shown += [value for _, state in sorted(states.items()) for _, value in sorted(state.items())]
        return [shard.tensor for value in shown for shard in value.local_shards()]

    return Twin(model, [model.fused_optimizer, dense], feed, tensors)


def sparse_twin(tables: int, rows: int, dim: int) -> Twin:
    """Tables of ecemb.nn, with torch's Adagrad on sparse gradients."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(ecemb.nn.ShardedEmbeddingBag(rows, dim) for _ in range(tables))
            self.dense = DistributedDataParallel(Dense(tables, dim))

        def forward(self, integers: Tensor, ids: Tensor) -> Tensor:
            found = [table(row.unsqueeze(1)) for table, row in zip(self.tables, ids, strict=True)]
            return self.dense(integers, torch.stack(found, dim=1))

    model = Model()
    sparse = torch.optim.Adagrad(model.tables.parameters(), lr=TABLES_LR)
    dense = torch.optim.Adagrad(model.dense.parameters(), lr=DENSE_LR)

    def tensors() -> list[Tensor]:
        weights = list(model.tables.parameters())
        return [*weights, *(sparse.state[weight]["sum"] for weight in weights)]

    return Twin(model, [sparse, dense], lambda ids: ids, tensors)


ENGINES: Mapping[str, Callable[[int, int, int], Twin]] = {"torchrec": torchrec_twin, "sparse": sparse_twin}
"""Engine -> what builds a model of so many tables, of so many rows each, of this dimension."""
