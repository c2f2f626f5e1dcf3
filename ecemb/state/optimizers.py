"""The optimizers that were passed to a guard, and the checks of each optimizer's step.

The state of an optimizer that was not passed to `ecemb.protect` is lost at an abort or a failure. So every
parameter that requires gradients has an optimizer in `optimizers=` or is in `without_optimizer=`, and a step
of any other optimizer raises before it changes anything.

A step that would use gradients from before the transaction raises as well. Gradients are not saved: a restart
begins at the last commit, without them. An update from gradients of two transactions would therefore have
other bits after a failure, without an error. A gradient that is left over is not wrong by itself: a scaler
skips an update, a discriminator's loss reaches the generator, and zero_grad() comes before the next update.
So only the optimizer's step is refused. When a transaction begins, one parameter with a gradient is marked
for each optimizer that did not step in the transaction before, and in the first transactions of a process for
every optimizer. Optimizers without a marked parameter cost nothing.

Must not know: the memory of tables, transactions.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import ConfigurationError, UnsupportedOptimizer, UsageError

Optimizer = torch.optim.Optimizer

_SHOWN = 4  # names in an error message
_ALL_MARKED = 2  # first transactions, which mark for all optimizers: finds a forgotten zero_grad()
_MOST_RESTS = 64  # size of the cache of `_rest`


class NamedOptimizers:
    """The optimizers of a guard, and the parameters that no other optimizer may change.

    Args:
        model: the whole model.
        tables: protected tables that an optimizer's `step()` changes, by key.
        fused: protected parameters that change in another way.
        optimizers: the user's optimizers; optimizers inside them are found here.
        without: parameters that no optimizer changes, or modules of such parameters.

    Attributes:
        gradients: refuses updates from gradients that were computed before the transaction.

    Raises:
        UnsupportedOptimizer: a table with requires_grad has no optimizer, and is not in `without`.
        ConfigurationError: another parameter with requires_grad has no optimizer, and is not in `without`; or
            `without` has an item that is neither a parameter nor a module, or a parameter of one of
            `optimizers`.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Mapping[str, nn.Parameter],
        fused: Iterable[nn.Parameter],
        optimizers: Iterable[Any],
        without: Sequence[Any] = (),
    ) -> None:
        self._known = list(_within(optimizers))
        owners = {id(one): owner for owner in self._known for one in parameters_of(owner)}
        left = _left_out(without)
        apart = {id(one) for one in (*fused, *tables.values())}
        dense = {name: one for name, one in model.named_parameters() if id(one) not in apart}
        self._names = {id(one): f"parameter {name!r}" for name, one in dense.items()}
        for owner in self._known:
            for index, one in enumerate(parameters_of(owner)):
                if id(one) not in apart:
                    self._names.setdefault(id(one), f"parameter {index} of {type(owner).__name__}")
        self._names |= {id(one): f"protected table {name!r}" for name, one in tables.items()}
        self._held = [*dense.values(), *tables.values()]  # keeps their ids unique
        self._handle: Any = None
        self.gradients = CarriedGradients(self._known, self._names)
        for one in left:
            if (owner := owners.get(id(one))) is not None:
                name = self._names.get(id(one), "a parameter")
                raise ConfigurationError(
                    f"without_optimizer= contains {name}, which {type(owner).__name__} in optimizers= "
                    f"changes: remove it from one of the two"
                )
        known = owners.keys() | {id(one) for one in left}
        if missing := _trained(tables, known):
            raise UnsupportedOptimizer(
                f"tables {missing[:_SHOWN]}{_more(missing)} have requires_grad=True, and none of the "
                f"optimizers= changes them: pass their optimizer. If they have none (the table is frozen, "
                f"or your script writes its rows after guard.touch), call requires_grad_(False) on the "
                f"weight, or pass the table in without_optimizer="
            )
        if missing := _trained(dense, known):
            raise ConfigurationError(
                f"parameters {missing[:_SHOWN]}{_more(missing)} have requires_grad=True, and none of the "
                f"optimizers= changes them: pass all optimizers of the training, since the state of an "
                f"optimizer that isn't passed is lost at every abort and failure. If they have no optimizer "
                f"(they are frozen, or your script changes them), call requires_grad_(False) on them, or "
                f"pass them, or their module, in without_optimizer="
            )

    def watch(self, is_open: Callable[[], bool]) -> None:
        """Installs the check of each optimizer's step.

        From here on `optimizer.step()` raises UsageError if it would change a parameter of the guard, and the
        optimizer was not passed to it, or no step of the guard is open.

        Args:
            is_open: whether a step of the guard is open.
        """
        own = weakref.WeakMethod(self._before_step)
        self._is_open = is_open
        self._handle = register_optimizer_step_pre_hook(functools.partial(_call, own))

    def unwatch(self) -> None:
        """Removes the hooks of `watch` and all marks of gradients."""
        self.gradients.end()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        names = (self._names.get(id(one)) for one in parameters_of(optimizer))
        if any(optimizer is one or optimizer.state is one.state for one in self._known):
            if not self._is_open() and (name := next(filter(None, names), None)) is not None:
                raise UsageError(
                    f"{type(optimizer).__name__}.step() changes {name} outside of a step, and the change "
                    f"would be lost at a failure: put it inside `with guard.step():`"
                )
            self.gradients.before_step(optimizer, has_closure=has_closure)
        elif (name := next(filter(None, names), None)) is not None:
            raise UsageError(
                f"{type(optimizer).__name__}.step() would change {name}, but this optimizer is not one of "
                f"the optimizers= of ecemb.protect(): its state would be lost at every abort and "
                f"failure. Create it before ecemb.protect(), and pass it there. It has changed nothing yet"
            )


