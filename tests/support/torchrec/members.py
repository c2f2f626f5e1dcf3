"""What ecemb does with each class, kernel, optimizer and type that TorchRec and FBGEMM offer.

A decision names the tables of the kill tests that show protection, or the reason of the refusal.
`tests/contracts/test_torchrec_members.py` looks for members without a decision; `docs/scripts/torchrec.py`
writes them into docs/torchrec.md. Needs no TorchRec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ecemb.engines import members


@dataclasses.dataclass(frozen=True)
class Protected:
    """A member with which tables are protected.

    Attributes:
        part: of the names of tables in the kill tests (`runs.every_table`); tables with it have the member.
        stand_in: what stands in for the part of the member that runs on CUDA only; "" if it runs on CPUs.
    """

    part: str
    stand_in: str = ""


@dataclasses.dataclass(frozen=True)
class Refused:
    """A member that `ecemb.protect` refuses, or that FBGEMM refuses itself.

    Attributes:
        reason: as the table of docs/torchrec.md says it.
        by_fbgemm: whether FBGEMM refuses to train with it on CPUs.
    """

    reason: str
    by_fbgemm: bool = False


@dataclasses.dataclass(frozen=True)
class Untried:
    """A member that trains nothing that ecemb could refuse by its class, and that no test has run.

    Attributes:
        reason: as the table of docs/torchrec.md says it.
    """

    reason: str


Decision = Protected | Refused | Untried

_INFERENCE = "it is for inference, and trains nothing"


def _refused(reasons: Mapping[str, str]) -> dict[str, Decision]:
    return {name: Refused(reason) for name, reason in reasons.items()}


MODELS: dict[str, Decision] = {
    "DistributedModelParallel": Protected(""),
    "DMPCollection": Protected("groups", "its device, and the operator that averages"),
    **_refused(members.REFUSED_MODELS),
}
"""TorchRec's `DistributedModelParallel` and the classes below it."""

MODULES: dict[str, Decision] = {
    "ShardedEmbeddingBagCollection": Protected("bags"),
    "ShardedEmbeddingCollection": Protected("sequences"),
    "ShardedFeatureProcessedEmbeddingBagCollection": Protected("processed"),
    "ShardedFusedEmbeddingBagCollection": Protected("fused"),
    "ShardedManagedCollisionEmbeddingBagCollection": Protected("lfu"),
    "ShardedManagedCollisionEmbeddingCollection": Protected("mapped"),
    "ShardedManagedCollisionCollection": Protected("distance"),
    **_refused(members.REFUSED),
}
"""Classes below TorchRec's `ShardedModule`."""

MAPS: dict[str, Decision] = {
    "MCHManagedCollisionModule": Protected("lfu"),
    "HashZchManagedCollisionModule": Protected("hashed", "FBGEMM's operator that hashes"),
}
"""Classes below TorchRec's `ManagedCollisionModule`."""

POLICIES: dict[str, Decision] = {
    "LFU_EvictionPolicy": Protected("lfu"),
    "LRU_EvictionPolicy": Protected("lru"),
    "DistanceLFU_EvictionPolicy": Protected("distance"),
}
"""Classes below TorchRec's `MCHEvictionPolicy`."""

SHARDINGS: dict[str, Decision] = {
    "row_wise": Protected("row_wise"),
    "table_wise": Protected("table_wise"),
    "column_wise": Protected("column_wise"),
    "table_row_wise": Protected("table_row_wise"),
    "table_column_wise": Protected("table_column_wise"),
    "grid_shard": Protected("grid_shard"),
    "data_parallel": Protected("data_parallel"),
}
"""Values of TorchRec's `ShardingType`."""

_UVM = (
    "a row's last value may be in the cache or in the memory behind it, so that an image of either may be old"
)
_STORE = "rows are in a store outside of the process's memory"

