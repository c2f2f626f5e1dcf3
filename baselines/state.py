"""All of a training's state as flat tensors by key: what this rank has alone, and what all ranks share.

Tables are found by `ecemb.tables`, so ecemb.nn's and TorchRec's are taken alike. Their rows, per-row
optimizer state, random generators and what `Training.state` has are this rank's own; everything else is taken
to be the same on all ranks. Tensors are given live, and restored in place.

Must not know: files, intervals.
"""

from __future__ import annotations

import copy
import io
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ecemb

from .method import Training

_PLAIN, _OPTIONS, _SHARED_OPTIONS = "plain", "options", "shared options"
_TORCH, _NUMPY, _PYTHON, _NORMALS = (f"generator/{name}" for name in ("torch", "numpy", "python", "normals"))
_CUDA = "generator/cuda"
"""Of the device of this process, if it trains on one."""
_PACKED = {_PLAIN, _OPTIONS, _SHARED_OPTIONS}
"""Keys of what is no tensor: uint8, of torch.save, for weights_only=True."""
_ALWAYS = _PACKED | {_TORCH, _NUMPY, _PYTHON, _NORMALS}
_ASIDE = _ALWAYS | {_CUDA}
"""Keys of what is not written to tensors of the training; `_ALWAYS` are there in all of them."""
_TABLE = "table/"
_WAY_OUT = "Run the script that saved it, or name another folder"
Entry = tuple[str, str, Any]
"""Of an optimizer's state: the parameter's key, a name, its value."""
_ROWS, _OWN, _SHARED = "rows", "own", "shared"


def row_key(table: str, tensor: str) -> str:
    """Key of a table's tensor, by the names that `ecemb.tables` has for both."""
    return f"{_TABLE}{table}/{tensor}"


