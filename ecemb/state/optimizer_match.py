"""Checks that optimizers match a saved state, which is restored by the number of the optimizer.

Must not know: the storage of the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import LayoutMismatch

_AGAIN = "run the script that started it, or use another job="
_NONE = "none of the model's"


def kind(one: object) -> str:
    """The full name of its class."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def check_fit(
    optimizers: Sequence[Any], names: Sequence[list[list[str | None]]], kept: Sequence[Mapping[str, Any]]
) -> None:
    """Raises LayoutMismatch unless optimizers have the saved classes, groups and dense parameters.

    Args:
        optimizers: the optimizers with dense parameters.
        names: the model's names of their dense parameters, by group; None for a parameter outside the model.
        kept: the saved state of each optimizer: its "kind", "options" and "parameters" (as `names`).
    """
    for number, (optimizer, saved) in enumerate(zip(optimizers, kept, strict=True)):
        if saved["kind"] != kind(optimizer):
            raise LayoutMismatch(
                f"optimizer {number} of those with dense parameters is a {kind(optimizer)}, and was a "
                f"{saved['kind']} when the job was started, so the saved state doesn't fit: {_AGAIN}"
            )
        if len(optimizer.param_groups) != len(saved["options"]):
            raise LayoutMismatch(
                f"the number of parameter groups of {type(optimizer).__name__} is "
                f"{len(optimizer.param_groups)}, and was {len(saved['options'])}: add groups before "
                f"ecemb.protect(), as when the job was started"
            )
    for number, (optimizer, now, saved) in enumerate(zip(optimizers, names, kept, strict=True)):
        for group, (ours, theirs) in enumerate(zip(now, saved["parameters"], strict=True)):
            for one, then in itertools.zip_longest(ours, theirs, fillvalue=_NONE):
                if one != then:
                    raise LayoutMismatch(
                        f"group {group} of optimizer {number} of those with dense parameters (a "
                        f"{kind(optimizer)}) has {one or _NONE} where {then or _NONE} was when the job was "
                        f"started, so it would get the state of another "
                        f"parameter{_whereabouts(then, names)}: give optimizers and parameters in the "
                        f"original order, or use another job="
                    )


def _whereabouts(name: str | None, names: Sequence[list[list[str | None]]]) -> str:
    found = [number for number, groups in enumerate(names) if any(name in group for group in groups)]
    return f" (optimizer {found[0]} now has {name})" if name is not None and found else ""
