"""Hooks next to an optimizer's update: no other hook of the optimizer runs between them and the update.

What a hook before them writes, or one after them, is not the update's: it has to be declared. The optimizer
calls hooks in the order in which they were registered; a hook of all optimizers, which runs before, moves
these to their places in each step.

Must not know: tables, rows.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import UsageError

Optimizer = torch.optim.Optimizer


class StepHooks:
    """The last pre-hook and the first post-hook of an optimizer's step.

    Args:
        optimizer: whose steps.
        before: as for `Optimizer.register_step_pre_hook`.
        after: as for `Optimizer.register_step_post_hook`.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., None]) -> None:
        self._optimizer = optimizer
        self._before = optimizer.register_step_pre_hook(before)
        self._after = optimizer.register_step_post_hook(after)
        own = weakref.WeakMethod(self._move)
        mover = register_optimizer_step_pre_hook(functools.partial(_call, own))
        self._end = weakref.finalize(self, mover.remove)  # torch keeps it apart from the optimizer

    def remove(self) -> None:
        """Removes them. May be called twice."""
        self._end()
        self._before.remove()
        self._after.remove()

    def _move(self, optimizer: Optimizer) -> None:
        if optimizer is not self._optimizer:
            return
        before, after = (vars(optimizer)[f"_optimizer_step_{when}_hooks"] for when in ("pre", "post"))
        if self._before.id not in before or self._after.id not in after:
            raise UsageError(
                f"the hooks of {type(optimizer).__name__} were removed, and among them those that tell which "
                f"rows of protected tables a step changes: keep them, or remove yours by their handles"
            )
        before.move_to_end(self._before.id)
        after.move_to_end(self._after.id, last=False)


def _call(hook: weakref.WeakMethod[Callable[[Optimizer], None]], optimizer: Optimizer, *_: Any) -> None:
    if (alive := hook()) is not None:
        alive(optimizer)
