"""A rank's rows as blocks, and what lost blocks are sums of: pure functions of the ranks' shapes.

A rank's rows, table after table, all columns of a row side by side, are one run of numbers, which is cut
between rows into k blocks.

Must not know: what lies in memory, processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from baselines.ring import Ring

from .coefficients import Reals, decode_weights


class ParityLost(RuntimeError):
    """More is lost than parity can rebuild."""


@dataclass(frozen=True)
class Segment:
    """Consecutive rows of a table within a block.

    Attributes:
        table: its number.
        first: row.
        rows: how many.
        width: numbers of a row, in all columns.
        start: of the first row's numbers in the block.
    """

    table: int
    first: int
    rows: int
    width: int
    start: int

    @property
    def stop(self) -> int:
        """End of the last row's numbers in the block."""
        return self.start + self.rows * self.width


Block = tuple[Segment, ...]
Shape = tuple[int, int]
"""Rows of a table, and numbers in each."""


def cut(shapes: Sequence[Shape], k: int) -> tuple[Block, ...]:
    """A rank's tables as k blocks, of nearly the same length."""
    total = sum(rows * width for rows, width in shapes)
    edges = [-(-total * number // k) for number in range(1, k + 1)]
    blocks: list[list[Segment]] = [[] for _ in range(k)]
    at = begin = number = 0
    for table, (rows, width) in enumerate(shapes):
        first = 0
        while first < rows:
            while at >= edges[number]:
                begin, number = at, number + 1
            taken = min(rows - first, -(-(edges[number] - at) // width))
            blocks[number].append(Segment(table, first, taken, width, at - begin))
            first, at = first + taken, at + taken * width
    return tuple(tuple(block) for block in blocks)


def length(block: Block) -> int:
    """Numbers in it."""
    return block[-1].stop if block else 0


@dataclass(frozen=True)
class Term:
    """A part of a sum that gives a lost block.

    Attributes:
        rank: that has it.
        block: the data block of that rank; or None:
        row: it is its parity row of this number.
        weight: its factor.
    """

    rank: int
    block: int | None
    row: int
    weight: float


@dataclass(frozen=True)
class Stripes:
    """The rows of all ranks, and where their parity is.

    Attributes:
        ring: who keeps what.
        shapes: rank -> its tables.
    """

    ring: Ring
    shapes: tuple[tuple[Shape, ...], ...]

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], ...]:
        """Rank -> its k data blocks."""
        return tuple(cut(shapes, self.ring.k) for shapes in self.shapes)

    def parity_lengths(self, rank: int) -> list[int]:
        """Numbers in each of a rank's r parity rows: as many as in the longest block under it."""
        return [
            max(length(self.blocks[member][i]) for i, member in enumerate(self.ring.members(rank, row)))
            for row in range(self.ring.r)
        ]

    def terms(self, matrix: Reals, rank: int, block: int, lost: Collection[int]) -> list[Term]:
        """What a lost rank's block is the sum of.

        Raises:
            ParityLost: too many ranks of its stripe are lost.
        """
        stripe = self.ring.stripe(rank, block)
        members, keepers = stripe[: self.ring.k], stripe[self.ring.k :]
        gone = [i for i, member in enumerate(members) if member in lost]
        rows = [q for q, keeper in enumerate(keepers) if keeper not in lost][: len(gone)]
        if len(rows) < len(gone):
            raise ParityLost(
                f"ranks {sorted(lost)} are lost: of a stripe of n = {self.ring.n} blocks more than "
                f"r = {self.ring.r}; train from the start, with an empty folder"
            )
        of_rows, of_data = (weights[gone.index(block)] for weights in decode_weights(matrix, gone, rows))
        parity = [Term(keepers[q], None, q, weight) for q, weight in zip(rows, of_rows, strict=True)]
        data = [Term(members[i], i, 0, of_data[i]) for i in range(self.ring.k) if i not in gone]
        return parity + data
