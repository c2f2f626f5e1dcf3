"""What changed, as it travels from a rank's rows to the keepers of its parity.

A *delta* is old XOR new of a record's words. The deltas of one data block, for one of its parity rows, make
a `Delta`: word offsets in the block, and the words. A message is a run of Deltas to one keeper, flat in
8-byte words, so that it can lie in the keeper's inbox as it came.

Must not know: the network, parity, journals.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from .errors import InconsistentArenas
from .placement import Placement

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

HEAD_WORDS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """Changes of one data block of one rank, meant for one parity row.

    Attributes:
        block: the sender's data block, 0..k-1, which is the coefficient's column.
        row: the parity row, 0..r-1.
        offsets: int64 [m], first word of each record, counted from the block's start.
        starts: int64 [m + 1], where each record's words lie in `words`.
        words: uint64 [starts[-1]], old XOR new.
    """

    block: int
    row: int
    offsets: Ids
    starts: Ids
    words: Words

    @property
    def size_words(self) -> int:
        """Words that this Delta takes in a message."""
        return HEAD_WORDS + 2 * len(self.offsets) + 1 + len(self.words)


def split(addresses: Ids, starts: Ids, words: Words, bounds: Sequence[int]) -> Iterator[Delta]:
    """Cuts changed records, in ascending order of address, at the bounds of the data blocks.

    Args:
        addresses: int64 [m] ascending, first word of each record in the row space.
        starts: int64 [m + 1], where each record's words lie in `words`.
        words: uint64 [starts[-1]], old XOR new. The Deltas are views of it.
        bounds: k + 1 addresses of the blocks' bounds.

    Yields:
        A Delta for every block that has changes, with `row` 0.
    """
    edges = np.searchsorted(addresses, np.asarray(bounds, np.int64)).tolist()
    for block, (a, b) in enumerate(itertools.pairwise(edges)):
        if a < b:
            first, last = int(starts[a]), int(starts[b])
            offsets = addresses[a:b] - bounds[block]
            yield Delta(block, 0, offsets, starts[a : b + 1] - first, words[first:last])


def address(deltas: Iterable[Delta], placement: Placement, rank: int) -> list[list[Delta]]:
    """Sorts a rank's Deltas by the ranks that keep their parity: r copies of each, and to nobody else.

    Returns:
        One list for each rank of the world, in order.
    """
    outgoing: list[list[Delta]] = [[] for _ in placement.positions]
    for delta in deltas:
        for row, keeper in enumerate(placement.keepers(rank, delta.block)):
            outgoing[keeper].append(dataclasses.replace(delta, row=row))
    return outgoing


class Scratch:
    """Memory that every step writes anew: to be given fresh pages costs more than to fill them."""

    def __init__(self) -> None:
        self._words = np.empty(0, np.uint64)

    def room(self, words: int) -> Words:
        """uint64 [words] of any content; what an earlier call gave is overwritten with it."""
        if words > len(self._words):
            self._words = np.empty(words + words // 4, np.uint64)
        return self._words[:words]


def pack(messages: Sequence[Sequence[Delta]], scratch: Scratch | None = None) -> tuple[Words, list[int]]:
    """Lays messages out one after another.

    Args:
        messages: one for each rank.
        scratch: where to lay them; in memory of their own when None.

    Returns:
        The words of all messages, and the number of words of each.
    """
    lengths = [sum(delta.size_words for delta in message) for message in messages]
    out = (scratch or Scratch()).room(sum(lengths))
    signed = out.view(np.int64)
    at = 0
    for message in messages:
        for delta in message:
            m = len(delta.offsets)
            signed[at : at + HEAD_WORDS] = (delta.block, delta.row, m, len(delta.words))
            at += HEAD_WORDS
            signed[at : at + m] = delta.offsets
            signed[at + m : at + 2 * m + 1] = delta.starts
            at += 2 * m + 1
            out[at : at + len(delta.words)] = delta.words
            at += len(delta.words)
    return out, lengths


def unpack(message: Words) -> Iterator[Delta]:
    """Reads a message back; the Deltas are views of it.

    What comes here was sent by another process, or lay in memory for long: nothing is taken on trust. Where
    the offsets point to is checked by `ParityBlocks.check`, who knows the blocks.

    Args:
        message: uint64, as `pack` laid it out for one keeper.

    Raises:
        InconsistentArenas: no message looks like this.
    """
    signed = message.view(np.int64)
    at = 0
    while at < len(message):
        head = signed[at : at + HEAD_WORDS].tolist()
        block, row, m, count = head if len(head) == HEAD_WORDS else (0, 0, -1, 0)
        if m < 0 or count < 0 or at + HEAD_WORDS + 2 * m + 1 + count > len(message):
            raise InconsistentArenas(
                f"word {at} of a message of {len(message)} words says that {m} records of {count} words "
                f"follow: no rank sends that; memory or network are damaged, or the ranks run different "
                f"versions of ecemb"
            )
        at += HEAD_WORDS
        offsets, starts = signed[at : at + m], signed[at + m : at + 2 * m + 1]
        at += 2 * m + 1
        yield Delta(block, row, offsets, starts, message[at : at + count])
        at += count
