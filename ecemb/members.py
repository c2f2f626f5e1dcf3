"""Where a model's modules keep some of its tensors, so that a step need not walk the whole model for them.

Must not know: what the tensors are taken for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn


class Members:
    """Parameters and buffers of a model, found again where its modules hold them.

    Args:
        model: walked once, here.
        tensors: some of its parameters and buffers, by name.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        dicts = [_dicts(module) for module in model.modules()]
        self._held = [held for parameters, buffers, _ in dicts for held in (parameters, buffers)]
        self._children = [(held, list(held.values())) for _, _, held in dicts]
        holders: dict[int, tuple[dict[str, Any], str]] = {}
        for held in self._held:
            holders.update((id(tensor), (held, key)) for key, tensor in held.items())
        self._places = [(name, *holders.get(id(tensor), ({}, ""))) for name, tensor in tensors.items()]
        self._count = self._counted() if all(held for _, held, _ in self._places) else -1

    def have_changed(self) -> bool:
        """Whether modules, parameters or buffers came or went since, or some are in no module."""
        return (
            self._counted() != self._count
            or any(held.get(key) is None for _, held, key in self._places)
            or any(list(held.values()) != children for held, children in self._children)
        )

    def now(self) -> dict[str, torch.Tensor]:
        """The tensors that stand in those places now, by name: replaced ones, too."""
        return {name: held[key] for name, held, key in self._places}

    def _counted(self) -> int:
        """How many tensors there are; empty places for them don't count."""
        return sum(one is not None for held in self._held for one in held.values())


def empty_buffers(model: nn.Module) -> Iterator[str]:
    """Names of buffers that are None now: a step may fill them."""
    for prefix, module in model.named_modules():
        for key, buffer in _dicts(module)[1].items():
            if buffer is None:
                yield f"{prefix}.{key}".removeprefix(".")


def set_buffer(model: nn.Module, name: str, value: torch.Tensor | None) -> None:
    """Puts a tensor, or nothing, in a buffer's place."""
    path, _, key = name.rpartition(".")
    _dicts(model.get_submodule(path))[1][key] = value


def takes(buffer: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether values can be copied into a buffer: they fit, and no two of its places are one."""
    apart = all(stride or size < 2 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
    return apart and (buffer.dtype, buffer.shape) == (values.dtype, values.shape)


def _dicts(module: nn.Module) -> list[dict[str, Any]]:
    """A module's parameters, buffers and modules, as it holds them itself."""
    return [vars(module)[name] for name in ("_parameters", "_buffers", "_modules")]
