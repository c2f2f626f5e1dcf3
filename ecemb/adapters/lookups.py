"""The rows that are about to be read from tables sharded by hand, reported before the read.

Owns the calls before a module's lookups and before its `state_dict()`. They are made only while rows are on
their way to a replacement rank (docs/protocol.md, 9.1). A read of the weight that passes the module by, such
as `functional.embedding(ids, table.weight)`, is not seen.

Must not know: which rows are there, other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..nn import ShardedEmbeddingBag
from .engine import Hooks, Ids, Tied
from .remap_table import After, Before

_PLAIN = (nn.Embedding.forward, nn.EmbeddingBag.forward, ShardedEmbeddingBag.forward)
_ID_TYPES = (torch.int32, torch.int64)


def announced(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """The tables whose modules see all lookups, with rows that follow from the arguments.

    Modules with a `forward()` of their own are left out, and weights that another module of the model has.

    Args:
        model: the whole model.
        modules: the tables' modules by key.
    """
    holders: dict[int, set[int]] = {}
    for module in (*model.modules(), *modules.values()):
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(module))
    return {
        name
        for name, module in modules.items()
        if type(module).forward in _PLAIN
        and "forward" not in vars(module)
        and holders[id(module.weight)] == {id(module)}
    }


def announce(module: nn.Module, index: int, hooks: Hooks, *, lookups: bool) -> list[Any]:
    """Waits for rows before a table's module reads them.

    Args:
        module: the table's.
        index: the table's, for the hooks.
        hooks: called before each `state_dict()` and before lookups.
        lookups: whether lookups wait.

    Returns:
        Handles, whose `remove()` ends the calls. A copy of the module makes none.
    """
    whole = Tied(lambda *_: hooks.wait_for_table(index))
    handles: list[Any] = [module.register_state_dict_pre_hook(whole)]
    if not lookups:
        return handles
    rows = len(module.weight)  # pyright: ignore[reportArgumentType]

    def wait(ids: object) -> None:
        if hooks.ensure is not None and len(found := _rows(ids, rows)):
            hooks.wait_for(index, found)

    eager: Any = torch.compiler.disable(wait)

    def before_lookup(input: object = None, *_: Any, **__: Any) -> None:
        eager(input)

    def after_route(route: Any, *_: Any) -> None:  # with the ids that other ranks ask for
        eager(route.local_ids)

    if isinstance(module, ShardedEmbeddingBag):
        handles.append(After(module, "_route", after_route))
    else:
        handles.append(Before(module, "forward", before_lookup))
    return handles


def _rows(ids: object, rows: int) -> Ids:
    """The rows that a lookup reads, int64 [m], in any order; without those that torch is going to refuse."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in _ID_TYPES:
        return np.empty(0, np.int64)
    found = ids.detach().reshape(-1).cpu().numpy().astype(np.int64)
    return found[(found >= 0) & (found < rows)]
