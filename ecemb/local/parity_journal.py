"""The record of how far parity has changed in a transaction: what a redo needs beside the inbox.

The order of stores is that of docs/protocol.md, 1.1: old words, the row's number, the row. Must not know: the
network, the decision.
"""

from __future__ import annotations

import numpy as np

from ..arena.arena import Arena
from ..arena.header import NONE, Word
from ..coding.parity import Received
from ..coding.rows import WORD_BYTES
from ..errors import InconsistentArenas
from ..kernels.contract import Ids, Words


class ParityJournal:
    """The old words of the parity row that is changing, and of the row before it.

    A transaction's parity rows are numbered through the inbox's deltas, in their order. They change one after
    another: the journal names the row that is changing, or has changed last. Rows with even numbers have one
    place for their old words, and those with odd numbers the other.

    Args:
        arena: holds the region "parity_journal" and the words `parity_label`, `parity_row`.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    @property
    def label(self) -> int:
        """The transaction under which parity has begun to change."""
        return self._arena.get(Word.PARITY_LABEL)

    @property
    def row(self) -> int:
        """The row that it names; NONE before the first."""
        return self._arena.get(Word.PARITY_ROW)

    @property
    def mark(self) -> Ids:
        """The memory of `row`, int64 [1], for the kernel that changes rows."""
        return self._arena.word(Word.PARITY_ROW)

    def reserve(self, received: Received) -> None:
        """Backs places for the rows of a transaction's deltas.

        Raises:
            NotEnoughSpace: the journal can't grow.
        """
        self._arena.reserve("parity_journal", 2 * _widest(received) * WORD_BYTES, spare_bytes=0)

    def places(self, received: Received) -> Words:
        """The places for old words, which `reserve` has backed: uint64 [2, words of the widest row]."""
        words = _widest(received)
        region = self._arena.region("parity_journal")
        return region[: 2 * words * WORD_BYTES].view(np.uint64).reshape(2, words)

    def begin(self, transaction: int) -> None:
        """Names no row, then the transaction under which parity changes from here on."""
        self._arena.set(Word.PARITY_ROW, NONE)
        self._arena.set(Word.PARITY_LABEL, transaction)

    def finished(self, received: Received) -> int:
        """The rows that have changed, all of the deltas' at most; the last of them perhaps by half.

        Raises:
            InconsistentArenas: the deltas have no such row.
        """
        rows = sum(len(delta.offsets) for _, delta in received)
        if not NONE <= self.row < rows:
            raise InconsistentArenas(
                f"the parity journal names row {self.row}, and the inbox has {rows}: the arena's memory is "
                f"damaged. {self._arena.way_out}"
            )
        return self.row + 1


def _widest(received: Received) -> int:
    return max((delta.words.shape[1] for _, delta in received), default=0)
