"""Files as memory, and as what outlives machines.

Must not know: what is in them.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def made(path: Path, size_bytes: int) -> NDArray[np.uint8]:
    """A new file of zeros in place, uint8 [size_bytes], for this user alone; its space is reserved.

    Raises:
        OSError: there is not enough space.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    finally:
        os.close(descriptor)
    return mapped(path)


def mapped(path: Path) -> NDArray[np.uint8]:
    """A file in place, uint8 [its size]."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Returns when a file or a folder will outlive the machine, with what was written through `mapped`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
