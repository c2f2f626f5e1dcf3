"""The places of tensors in a model's modules, so a step need not walk the whole model.

A tensor may have several places (tied weights, shared buffers): it is listed under its first name, and the
other places are known to share it. When that changes, the model has changed.

Must not know: the use of the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Members:
    """Parameters and buffers of a model, by their places in its modules.

    Args:
        model: the model, walked once.
        tensors: some of its parameters and buffers, each once, by name.
        aside: ids of modules whose other buffers are ignored.

    Attributes:
        shared: name of each buffer that shares such a tensor -> the tensor's name.
        empty: names of buffers that are None.
    """

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, torch.Tensor], aside: Collection[int] = ()
    ) -> None:
        dicts = [_dicts(module) for module in model.modules()]
        self._held = [held for parameters, buffers, _ in dicts for held in (parameters, buffers)]
        self._children = [(held, list(held.values())) for _, _, held in dicts]
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for held in self._held:
            for key, tensor in held.items():
                places.setdefault(id(tensor), []).append((held, key))
        self._places: list[tuple[str, dict[str, Any], str]] = []
        self._others: list[tuple[dict[str, Any], str, int]] = []  # and which of the places they are one with
        for name, tensor in tensors.items():
            (held, key), *others = places.get(id(tensor), [({}, "")])
            self._others += [(other, there, len(self._places)) for other, there in others]
            self._places.append((name, held, key))
        first = {id(tensor): name for name, tensor in tensors.items()}
        self.shared: dict[str, str] = {}
        self.empty: list[str] = []
        for name, buffer, _ in _buffers(model, aside):
            if buffer is None:
                self.empty.append(name)
            elif first.get(id(buffer), name) != name and name not in tensors:
                self.shared[name] = first[id(buffer)]
        self._model = model
        self._at = {name: (held, key) for name, held, key in self._places}
        self._count = self._counted() if all(held for _, held, _ in self._places) else -1

    @property
    def holders(self) -> list[dict[str, Any]]:
        """All dicts of parameters, buffers and modules; what `have_changed` says depends on their content."""
        return [*self._held, *[held for held, _ in self._children]]

    def have_changed(self) -> bool:
        """Whether tensors were added, removed, newly shared or unshared since, or are in no module."""
        now = [held.get(key) for _, held, key in self._places]
        return (
            self._counted() != self._count
            or len(set(map(id, now))) != len(now)
            or any(tensor is None for tensor in now)
            or any(held.get(key) is not now[place] for held, key, place in self._others)
            or any(list(held.values()) != children for held, children in self._children)
        )

    def now(self) -> dict[str, torch.Tensor]:
        """The current tensors of these places, by name, also if they were replaced."""
        return {name: held[key] for name, held, key in self._places}

    def at(self, name: str) -> torch.Tensor | None:
        """The current content of a place."""
        held, key = self._place(name)
        return held[key]

    def put(self, name: str, value: torch.Tensor | None, *, persistent: bool = True) -> None:
        """Puts a tensor or None in the place of a buffer; creates a missing place."""
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

    def _counted(self) -> int:
        """Number of tensors; empty places don't count."""
        return sum([one is not None for held in self._held for one in held.values()])


def buffers(model: nn.Module, aside: Collection[int] = ()) -> dict[str, bool]:
    """Names of all places for buffers, also empty ones -> whether they are in the model's state_dict."""
    return {name: persistent for name, _, persistent in _buffers(model, aside)}


def has_room(model: nn.Module, name: str) -> bool:
    """Whether `Members.put` can create a buffer of this name."""
    path, _, key = name.rpartition(".")
    try:
        return not hasattr(model.get_submodule(path), key)
    except AttributeError:  # no such module
        return False


def takes(buffer: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether values can be copied into a buffer: they fit, and its elements don't share memory."""
    apart = all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return apart and (buffer.dtype, buffer.shape) == (values.dtype, values.shape)


def with_extra_state(model: nn.Module, aside: Collection[int] = ()) -> dict[str, nn.Module]:
    """Modules with extra state in the model's state_dict, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
        and id(module) not in aside
        and not isinstance(module, torch.jit.ScriptModule)
    }


def _buffers(model: nn.Module, aside: Collection[int]) -> Iterator[tuple[str, torch.Tensor | None, bool]]:
    """All places for buffers: name, content, and whether it is in the model's state_dict."""
    for prefix, module in model.named_modules():
        if id(module) not in aside:
            unsaved = getattr(module, "_non_persistent_buffers_set", ())
            for key, buffer in _dicts(module)[1].items():
                yield f"{prefix}.{key}".removeprefix("."), buffer, key not in unsaved


def _dicts(module: nn.Module) -> list[dict[str, Any]]:
    """The module's own dicts of parameters, buffers and modules. A ScriptModule hides them."""
    if isinstance(module, torch.jit.ScriptModule):
        return [{}, {}, {}]
    return [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]
