"""A saved state of tensors: an outline, packed, then the tensors, raw, one after another (D6).

The outline is what is left of the structure when its tensors are taken out (names, numbers, options). It is
packed, and read without a pickle.

Must not know: whose state it is, where it lies.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import ConfigurationError, InconsistentArenas
from .packing import WAY_OUT, dump, load, plain, replaced

_ALIGN_BYTES = 64
_HEAD = struct.Struct("<II")  # length and checksum of the outline, which follows
_TENSOR = "ecemb.tensor"


class Outline:
    """A structure without its tensors, packed, and where they belong.

    Args:
        value: what `taken` has returned.
        tensors: what it has taken out.

    Attributes:
        value: as given.
        names: of its tensors.
        size_bytes: what it takes with its tensors.
    """

    def __init__(self, value: object, tensors: Sequence[torch.Tensor]) -> None:
        self.value = value
        self._packed = dump(value)
        self.names = blank(value)[0]
        self._places, self.size_bytes = _places(tensors, _HEAD.size + len(self._packed))

    def lay_out(self, memory: NDArray[np.uint8], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Writes everything but the tensors (uint8 [size_bytes], overwritten); returns where they belong."""
        memory[:] = 0  # what an earlier state left between tensors differs by rank
        head = _HEAD.pack(len(self._packed), zlib.crc32(self._packed)) + self._packed
        memory[: len(head)] = np.frombuffer(head, np.uint8)
        pairs = zip(self._places, tensors, strict=True)
        return [_view(memory, place, tensor.dtype, tensor.shape) for place, tensor in pairs]


def taken(value: object, tensors: list[torch.Tensor]) -> object:
    """A copy of a nested structure with its tensors taken out, in order, to `tensors`."""

    def take(tensor: torch.Tensor) -> object:
        if tensor.layout is not torch.strided:
            raise ConfigurationError(
                f"a tensor of shape {tuple(tensor.shape)} in replicated state is sparse ({tensor.layout}), "
                f"as momentum of sparse gradients is: protect that table (tables=), or give it an optimizer "
                f"whose state is dense"
            )
        tensors.append(tensor)
        return (_TENSOR, tensor.dtype, list(tensor.shape), tensor.device.type)

    return plain(value, take, "replicated state")


def same(one: Any, other: Any) -> bool:
    """Whether two structures are equal, with their dicts in the same order: it is the tensors' order."""
    return one == other and _in_order(one, other)


def filled(value: Any, tensors: list[torch.Tensor]) -> object:
    """The inverse of `taken`; consumes `tensors`. A tensor remembers the kind of device it was on."""

    def put(known: Any) -> torch.Tensor:
        tensor = tensors.pop(0)
        tensor.ecemb_device = known[3]  # pyright: ignore[reportAttributeAccessIssue]
        return tensor

    return replaced(value, _is_tensor, put)


def unpacked(memory: NDArray[np.uint8]) -> tuple[Any, list[str], list[torch.Tensor]]:
    """Takes a saved state apart (uint8, as a store's `read` gives it).

    Returns:
        The outline, the tensors' names, and the tensors: views of `memory`, in the outline's order.

    Raises:
        InconsistentArenas: `Outline` has not written it.
    """
    packed = packed_outline(memory)
    outline = load(packed.tobytes())
    names, blanks = blank(outline)
    places, size = _places(blanks, _HEAD.size + len(packed))
    if size != len(memory):
        raise InconsistentArenas(
            f"a slot of replicated state has {len(memory)} bytes, and its outline stands for {size}: the "
            f"arena's memory is damaged. {WAY_OUT}"
        )
    tensors = [_view(memory, at, one.dtype, one.shape) for one, at in zip(blanks, places, strict=True)]
    return outline, names, tensors


def checksums(memory: NDArray[np.uint8]) -> dict[str, int]:
    """Checksums below 2**32 of all parts of a saved state, tensors and others, by name, in order.

    Args:
        memory: uint8, as a store's `read` gives it; read.

    Raises:
        InconsistentArenas: `Outline` has not written it.
    """
    outline, _, tensors = unpacked(memory)
    waiting = iter(tensors)
    found: dict[str, int] = {}
    for name, value in _leaves(outline, ()):
        content = repr(value).encode()
        if _is_tensor(value):
            content += next(waiting).reshape(-1).view(torch.uint8).numpy().tobytes()
        found[name] = zlib.crc32(content)
    return found


def packed_outline(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The outline of a saved state, packed: uint8, a view of `memory`.

    Raises:
        InconsistentArenas: `Outline` has not written it.
    """
    head, checksum = _HEAD.unpack(memory[: _HEAD.size].tobytes().ljust(_HEAD.size, b"\0"))
    packed = memory[_HEAD.size : _HEAD.size + head]
    if zlib.crc32(packed.tobytes()) != checksum:
        raise InconsistentArenas(
            f"the outline of a slot of replicated state doesn't fit its checksum: the arena's memory is "
            f"damaged. {WAY_OUT}"
        )
    return packed


def blank(outline: Any) -> tuple[list[str], list[torch.Tensor]]:
    """What tensors an outline stands for.

    Returns:
        Their names, e.g. "head.weight" for the model's and "optimizers.0.state.1.exp_avg"; and tensors on
        the meta device with their types and shapes; both in the outline's order.
    """
    found = [(name, value) for name, value in _leaves(outline, ()) if _is_tensor(value)]
    tensors = [torch.empty(value[2], dtype=value[1], device="meta") for _, value in found]
    return [name for name, _ in found], tensors


def _in_order(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_in_order, one.values(), other.values()))
    return not isinstance(one, list) or all(map(_in_order, one, other))


def _is_tensor(value: object) -> bool:
    return isinstance(value, tuple) and cast("Any", value)[:1] == (_TENSOR,)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """All that a structure holds, by name, in order; of tensors what stands for them."""
    if isinstance(value, (dict, list, tuple)) and not _is_tensor(value):
        pairs = value.items() if isinstance(value, dict) else enumerate(cast("Any", value))
        for key, item in cast("Iterable[tuple[Any, Any]]", pairs):
            yield from _leaves(item, (*path, str(key)))
    else:
        yield ".".join(path[1:] if path[:1] == ("model",) else path), value


def _places(tensors: Iterable[torch.Tensor], start: int) -> tuple[list[int], int]:
    places: list[int] = []
    for tensor in tensors:
        start = -(-start // _ALIGN_BYTES) * _ALIGN_BYTES
        places.append(start)
        start += tensor.numel() * tensor.element_size()
    return places, start


def _view(memory: NDArray[np.uint8], place: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(memory[place : place + size]).view(dtype).reshape(tuple(shape))
