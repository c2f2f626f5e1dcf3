"""The buckets in which DistributedDataParallel sums gradients, and their order after a restart.

DistributedDataParallel lays its buckets out anew after its first backward (of a static graph: the second), in
the order in which gradients came. Where a value lies in a bucket decides in which order gloo and NCCL add
the ranks' parts of it, so the last bits of a sum depend on the layout. A restarted process would begin with
the first layout again, and its first steps would end otherwise than in a run that never stopped. So the order
is remembered (it is rank state), and a restart rehearses the backwards that counted, with gradients of zero.

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

from .errors import ConfigurationError

logger: logging.Logger = logging.getLogger("ecemb")

_made: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


class GradientBuckets:
    """The order of gradients in every DistributedDataParallel of a training.

    Args:
        modules: all of them, in an order that is the same at each start and on all ranks.
    """

    def __init__(self, modules: Sequence[DistributedDataParallel]) -> None:
        self._modules = [one for one in modules if one.static_graph or not one.find_unused_parameters]
        self._orders: list[list[list[int]]] = [[] for _ in self._modules]
        self._handles: list[list[Any]] = [[] for _ in self._modules]
        for number, module in enumerate(self._modules):
            if _laid_out(module):
                logger.warning(
                    "DistributedDataParallel has laid out its gradient buckets already: call "
                    "ecemb.protect() before the first backward, or the last bits of dense gradients may "
                    "differ after a restart"
                )
            for index, parameter in enumerate(_parameters(module)):
                hook = functools.partial(self._arrived, number, index)
                self._handles[number].append(parameter.register_post_accumulate_grad_hook(hook))

    def state(self) -> list[list[list[int]]]:
        """By module, the orders of the backwards that count: numbers of parameters as gradients came."""
        for module, orders, handles in zip(self._modules, self._orders, self._handles, strict=True):
            if len(orders) == _counting(module):
                for handle in handles:
                    handle.remove()
                handles.clear()
        return [[list(order) for order in orders] for orders in self._orders]

    def set_state(self, state: Sequence[Sequence[Sequence[int]]]) -> None:
        """Takes orders back, but for those of other parameters; what this process has seen itself stays."""
        for number, orders in enumerate(state[: len(self._orders)]):
            if not self._orders[number] and all(_fits(self._modules[number], order) for order in orders):
                self._orders[number] = [list(order) for order in orders]

    def rehearse(self) -> None:
        """Lets all modules lay out their buckets as they were. All ranks, with equally many orders.

        A backward runs through each, with gradients of zero in the known order, for each that counted; the
        next forward lays the buckets out. Gradients are what they were.
        """
        for module, orders in zip(self._modules, self._orders, strict=True):
            parameters = _parameters(module)
            gradients = [parameter.grad for parameter in parameters]
            model, broadcasts = module.module, module.broadcast_buffers
            try:
                module.broadcast_buffers = False  # it would look for them in what stands in for the model
                for order in orders:
                    module.module = _Rehearsal([parameters[index] for index in order])
                    with torch.enable_grad():
                        module().backward()
            finally:
                module.module, module.broadcast_buffers = model, broadcasts
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient

    def _arrived(self, number: int, index: int, _: torch.Tensor) -> None:
        module, orders = self._modules[number], self._orders[number]
        if isinstance(module.module, _Rehearsal) or not module.require_forward_param_sync:
            return  # what its last forward has decided, whatever no_sync() says by now
        if not orders or index in orders[-1]:
            if len(orders) == _counting(module) or _laid_out(module):
                return
            orders.append([])
        orders[-1].append(index)


@functools.cache
def note_made() -> None:
    """From here on, knows every DistributedDataParallel that is made; called again, it does nothing."""
    register_module_module_registration_hook(_note)


def _note(holder: nn.Module, name: str, held: nn.Module | None) -> None:
    if isinstance(holder, DistributedDataParallel):
        _made.add(holder)


def found_in(
    model: nn.Module, known: Iterable[DistributedDataParallel] = ()
) -> list[DistributedDataParallel]:
    """Every DistributedDataParallel in a model; then those beside it that average parameters of it.

    The latter are known since `note_made`; the garbage collector's list of all objects would tell them, too,
    but going through it takes a tenth of a second or more.

    Args:
        model: the whole model.
        known: those that are found elsewhere.

    Returns:
        In an order that is the same at each start and on all ranks.
    """
    inside = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    left_out = {id(module) for module in (*inside, *known)}
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    if _beside(places, left_out):
        gc.collect()  # one that is garbage may be so on this rank alone
    beside = _beside(places, left_out)
    return inside + [beside[of] for of in sorted(beside)]


def _beside(places: Mapping[int, int], left_out: Set[int]) -> dict[tuple[int, ...], DistributedDataParallel]:
    """Of all that were made since `note_made`, those with parameters that have a place, by their places."""
    found: dict[tuple[int, ...], DistributedDataParallel] = {}
    for module in list(_made):
        of = tuple(places[id(one)] for _, one in _averaged(module) if id(one) in places)
        if of and id(module) not in left_out:
            found[of] = module
    return found


def check_apart(modules: Iterable[DistributedDataParallel], own: Iterable[nn.Parameter]) -> None:
    """Refuses modules that average what is each rank's own.

    Args:
        modules: of one model.
        own: parameters that are not the same on all ranks.

    Raises:
        ConfigurationError: one has such a parameter.
    """
    known = {id(parameter) for parameter in own}
    for module in modules:
        if mixed := [name for name, parameter in _averaged(module) if id(parameter) in known]:
            raise ConfigurationError(
                f"DistributedDataParallel holds {mixed}, each rank having other rows: it has overwritten "
                f"them with rank 0's, and would average gradients of different rows. Build the model anew, "
                f"and wrap its dense parts alone; a table that is the same on all ranks is dense, and not "
                f"named in tables="
            )


def _counting(module: DistributedDataParallel) -> int:
    """How many backwards there are before the buckets are laid out for good."""
    return 2 if module.static_graph else 1


def _fits(module: DistributedDataParallel, order: Sequence[int]) -> bool:
    """Whether gradients can come in this order: all of them, but in a static graph, which may leave some out.

    The script may have frozen other parameters since, or have been changed.
    """
    known = set(range(len(_parameters(module))))
    return known >= set(order) if module.static_graph else known == set(order)


def _laid_out(module: DistributedDataParallel) -> bool:
    return getattr(module, "_has_rebuilt_buckets", False)


class _Rehearsal(nn.Module):
    """Something to go backward through: gradients of zero come in the order of `parameters`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._held = list(parameters)

    def forward(self) -> torch.Tensor:
        """A scalar. Autograd runs what was made last first: so the last gradient's part is made first."""
        total = torch.zeros((), requires_grad=True)
        for parameter in reversed(self._held):
            part = parameter.reshape(-1)[:0].sum()
            total = total.to(part) + part
        return total


def _parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    return [one for _, one in _averaged(module) if one.requires_grad and one.is_leaf]


def _averaged(module: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    named = module.module.named_parameters()
    return [(name, one) for name, one in named if name not in module.parameters_to_ignore]
