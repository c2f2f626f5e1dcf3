"""A walk through replicated state: collects its tensors and numbers with their places, and detects changes.

A walk copies and compares thousands of values, and a step reads all state twice. So a walk is cached, and
refreshed: it compares whether each dict and list that it went through holds the same objects in the same
places. If only numbers and tensors have been replaced, the walk takes the new ones over; otherwise another
walk is needed. The cached walk is the only detector of changes: other modules read it.

A tensor has changed if it is another object or has another version counter. Writes that torch doesn't count
(through `.data` or numpy) are not detected.

Owns the refusals of models and optimizers that are partitioned over ranks: replicated state is complete on
every rank.

Must not know: the storage of the state.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ..errors import ConfigurationError
from .flatten import Separator, is_number, separated, words
from .optimizers import options
from .serialize import NotPlainError, like, plain_key

logger: logging.Logger = logging.getLogger("ecemb")


SAME = "ecemb.same"
"""(SAME, name) in a walk's value stands for a buffer that shares the tensor of that name."""
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_version = attrgetter("_version")
_form = attrgetter("dtype", "shape", "device")  # the properties of a tensor that its placeholder has


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Replicated state at a moment, without copies of its tensors, to detect later changes.

    Attributes:
        tensors: all tensors, in the order of `flatten.separated`, except those of extra state.
        versions: version counters of the tensors.
        rest: all other values except options.
        options: options of each parameter group of each optimizer; copies, except tensors.
        kinds: class names of the optimizers.
    """

    tensors: list[torch.Tensor]
    versions: list[int]
    rest: list[object]
    options: list[list[dict[str, Any]]]
    kinds: list[str]

    def moved_since(self, then: Fingerprint, names: Sequence[str]) -> dict[str, str]:
        """The changes since an earlier moment: the changed item -> the change, as text.

        All changes except those of options are one item, "replicated state".

        Args:
            then: the fingerprint of the earlier moment.
            names: names of the tensors at that moment.
        """
        moved: dict[str, str] = {}
        if self is then:
            return moved
        for number, kind in enumerate(self.kinds):
            groups = zip(then.options[number], self.options[number], strict=False)
            for index, (before, now) in enumerate(groups):
                keys = [key for key in {**before, **now} if not _equal(before.get(key), now.get(key))]
                if keys:
                    key = keys[0]
                    how = f"{key} of group {index} was {before.get(key)!r} and is {now.get(key)!r}"
                    moved.setdefault(f"options of {kind} (number {number} of optimizers=)", how)
        counts = len(then.tensors), len(self.tensors)
        pairs = zip(then.tensors, then.versions, self.tensors, self.versions, strict=False)
        at = next((at for at, (a, v, b, w) in enumerate(pairs) if a is not b or v != w), min(counts))
        if at < max(counts) or not _equal(then.rest, self.rest):
            is_tensor = at < min(*counts, len(names))
            what = names[at] if is_tensor else "numbers in the state of an optimizer"
            moved["replicated state"] = f"first of it: {what}" if is_tensor else what
        return moved


class TensorSlots:
    """The places of a model's dense parameters and buffers in its modules.

    A tensor may have several places (tied weights, shared buffers): it is listed under its first name, and
    buffers in its other places are listed as `shared`.

    Args:
        model: the model.
        protected: ids of parameters that are left out.
        left_out: modules whose buffers are left out.

    Attributes:
        tensors: the current tensors by name, each once.
        shared: name of each buffer that shares one of `tensors` -> the tensor's name.
        empty: names of buffers that are None.
        buffers: names of all places for buffers -> whether they are in the model's state_dict.
        extra: modules with extra state, by name.

    Raises:
        ConfigurationError: a tensor is not complete on every rank.
    """

    def __init__(
        self, model: nn.Module, protected: Collection[int] = (), left_out: Sequence[nn.Module] = ()
    ) -> None:
        self._model = model
        self._skipped = protected, left_out
        self._containers = _Containers()
        places: dict[int, list[tuple[dict[str, Any], str, int]]] = {}
        for module in model.modules():
            *holders, children = _dicts(module)
            for held in holders:
                for place, (key, one) in zip(self._containers.watch(held), held.items(), strict=True):
                    places.setdefault(id(one), []).append((held, key, place))
            self._containers.watch(children)
        self._containers.note()
        self._distinct = self._containers.count_distinct()
        self.tensors: dict[str, torch.Tensor] = _found(model, protected, left_out)
        self._at: dict[str, tuple[dict[str, Any], str]] = {}
        self._replaceable: dict[int, str] = {}  # place in containers -> name of the tensor, if only there
        for name, tensor in self.tensors.items():
            (held, key, place), *others = places.get(id(tensor), [({}, "", -1)])
            self._at[name] = held, key
            if held and not others and type(tensor) is torch.Tensor:
                self._replaceable[place] = name
        self._has_hidden = not all(held for held, _ in self._at.values())  # a ScriptModule hides its tensors
        first = self.names()
        self.buffers: dict[str, bool] = {}
        self.shared: dict[str, str] = {}
        self.empty: list[str] = []
        for name, buffer, is_persistent in buffers(model, left_out):
            self.buffers[name] = is_persistent
            if buffer is None:
                self.empty.append(name)
            elif first.get(id(buffer), name) != name and name not in self.tensors:
                self.shared[name] = first[id(buffer)]
        self.extra: dict[str, nn.Module] = with_extra_state(model, left_out)

    def names(self) -> dict[int, str]:
        """Ids of the tensors -> their names."""
        return {id(tensor): name for name, tensor in self.tensors.items()}

    def refresh(self) -> bool:
        """Takes over new tensors in the places of buffers; returns whether all else is unchanged.

        Returns:
            False if modules, parameters or buffers were added or removed, if other places share a tensor than
            before, or if a parameter was replaced: then other `TensorSlots` are needed.
        """
        changed = self._containers.changed()
        if changed is None or not all(at in self._replaceable and _is_dense(now) for at, _, now in changed):
            return False
        if changed:
            if self._containers.count_distinct() != self._distinct:
                return False  # a new tensor is in another place as well
            self.tensors = self.tensors | {self._replaceable[at]: now for at, _, now in changed}
            self._containers.note()
        if not self._has_hidden:
            return True
        found = _found(self._model, *self._skipped)
        return [*found] == [*self.tensors] and all(map(is_, found.values(), self.tensors.values()))

    def at(self, name: str) -> torch.Tensor | None:
        """The current tensor in the place of this name; None if the buffer is empty."""
        held, key = self._place(name)
        return held[key]

    def put(self, name: str, value: torch.Tensor | None, *, persistent: bool = True) -> None:
        """Stores a tensor or None in the place of a buffer; registers the buffer if the place is missing.

        Args:
            name: the buffer's name.
            value: its new content.
            persistent: whether a registered buffer is in the model's state_dict.
        """
        held, key = self._place(name)
        if key in held:
            held[key] = value
            return
        module = self._model.get_submodule(name.rpartition(".")[0])
        if hasattr(module, key):
            setattr(module, key, value)
        else:
            module.register_buffer(key, value, persistent=persistent)

    def drop(self, name: str) -> None:
        """Removes the place of a buffer."""
        path, _, key = name.rpartition(".")
        delattr(self._model.get_submodule(path), key)

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        held, key = self._at.get(name, ({}, ""))
        if held:
            return held, key
        path, _, key = name.rpartition(".")
        return _dicts(self._model.get_submodule(path))[1], key


class CachedWalk:
    """Replicated state at the time of the walk, or of the last `refresh` that returned True.

    Args:
        slots: the places of the model's tensors.
        collected: the state, nested: "model", and for each of `optimizers` its "options", the "state" of its
            parameters by index, "others" (its state under keys that are not parameters), "outside" (its
            parameters outside the model), and values that are not watched.
        optimizers: the optimizers of the state.

    Attributes:
        slots: the places of the model's tensors; these may be newer than the walk.
        value: the state with placeholders for tensors and numbers, as `flatten.separated` returns it.
        numbers: the state's numbers, as `flatten.separated` returns them; a refresh replaces the object.
        fingerprint: fingerprint of the state.

    Raises:
        ConfigurationError: a value has a type that can't be packed, or a tensor is sparse.
    """

    def __init__(self, slots: TensorSlots, collected: Mapping[str, Any], optimizers: Sequence[Any]) -> None:
        self.slots, self._of_model = slots, slots.tensors
        self._optimizers = optimizers
        self._containers = _Containers()
        self._separator = Separator()
        self._rest: list[object] = []
        self._tensors_at: dict[int, int] = {}  # place in containers -> index of the tensor
        self._numbers_at: dict[int, tuple[int, int | None]] = {}  # place -> offset in numbers, index in rest
        try:
            self.value: dict[str, Any] = {
                "model": {name: self._leaf(one) for name, one in collected["model"].items()},
                "optimizers": [*map(self._optimizer, optimizers, collected["optimizers"])],
                **{key: self._leaf(one) for key, one in collected.items() if key == "appeared"},
            }
        except (ConfigurationError, NotPlainError):
            separated(collected)  # raises an error that names the value's place
            raise
        self._containers.note()
        self._roots = self._roots_now()
        self.numbers: bytearray = self._separator.numbers
        tensors, kinds = self._separator.tensors, [type(one).__name__ for one in optimizers]
        options_now = _options_of(optimizers)
        self.fingerprint = Fingerprint(tensors, _versions_of(tensors), self._rest, options_now, kinds)
        self._forms = [*map(_form, tensors)]

    def refresh(self, *, forms: bool) -> bool:
        """Takes over numbers and tensors that were replaced; returns whether nothing else can have changed.

        Args:
            forms: whether to return False as well if a dtype, shape or device of a tensor has changed.

        Returns:
            False if other changes are found or can't be ruled out: then the walk must not be used any more.
        """
        if not self.slots.refresh() or not all(map(is_, self._roots_now(), self._roots)):
            return False
        if (changed := self._containers.changed()) is None:
            return False
        then = self.fingerprint
        tensors, rest, options_now = then.tensors, then.rest, then.options
        if self._of_model is not self.slots.tensors:
            self._of_model = self.slots.tensors
            tensors = [*self._of_model.values(), *tensors[len(self._of_model) :]]
        if changed:
            tensors, rest, self.numbers = [*tensors], [*rest], bytearray(self.numbers)
            if not all(self._take(at, before, now, tensors, rest) for at, before, now in changed):
                return False
            self._containers.note()
            options_now = _options_of(self._optimizers)
        versions = _versions_of(tensors)
        if tensors is not then.tensors or versions != then.versions:
            self.fingerprint = Fingerprint(tensors, versions, rest, options_now, then.kinds)
        return not forms or [*map(_form, tensors)] == self._forms

    def _take(self, at: int, then: Any, now: Any, tensors: list[torch.Tensor], rest: list[object]) -> bool:
        """Takes over the new object in a place, if it is a tensor or a number like the one before.

        Args:
            at: the place in the containers.
            then: the object before.
            now: the new object.
            tensors: the fingerprint's tensors; one is replaced.
            rest: the fingerprint's other values; one is replaced.

        Returns:
            Whether the new object fits in the place.
        """
        if at in self._tensors_at and _is_dense(now):
            tensors[self._tensors_at[at]] = now
            return True
        if at not in self._numbers_at or not _is_numeric(now) or _kinds(now) != _kinds(then):
            return False
        first, index = self._numbers_at[at]
        new = words(map(_plain, _items(now)))
        self.numbers[first : first + len(new)] = new
        if index is not None:
            rest[index] = now
        return True

    def _roots_now(self) -> list[object]:
        return [part for one in self._optimizers for part in (type(one), one.param_groups, one.state)]

    def _optimizer(self, optimizer: Any, collected: Mapping[str, Any]) -> dict[str, Any]:
        watch = self._containers.watch
        watch(optimizer.param_groups)
        of_groups = [dict(zip(one, watch(one), strict=True)) for one in optimizer.param_groups]
        for group in optimizer.param_groups:
            watch(group["params"])
        in_state = dict(zip(optimizer.state, watch(optimizer.state), strict=True))
        value: dict[str, Any] = {}
        for part, found in collected.items():
            if part == "options":
                value[part] = [
                    {
                        plain_key(key): self._visit(one, places[key], counted=False)
                        for key, one in kept.items()
                    }
                    for kept, places in zip(found, of_groups, strict=True)
                ]
            elif part in ("state", "outside"):
                value[part] = {index: self._visit(one) for index, one in found.items()}
            elif part == "others":
                value[part] = {plain_key(key): self._visit(one, in_state[key]) for key, one in found.items()}
            else:
                value[part] = self._leaf(found)
        return value

    def _visit(self, value: Any, at: int | None = None, *, counted: bool = True) -> Any:
        """Watches all containers of a value, and takes out its tensors and numbers.

        Args:
            value: a part of the state.
            at: the value's place in the containers; None if it has none.
            counted: whether the value is added to the fingerprint's rest; options are not.

        Returns:
            A copy with placeholders.
        """
        kind = type(value)
        if kind is list:
            places = self._containers.watch(value)
            return [self._visit(one, at, counted=counted) for at, one in zip(places, value, strict=True)]
        if kind in _MAPPINGS:
            places = zip(self._containers.watch(value), value.items(), strict=True)
            items = {plain_key(key): self._visit(one, at, counted=counted) for at, (key, one) in places}
            return like(value, items)
        if kind is tuple and not _is_numeric(value):
            return tuple([self._visit(one, counted=counted) for one in value])
        return self._leaf(value, at, counted=counted)

    def _leaf(self, value: Any, at: int | None = None, *, counted: bool = True) -> Any:
        """As `_visit`, without watching the value's containers."""
        if isinstance(value, torch.Tensor):
            if at is not None:
                self._tensors_at[at] = len(self._separator.tensors)
            return self._separator.take_tensor(value)
        if at is not None and _is_numeric(value):
            self._numbers_at[at] = len(self._separator.numbers), len(self._rest) if counted else None
        if counted:
            self._rest.append(value)
        return self._separator.take(value)


