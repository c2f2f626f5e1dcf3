"""How many steps of a window the memory of a rank has room for.

Owns the prediction: a window's old records grow with its steps as those of the last window did, and what they
need elsewhere grows with them. Says no more than what the space in the arena's file system, shared with the
other ranks there, can hold. Must not know: how ranks agree on a window.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from ..arena import capacity, private_files
from ..arena.arena import Arena

_SPARE = 1.125
"""More rows than the last window had are room for as well, by this factor."""
_FRESH_S = 10.0  # how long the answer of the kernel counts


class Room:
    """The room of one rank.

    Args:
        arena: attached.
        copies: for each region that grows with a window, and for the process's own memory as "", its bytes
            for each byte of the row journal.
    """

    def __init__(self, arena: Arena, copies: Mapping[str, float]) -> None:
        self._arena = arena
        self._copies = dict(copies)
        domains = arena.constants.domains
        self._sharing = domains.count(domains[arena.constants.rank])
        self._asked_s, self._free_bytes = -_FRESH_S, 0

    def has_all(self) -> bool:
        """Whether a window of any length has room, as all rows have."""
        return self._fits(len(self._arena.region("row_journal")), 0)

    def steps(self, wanted: int, used: Sequence[int], held_bytes: int) -> int:
        """The most steps, up to `wanted`, that a window can have.

        Args:
            wanted: 1 or more.
            used: bytes of the row journal after each step of the last window, ascending, not empty.
            held_bytes: of the process's own memory for a window.
        """
        if self._fits(journal_bytes(used, wanted), held_bytes):
            return wanted
        low, high = 0, wanted  # fits, doesn't fit
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(journal_bytes(used, middle), held_bytes):
                low = middle
            else:
                high = middle
        return max(1, low)

    def _fits(self, size_bytes: float, held_bytes: int) -> bool:
        needed = 0.0
        for region, copies in self._copies.items():
            part = copies * size_bytes
            if region:
                part = min(part, len(self._arena.region(region)))  # which has room for all rows
            needed += max(0.0, part - (self._arena.reserved(region) if region else held_bytes))
        return needed <= 0 or needed <= self._free() / self._sharing

    def _free(self) -> int:
        """Bytes that are free for all ranks that share this rank's memory."""
        if time.monotonic() - self._asked_s >= _FRESH_S:
            self._asked_s, self._free_bytes = time.monotonic(), free_bytes(self._arena)
        return self._free_bytes


def with_owed(used: Sequence[int], owed_bytes: int) -> list[int]:
    """Bytes of the row journal after each step of a window, with those that its end adds.

    How many rows those were after each step isn't known. Popular rows come first, so their number is taken to
    grow with the root of the steps: for a shorter window, that is rather too many.

    Args:
        used: as of `Room.steps`.
        owed_bytes: what the end adds.
    """
    return [
        size + math.ceil(owed_bytes * math.sqrt((i + 1) / len(used))) if owed_bytes else size
        for i, size in enumerate(used)
    ]


def journal_bytes(used: Sequence[int], steps: int) -> float:
    """What a window of some steps is expected to save, in bytes.

    Args:
        used: as of `Room.steps`. A window changes fewer new rows the longer it lasts, so that its last
            quarter says how it goes on.
        steps: of the window, 1 or more.
    """
    known = len(used)
    if steps <= known:
        return _SPARE * used[steps - 1]
    tail = max(1, known // 4)
    before = used[known - tail - 1] if known > tail else 0
    return _SPARE * (used[-1] + (steps - known) * (used[-1] - before) / tail)


def free_bytes(arena: Arena) -> int:
    """Bytes that can still be stored where an arena is: the least that a limit leaves, but for promises."""
    with private_files.opened(private_files.locate(arena.path).arena_dir, create=True) as folder:
        free = min((limit.free_bytes for limit in capacity.limits(folder, arena.path)), default=1 << 62)
        return max(0, free - capacity.promised_elsewhere(folder))