class _Mark:
    """A parameter with a gradient from before the transaction.

    Args:
        parameter: the parameter.
        facts: `_facts` of its gradient now.
    """

    def __init__(self, parameter: torch.Tensor, facts: tuple[int, float]) -> None:
        self.parameter, self._facts = parameter, facts
        self._is_added_to = self._is_cleared = False
        self._handle = parameter.register_hook(self._before_adding) if parameter.requires_grad else None

    def is_used(self) -> bool:
        """Whether the parameter's gradient now is or contains the marked gradient."""
        if self._is_cleared:
            return False
        now = _facts(self.parameter.grad)
        return now is not None and (self._is_added_to or now == self._facts)

    def remove(self) -> None:
        """Removes the hook."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before_adding(self, _: torch.Tensor) -> None:
        """Runs in backward, before it adds to the gradient."""
        if _facts(self.parameter.grad) is None:
            self._is_cleared = True
            self.remove()
        else:
            self._is_added_to = True


class CarriedGradients:
    """Refuses the step of an optimizer that would use gradients from before the transaction.

    Args:
        optimizers: the optimizers to check.
        names: id of a parameter -> its name in messages; parameters without a name are not checked.

    Attributes:
        refusal: the message of the error that `before_step` raised; "" if it has raised none.
    """

    def __init__(self, optimizers: Sequence[Any], names: Mapping[int, str]) -> None:
        self.refusal = ""
        self._names = names
        self._parameters = {
            id(owner): [
                one
                for one in cast("Iterator[Any]", parameters_of(owner))
                if id(one) in names and isinstance(one, torch.Tensor)
            ]
            for owner in optimizers
        }
        self._stepped: set[int] = set()
        self._rests: dict[frozenset[int], list[int]] = {}
        self._marks: list[_Mark] = []
        self._transactions = self._step = 0

    def begin(self, step: int) -> None:
        """Begins a transaction: marks parameters whose gradients may be carried into it.

        Args:
            step: number of the transaction's first step.
        """
        self._step = step
        self._transactions += 1
        self.end()
        if self._transactions <= _ALL_MARKED:
            self._mark(list(self._parameters))
        elif rest := self._rest(frozenset(self._stepped)):
            self._mark(rest)
        self._stepped.clear()

    def before_step(self, optimizer: Any, *, has_closure: bool) -> None:
        """Refuses an optimizer's step that would use marked gradients. Called before the step.

        A step with a closure is not refused: the closure computes its gradients.

        Raises:
            UsageError: the step would use a marked gradient; nothing has changed.
        """
        self._stepped.add(id(optimizer))
        if not self._marks or has_closure:
            return
        own = {id(one) for one in parameters_of(optimizer)}
        for mark in [one for one in self._marks if id(one.parameter) in own]:
            if mark.is_used():
                name, step = self._names[id(mark.parameter)], self._step
                text = (
                    f"{type(optimizer).__name__}.step() would use a gradient of {name} that was made before "
                    f"step {step}, where the last commit is: a failure after it loses gradients, and "
                    f"training would end with other bits. To accumulate gradients, put all micro-batches "
                    f"of an update, and the update, into one `with guard.step():`. Otherwise call "
                    f"zero_grad() in each step before its first backward()"
                )
                self.refusal = text
                raise UsageError(text)
            mark.remove()
            self._marks.remove(mark)

    def end(self) -> None:
        """Removes all marks."""
        for mark in self._marks:
            mark.remove()
        self._marks.clear()

    def _rest(self, stepped: frozenset[int]) -> list[int]:
        """Ids of the optimizers with a parameter that no optimizer in `stepped` changes."""
        rest = self._rests.get(stepped)
        if rest is None:
            done = {id(one) for owner in stepped for one in self._parameters.get(owner, ())}
            rest = [
                owner
                for owner, parameters in self._parameters.items()
                if any(id(one) not in done for one in parameters)
            ]
            if len(self._rests) >= _MOST_RESTS:
                self._rests.clear()
            self._rests[stepped] = rest
        return rest

    def _mark(self, owners: Sequence[int]) -> None:
        marked: set[int] = set()
        for owner in owners:
            for parameter in self._parameters[owner]:
                if id(parameter) in marked:
                    break  # the optimizer is a wrapper, or shares the parameter
                if (facts := _facts(parameter.grad)) is not None:
                    marked.add(id(parameter))
                    self._marks.append(_Mark(parameter, facts))
                    break


def parameters_of(optimizer: Any) -> Iterator[nn.Parameter]:
    """The parameters of all groups of an optimizer."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def with_inner(optimizers: Iterable[Any]) -> list[Any]:
    """Optimizers, and optimizers in their attributes, as in SAM and Lookahead; each `state` dict once."""
    found = list(optimizers)
    for optimizer in found:  # the list grows
        inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
        found += [one for one in inner if not any(one.state is other.state for other in found)]
    return found


