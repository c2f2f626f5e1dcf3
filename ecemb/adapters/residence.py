"""The places of protected tensors: their move into the arena, and whether they are still there.

torch moves memory under a tensor without a trace. `share_memory_()` swaps the memory of a storage, and all
views of the storage move along, even a view that was kept for comparison. So an address is kept as a number,
and the address of host memory is taken from the arena's mapping, never from a tensor.

Must not know: engines, journals, other ranks.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray

from ..errors import UndeclaredWrite

_REST = (
    "The tensors in training are not the protected ones, and are not committed: let the process end, and a "
    "restart goes on from the last commit"
)


Form: TypeAlias = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""A tensor's address, sizes, strides and type."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The required place and form of one tensor.

    Attributes:
        what: names the tensor and its table, for messages.
        address: of its first byte; None for a tensor without bytes.
        shape: its sizes.
        stride: its strides, in elements.
        dtype: its elements' type.
    """

    what: str
    address: int | None
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def holds(self, tensor: object) -> bool:
        """Whether a tensor has this place and form."""
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.shape == self.shape
            and tensor.dtype == self.dtype
            and (
                self.address is None or (_address(tensor) == self.address and tensor.stride() == self.stride)
            )
        )


class Places:
    """The places of some tensors, in order; empty at first."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._forms: list[Form] = []
        self._addresses: list[int] = []

    def keep(self, what: str, tensor: torch.Tensor, memory: NDArray[Any] | None = None) -> None:
        """Adds a tensor's place.

        Args:
            what: names the tensor and its table, for messages.
            tensor: the training's own, placed.
            memory: the arena's memory for it; None for its present place, as for a tensor on a device.
        """
        address = _address(tensor) if memory is None else int(memory.ctypes.data)
        stride = tuple(tensor.stride())
        self._places.append(
            Place(what, address if tensor.numel() else None, tensor.shape, stride, tensor.dtype)
        )
        self._forms.append((address, tensor.shape, stride, tensor.dtype))
        self._addresses.append(address)

    def check(self, tensors: Sequence[object]) -> None:
        """Raises UndeclaredWrite unless each tensor is in its place, in the order of `keep`."""
        if list(map(_form, tensors)) != self._forms:  # in each step, of each table
            self._find(tensors)

    def check_addresses(self, tensors: Sequence[object]) -> None:
        """The same without forms, in a third of the time: for tensors that only show what others train."""
        if list(map(_address, tensors)) != self._addresses:
            self._find(tensors)

    def _find(self, tensors: Sequence[object]) -> None:
        for place, tensor in zip(self._places, tensors, strict=True):
            if not place.holds(tensor):
                raise UndeclaredWrite(_moved(place, tensor))


def _form(tensor: Any) -> Form | None:
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except (AttributeError, RuntimeError):  # `Place.holds` looks closer
        return None


def _address(tensor: Any) -> int:
    try:
        return tensor.data_ptr()
    except (AttributeError, RuntimeError):  # no tensor; a subclass without its own memory, such as DTensor
        return -1


def _moved(place: Place, tensor: object) -> str:
    if not isinstance(tensor, torch.Tensor):
        return (
            f"{place.what} is gone, or is no longer a tensor (was the optimizer's state cleared?). {_REST}. "
            f"Do it before ecemb.protect()"
        )
    if tensor.shape != place.shape or tensor.dtype != place.dtype:
        return (
            f"{place.what} was replaced: it is {tensor.dtype} {list(tensor.shape)} now, and {place.dtype} "
            f"{list(place.shape)} is protected (by .to(), resize_() or an assignment?). {_REST}. Do it "
            f"before ecemb.protect()"
        )
    if _is_shared(tensor):
        return (
            f"{place.what} was moved from the arena ({place.address:#x}) to other shared memory "
            f"({_address(tensor):#x}). share_memory_() does that to tensors and modules, and so does sending "
            f"them to another process: a torch.multiprocessing queue or pipe, or a DataLoader with "
            f"spawn or forkserver. {_REST}. Send other processes a copy: tensor.detach().clone()"
        )
    return (
        f"the storage of {place.what} was replaced: {_address(tensor):#x} now, and {place.address:#x} is "
        f"protected (by load_state_dict(assign=True), .to(), set_(), swap_tensors() or an assignment to "
        f".data?). {_REST}. Do it before ecemb.protect()"
    )


def _is_shared(tensor: torch.Tensor) -> bool:
    try:
        return tensor.device.type == "cpu" and tensor.is_shared()
    except (RuntimeError, NotImplementedError):  # see `_address`
        return False


@dataclasses.dataclass(frozen=True)
class Move:
    """A storage that a buffer has left; kept alive, so that no other storage gets its address meanwhile.

    Attributes:
        left: the storage.
        span: the arena's tensor, one-dimensional, in its place.
    """

    left: torch.UntypedStorage
    span: torch.Tensor


def repoint(moves: Sequence[Move]) -> None:
    """Points every tensor of this process in an abandoned storage to the arena instead.

    There are views in many places: the local shards of state_dict(), the states of fused optimizers, the
    parameters that the model shows. The user may have taken more of them. The garbage collector knows all.
    """
    if not moves:
        return
    places = {move.left.data_ptr(): move.span for move in moves}
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        for thing in gc.get_objects():
            if not issubclass(type(thing), torch.Tensor):
                continue
            try:
                span = places.get(thing.untyped_storage().data_ptr())
            except (RuntimeError, NotImplementedError):  # a tensor without its own storage
                continue
            if span is not None:
                values = span.view(thing.dtype)  # a view may read the bytes as another type
                thing.data = values.as_strided(thing.size(), thing.stride(), thing.storage_offset())