class _Containers:
    """Detects whether dicts and lists hold other objects than noted.

    A watched container of another type could change unnoticed: then `changed` returns None.
    """

    def __init__(self) -> None:
        self._is_certain = True
        self._filled: list[Any] = []
        self._empty: list[Any] = []
        self._views: list[Any] = []  # lists, and live views of the dicts' keys and values
        self._size = 0  # number of objects in all views
        self._lengths: list[int] = []
        self._held: list[Any] = []

    def watch(self, container: Any) -> range:
        """Adds a container, and returns the places of its values."""
        size, kind = len(container), type(container)
        if kind is not list and kind not in _MAPPINGS and kind is not defaultdict:
            self._is_certain = False
            return range(size)
        if not container:
            self._empty.append(container)
            return range(0)
        self._filled.append(container)
        self._views += [container] if kind is list else [container.keys(), container.values()]
        self._size += size if kind is list else 2 * size
        return range(self._size - size, self._size)

    def note(self) -> None:
        """Notes the objects that the containers hold now, for `changed`."""
        self._lengths, self._held = [*map(len, self._filled)], [*self._holding()]

    def changed(self) -> list[tuple[int, Any, Any]] | None:
        """The places that hold another object than noted: (place, noted object, current object).

        None if a container has another length than noted, or one has a type that can't be watched.
        """
        if not self._is_certain or any(self._empty) or [*map(len, self._filled)] != self._lengths:
            return None
        if all(map(is_, self._holding(), self._held)):
            return []
        pairs = enumerate(zip(self._held, self._holding(), strict=True))
        return [(at, then, now) for at, (then, now) in pairs if then is not now]

    def count_distinct(self) -> int:
        """The number of different objects that the containers hold now."""
        return len({*map(id, self._holding())})

    def _holding(self) -> Iterator[Any]:
        return chain.from_iterable(self._views)