class Table(Protocol):
    """One of `ecemb.tables`, as far as its rows go."""

    name: str

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Live tensors by name."""
        ...


def rows_of(tables: Iterable[Table]) -> dict[str, Tensor]:
    """Tensors of these tables that are not empty; live, by `row_key`."""
    return {
        row_key(table.name, name): tensor
        for table in tables
        for name, tensor in table.tensors.items()
        if tensor.numel()
    }


class TrainingState:
    """The state of a training on this rank.

    Args:
        training: on the CPU, or on a device. TorchRec's combined optimizer is given as its parts.

    Attributes:
        tables: all of them.

    Raises:
        ValueError: a table is on the meta device.
    """

    def __init__(self, training: Training) -> None:
        self._model, self._optimizers = training.model, list(training.optimizers)
        self._state = list(training.state)
        self.tables = ecemb.tables(self._model, optimizers=self._optimizers, tables=training.tables)
        for table in self.tables:
            if table.tensors["weight"].is_meta:
                raise ValueError(
                    f"table {table.name!r} is on the meta device: build it on the CPU or on a device"
                )
        pointers = self._pointers()
        self._is_own = {
            key: _is_sharded(param) or not param.numel() or param.data_ptr() in pointers
            for key, _, param in self._parameters()
        }
        self._buffers = [one._buffers for one in self._model.modules() if one._buffers]
        self._kinds: dict[str, str] = {}
        self._known: list[int] = []
        self._packed: dict[str, tuple[Any, Tensor]] = {}

    def rows(self) -> dict[str, Tensor]:
        """Weights and per-row optimizer state of the tables, those that there are by now; live, by key.

        For FBGEMM's tables this takes milliseconds: nothing for every step.
        """
        return rows_of(self.tables)

    def rest(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's own tensors but for `rows`, and those that all ranks share; live, by key."""
        entries = list(self._entries())
        found = dict(self._found(entries))
        if not found.keys() <= self._kinds.keys():
            self._sort(found)
        own, shared = (
            {key: tensor for key, tensor in found.items() if self._kinds[key] == kind}
            for kind in (_OWN, _SHARED)
        )
        own_plain, shared_plain = self._plain(entries)
        return own | own_plain, shared | shared_plain

    def plain(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Of `rest`, what is no tensor of the training: generators, options, plain state. Not live."""
        return self._plain(list(self._entries()))

    def has_changed(self) -> bool:
        """Whether tensors of `rows` or `rest` were made or replaced since this was asked last.

        Of optimizers' state and the model's buffers; parameters stay what they are.
        """
        values = [id(value) for _, _, value in self._entries() if isinstance(value, Tensor)]
        values += [id(buffer) for buffers in self._buffers for buffer in buffers.values()]
        changed, self._known = values != self._known, values
        return changed

    def take(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's own tensors, `rows` among them, and those that all ranks share; live, by key."""
        own, shared = self.rest()
        return own | self.rows(), shared

    @torch.no_grad()
    def put(self, saved: Mapping[str, Tensor], *, resharded: bool = False) -> None:
        """Brings the training to what `take` gave, both parts together, or `rest`: then rows stay.

        Optimizer state of rows that is missing here, and was there then, is made, of zeros.

        Args:
            saved: by key. Read.
            resharded: it was taken in another number of ranks. Random generators stay, and what a rank has
                alone comes back as far as it has the same names: TorchRec's optimizers have a group for each
                table of the rank.

        Raises:
            ValueError: it is another training's, or of another number of ranks.
        """
        _check(_ALWAYS, saved.keys() & _ALWAYS)
        self._make_state(saved, resharded=resharded)
        own, shared = self.take() if any(key.startswith(_TABLE) for key in saved) else self.rest()
        live = {key: tensor for key, tensor in (own | shared).items() if key not in _ASIDE}
        if resharded:
            live = {key: tensor for key, tensor in live.items() if key in shared or key in saved}
        else:
            _check(live.keys(), saved.keys() - _ASIDE)
        put_in(live, saved)
        for one, kept in zip(self._state, _unpacked(saved[_PLAIN]), strict=True):
            one.load_state_dict(kept)
        if not resharded:
            _set_generators(saved)

    def _plain(self, entries: Sequence[Entry]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        own = _generators()
        plain = [dict(one.state_dict()) for one in self._state]
        own[_PLAIN] = _packed(plain) if plain else self._packed_once(_PLAIN, plain)
        own[_OPTIONS] = self._packed_once(_OPTIONS, self._options(entries, own=True))
        return own, {_SHARED_OPTIONS: self._packed_once(_SHARED_OPTIONS, self._options(entries, own=False))}

    def _found(self, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
        """All plain tensors that are not empty, by key."""
        for key, value in self._model.state_dict().items():
            if not _is_sharded(value) and value.numel():
                yield f"model/{key}", value
        for key, name, value in entries:
            if not _is_sharded(value) and value.numel():
                yield f"{key}/{name}", value

    def _sort(self, found: Mapping[str, Tensor]) -> None:
        """Finds out, once for each key, what is of the tables, this rank's own, or shared."""
        pointers = self._pointers()
        for key, value in found.items():
            if value.data_ptr() in pointers:
                kind = _ROWS
            else:
                kind = _OWN if self._is_own.get(key.rpartition("/")[0], False) else _SHARED
            self._kinds.setdefault(key, kind)

    def _pointers(self) -> set[int]:
        return {tensor.data_ptr() for tensor in self.rows().values()}

    def _entries(self) -> Iterator[Entry]:
        """Optimizers' state."""
        states = {
            optimizer: optimizer.state for optimizer in self._optimizers
        }  # TorchRec's makes it each time
        for key, optimizer, param in self._parameters():
            for name, value in states[optimizer].get(param, {}).items():
                yield key, name, value

    def _parameters(self) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor]]:
        for group_key, optimizer, group in self._groups():
            for number, param in enumerate(group["params"]):
                yield f"{group_key}/{number}", optimizer, param

    def _groups(self) -> Iterator[tuple[str, torch.optim.Optimizer, dict[str, Any]]]:
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                yield f"optimizer/{i}/{j}", optimizer, group

    def _packed_once(self, key: str, plain: Any) -> Tensor:
        """Packs what is compared by value only when it has changed: it is asked for in every step."""
        if key not in self._packed or self._packed[key][0] != plain:
            self._packed[key] = copy.deepcopy(plain), _packed(plain)
        return self._packed[key][1]

    def _options(self, entries: Sequence[Entry], *, own: bool) -> dict[str, Any]:
        """Of own parameters, or of those that are shared: options, values, and names of tensors."""
        named: dict[str, dict[str, Any]] = {}
        for key, name, value in entries:
            if self._is_own[key] == own:
                named.setdefault(key, {})[name] = None if isinstance(value, Tensor) else value
        groups = {
            key: {name: value for name, value in group.items() if name != "params"}
            for key, _, group in self._groups()
            if own == all(self._is_own[f"{key}/{number}"] for number in range(len(group["params"])))
        }
        ranks = {} if own else {"ranks": dist.get_world_size()}
        return {"entries": named, "groups": groups, **ranks}

    def _make_state(self, saved: Mapping[str, Tensor], *, resharded: bool) -> None:
        """Optimizers' options and values, and tensors that they make in their first step only."""
        both = [_unpacked(saved[key]) for key in (_OPTIONS, _SHARED_OPTIONS)]
        groups, entries = ({**both[0][name], **both[1][name]} for name in ("groups", "entries"))
        ranks = both[1]["ranks"]
        if not resharded:
            if ranks != dist.get_world_size():
                raise ValueError(
                    f"what was saved is of {ranks} ranks, and there are {dist.get_world_size()}: start "
                    f"{ranks}, or train from the start, with an empty folder"
                )
            _check({key for key, _, _ in self._groups()}, groups.keys())
        for key, _, group in self._groups():
            group.update(groups.get(key, {}))
        for key, optimizer, param in self._parameters():
            entry = optimizer.state.get(param, {})
            known = set(entry) if resharded and entry else None  # others are another table's, of this number
            for name, value in entries.get(key, {}).items():
                if known is not None and name not in known:
                    continue
                entry = optimizer.state[param]
                if value is not None:
                    entry[name] = value
                elif name not in entry:
                    stored = saved.get(f"{key}/{name}")
                    entry[name] = torch.zeros_like(param) if stored is None else _state_of(param, stored)


def _check(live: Set[str], saved: Set[str]) -> None:
    """Refuses what is saved of another training, by its keys."""
    if differing := sorted(live ^ saved):
        raise ValueError(f"what was saved is another training's: they differ in {differing[:5]}. {_WAY_OUT}")


@torch.no_grad()
def put_in(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Writes to the live tensors what they were, if all are there, and of the same types and shapes.

    Raises:
        ValueError: they are another training's. Nothing is written then.
    """
    _check(live.keys(), saved.keys() & live.keys())
    for key, tensor in live.items():
        then, now = ((one.dtype, tuple(one.shape)) for one in (saved[key], tensor))
        if then != now:
            raise ValueError(
                f"what was saved is another training's: {key} was {then[0]} {then[1]}, "
                f"and is {now[0]} {now[1]}. {_WAY_OUT}"
            )
    for key, tensor in live.items():
        tensor.copy_(saved[key])


def _state_of(param: Tensor, stored: Tensor) -> Tensor:
    """A copy of stored state where an optimizer keeps it: beside the parameter; single numbers on the CPU.

    A fused optimizer moves its number of steps to the parameter's device when it uses it.
    """
    return stored.to(param.device, copy=True) if stored.dim() else stored.clone()


def _is_sharded(value: Any) -> bool:
    """Whether it is TorchRec's, or a DTensor: `ecemb.tables` has what lies here."""
    return not isinstance(value, Tensor) or hasattr(value, "local_shards") or hasattr(value, "to_local")


def _packed(plain: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)


def _generators() -> dict[str, Tensor]:
    """Of torch, numpy and python, and of this process's device, if there is one."""
    on_device = {_CUDA: torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    _, keys, *place, gauss = np.random.get_state()
    version, numbers, normal = random.getstate()
    return {
        _TORCH: torch.get_rng_state(),
        _NUMPY: torch.from_numpy(np.concatenate([np.asarray(keys, np.int64), np.asarray(place, np.int64)])),
        _PYTHON: torch.from_numpy(np.array((version, *numbers), np.int64)),
        _NORMALS: torch.tensor([gauss, math.nan if normal is None else normal], dtype=torch.float64),
        **on_device,
    }


def _set_generators(kept: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(kept[_TORCH])
    if _CUDA in kept and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(kept[_CUDA])
    gauss, normal = kept[_NORMALS].tolist()
    numbers = kept[_NUMPY].numpy()
    np.random.set_state(("MT19937", numbers[:-2].astype(np.uint32), *numbers[-2:].tolist(), gauss))
    version, *words = kept[_PYTHON].tolist()
    random.setstate((version, tuple(words), None if math.isnan(normal) else normal))