KERNELS: dict[str, Decision] = {
    "fused": Protected(""),
    "dense": Refused(
        "its optimizer is torch's, and covers the whole table (data-parallel tables have this kernel)"
    ),
    "fused_uvm": Refused(_UVM),
    "fused_uvm_caching": Refused(_UVM),
    "fused_triton": Refused("it needs CUDA and a module that isn't public, so that ecemb hasn't tried it"),
    "key_value": Refused(_STORE),
    "ssd_virtual_table": Refused(_STORE),
    "dram_virtual_table": Refused(_STORE),
    "dram_ssd_virtual_table": Refused(_STORE),
    "quant": Refused(_INFERENCE),
    "quant_uvm": Refused(_INFERENCE),
    "quant_uvm_caching": Refused(_INFERENCE),
    "unfused_tpu": Refused("it needs a TPU, and its optimizer is torch's"),
    "customized_kernel": Refused("ecemb can't know how it changes rows"),
}
"""Values of TorchRec's `EmbeddingComputeKernel`."""

_CUDA_ONLY = Protected("", "FBGEMM's operator that looks rows up and updates them")
_DEPRECATED = Refused("FBGEMM offers it neither on CPUs nor with CUDA", by_fbgemm=True)

OPTIMIZERS: dict[str, Decision] = {
    "EXACT_SGD": Protected("sgd"),
    "EXACT_ADAGRAD": Protected("adagrad"),
    "EXACT_ROWWISE_ADAGRAD": Protected("rowwise-adagrad"),
    "EMAINPLACE_ROWWISE_ADAGRAD": Protected("averaging"),
    "ADAM": _CUDA_ONLY,
    "LAMB": _CUDA_ONLY,
    "LARS_SGD": Refused("FBGEMM gives TorchRec no state of it, on any device", by_fbgemm=True),
    "PARTIAL_ROWWISE_ADAM": _CUDA_ONLY,
    "PARTIAL_ROWWISE_LAMB": _CUDA_ONLY,
    "ENSEMBLE_ROWWISE_ADAGRAD": _CUDA_ONLY,
    "NONE": Refused("it updates nothing: the script writes the rows", by_fbgemm=True),
    "SGD": _DEPRECATED,
    "ROWWISE_ADAGRAD": _DEPRECATED,
    "EXACT_ROWWISE_WEIGHTED_ADAGRAD": _DEPRECATED,
    "ROWWISE_RMSPROP_AR": Refused(
        "how much it shrinks a row depends on the lookups since the row's last one, which ecemb hasn't tried"
    ),
    "SHAMPOO": _DEPRECATED,
    "SHAMPOO_V2": _DEPRECATED,
    "MADGRAD": _DEPRECATED,
}
"""Names of FBGEMM's `EmbOptimType`."""

_UNTRAINED = Refused("FBGEMM doesn't train it on CPUs, and ecemb hasn't tried it with CUDA", by_fbgemm=True)

WEIGHTS: dict[str, Decision] = {
    "FP32": Protected("fp32"),
    "FP16": Protected("fp16"),
    "BF16": _UNTRAINED,
    "FP8": _UNTRAINED,
    "NFP8": _UNTRAINED,
    "INT8": _UNTRAINED,
    "INT4": _UNTRAINED,
    "INT2": _UNTRAINED,
    "MX4": _UNTRAINED,
}
"""Names of FBGEMM's `SparseType`, as the type of a table's weights."""

AROUND: dict[str, Decision] = {
    "KeyedOptimizerWrapper": Protected(""),
    "CombinedOptimizer": Protected(""),
    "OptimizerWrapper": Protected(""),
    "GradientClippingOptimizer": Protected(""),
    "WarmupOptimizer": Protected(""),
    "SemisyncOptimizer": Refused("it computes its state from that of the optimizers inside it"),
}
"""Classes below TorchRec's `KeyedOptimizer`, but for those of fused tables; nested as one likes."""