def buffers(
    model: nn.Module, left_out: Sequence[nn.Module] = ()
) -> Iterator[tuple[str, torch.Tensor | None, bool]]:
    """All places for buffers, also empty ones: name, content, and whether it is in the model's state_dict."""
    skipped = _all_in(left_out)
    for prefix, module in model.named_modules():
        if id(module) not in skipped:
            unsaved = getattr(module, "_non_persistent_buffers_set", ())
            for key, buffer in _dicts(module)[1].items():
                yield f"{prefix}.{key}".removeprefix("."), buffer, key not in unsaved


def with_extra_state(model: nn.Module, left_out: Sequence[nn.Module] = ()) -> dict[str, nn.Module]:
    """Modules with extra state in the model's state_dict, by name."""
    skipped = _all_in(left_out)
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and id(module) not in skipped
        and not isinstance(module, torch.jit.ScriptModule)
    }


def has_room(model: nn.Module, name: str) -> bool:
    """Whether `TensorSlots.put` can create a buffer of this name."""
    path, _, key = name.rpartition(".")
    try:
        return not hasattr(model.get_submodule(path), key)
    except AttributeError:  # no such module
        return False


def _found(
    model: nn.Module, protected: Collection[int], left_out: Sequence[nn.Module]
) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {
        n: one for n, one in model.named_parameters() if id(one) not in protected
    }
    others = {id(buffer) for module in left_out for _, buffer in nn.Module.named_buffers(module)}
    tensors.update((n, one) for n, one in model.named_buffers() if id(one) not in others)
    for name, tensor in tensors.items():
        check_whole(name, tensor)
    return tensors


