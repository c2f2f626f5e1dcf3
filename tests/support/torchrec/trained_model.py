"""The models that run_worker.py trains: collections of every kind, sharded in every way."""

from __future__ import annotations

from typing import Any

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmainplaceModeDefinition
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed import sharding_plan as plans
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from support.torchrec.runs import FEW
from support.torchrec.stand_ins import HashZchManagedCollisionModule, hash_mc_evictions

HashZchEvictionConfig = hash_mc_evictions.HashZchEvictionConfig
HashZchEvictionPolicyName = hash_mc_evictions.HashZchEvictionPolicyName
WIDTH = 8
OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "rowwise-adagrad": torchrec.optim.RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "averaging": None,  # by the sharder
}
DTYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


def shardings(number: int, ranks: int) -> dict[str, Any]:
    """Every sharding type, over other ranks for every `number`; two hosts are imagined."""
    hosts = max(1, ranks // 2)
    return {
        "row_wise": plans.row_wise(),
        FEW: plans.row_wise(),
        "table_wise": plans.table_wise(rank=number % ranks),
        "column_wise": plans.column_wise(ranks=[number % ranks, (number + 1) % ranks]),
        "table_row_wise": plans.table_row_wise(host_index=number % hosts),
        "table_column_wise": table_column_wise(number % hosts),
        "grid_shard": grid(hosts),
        "data_parallel": plans.data_parallel(),
    }


def table_column_wise(host: int) -> Any:
    """Columns split over the ranks of one host; torchrec's sharding plans have no function for it."""

    def sharding(parameter: Any, local_size: int, _: int, device_type: str, sharder: Any) -> Any:
        rows, width = parameter.shape[0], parameter.shape[1] // local_size
        shards = [([rows, width], [0, i * width], host * local_size + i) for i in range(local_size)]
        kind = plans.ShardingType.TABLE_COLUMN_WISE.value
        return plans._get_parameter_sharding(parameter, kind, shards, local_size, device_type, sharder)

    return sharding


def grid(hosts: int) -> Any:
    """As torchrec's grid_shard, which splits columns from a width of 256 on only."""

    def sharding(parameter: Any, local_size: int, _: int, device_type: str, sharder: Any) -> Any:
        rows, width = parameter.shape[0], parameter.shape[1] // hosts
        block = -(-rows // local_size)
        shards: list[Any] = []
        for host in range(hosts):
            for local in range(local_size):
                first = min(local * block, rows)
                size = [min(block, rows - first), width]
                shards.append((size, [first, host * width], host * local_size + local))
        kind = plans.ShardingType.GRID_SHARD.value
        return plans._get_parameter_sharding(parameter, kind, shards, local_size, device_type, sharder)

    return sharding


class Collections:
    """The collections of a model, before they are sharded.

    Attributes:
        modules: by the first word of their tables' names, and by more where tables of one must share that.
        features: by the same.
        plan: by path in the model.
        rows: by table.
        ids: by table, the number of different ids in batches.
    """

    def __init__(self, tables: list[str], ranks: int) -> None:
        self.modules, self.features = nn.ModuleDict(), dict[str, list[str]]()
        self.plan: dict[str, Any] = {}
        self.rows: dict[str, int] = {}
        self.ids: dict[str, int] = {}
        for name in tables:
            kind, dtype, optimizer, _ = name.split("/")
            shared = {"fused": [optimizer], "variable": [dtype, optimizer]}.get(kind, [])
            self.features.setdefault("-".join([kind, *shared]), []).append(name)
        for key, names in self.features.items():
            self._add(key, names, ranks)

    def _add(self, key: str, names: list[str], ranks: int) -> None:
        kind = key.partition("-")[0]
        config = EmbeddingConfig if kind in SEQUENCES else EmbeddingBagConfig
        configs: list[Any] = []
        per_table: dict[str, Any] = {}
        for number, name in enumerate(names):
            self.rows[name] = 37 + len(self.rows) % 5  # FBGEMM needs rows on every rank
            if name.endswith(FEW):
                self.rows[name] = ranks - 1
            if kind == "hashed":
                self.rows[name] = 5 * ranks  # of equally many slots
            self.ids[name] = 300 if kind in MANAGED else self.rows[name]
            _, dtype, _, sharding = name.split("/")
            table = name.replace("/", "_")
            per_table[table] = shardings(number, ranks)[sharding]
            configs.append(
                config(
                    name=table,
                    embedding_dim=WIDTH,
                    num_embeddings=self.rows[name],
                    feature_names=[name],
                    data_type=DTYPES[dtype],
                )
            )
        module = _collection(kind, configs, names)
        self.modules[key] = module
        plan = plans.construct_module_sharding_plan(
            module._embedding_module if kind in MANAGED else module,
            per_table,
            sharder=SHARDERS[kind]._e_sharder if kind in MANAGED else SHARDERS[kind],
            local_size=max(1, ranks // 2),
            world_size=ranks,
            device_type="cpu",
        )
        if kind in ("fused", "averaged", *MANAGED):  # their parameters don't say which optimizer they have
            for one in plan.values():
                one.compute_kernel = "fused"
        self.plan[f"collections.{key}"] = plan


_AVERAGING = {
    "optimizer": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
    "learning_rate": 0.1,
    "emainplace_mode": EmainplaceModeDefinition(step_ema=2),
}
SHARDERS: dict[str, Any] = {
    "bags": (_bags := EmbeddingBagCollectionSharder(_AVERAGING)),  # for tables without another optimizer
    "averaged": _bags,
    "weighted": _bags,
    "variable": _bags,
    "sequences": EmbeddingCollectionSharder(),
    "processed": FeatureProcessedEmbeddingBagCollectionSharder(),
    "fused": FusedEmbeddingBagCollectionSharder(),
    "lfu": (_managed := ManagedCollisionEmbeddingBagCollectionSharder()),
    "lru": _managed,
    "distance": _managed,
    "mapped": ManagedCollisionEmbeddingCollectionSharder(),
    "hashed": _managed,
    "groups": _bags,
}
SEQUENCES = ("sequences", "mapped")
MANAGED: dict[str, Any] = {
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
    "distance": DistanceLFU_EvictionPolicy,
    "mapped": DistanceLFU_EvictionPolicy,
    "hashed": HashZchEvictionPolicyName.LRU_EVICTION,
}
HASHED = 4000  # raw ids of a managed collision are below
LONGEST = 3  # ids of a bag


def _collection(kind: str, configs: list[Any], names: list[str]) -> Any:
    meta = torch.device("meta")
    optimizers = [OPTIMIZERS[name.split("/")[2]] for name in names]
    if kind == "fused":
        return FusedEmbeddingBagCollection(configs, optimizers[0], {"lr": 0.1}, device=meta)
    if kind in SEQUENCES:
        module: Any = EmbeddingCollection(device=meta, tables=configs)
        inner = module.embeddings
    else:
        weighted = kind in ("weighted", "processed")
        module = EmbeddingBagCollection(device=meta, tables=configs, is_weighted=weighted)
        inner = module.embedding_bags
    for name, one, optimizer in zip(names, configs, optimizers, strict=True):
        if optimizer is None:
            continue
        number = names.index(name.replace(FEW, "row_wise"))  # of equal rates, so that they are in one batch
        lr = 0.1 if kind == "variable" else 0.1 + 0.01 * number  # FBGEMM looks the former up at once
        apply_optimizer_in_backward(optimizer, inner[one.name].parameters(), {"lr": lr})
    if kind in MANAGED:
        remapping: Any = {one.name: _map(kind, one) for one in configs}
        around = (
            ManagedCollisionEmbeddingCollection
            if kind in SEQUENCES
            else ManagedCollisionEmbeddingBagCollection
        )
        return around(module, ManagedCollisionCollection(remapping, configs))
    if kind == "processed":
        processors: Any = {name: PositionWeightedModule(LONGEST) for name in names}
        return FeatureProcessedEmbeddingBagCollection(module, processors)
    return module


def _map(kind: str, config: Any) -> Any:
    """A map from raw ids to the rows of a table."""
    rows, cpu = config.num_embeddings, torch.device("cpu")
    if kind != "hashed":
        return MCHManagedCollisionModule(rows, cpu, MANAGED[kind](), 2, input_hash_size=HASHED)
    return HashZchManagedCollisionModule(
        rows,
        cpu,
        total_num_buckets=rows // 5,
        max_probe=3,
        input_hash_size=HASHED,
        eviction_policy_name=MANAGED[kind],
        eviction_config=HashZchEvictionConfig(config.feature_names, single_ttl=2),
        track_id_freq=True,
    )


class Model(nn.Module):
    """Collections of embeddings under a dense layer."""

    def __init__(self, collections: Collections) -> None:
        super().__init__()
        self.features = collections.features
        self.collections = collections.modules
        self.over = nn.Linear(WIDTH * len(collections.rows), 1)

    def forward(
        self, batch: KeyedJaggedTensor, others: dict[str, KeyedJaggedTensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        parts: list[Tensor] = []
        for key, collection in self.collections.items():
            apart = key.startswith(("weighted", "variable"))  # by the key: fx traces this
            found = collection(others[key] if apart and others is not None else batch)
            if key in MANAGED:
                found, _ = found  # without the remapped ids
            if key not in SEQUENCES:
                parts.append(found.values().float())
                continue
            for name in self.features[key]:
                jagged = found[name]
                parts.append(
                    torch.segment_reduce(jagged.values().float(), "sum", lengths=jagged.lengths(), axis=0)
                )
        out = self.over(torch.cat(parts, dim=1))
        return out.square().mean(), out.detach()
