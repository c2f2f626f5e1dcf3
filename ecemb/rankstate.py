"""Rank state: what differs by rank and is not a row, packed into one record of the row space (D2).

The random number generators of torch (CPU and CUDA), numpy and python, each table's scalars (Adagrad's
`step`), the user's `state=` objects, and the positions of what was bound later (`guard.batches`). The record
is protected like any row: captured, sent as a delta, rebuilt from parity. Packed by torch.save, read with
weights_only=True: no pickle is loaded.

Must not know: where the record lies, who protects it.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from . import generators
from .errors import ConfigurationError, InconsistentArenas, LayoutMismatch, StepFailed
from .packing import WAY_OUT, dump, load, plain
from .rows import WORD_BYTES, Column, TableLayout

NAME = "<rank state>"
_HEAD = struct.Struct("<II")  # length and checksum of what follows
_HEAD_BYTES = _HEAD.size
_SIZE = struct.Struct("<Q")  # of the generators' states, which follow, and then the rest


class Stateful(Protocol):
    """Anything with a state_dict, e.g. a learning rate schedule or an early-stop counter."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state, made of types that torch.load(weights_only=True) reads."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Takes the state back."""
        ...


class Position(Stateful, Protocol):
    """Where this rank stands in its data; bound after `protect`.

    Attributes:
        name: for messages.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Taken:
    """The state of one rank but for positions, in this process's memory."""

    generators: dict[str, Any]
    cuda: list[Any]
    scalars: Any
    stateful: list[Any]


def objects_of(given: Any) -> dict[str | int, Stateful]:
    """What a caller has given as `state=`, by name; by place, where it has no names.

    Raises:
        ConfigurationError: one has no state_dict()/load_state_dict(), a name is no string, or two that have
            no names are of one class, so that nothing tells them apart after a restart.
    """
    objects: dict[Any, Any]
    if given is None:
        objects = {}
    elif _is_stateful(given) or not isinstance(given, (Mapping, list, tuple)):
        objects = {0: given}
    else:
        objects = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        if isinstance(given, Mapping) and (others := [key for key in objects if not isinstance(key, str)]):
            raise ConfigurationError(
                f"state= takes a mapping whose keys are strings, the objects' names; {others[0]!r} is none"
            )
    places: dict[str, Any] = {}
    for key, item in objects.items():
        if not _is_stateful(item):
            raise ConfigurationError(
                f"state= takes objects with state_dict() and load_state_dict(); "
                f"{type(item).__name__} has not both: wrap it in a class that has"
            )
        first = places.setdefault(_kind(item), key)
        if first != key and not isinstance(key, str):
            raise ConfigurationError(
                f"objects {first} and {key} in state= are both of class {type(item).__name__}, and nothing "
                f"would tell whether they changed places between two starts: name them, "
                f'state={{"warmup": ..., "decay": ...}}'
            )
    return objects