def _all_in(modules: Sequence[nn.Module]) -> set[int]:
    return {id(one) for module in modules for one in module.modules()}


def _dicts(module: nn.Module) -> list[dict[str, Any]]:
    """The module's own dicts of parameters, buffers and modules; a ScriptModule hides them: empty."""
    if isinstance(module, torch.jit.ScriptModule):
        return [{}, {}, {}]
    return [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Version counters of tensors; -1 for inference tensors, which have none."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:  # an inference tensor has none
        return [-1 if one.is_inference() else one._version for one in tensors]


def _options_of(optimizers: Sequence[Any]) -> list[list[dict[str, Any]]]:
    return [[options(group) for group in one.param_groups] for one in optimizers]


def _is_dense(value: Any) -> bool:
    """Whether the value is a dense plain tensor, which may replace another one in its place."""
    return type(value) is torch.Tensor and value.layout is torch.strided


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; NaN equals itself."""
    return one is other or bool(one == other) or repr(one) == repr(other)


def _is_numeric(value: Any) -> bool:
    """Whether the value is a number, or a tuple of numbers with at least one."""
    items = _items(value)
    return bool(items) and all(is_number(_plain(item)) for item in items)


def _kinds(value: Any) -> list[Any]:
    kinds = (one.dtype if isinstance(one, np.generic) else type(one) for one in _items(value))
    return [type(value), *kinds]


def _items(value: Any) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", value) if type(value) is tuple else (value,)


def _plain(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number


def check_whole(name: str, tensor: torch.Tensor) -> None:
    """Raises ConfigurationError unless the tensor is complete on every rank."""
    if nn.parameter.is_lazy(tensor):
        raise ConfigurationError(
            f"{name} has no shape yet: run a batch through the model, or give its module a size, before "
            f"ecemb.protect()"
        )
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is not None and isinstance(tensor, sharded.DTensor):
        raise ConfigurationError(
            f"{name} is a DTensor, of which each rank holds a part: ecemb keeps dense parameters that are "
            f"complete on all ranks; train them with DistributedDataParallel instead of fully_shard()"
        )
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise ConfigurationError(
            f"{name} is on the meta device or not dense, and it is not a protected table: "
            f"materialise it before ecemb.protect(), or name it in tables="
        )


def check_modules(model: nn.Module) -> None:
    """Raises ConfigurationError if the parameters of a module are partitioned over ranks."""
    for name, module in model.named_modules():
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise ConfigurationError(
                f"{name or 'the model'} is a FullyShardedDataParallel, of whose parameters each rank holds "
                f"a part: ecemb keeps dense parameters that are complete on all ranks; train them with "
                f"DistributedDataParallel"
            )


def check_optimizers(optimizers: Iterable[Any]) -> None:
    """Raises ConfigurationError if an optimizer's state is partitioned over ranks.

    Logs optimizers that override state_dict(): state in their other attributes is not saved.
    """
    for optimizer in optimizers:
        kind = type(optimizer)
        if any(one.__name__ == "ZeroRedundancyOptimizer" for one in kind.__mro__):
            raise ConfigurationError(
                "ZeroRedundancyOptimizer partitions the state of dense parameters over the ranks: ecemb "
                "keeps state that is complete on all ranks; use the optimizer that it wraps"
            )
        own = getattr(kind, "state_dict", None)
        if isinstance(optimizer, torch.optim.Optimizer) and own is not torch.optim.Optimizer.state_dict:
            logger.info(
                "%s overrides state_dict(); ecemb keeps only its parameter groups and its state: "
                "pass in state= an object for its other attributes",
                kind.__name__,
            )
