"""What a walk over replicated state has seen, and whether it is still there: one pass over the containers.

A step looks at all state twice. A walk through it copies and compares thousands of values. A look compares
only whether each dict and list of the walk has the same objects in the same places, and each tensor its form.
Then all is as it was, except numbers that have others in their places, and version counters. Where that is
not certain, it takes another walk: a look never says what a walk wouldn't.

Must not know: the storage of the state, and which state is walked through.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, cast

import numpy as np
import torch

from .composition import Composition, options_of, versions_of
from .flatten import WORD_BYTES, is_number, words

_MAPPINGS = frozenset({dict, OrderedDict, defaultdict, Counter})
_LEAVES = frozenset({str, int, bool, complex, bytes, type(None), torch.dtype, torch.device})  # never change
_form = attrgetter("dtype", "shape", "device")  # all that an outline has of a tensor and that can change


class Sighting:
    """Replicated state at a moment, as a walk has seen it.

    Args:
        composition: its composition.
        numbers: its numbers, as `flatten.separated` gives them.

    Attributes:
        composition: as given.
        numbers: as given.
    """

    def __init__(self, composition: Composition, numbers: bytearray) -> None:
        self.composition = composition
        self.numbers = numbers
        self._is_watched = False
        self._optimizers: Sequence[Any] = ()
        self._containers: list[Any] = []
        self._empty: list[Any] = []
        self._views: list[Any] = []  # live: all keys and values of the containers
        self._size = 0  # of the views together
        self._places: dict[int, tuple[int, int | None]] = {}  # of a number in views -> in numbers, in rest
        self._words = self._rest = 0  # counted so far
        self._lengths: list[int] = []
        self._held: list[Any] = []  # by the views
        self._forms: list[Any] = []

    def watch(
        self, collected: Mapping[str, Any], holders: Iterable[dict[str, Any]], optimizers: Sequence[Any]
    ) -> None:
        """Notes all containers of the state, unless it has some that can't be watched.

        Args:
            collected: the state, nested, that composition and numbers are of.
            holders: the dicts that the model's modules have their tensors and modules in.
            optimizers: those of the state.
        """
        self._optimizers = optimizers
        try:
            for container in holders:
                self._watch(container)
            for item in collected["model"].values():
                self._visit(item)
            for optimizer, found in zip(optimizers, collected["optimizers"], strict=True):
                self._visit_optimizer(optimizer, found)
            for item in collected.get("appeared", {}).values():
                self._visit(item)
        except _UnwatchedError:
            return
        counted = (self._words * WORD_BYTES, self._rest)
        if counted == (len(self.numbers), len(self.composition.rest)) and "extra" not in collected:
            self._lengths = [*map(len, self._containers)]
            self._held = [*self._holding()]
            self._forms = [*map(_form, self.composition.tensors)]
            self._is_watched = True

    def now(self) -> Sighting | None:
        """The sighting of this moment, if certainly only numbers and tensors' content have changed since.

        Types and shapes of tensors may have changed: see `fits`.
        """
        if not self._is_watched or any(self._empty) or [*map(len, self._containers)] != self._lengths:
            return None
        before = self.composition
        same = all(map(is_, self._holding(), self._held))
        versions = versions_of(before.tensors)
        if same and versions == before.versions:
            return self
        again = copy.copy(self)
        again.composition = Composition(before.tensors, versions, before.rest, before.options, before.kinds)
        return again if same or again._renumber([*self._holding()]) else None

    def fits(self) -> bool:
        """Whether the tensors still have the types, shapes and devices that they had."""
        return [*map(_form, self.composition.tensors)] == self._forms

    def _renumber(self, held: list[Any]) -> bool:
        """Takes numbers from `held`; False if other things differ."""
        then, self._held = self._held, held
        self.numbers, rest = bytearray(self.numbers), list(self.composition.rest)
        for at, value in enumerate(held):
            if value is then[at]:
                continue
            if at not in self._places or not _numeric(value) or _kinds(value) != _kinds(then[at]):
                return False
            items = _items(value)
            word, place = self._places[at]
            start = word * WORD_BYTES
            self.numbers[start : start + len(items) * WORD_BYTES] = words(map(_plain, items))
            if place is not None:
                rest[place : place + len(items)] = items
        now = self.composition
        self.composition = Composition(
            now.tensors, now.versions, rest, options_of(self._optimizers), now.kinds
        )
        return True

    def _holding(self) -> Iterator[Any]:
        """What the containers hold now, as many as before if their lengths are the same."""
        roots = [(type(one), one.param_groups, one.state) for one in self._optimizers]
        return chain(chain.from_iterable(self._views), chain.from_iterable(roots))

    def _watch(self, container: Any) -> int:
        """The place of the container's first value."""
        kind = type(container)
        if kind not in _MAPPINGS and kind is not list:
            raise _UnwatchedError
        if not container:
            self._empty.append(container)
            return self._size
        self._containers.append(container)
        if kind is not list:
            self._views += [container.keys(), container.values()]
            self._size += len(container)
        else:
            self._views.append(container)
        self._size += len(container)
        return self._size - len(container)

    def _visit_optimizer(self, optimizer: Any, found: Mapping[str, Any]) -> None:
        self._visit(found["kind"])
        self._rest += sum(map(len, found["parameters"]))
        self._watch(optimizer.param_groups)
        for group, kept in zip(optimizer.param_groups, found["options"], strict=True):
            places = dict(zip(group, range(self._watch(group), self._size), strict=True))
            self._watch(group["params"])
            for key, item in kept.items():
                self._visit(item, places[key], counted=False)
        places = dict(zip(optimizer.state, range(self._watch(optimizer.state), self._size), strict=True))
        for item in found["state"].values():
            self._visit(item)
        for key, item in found.get("others", {}).items():
            self._visit(item, places[key])

    def _visit(self, value: Any, at: int | None = None, *, counted: bool = True) -> None:
        """Watches all containers of a value, and counts numbers and the rest, in the order of a walk.

        Args:
            value: of the state.
            at: its place in a container.
            counted: whether it is in the composition's rest; options are not.
        """
        kind = type(value)
        if _numeric(value):
            if at is not None:
                self._places[at] = self._words, self._rest if counted else None
            self._words += len(_items(value))
            self._rest += counted * len(_items(value))
        elif isinstance(value, torch.Tensor):
            pass
        elif kind is torch.Size:
            self._rest += counted * len(value)
        elif kind in _LEAVES or (issubclass(kind, np.generic) and kind is not np.void):
            self._rest += counted
        elif kind is tuple:
            for item in value:
                self._visit(item, counted=counted)
        elif kind is list:
            for place, item in enumerate(value, self._watch(value)):
                self._visit(item, place, counted=counted)
        elif kind in _MAPPINGS:
            for place, (key, item) in enumerate(value.items(), self._watch(value)):
                self._visit(item, place, counted=counted and key != "options")
        else:
            raise _UnwatchedError


class _UnwatchedError(Exception):
    """The state has a container that could change unseen."""


def _numeric(value: Any) -> bool:
    """Whether it is a number, or a tuple of nothing but numbers."""
    items = _items(value)
    return bool(items) and all(is_number(_plain(item)) for item in items)


def _kinds(value: Any) -> list[Any]:
    kinds = (one.dtype if isinstance(one, np.generic) else type(one) for one in _items(value))
    return [type(value), *kinds]


def _items(value: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", value) if type(value) is tuple else (value,)


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number
