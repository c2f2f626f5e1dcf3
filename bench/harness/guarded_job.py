"""What the ranks of every guarded training are given, and what they leave behind.

Imports hardly anything: some scripts measure their own imports.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

    from ecemb.memory.header import Found


@dataclass(frozen=True, kw_only=True)
class GuardedJob:
    """A job of ranks that train under a guard; questions add fields of their own.

    Attributes:
        job: The job's name.
        arena_dir: Where arenas lie.
        n: The code's n.
        k: The code's k.
        seed: Of all that is drawn.
        timeout_s: Of every wait.
    """

    job: str
    arena_dir: str
    n: int
    k: int
    seed: int
    timeout_s: float

    def arenas(self) -> list[Found]:
        """The job's arenas on this host."""
        from ecemb.memory.scan import arenas

        return [one for one in arenas(self.arena_dir) if one.job == self.job]

    def remove_arenas(self) -> None:
        """Removes the job's arenas, held or not, and the empty folders of a job that had no guard."""
        from ecemb.memory.scan import remove

        for one in self.arenas():
            remove(one, force=True)
        folder = Path(self.arena_dir, f"ecemb-{os.geteuid()}", self.job)
        for empty in (*folder.glob("*"), folder):
            with suppress(OSError):
                empty.rmdir()

    @contextmanager
    def leaving_nothing(self) -> Generator[None]:
        """Removes the job's arenas at the end of the block, also after an exception."""
        try:
            yield
        finally:
            self.remove_arenas()
