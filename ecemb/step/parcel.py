"""The size of a rank's deltas for another rank, with the first of them: one message of a size known before.

A message is cheapest if its receiver has started to receive, and so knows its size. Therefore the size and
the deltas that two ranks exchange in a step travel together, as long as these are about as many as in the
step before.

Owns what is in the message. Must not know: deltas, the network.
"""

from __future__ import annotations

import numpy as np

from ..coding.delta import place
from ..kernels.contract import Words

MARK = -1
"""In the place of a size: there will be no deltas."""
MOST = 1 << 18
"""Words of the largest room, 2 MiB: what the announcement of a larger message costs doesn't matter."""
SPARE, LEAST_SPARE = 16, 128
"""Room beyond the last message: a sixteenth of it, and as many words."""


class Parcel:
    """The size of a message of deltas, and its first words, between two ranks: as many as both have room for.

    Both ranks change the room alike, by the last message. A parcel is always sent full: what is behind a
    message's end has no meaning.
    """

    def __init__(self) -> None:
        self._memory = np.zeros(1, np.uint64)
        self._room = 0  # words beside the size
        self._words: Words | None = None  # a message where it lies, with its size before it

    @property
    def words(self) -> Words:
        """What is sent, and received: uint64 [1 + room]."""
        if self._words is None:
            if self._room >= len(self._memory):
                self._memory = np.zeros(1 + self._room + self._room // 8, np.uint64)
            self._words = self._memory[: 1 + self._room]
        return self._words

    @property
    def size(self) -> int:
        """Words of the whole message, or a mark."""
        return int(self.words[:1].view(np.int64)[0])

    @property
    def held_bytes(self) -> int:
        """Memory that this holds."""
        return self._memory.nbytes

    def pack(self, message: Words, *, whole: bool, around: Words | None = None) -> Words:
        """Writes the size of a message, and its first words.

        Args:
            message: uint64, read.
            whole: whether this rank sends the message; otherwise only the size.
            around: the memory that the message is a view of, with a free word before it, which is
                overwritten. The message is then sent from there, if enough words follow. None: copied.

        Returns:
            The words that have to be sent apart, a view of the message.
        """
        if whole and around is not None and len(message):
            at = place(message, around)
            if at + self._room <= len(around):
                self._words = around[at - 1 : at + self._room]
                self._words[0] = len(message)
                return message[self._room :]
        self._words = None
        self.words[0] = len(message)
        first = message[: self._room if whole else 0]
        self.words[1 : 1 + len(first)] = first
        return message[len(first) :] if whole else first

    def unpack_(self, message: Words) -> Words:
        """Writes the words that came with the size to the start of a message; returns the rest of it."""
        first = min(len(message), self._room)
        message[:first] = self.words[1 : 1 + first]
        return message[first:]

    def mark(self) -> Words:
        """A parcel of its own that says: there will be no deltas."""
        words = np.zeros(1 + self._room, np.uint64)
        words[:1].view(np.int64)[0] = MARK
        return words

    def fit(self) -> None:
        """Makes room for a message like the last one."""
        size = self.size
        room = size + size // SPARE + LEAST_SPARE
        self._room = room if room <= MOST else 0
        self._words = None
