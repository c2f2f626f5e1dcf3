"""The models that ranks train: tables of one engine under a dense part.

A model of TorchRec looks as its users write it. torchrec is imported when such a model is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import ecemb

Ids = NDArray[np.int64]

INTEGERS = 13
BOTTOM = (512, 256)
TOP = (512, 512, 256)
SMALL = 64
TABLES_LR, DENSE_LR = 0.02, 0.005
RAW_IDS = 4
"""Raw ids for each row, of a table with a managed collision."""
EVICT_EVERY = 32
"""Batches between two evictions."""


class Batch(NamedTuple):
    """One rank's samples in one step.

    Attributes:
        integers: float32 [batch, INTEGERS].
        ids: int64 [tables, batch, lookups], of each sample the rows of each table whose sum it takes.
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
        tables: Returns of each table its local tensors: the weight, then the optimizer's states.
        touched: Makes what `touched` returns; called once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        feed: Callable[[Tensor], Any],
        tables: Callable[[], list[list[Tensor]]],
        touched: Callable[[], Callable[[], Ids]],
    ) -> None:
        self.model = model
        self.optimizers = list(optimizers)
        self._feed = feed
        self.tables = tables
        self._touched = touched

    def train(self, batch: Batch) -> None:
        """One step. Its parts are spans, as the guard's phases are."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        with record_function("bench.forward"):
            loss = functional.binary_cross_entropy_with_logits(self.logits(batch), batch.clicks)
        with record_function("bench.backward"):
            loss.backward()
        with record_function("bench.optimizer"):
            for optimizer in self.optimizers:
                optimizer.step()

    def logits(self, batch: Batch) -> Tensor:
        """Of the batch's samples, float32 [batch, 1]. All ranks."""
        return self.model(batch.integers, self._feed(batch.ids))

    def tensors(self) -> list[Tensor]:
        """All that training changes on this rank: the tables, then the dense parameters."""
        dense = [value for name, value in self.model.named_parameters() if "dense" in name]
        return [tensor for table in self.tables() for tensor in table] + dense

    def touched(self) -> Callable[[], Ids]:
        """Begins to note which rows a step changes.

        Returns:
            Gives those of the last step, of all tables one after another, as they were met.
        """
        return self._touched()


class Dense(nn.Module):
    """DLRM without its tables: integers through a perceptron, dot products with the embeddings, another.

    Args:
        tables: How many there are.
        dim: Of the embeddings.
        bottom: Widths of the perceptron's layers, but for the last one, which is `dim`.
        top: Widths of the layers after the products, but for the last one, which is 1.
        integers: Of each sample.
    """

    def __init__(
        self,
        tables: int,
        dim: int,
        bottom: Sequence[int] = BOTTOM,
        top: Sequence[int] = TOP,
        integers: int = INTEGERS,
    ) -> None:
        super().__init__()
        pairs = torch.triu_indices(tables + 1, tables + 1, 1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.bottom = perceptron(integers, *bottom, dim)
        self.top = nn.Sequential(perceptron(dim + pairs.shape[1], *top), nn.Linear(top[-1], 1))

    def forward(self, integers: Tensor, embedded: Tensor) -> Tensor:
        """Logits [batch, 1] of integers [batch, integers] and embeddings [batch, tables, dim]."""
        bottom = self.bottom(integers)
        vectors = torch.cat([bottom.unsqueeze(1), embedded], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], dim=1))


