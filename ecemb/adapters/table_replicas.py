"""TorchRec's 2D parallelism: a DMPCollection holds each table in several groups of ranks, and averages them.

Owns what `DMPCollection.sync()` writes: all rows of the tables, with their optimizers' states, on each rank.
The script calls it directly, so that no hook of a module sees the call: `torchrec` wraps the instance's
method. Until the next average the groups differ, so each rank's rows count as its own in a checkpoint.

Must not know: journals, parity, other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UnsupportedTable
from .fbgemm import Batch, check_inside, own


class TableReplicas:
    """The tables of one DMPCollection.

    Args:
        path: of the model that it is, or is in.
        model: the DMPCollection.

    Raises:
        UnsupportedTable: it keeps tables in parts, or has a managed collision.
    """

    def __init__(self, path: str, model: Any) -> None:
        self.path: str = path or "the model"
        self.model: Any = model
        self._contexts: list[Any] = own(model, "_ctxs")
        for context in self._contexts:
            if (strategy := own(context, "sharding_strategy").name) == "FULLY_SHARDED":
                raise UnsupportedTable(
                    f"{self.path} is a DMPCollection with the strategy {strategy}: its tables are only there "
                    f"during a lookup, and are scattered again beside the step. Use ShardingStrategy.DEFAULT "
                    f"(docs/torchrec.md)"
                )
            if own(context, "hash_zch_modules"):
                raise UnsupportedTable(
                    f"{self.path} is a DMPCollection with a managed collision: its sync() merges the maps of "
                    f"several ranks, which is untried. Use DistributedModelParallel (docs/torchrec.md)"
                )
        self._modules = {
            id(module) for context in self._contexts for module, _ in own(context, "modules_to_sync")
        }

    def has(self, batch: Batch) -> bool:
        """Whether `sync()` averages the tables of a batch."""
        return id(batch.module) in self._modules

    def check_views(self, spans: Sequence[torch.Tensor]) -> None:
        """Raises UnsupportedTable unless the tensors that `sync()` averages are within `spans`."""
        for context in self._contexts:
            for by_dtype in (own(context, "weights_by_dtype"), own(context, "optimizer_tensors_by_dtype")):
                check_inside(self.path, [one for tensors in by_dtype.values() for one in tensors], spans)
