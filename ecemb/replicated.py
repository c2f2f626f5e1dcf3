"""Replicated state: what is the same on every rank, kept in two slots of the arena (D6).

Dense parameters, buffers, and the state and options of optimizers that have dense parameters. Two slots hold
the last two transactions; a restarted rank reads its own slot, a newcomer gets a survivor's. Tensors are
copied raw, one after another; what is left of the structure when its tensors are taken out (names, numbers,
options) is the *outline*, saved by torch.save and read with weights_only=True.

Invariant: the slot of the last committed transaction is never written.
Must not know: the network, protected rows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .arena import Arena
from .errors import ConfigurationError, InconsistentArenas, LayoutMismatch
from .members import Members, empty_buffers, set_buffer, takes
from .packing import WAY_OUT, dump, load, plain

_ALIGN_BYTES = 64
_HEAD = struct.Struct("<II")  # length and checksum of the outline, which follows
_TENSOR = "ecemb.tensor"
_SLOTS = ("slot0", "slot1")


class StateStore(Protocol):
    """Where `ReplicatedState` is saved to and loaded from."""

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """Room for a transaction's state, uint8 [size_bytes]; it is void until it is sealed."""
        ...

    def seal(self, transaction: int) -> None:
        """Says that the whole state of `transaction` is there."""
        ...

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state of a transaction, uint8, a view."""
        ...


class Slots:
    """The two versions of replicated state in an arena; the one that is not committed is written.

    Args:
        arena: holds the regions "slot0" and "slot1" and the words `slot0_label`, `slot0_bytes`, ....
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """Room for a transaction's state, uint8 [size_bytes]; the slot is void until it is sealed."""
        slot = self._free()
        self._arena.set(f"{slot}_label", -1)
        self._arena.reserve(slot, size_bytes, spare_bytes=0)  # it hardly ever grows again
        self._arena.set(f"{slot}_bytes", size_bytes)
        return self._arena.region(slot)[:size_bytes]

    def seal(self, transaction: int) -> None:
        """Says that the slot that was opened holds the whole state of `transaction`."""
        self._arena.set(f"{self._free()}_label", transaction)

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """The state of a transaction, uint8, a view.

        Raises:
            InconsistentArenas: neither slot holds it.
            ArenaDamaged: the slot says that it holds more than it can.
        """
        labels = {slot: self._arena.get(f"{slot}_label") for slot in _SLOTS}
        found = [slot for slot, label in labels.items() if label == transaction]
        if len(found) != 1:
            raise InconsistentArenas(
                f"the replicated state of transaction {transaction} is not in one of the slots, which hold "
                f"{list(labels.values())}: no failure leaves this behind; the arena's memory is damaged. "
                f"{self._arena.way_out}"
            )
        return self._arena.filled(found[0], f"{found[0]}_bytes")

    def _free(self) -> str:
        committed = self._arena.get("committed")
        others = [slot for slot in _SLOTS if self._arena.get(f"{slot}_label") != committed]
        return others[-1] if others else _SLOTS[0]  # a new arena has committed nothing


