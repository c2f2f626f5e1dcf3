"""TorchRec's own `ModelDeltaTracker`, off the shelf, which notes rows that change in place of our bits.

It keeps the ids of every lookup, repeats included, and makes them distinct when they are read, which is at a
checkpoint. Looked-up rows count as changed, evaluation included.

Must not know: bits, checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ModelTracker:
    """The tracker of a model, begun now. `of` finds out whether a model can have one.

    Args:
        model: TorchRec's `DistributedModelParallel`.

    Attributes:
        tables: that it follows, by their last names.
    """

    def __init__(self, model: Any) -> None:
        from torchrec.distributed.model_tracker.types import DeltaTrackerConfig

        self._tracker: Any = model.init_torchrec_delta_tracker(DeltaTrackerConfig())
        self.tables = frozenset(map(last_name, self._tracker.fqn_to_feature_names()))
        self._tracker.clear()

    @classmethod
    def of(cls, model: nn.Module) -> ModelTracker | None:
        """The tracker of the first model in it that TorchRec shards; None if there is none."""
        for module in model.modules():
            if hasattr(module, "init_torchrec_delta_tracker"):
                return cls(module)
        return None

    @property
    def memory_bytes(self) -> int:
        """Of the ids that wait to be read."""
        lookups: dict[str, list[Any]] = self._tracker.store.per_fqn_lookups
        return sum(one.ids.nbytes for of_table in lookups.values() for one in of_table)

    def read(self) -> dict[str, Tensor]:
        """Rows of this rank's shards that were looked up since the last call, int64 [m], by last name."""
        store = self._tracker.store  # which can't say that there is nothing of a table
        store.per_fqn_lookups = {name: lookups for name, lookups in store.per_fqn_lookups.items() if lookups}
        found: dict[str, Tensor] = self._tracker.get_unique_ids()
        return {last_name(name): ids.to("cpu", torch.int64) for name, ids in found.items()}


def last_name(name: str) -> str:
    """A table's name without the path of the module that it is in."""
    return name.rpartition(".")[2]
