"""Parity: the deltas of rows, in the format of messages to keepers, and the parity blocks that a rank keeps.

A *delta* is old XOR new of a record's words. A `Delta` has the deltas of records of equal width in one data
block: their word offsets in the block, and the words. A rank lays out its Deltas in *sections*, one for each
data block, in the order of blocks. A keeper needs the Deltas of neighbouring blocks, so its message is one
run of these words: nothing is copied for the r keepers of a block, and the keeper's inbox has the same words.

A section begins with r words, its *head*: its size, and the sizes of the r - 1 sections after it, 0 where
there is none. A message has at most r sections, so its first r words give its length.

Owns the form of these messages, the bytes of the r parity blocks that the placement gives this rank, and the
arithmetic on them: parity row q of a class is the XOR over the class's data blocks i of g(q, i) times block
i. Shorter blocks count as padded with zeros to the length of the class's longest block.

Invariant: between transactions every parity block is the code of the committed rows of its stripe. Must not
know: the network, journals, the source of deltas.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InconsistentArenas
from ..kernels.contract import Ids, Kernels, Words
from .placement import Placement

HEAD_WORDS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """Changes of one data block of one rank.

    Attributes:
        block: the sender's data block, 0..k-1, which is the generator's column.
        offsets: int64 [m], first word of each record, counted from the block's start.
        words: uint64 [m, w], old XOR new.
    """

    block: int
    offsets: Ids
    words: Words

    def rows(self, start: int, stop: int) -> Delta:
        """Records start..stop-1; views."""
        return Delta(self.block, self.offsets[start:stop], self.words[start:stop])

    def parts(self, size_bytes: int, start: int = 0) -> Iterator[Delta]:
        """Cuts the records from `start` on into Deltas of about `size_bytes` each, in order; views."""
        count, width = self.words.shape
        step = max(1, size_bytes // max(1, self.words.itemsize * width))
        for at in range(start, count, step):
            yield self.rows(at, at + step)


def blank(out: Words, block: int, records: int, width: int) -> Delta:
    """Begins a Delta at the start of `out`: writes its head; the caller fills in offsets and words.

    Args:
        out: uint64 [size_words(records, width) or more], overwritten.
        block: the data block.
        records: number of records.
        width: words of each.

    Returns:
        The Delta, whose arrays are views of `out`.
    """
    out[:HEAD_WORDS] = (block, records, width)
    end = HEAD_WORDS + records
    offsets = out[HEAD_WORDS:end].view(np.int64)
    return Delta(block, offsets, out[end : end + records * width].reshape(records, width))


def size_words(records: int, width: int) -> int:
    """Size in words of a Delta of `records` records of `width` words, in a message."""
    return HEAD_WORDS + records * (1 + width)


def write_heads_(words: Words, edges: Sequence[int], r: int) -> None:
    """Writes the head of each section.

    Args:
        words: uint64, overwritten.
        edges: k + 1 words; section i lies in edges[i]..edges[i+1]-1.
        r: words of a head.
    """
    sizes = [b - a for a, b in itertools.pairwise(edges)] + [0] * r
    for i, start in enumerate(edges[:-1]):
        words[start : start + r] = sizes[i : i + r]


def sections(message: Words, r: int) -> Iterator[Words]:
    """The Deltas of each section of a message (uint64), without the head of `r` words; views.

    Raises:
        InconsistentArenas: the sizes in the heads don't fit the message.
    """
    at = 0
    while at < len(message):
        size = int(message[at : at + 1].view(np.int64)[0])
        if not r <= size <= len(message) - at:
            raise InconsistentArenas(
                f"word {at} of a message of {len(message)} words announces a section of {size} words, "
                f"which no rank sends: memory or network are damaged, or the ranks run different versions "
                f"of ecemb"
            )
        yield message[at + r : at + size]
        at += size


def messages(words: Words, edges: Sequence[int], placement: Placement, rank: int) -> dict[int, Words]:
    """The message to each keeper of a rank's parity.

    Args:
        words: uint64, the rank's Deltas in the order of their blocks, with heads or without.
        edges: k + 1 words; the Deltas of block i lie in edges[i]..edges[i+1]-1.
        placement: the keepers of each block.
        rank: the rank.

    Returns:
        Keeper -> its message, a view of `words`. Empty messages are left out; views overlap where r > 1.
    """
    found: dict[int, Words] = {}
    for keeper, blocks in placement.recipients(rank).items():
        message = words[edges[blocks.start] : edges[blocks.stop]]
        if len(message):
            found[keeper] = message
    return found


def parted(words: Words, lengths: Sequence[int]) -> dict[int, Words]:
    """Cuts messages that lie end to end, in the order of senders.

    Args:
        words: uint64 [sum(lengths)].
        lengths: sender -> length of its message in words.

    Returns:
        Sender -> its message, a view. Empty messages are left out.
    """
    edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return {sender: words[a:b] for sender, (a, b) in enumerate(edges) if a < b}


class Scratch:
    """Memory that every step overwrites: to allocate fresh pages would cost more than to write them."""

    def __init__(self) -> None:
        self._words = np.empty(0, np.uint64)

    @property
    def size_bytes(self) -> int:
        """Size of the memory."""
        return self._words.nbytes

    def room(self, words: int) -> Words:
        """uint64 [words] of any content. It overlaps the results of earlier calls."""
        if words > len(self._words):
            self._words = np.empty(words + words // 4, np.uint64)
        return self._words[:words]


def unpack(message: Words) -> Iterator[Delta]:
    """Parses Deltas end to end, as views: a section without its head, or a message without heads.

    The words come from another process, or from memory that may be damaged, so all fields are checked but the
    offsets: `ParityBlocks.check`, which knows the blocks, checks these.

    Args:
        message: uint64, Deltas end to end.

    Raises:
        InconsistentArenas: the message is malformed.
    """
    signed = message.view(np.int64)
    at = 0
    while at < len(message):
        head = signed[at : at + HEAD_WORDS].tolist()
        block, records, width = head if len(head) == HEAD_WORDS else (0, -1, 0)
        if records < 0 or not 0 <= width <= len(message) or at + size_words(records, width) > len(message):
            raise InconsistentArenas(
                f"word {at} of {len(message)} words of deltas announces {records} records of {width} "
                f"words, which no rank sends: memory or network are damaged, or the ranks run "
                f"different versions of ecemb"
            )
        at += HEAD_WORDS
        offsets, at = signed[at : at + records], at + records
        words = message[at : at + records * width].reshape(records, width)
        at += records * width
        yield Delta(block, offsets, words)


Received = Sequence[tuple[int, Delta]]


def class_words(placement: Placement, block_words: Sequence[Sequence[int]], stripe_class: int) -> int:
    """Length of a class's blocks in words: the length of its longest data block.

    Args:
        placement: the map of ranks and blocks to classes.
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
        placement: the map of ranks and blocks to classes.
        rank: this rank.
        block_words: [world size][k], words of every rank's data blocks.
        generator: uint8 [n, k], the code's generator.
        kernels: does the arithmetic.

    Attributes:
        blocks: class -> the parity row that this rank keeps, and its words (uint64, a view).
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
        """Adds a Delta of one row to parity that an interrupted `advance_` may have half changed.

        Args:
            sender: the rank that sent the Delta.
            delta: of one row.
            saved: the old words of parity under the row, uint64 [width or more]; read.
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
        """Adds one Delta; `finish_` completes it after an interruption. See `Kernels.update_rows_`."""
        words, weight = self._target(sender, delta)
        self._kernels.update_rows_(words, delta.offsets, delta.words, weight, saved, mark)

    def advance_lanes_(
        self, sender: int, delta: Delta, edges: Sequence[int], saved: Words, marks: Ids
    ) -> None:
        """Adds one Delta, whose rows don't overlap, in lanes. See `Kernels.update_lanes_`."""
        words, weight = self._target(sender, delta)
        self._kernels.update_lanes_(words, delta.offsets, delta.words, weight, edges, saved, marks)

    def clear_(self) -> None:
        """Sets all parity to 0, the parity of rows that are all 0."""
        for _, words in self.blocks.values():
            words[:] = 0

    def syndromes(self, received: Received, start: int, stop: int) -> list[Syndrome]:
        """Compares parity with rows.

        Args:
            received: (sender, Delta) pairs, the rows as deltas from zero: words start..stop-1 of every data
                block whose parity this rank keeps.
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
        """The parity block that a Delta changes (uint64), and the Delta's weight in it.

        Raises:
            InconsistentArenas: this rank keeps no parity of the Delta's block.
        """
        target = self._targets.get((sender, delta.block))
        if target is None:
            raise InconsistentArenas(
                f"rank {sender} sent rank {self.rank} a delta of its block {delta.block}, whose parity "
                f"rank {self.rank} does not keep: the ranks disagree on the placement; restart the job"
            )
        return target
