"""The composition of replicated state at a moment, without copies, to detect later changes.

A tensor has changed if it is another object or has another version counter. Writes that torch doesn't count
(through `.data` or numpy) are not detected.

Must not know: the storage of the state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, cast

import torch

_LEAVES = (int, float, bool, str, type(None))
_version = attrgetter("_version")


@dataclasses.dataclass(frozen=True)
class Composition:
    """The composition of replicated state at a moment.

    Attributes:
        tensors: all tensors, in the order of `flatten.taken`.
        versions: their version counters.
        rest: all other values except options.
        options: options of each parameter group of each optimizer; copies, except tensors.
        kinds: class names of the optimizers.
    """

    tensors: list[torch.Tensor]
    versions: list[int]
    rest: list[object]
    options: list[list[dict[str, Any]]]
    kinds: list[str]

    def is_as(self, other: Composition) -> bool:
        """Whether everything except options is unchanged."""
        return self is other or (
            self.versions == other.versions
            and len(self.tensors) == len(other.tensors)
            and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
            and _equal(self.rest, other.rest)
        )

    def moved_since(self, then: Composition, names: Sequence[str]) -> dict[str, str]:
        """The changes since an earlier moment: the changed item -> the change, as text.

        Args:
            then: the composition at the earlier moment.
            names: names of the tensors at that moment.
        """
        moved: dict[str, str] = {}
        if self is then:
            return moved
        for number, kind in enumerate(self.kinds):
            for index, (before, now) in enumerate(
                zip(then.options[number], self.options[number], strict=False)
            ):
                keys = [key for key in {**before, **now} if not _equal(before.get(key), now.get(key))]
                if keys:
                    key = keys[0]
                    how = f"{key} of group {index} was {before.get(key)!r} and is {now.get(key)!r}"
                    moved.setdefault(f"options of {kind} (number {number} of optimizers=)", how)
        if not self.is_as(then):
            pairs = zip(then.tensors, then.versions, self.tensors, self.versions, strict=False)
            differing = (at for at, (a, v, b, w) in enumerate(pairs) if a is not b or v != w)
            at = next(differing, len(names))
            how = f"first of it: {names[at]}" if at < len(names) else "numbers in the state of an optimizer"
            moved["replicated state"] = how
        return moved


def record(collected: Mapping[str, Any], optimizers: Sequence[Any]) -> Composition:
    """Records the composition of the state that is collected for saving.

    Args:
        collected: nested state; values under a key "options" count as options.
        optimizers: the optimizers of the state.
    """
    tensors: list[torch.Tensor] = []
    rest: list[object] = []
    _flatten(collected, tensors, rest)
    kinds = [type(one).__name__ for one in optimizers]
    return Composition(tensors, versions_of(tensors), rest, options_of(optimizers), kinds)


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Version counters of tensors; -1 for those that have none."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # an inference tensor has none
        return [-1 if one.is_inference() else one._version for one in tensors]


def options_of(optimizers: Iterable[Any]) -> list[list[dict[str, Any]]]:
    """Options of each parameter group of each optimizer; copies, except tensors."""
    return [[options(group) for group in one.param_groups] for one in optimizers]


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer's parameter group: all of it but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def drop_options(optimizer: Any, group: dict[str, Any], then: Mapping[str, Any]) -> None:
    """Removes the options of a parameter group that an earlier state of it does not have.

    Those that all groups of the optimizer have by default stay: an older version may have saved the state.
    """
    for key in options(group).keys() - then.keys() - getattr(optimizer, "defaults", {}).keys():
        del group[key]


def _flatten(value: Any, tensors: list[torch.Tensor], rest: list[object]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (dict, Mapping)):
        for key, item in cast("Mapping[Any, Any]", value).items():
            if type(item) not in _LEAVES:
                _flatten(item, tensors, [] if key == "options" else rest)
            elif key != "options":
                rest.append(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Iterable[Any]", value):
            if type(item) in _LEAVES:
                rest.append(item)
            else:
                _flatten(item, tensors, rest)
    else:
        rest.append(value)


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; NaN equals itself."""
    return one is other or bool(one == other) or repr(one) == repr(other)