class Savepoint:
    """Replicated state as it was when a step began, in this process's memory: what an abort goes back to."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return len(self._memory)

    def open(self, transaction: int, size_bytes: int) -> NDArray[np.uint8]:
        """See `StateStore.open`."""
        if len(self._memory) != size_bytes:
            self._memory = np.empty(size_bytes, np.uint8)
        return self._memory

    def seal(self, transaction: int) -> None:
        """See `StateStore.seal`."""

    def read(self, transaction: int) -> NDArray[np.uint8]:
        """What was saved last."""
        return self._memory


class ReplicatedState:
    """Everything of a model and its optimizers that is the same on all ranks.

    Args:
        model: its parameters and buffers are taken, but for the protected ones.
        optimizers: of those that have dense parameters, options are taken, and state but for that of
            protected parameters.
        protected: the protected parameters.
        aside: modules whose buffers are not taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        protected: Iterable[nn.Parameter],
        aside: Iterable[nn.Module] = (),
    ) -> None:
        self._model = model
        self._aside = list(aside)
        self._protected = {id(parameter) for parameter in protected}
        self._optimizers = [optimizer for optimizer in optimizers if self._dense(optimizer)]
        self._empty = set(empty_buffers(model))
        self._fixed = self._fixed_now()
        self._outline: object = None
        self._outline_bytes = b""
        self._outline_sum = 0
        self._size = 0
        self._members: Members | None = None
        self._views: dict[int, list[torch.Tensor]] = {}  # by the address of the slot

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors as they are now."""
        tensors: list[torch.Tensor] = []
        _outline(self._collect(), tensors)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def save(self, slots: StateStore, transaction: int) -> None:
        """Writes the state of `transaction`.

        Raises:
            LayoutMismatch: a restart could not put it back.
        """
        tensors: list[torch.Tensor] = []
        outline = _outline(self._collect(), tensors)
        if outline != self._outline:
            self._check_fixed()
            self._outline, self._outline_bytes = outline, dump(outline)
            self._outline_sum = zlib.crc32(self._outline_bytes)
            self._views.clear()
            _, self._size = _places(tensors, _HEAD.size + len(self._outline_bytes))
        memory = slots.open(transaction, self._size)
        views = self._views.get(memory.ctypes.data)
        if views is None:
            views = self._views[memory.ctypes.data] = self._lay_out(memory, tensors)
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor.detach())
        slots.seal(transaction)

    def _lay_out(self, memory: NDArray[np.uint8], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Writes everything but the tensors to a slot, and returns where they belong."""
        head = len(self._outline_bytes)
        memory[:] = 0  # what an earlier state left between tensors differs by rank
        memory[: _HEAD.size] = np.frombuffer(_HEAD.pack(head, self._outline_sum), np.uint8)
        memory[_HEAD.size : _HEAD.size + head] = np.frombuffer(self._outline_bytes, np.uint8)
        places, _ = _places(tensors, _HEAD.size + head)
        pairs = zip(places, tensors, strict=True)
        return [_view(memory, place, tensor.dtype, tensor.shape) for place, tensor in pairs]

    def load(self, slots: StateStore, transaction: int) -> None:
        """Puts the state of `transaction` back into the model and the optimizers.

        Raises:
            LayoutMismatch: the model or an optimizer is not the one that was saved.
            InconsistentArenas: the slot holds what `save` has not written.
        """
        outline, _, tensors = unpacked(slots.read(transaction))
        self.restore(outline, tensors)

    def restore(self, outline: object, tensors: Sequence[torch.Tensor]) -> None:
        """Puts a state back that `unpacked` took apart; its tensors are copied.

        Raises:
            LayoutMismatch: the model or an optimizer is not the one that was saved.
        """
        self._restore(cast("dict[str, Any]", _filled(outline, list(tensors))))

    def digest(self, slots: Slots, transaction: int) -> int:
        """A checksum of the state, below 2**32: equal on all ranks as long as the replicas agree."""
        return zlib.crc32(slots.read(transaction).tobytes())

    def _collect(self) -> dict[str, object]:
        return {
            "model": self._tensors(),
            "optimizers": [
                {
                    "options": [options(group) for group in optimizer.param_groups],
                    "state": {
                        index: optimizer.state[parameter]
                        for index, parameter in enumerate(self._dense(optimizer))
                        if parameter in optimizer.state
                    },
                }
                for optimizer in self._optimizers
            ],
        }

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The model's dense parameters and buffers, by name."""
        if self._members is None or self._members.have_changed():
            found = self._found()
            self._members = Members(self._model, found)
            return found
        return self._members.now()

    def _found(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if id(parameter) not in self._protected
        }
        aside = {id(buffer) for module in self._aside for _, buffer in nn.Module.named_buffers(module)}
        tensors.update((n, b) for n, b in self._model.named_buffers() if id(b) not in aside)
        for name, tensor in tensors.items():
            if tensor.is_meta or tensor.layout is not torch.strided:
                raise ConfigurationError(
                    f"{name} is on the meta device or not dense, and it is not a protected table: "
                    f"materialise it before ecemb.protect(), or name it in tables="
                )
        return tensors

    def _dense(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        return [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in self._protected
        ]

    def _fixed_now(self) -> dict[str, object]:
        """What may not change under protection, since a restart begins with what the script has built."""
        parameters = ((n, one) for n, one in self._model.named_parameters() if id(one) not in self._protected)
        fixed: dict[str, object] = {name: (one.dtype, one.shape) for name, one in parameters}
        groups = {f"groups of optimizer {i}": len(o.param_groups) for i, o in enumerate(self._optimizers)}
        return fixed | groups

    def _check_fixed(self) -> None:
        now = self._fixed_now()
        names = self._fixed.keys() | now.keys()
        if changed := sorted(name for name in names if self._fixed.get(name) != now.get(name)):
            name = changed[0]
            raise LayoutMismatch(
                f"{name} has changed under protection ({self._fixed.get(name)} before, {now.get(name)} now): "
                f"after a failure the script would begin without that; change it before ecemb.protect()"
            )

    def _check_fits(self, saved: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Before anything is written."""
        differing = sorted(tensors.keys() ^ saved["model"].keys())
        if {*differing} - self._empty or len(self._optimizers) != len(saved["optimizers"]):
            raise LayoutMismatch(
                f"the job was started with other dense parameters or optimizers "
                f"(differing: {differing[:8]}, {len(saved['optimizers'])} optimizers then and "
                f"{len(self._optimizers)} now): run the script that started it, or use another job="
            )
        for name, tensor in tensors.items():
            then = saved["model"].get(name, tensor)
            if isinstance(tensor, nn.Parameter) and (tensor.dtype, tensor.shape) != (then.dtype, then.shape):
                raise LayoutMismatch(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, and was {then.dtype} of shape "
                    f"{tuple(then.shape)} when the job was started: run the script that started it, or use "
                    f"another job="
                )
        for optimizer, kept in zip(self._optimizers, saved["optimizers"], strict=True):
            if len(optimizer.param_groups) != len(kept["options"]):
                raise LayoutMismatch(
                    f"{type(optimizer).__name__} has {len(optimizer.param_groups)} parameter groups, and had "
                    f"{len(kept['options'])}: add groups before ecemb.protect(), as when the job was started"
                )

    @torch.no_grad()
    def _restore(self, saved: dict[str, Any]) -> None:
        tensors = self._tensors()
        self._check_fits(saved, tensors)
        for name in {**tensors, **saved["model"]}:
            tensor, then = tensors.get(name), saved["model"].get(name)
            if tensor is None or then is None:
                set_buffer(self._model, name, _copied(then, _any_of(tensors)))
            elif isinstance(tensor, nn.Parameter) or takes(tensor, then):
                tensor.copy_(then)
            else:
                set_buffer(self._model, name, _copied(then, tensor))
        for optimizer, kept in zip(self._optimizers, saved["optimizers"], strict=True):
            for group, then in zip(optimizer.param_groups, kept["options"], strict=True):
                group.update(_copied(then, None))
            for index, parameter in enumerate(self._dense(optimizer)):
                if index in kept["state"]:
                    optimizer.state[parameter] = _copied(kept["state"][index], parameter)
                else:
                    optimizer.state.pop(parameter, None)


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an optimizer's parameter group: all of it but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def unpacked(memory: NDArray[np.uint8]) -> tuple[Any, list[str], list[torch.Tensor]]:
    """Takes a saved state apart (uint8, as `Slots.read` gives it).

    Returns:
        The outline, the tensors' names, and the tensors: views of `memory`, in the outline's order.

    Raises:
        InconsistentArenas: `save` has not written it.
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


def packed_outline(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The outline of a saved state, packed: uint8, a view of `memory`.

    Raises:
        InconsistentArenas: `save` has not written it.
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
    found: list[tuple[str, torch.Tensor]] = []
    _find(outline, (), found)
    return [name for name, _ in found], [tensor for _, tensor in found]


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


def _outline(value: object, tensors: list[torch.Tensor]) -> object:
    """A copy of a nested structure with its tensors taken out, in order, to `tensors`."""

    def taken(tensor: torch.Tensor) -> object:
        tensors.append(tensor)
        return (_TENSOR, tensor.dtype, list(tensor.shape), tensor.device.type)

    return plain(value, taken, "replicated state")


def _is_tensor(value: object) -> bool:
    return isinstance(value, tuple) and cast("Any", value)[:1] == (_TENSOR,)


def _find(value: Any, path: tuple[str, ...], found: list[tuple[str, torch.Tensor]]) -> None:
    if _is_tensor(value):
        name = ".".join(path[1:] if path[0] == "model" else path)
        found.append((name, torch.empty(value[2], dtype=value[1], device="meta")))
    elif isinstance(value, (dict, list, tuple)):
        pairs = value.items() if isinstance(value, dict) else enumerate(cast("Any", value))
        for key, item in cast("Iterable[tuple[Any, Any]]", pairs):
            _find(item, (*path, str(key)), found)


def _filled(value: Any, tensors: list[torch.Tensor]) -> object:
    """The inverse of `_outline`; consumes `tensors`. A tensor remembers the kind of device it was on."""
    if _is_tensor(value):
        tensor = tensors.pop(0)
        tensor.ecemb_device = value[3]  # pyright: ignore[reportAttributeAccessIssue]
        return tensor
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in cast("Any", value).items()}
    if isinstance(value, (list, tuple)):
        items = [_filled(item, tensors) for item in cast("Any", value)]
        return items if isinstance(value, list) else tuple(items)
    return value


def _any_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """One on an accelerator, if there is one."""
    return next((one for one in tensors.values() if one.device.type != "cpu"), None)


def _copied(value: Any, parameter: torch.Tensor | None) -> Any:
    """State out of the slot: tensors cloned, those of an accelerator onto the parameter's."""
    if isinstance(value, torch.Tensor):
        if parameter is None or getattr(value, "ecemb_device", "cpu") == "cpu":
            return value.clone()
        return value.to(parameter.device, copy=True)
    if isinstance(value, dict):
        return {key: _copied(item, parameter) for key, item in cast("Any", value).items()}
    if isinstance(value, (list, tuple)):
        items = [_copied(item, parameter) for item in cast("Any", value)]
        return items if isinstance(value, list) else tuple(items)
    return value
