"""Rank state: what differs by rank and is not a row, packed into one record of the row space (D2).

The random number generators of torch (CPU and CUDA), numpy and python, each table's scalars (Adagrad's
`step`), and the user's `state=` objects. The record is protected like any row: captured, sent as a delta,
rebuilt from parity. Packed by torch.save, read with weights_only=True: no pickle is loaded.

Must not know: where the record lies, who protects it.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import ConfigurationError, InconsistentArenas, LayoutMismatch, StepFailed
from .packing import dump, load, plain
from .rows import WORD_BYTES, Column, TableLayout

NAME = "<rank state>"
_HEAD = struct.Struct("<II")  # length and checksum of what follows
_HEAD_BYTES = _HEAD.size


class Stateful(Protocol):
    """Anything with a state_dict, e.g. a learning rate schedule or an early-stop counter."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state, made of types that torch.load(weights_only=True) reads."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Takes the state back."""
        ...


class RankState:
    """Packs and unpacks the state of one rank.

    Args:
        stateful: the user's objects.
        scalars: returns the tables' scalars, by table.
        set_scalars: takes them back.

    Raises:
        ConfigurationError: an object has no state_dict()/load_state_dict(), or its state can't be read back
            with weights_only=True.
    """

    def __init__(
        self,
        stateful: Sequence[Stateful],
        scalars: Callable[[], dict[str, Any]],
        set_scalars: Callable[[dict[str, Any]], None],
    ) -> None:
        for item in stateful:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ConfigurationError(
                    f"state= takes objects with state_dict() and load_state_dict(); "
                    f"{type(item).__name__} has not both: wrap it in a class that has"
                )
        self._stateful = list(stateful)
        self._scalars = scalars
        self._set_scalars = set_scalars
        for item in self._stateful:
            load(dump(_state(item)))

    def pack(self) -> bytes:
        """The state as it is now."""
        return dump(
            {
                "torch": torch.get_rng_state(),
                "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
                "numpy": _numpy_state(),
                "python": _python_state(),
                "scalars": plain(self._scalars(), at="the tables' scalars"),
                "stateful": [_state(item) for item in self._stateful],
            }
        )

    def unpack(self, data: bytes, *, positions: bool = True) -> None:
        """Puts the state back: scalars, the user's objects, generators last.

        Args:
            data: what `pack` returned.
            positions: also the data positions.

        Raises:
            LayoutMismatch: another number of objects was packed.
        """
        saved = load(data)
        if len(self._stateful) != len(saved["stateful"]):
            raise LayoutMismatch(
                f"state= has {len(self._stateful)} objects, and had {len(saved['stateful'])} when the job "
                f"was started: run the script that started it, or use another job="
            )
        self._set_scalars(saved["scalars"])
        for item, state in zip(self._stateful, saved["stateful"], strict=True):
            item.load_state_dict(state)
        kind, key, pos, has_gauss, gauss = saved["numpy"]
        np.random.set_state((kind, key.numpy().view(np.uint32), pos, has_gauss, gauss))
        version, words, normal = saved["python"]
        random.setstate((version, tuple(words.tolist()), normal))
        torch.set_rng_state(saved["torch"])
        if saved["cuda"]:
            torch.cuda.set_rng_state_all(saved["cuda"])


def layout(size_bytes: int) -> TableLayout:
    """The layout of the record: a table of one row."""
    return TableLayout(NAME, 1, (Column("state", "uint8", size_bytes),))


def room(size_bytes: int) -> int:
    """Bytes to reserve for a state that takes `size_bytes` now: it may double, and 16 KiB."""
    return -(-(2 * size_bytes + 16384) // WORD_BYTES) * WORD_BYTES


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
            f"arena's memory is damaged"
        )
    return record[_HEAD_BYTES : _HEAD_BYTES + size].tobytes()


def _state(item: Stateful) -> Any:
    return plain(item.state_dict(), at=f"state= {type(item).__name__}.state_dict()")


def _numpy_state() -> tuple[str, torch.Tensor, int, int, float]:
    kind, key, pos, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    if kind != "MT19937":
        raise ConfigurationError(
            f"numpy's global generator is {kind}, and ecemb keeps MT19937: give generators of your own "
            f"in state="
        )
    return kind, torch.from_numpy(key.view(np.int32).copy()), int(pos), int(has_gauss), float(gauss)


def _python_state() -> tuple[int, torch.Tensor, float | None]:
    version, words, normal = random.getstate()
    return version, torch.tensor(words, dtype=torch.int64), normal
