"""A rank's rows and parity in a file on tmpfs, which outlives the process.

The rows are a second copy, as they were after the last whole step. Where servers keep running, as those of
the papers do, it is not needed; here every process is started anew after a failure. What a step changes is
written in place, so a process that is killed meanwhile leaves a mixture, which `is_torn` tells.

Must not know: what the numbers mean, other ranks.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

_MAGIC = 0x73756D73
_HEAD_BYTES = 64
_ALIGN_BYTES = 64


class Memory:
    """One file: head, columns of all tables, parity.

    Args:
        path: of the file; its folder is made if missing.
        columns: tensors on the CPU by key, whose types and shapes the columns have.
        parity_lengths: numbers of each parity row.
        dtype: of parity.

    Attributes:
        columns: by key, in place.
        parity: rows, in place.
        dtype: of parity.

    Raises:
        ValueError: the file is there, and of other tables or another code.
        OSError: there is not enough space.
    """

    def __init__(
        self, path: Path, columns: Mapping[str, Tensor], parity_lengths: Sequence[int], dtype: np.dtype[Any]
    ) -> None:
        self.dtype = dtype
        like = {key: tensor.detach().numpy() for key, tensor in columns.items()}
        specs = [(array.dtype, array.shape) for array in like.values()]
        specs += [(dtype, (length,)) for length in parity_lengths]
        places = np.cumsum([_HEAD_BYTES, *(_aligned(_nbytes(*spec)) for spec in specs)]).tolist()
        layout = hashlib.sha256(repr([list(like), specs]).encode()).digest()[:7]
        self._layout = int.from_bytes(layout, "little")
        mapped = _mapped(path, places.pop())
        self._head = np.ndarray(_HEAD_BYTES // 8, np.int64, mapped)
        if self.step is not None and self._head[3] != self._layout:
            raise ValueError(f"{path} is of other tables or another code: give each job a folder of its own")
        arrays = [
            np.ndarray(shape, kind, mapped, at) for (kind, shape), at in zip(specs, places, strict=True)
        ]
        self.columns = dict(zip(like, arrays, strict=False))
        self.parity = arrays[len(like) :]

    @property
    def step(self) -> int | None:
        """The next step after the one that the rows are of; None: there is nothing yet."""
        return int(self._head[1]) if self._head[0] == _MAGIC else None

    @property
    def is_torn(self) -> bool:
        """Whether a change was cut off."""
        return bool(self._head[2])

    def begin(self) -> None:
        """A change begins."""
        self._head[2] = 1

    def end(self, step: int) -> None:
        """A change is whole; `step` comes next."""
        self._head[3] = self._layout
        self._head[1] = step
        self._head[0] = _MAGIC
        self._head[2] = 0


def _mapped(path: Path, size: int) -> mmap.mmap:
    """The file; of so many bytes, unless it holds something already."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if int.from_bytes(os.pread(descriptor, 8, 0), "little") != _MAGIC:
            os.ftruncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * int(np.prod(shape))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
