"""TorchRec's classes by name: those whose tables ecemb protects, and why it refuses the others.

A class without a decision is refused as well. Needs no TorchRec: the classes of objects are compared by name.

Must not know: how tables are found or protected.
"""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedTable

COLLECTIONS: dict[str, str] = {
    "ShardedEmbeddingBagCollection": "embedding_bags",
    "ShardedEmbeddingCollection": "embeddings",
    "ShardedFusedEmbeddingBagCollection": "embedding_bags",
}
"""Sharded modules with tables -> the attribute with the tables' parameters."""

EVICTING: tuple[str, ...] = (
    "ShardedManagedCollisionEmbeddingBagCollection",
    "ShardedManagedCollisionEmbeddingCollection",
)
"""Sharded modules around a collection and the maps of its ids; an eviction initialises rows again."""

AROUND: tuple[str, ...] = ("ShardedFeatureProcessedEmbeddingBagCollection", *EVICTING)
"""Sharded modules with a collection as a child; their other parts are dense, or maps."""

MAPS: tuple[str, ...] = ("ShardedManagedCollisionCollection",)
"""Sharded modules with maps from raw ids to rows."""

HASHED = "HashZchManagedCollisionModule"
"""The map that probes slots by a hash of the raw id."""

REMAPPING: tuple[str, ...] = ("MCHManagedCollisionModule", HASHED)
"""The maps that are protected."""

POLICIES: tuple[str, ...] = ("LFU_EvictionPolicy", "LRU_EvictionPolicy", "DistanceLFU_EvictionPolicy")
"""Eviction policies of maps that are protected."""

AVERAGING: tuple[str, ...] = ("DMPCollection",)
"""Kinds of DistributedModelParallel that hold tables in several groups of ranks, and average them."""

KERNELS: tuple[str, ...] = ("BatchedFusedEmbedding", "BatchedFusedEmbeddingBag")
"""TorchRec's modules of the compute kernel 'fused', each around a module of FBGEMM."""

_PRUNED = "pruning moves rows outside of lookups, and its map of addresses is state that would be lost"
_INFERENCE = "it is for inference, and trains nothing"
_POOL = "the script writes its rows, and no optimizer does"
_UNTRIED = "TorchRec can't train it on CPUs, and ecemb hasn't tried it with CUDA"

REFUSED: dict[str, str] = {
    "ShardedITEPEmbeddingBagCollection": _PRUNED,
    "ShardedITEPEmbeddingCollection": _PRUNED,
    "ShardedPECEmbeddingCollection": "lookups overlap the updates of the batch before, which is untried",
    "ShardedEmbeddingBag": "ecemb hasn't tried it; use an EmbeddingBagCollection with one table",
    "ShardedEmbeddingTower": _UNTRIED,
    "ShardedEmbeddingTowerCollection": _UNTRIED,
    "ShardedFusedEmbeddingCollection": _UNTRIED,
    "ShardedKeyedJaggedTensorPool": _POOL,
    "ShardedTensorPool": _POOL,
    "ShardedInferenceKeyedJaggedTensorPool": _INFERENCE,
    "ShardedInferenceTensorPool": _INFERENCE,
    "ShardedQuantEmbeddingBagCollection": _INFERENCE,
    "ShardedQuantEmbeddingCollection": _INFERENCE,
    "ShardedQuantFeatureProcessedEmbeddingBagCollection": _INFERENCE,
    "ShardedQuantManagedCollisionCollection": _INFERENCE,
    "ShardedQuantManagedCollisionEmbeddingBagCollection": _INFERENCE,
    "ShardedQuantManagedCollisionEmbeddingCollection": _INFERENCE,
}
"""Sharded modules, and why they are refused."""

REFUSED_MODELS: dict[str, str] = {
    "HybridEvalDMP": "it is for evaluation, and trains nothing",
}
"""Kinds of DistributedModelParallel, and why they are refused."""

_UNKNOWN = "ecemb doesn't know it, so it may hold state that would be lost"


def check_module(path: str, module: object) -> None:
    """Raises UnsupportedTable unless a sharded module is one of `COLLECTIONS`."""
    if (kind := type(module).__name__) not in COLLECTIONS:
        raise UnsupportedTable(
            f"{path or 'the model'} is a {kind}, which ecemb refuses: {REFUSED.get(kind, _UNKNOWN)}. It "
            f"protects {', '.join((*COLLECTIONS, *AROUND))} (docs/torchrec.md)"
        )


def check_model(path: str, model: Any) -> None:
    """Raises UnsupportedTable if a DistributedModelParallel is of a kind that is refused."""
    for base in type(model).__mro__:
        if (reason := REFUSED_MODELS.get(base.__name__)) is not None:
            raise UnsupportedTable(
                f"{path or 'the model'} is a {base.__name__}, which ecemb refuses: {reason}. Use "
                f"DistributedModelParallel (docs/torchrec.md)"
            )
