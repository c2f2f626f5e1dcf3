"""The first words of a message of deltas, and how many: one message of a size known before.

A message is cheapest if its receiver has started to receive, and so knows its size. Therefore the head of
deltas, which says how long they are, and the first of them travel together: all, as long as they are about
as many as in the step before.

Owns how many words that is. Must not know: what a head is, the network.
"""

from __future__ import annotations

import numpy as np

from ..coding.delta import place
from ..kernels.contract import Words

MARK = -1
"""In the place of a size: there will be no deltas."""
MOST = 1 << 18
"""Words of the largest parcel, 2 MiB: what the announcement of a larger message costs doesn't matter."""
LEAST = 256
"""Words of the smallest parcel; a head always fits, as codes over GF(2^8) have fewer parity blocks."""
SPARE = 16
"""Room beyond the last message: a sixteenth of it, and `LEAST` words."""


class Parcel:
    """The first words of the messages from one rank to another.

    Both ranks change the room alike, by the last message. A parcel is always sent full: what is behind a
    message's end has no meaning.

    Attributes:
        room: words of a parcel.
    """

    def __init__(self) -> None:
        self.room: int = LEAST

    def cut(self, message: Words, around: Words) -> tuple[Words, Words]:
        """The parcel of a message, and the words that have to be sent apart.

        Args:
            message: uint64, read.
            around: the memory that the message is a view of. The parcel is a view of it as well, if enough
                words follow the message's first one; otherwise a copy.
        """
        at = place(message, around)
        if at + self.room <= len(around):
            return around[at : at + self.room], message[self.room :]
        words = np.zeros(self.room, np.uint64)
        words[: len(message)] = message[: self.room]
        return words, message[self.room :]

    def mark(self) -> Words:
        """A parcel that says: there will be no deltas."""
        words = np.zeros(self.room, np.uint64)
        words[:1].view(np.int64)[0] = MARK
        return words

    def fit(self, size: int) -> None:
        """Makes room for a message like the last one, of `size` words."""
        room = size + size // SPARE + LEAST
        self.room = room if room <= MOST else LEAST
