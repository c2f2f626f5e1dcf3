"""Rows in messages: which ones, each once, and memory for their bytes.

Must not know: which tables they are of, and who gets them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int64]


class Scratch:
    """Memory that every step overwrites: fresh pages would cost more than to fill them."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes that it has at the moment."""
        return len(self._bytes)

    def of(self, size: int) -> Bytes:
        """uint8 [size] of any content; what an earlier call gave is overwritten with it."""
        if size > len(self._bytes):
            self._bytes = np.empty(size + size // 4, np.uint8)
        return self._bytes[:size]


def distinct(values: Ids) -> Ids:
    """Integers in ascending order, each once."""
    if (values[1:] > values[:-1]).all():
        return values
    values = np.sort(values)
    return values[np.concatenate([[True], values[1:] != values[:-1]])]
