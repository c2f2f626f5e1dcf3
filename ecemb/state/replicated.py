"""Replicated state, which is the same on every rank: saved and restored.

It consists of dense parameters, buffers, extra state of modules, and the state and options of optimizers with
dense parameters, including parameters of theirs outside the model.

Must not know: the network, protected rows, the storage of the state.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import LayoutMismatch
from ..memory.rank_memory import StateStore
from .flatten import Layout, Outline, filled, same, separated, unpacked
from .optimizers import drop_options, options, others, parameters_of, with_inner
from .serialize import kind_of, like, replaced
from .walk import (
    SAME,
    CachedWalk,
    Fingerprint,
    TensorSlots,
    buffers,
    check_modules,
    check_optimizers,
    check_whole,
    has_room,
    with_extra_state,
)

_SHOWN_NAMES = 8  # in a message
_AGAIN = "run the script that started it, or use another job="
_NONE = "none of the model's"
_GENERATIONS = 2  # transactions whose tensors are known: an abort goes back by one


class ReplicatedState:
    """The state of a model and its optimizers that is the same on all ranks.

    Args:
        model: the model; its parameters and buffers are saved, except protected ones.
        optimizers: the optimizers. Options and state are saved of each optimizer with dense parameters, and
            of optimizers inside it, except the state of protected parameters.
        protected: the protected parameters.
        left_out: modules whose buffers are not saved.

    Raises:
        ConfigurationError: parameters or optimizer state are partitioned over ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        protected: Iterable[nn.Parameter],
        left_out: Iterable[nn.Module] = (),
    ) -> None:
        check_modules(model)
        self._model = model
        self._left_out = list(left_out)
        self._protected = {id(parameter) for parameter in protected}
        self._optimizers = [one for one in with_inner(optimizers) if self._dense(one)]
        check_optimizers(self._optimizers)
        self._at_start = {name for name, _, _ in buffers(model, self._left_out)}
        self._modules = {name for name, _ in model.named_modules()}
        self._fixed = self._fixed_now()
        self._slots: TensorSlots | None = None
        self._walk: CachedWalk | None = None
        self._outline = Outline({}, [], b"")  # outline at the last save or load
        self._layouts: dict[int, Layout] = {}  # address of a slot -> layout of `_outline` in it
        self._last: tuple[list[torch.Tensor], bytearray] = [], bytearray()  # tensors, numbers of `_outline`
        self._saved: dict[int, list[torch.Tensor]] = {}  # transaction -> its tensors, for the latest ones
        self._seen: Fingerprint | None = None  # fingerprint at the last save or load

    @property
    def size_bytes(self) -> int:
        """Size of all tensors now, in bytes."""
        _, tensors, _ = self._content(self._now())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def kept(self) -> tuple[dict[str, torch.Tensor], list[torch.optim.Optimizer]]:
        """The model's dense parameters and buffers by name, and the optimizers of dense parameters."""
        return dict(self._slots_now().tensors), list(self._optimizers)

    def save(self, slots: StateStore, transaction: int) -> None:
        """Writes the current state into a slot as that of `transaction`.

        Args:
            slots: the slots; their share of the state is written.
            transaction: the transaction, whose label the slot gets last.

        Raises:
            LayoutMismatch: the state has changed in a way that a restart could not restore.
        """
        outline = self._note(transaction, is_new=True)
        tensors, numbers = self._last
        memory = slots.open(transaction, outline.size_bytes(slots.share))
        address = memory.__array_interface__["data"][0]
        layout = self._layouts.get(address)
        if layout is None:
            layout = self._layouts[address] = outline.lay_out(memory, tensors, slots.share)
        layout.save(tensors, numbers)
        slots.seal(transaction)

    def load(self, slots: StateStore, transaction: int) -> None:
        """Restores the state of `transaction` into model and optimizers.

        The tensors that were saved are written in place. Tensors that replaced them are not overwritten: they
        may have other owners, such as a batch that became a buffer.

        Args:
            slots: a store that holds the whole state of the transaction.
            transaction: the transaction.

        Raises:
            LayoutMismatch: the model or an optimizer is not the one that was saved.
            InconsistentArenas: the bytes in the slot are not those of `save`.
        """
        outline, _, tensors = unpacked(slots.read(transaction))
        self.restore(outline, tensors, self._saved.get(transaction))
        self._note(transaction, is_new=False)

    def moved(self) -> dict[str, str]:
        """The changes since the last save or load: the changed item -> the change, as text."""
        if self._seen is None:
            return {}
        return self._now().fingerprint.moved_since(self._seen, self._outline.names)

    def restore(
        self,
        outline: object,
        tensors: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Restores a state from the results of `unpacked`; its tensors are copied.

        Args:
            outline: the state without its tensors.
            tensors: the state's tensors; read.
            own: the only buffers and optimizer tensors that are written in place; None for all of the model's
                and none of the optimizers'. The model's parameters are always written in place.

        Raises:
            LayoutMismatch: the model or an optimizer is not the one that was saved.
        """
        saved = cast("dict[str, Any]", filled(outline, list(tensors)))
        slots = self._slots_now()
        self._check_fits(saved, slots)
        ours = slots.names() if own is None else {id(tensor) for tensor in own}
        self._restore_model(saved, slots, ours)
        for optimizer, kept in zip(self._optimizers, saved["optimizers"], strict=True):
            self._restore_optimizer(optimizer, kept, () if own is None else ours)

    def digest(self) -> int:
        """A checksum of the state, below 2**32: equal on all ranks as long as the replicas agree.

        Outline and numbers are those of the last save or load; tensors have their present values.
        """
        tensors, numbers = self._last
        digest = zlib.crc32(numbers, zlib.crc32(self._outline.head))
        for tensor in tensors:
            digest = zlib.crc32(_raw(tensor).data, digest)
        return digest

    def whole(self) -> NDArray[np.uint8]:
        """The state of which `digest` is the checksum, as in a slot with all slices: uint8 [bytes], new."""
        tensors, numbers = self._last
        memory = np.empty(self._outline.size_bytes(), np.uint8)
        self._outline.lay_out(memory, tensors).save(tensors, numbers)
        return memory

    def _note(self, transaction: int, *, is_new: bool) -> Outline:
        """Records outline, tensors and fingerprint of the current state as those of a transaction.

        Args:
            transaction: the transaction.
            is_new: whether the state is to be saved; then a change that a restart could not restore raises.

        Raises:
            LayoutMismatch: as `save`.
        """
        walk = self._now(forms=True)
        value, tensors, numbers = self._content(walk)
        outline = self._outline
        if not same(value, outline.value):
            if is_new:
                self._check_fixed()
            outline = self._outline = Outline(value, tensors, numbers)
            self._layouts.clear()
        outline.value = value  # the next comparison finds the same objects
        self._last = tensors, numbers
        self._seen = walk.fingerprint
        self._saved.pop(transaction, None)
        self._saved[transaction] = tensors
        while len(self._saved) > _GENERATIONS:
            del self._saved[next(iter(self._saved))]
        return outline

    def _now(self, *, forms: bool = False) -> CachedWalk:
        """A walk of the current state, except extra state.

        Args:
            forms: whether the dtypes, shapes and devices in the walk's value have to be the current ones.
        """
        walk, self._walk = self._walk, None  # a refresh that fails may leave the walk half updated
        if walk is None or not walk.refresh(forms=forms):
            slots = self._slots_now()
            walk = CachedWalk(slots, self._collect(slots), self._optimizers)
        self._walk = walk
        return walk

    def _slots_now(self) -> TensorSlots:
        slots = self._slots
        if slots is None or not slots.refresh():
            slots = self._slots = TensorSlots(self._model, self._protected, self._left_out)
        return slots

    def _content(self, walk: CachedWalk) -> tuple[dict[str, Any], list[torch.Tensor], bytearray]:
        """The state with placeholders, its tensors and its numbers, each with those of extra state."""
        value, tensors, numbers = walk.value, walk.fingerprint.tensors, walk.numbers
        if not walk.slots.extra:
            return value, tensors, numbers
        states = {name: module.get_extra_state() for name, module in walk.slots.extra.items()}
        of_extra, more_tensors, more_numbers = separated({"extra": states})
        return {**value, **of_extra}, tensors + more_tensors, numbers + more_numbers

    def _collect(self, slots: TensorSlots) -> dict[str, Any]:
        shared = {name: (SAME, first) for name, first in slots.shared.items()}
        names = slots.names()
        collected: dict[str, Any] = {
            "model": {**slots.tensors, **dict.fromkeys(slots.empty), **shared},
            "optimizers": [self._collected(optimizer, names) for optimizer in self._optimizers],
        }
        appeared = self._appeared(slots)
        return {**collected, "appeared": appeared} if appeared else collected

    def _appeared(self, slots: TensorSlots) -> dict[str, bool]:
        """Buffers that were added after the start -> whether they are persistent."""
        return {name: kept for name, kept in slots.buffers.items() if name not in self._at_start}

    def _collected(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, object]:
        dense = self._dense(optimizer)
        collected: dict[str, object] = {
            "kind": kind_of(optimizer),
            "parameters": self._names(optimizer, names),
            "options": [options(group) for group in optimizer.param_groups],
            "state": {
                index: optimizer.state[parameter]
                for index, parameter in enumerate(dense)
                if parameter in optimizer.state
            },
        }
        if other := dict(others(optimizer)):
            collected["others"] = other
        outside = {index: one for index, one in enumerate(dense) if id(one) not in names}
        for index, parameter in outside.items():
            check_whole(f"parameter {index} of {type(optimizer).__name__}", parameter)
        return collected | ({"outside": outside} if outside else {})

    def _names(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str | None]]:
        """The model's names of its dense parameters, by group."""
        groups = [group["params"] for group in optimizer.param_groups]
        return [[names.get(id(one)) for one in group if id(one) not in self._protected] for group in groups]

    def _dense(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [one for one in parameters_of(optimizer) if id(one) not in self._protected]

    def _fixed_now(self) -> dict[str, object]:
        """The properties that may not change, as a restart begins with the script's model: name -> value."""
        parameters = ((n, one) for n, one in self._model.named_parameters() if id(one) not in self._protected)
        fixed: dict[str, object] = {
            name: None if nn.parameter.is_lazy(one) else (one.dtype, one.shape) for name, one in parameters
        }
        now = [name for name, _, _ in buffers(self._model, self._left_out)]
        extra = with_extra_state(self._model, self._left_out)
        fixed |= {f"buffer {name}": "there" for name in now if name in self._at_start}
        above = {name.rpartition(".")[0] for name in now} - self._modules
        fixed |= {f"module {name} with buffers": "there" for name in above}
        fixed |= {f"extra state of module {name}": "there" for name in extra}
        for i, optimizer in enumerate(self._optimizers):
            fixed[f"groups of optimizer {i}"] = len(optimizer.param_groups)
            for j, group in enumerate(optimizer.param_groups):
                fixed[f"the number of parameters in group {j} of optimizer {i}"] = len(group["params"])
        return fixed

    def _check_fixed(self) -> None:
        now = self._fixed_now()
        names = self._fixed.keys() | now.keys()
        if changed := sorted(name for name in names if self._fixed.get(name) != now.get(name)):
            name = changed[0]
            raise LayoutMismatch(
                f"{name} has changed under protection ({self._fixed.get(name)} before, {now.get(name)} now): "
                f"after a failure the script would start without the change; make it before ecemb.protect()"
            )

    def _check_fits(self, saved: dict[str, Any], slots: TensorSlots) -> None:
        """Raises LayoutMismatch unless the saved state fits the model. Called before anything is written."""
        old, now = saved["model"].keys(), {*slots.tensors, *slots.empty, *slots.shared}
        made = saved.get("appeared", {})
        missing = sorted(name for name in old - now if name not in made or not has_room(self._model, name))
        added = sorted(now - old - self._appeared(slots).keys())
        if missing or added:
            raise LayoutMismatch(
                f"the job was started with other dense parameters or buffers ({_shown(missing)} only then, "
                f"{_shown(added)} only now): {_AGAIN}"
            )
        if len(self._optimizers) != len(saved["optimizers"]):
            raise LayoutMismatch(
                f"optimizers= has {len(self._optimizers)} with dense parameters (those with only tables "
                f"don't count, those inside others do), and had {len(saved['optimizers'])} when the job was "
                f"started: run the script that started it, or use another job="
            )
        for name, tensor in slots.tensors.items():
            if not isinstance(tensor, nn.Parameter):
                continue
            then = saved["model"].get(name)
            is_tensor = isinstance(then, torch.Tensor)
            if not is_tensor or (tensor.dtype, tensor.shape) != (then.dtype, then.shape):
                was = f"{then.dtype} of shape {tuple(then.shape)}" if is_tensor else "no tensor of its own"
                raise LayoutMismatch(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and was {was} when the job "
                    f"was started: {_AGAIN}"
                )
        if missing := sorted(slots.extra.keys() ^ saved.get("extra", {}).keys()):
            raise LayoutMismatch(
                f"{missing[0] or 'the model'} has extra state either only in the saved model or only in "
                f"this one: run the script that started the job, or use another job="
            )
        names = [self._names(optimizer, slots.names()) for optimizer in self._optimizers]
        _check_optimizers_fit(self._optimizers, names, saved["optimizers"])

    @torch.no_grad()
    def _restore_model(self, saved: Mapping[str, Any], slots: TensorSlots, ours: Collection[int]) -> None:
        tensors, made = slots.tensors, saved.get("appeared", {})
        device = next((one for one in tensors.values() if one.device.type != "cpu"), None)
        for name in (*tensors, *slots.empty, *slots.shared):
            if name not in saved["model"]:
                slots.drop(name)
        for name, then in saved["model"].items():
            now = tensors.get(name)
            if isinstance(now, nn.Parameter):
                _overwrite_(now, then)
            elif not isinstance(then, tuple):
                value = _put(now, then, device if now is None else now, ours)
                if now is None or value is not now:
                    slots.put(name, value, persistent=made.get(name, True))
        for name, then in saved["model"].items():
            if isinstance(then, tuple):
                slots.put(name, slots.at(cast("Any", then)[1]))
        for name, module in slots.extra.items():
            module.set_extra_state(_copied(saved["extra"][name], device))

    @torch.no_grad()
    def _restore_optimizer(
        self, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any], ours: Collection[int]
    ) -> None:
        for group, then in zip(optimizer.param_groups, kept["options"], strict=True):
            drop_options(optimizer, group, then)
            beside = next(iter(group["params"]), None)
            group.update({key: _put(group.get(key), value, beside, ours) for key, value in then.items()})
        dense = self._dense(optimizer)
        for index, parameter in enumerate(dense):
            if index in kept["state"]:
                now = optimizer.state.get(parameter)
                optimizer.state[parameter] = _put(now, kept["state"][index], parameter, ours)
            else:
                optimizer.state.pop(parameter, None)
        other = kept.get("others", {})
        for key in dict(others(optimizer)).keys() - other.keys():
            del optimizer.state[key]
        for key, value in other.items():
            optimizer.state[key] = _put(optimizer.state.get(key), value, dense[0], ours)
        for index, value in kept.get("outside", {}).items():
            _overwrite_(dense[index], value)


def _shown(names: Sequence[str]) -> str:
    """The first names, for an error message."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{', '.join(names[:_SHOWN_NAMES])}{more}" if names else "none"


def _check_optimizers_fit(
    optimizers: Sequence[Any], names: Sequence[list[list[str | None]]], kept: Sequence[Mapping[str, Any]]
) -> None:
    """Raises LayoutMismatch unless optimizers have the saved classes, groups and dense parameters.

    Args:
        optimizers: the optimizers with dense parameters.
        names: the model's names of their dense parameters, by group; None for a parameter outside the model.
        kept: the saved state of each optimizer: its "kind", "options" and "parameters" (as `names`).
    """
    for number, (optimizer, saved) in enumerate(zip(optimizers, kept, strict=True)):
        if saved["kind"] != kind_of(optimizer):
            raise LayoutMismatch(
                f"optimizer {number} of those with dense parameters is a {kind_of(optimizer)}, and was a "
                f"{saved['kind']} when the job was started, so the saved state doesn't fit: {_AGAIN}"
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
                        f"{kind_of(optimizer)}) has {one or _NONE} where {then or _NONE} was when the job "
                        f"was started, so it would get the state of another "
                        f"parameter{_moved_to(then, names)}: give optimizers and parameters in the "
                        f"original order, or use another job="
                    )


def _moved_to(name: str | None, names: Sequence[list[list[str | None]]]) -> str:
    found = [number for number, groups in enumerate(names) if any(name in group for group in groups)]
    return f" (optimizer {found[0]} now has {name})" if name is not None and found else ""


def _raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes in row-major order: uint8 [size], a view if it is contiguous on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def _overwrite_(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copies values into a tensor. A tensor made in inference mode can be written only in that mode."""
    if tensor.is_inference():
        with torch.inference_mode():
            return tensor.copy_(values)
    return tensor.copy_(values)


def _put(now: Any, then: Any, parameter: torch.Tensor | None, ours: Collection[int]) -> Any:
    """Saved state, in the current tensors where possible, as a CUDA graph may have their addresses.

    Args:
        now: the current value.
        then: the saved value; read.
        parameter: the tensor whose device new tensors go to if they were on an accelerator; None for the CPU.
        ours: ids of the tensors that may be overwritten.

    Returns:
        The current tensors where they are overwritten, copies elsewhere.
    """
    if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor) and id(now) in ours:
        if _takes(now, then):
            return _overwrite_(now, then)
    if isinstance(now, dict) and isinstance(then, dict):
        mapping = cast("dict[Any, Any]", then)
        held = cast("dict[Any, Any]", now)
        return like(mapping, {k: _put(held.get(k), item, parameter, ours) for k, item in mapping.items()})
    return _copied(then, parameter)


def _copied(value: Any, parameter: torch.Tensor | None) -> Any:
    """Saved state with copied tensors; a tensor saved from an accelerator goes to the parameter's device."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if parameter is None or getattr(tensor, "ecemb_device", "cpu") == "cpu":
            return tensor.clone()
        return tensor.to(parameter.device, copy=True)

    return replaced(value, lambda one: isinstance(one, torch.Tensor), copy)


def _takes(buffer: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether values can be copied into a buffer: they fit, and its elements don't share memory."""
    apart = all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return apart and (buffer.dtype, buffer.shape) == (values.dtype, values.shape)
