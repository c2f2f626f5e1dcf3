"""Some rows of one table as one run of bytes: which rows they are, then their tensors, each as stored.

Which rows: nothing if they are consecutive; else one bit for each row from the first to the last, or their
distances from the first, if they take less.

Must not know: where bytes go, how rows are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from baselines import packing

from .manifest import Chunk

_BITS, _DISTANCES = "bits", "distances"
_APART: Final = "/"


def packed(numbers: Tensor, tensors: Mapping[str, Mapping[str, Tensor]]) -> packing.Bytes:
    """A chunk's bytes.

    Args:
        numbers: int64 [m], m > 0, ascending, each once: the rows. Read.
        tensors: what is stored of each tensor of the rows, by its name. Read.

    Returns:
        uint8 [size].
    """
    named = _rows(numbers)
    for name, parts in tensors.items():
        named |= {f"{name}{_APART}{part}": tensor for part, tensor in parts.items()}
    out = np.zeros(packing.size(named), np.uint8)  # padding is stored as well
    packing.pack(named, out)
    return out


def unpacked(data: packing.Bytes, chunk: Chunk) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """What `packed` was given.

    Args:
        data: uint8 [size], 8-byte aligned; tensors are views of it.
        chunk: what the manifest says of it.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    numbers = torch.arange(chunk.first, chunk.last + 1)
    for key, tensor in packing.unpack(data).items():
        if key == _BITS:
            bits = np.unpackbits(tensor.numpy(), bitorder="little")
            numbers = torch.from_numpy(np.flatnonzero(bits)) + chunk.first
        elif key == _DISTANCES:
            numbers = tensor.to(torch.int64) + chunk.first
        else:
            name, _, part = key.rpartition(_APART)
            tensors.setdefault(name, {})[part] = tensor
    return numbers, tensors


def _rows(numbers: Tensor) -> dict[str, Tensor]:
    count, first, last = len(numbers), int(numbers[0]), int(numbers[-1])
    span = last - first + 1
    if span == count:
        return {}
    distances = numbers - first
    dtype = torch.int32 if span <= 1 << 31 else torch.int64
    if span > 8 * dtype.itemsize * count:
        return {_DISTANCES: distances.to(dtype)}
    bits = np.zeros(span, np.uint8)
    bits[distances.numpy()] = 1
    return {_BITS: torch.from_numpy(np.packbits(bits, bitorder="little"))}
