"""Gradients that an optimizer would use although they were made before the transaction began.

Gradients are no state: a restart begins at the last commit, without them. An update from gradients of two
transactions would therefore have other bits after a failure, without an error. A gradient that is
left over is not wrong by itself: a scaler leaves an update out, a discriminator's loss reaches the generator,
and zero_grad() comes before the next update. So only the optimizer's step is refused.

When a transaction begins, one parameter with a gradient is marked for each optimizer that did not step in the
transaction before, and in the first transactions of a process for every optimizer. Others cost nothing.

Must not know: the memory of tables, transactions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import UsageError

_ALL_MARKED = 2  # transactions that begin with marks for all optimizers: finds a forgotten zero_grad()
_MOST_RESTS = 64  # sets of optimizers whose complements are kept


class _Mark:
    """A parameter whose gradient was made before the transaction.

    Args:
        parameter: it.
        facts: of its gradient now.
    """

    def __init__(self, parameter: torch.Tensor, facts: tuple[int, float]) -> None:
        self.parameter, self._facts = parameter, facts
        self._is_added_to = self._is_cleared = False
        self._handle = parameter.register_hook(self._before_adding) if parameter.requires_grad else None

    def is_used(self) -> bool:
        """Whether the parameter's gradient now has something of that one."""
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
        optimizers: those to watch.
        names: of their parameters in messages, by id; others are not watched.

    Attributes:
        refusal: the message of the error that was raised, else "".
    """

    def __init__(self, optimizers: Sequence[Any], names: Mapping[int, str]) -> None:
        self.refusal = ""
        self._names = names
        self._parameters = {id(one): _watched(one, names) for one in optimizers}
        self._stepped: set[int] = set()
        self._rests: dict[frozenset[int], list[int]] = {}
        self._marks: list[_Mark] = []
        self._transactions = self._step = 0

    def begin(self, step: int) -> None:
        """Begins a transaction with this step: marks what may be carried into it."""
        self._step = step
        self._transactions += 1
        self.end()
        if self._transactions <= _ALL_MARKED:
            self._mark(list(self._parameters))
        elif rest := self._rest(frozenset(self._stepped)):
            self._mark(rest)
        self._stepped.clear()

    def before_step(self, optimizer: Any, *, has_closure: bool) -> None:
        """Refuses a step that would use marked gradients; with a closure, they are still to be made.

        Raises:
            UsageError: it would; nothing has changed.
        """
        self._stepped.add(id(optimizer))
        if not self._marks or has_closure:
            return
        own = {id(one) for group in optimizer.param_groups for one in group["params"]}
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
        """The optimizers with parameters that none of those that have stepped changes."""
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


def _watched(optimizer: Any, names: Mapping[int, str]) -> list[torch.Tensor]:
    found: Iterator[Any] = (one for group in optimizer.param_groups for one in group["params"])
    return [one for one in found if id(one) in names and isinstance(one, torch.Tensor)]


def _facts(gradient: torch.Tensor | None) -> tuple[int, float] | None:
    """Number and sum of a gradient's values other than 0; None if there are none. Waits for its device."""
    if gradient is None or gradient.is_meta:
        return None
    if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    values = gradient.detach()
    values = getattr(values, "_local_tensor", values)  # of a DTensor
    values = values._values() if values.is_sparse else values
    values = torch.view_as_real(values) if values.is_complex() else values
    count = int(torch.count_nonzero(values))
    return (count, float(values.sum(dtype=torch.float64))) if count else None
