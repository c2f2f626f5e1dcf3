"""The parity blocks that this rank keeps.

Owns the bytes of the r parity blocks that the placement gives this rank, and the arithmetic on them: parity
row q of a class is the XOR over the class's data blocks i of g(q, i) times block i. Shorter blocks
count as padded with zeros to the length of the class's longest block.

Invariant: between transactions every parity block is the code of the committed rows of its stripe.
Must not know: the network, journals, the source of deltas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InconsistentArenas
from ..kernels.contract import Ids, Kernels, Words
from .delta import Delta
from .placement import Placement

Received = Sequence[tuple[int, Delta]]


def class_words(placement: Placement, block_words: Sequence[Sequence[int]], stripe_class: int) -> int:
    """Length of a class's blocks in words: that of its longest data block.

    Args:
        placement: who keeps what.
        block_words: [world size][k], words of every rank's data blocks.
        stripe_class: 0..N-1.
    """
    members = placement.members(stripe_class)[: placement.k]
    return max(block_words[rank][block] for block, rank in enumerate(members))


def parity_words(placement: Placement, block_words: Sequence[Sequence[int]], rank: int) -> int:
    """Words of all parity that a rank keeps."""
    return sum(class_words(placement, block_words, c) for c, _ in placement.kept(rank))


@dataclasses.dataclass(frozen=True, eq=False)
class Syndrome:
    """The words in which one parity block differs from the parity of the rows under it.

    Attributes:
        stripe_class: the class.
        row: the parity row, 0..r-1.
        offsets: int64 [m], ascending: the differing words, counted from the block's start.
        words: uint64 [m], stored XOR expected, never 0.
    """

    stripe_class: int
    row: int
    offsets: Ids
    words: Words


class ParityBlocks:
    """The r parity blocks that one rank keeps.

    Args:
        memory: uint64 [parity_words(...)], read and overwritten in place.
        placement: who keeps what.
        rank: this rank.
        block_words: [world size][k], words of every rank's data blocks.
        generator: uint8 [n, k], the code's generator.
        kernels: does the arithmetic.

    Attributes:
        blocks: class -> the parity row that this rank keeps, and its words.
        starts: class -> the word of the memory at which its block starts.
    """

    def __init__(
        self,
        memory: Words,
        placement: Placement,
        rank: int,
        block_words: Sequence[Sequence[int]],
        generator: NDArray[np.uint8],
        kernels: Kernels,
    ) -> None:
        self.rank = rank
        self._placement = placement
        self._kernels = kernels
        self.blocks: dict[int, tuple[int, Words]] = {}
        self.starts: dict[int, int] = {}
        start = 0
        for stripe_class, row in placement.kept(rank):
            size = class_words(placement, block_words, stripe_class)
            self.blocks[stripe_class] = (row, memory[start : start + size])
            self.starts[stripe_class] = start
            start += size
        self._targets: dict[tuple[int, int], tuple[Words, int]] = {}
        for sender in placement.senders(rank):
            for block in placement.recipients(sender)[rank]:
                row, words = self.blocks[placement.stripe_class(sender, block)]
                self._targets[sender, block] = words, int(generator[placement.k + row, block])

    def block(self, stripe_class: int) -> Words:
        """The parity block of a class that this rank keeps, uint64, a view."""
        return self.blocks[stripe_class][1]

    def start(self, sender: int, delta: Delta) -> int:
        """The word of the memory at which the block under a Delta starts."""
        return self.starts[self._placement.stripe_class(sender, delta.block)]

    def check(self, received: Received) -> None:
        """Raises unless every Delta fits a block whose parity this rank keeps; writes nothing.

        Deltas come from other ranks, or from memory that may be damaged. After `prepared`, it is too late to
        refuse them.

        Args:
            received: (sender, Delta) pairs.

        Raises:
            InconsistentArenas: a Delta does not fit.
        """
        for sender, delta in received:
            words, _ = self._target(sender, delta)
            last = len(words) - delta.words.shape[1]
            if len(delta.offsets) and not 0 <= int(delta.offsets.min()) <= int(delta.offsets.max()) <= last:
                raise InconsistentArenas(
                    f"rank {sender} sent rank {self.rank} a delta of its block {delta.block} that does not "
                    f"fit the {len(words)} words of its parity: memory or network are damaged, or the ranks "
                    f"run different versions of ecemb; restart the job"
                )

    def finish_(self, sender: int, delta: Delta, saved: Words) -> None:
        """Adds a Delta of one row under which parity may be half changed.

        Args:
            sender: whose Delta it is.
            delta: of one row.
            saved: the old words under it, uint64, as many or more; read.
        """
        words, _ = self._target(sender, delta)
        start, width = int(delta.offsets[0]), delta.words.shape[1]
        words[start : start + width] = saved[:width]
        self.update_([(sender, delta)])

    def update_(self, received: Iterable[tuple[int, Delta]]) -> None:
        """Adds Deltas to the parity: word ^= g(row, column) x delta, over GF(2^8)."""
        for sender, delta in received:
            words, weight = self._target(sender, delta)
            self._kernels.mul_add_rows_(words, delta.offsets, delta.words, weight)

    def advance_(self, sender: int, delta: Delta, saved: Words, mark: Ids) -> None:
        """Adds one Delta in such a way that it can be finished; see `Kernels.update_rows_`."""
        words, weight = self._target(sender, delta)
        self._kernels.update_rows_(words, delta.offsets, delta.words, weight, saved, mark)

    def clear_(self) -> None:
        """Sets all parity to 0, the parity of rows that are all 0."""
        for _, words in self.blocks.values():
            words[:] = 0

    def syndromes(self, received: Received, start: int, stop: int) -> list[Syndrome]:
        """Compares parity with rows, which are given as deltas from zero.

        Args:
            received: words start..stop-1 of every data block whose parity this rank keeps.
            start: first word of the range, counted from the blocks' start.
            stop: end of the range; blocks may end before it.

        Returns:
            The syndrome of each parity block that differs.
        """
        left = {c: words[start:stop].copy() for c, (_, words) in self.blocks.items()}
        for sender, delta in received:
            _, weight = self._target(sender, delta)
            words = left[self._placement.stripe_class(sender, delta.block)]
            self._kernels.mul_add_rows_(words, delta.offsets - start, delta.words, weight)
        found: list[Syndrome] = []
        for c, words in left.items():
            at = np.flatnonzero(words)
            if len(at):
                found.append(Syndrome(c, self.blocks[c][0], at + start, words[at]))
        return found

    def _target(self, sender: int, delta: Delta) -> tuple[Words, int]:
        """The parity that a Delta changes, and its weight there."""
        target = self._targets.get((sender, delta.block))
        if target is None:
            raise InconsistentArenas(
                f"rank {sender} sent rank {self.rank} a delta of its block {delta.block}, whose parity "
                f"rank {self.rank} does not keep: the ranks disagree on the placement; restart the job"
            )
        return target
