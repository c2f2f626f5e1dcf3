"""Named tensors in one run of bytes, without a pickle: an index in JSON, then the tensors, each aligned.

Must not know: where the bytes lie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Bytes = NDArray[np.uint8]
_ALIGN_BYTES = 64


def size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that `pack` writes."""
    return _layout(tensors)[1]


def pack(tensors: Mapping[str, Tensor], out: Bytes) -> None:
    """Writes tensors (on the CPU, of any type and shape) to `out` (uint8 [size], overwritten)."""
    index, _ = _layout(tensors)
    out[:8].view(np.int64)[0] = len(index)
    out[8 : 8 + len(index)] = np.frombuffer(index, np.uint8)
    for key, tensor in unpack(out).items():
        tensor.copy_(tensors[key])


def unpack(packed: Bytes) -> dict[str, Tensor]:
    """The tensors, as views of `packed` (uint8, 8-byte aligned)."""
    length = int(packed[:8].view(np.int64)[0])
    found: dict[str, Tensor] = {}
    for key, dtype, shape, start, stop in json.loads(packed[8 : 8 + length].tobytes()):
        found[key] = torch.from_numpy(packed[start:stop]).view(getattr(torch, dtype)).reshape(shape)
    return found


def _layout(tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """The index, and the bytes of all."""
    rows: list[list[object]] = []
    at = 0
    for key, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append([key, dtype, list(tensor.shape), at, at + tensor.nbytes])
        at = _aligned(at + tensor.nbytes)
    # The index names absolute places, whose digits are part of its length: so it gets ample room.
    first = _aligned(8 + len(json.dumps(rows)) + 40 * len(rows))
    index = json.dumps([[*row, first + start, first + stop] for *row, start, stop in rows]).encode()
    return index, first + at


def _aligned(place: int) -> int:
    return -(-place // _ALIGN_BYTES) * _ALIGN_BYTES
