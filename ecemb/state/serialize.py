"""State as bytes that are read without pickle: plain values and tensors, by torch.save.

Packed state is read with torch.load(weights_only=True), so its types are checked when it is packed, not when
it is needed. Numbers of numpy become those of python, and mappings become dicts, except types that torch.load
reads. Equal structures have equal bytes.
"""

from __future__ import annotations

import io
import itertools
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch

from ..errors import ConfigurationError, InconsistentArenas

_PLAIN = (bool, int, float, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)

_SMALL_BYTES = 256
_SMALL = "ecemb.state.serialize: a small tensor"

WAY_OUT = (
    "End the job and remove this rank's arena (python -m ecemb arenas ls shows its path): then it counts as "
    "lost, and is rebuilt"
)
"""The remedy for damaged packed bytes, for the end of an error message."""


def plain(
    value: object,
    on_tensor: Callable[[torch.Tensor], object] | None = None,
    at: str = "state",
    on_number: Callable[[int | float], object] | None = None,
) -> Any:
    """A copy of a nested structure, in types that `load` reads.

    Args:
        value: dicts, lists and tuples of tensors, numbers, strings, None.
        on_tensor: returns the replacement of each tensor, in order; by default the tensor itself.
        at: the place of the value, for the error.
        on_number: returns the replacement of each int and float that is not a key, in order; by default the
            number itself.

    Raises:
        ConfigurationError: a value has another type; the message has its place.
    """
    try:
        return _copy(value, on_tensor, on_number)
    except _NotPlainError:
        raise ConfigurationError(_complaint(value, at)) from None


class _NotPlainError(Exception):
    """A value has a type that `load` doesn't read. `_complaint` finds its place."""


def _copy(
    value: Any,
    on_tensor: Callable[[torch.Tensor], object] | None,
    on_number: Callable[[int | float], object] | None = None,
) -> Any:
    kind = type(value)  # in each step thousands of times: the types that are many come first
    if kind is str:
        return sys.intern(value)  # torch.save writes each string object only once
    if kind is int or kind is float:
        return value if on_number is None else on_number(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_copy(item, on_tensor, on_number) for item in value]
    if kind is tuple:
        return tuple([_copy(item, on_tensor, on_number) for item in value])
    if kind is dict:
        return {
            sys.intern(key) if type(key) is str else _copy(key, None): _copy(item, on_tensor, on_number)
            for key, item in value.items()
        }
    if isinstance(value, torch.Tensor):
        return value if on_tensor is None else on_tensor(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return like(value, {_copy(key, None): _copy(item, on_tensor, on_number) for key, item in items})
    if isinstance(value, np.generic):
        item = value.item()
        return on_number(item) if on_number is not None and type(item) in (int, float) else item
    raise _NotPlainError


def like(value: Mapping[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """Items as a dict of the mapping's type, if `load` reads that type."""
    if type(value) is OrderedDict:
        return OrderedDict(items)
    return Counter(items) if type(value) is Counter else items


def replaced(value: Any, known: Callable[[Any], bool], make: Callable[[Any], object]) -> Any:
    """A copy of a structure of dicts, lists and tuples, with `make(one)` in place of each `known` item."""
    if known(value):
        return make(value)
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return like(mapping, {key: replaced(item, known, make) for key, item in mapping.items()})
    if type(value) is list or type(value) is tuple:
        items = [replaced(item, known, make) for item in cast("Iterable[Any]", value)]
        return items if type(value) is list else tuple(items)
    return value


def _complaint(value: Any, at: str) -> str:
    """The message for the first value that `_copy` refuses, with its place."""
    items: Iterable[tuple[Any, str]] = ()
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[Any, Any]", value).items())
        items = itertools.chain.from_iterable(((key, at), (item, f"{at}[{key!r}]")) for key, item in pairs)
    elif type(value) in (list, tuple):
        items = ((item, f"{at}[{i}]") for i, item in enumerate(value))
    for item, there in items:
        try:
            _copy(item, lambda tensor: tensor)
        except _NotPlainError:
            return _complaint(item, there)
    return (
        f"{at} is a {type(value).__module__}.{type(value).__qualname__}, which "
        f"torch.load(weights_only=True) doesn't read, and ecemb loads no pickles: use numbers, strings, "
        f"tensors, None, lists, tuples and dicts"
    )


def dump(value: object) -> bytes:
    """The result of `plain` as bytes."""
    buffer = io.BytesIO()
    torch.save(_copy(value, _inlined), buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The inverse of `dump`, without pickle.

    Raises:
        InconsistentArenas: the bytes are not those of `dump`.
    """
    try:
        return _whole(torch.load(io.BytesIO(data), map_location=_own_device, weights_only=True))
    except Exception as error:
        raise InconsistentArenas(
            f"{len(data)} bytes of packed state can't be read back ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0][:200]}): their memory is damaged, or "
            f"another version of torch wrote them"
        ) from error


def _inlined(tensor: torch.Tensor) -> object:
    """A small tensor as text: torch.save writes a file for each tensor, which takes most of its time."""
    if tensor.nbytes > _SMALL_BYTES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return tensor
    values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return (_SMALL, tensor.dtype, list(tensor.shape), values.numpy().tobytes().decode("latin-1"))


def _own_device(storage: Any, place: str) -> Any:
    """Loads a storage from `place` to this process's device, which may have another number."""
    if not place.startswith("cuda"):
        return None  # the default of torch
    return storage.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else storage


def _whole(value: Any) -> Any:
    """The inverse of `_inlined`, in a structure of dicts, lists and tuples."""
    return replaced(value, lambda one: type(one) is tuple and one[:1] == (_SMALL,), _tensor)


def _tensor(inlined: tuple[str, torch.dtype, list[int], str]) -> torch.Tensor:
    _, dtype, shape, data = inlined
    return torch.from_numpy(np.frombuffer(bytearray(data, "latin-1"), np.uint8)).view(dtype).reshape(shape)
