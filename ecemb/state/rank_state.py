"""Rank state: state besides rows that differs by rank, packed into one record of the row space.

It consists of the random number generators of torch (CPU and CUDA), numpy and python, each table's scalars
(Adagrad's `step`), the user's `state=` objects, metrics in the model, and the positions of loaders that were
bound later (`guard.batches`). The record is protected like any row: captured, sent as a delta, rebuilt from
parity. It is read without pickle. Scalars come first, and generators last: a delta ends with the last changed
word.

Owns reading and writing the states of generators: the global ones of the process (torch's on the CPU,
numpy's, python's), those of CUDA devices, and those that objects own. Joins the tables' scalars of several
ranks, as a table may be on another rank than when they were saved. Scalars are dicts of three levels: tables
or buckets, then engines, then names that an engine chooses, such as a batch of tables.

Must not know: the place of the record, its protection, what a scalar is.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import itertools
import random
import struct
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..coding.rows import SPLIT_BYTES, Column, TableLayout
from ..errors import ConfigurationError, InconsistentArenas, LayoutMismatch, StepFailed
from .metric_states import MetricStates, found_in, is_growing
from .serialize import WAY_OUT, Packer, dump, kind_of, load, plain, replaced, unpacked, with_scalars

NAME = "<rank state>"
_HEAD = struct.Struct("<II")  # length and checksum of the data that follow
_HEAD_BYTES = _HEAD.size
# An earlier format has no mark: the size of the generators' states, these, and the rest, both by `dump`.
_MARK = b"ecemb rs"
_SIZES = struct.Struct("<8sQQQ")  # the mark, and the sizes of the three sections: scalars, rest, generators
_SIZE = struct.Struct("<Q")


class Stateful(Protocol):
    """An object with a state_dict, e.g. a learning rate schedule or an early-stop counter."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state, in types that torch.load(weights_only=True) reads."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Restores the state."""
        ...


class Position(Stateful, Protocol):
    """The position of this rank in its data; bound after `protect`.

    Attributes:
        name: the loader's name in messages.
    """

    name: str


def objects_of(given: Any) -> dict[str | int, Stateful]:
    """The objects of a caller's `state=`, by name, or by index if they have no names.

    Raises:
        ConfigurationError: an object has no state_dict()/load_state_dict(); or a name is not a string; or two
            objects without names have the same class, so a restart couldn't tell them apart.
    """
    objects: dict[Any, Any]
    if given is None:
        objects = {}
    elif is_stateful(given) or not isinstance(given, (Mapping, list, tuple)):
        objects = {0: given}
    else:
        objects = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
        if isinstance(given, Mapping) and (others := [key for key in objects if not isinstance(key, str)]):
            raise ConfigurationError(
                f"state= takes a mapping whose keys are strings, the objects' names; {others[0]!r} is not a "
                f"string"
            )
    places: dict[str, Any] = {}
    for key, item in objects.items():
        if not is_stateful(item):
            raise ConfigurationError(
                f"state= takes objects with state_dict() and load_state_dict(); "
                f"{type(item).__name__} lacks one of them: wrap it in a class that has both"
            )
        first = places.setdefault(kind_of(item), key)
        if first != key and not isinstance(key, str):
            raise ConfigurationError(
                f"objects {first} and {key} in state= both have the class {type(item).__name__}, so a "
                f"restart can't detect that they changed places: name them, "
                f'state={{"warmup": ..., "decay": ...}}'
            )
    return objects


class RankState:
    """Packs and unpacks the state of one rank.

    Args:
        given: the user's objects, as for `state=` of `ecemb.protect`.
        scalars: returns the tables' scalars, by table.
        set_scalars: restores a result of `scalars`.
        model: its metrics are packed as well, except those in `given` and those that keep all samples; None
            for no metrics.

    Attributes:
        growing: name -> metric of the model that is left out because it keeps all samples.
        empty: names, for messages, of objects whose state_dict() is empty and that have no metrics.
        positions: the bound positions, in order.
        room_bytes: size of the record: the most bytes of a packed state with its head; None for no limit.

    Raises:
        ConfigurationError: an object has no state_dict()/load_state_dict(), or its state can't be read with
            weights_only=True, or it needs a name.
    """

    def __init__(
        self,
        given: Mapping[str, Stateful] | Sequence[Stateful] | Stateful | None,
        scalars: Callable[[], dict[str, Any]],
        set_scalars: Callable[[dict[str, Any]], None],
        model: nn.Module | None = None,
    ) -> None:
        self._objects = objects_of(given)
        self._metrics = [MetricStates(item, f"state[{key!r}]") for key, item in self._objects.items()]
        given_ones = {id(one) for held in self._metrics for one in held.metrics.values()}
        self._in_model = MetricStates(model, "model", given_ones, growing=False)
        self.growing: dict[str, nn.Module] = {
            f"model.{path}": metric
            for path, metric in found_in(model).items()
            if id(metric) not in given_ones and is_growing(metric)
        }
        self._scalars = scalars
        self._set_scalars = set_scalars
        self.positions: list[Position] = []
        self._at_bind: list[Any] = []  # each position's state when it was bound
        self._pending: list[Any] = []  # packed states of positions that are not bound yet
        self.room_bytes: int | None = None
        self._reader = Reader()
        self._packer_of_scalars, self._packer, self._packer_of_generators = Packer(), Packer(), Packer()
        self._generators: tuple[dict[str, Any], bytes] | None = None  # states that were packed last, packed
        self._last: tuple[dict[str, Any], list[Any], bytes] | None = None  # result of the last `_note`
        self._kinds: list[str] = list(map(kind_of, self._objects.values()))
        self._bare: bytes = self._pack_rest([], [], [], [{}])
        self.empty: list[str] = []
        for (key, item), held in zip(self._objects.items(), self._metrics, strict=True):
            state = _state(key, item)
            load(dump([state, held.state()]))
            if not (state or held or _is_off(item)):
                self.empty.append(_described(key, item))
        load(dump(self._in_model.state()))

    @property
    def metrics(self) -> dict[str, nn.Module]:
        """The metrics that are packed, by name."""
        return {name: one for held in (*self._metrics, self._in_model) for name, one in held.metrics.items()}

    def bind(self, position: Position) -> None:
        """Adds a position, and restores its packed state if there is one. Called outside of a step.

        Positions are identified by the order in which they are bound.

        Raises:
            LayoutMismatch: the packed state belongs to another loader; raised by the position.
        """
        if self._pending:
            position.load_state_dict(self._pending[0])
        self._at_bind.append(_position(position))
        self.positions.append(position)
        del self._pending[:1]

    def pack(self) -> bytes:
        """The current state, packed.

        Raises:
            StepFailed: the state takes more than `room_bytes`.
        """
        states, cuda, scalars = self._note()
        stateful = [_state(key, item) for key, item in self._objects.items()]
        positions = [_position(position) for position in self.positions]
        rest = self._bare  # the same in each step of most trainings
        metrics = [held.state() for held in (*self._metrics, self._in_model)]
        if cuda or stateful or positions or self._pending or metrics[-1]:
            rest = self._pack_rest(cuda, stateful, [*positions, *self._pending], metrics)
        if self._generators is None or self._generators[0] is not states:
            self._generators = states, self._packer_of_generators.pack(states)
        sections = scalars, rest, self._generators[1]
        data = b"".join((_SIZES.pack(_MARK, *map(len, sections)), *sections))
        if self.room_bytes is not None and _HEAD_BYTES + len(data) > self.room_bytes:
            names = [position.name for position in self.positions]
            names += [_described(key, item) for key, item in self._objects.items()]
            names += [f"metric model.{path}" for path in metrics[-1]]
            objects = zip(stateful, metrics, strict=False)
            parts = [len(dump(part)) for part in (*positions, *objects, *metrics[-1].values())]
            size, largest = max([(len(scalars), "the tables' scalars"), *zip(parts, names, strict=True)])
            raise StepFailed(
                f"the rank's state takes {len(data)} bytes, but {self.room_bytes - _HEAD_BYTES} were "
                f"reserved by ecemb.protect(); the largest part is {largest} with {size} bytes: keep data "
                f"that grow, such as logs, histories, samples read ahead and metrics that list all samples, "
                f"out of it"
            )
        return data

    def _pack_rest(
        self, cuda: list[Any], stateful: list[Any], positions: list[Any], metrics: list[dict[str, Any]]
    ) -> bytes:
        objects = {"stateful": stateful, "kinds": self._kinds, "names": list(self._objects)}
        return self._packer.pack({"cuda": cuda, **objects, "metrics": metrics, "positions": positions})

    def _look(self) -> tuple[dict[str, Any], list[Any], Any]:
        """The current states of the process's generators and of CUDA's generators, and the scalars."""
        return self._reader.read(), cuda_states(), self._scalars()

    def _note(self) -> tuple[dict[str, Any], list[Any], bytes]:
        """The result of `_look` with the scalars packed; stored, as `moved` compares with it."""
        states, cuda, scalars = self._look()
        self._last = states, cuda, self._pack_scalars(scalars)
        return self._last

    def _pack_scalars(self, scalars: Any) -> bytes:
        return self._packer_of_scalars.pack(scalars, "the tables' scalars")

    def unpack(self, data: bytes, *, positions: bool = True) -> None:
        """Restores the state: scalars, the user's objects, positions, and last the process's generators.

        States of positions that are not bound yet are kept for `bind`; positions that were bound later return
        to their state at that time.

        Args:
            data: the result of `pack`.
            positions: whether to restore positions as well.

        Raises:
            LayoutMismatch: other objects were packed.
        """
        drawn, saved = _taken_apart(data)
        states, metrics = self._matched(saved)
        self._set_scalars(saved["scalars"])
        for item, state in zip(self._objects.values(), states, strict=True):
            item.load_state_dict(state)
        self._put_metrics(metrics)
        if positions:
            states = saved["positions"]
            for i, position in enumerate(self.positions):
                position.load_state_dict(states[i] if i < len(states) else with_scalars(self._at_bind[i]))
            self._pending = states[len(self.positions) :]
        set_process_states(drawn)
        if saved["cuda"]:
            set_cuda_states(*saved["cuda"])
        self._note()

    def _put_metrics(self, states: Sequence[Mapping[str, Any]]) -> None:
        for held, state in zip((*self._metrics, self._in_model), states, strict=True):
            held.put(state)

    def moved(self) -> dict[str, str]:
        """Generators and scalars that have changed since the last `pack` or `unpack` -> the change."""
        if self._last is None:
            return {}
        then, cuda_then, packed = self._last
        states, cuda, scalars = self._look()
        drawn = [name for name, state in states.items() if not is_same(state, then[name])]
        how = "numbers were drawn from it, or it was seeded"
        of_torch = (
            f"{how}; each iter() of a DataLoader draws one: evaluate in `with guard.evaluation():`, or give "
            f"its loader its own generator="
        )
        moved = {f"{name}'s random generator": of_torch if name == "torch" else how for name in drawn}
        if cuda and cuda_then and not all(map(torch.equal, cuda_then[1], cuda[1])):
            moved["a CUDA device's random generator"] = how
        if self._pack_scalars(scalars) != packed:
            moved["options of a table's optimizer"] = "its learning rate, or a counter"
        return moved

    def unpack_scalars(self, data: bytes) -> None:
        """Restores only the tables' scalars."""
        self._set_scalars(_scalars(data))

    def take_scalars(self, own: bytes, of_ranks: Sequence[bytes]) -> None:
        """Restores the tables' scalars: this rank's own, and from other ranks those that it lacks.

        Args:
            own: the result of `scalars_in` for the states that this rank read.
            of_ranks: the results of `scalars_in` of all ranks.
        """
        self._set_scalars(functools.reduce(joined_scalars, map(load, (own, *of_ranks))))

    def unpack_common(self, states: Sequence[bytes]) -> None:
        """Restores the part of other ranks' states that a new rank can take.

        This part is the tables' scalars, and the user's objects and metrics whose states are equal on all of
        these ranks, such as learning rate schedules.

        Args:
            states: the result of `pack` on each of these ranks.

        Raises:
            LayoutMismatch: other objects were packed.
        """
        saved = [_taken_apart(data)[1] for data in states]
        matched = [self._matched(one) for one in saved]
        self._set_scalars(saved[0]["scalars"])
        objects = list(self._objects.values())
        for place, state in _common([dict(enumerate(states)) for states, _ in matched]).items():
            objects[place].load_state_dict(state)
        metrics = zip(*[metrics for _, metrics in matched], strict=True)
        self._put_metrics([_common(theirs) for theirs in metrics])

    def _matched(self, saved: Mapping[str, Any]) -> tuple[list[Any], list[dict[str, Any]]]:
        """The packed states of the user's objects, in the objects' order, and the states of metrics.

        States are matched to objects by name if the objects have names, both when they were packed and now;
        otherwise by order.

        Raises:
            LayoutMismatch: other objects were packed.
        """
        states = saved["stateful"]
        names = saved.get("names", range(len(states)))
        named = all(isinstance(name, str) for name in (*names, *self._objects))
        if named:
            way_out = "pass no objects in state="
            if names:
                way_out = f"pass the objects under their original names ({', '.join(map(repr, names))})"
            for name, now in [(name, False) for name in names] + [(name, True) for name in self._objects]:
                if name not in (names if now else self._objects):
                    raise LayoutMismatch(
                        f"state= has {'an' if now else 'no'} object {name!r}, and had "
                        f"{'none of that name' if now else 'one'} when the job was started: {way_out}, or "
                        f"use another job="
                    )
        elif len(self._objects) != len(states):
            raise LayoutMismatch(
                f"the number of objects in state= is {len(self._objects)}, and was {len(states)} "
                f"when the job was started: run the script that started it, or use another job="
            )
        kinds = saved.get("kinds", [None] * len(states))
        found = dict(zip(names if named else self._objects, zip(kinds, states, strict=True), strict=True))
        for key, item in self._objects.items():
            if (then := found[key][0]) is not None and then != (kind := kind_of(item)):
                raise LayoutMismatch(
                    f"state= object {key!r} is a {kind}, and was a {then} when the job was started: pass the "
                    f"objects {'under their original names' if named else 'in the same order'}, or use "
                    f"another job="
                )
        order = [[*found].index(key) for key in self._objects]
        *then, last = saved.get("metrics", [{}] * (len(states) + 1))
        metrics = [*[then[i] for i in order], last]
        if "metrics" in saved:
            for held, state in zip((*self._metrics, self._in_model), metrics, strict=True):
                held.check(state)
        return [states[i] for i in order], metrics


