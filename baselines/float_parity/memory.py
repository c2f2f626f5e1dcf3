"""A rank's rows and parity in a file on tmpfs, which outlives the process.

The rows are a second copy, as they were after the last whole step. Where servers keep running, as those of
the papers do, it is not needed; here every process is started again after a failure. What a step changes is
written in place, so a process that is killed meanwhile leaves a mixture, which `is_torn` shows. Where parity
is recomputed, there is none until that is done, which `is_unmade` shows.

Must not know: what the numbers mean, other ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baselines.files import made, mapped

_MAGIC = 0x73756D73
_HEAD_BYTES = 64
_ALIGN_BYTES = 64
Bytes = NDArray[np.uint8]


class Memory:
    """One file: head, columns of all tables, parity.

    Args:
        path: of the file; its folder is made if missing.
        columns: tensors on the CPU by key, whose types and shapes the columns have.
        parity_lengths: numbers of each parity row.
        dtype: of parity.
        owner: whose file it is, and under which code: another one's is refused.

    Attributes:
        columns: by key, in place.
        parity: rows, in place.
        dtype: of parity.
        nbytes: of the file.

    Raises:
        ValueError: the file is there, and of other tables or another code.
        OSError: there is not enough space.
    """

    def __init__(
        self,
        path: Path,
        columns: Mapping[str, Tensor],
        parity_lengths: Sequence[int],
        dtype: np.dtype[Any],
        owner: str = "",
    ) -> None:
        self.dtype = dtype
        like = {key: tensor.detach().numpy() for key, tensor in columns.items()}
        specs = [(array.dtype, array.shape) for array in like.values()]
        specs += [(dtype, (length,)) for length in parity_lengths]
        places = np.cumsum([_HEAD_BYTES, *(_aligned(_nbytes(*spec)) for spec in specs)]).tolist()
        layout = hashlib.sha256(repr([owner, list(like), specs]).encode()).digest()[:7]
        self._layout = int.from_bytes(layout, "little")
        memory = _opened(path, places.pop())
        self.nbytes = len(memory)
        self._head = memory[:_HEAD_BYTES].view(np.int64)
        if self.step is not None and self._head[3] != self._layout:
            raise ValueError(
                f"{path} is of other tables, another code or other ranks: give each job a folder of its own"
            )
        arrays = [
            np.ndarray(shape, kind, memory, at) for (kind, shape), at in zip(specs, places, strict=True)
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

    @property
    def is_unmade(self) -> bool:
        """Whether parity is being recomputed."""
        return bool(self._head[4])

    def begin(self) -> None:
        """A change begins."""
        self._head[2] = 1

    def unmake(self, step: int) -> None:
        """Rows are whole, and `step` comes next; parity is of no use until `end`."""
        self._head[4] = 1
        self._name(step)

    def end(self, step: int) -> None:
        """A change is whole, and parity is made; `step` comes next."""
        self._name(step)
        self._head[2] = self._head[4] = 0

    def _name(self, step: int) -> None:
        self._head[3] = self._layout
        self._head[1] = step
        self._head[0] = _MAGIC


def _opened(path: Path, size: int) -> Bytes:
    """The file in place; of this many bytes, unless it holds something already."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.stat().st_size >= _HEAD_BYTES:
        found = mapped(path)
        if found[:8].view(np.int64)[0] == _MAGIC:
            return found
    return made(path, size)


def _nbytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return dtype.itemsize * int(np.prod(shape))


def _aligned(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
