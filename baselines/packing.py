"""Named tensors in one run of bytes, without a pickle: an index in JSON, then the tensors, each aligned.

Before the index comes a head, int64 [3]: a magic number, the index's length and its CRC-32.

Must not know: where the bytes lie.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
_ALIGN_BYTES = 64
_HEAD_BYTES = 24
_MAGIC = 0x6B636170
_NOTHING = 0, 0, 0


def size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that `pack` writes."""
    return _layout(tensors)[1]


def pack(tensors: Mapping[str, Tensor], out: Bytes) -> None:
    """Writes tensors (on the CPU, of any type and shape) to `out` (uint8 [size], overwritten)."""
    index, _ = _layout(tensors)
    out[:_HEAD_BYTES].view(np.int64)[:] = _MAGIC, len(index), zlib.crc32(index)
    out[_HEAD_BYTES : _HEAD_BYTES + len(index)] = np.frombuffer(index, np.uint8)
    for key, tensor in unpack(out).items():
        tensor.copy_(tensors[key])


def unpack(packed: Bytes) -> dict[str, Tensor]:
    """The tensors, as views of `packed` (uint8, 8-byte aligned).

    Raises:
        ValueError: nothing was packed there, or it is not all there.
    """
    found: dict[str, Tensor] = {}
    for key, dtype, shape, start, stop in _index(packed):
        found[key] = torch.from_numpy(packed[start:stop]).view(getattr(torch, dtype)).reshape(shape)
    return found


def _index(packed: Bytes) -> list[tuple[str, str, list[int], int, int]]:
    magic, length, crc = (
        packed[:_HEAD_BYTES].view(np.int64).tolist() if len(packed) > _HEAD_BYTES else _NOTHING
    )
    index = packed[_HEAD_BYTES : _HEAD_BYTES + length].tobytes()
    if magic != _MAGIC or zlib.crc32(index) != crc:
        raise ValueError("these are no packed tensors, or they are damaged")
    rows = json.loads(index)
    if rows and len(packed) < rows[-1][-1]:
        raise ValueError(f"of {rows[-1][-1]} bytes of packed tensors {len(packed)} are there")
    return rows


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """The index, and the bytes of all."""
    rows: list[list[object]] = []
    at = 0
    for key, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append([key, dtype, list(tensor.shape), at, at + tensor.nbytes])
        at = _aligned(at + tensor.nbytes)
    # The index names absolute places, whose digits are part of its length: so it gets ample room.
    first = _aligned(_HEAD_BYTES + len(json.dumps(rows)) + 40 * len(rows))
    index = json.dumps([[*row, first + start, first + stop] for *row, start, stop in rows]).encode()
    return index, first + at


def _aligned(place: int) -> int:
    return -(-place // _ALIGN_BYTES) * _ALIGN_BYTES
