"""What changed, as it travels from a rank's rows to the keepers of its parity.

A *delta* is old XOR new of a record's words. Deltas of one data block, of records of equal width, make a
`Delta`: word offsets in the block, and the words. A rank lays its Deltas out in the order of their blocks.
A keeper needs those of neighbouring blocks, so that its message is one run of the words: nothing is copied
for the r keepers of a block, and a message can lie in the keeper's inbox as it came.

Must not know: the network, parity, journals.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import InconsistentArenas
from .placement import Placement

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

HEAD_WORDS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """Changes of one data block of one rank.

    Attributes:
        block: the sender's data block, 0..k-1, which is the coefficient's column.
        offsets: int64 [m], first word of each record, counted from the block's start.
        words: uint64 [m, w], old XOR new.
    """

    block: int
    offsets: Ids
    words: Words


def blank(out: Words, block: int, records: int, width: int) -> Delta:
    """Begins a Delta at the start of `out`: its head is written, offsets and words are to be filled in.

    Args:
        out: uint64 [size_words(records, width) or more], overwritten.
        block: the data block.
        records: number of records.
        width: words of each.

    Returns:
        The Delta, views of `out`.
    """
    out[:HEAD_WORDS] = (block, records, width)
    end = HEAD_WORDS + records
    offsets = out[HEAD_WORDS:end].view(np.int64)
    return Delta(block, offsets, out[end : end + records * width].reshape(records, width))


def size_words(records: int, width: int) -> int:
    """Words that a Delta takes in a message."""
    return HEAD_WORDS + records * (1 + width)


def messages(words: Words, edges: Sequence[int], placement: Placement, rank: int) -> dict[int, Words]:
    """What each keeper of a rank's parity is to be sent, and nobody else.

    Args:
        words: uint64, the rank's Deltas in the order of their blocks.
        edges: k + 1 words; the Deltas of block i lie in edges[i]..edges[i+1]-1.
        placement: who keeps what.
        rank: the rank.

    Returns:
        Keeper -> views of `words`, none of them empty; they overlap where r > 1.
    """
    found: dict[int, Words] = {}
    for keeper, blocks in placement.recipients(rank).items():
        message = words[edges[blocks.start] : edges[blocks.stop]]
        if len(message):
            found[keeper] = message
    return found


def parted(words: Words, lengths: Sequence[int]) -> dict[int, Words]:
    """Messages that lie end to end (uint64 [sum(lengths)]), by sender; views, none of them empty."""
    edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return {sender: words[a:b] for sender, (a, b) in enumerate(edges) if a < b}


class Scratch:
    """Memory that every step writes anew: to be given fresh pages costs more than to fill them."""

    def __init__(self) -> None:
        self._words = np.empty(0, np.uint64)

    @property
    def size_bytes(self) -> int:
        """What it takes."""
        return self._words.nbytes

    def room(self, words: int) -> Words:
        """uint64 [words] of any content; what an earlier call gave is overwritten with it."""
        if words > len(self._words):
            self._words = np.empty(words + words // 4, np.uint64)
        return self._words[:words]


def unpack(message: Words) -> Iterator[Delta]:
    """Reads a message back; the Deltas are views of it.

    What comes here was sent by another process, or lay in memory for long: nothing is taken on trust. Where
    the offsets point to is checked by `ParityBlocks.check`, who knows the blocks.

    Args:
        message: uint64, Deltas end to end.

    Raises:
        InconsistentArenas: no message looks like this.
    """
    signed = message.view(np.int64)
    at = 0
    while at < len(message):
        head = signed[at : at + HEAD_WORDS].tolist()
        block, records, width = head if len(head) == HEAD_WORDS else (0, -1, 0)
        if records < 0 or not 0 <= width <= len(message) or at + size_words(records, width) > len(message):
            raise InconsistentArenas(
                f"word {at} of a message of {len(message)} words says that {records} records of {width} "
                f"words follow: no rank sends that; memory or network are damaged, or the ranks run "
                f"different versions of ecemb"
            )
        at += HEAD_WORDS
        offsets, at = signed[at : at + records], at + records
        words = message[at : at + records * width].reshape(records, width)
        at += records * width
        yield Delta(block, offsets, words)
