"""Copies between saved state and the tensors of a model: into those that are there, or as new ones.

Must not know: which state is saved, and where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from .serialize import like, replaced
from .tensor_places import takes


def raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes in row-major order: uint8 [size], a view if it is contiguous on the CPU."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy()


def any_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """A tensor on an accelerator, if there is one."""
    return next((one for one in tensors.values() if one.device.type != "cpu"), None)


def overwrite_(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Copies values into a tensor. One that was made in inference mode is written in that mode alone."""
    if tensor.is_inference():
        with torch.inference_mode():
            return tensor.copy_(values)
    return tensor.copy_(values)


def put(now: Any, then: Any, parameter: torch.Tensor | None, ours: Collection[int]) -> Any:
    """Saved state, in our current tensors where possible: a CUDA graph may have their addresses."""
    if isinstance(now, torch.Tensor) and isinstance(then, torch.Tensor) and id(now) in ours:
        if takes(now, then):
            return overwrite_(now, then)
    if isinstance(now, dict) and isinstance(then, dict):
        mapping = cast("dict[Any, Any]", then)
        held = cast("dict[Any, Any]", now)
        return like(mapping, {k: put(held.get(k), item, parameter, ours) for k, item in mapping.items()})
    return copied(then, parameter)


def copied(value: Any, parameter: torch.Tensor | None) -> Any:
    """Saved state with cloned tensors; those of an accelerator go to the parameter's."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if parameter is None or getattr(tensor, "ecemb_device", "cpu") == "cpu":
            return tensor.clone()
        return tensor.to(parameter.device, copy=True)

    return replaced(value, lambda one: isinstance(one, torch.Tensor), copy)
