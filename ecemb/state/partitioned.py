"""Refuses models and optimizers that are partitioned over ranks: replicated state is complete on every rank.

Must not know: the storage of replicated state.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError

logger: logging.Logger = logging.getLogger("ecemb")


def check_whole(name: str, tensor: torch.Tensor) -> None:
    """Raises ConfigurationError unless the tensor is complete on every rank."""
    if nn.parameter.is_lazy(tensor):
        raise ConfigurationError(
            f"{name} has no shape yet: run a batch through the model, or give its module a size, before "
            f"ecemb.protect()"
        )
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is not None and isinstance(tensor, sharded.DTensor):
        raise ConfigurationError(
            f"{name} is a DTensor, of which each rank holds a part: ecemb keeps dense parameters that are "
            f"complete on all ranks; train them with DistributedDataParallel instead of fully_shard()"
        )
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ConfigurationError(
            f"{name} is on the meta device or not dense, and it is not a protected table: "
            f"materialise it before ecemb.protect(), or name it in tables="
        )


def check_modules(model: nn.Module) -> None:
    """Raises ConfigurationError if the parameters of a module are partitioned over ranks."""
    for name, module in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ConfigurationError(
                f"{name or 'the model'} is a FullyShardedDataParallel, of whose parameters each rank holds "
                f"a part: ecemb keeps dense parameters that are complete on all ranks; train them with "
                f"DistributedDataParallel"
            )


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """Raises ConfigurationError if state is partitioned over ranks; logs state that may be left out."""
    for optimizer in optimizers:
        kind = type(optimizer)
        if any(one.__name__ == "ZeroRedundancyOptimizer" for one in kind.__mro__):
            raise ConfigurationError(
                "ZeroRedundancyOptimizer partitions the state of dense parameters over the ranks: ecemb "
                "keeps state that is complete on all ranks; use the optimizer that it wraps"
            )
        own = getattr(kind, "state_dict", None)
        if isinstance(optimizer, torch.optim.Optimizer) and own is not torch.optim.Optimizer.state_dict:
            logger.info(
                "%s overrides state_dict(); ecemb keeps only its parameter groups and its state: "
                "pass in state= an object for its other attributes",
                kind.__name__,
            )
