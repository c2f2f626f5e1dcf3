"""A request that a job leaves its machines: an empty file beside its arenas, on any of its hosts.

The job answers at its next `Guard.asked_to_leave`. Owns the file's name. Must not know the job's processes.
"""

from __future__ import annotations

import contextlib
import os

from .private_files import Folder

NAME = "leave"


def ask(place: Folder) -> None:
    """Puts the request; nothing happens if it stands already.

    Raises:
        ArenaError, ConfigurationError: the file can't be made.
    """
    with contextlib.suppress(FileExistsError):
        os.close(place.make(NAME))


def is_asked(place: Folder) -> bool:
    """Whether the request stands on this host.

    Raises:
        ArenaInsecure: the file, or a folder above it, is another user's.
    """
    return place.status(NAME) is not None


def withdraw(place: Folder) -> None:
    """Removes the request, and folders that are then empty."""
    if (status := place.status(NAME)) is not None:
        place.unlink(NAME, status.st_ino)