class RankState:
    """Packs and unpacks the state of one rank.

    Args:
        given: the user's objects, as for `ecemb.protect`.
        scalars: returns the tables' scalars, by table.
        set_scalars: takes them back.

    Attributes:
        positions: what was bound, in order.
        room_bytes: the most that `pack` may give; None if nothing limits it.

    Raises:
        ConfigurationError: an object has no state_dict()/load_state_dict(), its state can't be read back
            with weights_only=True, or it needs a name.
    """

    def __init__(
        self,
        given: Mapping[str, Stateful] | Sequence[Stateful] | Stateful | None,
        scalars: Callable[[], dict[str, Any]],
        set_scalars: Callable[[dict[str, Any]], None],
    ) -> None:
        self._objects = objects_of(given)
        self._scalars = scalars
        self._set_scalars = set_scalars
        self.positions: list[Position] = []
        self._at_bind: list[Any] = []  # each position's state when it was bound
        self._pending: list[Any] = []  # states that were packed, and whose position is not bound yet
        self.room_bytes: int | None = None
        self._generators: tuple[dict[str, Any], bytes] | None = None  # as they were packed last
        self._last: tuple[dict[str, Any], list[Any], Any] | None = None  # CUDA's, too, and scalars
        for key, item in self._objects.items():
            load(dump(_state(key, item)))

    def bind(self, position: Position) -> None:
        """Adds a position, and puts it where it was if it was packed before; outside of a step.

        Positions are told apart by the order in which they are bound.

        Raises:
            LayoutMismatch: the position says so: it was another one's.
        """
        if self._pending:
            position.load_state_dict(self._pending[0])
        self._at_bind.append(_position(position))
        self.positions.append(position)
        del self._pending[:1]

    def pack(self) -> bytes:
        """The state as it is now.

        Raises:
            StepFailed: it takes more than `room_bytes`.
        """
        cuda = _cuda_states()
        parts = {
            "cuda": cuda,
            "scalars": plain(self._scalars(), at="the tables' scalars"),
            "stateful": [_state(key, item) for key, item in self._objects.items()],
            "kinds": list(map(_kind, self._objects.values())),
            "names": list(self._objects),
            "positions": [*map(_position, self.positions), *self._pending],
        }
        states = generators.process_states()
        if self._generators is None or not generators.same(states, self._generators[0]):
            self._generators = states, dump(states)  # what draws nothing need not pay for it in each step
        self._last = states, cuda, plain(parts["scalars"], _clone)
        packed = self._generators[1]
        data = _SIZE.pack(len(packed)) + packed + dump(parts)
        if self.room_bytes is not None and _HEAD_BYTES + len(data) > self.room_bytes:
            names = [position.name for position in self.positions]
            names += [_described(key, item) for key, item in self._objects.items()]
            sizes = [
                len(dump(part)) for part in (*parts["positions"][: len(self.positions)], *parts["stateful"])
            ]
            size, largest = max(
                [(len(dump(parts["scalars"])), "the tables' scalars"), *zip(sizes, names, strict=True)]
            )
            raise StepFailed(
                f"the rank's state takes {len(data)} bytes, and {self.room_bytes - _HEAD_BYTES} were "
                f"reserved by ecemb.protect(); the largest part is {largest} with {size} bytes: keep what "
                f"grows, such as logs, histories and samples read ahead, out of it"
            )
        return data

    def unpack(self, data: bytes, *, positions: bool = True) -> None:
        """Puts the state back: scalars, the user's objects, positions, the process's generators last.

        States of positions that are not bound yet wait for `bind`; positions that were bound since are put
        where they were then.

        Args:
            data: what `pack` returned.
            positions: also the positions; else they stay where they are.

        Raises:
            LayoutMismatch: other objects were packed.
        """
        drawn, saved = _taken_apart(data)
        states = self._matched(saved)
        self._set_scalars(saved["scalars"])
        for item, state in zip(self._objects.values(), states, strict=True):
            item.load_state_dict(state)
        if positions:
            states = saved["positions"]
            for i, position in enumerate(self.positions):
                position.load_state_dict(states[i] if i < len(states) else self._at_bind[i])
            self._pending = states[len(self.positions) :]
        generators.set_process_states(drawn)
        if saved["cuda"]:
            _set_cuda_states(*saved["cuda"])
        self._last = generators.process_states(), _cuda_states(), plain(self._scalars(), _clone)

    def take(self) -> Taken:
        """A copy of the state as it is now, but for positions; `put` puts it back."""
        scalars = plain(self._scalars(), _clone, "the tables' scalars")
        stateful = [
            plain(item.state_dict(), _clone, f"{_described(key, item)}.state_dict()")
            for key, item in self._objects.items()
        ]
        return Taken(generators.process_states(), _cuda_states(), scalars, stateful)

    def put(self, taken: Taken) -> None:
        """Puts a state back that was taken; positions stay where they are."""
        self._set_scalars(taken.scalars)
        for item, state in zip(self._objects.values(), taken.stateful, strict=True):
            item.load_state_dict(state)
        generators.set_process_states(taken.generators)
        if taken.cuda:
            _set_cuda_states(*taken.cuda)

    def moved(self, taken: Taken) -> dict[str, str]:
        """Which generators, and whether scalars, are not as they were packed or unpacked last, and how."""
        if self._last is None:
            return {}
        states, cuda, scalars = self._last
        names = [
            f"{name}'s random generator"
            for name, state in taken.generators.items()
            if not generators.same({name: state}, states)
        ]
        if cuda and taken.cuda and not all(map(torch.equal, cuda[1], taken.cuda[1])):
            names.append("a CUDA device's random generator")
        moved = dict.fromkeys(names, "something was drawn from it, or it was seeded")
        if not _equal(scalars, taken.scalars):
            moved["options of a table's optimizer"] = "its learning rate, or a counter"
        return moved

    def unpack_scalars(self, data: bytes) -> None:
        """Puts back only the tables' scalars."""
        self._set_scalars(_taken_apart(data)[1]["scalars"])

    def unpack_common(self, states: Sequence[bytes]) -> None:
        """Puts back what other ranks' states can give to a rank that is new.

        That is the tables' scalars, and those of the user's objects that were equal on all of them, such as
        learning rate schedules.

        Args:
            states: what `pack` returned on each rank.

        Raises:
            LayoutMismatch: other objects were packed.
        """
        saved = [_taken_apart(data)[1] for data in states]
        matched = [self._matched(one) for one in saved]
        self._set_scalars(saved[0]["scalars"])
        for item, *theirs in zip(self._objects.values(), *matched, strict=True):
            if len({dump(state) for state in theirs}) == 1:
                item.load_state_dict(theirs[0])

    def _matched(self, saved: Mapping[str, Any]) -> list[Any]:
        """The packed states of the user's objects, each in the place of its object.

        They go by name where both then and now they have names, else by order.

        Raises:
            LayoutMismatch: other objects were packed.
        """
        states = saved["stateful"]
        names = saved.get("names", range(len(states)))
        named = all(isinstance(name, str) for name in (*names, *self._objects))
        if named:
            for name, now in [(name, False) for name in names] + [(name, True) for name in self._objects]:
                if name not in (names if now else self._objects):
                    raise LayoutMismatch(
                        f"state= has {'an' if now else 'no'} object {name!r}, and had "
                        f"{'none of that name' if now else 'one'} when the job was started: give the objects "
                        f"under the names that they had ({', '.join(map(repr, names))}), or use another job="
                    )
        elif len(self._objects) != len(states):
            raise LayoutMismatch(
                f"the number of objects in state= is {len(self._objects)}, and was {len(states)} "
                f"when the job was started: run the script that started it, or use another job="
            )
        kinds = saved.get("kinds", [None] * len(states))
        found = dict(zip(names if named else self._objects, zip(kinds, states, strict=True), strict=True))
        for key, item in self._objects.items():
            if (then := found[key][0]) is not None and then != (kind := _kind(item)):
                raise LayoutMismatch(
                    f"state= object {key!r} is a {kind}, and was a {then} when the job was started: give the "
                    f"objects {'under the names that they had' if named else 'in the same order'}, or use "
                    f"another job="
                )
        return [found[key][1] for key in self._objects]


