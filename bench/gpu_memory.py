"""Host memory that a GPU reaches in place: mapped as an arena's is, and registered with CUDA.

Must not know: what lies in it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.devices import CUDA
from ecemb.mapping import map_shared


class Unregistered(Exception):
    """Memory can't be registered with CUDA, so that the device doesn't reach it; the message says why."""


def mapped(size_bytes: int) -> NDArray[np.uint8]:
    """Memory that is mapped as an arena's is, in pages of the same size, and in no folder; uint8, zeros."""
    file = os.memfd_create("ecemb-bench")
    try:
        os.ftruncate(file, size_bytes)
        return map_shared(file, size_bytes)
    finally:
        os.close(file)


@contextlib.contextmanager
def registered(memory: NDArray[np.uint8], device: torch.device) -> Generator[None]:
    """Memory that a device reaches in place, within the block; any but a CUDA device does so anyway.

    Raises:
        Unregistered: CUDA refuses; or doesn't let go in the end.
    """
    if device.type != CUDA:
        yield
        return
    cudart: Any = torch.cuda.cudart()
    _call(cudart, "cudaHostRegister", memory.ctypes.data, memory.nbytes, 0)
    try:
        # By this `ecemb.kernels.cuda` tells; torch asks CUDA about the address, which may be any within.
        if not all(torch.from_numpy(memory[at:]).is_pinned() for at in (0, memory.nbytes // 2)):
            raise Unregistered("CUDA has registered memory that torch doesn't take for pinned")
        yield
    finally:
        torch.cuda.synchronize(device)
        _call(cudart, "cudaHostUnregister", memory.ctypes.data)


def _call(cudart: Any, name: str, *arguments: int) -> None:
    """Calls a function of CUDA's runtime in a thread of its own.

    CUDA keeps an error for the thread that has met it, and torch would take it for that of its next kernel.
    """
    with ThreadPoolExecutor(1) as apart:
        code = apart.submit(getattr(cudart, name), *arguments).result()
    if code != cudart.cudaError.success:
        raise Unregistered(f"{name}: {cudart.cudaGetErrorString(code)} ({code!r})")
