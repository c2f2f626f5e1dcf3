"""TorchRec models on one rank, and their tables in memory that lives here, watched."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # FBGEMM's build for CPUs warns of what it lacks, and torchrec deprecates
    torchrec = pytest.importorskip("torchrec", reason="needs torchrec (CONTRIBUTING.md)")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmainplaceModeDefinition
    from torch.distributed.optim import (
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules import mc_embedding_modules, mc_modules
    from torchrec.modules.embedding_configs import DataType
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter

from ecemb.coding.rows import Table, arrange, joined
from ecemb.engines import torchrec as adapter
from ecemb.engines.contract import Hooks
from ecemb.engines.discover import Tables
from ecemb.kernels import contract
from support.arriving_rows import Arriving

WIDTH = 4
QUIET = [  # torch's, TorchRec's and FBGEMM's own warnings
    pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fbgemm.*an autograd kernel was not registered:UserWarning"),
]
OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "rowwise-adagrad": torchrec.optim.RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
}
AVERAGING = {
    "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    "learning_rate": 0.5,
    "emainplace_mode": EmainplaceModeDefinition(step_ema=2),
}
KeyedJaggedTensor = torchrec.KeyedJaggedTensor


@contextmanager
def one_rank() -> Iterator[None]:
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Model(nn.Module):
    """A collection under a dense layer, which doesn't reach it: the gradient is `scale` everywhere."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.collection = collection
        self.over = nn.Linear(2, 1)

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        values = self.collection(batch).values().float()
        return values.sum() + self.over(torch.ones(1, 2)).sum(), values.detach()


class SequenceModel(Model):
    """The same over sequences."""

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        found = self.collection(batch)
        values = torch.cat([found[key].values().reshape(-1) for key in batch.keys()]).float()  # noqa: SIM118
        return values.sum() + self.over(torch.ones(1, 2)).sum(), values.detach()