class Small(nn.Module):
    """One small perceptron on the integers and all embeddings."""

    def __init__(self, tables: int, dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(perceptron(INTEGERS + tables * dim, SMALL), nn.Linear(SMALL, 1))

    def forward(self, integers: Tensor, embedded: Tensor) -> Tensor:
        """Logits [batch, 1] of integers [batch, INTEGERS] and embeddings [batch, tables, dim]."""
        return self.layers(torch.cat([integers, embedded.flatten(1)], dim=1))


DENSE: Mapping[str, Callable[[int, int], nn.Module]] = {"dlrm": Dense, "small": Small}
"""Kind of the dense part -> what builds it, for a number of tables of this dimension."""


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, each followed by a ReLU."""
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))


def torchrec_twin(
    tables: int,
    rows: int,
    dim: int,
    dense_part: str,
    device: str | None = None,
    rule: str = "Adagrad",
    *,
    interval: int = 0,
) -> Twin:
    """Tables of TorchRec, with row-wise Adagrad inside backward.

    On the CPU they are sharded by rows over all ranks. On a device ranks have whole tables: it is shared over
    gloo, which can exchange those there.

    Args:
        tables: How many there are.
        rows: Of each table, over all ranks.
        dim: Of each row.
        dense_part: One of `DENSE`.
        device: Where all of it is; None for the CPU.
        rule: The tables' optimizer: there is only this one.
        interval: Batches between two evictions of a managed collision, which maps `RAW_IDS` raw ids for each
            row; 0 for plain tables.
    """
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import get_unwrapped_module
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim import RowWiseAdagrad
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
            self.dense = DENSE[dense_part](tables, dim)

        def forward(self, integers: Tensor, ids: torchrec.KeyedJaggedTensor) -> Tensor:
            found = self.tables(ids)
            found = found[0] if interval else found  # without the remapped ids
            return self.dense(integers, found.values().reshape(-1, tables, dim))

    def feed(ids: Tensor) -> torchrec.KeyedJaggedTensor:
        lengths = torch.full((ids.shape[0] * ids.shape[1],), ids.shape[2], device=ids.device)
        values = ids.reshape(-1)
        if interval:
            values = values * RAW_IDS + torch.arange(len(values)) % RAW_IDS
        return torchrec.KeyedJaggedTensor(features, values, lengths=lengths)

    features = [f"f{i}" for i in range(tables)]
    bare: Any = Model()
    _apply_optimizer_in_backward(RowWiseAdagrad, bare.tables.parameters(), {"lr": TABLES_LR})
    ranks = dist.get_world_size()
    place = torch.device(device or "cpu")
    inner: Any = bare.tables
    sharder: Any = EmbeddingBagCollectionSharder()
    if interval:
        bare.tables, sharder = managed(inner, interval)
    plan = construct_module_sharding_plan(
        inner,
        {
            f"t{i}": table_wise(rank=i % ranks, compute_kernel="fused")
            if device
            else row_wise(compute_kernel="fused")
            for i in range(tables)
        },
        sharder=sharder._e_sharder if interval else sharder,
        device_type=place.type,
        local_size=1 if device else ranks,  # ranks share the device, as if each were a host with one
        world_size=ranks,
    )
    model = DistributedModelParallel(
        bare, plan=ShardingPlan({"tables": plan}), sharders=[sharder], device=place
    )
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(parameters, lambda given: torch.optim.Adagrad(given, lr=DENSE_LR))

    # TorchRec keeps FBGEMM's modules in plain lists, which model.modules() doesn't see.
    tables_module: Any = get_unwrapped_module(model).tables
    lookups = (tables_module._embedding_module if interval else tables_module)._lookups
    (module,) = (kernel.emb_module for lookup in lookups for kernel in lookup._emb_modules)
    if interval:
        module.reset_embedding_weight_momentum = functools.partial(reset_rows, module)

    def local() -> list[list[Tensor]]:
        weights, states = module.split_embedding_weights(), module.split_optimizer_states()
        found = [[weight, *of_table] for weight, of_table in zip(weights, states, strict=True)]
        return [*found, list(tables_module._managed_collision_collection.buffers())] if interval else found

    def touched() -> Callable[[], Ids]:
        looked_up: list[Tensor] = []
        bases = np.cumsum([0, *(len(weight) for weight in module.split_embedding_weights())])
        bases = bases[list(module.feature_table_map)]

        def note(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            looked_up[:] = [kwargs["indices"], kwargs["offsets"]]

        def rows() -> Ids:
            indices, offsets = (tensor.numpy() for tensor in looked_up)
            bags = (len(offsets) - 1) // len(bases)
            return indices + np.repeat(bases, np.diff(offsets[::bags]))

        module.register_forward_hook(note, with_kwargs=True)
        return rows

    return Twin(model, [model.fused_optimizer, dense], feed, local, touched)


def managed(inner: Any, interval: int) -> tuple[nn.Module, Any]:
    """A managed collision around a collection, evicting by distance and frequency; and its sharder.

    Evicted rows begin with the same values in all models: all of a process draw from one generator.
    """
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )

    configs = inner.embedding_bag_configs()
    maps: Any = {}
    for config in configs:
        config.init_fn = begin_rows
        maps[config.name] = MCHManagedCollisionModule(
            config.num_embeddings,
            torch.device("cpu"),
            DistanceLFU_EvictionPolicy(),
            interval,
            input_hash_size=RAW_IDS * config.num_embeddings,
        )
    around = ManagedCollisionEmbeddingBagCollection(inner, ManagedCollisionCollection(maps, configs))
    return around, ManagedCollisionEmbeddingBagCollectionSharder()


def begin_rows(weights: Tensor) -> Tensor:
    """Overwrites rows with small values, the same each time; returns them."""
    with torch.no_grad():
        return weights.copy_(torch.linspace(-0.01, 0.01, weights.numel()).view_as(weights))


def reset_rows(module: Any, *, pruned_indices: Tensor, logical_table_ids: Tensor, **_: Any) -> None:
    """Zeroes rows of a table and their states, as FBGEMM's operator, which lacks row-wise Adagrad on CPUs."""
    table = int(logical_table_ids)
    for tensor in (module.split_embedding_weights()[table], *module.split_optimizer_states()[table]):
        tensor[pruned_indices] = 0


def sparse_twin(
    tables: int, rows: int, dim: int, dense_part: str, device: str | None = None, rule: str = "Adagrad"
) -> Twin:
    """Tables of ecemb.nn, with one of torch's optimizers on sparse gradients.

    Args:
        tables: How many there are.
        rows: Of each table, over all ranks.
        dim: Of each row.
        dense_part: One of `DENSE`.
        device: Where all of it stays; None for the CPU, from where a guard moves tables into its arena.
        rule: The tables' optimizer, one of `RULES`.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleList(bag(rows, dim, device) for _ in range(tables))
            self.dense = DistributedDataParallel(DENSE[dense_part](tables, dim).to(device or "cpu"))

        def forward(self, integers: Tensor, ids: Tensor) -> Tensor:
            found = [table(of_table) for table, of_table in zip(self.tables, ids, strict=True)]
            return self.dense(integers, torch.stack(found, dim=1))

    model = Model()
    optimizer, states = RULES[rule]
    sparse = optimizer(model.tables.parameters(), lr=TABLES_LR)
    dense = torch.optim.Adagrad(model.dense.parameters(), lr=DENSE_LR)

    weights = list(model.tables.parameters())
    bases = np.cumsum([0, *(len(weight) for weight in weights)])

    def local() -> list[list[Tensor]]:
        return [[weight, *(sparse.state[weight][name] for name in states)] for weight in weights]

    def touched() -> Ids:
        gradients = (weight.grad._indices()[0].numpy() for weight in weights)
        return np.concatenate([rows + base for rows, base in zip(gradients, bases, strict=False)])

    return Twin(model, [sparse, dense], lambda ids: ids, local, lambda: touched)


def bag(rows: int, dim: int, device: str | None) -> ecemb.nn.ShardedEmbeddingBag:
    """One table of ecemb.nn; what stays on a device is drawn there, which takes no time."""
    if device is None:
        return ecemb.nn.ShardedEmbeddingBag(rows, dim)
    made = ecemb.nn.ShardedEmbeddingBag(rows, dim, device="meta").to_empty(device=device)
    nn.init.uniform_(made.weight, -1, 1)
    return made


RULES: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
    "Adagrad": (torch.optim.Adagrad, ("sum",)),
    "SGD": (torch.optim.SGD, ()),
}
"""Optimizer of `sparse_twin`'s tables -> it, and what it keeps for each row."""
ENGINES: Mapping[str, Callable[..., Twin]] = {
    "torchrec": torchrec_twin,
    "managed": functools.partial(torchrec_twin, interval=EVICT_EVERY),
    "sparse": sparse_twin,
}
"""Engine -> what builds a model: tables, rows of each, their dimension, and a kind of `DENSE`."""
