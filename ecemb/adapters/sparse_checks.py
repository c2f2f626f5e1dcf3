"""Checks that modules and torch.optim optimizers change only the rows that a sparse gradient names.

Must not know: arenas, journals, other ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import UnsupportedOptimizer, UnsupportedTable
from ..nn import ShardedEmbeddingBag

Optimizer = torch.optim.Optimizer

_STATES: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: (),
    torch.optim.Adagrad: ("sum",),
    torch.optim.SparseAdam: ("exp_avg", "exp_avg_sq"),
}


def check_module(name: str, module: nn.Module) -> None:
    """Raises UnsupportedTable unless only a sparse gradient can change the module's rows."""
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag, ShardedEmbeddingBag)):
        raise UnsupportedTable(
            f"table {name!r} is a {type(module).__name__}, of which ecemb doesn't know that a lookup changes "
            f"only the rows in a sparse gradient: tables= takes nn.Embedding and nn.EmbeddingBag, with "
            f"sparse=True, and ecemb.nn.ShardedEmbeddingBag; name the embedding that holds the rows, not "
            f"the module around it. Modules that all ranks hold whole are protected without being named"
        )
    weight: object = getattr(module, "weight", None)
    if type(weight) is not nn.Parameter or weight.dim() != 2:
        raise UnsupportedTable(
            f"the weight of table {name!r} is a {type(weight).__name__}, and ecemb protects a plain, "
            f"two-dimensional nn.Parameter: take a parametrization, fully_shard() or a quantization of the "
            f"table away before ecemb.protect()"
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not module.sparse:
        raise UnsupportedTable(
            f"table {name!r} has sparse=False, so its optimizer changes every row in every step: "
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


def check_memory(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raises UnsupportedTable if a table's weight shares memory with another parameter or a buffer.

    Args:
        model: the whole model.
        modules: the tables' modules by key.
    """
    weights = {id(module.weight) for module in modules.values()}
    named = [(f"table {name!r}", module.weight) for name, module in modules.items()]
    others = itertools.chain(model.named_parameters(), model.named_buffers())
    named += [(repr(name), tensor) for name, tensor in others if id(tensor) not in weights]
    furthest = {True: (0, "", 0), False: (0, "", 0)}  # of tables and of other tensors: end, name, id
    for start, end, name, tensor in sorted(_spans(named)):
        is_table = tensor in weights
        for kind in (True, False) if is_table else (True,):
            until, other, which = furthest[kind]
            if start < until and which != tensor:
                raise UnsupportedTable(
                    f"{other} and {name} share memory without being one parameter: ecemb.protect() moves "
                    f"tables, so only one of them would be trained. Give both modules the same "
                    f"nn.Parameter, and name one of them in tables=, or clone() before"
                )
        furthest[is_table] = max(furthest[is_table], (end, name, tensor))


def _spans(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[int, int, str, int]]:
    """Each tensor's begin and end in memory, its name and its id; of those that have memory."""
    for name, tensor in named:
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel() and not tensor.is_meta:
            sides = zip(tensor.shape, tensor.stride(), strict=True)
            items = 1 + sum((size - 1) * stride for size, stride in sides)
            start = tensor.data_ptr()
            yield start, start + items * tensor.element_size(), name, id(tensor)


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


def owners_of(optimizers: Iterable[Optimizer]) -> dict[int, Optimizer]:
    """The optimizer of each parameter, by the parameter's id.

    Raises:
        UnsupportedOptimizer: a parameter has two.
    """
    owners: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if owners.setdefault(id(parameter), optimizer) is not optimizer:
                    raise UnsupportedOptimizer(
                        "two of the optimizers= update the same parameter, of shape "
                        f"{tuple(parameter.shape)}: give each parameter to one optimizer"
                    )
    return owners
