"""All of a training's state as flat tensors by key: what this rank has alone, and what all ranks share.

Tables are found by `ecemb.tables`, so ecemb.nn's and TorchRec's are taken alike. Their rows, per-row
optimizer state, random generators and what `Training.state` has are this rank's own; everything else is taken
to be the same on all ranks. Tensors are given live, and restored in place.

Must not know: files, intervals.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import ecemb
from bench.method import Training

_PLAIN, _OPTIONS, _SHARED_OPTIONS = "plain", "options", "shared options"
_PACKED = {_PLAIN, _OPTIONS, _SHARED_OPTIONS}
"""Keys of what is no tensor: uint8, of torch.save, for weights_only=True."""
_TABLE = "table/"
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
        training: on the CPU. TorchRec's combined optimizer is given as its parts.

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
                raise ValueError(f"table {table.name!r} is on the meta device: build it on the CPU")
        pointers = self._pointers()
        self._is_own = {
            key: _is_sharded(param) or not param.numel() or param.data_ptr() in pointers
            for key, _, param in self._parameters()
        }
        self._kinds: dict[str, str] = {}
        self._known = 0

    def rows(self) -> dict[str, Tensor]:
        """Weights and per-row optimizer state of the tables, those that there are by now; live, by key."""
        return rows_of(self.tables)

    def rest(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's own tensors but for `rows`, and those that all ranks share; live, by key."""
        found = dict(self._found())
        if not found.keys() <= self._kinds.keys():
            self._sort(found)
        own, shared = (
            {key: tensor for key, tensor in found.items() if self._kinds[key] == kind}
            for kind in (_OWN, _SHARED)
        )
        own[_PLAIN], own[_OPTIONS] = _packed(self._plain()), _packed(self._options(own=True))
        shared[_SHARED_OPTIONS] = _packed(self._options(own=False))
        return own, shared

    def has_grown(self) -> bool:
        """Whether optimizers have made state since this was asked last: then there may be more `rows`."""
        entries = sum(1 for _ in self._entries())
        grown, self._known = entries > self._known, entries
        return grown

    def take(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's own tensors, `rows` among them, and those that all ranks share; live, by key."""
        own, shared = self.rest()
        return own | self.rows(), shared

    @torch.no_grad()
    def put(self, saved: Mapping[str, Tensor]) -> None:
        """Brings the training to what `take` gave, both parts together, or `rest`: then rows stay.

        Optimizer state of rows that is missing here, and was there then, is made, of zeros.

        Raises:
            ValueError: it is another training's.
        """
        self._make_state(saved)
        own, shared = self.take() if any(key.startswith(_TABLE) for key in saved) else self.rest()
        live = {key: tensor for key, tensor in (own | shared).items() if key not in _PACKED}
        _check(live, saved.keys() - _PACKED)
        for key, tensor in live.items():
            tensor.copy_(saved[key])
        plain = _unpacked(saved[_PLAIN])
        for one, kept in zip(self._state, plain["state"], strict=True):
            one.load_state_dict(kept)
        _set_generators(plain["generators"])

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        """All plain tensors that are not empty, by key."""
        for key, value in self._model.state_dict().items():
            if not _is_sharded(value) and value.numel():
                yield f"model/{key}", value
        for key, name, value in self._entries():
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

    def _entries(self) -> Iterator[tuple[str, str, Any]]:
        """Optimizers' state: key of the parameter, name, value."""
        for key, optimizer, param in self._parameters():
            for name, value in optimizer.state.get(param, {}).items():
                yield key, name, value

    def _parameters(self) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor]]:
        for group_key, optimizer, group in self._groups():
            for number, param in enumerate(group["params"]):
                yield f"{group_key}/{number}", optimizer, param

    def _groups(self) -> Iterator[tuple[str, torch.optim.Optimizer, dict[str, Any]]]:
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                yield f"optimizer/{i}/{j}", optimizer, group

    def _plain(self) -> dict[str, Any]:
        return {"state": [dict(one.state_dict()) for one in self._state], "generators": _generators()}

    def _options(self, *, own: bool) -> dict[str, Any]:
        """Of own parameters, or of those that are shared: options, values, and names of tensors."""
        entries: dict[str, dict[str, Any]] = {}
        for key, name, value in self._entries():
            if self._is_own[key] == own:
                entries.setdefault(key, {})[name] = None if isinstance(value, Tensor) else value
        groups = {
            key: {name: value for name, value in group.items() if name != "params"}
            for key, _, group in self._groups()
            if own == all(self._is_own[f"{key}/{number}"] for number in range(len(group["params"])))
        }
        return {"entries": entries, "groups": groups}

    def _make_state(self, saved: Mapping[str, Tensor]) -> None:
        """Optimizers' options and values, and tensors that they make in their first step only."""
        both = [_unpacked(saved[key]) for key in (_OPTIONS, _SHARED_OPTIONS)]
        groups, entries = ({**both[0][name], **both[1][name]} for name in ("groups", "entries"))
        _check({key: group for key, _, group in self._groups()}, groups.keys())
        for key, _, group in self._groups():
            group.update(groups[key])
        for key, optimizer, param in self._parameters():
            for name, value in entries.get(key, {}).items():
                entry = optimizer.state[param]
                if value is not None:
                    entry[name] = value
                elif name not in entry:
                    stored = saved.get(f"{key}/{name}")
                    entry[name] = torch.zeros_like(param) if stored is None else stored.clone()


def _check(live: Mapping[str, object], saved: Set[str]) -> None:
    """Refuses what is saved of another training, by its keys."""
    if differing := sorted(live.keys() ^ saved):
        raise ValueError(f"the checkpoint is of another training: they differ in {differing[:5]}")


def _is_sharded(value: Any) -> bool:
    """Whether it is TorchRec's, or a DTensor: `ecemb.tables` has what lies here."""
    return not isinstance(value, Tensor) or hasattr(value, "local_shards") or hasattr(value, "to_local")


def _packed(plain: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def _unpacked(packed: Tensor) -> Any:
    return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)


def _generators() -> dict[str, Any]:
    kind, keys, *others = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), *others],
        "python": random.getstate(),
    }


def _set_generators(kept: Mapping[str, Any]) -> None:
    torch.set_rng_state(kept["torch"])
    kind, keys, *others = kept["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *others))
    random.setstate(kept["python"])
