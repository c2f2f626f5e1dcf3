"""Hooks next to an optimizer's update: no other hook of the optimizer runs between them and the update.

What a hook before them writes, or one after them, is not the update's: it has to be declared. The optimizer
calls hooks in the order in which they were registered; a hook of all optimizers, which runs before, moves
these to their places in each step. It is registered once and never removed: torch walks through such hooks
while they run, and garbage that is collected meanwhile must not change them.

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
        _alive.add(self)
        _move_in_each_step()

    def remove(self) -> None:
        """Removes them. May be called twice."""
        _alive.discard(self)
        self._before.remove()
        self._after.remove()

    def move(self, optimizer: Optimizer) -> None:
        """Moves the hooks to their places, if they are those of this optimizer.

        Raises:
            UsageError: they were removed.
        """
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


_alive: weakref.WeakSet[StepHooks] = weakref.WeakSet()


@functools.cache
def _move_in_each_step() -> None:
    """From here on, every optimizer's step moves its hooks. Further calls do nothing."""
    register_optimizer_step_pre_hook(_move)


def _move(optimizer: Optimizer, *_: Any) -> None:
    for one in list(_alive):
        one.move(optimizer)