def build(
    tables: Mapping[str, tuple[int, Sequence[str]]],
    kind: str = "sgd",
    *,
    sequence: bool = False,
    dtype: Any = DataType.FP32,
    sharding: Mapping[str, Any] | None = None,
    fused: bool = True,
    fused_params: Mapping[str, Any] | None = None,
    parallel: Any = DistributedModelParallel,
    widths: Mapping[str, int] | None = None,
    **options: Any,
) -> DistributedModelParallel:
    """A model; tables are rows and features by name. Of the kind "averaging", each second lookup averages.

    With `fused_params` these say FBGEMM's optimizer and its options.
    """
    config = torchrec.EmbeddingConfig if sequence else torchrec.EmbeddingBagConfig
    configs = [
        config(
            name=name,
            embedding_dim=(widths or {}).get(name, WIDTH),
            num_embeddings=rows,
            feature_names=list(names),
            data_type=dtype,
        )
        for name, (rows, names) in tables.items()
    ]
    make = torchrec.EmbeddingCollection if sequence else torchrec.EmbeddingBagCollection
    collection = make(device=torch.device("meta"), tables=configs)
    if kind == "averaging":
        fused_params = AVERAGING
    if fused and fused_params is None:
        apply_optimizer_in_backward(OPTIMIZERS[kind], collection.parameters(), {"lr": 0.5} | options)
    of_sharder = None if fused_params is None else dict(fused_params)
    sharder: Any = (EmbeddingCollectionSharder if sequence else EmbeddingBagCollectionSharder)(of_sharder)
    kinds = {name: plans.table_wise(rank=0) for name in tables} | dict(sharding or {})
    ranks = dist.get_world_size()
    plan = plans.construct_module_sharding_plan(
        collection, kinds, sharder=sharder, local_size=ranks, world_size=ranks, device_type="cpu"
    )
    for one in plan.values() if fused_params is not None else ():
        one.compute_kernel = "fused"
    torch.manual_seed(3)
    return parallel(
        SequenceModel(collection) if sequence else Model(collection),
        plan=ShardingPlan({"collection": plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )


HASHED = 1000  # raw ids are below


def build_managed(
    policy: str,
    kind: str = "sgd",
    *,
    sequence: bool = False,
    rows: int = 9,
    first: Any = None,
    remapping: Any = None,
) -> DistributedModelParallel:
    """A model whose raw ids of the feature "u" are mapped to rows of the table "user", and evicted.

    Args:
        policy: by which it evicts, in each second batch.
        kind: of optimizer.
        sequence: instead of bags.
        rows: of the table.
        first: the batch that gives the history its size; by default one with four ids.
        remapping: another map, without a policy.
    """
    config = torchrec.EmbeddingConfig if sequence else torchrec.EmbeddingBagConfig
    configs: Any = [config(name="user", embedding_dim=WIDTH, num_embeddings=rows, feature_names=["u"])]
    make: Any = torchrec.EmbeddingCollection if sequence else torchrec.EmbeddingBagCollection
    inner = make(device=torch.device("meta"), tables=configs)
    apply_optimizer_in_backward(OPTIMIZERS[kind], inner.parameters(), {"lr": 0.5})
    if remapping is None:
        chosen = getattr(mc_modules, f"{policy}_EvictionPolicy")()
        remapping = mc_modules.MCHManagedCollisionModule(
            rows, torch.device("cpu"), chosen, 2, input_hash_size=HASHED
        )
    around: Any = (
        mc_embedding_modules.ManagedCollisionEmbeddingCollection
        if sequence
        else mc_embedding_modules.ManagedCollisionEmbeddingBagCollection
    )
    collection = around(inner, mc_modules.ManagedCollisionCollection({"user": remapping}, configs))
    sharder: Any = (
        ManagedCollisionEmbeddingCollectionSharder()
        if sequence
        else ManagedCollisionEmbeddingBagCollectionSharder()
    )
    plan = plans.construct_module_sharding_plan(
        inner,
        {"user": plans.row_wise(compute_kernel="fused")},
        sharder=sharder._e_sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    torch.manual_seed(3)
    model = DistributedModelParallel(
        (SequenceModel if sequence else Model)(First(collection)),
        plan=ShardingPlan({"collection.module": plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )
    with torch.no_grad():
        model(batch({"u": [[1, 2], [3, 4]]}) if first is None else first)
    return model


class First(nn.Module):
    """A module's embeddings, without the remapped ids."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: Any) -> Any:
        found, _ = self.module(features)
        return found


def optimizer_of(model: Any) -> CombinedOptimizer:
    """The fused optimizer, and Adam for the dense layer."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    return CombinedOptimizer([("fused", model.fused_optimizer), ("dense", dense)])


def batch(bags: Mapping[str, Sequence[Sequence[int]]], dtype: torch.dtype = torch.int64) -> Any:
    """Ids by feature and bag."""
    lengths = [len(bag) for of_feature in bags.values() for bag in of_feature]
    ids = [i for of_feature in bags.values() for bag in of_feature for i in bag]
    return KeyedJaggedTensor(
        list(bags), torch.tensor(ids, dtype=dtype), lengths=torch.tensor(lengths, dtype=torch.int32)
    )


class Watched:
    """The tables of a model in memory that lives here, and everything that they tell.

    Args:
        model: the model.
        before: called before the tables move.
        arriving: whether rows come only when they are waited for.
    """

    def __init__(
        self, model: nn.Module, before: Callable[[], None] = lambda: None, *, arriving: bool = False
    ) -> None:
        engine, maps = adapter.find(model), adapter.find_maps(model)
        assert engine is not None
        engines = [engine] if maps is None else [engine, maps]
        self.engine, self.tables = engine, Tables(engines, adapter.fused_optimizers(model))
        layouts = [table.layout for table in self.tables.tables]
        starts, size = arrange(layouts)
        self.memory = np.zeros(size + 64, np.uint8)
        skip = -self.memory.ctypes.data % 64
        self.memory = self.memory[skip : skip + size]
        self.stored = [
            Table(layout, self.memory, at, contract.get_kernels("reference"))
            for layout, at in zip(layouts, starts, strict=True)
        ]
        self.names = [layout.name for layout in layouts]
        self.named = joined(layouts)
        self.captured: dict[str, set[int]] = {}
        self.saved: dict[tuple[str, int], bytes] = {}  # of a step, as a journal saves them
        self.sizes: list[int] = []  # of each capture
        self.undeclared = 0
        self.is_open = False
        before()
        self.tables.place(self.stored, fresh=True)
        hooks = Hooks(self._capture, lambda: self.is_open, self._on_undeclared)
        self.arriving: Arriving | None = None
        if arriving:
            self.arriving = Arriving(layouts, [table.columns for table in self.stored])
            hooks.ensure, hooks.ensure_all = self.arriving.ensure, self.arriving.ensure_all
            for index in self.tables.unannounced:
                self.arriving.ensure_all(index)
        self.tables.watch(hooks)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What a guard does around a step's body."""
        self.captured, self.saved = {}, {}
        self.is_open = True
        try:
            self.tables.check()
            yield
            self.tables.check()
            self.tables.images.take().store(self._capture)
        finally:
            self.is_open = False

    def rows(self) -> dict[str, NDArray[np.uint8]]:
        """The bytes of every row, of weights and states together, copied."""
        return {
            name: np.concatenate(table.columns, axis=1)
            for name, table in zip(self.names, self.stored, strict=True)
        }

    def changed(self, before: Mapping[str, NDArray[np.uint8]]) -> dict[str, set[int]]:
        """The rows that differ from `before`, of tables that have any."""
        now = self.rows()
        found = {name: set(np.flatnonzero((now[name] != before[name]).any(axis=1)).tolist()) for name in now}
        return {name: rows for name, rows in found.items() if rows}

    def unsaved(self, before: Mapping[str, NDArray[np.uint8]]) -> list[tuple[str, int]]:
        """The rows that a journal would not bring back to `before`: not captured, or after they changed."""
        changed = self.changed(before)
        return [
            (name, row)
            for name, rows in changed.items()
            for row in sorted(rows)
            if self.saved.get((name, row)) != before[name][row].tobytes()
        ]

    def _capture(self, table: int, ids: NDArray[np.int64]) -> None:
        assert ids.dtype == np.int64 and ids.ndim == 1
        if self.arriving is not None:
            self.arriving.assert_there(table, ids)
        self.sizes.append(len(ids))
        assert len(ids) and ids.min() >= 0 and ids.max() < self.named[table].rows
        while len(ids):  # rows of a group count on through its tables
            rows = self.stored[table].layout.rows
            here = ids[ids < rows].tolist()
            if here:
                name, columns = self.names[table], self.stored[table].columns
                self.captured.setdefault(name, set()).update(here)
                for row in here:
                    self.saved.setdefault((name, row), b"".join(column[row].tobytes() for column in columns))
            ids, table = ids[ids >= rows] - rows, table + 1

    def _on_undeclared(self) -> None:
        self.undeclared += 1
