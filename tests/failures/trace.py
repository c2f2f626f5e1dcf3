"""What a worker on a host did: a small file per process, which outlives it.

It appears when the worker's memory is open, and says which rank it was given and what was recovered.
While it trains, three words follow: the step, and the times of its first and latest step.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import struct
import time
from pathlib import Path

_WORDS = struct.Struct("<qqq")
_SIZE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Opened:
    """A worker whose memory is open.

    Attributes:
        pid: its process.
        agent: name of the torchrun agent that started it.
        host: the host that it named.
        worker: torchrun's RANK.
        rank: the logical rank.
        kind: of recovery: "fresh", "process" or "memory".
        next_step: the step to run next.
        lost: ranks that were rebuilt.
        rebuilt_bytes: what this worker received for it.
    """

    pid: int
    agent: str
    host: str
    worker: int
    rank: int
    kind: str
    next_step: int
    lost: tuple[int, ...]
    rebuilt_bytes: int


class Trace:
    """A worker's file, mapped by itself and by the driver. Times are of `time.monotonic_ns`."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _SIZE_BYTES)
        text = self._bytes[_WORDS.size :].rstrip(b"\0")
        fields = json.loads(text)
        self.opened = Opened(**{**fields, "lost": tuple(fields["lost"])})

    @classmethod
    def create(cls, folder: Path, opened: Opened) -> Trace:
        """Make the file; it appears only when it is whole."""
        text = json.dumps(dataclasses.asdict(opened)).encode()
        path = folder / f"{opened.pid}.new"
        path.write_bytes((_WORDS.pack(-1, 0, 0) + text).ljust(_SIZE_BYTES, b"\0"))
        return cls(path.rename(folder / f"{opened.pid}.trace"))

    def reach(self, step: int) -> None:
        """Say that `step` begins, or ends."""
        now = time.monotonic_ns()
        _WORDS.pack_into(self._bytes, 0, step, self.first_ns or now, now)

    @property
    def step(self) -> int:
        """The step that it was in last; -1 before the first."""
        return _WORDS.unpack_from(self._bytes)[0]

    @property
    def first_ns(self) -> int:
        return _WORDS.unpack_from(self._bytes)[1]

    @property
    def last_ns(self) -> int:
        return _WORDS.unpack_from(self._bytes)[2]
