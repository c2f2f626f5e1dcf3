"""Which modules and torch.optim optimizers leave all rows alone that a sparse gradient doesn't name.

Must not know: arenas, journals, other ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from ..errors import UnsupportedOptimizer, UnsupportedTable

Optimizer = torch.optim.Optimizer

_STATES: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: ("sum",),
    torch.optim.SparseAdam: ("exp_avg", "exp_avg_sq"),
}


def check_module(name: str, module: nn.Module) -> None:
    """Raises UnsupportedTable unless only a sparse gradient can change the module's rows."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        raise UnsupportedTable(
            f"table {name!r} is a {type(module).__name__} without a two-dimensional weight: tables= "
            f"takes nn.Embedding, nn.EmbeddingBag and ecemb.nn.ShardedEmbeddingBag"
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not module.sparse:
        raise UnsupportedTable(
            f"table {name!r} has sparse=False, so that its optimizer changes every row in every step: "
            f"build it with sparse=True"
        )
    if getattr(module, "max_norm", None) is not None:
        raise UnsupportedTable(
            f"table {name!r} has max_norm={module.max_norm}, which rewrites rows during the lookup, "
            f"undeclared: build it without max_norm"
        )
    if weight.device.type not in ("cpu", "cuda", "meta"):
        raise UnsupportedTable(
            f"table {name!r} is on {weight.device}: ecemb protects tables on CPUs and CUDA devices; move "
            f"it there before ecemb.protect()"
        )
    if weight.is_meta and not hasattr(module, "reset_parameters"):
        raise UnsupportedTable(
            f"table {name!r} is on the meta device and {type(module).__name__} has no "
            f"reset_parameters() to initialise it: add one, or build it on the CPU"
        )


def states_of(name: str, optimizer: Optimizer) -> tuple[str, ...]:
    """The names of an optimizer's per-row state, in the order of a record's columns.

    Raises:
        UnsupportedOptimizer: it may change rows that a sparse gradient doesn't name.
    """
    if type(optimizer) not in _STATES:
        known = ", ".join(kind.__name__ for kind in _STATES)
        raise UnsupportedOptimizer(
            f"table {name!r} is updated by {type(optimizer).__name__}, and ecemb doesn't know that it "
            f"changes only the rows in a sparse gradient: use one of {known}"
        )
    return _STATES[type(optimizer)]
