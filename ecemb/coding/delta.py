"""Deltas: the changes of a rank's rows, as they are sent to the keepers of its parity.

A *delta* is old XOR new of a record's words. A `Delta` has the deltas of records of equal width in one data
block: their word offsets in the block, and the words. A rank lays out its Deltas in *sections*, one for each
data block in their order. A keeper needs the Deltas of neighbouring blocks, so its message is one run of
these words. Nothing is copied for the r keepers of a block, and a message lies in the keeper's inbox as it
was sent.

A section begins with r words, its *head*: its size, and the sizes of those that follow it, 0 where there are
none. A message has at most r sections, so its first words say how long it is.

Must not know: the network, parity, journals.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import InconsistentArenas
from ..kernels.contract import Ids, Words
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
        """This one from record `start` on, in pieces of about `size_bytes`, in order; views."""
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
    """Words that a Delta takes in a message."""
    return HEAD_WORDS + records * (1 + width)


def place(part: Words, words: Words) -> int:
    """The word of `words` at which a view of it begins."""
    first, start = (one.__array_interface__["data"][0] for one in (part, words))
    return (first - start) // words.itemsize


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
    """The Deltas of each section of a message (uint64), without heads of `r` words; views.

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
        edges: k + 1 words; what belongs to block i lies in edges[i]..edges[i+1]-1.
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
    """Cuts messages that lie end to end (uint64 [sum(lengths)]) by sender; views, without empty ones."""
    edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return {sender: words[a:b] for sender, (a, b) in enumerate(edges) if a < b}


class Scratch:
    """Memory that every step overwrites. Getting fresh pages would cost more than writing them."""

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

    The words come from another process, or from memory that may be damaged, so all its fields are checked.
    `ParityBlocks.check`, which knows the blocks, checks the offsets.

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
