"""The inbox: the deltas that other ranks sent for the parity of this keeper, which a redo needs.

A growing region of the arena, which two words of the header guard (docs/protocol.md, 1.1): complete before
`prepared` is stored. In front it has two words for each sender, its message's first word and its length.

Must not know: the network, the decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..arena.arena import Arena
from ..arena.header import NONE, Word
from ..coding.parity import Delta, sections, unpack
from ..coding.rows import WORD_BYTES
from ..errors import InconsistentArenas
from ..kernels.contract import Words


class Inbox:
    """The deltas of one transaction.

    Args:
        arena: holds the region "inbox" and the words `inbox_label`, `inbox_bytes`.
        senders: the ranks whose deltas come here.
        r: parity blocks in a stripe.
    """

    def __init__(self, arena: Arena, senders: Sequence[int], r: int) -> None:
        self._arena, self._senders, self._r = arena, tuple(senders), r
        self._front = 2 * len(self._senders)

    def receive(self, sizes: Mapping[int, int]) -> dict[int, Words]:
        """Makes room for messages; the transaction before is void here from now on.

        Args:
            sizes: sender -> what it announces, in words; not negative.

        Returns:
            Sender -> uint64 [size] in the arena, to be filled.

        Raises:
            NotEnoughSpace: the inbox can't grow.
        """
        self._arena.set(Word.INBOX_LABEL, NONE)
        places: dict[int, tuple[int, int]] = dict.fromkeys(self._senders, (self._front, 0))
        end = self._front
        for sender, size in sizes.items():
            places[sender], end = (end, size), end + size
        words = self._reserved(end)
        words.view(np.int64)[: self._front] = [number for place in places.values() for number in place]
        self._arena.set(Word.INBOX_BYTES, end * WORD_BYTES)
        return {sender: words[at : at + size] for sender, (at, size) in places.items() if size}

    def seal(self, transaction: int) -> None:
        """Records that every message of `transaction` has been received."""
        self._arena.set(Word.INBOX_LABEL, transaction)

    def deltas(self, transaction: int) -> list[tuple[int, Delta]]:
        """The received Deltas, each with its sender.

        Raises:
            InconsistentArenas: the inbox holds another transaction, or none.
        """
        if (label := self._arena.get(Word.INBOX_LABEL)) != transaction:
            raise InconsistentArenas(
                f"transaction {transaction} is prepared, but the inbox holds {label}: no failure leaves "
                f"this behind; the arena's memory is damaged. {self._arena.way_out}"
            )
        used = self._arena.filled("inbox", Word.INBOX_BYTES)
        words = used[: len(used) // WORD_BYTES * WORD_BYTES].view(np.uint64)
        numbers = words.view(np.int64)[: self._front].tolist()
        places = list(zip(numbers[::2], numbers[1::2], strict=False))
        if len(places) < len(self._senders) or not all(
            0 <= at <= at + size <= len(words) for at, size in places
        ):
            raise InconsistentArenas(
                f"the inbox of {len(words)} words claims messages at {places} (first word, length): the "
                f"arena's memory is damaged. {self._arena.way_out}"
            )
        return [
            (sender, delta)
            for sender, (at, size) in zip(self._senders, places, strict=True)
            for section in sections(words[at : at + size], self._r)
            for delta in unpack(section)
        ]

    def _reserved(self, words: int) -> Words:
        size_bytes = words * WORD_BYTES
        self._arena.reserve("inbox", size_bytes)
        return self._arena.region("inbox")[:size_bytes].view(np.uint64)
