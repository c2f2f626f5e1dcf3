"""Where a training's tables stay: in the arena, on a CUDA device, or on the CPU and taken for a device's.

`APART` shows that what is written for GPUs works on a machine without one; how long it takes says nothing.
Imports hardly anything: some scripts measure their own imports.

Must not know: what is trained, and what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

ARENA, CUDA, APART = "arena", "cuda", "apart"

HALVINGS = 6
"""Of a size that doesn't fit, at most."""
_MEMORY = "/dev/shm"

_MOST_OF = 0.8
"""Of what is free, for what is known to be needed: there is more."""


def count(device: str) -> int:
    """How many devices there are, at least 1."""
    import torch

    return max(1, torch.cuda.device_count()) if device == CUDA else 1


def begin(device: str, rank: int = 0) -> str | None:
    """Gets this process ready, before it builds its model.

    Args:
        device: One of the above.
        rank: This process's, on this host: ranks are dealt out over the devices that there are.

    Returns:
        torch's name of where tables stay; None if they move into the arena.
    """
    if device == ARENA:
        return None
    if device == APART:
        from ecemb.engines import fbgemm, sparse

        sparse.is_off_arena = fbgemm.is_off_arena = lambda tensor: True
        return "cpu"
    import torch

    torch.cuda.set_device(rank % count(device))
    return device


def settle(device: str) -> None:
    """Waits until the device has done what was begun there."""
    if device == CUDA:
        import torch

        torch.cuda.synchronize()


def roomiest(device: str, sizes: Iterable[tuple[T, int, int]]) -> tuple[T, str] | None:
    """The first of some sizes that fits, and the folder of arenas in which it does; None if none fits.

    A smaller size in memory comes before a larger one on a disk, whose speed would be measured. Folders are
    asked for what is free there, and memory for what is available, which may be less.

    Args:
        device: One of the above.
        sizes: From the largest on: what it is, and its bytes on a device, of all ranks that share it, and in
            arenas, of all ranks, which share one host.
    """
    import shutil
    import tempfile

    import torch

    from ecemb.memory.capacity import machine_limit

    memory = machine_limit()
    free_bytes = {folder: shutil.disk_usage(folder).free for folder in (_MEMORY, tempfile.gettempdir())}
    if memory is not None:
        free_bytes[_MEMORY] = min(free_bytes[_MEMORY], memory.free_bytes)
    device_bytes = torch.cuda.mem_get_info()[0] if device == CUDA else math.inf
    wanted = list(sizes)
    for folder, free in free_bytes.items():
        for size, on_device, in_arenas in wanted:
            if on_device <= _MOST_OF * device_bytes and in_arenas <= _MOST_OF * free:
                return size, folder
    return None
