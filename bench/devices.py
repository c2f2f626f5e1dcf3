"""Where a training's tables stay: in the arena, on a CUDA device, or on the CPU and taken for a device's.

`APART` shows that what is written for GPUs works on a machine without one; how long it takes says nothing.
Imports hardly anything: some scripts measure their own imports.

Must not know: what is trained, and what is measured.
"""

from __future__ import annotations

ARENA, CUDA, APART = "arena", "cuda", "apart"

_MOST_OF = 0.8
"""Of what is free, for what is known to be needed: there is more."""


def begin(device: str) -> str | None:
    """Gets this process ready, before it builds its model.

    Args:
        device: One of the above.

    Returns:
        torch's name of where tables stay; None if they move into the arena.
    """
    if device == ARENA:
        return None
    if device == APART:
        from ecemb.adapters import sparse

        sparse.is_apart = lambda tensor: True
        return "cpu"
    import torch

    torch.cuda.set_device(0)
    return device


def settle(device: str) -> None:
    """Waits until the device has done what was begun there."""
    if device == CUDA:
        import torch

        torch.cuda.synchronize()


def fits(device: str, device_bytes: int, arena_bytes: int) -> str | None:
    """The folder of arenas in which so many bytes fit, if as many as said fit on the device, too.

    Folders are asked for what is free there: a tmpfs is made no larger than its machine's memory.

    Args:
        device: One of the above.
        device_bytes: Of all ranks, which share one device.
        arena_bytes: Of all ranks, which share one host.
    """
    import shutil
    import tempfile

    import torch

    if device == CUDA and device_bytes > _MOST_OF * torch.cuda.mem_get_info()[0]:
        return None
    for folder in ("/dev/shm", tempfile.gettempdir()):
        if arena_bytes <= _MOST_OF * shutil.disk_usage(folder).free:
            return folder
    return None