def _taken_apart(data: bytes) -> tuple[Any, Any]:
    """Splits the result of `RankState.pack` into the generators' states and the rest.

    Raises:
        InconsistentArenas: the data are not those of `pack`.
    """
    sections = _sections(data)
    if len(sections) == 2:
        return load(sections[0]), load(sections[1])
    scalars, rest, drawn = map(unpacked, sections)
    return drawn, {"scalars": scalars, **rest}


def _scalars(data: bytes) -> Any:
    """The tables' scalars in the result of `RankState.pack`; nothing else of it is read.

    Raises:
        InconsistentArenas: the data are not those of `pack`.
    """
    sections = _sections(data)
    return load(sections[1])["scalars"] if len(sections) == 2 else unpacked(sections[0])


def _sections(data: bytes) -> list[bytes]:
    """Scalars, objects and generators; of an earlier version of ecemb, generators and the rest."""
    if data.startswith(_MARK):
        _, *sizes = _SIZES.unpack(data[: _SIZES.size].ljust(_SIZES.size, b"\xff"))
        what, edges = "scalars, objects and generators", [*itertools.accumulate(sizes, initial=_SIZES.size)]
    else:  # packed by an earlier version of ecemb; a checkpoint may have it
        sizes = _SIZE.unpack(data[: _SIZE.size]) if len(data) >= _SIZE.size else (-1,)
        what, edges = "generators' states", [_SIZE.size, _SIZE.size + sizes[0], len(data)]
    if edges[-1] != len(data) or edges != sorted(edges):
        raise InconsistentArenas(
            f"{len(data)} bytes of packed state announce {sum(sizes)} bytes of {what}: their "
            f"memory is damaged, or another version of ecemb wrote them"
        )
    return [data[low:high] for low, high in itertools.pairwise(edges)]


