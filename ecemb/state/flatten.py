"""The format of saved replicated state: a packed outline, then numbers, then the raw bytes of the tensors.

The outline is the structure without its tensors and numbers (names, types, other options). It is packed, and
read without pickle. Numbers have a separate area with a word for each, so a learning rate that changes at
every step changes neither the outline nor the places of tensors. Of the tensors' area a `Share` may be saved:
some of its slices, one after another.

Must not know: the owner of the state, its storage.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..coding.placement import ALIGN_BYTES, WHOLE, Share
from ..errors import ConfigurationError, InconsistentArenas
from .serialize import INT64, WAY_OUT, dump, load, plain, replaced, with_scalars

_HEAD = struct.Struct("<III")  # length and CRC-32 of the outline, length of the numbers; then these two
_CHECKSUM = struct.Struct("<I")  # CRC-32 of the numbers, in front of them
_TENSOR = "ecemb.tensor"
_WORDS = {
    ("ecemb.int",): struct.Struct("<q"),
    ("ecemb.float",): struct.Struct("<d"),
}  # placeholder of a number -> format of its word
_INT, _FLOAT = _WORDS
WORD_BYTES = 8
"""Size of a number in the numbers' area."""


class Layout:
    """The places of numbers and tensors in the memory of a saved state; `save` writes them there.

    Args:
        numbers: memory of the checksum and the numbers, uint8 [bytes]; overwritten by `save`.
        views: for each saved tensor, or part of a tensor: its index; the slice of its elements in row-major
            order, None for all; and their memory, of the tensor's shape, or [elements] for a part;
            overwritten by `save`.
    """

    def __init__(
        self, numbers: NDArray[np.uint8], views: Sequence[tuple[int, slice | None, torch.Tensor]]
    ) -> None:
        self._numbers = memoryview(numbers.data)
        self._views = views

    @torch.no_grad()
    def save(self, tensors: Sequence[torch.Tensor], numbers: bytes | bytearray) -> None:
        """Copies tensors and numbers, as `separated` returns them, to their places."""
        self._numbers[:] = _CHECKSUM.pack(zlib.crc32(numbers)) + numbers
        for index, elements, view in self._views:
            source = tensors[index]
            view.copy_(source if elements is None else source.reshape(-1)[elements])


