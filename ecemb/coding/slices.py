"""The cut of the replicated state into slices, and the slices that a rank's slots hold.

Owns the places where slices begin and end. Invariant: any r lost ranks leave a holder of each slice
(`Placement.slice_holders`). It is arithmetic over integers, with the same results on every rank. Must not
know: the content of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .placement import Placement

ALIGN_BYTES = 64
"""Slices begin at multiples of this, as tensors do: no element of a tensor is in two slices."""


@dataclass(frozen=True)
class Share:
    """The slices of the replicated state that the slots of one rank hold.

    Attributes:
        count: Number of slices that the whole is cut into.
        held: Numbers of those that are held, ascending.
    """

    count: int
    held: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement | None, rank: int) -> Share:
        """The share of a rank: r + 1 of N slices, or the whole.

        Args:
            placement: Of the job; None for one rank, which holds the whole.
            rank: The rank.
        """
        if placement is None:
            return WHOLE
        return cls(placement.world_size, placement.held_slices(rank))

    @property
    def is_whole(self) -> bool:
        """Whether all slices are held."""
        return len(self.held) == self.count

    def edges(self, area_bytes: int) -> list[int]:
        """The bounds of all slices: slice c is bytes edges[c] to edges[c + 1] - 1.

        Args:
            area_bytes: Size of the whole, a multiple of `ALIGN_BYTES`.
        """
        units = area_bytes // ALIGN_BYTES
        return [units * c // self.count * ALIGN_BYTES for c in range(self.count + 1)]

    def runs(self, area_bytes: int) -> list[range]:
        """The bytes of the whole that are held, in their order; neighbouring slices are one run."""
        return runs(self.edges(area_bytes), self.held)

    def size_bytes(self, area_bytes: int) -> int:
        """Number of bytes that are held."""
        return sum(map(len, self.runs(area_bytes)))


WHOLE = Share(1, (0,))


def runs(edges: Sequence[int], slices: Sequence[int]) -> list[range]:
    """The bytes of some slices, in the order of the slices; neighbouring ones are one run, empty ones none.

    Args:
        edges: As `Share.edges` returns them.
        slices: Numbers of slices.
    """
    found: list[range] = []
    for c in slices:
        start, stop = edges[c], edges[c + 1]
        if found and found[-1].stop == start:
            found[-1] = range(found[-1].start, stop)
        elif start < stop:
            found.append(range(start, stop))
    return found
