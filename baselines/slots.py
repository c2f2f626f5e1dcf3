"""Memory that outlives the process: files on tmpfs, two for each thing that is kept, one of which is whole.

Invariant: a file whose head names a step is whole; a kill at any moment leaves the other one as it was. Space
is reserved before it is used. Must not know: what is kept, other ranks.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .files import mapped

_MAGIC = 0x70616E73
_HEAD_BYTES = 64
_NONE = -1


@dataclass(frozen=True, order=True)
class Stamp:
    """Which snapshot it is.

    Attributes:
        step: that comes next.
        number: drawn for each snapshot; tells it from one of the same step before a rollback.
    """

    step: int
    number: int


class Slots:
    """What is kept in one machine's memory.

    Args:
        folder: on tmpfs; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._mapped: dict[Path, NDArray[np.uint8]] = {}
        self._kept_bytes: int | None = None

    @property
    def paths(self) -> list[Path]:
        """All files."""
        return sorted(self._folder.glob("*.slot"))

    @property
    def kept_bytes(self) -> int:
        """Memory that the files take."""
        if self._kept_bytes is None:
            self._kept_bytes = sum(path.stat().st_size for path in self.paths)
        return self._kept_bytes

    def kept(self) -> list[tuple[str, Stamp]]:
        """Names and stamps of all that is whole."""
        stamps = [(path.name.split(".")[0], self._stamp(path)) for path in self.paths]
        return [(name, stamp) for name, stamp in stamps if stamp is not None]

    def read(self, name: str, stamp: Stamp) -> NDArray[np.uint8]:
        """What is kept, uint8 [bytes], in place.

        Raises:
            KeyError: it isn't.
        """
        for path in self._both(name):
            if self._stamp(path) == stamp:
                return self._content(path)
        raise KeyError(f"{name} of {stamp}")

    def begin(self, name: str, size: int) -> NDArray[np.uint8]:
        """Memory for a new version, uint8 [size], to be filled before `seal`; the newest one stays.

        Raises:
            OSError: there is not enough space.
        """
        first, second = self._both(name)
        stamps = [self._stamp(path) for path in (first, second)]
        takes_first = stamps[0] is None or (stamps[1] is not None and stamps[0] < stamps[1])
        path, self._other = (first, second) if takes_first else (second, first)
        if len(self._mapped.get(path, ())) < _HEAD_BYTES + size:
            self._mapped.pop(path, None)
            self._kept_bytes = None
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _HEAD_BYTES + size)
            finally:
                os.close(descriptor)
        head = self._head(path)
        head[1] = _NONE  # first: from here on it is not whole
        head[3] = size
        head[0] = _MAGIC
        self._begun = path
        return self._content(path)

    def seal(self, stamp: Stamp) -> None:
        """The version begun last is whole, and takes the place of another one of the same stamp."""
        head = self._head(self._begun)
        head[2] = stamp.number
        head[1] = stamp.step
        if self._stamp(self._other) == stamp:
            self._head(self._other)[1] = _NONE

    def forget(self, but: Stamp | None = None) -> None:
        """Of all versions, those of one stamp are whole from here on."""
        for path in self.paths:
            if self._stamp(path) not in (None, but):
                self._head(path)[1] = _NONE

    def remove(self) -> None:
        """Gives the memory back."""
        self._mapped.clear()
        self._kept_bytes = None
        for path in self.paths:
            path.unlink()

    def _both(self, name: str) -> tuple[Path, Path]:
        return self._folder / f"{name}.0.slot", self._folder / f"{name}.1.slot"

    def _stamp(self, path: Path) -> Stamp | None:
        if path not in self._mapped and (not path.exists() or path.stat().st_size < _HEAD_BYTES):
            return None
        head = self._head(path)
        return Stamp(int(head[1]), int(head[2])) if head[0] == _MAGIC and head[1] != _NONE else None

    def _head(self, path: Path) -> NDArray[np.int64]:
        return self._memory(path)[:_HEAD_BYTES].view(np.int64)

    def _content(self, path: Path) -> NDArray[np.uint8]:
        return self._memory(path)[_HEAD_BYTES:][: int(self._head(path)[3])]

    def _memory(self, path: Path) -> NDArray[np.uint8]:
        if path not in self._mapped:
            self._mapped[path] = mapped(path)
        return self._mapped[path]
