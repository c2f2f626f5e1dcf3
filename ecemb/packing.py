"""State as bytes that no pickle is needed to read: plain values and tensors, by torch.save.

What is packed is read back with torch.load(weights_only=True), so types are checked when it is packed, not
when it is needed. Numbers of numpy become python's.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch

from .errors import ConfigurationError, InconsistentArenas

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def plain(value: object, on_tensor: Callable[[torch.Tensor], object] | None = None, at: str = "state") -> Any:
    """A copy of a nested structure, made of types that `load` reads.

    Args:
        value: dicts, lists and tuples of tensors, numbers, strings, None.
        on_tensor: what to put in place of each tensor, in order; the tensor itself by default.
        at: where the value stands, for the error.

    Raises:
        ConfigurationError: a value of another type, with its place.
    """
    if isinstance(value, torch.Tensor):
        return value if on_tensor is None else on_tensor(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, object]", value).items()
        return {plain(key, None, at): plain(item, on_tensor, f"{at}[{key!r}]") for key, item in items}
    if type(value) in (list, tuple):
        items = [plain(item, on_tensor, f"{at}[{i}]") for i, item in enumerate(cast("list[object]", value))]
        return items if isinstance(value, list) else tuple(items)
    raise ConfigurationError(
        f"{at} is a {type(value).__module__}.{type(value).__qualname__}, which "
        f"torch.load(weights_only=True) doesn't read, and ecemb loads no pickles: use numbers, strings, "
        f"tensors, None, lists, tuples and dicts"
    )


def dump(value: object) -> bytes:
    """Plain values and tensors as bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The inverse of `dump`; loads no pickle.

    Raises:
        InconsistentArenas: `dump` has not written this.
    """
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise InconsistentArenas(
            f"{len(data)} bytes of packed state can't be read back ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0][:200]}): the memory that held them is damaged, or "
            f"another version of torch has written them"
        ) from error