_STREAMS = "its CUDA streams"
_EVALUATES = Untried("it trains nothing: a lookup of it needs no step, unless lookups count")
_CUDA = Untried("its stages are made for CUDA")
_STASHED = Untried("it frees device memory of tables or optimizers while a batch trains, and needs CUDA")

PIPELINES: dict[str, Decision] = {
    "TrainPipelineBase": Protected(""),
    "TrainPipelineSparseDist": Protected(""),
    "TrainPipelineSparseDistLite": Protected(""),
    "TrainPipelineFusedSparseDist": Protected("", _STREAMS),
    "TrainPipelineSemiSync": Refused("it trains with lookups of an earlier step, which a failure loses"),
    "TrainPipelinePEC": Refused("its modules are refused: lookups overlap the updates of the batch before"),
    "EvalPipelineSparseDist": _EVALUATES,
    "EvalPipelineFusedSparseDist": _EVALUATES,
    "EvalPipelineCPUSparse": _EVALUATES,
    "TrainEvalHybridPipelineBase": Untried("it is experimental"),
    "TrainPipelinePT2": Untried("it compiles the model"),
    "TrainPipelineSparseDistCompAutograd": Untried("it compiles the backward pass"),
    "TrainPipelineSparseDistT": _CUDA,
    "TrainPipelineSparseDistBwdOpt": _CUDA,
    "TrainPipelineSparseDistOptStash": _STASHED,
    "TrainPipelineSparseDistEmbStash": _STASHED,
    "TrainPipelinePrefetchEMS": _STASHED,
    "PrefetchTrainPipelineSparseDist": Untried("it prefetches into the cache of 'fused_uvm_caching' on CUDA"),
    "StagedTrainPipeline": Untried("its stages are the script's"),
}
"""Classes below TorchRec's `TrainPipeline`. A guard sees the lookups of a pipeline, and not its class."""

SINCE: dict[str, tuple[int, int]] = {
    "unfused_tpu": (1, 9),
    "ROWWISE_RMSPROP_AR": (1, 9),
    "TrainPipelinePEC": (1, 9),
}
"""Members that TorchRec and FBGEMM don't have in each version that is tested -> the first that has them."""

FAMILIES: dict[str, dict[str, Decision]] = {
    "model": MODELS,
    "sharded module": MODULES,
    "map of ids": MAPS,
    "eviction policy of a map": POLICIES,
    "sharding type": SHARDINGS,
    "compute kernel": KERNELS,
    "optimizer of tables": OPTIMIZERS,
    "type of weights": WEIGHTS,
    "optimizer around others": AROUND,
    "pipeline": PIPELINES,
}
"""By their titles in docs/torchrec.md."""

_BY_SCRIPT = "the script sets it"

GLOBALS: dict[str, str] = {
    "torchrec.distributed.comm._INTRA_PG": "",
    "torchrec.distributed.comm._CROSS_PG": "",
    "torchrec.distributed.comm._INTRA_PG_2D": "",
    "torchrec.distributed.comm._CROSS_PG_2D": "",
    "torchrec.distributed.comm._NODE_GROUP_SIZE_2D": "it is set again with the groups",
    "torchrec.distributed.collective_utils._INITIALIZED": "",
    "torchrec.distributed.collective_utils._USE_COLLECTIVE_VALIDATION": "it is agreed again",
    "torchrec.distributed.comm_ops.GRADIENT_DIVISION": _BY_SCRIPT,
    "torchrec.distributed.comm_ops.USE_SYNC_COLLECTIVES": _BY_SCRIPT,
    "torchrec.distributed.embedding.EC_INDEX_DEDUP": _BY_SCRIPT,
    "torchrec.distributed.global_settings.PROPOGATE_DEVICE": _BY_SCRIPT,
}
"""Global variables that functions of torchrec.distributed assign: why a process that stays keeps their value
after another one's death; "" if `ecemb.engines.torchrec.forget_session` sets them back."""
