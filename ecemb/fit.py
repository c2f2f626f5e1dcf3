"""Whether optimizers are those that a saved state is of: it is put back by number, into what stands there.

Must not know: where the state is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import LayoutMismatch

_AGAIN = "run the script that started it, or use another job="
_NONE = "none of the model's"


def kind(one: object) -> str:
    """The name of its class."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def check_fit(
    optimizers: Sequence[Any], names: Sequence[list[list[str | None]]], kept: Sequence[Mapping[str, Any]]
) -> None:
    """Raises LayoutMismatch unless each has the class, groups and dense parameters of the one saved.

    Args:
        optimizers: those that have dense parameters.
        names: the model's names of their dense parameters, by group; None for one that it doesn't have.
        kept: what was saved of each optimizer: its "kind", "options" and "parameters" (as `names`).
    """
    for number, (optimizer, saved) in enumerate(zip(optimizers, kept, strict=True)):
        if saved["kind"] != kind(optimizer):
            raise LayoutMismatch(
                f"optimizer {number} of those with dense parameters is a {kind(optimizer)}, and was a "
                f"{saved['kind']} when the job was started, whose state and options it can't take: {_AGAIN}"
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
                        f"started, so that it would take another's state{_whereabouts(then, names)}: give "
                        f"optimizers and parameters in the order of then, or use another job="
                    )


def _whereabouts(name: str | None, names: Sequence[list[list[str | None]]]) -> str:
    found = [number for number, groups in enumerate(names) if any(name in group for group in groups)]
    return f" ({name} is with optimizer {found[0]} now)" if name is not None and found else ""