class Outline:
    """A packed structure without its tensors and numbers, and the places of these in a saved state.

    Args:
        value: the structure with placeholders, as `separated` returns it.
        tensors: its tensors; only their types and shapes are used.
        numbers: its numbers; only their length is used.

    Attributes:
        value: the structure with placeholders.
        head: the packed structure, behind `_HEAD`.
        names: names of its tensors.
        front_bytes: size of everything in front of the tensors.
        area_bytes: size of the whole tensors' area; a share of it may be saved.
    """

    def __init__(self, value: object, tensors: Sequence[torch.Tensor], numbers: bytes | bytearray) -> None:
        self.value = value
        packed = dump(value)
        self.head: bytes = _HEAD.pack(len(packed), zlib.crc32(packed), len(numbers)) + packed
        self.names = blank(value)[0]
        self._numbers_bytes = _CHECKSUM.size + len(numbers)
        self.front_bytes = _aligned(len(self.head) + self._numbers_bytes)
        self._places, self.area_bytes = _places(tensors)
        self._sizes: dict[Share, int] = {}

    def size_bytes(self, share: Share = WHOLE) -> int:
        """Size of the saved state in bytes, with a share of its tensors' area."""
        size = self._sizes.get(share)
        if size is None:
            size = self._sizes[share] = self.front_bytes + share.size_bytes(self.area_bytes)
        return size

    def lay_out(
        self, memory: NDArray[np.uint8], tensors: Sequence[torch.Tensor], share: Share = WHOLE
    ) -> Layout:
        """Writes the outline and zeros to memory, and returns the places of numbers and tensors in it.

        Args:
            memory: uint8 [size_bytes(share)]; overwritten.
            tensors: the structure's tensors; not read.
            share: the share of the tensors' area that is saved.
        """
        memory[:] = 0  # an earlier state may have left different bytes between tensors on each rank
        memory[: len(self.head)] = np.frombuffer(self.head, np.uint8)
        numbers = len(self.head), len(self.head) + self._numbers_bytes
        views: list[tuple[int, slice | None, torch.Tensor]] = []
        at = self.front_bytes
        for run in share.runs(self.area_bytes):
            held = memory[at : at + len(run)]
            for index, (place, tensor) in enumerate(zip(self._places, tensors, strict=True)):
                size, width = tensor.numel() * tensor.element_size(), tensor.element_size()
                low, high = max(place, run.start), min(place + size, run.stop)
                if low >= high:
                    continue
                elements, shape = None, tensor.shape
                if high - low < size:
                    elements = slice((low - place) // width, (high - place) // width)
                    shape = torch.Size([(high - low) // width])
                views.append((index, elements, _view(held, low - run.start, tensor.dtype, shape)))
            at += len(run)
        return Layout(memory[slice(*numbers)], views)


class Separator:
    """Takes tensors and numbers out of nested structures.

    Attributes:
        tensors: the tensors taken out so far, in order.
        numbers: a word for each int of 64 bits and each float taken out so far, in order.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.numbers = bytearray()

    def take(self, value: object) -> Any:
        """A copy of nested dicts, lists and tuples, with placeholders for the tensors and numbers in it.

        Raises:
            ConfigurationError: a tensor is sparse, or a value has a type that can't be packed.
        """
        return plain(value, self.take_tensor, "replicated state", self._take_number)

    def take_tensor(self, tensor: torch.Tensor) -> object:
        """The placeholder of a tensor, which is taken out.

        Raises:
            ConfigurationError: the tensor is sparse.
        """
        if tensor.layout is not torch.strided:
            raise ConfigurationError(
                f"a tensor of shape {tuple(tensor.shape)} in replicated state is sparse ({tensor.layout}), "
                f"as momentum of sparse gradients is: protect that table (tables=), or give it an optimizer "
                f"whose state is dense"
            )
        self.tensors.append(tensor)
        return (_TENSOR, tensor.dtype, list(tensor.shape), tensor.device.type)

    def _take_number(self, number: int | float) -> object:
        if not is_number(number):
            return number
        self.numbers += words([number])
        return _FLOAT if type(number) is float else _INT


def separated(value: object) -> tuple[Any, list[torch.Tensor], bytearray]:
    """Returns a structure with placeholders, its tensors, and its numbers (see `Separator`)."""
    separator = Separator()
    return separator.take(value), separator.tensors, separator.numbers


def is_number(value: object) -> bool:
    """Whether a `Separator` takes the value out as a number: a float, or an int of 64 bits."""
    return type(value) is float or (type(value) is int and value in INT64)


def words(numbers: Iterable[int | float]) -> bytes:
    """Numbers as words of 8 bytes, as in `Separator.numbers`."""
    return b"".join([_WORDS[_FLOAT if type(one) is float else _INT].pack(one) for one in numbers])


def same(one: Any, other: Any) -> bool:
    """Whether two structures are equal, including the order of dicts, which is the order of tensors."""
    return one == other and (not isinstance(one, (dict, list)) or _in_order(one, other))


def filled(value: Any, tensors: list[torch.Tensor]) -> object:
    """A structure with tensors in the place of their placeholders.

    Args:
        value: the structure with placeholders.
        tensors: its tensors, in order; consumed. Each gets the attribute `ecemb_device`, the type of the
            device that it was saved from.
    """

    def put(known: Any) -> torch.Tensor:
        tensor = tensors.pop(0)
        tensor.ecemb_device = known[3]  # pyright: ignore[reportAttributeAccessIssue]
        return tensor

    return replaced(value, _is_tensor, put)


def unpacked(memory: NDArray[np.uint8]) -> tuple[Any, list[str], list[torch.Tensor]]:
    """Splits a saved state into its parts.

    Args:
        memory: the result of a store's `read`, with all slices: uint8 [bytes]; read.

    Returns:
        The outline with its numbers; the tensors' names; and the tensors, views of `memory`, in the outline's
        order.

    Raises:
        InconsistentArenas: the bytes are damaged, or not those of a saved state.
    """
    head = in_front(memory)
    outline = outline_of(head)
    names, blanks = blank(outline)
    places, area = _places(blanks)
    start = _aligned(len(head))
    if (size := start + area) != len(memory):
        raise InconsistentArenas(
            f"a slot of replicated state has {len(memory)} bytes, and its outline needs {size}: the "
            f"arena's memory is damaged. {WAY_OUT}"
        )
    tensors = [_view(memory, start + at, b.dtype, b.shape) for b, at in zip(blanks, places, strict=True)]
    return outline, names, tensors


def measured(memory: NDArray[np.uint8]) -> tuple[int, int, list[tuple[str, int]]]:
    """Sizes in a saved state.

    Args:
        memory: the saved state, with any share of its tensors: uint8 [bytes]; read.

    Returns:
        Bytes in front of the tensors; bytes of the tensors' whole area; and for each tensor its name and the
        offset of its first byte in the area.

    Raises:
        InconsistentArenas: the bytes are damaged, or not those of a saved state.
    """
    head = in_front(memory)
    names, blanks = blank(outline_of(head))
    places, area = _places(blanks)
    return _aligned(len(head)), area, list(zip(names, places, strict=True))


def checksums(memory: NDArray[np.uint8]) -> dict[str, int]:
    """Checksums of all leaves of a saved state, tensors and other values: name -> CRC-32, in order.

    Args:
        memory: the result of a store's `read`, with all slices: uint8 [bytes]; read.

    Raises:
        InconsistentArenas: the bytes are damaged, or not those of a saved state.
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


def in_front(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The outline and numbers in front of a saved state's tensors: uint8 [bytes], a view of `memory`.

    Raises:
        InconsistentArenas: the bytes are damaged, or not those of a saved state.
    """
    return memory[: _parts(memory)[2]]


def outline_of(head: NDArray[np.uint8]) -> Any:
    """The outline with its numbers, from the result of `in_front`.

    Raises:
        InconsistentArenas: the bytes are damaged, or not those of a saved state.
    """
    packed, numbers, _ = _parts(head)
    words = iter([numbers[at : at + WORD_BYTES] for at in range(0, len(numbers), WORD_BYTES)])
    outline = replaced(load(packed), _is_number, lambda known: _WORDS[known].unpack(next(words))[0])
    return with_scalars(outline)  # numpy's scalars around taken-out numbers: `load` has made the other ones


def blank(outline: Any) -> tuple[list[str], list[torch.Tensor]]:
    """The tensors that an outline has placeholders for.

    Returns:
        Their names, such as "head.weight" in the model and "optimizers.0.state.1.exp_avg"; and tensors on the
        meta device with their types and shapes; both in the outline's order.
    """
    found = [(name, value) for name, value in _leaves(outline, ()) if _is_tensor(value)]
    tensors = [torch.empty(value[2], dtype=value[1], device="meta") for _, value in found]
    return [name for name, _ in found], tensors


def _in_order(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, dict):
        if list(one) != list(other):
            return False
        one, other = one.values(), other.values()
    return all(_in_order(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, (dict, list)))


def _parts(memory: NDArray[np.uint8]) -> tuple[bytes, bytes, int]:
    """The packed outline, the numbers, and the offset of the numbers' end; checks both checksums.

    Raises:
        InconsistentArenas: a checksum doesn't fit.
    """
    length, checksum, size = _HEAD.unpack(memory[: _HEAD.size].tobytes().ljust(_HEAD.size, b"\0"))
    edges = itertools.accumulate((_HEAD.size, length, _CHECKSUM.size, size))
    packed, own, words = (memory[low:high].tobytes() for low, high in itertools.pairwise(edges))
    for part, fits in (
        ("outline", zlib.crc32(packed) == checksum),
        ("numbers", len(words) == size and _CHECKSUM.pack(zlib.crc32(words)) == own),
    ):
        if not fits:
            raise InconsistentArenas(
                f"the {part} of a slot of replicated state doesn't fit its checksum: the arena's memory is "
                f"damaged. {WAY_OUT}"
            )
    return packed, words, _HEAD.size + length + _CHECKSUM.size + size


def _is_number(value: object) -> bool:
    return type(value) is tuple and value in (_INT, _FLOAT)


def _is_tensor(value: object) -> bool:
    return isinstance(value, tuple) and cast("Any", value)[:1] == (_TENSOR,)


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """(name, value) of all leaves of a structure, in order; a tensor's placeholder is a leaf."""
    if isinstance(value, (dict, list, tuple)) and not _is_tensor(value):
        pairs = value.items() if isinstance(value, dict) else enumerate(cast("Any", value))
        for key, item in cast("Iterable[tuple[Any, Any]]", pairs):
            yield from _leaves(item, (*path, str(key)))
    else:
        yield ".".join(path[1:] if path[:1] == ("model",) else path), value


def _places(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """The tensors' offsets in their area, and the area's size, in bytes."""
    places: list[int] = []
    end = 0
    for tensor in tensors:
        places.append(end)
        end += _aligned(tensor.numel() * tensor.element_size())
    return places, end


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


def _view(memory: NDArray[np.uint8], place: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(memory[place : place + size]).view(dtype).reshape(tuple(shape))
