"""The buckets in which DistributedDataParallel sums gradients, and their order after a restart.

DistributedDataParallel rebuilds its buckets after its first backward (in a static graph: the second), in the
order in which gradients arrived. The place of a value in a bucket decides the order in which gloo and NCCL
add the ranks' parts, so the last bits of a sum depend on the layout. A restarted process would start with the
initial layout, and its first steps would differ from those of an uninterrupted run. So the order is stored
as rank state, and a restart repeats the backwards that decide the order, with gradients of zero.

Must not know: tables, arenas, the step protocol.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigurationError

logger: logging.Logger = logging.getLogger("ecemb")

_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class GradientBuckets:
    """The order of gradients in every DistributedDataParallel of a training.

    Args:
        modules: all DistributedDataParallel modules, in the same order at each start and on all ranks.
    """

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        self._modules = [one for one in modules if one.static_graph or not one.find_unused_parameters]
        self._orders: list[list[list[int]]] = [[] for _ in self._modules]
        self._handles: list[list[Any]] = [[] for _ in self._modules]
        for number, module in enumerate(self._modules):
            if _laid_out(module):
                logger.warning(
                    "DistributedDataParallel has already built its gradient buckets: call "
                    "ecemb.protect() before the first backward, or the last bits of dense gradients may "
                    "differ after a restart"
                )
            for index, parameter in enumerate(_parameters(module)):
                hook = functools.partial(self._arrived, number, index)
                self._handles[number].append(parameter.register_post_accumulate_grad_hook(hook))

    def state(self) -> list[list[list[int]]]:
        """Orders of gradients: [module][backward before the final buckets][arrival] -> parameter number."""
        for number, handles in enumerate(self._handles):
            if self._has_seen_all(number):  # each of these hooks costs time in every backward
                for handle in handles:
                    handle.remove()
                handles.clear()
        return [[list(order) for order in orders] for orders in self._orders]

    def set_state(self, state: Sequence[Sequence[Sequence[int]]]) -> None:
        """Restores the orders that fit a module's parameters, in modules that have recorded none yet."""
        for number, orders in enumerate(state[: len(self._orders)]):
            if not self._orders[number] and all(_fits(self._modules[number], order) for order in orders):
                self._orders[number] = [list(order) for order in orders]

    def rehearse(self) -> None:
        """Lets all modules rebuild their buckets in the stored order. Called on all ranks alike.

        For each stored order, a backward runs through the module, with gradients of zero in that order; the
        next forward rebuilds the buckets. Gradients keep their values.
        """
        for module, orders in zip(self._modules, self._orders, strict=True):
            parameters = _parameters(module)
            gradients = [parameter.grad for parameter in parameters]
            model, broadcasts = module.module, module.broadcast_buffers
            try:
                module.broadcast_buffers = False  # the stand-in for the model has no buffers
                for order in orders:
                    module.module = _Rehearsal([parameters[index] for index in order])
                    with torch.enable_grad():
                        module(_INPUT).backward()
            finally:
                module.module, module.broadcast_buffers = model, broadcasts
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient

    def end(self) -> None:
        """Removes all hooks, in a process that stays after a peer's death. May be called twice."""
        for handles in self._handles:
            for handle in handles:
                handle.remove()
            handles.clear()

    def _arrived(self, number: int, index: int, _: torch.Tensor) -> None:
        module, orders = self._modules[number], self._orders[number]
        if isinstance(module.module, _Rehearsal) or not module.require_forward_param_sync:
            return  # the flag as at the last forward: the script may have left no_sync() since
        if not orders or index in orders[-1]:
            if self._has_seen_all(number):
                return
            orders.append([])
        orders[-1].append(index)

    def _has_seen_all(self, number: int) -> bool:
        """Whether all orders of a module are recorded, or its final buckets are built already."""
        module = self._modules[number]
        backwards = 2 if module.static_graph else 1  # before the final buckets are built
        return len(self._orders[number]) == backwards or _laid_out(module)


@functools.cache
def note_made() -> None:
    """From here on, records every DistributedDataParallel that is created. Further calls do nothing."""
    register_module_module_registration_hook(_note)


def alive() -> list[DistributedDataParallel]:
    """The modules that were created since `note_made`, and are still referred to."""
    return list(_made)


def _note(holder: nn.Module, name: str, held: nn.Module | None) -> None:
    if isinstance(holder, DistributedDataParallel):
        _made.add(holder)


def found_in(
    model: nn.Module, known: Iterable[DistributedDataParallel] = ()
) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel in a model; then those outside that average its parameters.

    Those outside are known if they were created after `note_made`. The garbage collector's list of all
    objects also has them, but walking it takes a tenth of a second or more.

    Args:
        model: the whole model.
        known: modules to leave out.

    Returns:
        The modules, in the same order at each start and on all ranks.
    """
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    left_out = {id(module) for module in (*inside, *known)}
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    if _beside(places, left_out):
        gc.collect()  # a module may be garbage on this rank only
    beside = _beside(places, left_out)
    return inside + [beside[of] for of in sorted(beside)]


def _beside(places: Mapping[int, int], left_out: Set[int]) -> dict[tuple[int, ...], DistributedDataParallel]:
    """Modules created since `note_made` that average parameters in `places`, by these parameters' places.

    Args:
        places: id of each parameter of the model -> its number.
        left_out: ids of modules to leave out.
    """
    found: dict[tuple[int, ...], DistributedDataParallel] = {}
    for module in list(_made):
        of = tuple(places[id(one)] for _, one in _averaged(module) if id(one) in places)
        if of and id(module) not in left_out:
            found[of] = module
    return found


def check_apart(modules: Iterable[DistributedDataParallel], own: Iterable[nn.Parameter]) -> None:
    """Raises if a module averages parameters that belong to one rank.

    Args:
        modules: the modules of one model.
        own: parameters that differ between ranks.

    Raises:
        ConfigurationError: a module has such a parameter.
    """
    known = {id(parameter) for parameter in own}
    for module in modules:
        if mixed := [name for name, parameter in _averaged(module) if id(parameter) in known]:
            raise ConfigurationError(
                f"DistributedDataParallel holds {mixed}, of which each rank has other rows: it has "
                f"overwritten them with rank 0's, and would average gradients of different rows. Build the "
                f"model again, and wrap only its dense parts; a table that is the same on all ranks is "
                f"dense, and not passed in tables="
            )


def _fits(module: DistributedDataParallel, order: Sequence[int]) -> bool:
    """Whether gradients can arrive in this order: all of them, or in a static graph some of them.

    The script may freeze other parameters than before the restart.
    """
    known = set(range(len(_parameters(module))))
    return known >= set(order) if module.static_graph else known == set(order)


def _laid_out(module: DistributedDataParallel) -> bool:
    return getattr(module, "_has_rebuilt_buckets", False)


_INPUT = torch.zeros((), dtype=torch.float32, device="cpu")
"""Input of a rehearsal, which doesn't read it: a wrapper with `device_ids` fails without an input to move."""


class _Rehearsal(nn.Module):
    """Stands in for a model: its backward produces gradients of zero in the order of `parameters`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._held = list(parameters)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        """Returns a scalar. Autograd runs the latest operations first, so parameters are added in reverse."""
        total = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        for parameter in reversed(self._held):
            part = parameter.reshape(-1)[:0].sum()
            total = total.to(part) + part
        return total


def _parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    return [one for _, one in _averaged(module) if one.requires_grad and one.is_leaf]


def _averaged(module: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    named = module.module.named_parameters()
    return [(name, one) for name, one in named if name not in module.parameters_to_ignore]