def _taken_apart(data: bytes) -> tuple[Any, Any]:
    """The generators' states, and all else that `RankState.pack` has packed.

    Raises:
        InconsistentArenas: `pack` has not written this.
    """
    size = _SIZE.unpack(data[: _SIZE.size])[0] if len(data) >= _SIZE.size else -1
    if not 0 <= size <= len(data) - _SIZE.size:
        raise InconsistentArenas(
            f"{len(data)} bytes of packed state say that {size} bytes of generators' states follow: the "
            f"memory that held them is damaged, or another version of ecemb has written them"
        )
    edge = _SIZE.size + size
    return load(data[_SIZE.size : edge]), load(data[edge:])


def layout(size_bytes: int) -> TableLayout:
    """The layout of the record: a table of one row."""
    return TableLayout(NAME, 1, (Column("state", "uint8", size_bytes),))


def room(size_bytes: int) -> int:
    """Bytes to reserve for a state that takes `size_bytes` now: it may double, and 192 KiB for positions.

    A loader's position takes about 20 KB where it has a generator of its own. It is not more, since what is
    reserved is copied and compared in each step, though not sent.
    """
    return -(-(2 * size_bytes + 3 * 65536) // WORD_BYTES) * WORD_BYTES


def write_(record: NDArray[np.uint8], data: bytes) -> None:
    """Writes packed state to its record (uint8 [room], overwritten).

    Raises:
        StepFailed: the state has outgrown its record.
    """
    if _HEAD_BYTES + len(data) > len(record):
        raise StepFailed(
            f"the rank's state (generators, table scalars, state= objects) takes {len(data)} bytes, and "
            f"{len(record) - _HEAD_BYTES} were reserved by ecemb.protect(): keep what grows, such as "
            f"logs and histories, out of state="
        )
    record[:_HEAD_BYTES] = np.frombuffer(_HEAD.pack(len(data), zlib.crc32(data)), np.uint8)
    record[_HEAD_BYTES : _HEAD_BYTES + len(data)] = np.frombuffer(data, np.uint8)
    record[_HEAD_BYTES + len(data) :] = 0


def read(record: NDArray[np.uint8]) -> bytes:
    """Reads packed state from its record.

    Raises:
        InconsistentArenas: its checksum doesn't fit.
    """
    size, checksum = _HEAD.unpack(record[:_HEAD_BYTES].tobytes())
    if zlib.crc32(record[_HEAD_BYTES : _HEAD_BYTES + size].tobytes()) != checksum:
        raise InconsistentArenas(
            f"the record of the rank's state ({size} of {len(record)} bytes) doesn't fit its checksum: the "
            f"arena's memory is damaged. {WAY_OUT}"
        )
    return record[_HEAD_BYTES : _HEAD_BYTES + size].tobytes()


def _cuda_states() -> list[Any]:
    """The number of this process's own device, and the generators of all devices; empty without CUDA."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.current_device(), torch.cuda.get_rng_state_all()]


def _set_cuda_states(own: int, states: Sequence[torch.Tensor]) -> None:
    """Puts generators back; that of the process's own device to its own one now, which may be another."""
    count = torch.cuda.device_count()
    now = torch.cuda.current_device() if count else own
    swapped = {own: now, now: own}
    for device, state in enumerate(states):
        if (there := swapped.get(device, device)) < count:
            torch.cuda.set_rng_state(state, there)


def _equal(one: Any, other: Any) -> bool:
    """Whether two plain structures are equal; so is NaN to itself."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(item, other[key]) for key, item in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one is other or repr(one) == repr(other)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _kind(one: object) -> str:
    return f"{type(one).__module__}.{type(one).__qualname__}"


def _is_stateful(one: object) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def _described(key: str | int, item: object) -> str:
    """An object of `state=`, for messages."""
    return f"state= object {key!r} ({type(item).__name__})"


def _state(key: str | int, item: Stateful) -> Any:
    return plain(item.state_dict(), at=f"{_described(key, item)}.state_dict()")


def _position(position: Position) -> Any:
    return plain(position.state_dict(), at=f"the state of {position.name}")