def others(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """(key, value) of an optimizer's state whose key is not a parameter."""
    return ((key, value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor))


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer's parameter group: all of it but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def drop_options(optimizer: Any, group: dict[str, Any], then: Mapping[str, Any]) -> None:
    """Removes the options of a parameter group that its saved state lacks.

    Options in the optimizer's `defaults` stay: an older version of it may have saved the state.

    Args:
        optimizer: the group's optimizer.
        group: the parameter group; options are removed from it.
        then: the group's saved options.
    """
    for key in options(group).keys() - then.keys() - getattr(optimizer, "defaults", {}).keys():
        del group[key]


def _call(method: weakref.WeakMethod[Any], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Calls the method if its object still exists: the hook must not keep a guard alive."""
    if (own := method()) is not None:
        own(optimizer, (args[1] if len(args) > 1 else kwargs.get("closure")) is not None)


def _within(optimizers: Iterable[Any]) -> Iterator[Any]:
    """Optimizers, and all optimizers in their attributes, also in lists, tuples and dicts; each once."""
    seen: set[int] = set()
    waiting = list(optimizers)
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for value in vars(one).values():
            waiting += _optimizers_in(value)


def _optimizers_in(value: Any, depth: int = 2) -> Iterator[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif depth and type(value) in (list, tuple, dict):
        for item in value.values() if isinstance(value, dict) else cast("Iterable[Any]", value):
            yield from _optimizers_in(item, depth - 1)


def _left_out(without: Sequence[Any]) -> list[nn.Parameter]:
    found: list[nn.Parameter] = []
    for one in without:
        if isinstance(one, nn.Parameter):
            found.append(one)
        elif isinstance(one, nn.Module):
            found += one.parameters()
        else:
            raise ConfigurationError(
                f"without_optimizer= takes parameters and modules, not a {type(one).__name__}"
            )
    return found


def _trained(parameters: Mapping[str, nn.Parameter], known: set[int]) -> list[str]:
    return [name for name, one in parameters.items() if one.requires_grad and id(one) not in known]


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""


def _facts(gradient: torch.Tensor | None) -> tuple[int, float] | None:
    """Number and sum of a gradient's nonzero values; None if it has none, or can't be read now.

    Waits for the gradient's device. A gradient can't be read on the meta device, nor on a CUDA device while a
    graph is captured.
    """
    if gradient is None or gradient.is_meta:
        return None
    if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    values = gradient.detach()
    values = getattr(values, "_local_tensor", values)  # the local part of a DTensor
    values = values._values() if values.is_sparse else values
    values = torch.view_as_real(values) if values.is_complex() else values
    count = int(torch.count_nonzero(values))
    return (count, float(values.sum(dtype=torch.float64))) if count else None
