"""What of a training is to be protected, as this rank finds it in the model and its optimizers.

Owns the division of a training's state into tables, replicated state and rank state. Must not know the other
ranks, nor arenas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..adapters.discover import Tables, find
from ..errors import ConfigurationError
from ..state import rank_state as rank_states
from ..state.ddp_buckets import GradientBuckets, check_apart, found_in
from ..state.optimizers import NamedOptimizers
from ..state.rank_state import RankState, objects_of
from ..state.replicated import ReplicatedState
from .request import Request


@dataclasses.dataclass(frozen=True)
class Training:
    """A training's state, by how it comes back.

    Attributes:
        tables: protected tables, whose rows parity covers.
        optimizers: those that step tables, by name.
        buckets: gradient buckets of DistributedDataParallel.
        replicated: dense parameters, buffers and their optimizers' state: the same on all ranks.
        rank_state: generators, scalars, `state=` objects and metrics of this rank.
        state_bytes: room for the packed rank state.
    """

    tables: Tables
    optimizers: NamedOptimizers
    buckets: GradientBuckets
    replicated: ReplicatedState
    rank_state: RankState
    state_bytes: int


def examine(request: Request) -> Training:
    """Finds the state of a training; this rank alone.

    Raises:
        ConfigurationError: the model, an optimizer or a `state=` object can't be protected; also
            UnsupportedTable, UnsupportedOptimizer.
    """
    tables, optimizers = find(request.model, request.modules, request.optimizers)
    _check_state(objects_of(request.state), tables.parameters)
    averaged = found_in(request.model, tables.averaged)
    check_apart(averaged, tables.parameters)
    buckets = GradientBuckets([*averaged, *tables.averaged])
    replicated = ReplicatedState(request.model, optimizers, tables.parameters, tables.aside)
    every = [*request.optimizers, *optimizers]
    named = NamedOptimizers(request.model, tables.stepped, tables.parameters, every, request.without)

    def scalars() -> dict[str, Any]:
        return {"tables": tables.state(), "buckets": buckets.state()}

    def set_scalars(state: dict[str, Any]) -> None:
        tables.set_state(state["tables"], request.renamed)
        buckets.set_state(state["buckets"])

    rank_state = RankState(request.state, scalars, set_scalars, request.model)
    return Training(tables, named, buckets, replicated, rank_state, rank_states.room(len(rank_state.pack())))


def _check_state(state: Mapping[str | int, object], own: Sequence[nn.Parameter]) -> None:
    """Refuses `state=` objects whose return would overwrite tables or their optimizers' state."""
    tables = {id(parameter) for parameter in own}
    for key, item in state.items():
        held: list[Any] = []
        way_out = "leave it out, model= is saved anyway"
        if isinstance(item, nn.Module):
            held = list(item.parameters())
        elif isinstance(item, torch.optim.Optimizer):
            held = [parameter for group in item.param_groups for parameter in group["params"]]
            way_out = "name it in optimizers= alone"
        if any(id(parameter) in tables for parameter in held):
            raise ConfigurationError(
                f"state= object {key!r} ({type(item).__name__}) holds parameters of protected tables, which "
                f"come back by themselves, and its load_state_dict() would overwrite them: {way_out}"
            )
