"""State as bytes that are read without pickle: plain values and tensors, by torch.save.

Packed state is read with torch.load(weights_only=True), so types are checked when state is packed, not when
it is read after a failure. Values have the same types when they are read: numpy's scalars are packed with
their dtype, and mappings that torch.load doesn't read are refused. Equal structures have equal bytes.

torch.save takes a third of a millisecond, so state that is packed in each step goes through a `Packer`, which
calls torch.save only for structures that have changed.
"""

from __future__ import annotations

import io
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
import torch

from ..errors import ConfigurationError, InconsistentArenas

_PLAIN = (bool, int, float, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)

_IN_NUMPY = (bool, int, float, complex, str, bytes)  # types that a numpy scalar's value is packed as
_SMALL_BYTES = 256
_SMALL = "ecemb.state.serialize: a small tensor"
_EMPTY = "ecemb.state.serialize: no bytes"
_NUMPY = "ecemb.state.serialize: a numpy scalar"  # in a tuple with the scalar's dtype and value
_APART, _AGAIN = (f"ecemb.state.serialize: {what}" for what in ("a tensor's bytes", "a tensor again"))
_SIZES = struct.Struct("<II")  # sizes of the values and of the outline, which follow
INT64 = range(-(1 << 63), 1 << 63)
"""The ints that are packed as a word of 8 bytes."""
_CODES: dict[type, str] = {int: "q", float: "d"}  # struct's format characters

WAY_OUT = (
    "End the job and remove this rank's arena (ecemb arenas ls shows its path): then it counts as "
    "lost, and is rebuilt"
)
"""What to do about damaged packed bytes, as the end of an error message."""


def plain(
    value: object,
    on_tensor: Callable[[torch.Tensor], object] | None = None,
    at: str = "state",
    on_number: Callable[[int | float], object] | None = None,
) -> Any:
    """A copy of a nested structure in types that torch.load reads; `with_scalars` restores numpy's scalars.

    Args:
        value: dicts, lists and tuples of tensors, numbers, numpy's scalars, strings, None.
        on_tensor: returns the replacement of each tensor, in order; by default the tensor itself.
        at: the place of the value, for the error's message.
        on_number: returns the replacement of each int and float that is not a key, in order; by default the
            number itself.

    Raises:
        ConfigurationError: a value has another type; the message names its place.
    """
    try:
        return _copy(value, on_tensor, on_number)
    except NotPlainError:
        raise _refusal(value, at) from None


class NotPlainError(Exception):
    """A value has a type that `load` doesn't read. `_refusal` finds the value's place."""


def _copy(
    value: Any,
    on_tensor: Callable[[torch.Tensor], object] | None = None,
    on_number: Callable[[int | float], object] | None = None,
) -> Any:
    kind = type(value)  # called thousands of times in each step: frequent types come first
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
            sys.intern(key) if type(key) is str else plain_key(key): _copy(item, on_tensor, on_number)
            for key, item in value.items()
        }
    if isinstance(value, torch.Tensor):
        return value if on_tensor is None else on_tensor(value)
    if kind is OrderedDict or kind is Counter:
        return like(value, {plain_key(key): _copy(item, on_tensor, on_number) for key, item in value.items()})
    if isinstance(value, np.generic) and type(item := _item(value)) in _IN_NUMPY:
        return (_NUMPY, value.dtype.str, _copy(item, None, on_number))
    raise NotPlainError


def kind_of(one: object) -> str:
    """The full name of an object's class."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def plain_key(key: Any) -> Any:
    """A plain key of a dict; for a numpy scalar the python value with the same hash that equals it.

    Raises:
        NotPlainError: the key has another type, or no python value equals it.
    """
    if not isinstance(key, np.generic):
        return _copy(key)
    item = _item(key)
    if type(item) in _IN_NUMPY and item == key and hash(item) == hash(key):
        return item
    raise NotPlainError


def with_scalars(value: Any) -> Any:
    """A copy of a result of `plain` or `load`, with numpy's scalars in the place of their tuples."""
    return replaced(value, _is_scalar, lambda one: _scalar(*one[1:]))


def _item(scalar: np.generic) -> Any:
    """The python value of a numpy scalar; None for a structured scalar."""
    if isinstance(scalar, (bytes, str)):  # item() would cut off zeros at the end
        return bytes(scalar) if isinstance(scalar, bytes) else str.__str__(scalar)
    return None if isinstance(scalar, np.void) else scalar.item()