def scalars_in(states: Sequence[bytes]) -> bytes:
    """The joined tables' scalars of several results of `RankState.pack`, for `RankState.take_scalars`."""
    return dump(functools.reduce(joined_scalars, map(_scalars, states)))


def layout(size_bytes: int) -> TableLayout:
    """The layout of the record: a table of one row."""
    return TableLayout(NAME, 1, (Column("state", "uint8", size_bytes),))


def room(size_bytes: int) -> int:
    """Bytes to reserve for a state that takes `size_bytes` now: twice as much, and 192 KiB for positions.

    The position of a loader with its own generator takes about 20 KB. The result is a multiple of
    `SPLIT_BYTES`: a step captures, compares and sends only the parts that it changes.
    """
    return -(-(2 * size_bytes + 3 * 65536) // SPLIT_BYTES) * SPLIT_BYTES


def front(record: NDArray[np.uint8], data: bytes) -> bytes:
    """The bytes to write at a record's start, so that it holds packed state; bytes behind them don't change.

    Args:
        record: uint8 [room]; read.
        data: the packed state.
    """
    used = min(_HEAD_BYTES + _HEAD.unpack(record[:_HEAD_BYTES].tobytes())[0], len(record))
    packed = _HEAD.pack(len(data), zlib.crc32(data)) + data
    return packed.ljust(used, b"\0")  # zeros overwrite the rest of a longer state


def write_(record: NDArray[np.uint8], data: bytes) -> None:
    """Writes packed state to its record (uint8 [room], overwritten)."""
    new = front(record, data)
    record[: len(new)] = np.frombuffer(new, np.uint8)


def read(record: NDArray[np.uint8]) -> bytes:
    """Reads packed state from its record (uint8 [room], read).

    Raises:
        InconsistentArenas: the checksum doesn't fit.
    """
    size, checksum = _HEAD.unpack(record[:_HEAD_BYTES].tobytes())
    if zlib.crc32(record[_HEAD_BYTES : _HEAD_BYTES + size].tobytes()) != checksum:
        raise InconsistentArenas(
            f"the record of the rank's state ({size} of {len(record)} bytes) doesn't fit its checksum: the "
            f"arena's memory is damaged. {WAY_OUT}"
        )
    return record[_HEAD_BYTES : _HEAD_BYTES + size].tobytes()


def is_stateful(one: object) -> bool:
    """Whether the object is a `Stateful`."""
    return all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict"))


def _is_off(one: object) -> bool:
    """Whether is_enabled() of the object is False, as of a gradient scaler that is off and has no state."""
    is_enabled = getattr(one, "is_enabled", None)
    return callable(is_enabled) and is_enabled() is False


def _common(states: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """The entries whose packed bytes are equal in all of the mappings."""
    first = states[0].items()
    return {key: one for key, one in first if len({dump(other.get(key)) for other in states}) == 1}


def _described(key: str | int, item: object) -> str:
    """Name of an object of `state=` in messages."""
    return f"state= object {key!r} ({type(item).__name__})"


def _state(key: str | int, item: Stateful) -> Any:
    return plain(item.state_dict(), at=f"{_described(key, item)}.state_dict()")


def _position(position: Position) -> Any:
    return plain(position.state_dict(), at=f"the state of {position.name}")


def joined_scalars(own: Any, other: Any, levels: int = 3) -> Any:
    """The scalars of a rank, with those of another rank that it lacks.

    Args:
        own: the rank's scalars, dicts of `levels` levels; they win.
        other: the other rank's scalars.
        levels: number of levels to join: tables, engines, and the engine's names.
    """
    if not levels or not isinstance(other, dict):
        return own
    items = cast("dict[str, Any]", other).items()
    return own | {k: joined_scalars(own[k], item, levels - 1) if k in own else item for k, item in items}


_NUMPY: Any = cast("Any", np.random.get_state).__self__
_PYTHON: Any = cast("Any", random.getstate).__self__
_WORDS = 624  # words of a Mersenne twister's state; python's has the position of the next word behind them
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def process_states() -> dict[str, Any]:
    """The states of torch's, numpy's and python's global generators.

    Raises:
        ConfigurationError: numpy's generator is not a Mersenne twister.
    """
    return {name: state() for name, (state, _) in _PROCESS.items()}


class Reader:
    """Reads the states of the process's generators repeatedly.

    Reading a generator's state is slow, so it is read only if the generator's memory has changed.
    """

    def __init__(self) -> None:
        self._memory: dict[str, bytes | None] = {}
        self._states: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """The result of `process_states`; the caller must not change it.

        If no number was drawn since the last call, it is the same object; otherwise a new dict, in which each
        state that is equal to that of the last call is the same object.

        Raises:
            ConfigurationError: as `process_states`.
        """
        changed: dict[str, Any] = {}
        for name, (state, memory) in _PROCESS.items():
            now = memory()  # read before the state, as another thread may draw in between
            if now is None or now != self._memory.get(name):
                read = state()
                if name not in self._states or not is_same(read, self._states[name]):
                    changed[name] = read
                self._memory[name] = now if now is not None and _words(read) in now else None
        if changed:
            self._states = {**self._states, **changed}
        return self._states


def cuda_states() -> list[Any]:
    """[the current device's number, states of all devices' generators]; empty if CUDA is not initialised."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.current_device(), torch.cuda.get_rng_state_all()]


def set_cuda_states(own: int, states: Sequence[torch.Tensor]) -> None:
    """Restores CUDA's generators, with the states of the process's old and current device swapped.

    Args:
        own: number of the process's device when the states were read.
        states: state of each device's generator; states of devices that don't exist now are ignored.
    """
    count = torch.cuda.device_count()
    now = torch.cuda.current_device() if count else own
    swapped = {own: now, now: own}
    for device, state in enumerate(states):
        if (there := swapped.get(device, device)) < count:
            torch.cuda.set_rng_state(state, there)


def is_same(state: Any, other: Any) -> bool:
    """Whether two states of a generator are equal, which means that no number was drawn in between."""
    return state is other or all(map(_equal, _listed(state), _listed(other)))


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _listed(state: Any) -> Any:
    return state if isinstance(state, tuple) else (state,)


def set_process_states(states: Mapping[str, Any]) -> None:
    """Restores a result of `process_states`."""
    kind, key, pos, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, key.numpy().view(np.uint32), pos, has_gauss, gauss))
    random.setstate(_to_python(states["python"]))
    torch.set_rng_state(states["torch"])


@contextmanager
def kept_generators() -> Generator[None]:
    """A block after which torch's, numpy's and python's global generators are as before it."""
    states, on_devices = process_states(), cuda_states()
    try:
        yield
    finally:
        set_process_states(states)
        if on_devices:
            set_cuda_states(*on_devices)


def owned_generators(holders: Sequence[object]) -> list[Any]:
    """The generators of torch, numpy and python that are attributes of the objects, each once, in order.

    torch's global generator is left out, and so is random.SystemRandom, which has no state.
    """
    found: dict[int, Any] = {}
    for holder in holders:
        for value in getattr(holder, "__dict__", {}).values():
            has_none = isinstance(value, random.SystemRandom) or value is torch.default_generator
            if isinstance(value, _KINDS) and not has_none:
                found[id(value)] = value
    return list(found.values())


def generator_state(generator: Any) -> Any:
    """The state of one generator: torch's, numpy's (Generator or RandomState) or python's."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return _from_python(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return _from_numpy(generator.get_state(legacy=False))
    return _from_numpy(generator.bit_generator.state)


def set_generator_state(generator: Any, state: Any) -> None:
    """Restores a result of `generator_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(_to_python(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_to_numpy(state))
    else:
        generator.bit_generator.state = _to_numpy(state)


def _numpy_state() -> tuple[str, torch.Tensor, int, int, float]:
    state = np.random.get_state(legacy=False)
    if (kind := state["bit_generator"]) != "MT19937":
        raise ConfigurationError(
            f"numpy's global generator is {kind}, and ecemb keeps only MT19937: pass your own generators "
            f"in state="
        )
    key, pos = state["state"]["key"], state["state"]["pos"]
    key = torch.from_numpy(key.view(np.int32).copy())
    return kind, key, int(pos), int(state["has_gauss"]), float(state["gauss"])


def _torch_memory() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.numel())


def _numpy_memory() -> bytes | None:
    """Memory of numpy's global generator, of two objects; None if it is not a Mersenne twister.

    One object has the second of two normal numbers; the other one has the words and their position.
    """
    twister = cast("Any", np.random).get_bit_generator()
    if type(twister) is not np.random.MT19937:
        return None
    return _fields(_NUMPY, np.random.RandomState).tobytes() + _fields(twister, np.random.MT19937).tobytes()


def _python_memory() -> bytes:
    """Memory of python's global generator, and its attribute with the second of two normal numbers."""
    return _fields(_PYTHON, _random.Random).tobytes() + repr(_PYTHON.gauss_next).encode()


@functools.lru_cache(maxsize=4)
def _fields(one: object, kind: type) -> NDArray[np.uint8]:
    """The memory of an object behind its head, uint8, a view: all fields of a class that is written in C."""
    head = object.__basicsize__
    memory = (ctypes.c_uint8 * (kind.__basicsize__ - head)).from_address(id(one) + head)
    return np.frombuffer(memoryview(memory), np.uint8)


def _from_numpy(value: Any) -> Any:
    def packed(array: NDArray[Any]) -> list[Any]:
        return [str(array.dtype), torch.from_numpy(array.view(np.uint8).copy())]

    return replaced(value, lambda one: isinstance(one, np.ndarray), packed)


def _to_numpy(value: Any) -> Any:
    return replaced(value, lambda one: isinstance(one, list), lambda one: one[1].numpy().view(one[0]))


def _from_python(state: tuple[Any, ...]) -> tuple[int, torch.Tensor, float | None]:
    version, words, normal = state
    return version, torch.from_numpy(np.array(words, np.uint32).view(np.int32)), normal


def _to_python(state: Any) -> tuple[int, tuple[int, ...], float | None]:
    version, words, normal = state
    return version, tuple(words.numpy().view(np.uint32).tolist()), normal


def _words(state: Any) -> bytes:
    """The words of a generator's state, to check that the memory read for the generator contains them."""
    return (state if isinstance(state, torch.Tensor) else state[1][:_WORDS]).numpy().tobytes()


_PROCESS: dict[str, tuple[Callable[[], Any], Callable[[], bytes | None]]] = {
    "torch": (torch.get_rng_state, _torch_memory),
    "numpy": (_numpy_state, _numpy_memory),
    "python": (lambda: _from_python(random.getstate()), _python_memory),
}
