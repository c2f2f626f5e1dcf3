"""Breadth-first search through all reachable states, and the shortest way to one that must never be."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

from .background import Background, BackgroundModel
from .lanes import Lanes, LanesModel
from .moves import Moves, MovesModel
from .rules import ALL, Config, Rules
from .starts import Starts, StartsModel
from .system import Model

Searched = Config | Starts | Moves | Background | Lanes
MODELS: dict[type, Any] = {
    Config: Model,
    Starts: StartsModel,
    Moves: MovesModel,
    Background: BackgroundModel,
    Lanes: LanesModel,
}
"""Of each part, by what says what is searched."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
        states: distinct states that were seen.
        seconds: wall time.
        broken: what must never happen and did; empty if nothing did.
        trace: the shortest way there, one line for each transition.
        complete: whether all reachable states were seen.
    """

    states: int
    seconds: float
    broken: str
    trace: tuple[str, ...]
    complete: bool


def search(config: Searched, rules: Rules = ALL, *, limit: int | None = None) -> Result:
    """Looks at every reachable state, or until the first that must never be.

    Args:
        config: the job, and what may happen to it.
        rules: those that are on.
        limit: ends the search after that many states.
    """
    began = time.perf_counter()
    model = MODELS[type(config)](config, rules)
    initial = model.initial()
    parents: dict[Any, Any] = {initial: None}
    level = [initial]
    while level:
        following: list[Any] = []
        for state in level:
            for after in model.successors(state):
                if after.broken:
                    trace = (*_trace(model, parents, state), f"{after.text}   <- {after.broken}")
                    return Result(len(parents), time.perf_counter() - began, after.broken, trace, False)
                if after.state not in parents:
                    parents[after.state] = state
                    following.append(after.state)
        if limit is not None and len(parents) > limit:
            return Result(len(parents), time.perf_counter() - began, "", (), False)
        level = following
    return Result(len(parents), time.perf_counter() - began, "", (), True)


def _trace(model: Any, parents: dict[Any, Any], state: Any) -> list[str]:
    path = [state]
    while (parent := parents[path[-1]]) is not None:
        path.append(parent)
    path.reverse()
    return [
        next(after.text for after in model.successors(a) if after.state == b)
        for a, b in itertools.pairwise(path)
    ]
