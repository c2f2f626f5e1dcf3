"""All of a training's state as flat tensors by key: what this rank has alone, and what all ranks share.

Tables are found by `ecemb.tables`, so ecemb.nn's and TorchRec's are taken alike. Their rows, per-row
optimizer state, random generators and all that is no tensor are this rank's own; everything else is taken to
be the same on all ranks. Tensors are given live, and restored in place.

Must not know: files, intervals.
"""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ecemb
from bench.method import Training

PLAIN = "plain"
"""Key of all that is no tensor, as uint8: what torch.save makes of it, for weights_only=True."""


class TrainingState:
    """The state of a training on this rank.

    Args:
        training: on the CPU. TorchRec's combined optimizer is given as its parts.

    Raises:
        ValueError: a table is on the meta device.
    """

    def __init__(self, training: Training) -> None:
        self._model, self._optimizers = training.model, list(training.optimizers)
        self._state = list(training.state)
        self._tables = ecemb.tables(self._model, optimizers=self._optimizers, tables=training.tables)
        for table in self._tables:
            if table.tensors["weight"].is_meta:
                raise ValueError(f"table {table.name!r} is on the meta device: build it on the CPU")

    def take(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """This rank's own tensors, and those that all ranks share; live, by key."""
        own: dict[str, Tensor] = {}
        shared: dict[str, Tensor] = {}
        tables = self._rows()
        pointers = {tensor.data_ptr() for tensor in tables.values()}
        for key, value in self._model.state_dict().items():
            if not _is_sharded(value) and value.numel() and value.data_ptr() not in pointers:
                shared[f"model/{key}"] = value
        for key, param, name, value in self._entries():
            if isinstance(value, Tensor) and not _is_sharded(value) and value.data_ptr() not in pointers:
                ours = _is_sharded(param) or not param.numel() or param.data_ptr() in pointers
                (own if ours else shared)[f"{key}/{name}"] = value
        own |= {key: tensor for key, tensor in tables.items() if tensor.numel()}
        own[PLAIN] = _packed(self._plain())
        return own, shared

    @torch.no_grad()
    def put(self, saved: Mapping[str, Tensor]) -> None:
        """Brings the training to what `take` gave, both parts together.

        Raises:
            ValueError: it is another training's.
        """
        plain = torch.load(io.BytesIO(saved[PLAIN].numpy().tobytes()), weights_only=True)
        self._make_state(plain["optimizers"], saved)
        own, shared = self.take()
        live = {key: tensor for key, tensor in (own | shared).items() if key != PLAIN}
        if live.keys() != saved.keys() - {PLAIN}:
            differing = sorted(live.keys() ^ (saved.keys() - {PLAIN}))
            raise ValueError(f"the checkpoint is of another training: they differ in {differing[:5]}")
        for key, tensor in live.items():
            tensor.copy_(saved[key])
        for one, kept in zip(self._state, plain["state"], strict=True):
            one.load_state_dict(kept)
        _set_generators(plain["generators"])

    def _rows(self) -> dict[str, Tensor]:
        return {
            f"table/{table.name}/{name}": tensor
            for table in self._tables
            for name, tensor in table.tensors.items()
        }

    def _entries(self) -> Iterator[tuple[str, Tensor, str, Any]]:
        """Optimizers' state: key of the parameter, the parameter, name, value."""
        for key, optimizer, param in self._parameters():
            for name, value in optimizer.state.get(param, {}).items():
                yield key, param, name, value

    def _parameters(self) -> Iterator[tuple[str, torch.optim.Optimizer, Tensor]]:
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                for number, param in enumerate(group["params"]):
                    yield f"optimizer/{i}/{j}/{number}", optimizer, param

    def _plain(self) -> dict[str, Any]:
        scalars: dict[str, dict[str, Any]] = {}
        for key, _, name, value in self._entries():
            entry = scalars.setdefault(key, {})
            entry[name] = None if isinstance(value, Tensor) else value
        groups = [
            [{name: value for name, value in group.items() if name != "params"} for group in one.param_groups]
            for one in self._optimizers
        ]
        return {
            "optimizers": {"entries": scalars, "groups": groups},
            "state": [dict(one.state_dict()) for one in self._state],
            "generators": _generators(),
        }

    def _make_state(self, plain: Mapping[str, Any], saved: Mapping[str, Tensor]) -> None:
        """Optimizers' options and values, and tensors that they make in their first step only."""
        for optimizer, groups in zip(self._optimizers, plain["groups"], strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
        for key, optimizer, param in self._parameters():
            for name, value in plain["entries"].get(key, {}).items():
                entry = optimizer.state[param]
                if value is not None:
                    entry[name] = value
                elif name not in entry:
                    stored = saved.get(f"{key}/{name}")
                    entry[name] = torch.zeros_like(param) if stored is None else stored.clone()


def _is_sharded(value: Any) -> bool:
    """Whether it is TorchRec's, or a DTensor: `ecemb.tables` has what lies here."""
    return not isinstance(value, Tensor) or hasattr(value, "local_shards") or hasattr(value, "to_local")


def _packed(plain: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


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