def _scalar(dtype: str, item: Any) -> Any:
    kinds: dict[type, Any] = {bytes: np.bytes_, str: np.str_}
    return kinds[type(item)](item) if type(item) in kinds else np.array(item, dtype)[()]


def _is_scalar(value: Any) -> bool:
    return type(value) is tuple and value[:1] == (_NUMPY,) and type(value[2]) in _IN_NUMPY


def like(value: Mapping[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """The items as an OrderedDict or Counter if `value` is one, otherwise as they are."""
    if type(value) is OrderedDict:
        return OrderedDict(items)
    return Counter(items) if type(value) is Counter else items


def replaced(value: Any, known: Callable[[Any], bool], make: Callable[[Any], object]) -> Any:
    """A copy of a structure of dicts, lists and tuples, with `make(item)` for each item that is `known`."""
    if known(value):
        return make(value)
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return like(mapping, {key: replaced(item, known, make) for key, item in mapping.items()})
    if type(value) is list or type(value) is tuple:
        items = [replaced(item, known, make) for item in cast("Iterable[Any]", value)]
        return items if type(value) is list else tuple(items)
    return value


def _refusal(value: Any, at: str) -> ConfigurationError:
    """The error for the first value that `_copy` refuses; its message names the value's place."""
    parts: list[tuple[Callable[[Any], object], Any, str]] = []
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        parts += [(plain_key, key, f"a key in {at}") for key in mapping]
        parts += [(_copy, item, f"{at}[{key!r}]") for key, item in mapping.items()]
    elif type(value) in (list, tuple):
        parts += [(_copy, item, f"{at}[{i}]") for i, item in enumerate(value)]
    for copy, item, there in parts:
        try:
            copy(item)
        except NotPlainError:
            return _refusal(item, there)
    return ConfigurationError(
        f"{at} is a {kind_of(value)}, which torch.load(weights_only=True) doesn't read, and ecemb loads no "
        f"pickles: use numbers, strings, tensors, None, lists, tuples and dicts"
    )


def dump(value: object) -> bytes:
    """Packs a result of `plain` into bytes."""
    buffer = io.BytesIO()
    torch.save(replaced(_copy(value, _inlined), _is_empty, lambda _: (_EMPTY,)), buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The inverse of `dump`, without pickle.

    Raises:
        InconsistentArenas: the bytes are not those of `dump`.
    """
    return _read(data, lambda packed: with_scalars(_load(packed)))


class Packer:
    """Packs a structure repeatedly, such as once in each step.

    Packed bytes begin with the numbers and the tensors' bytes, one after another. The outline follows, by
    `dump`: the structure with zeros for its numbers and placeholders for tensors. The outline is dumped only
    if it has changed.
    """

    def __init__(self) -> None:
        self._outline: tuple[str, bytes] = ("", b"")  # text of the last outline, and its dumped bytes

    def pack(self, value: object, at: str = "state") -> bytes:
        """Packs a structure into bytes that `unpacked` reads.

        Args:
            value: as for `plain`.
            at: the place of the value, for the error's message.

        Raises:
            ConfigurationError: as `plain`.
        """
        taken = _Taken()
        outline = plain(value, taken.take_tensor, at, taken.take_number)
        codes, values = taken.packed()
        if taken.has_left_tensors:
            packed = dump((codes, outline))
        else:
            # Unlike ==, equal texts mean equal types: 1 and True, 0j and -0j, a dict and its subclass.
            key = repr((codes, outline))
            if key != self._outline[0]:
                self._outline = key, dump((codes, outline))
            packed = self._outline[1]
        return b"".join((_SIZES.pack(len(values), len(packed)), values, packed))


def unpacked(data: bytes) -> Any:
    """The inverse of `Packer.pack`, without pickle.

    Raises:
        InconsistentArenas: the bytes are not those of `Packer.pack`.
    """
    return _read(data, _refilled)


class _Taken:
    """Collects the numbers and tensors of a structure, in order.

    Attributes:
        has_left_tensors: whether a tensor stays in the structure, because only torch.save keeps all of it.
    """

    def __init__(self) -> None:
        self.has_left_tensors: bool = False
        self._values: list[int | float | bytes] = []
        self._tensors = 0
        self._known: dict[tuple[object, ...], int] = {}

    def take_number(self, number: int | float) -> object:
        """Collects a number, and returns its placeholder. An int of more than 64 bits is packed as bytes."""
        if type(number) is int and number not in INT64:
            self._values.append(number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True))
        else:
            self._values.append(number)
        return 0

    def take_tensor(self, tensor: torch.Tensor) -> object:
        """Collects a tensor, and returns its placeholder.

        A tensor that only torch.save keeps completely is not collected, and returned itself. A large tensor
        that occurs several times, as in the positions of loaders, is collected once.
        """
        if not _is_small(tensor):
            if not _is_ordinary(tensor):
                self.has_left_tensors = True
                return tensor
            key = tensor.data_ptr(), tensor.dtype, tensor.shape
            if (first := self._known.setdefault(key, self._tensors)) != self._tensors:
                return (_AGAIN, first)
        self._tensors += 1
        self._values.append(_bytes(tensor))
        return (_APART, tensor.dtype, list(tensor.shape))

    def packed(self) -> tuple[str, bytes]:
        """The collected values: struct's format, and the packed bytes."""
        codes = "<" + "".join([_CODES.get(type(one)) or f"{len(cast('Any', one))}s" for one in self._values])
        return codes, struct.pack(codes, *self._values)


def _read(data: bytes, load: Callable[[bytes], Any]) -> Any:
    try:
        return load(data)
    except Exception as error:
        raise InconsistentArenas(
            f"{len(data)} bytes of packed state can't be read back ({type(error).__name__}: "
            f"{(str(error).splitlines() or [''])[0][:200]}): their memory is damaged, or "
            f"another version of torch wrote them"
        ) from error


def _inlined(tensor: torch.Tensor) -> object:
    """A small tensor as a tuple with its bytes as text; a larger tensor itself.

    torch.save writes a file for each tensor, which takes most of its time.
    """
    if not _is_small(tensor):
        return tensor
    return (_SMALL, tensor.dtype, list(tensor.shape), _bytes(tensor).decode("latin-1"))


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= _SMALL_BYTES and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fully described by its dtype, its shape and its bytes."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    try:
        return tensor.numpy(force=True).tobytes()
    except TypeError:  # bfloat16, for example, which numpy doesn't have
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _load(data: bytes) -> Any:
    """The inverse of `dump`, except for numpy's scalars, which stay tuples as in a result of `plain`."""
    read = torch.load(io.BytesIO(data), map_location=_own_device, weights_only=True)
    known = (_SMALL,), (_EMPTY,)
    return replaced(read, lambda one: type(one) is tuple and one[:1] in known, _tensor)


def _refilled(data: bytes) -> Any:
    size, outline_size = _SIZES.unpack_from(data)
    edge = _SIZES.size + size
    if edge + outline_size != len(data):
        raise ValueError(f"they announce {size} bytes of values and {outline_size} of an outline")
    codes, outline = _load(data[edge:])
    left: list[Any] = [*reversed(struct.unpack(codes, data[_SIZES.size : edge]))]
    tensors: list[torch.Tensor] = []

    def put(placeholder: Any) -> object:
        if type(placeholder) is int:
            value = left.pop()
            return int.from_bytes(value, "little", signed=True) if type(value) is bytes else value
        if placeholder[0] == _AGAIN:
            return tensors[placeholder[1]]
        _, dtype, shape = placeholder
        tensors.append(_from_bytes(dtype, shape, bytearray(left.pop())))
        return tensors[-1]

    value = replaced(outline, _is_placeholder, put)
    if left:
        raise ValueError(f"{len(left)} values are left")
    return with_scalars(value)


def _is_placeholder(value: Any) -> bool:
    return type(value) is int or (type(value) is tuple and value[:1] in ((_APART,), (_AGAIN,)))


def _own_device(storage: Any, place: str) -> Any:
    """Loads a storage from `place` to this process's device, which may have another number."""
    if not place.startswith("cuda"):
        return None  # torch's default
    return storage.cuda(torch.cuda.current_device()) if torch.cuda.is_available() else storage


def _is_empty(value: Any) -> bool:
    """Whether the value is b"", which torch.load(weights_only=True) refuses."""
    return type(value) is bytes and not value


def _tensor(inlined: Any) -> object:
    if inlined == (_EMPTY,):
        return b""
    _, dtype, shape, data = inlined
    return _from_bytes(dtype, shape, bytearray(data, "latin-1"))


def _from_bytes(dtype: torch.dtype, shape: list[int], data: bytearray) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
