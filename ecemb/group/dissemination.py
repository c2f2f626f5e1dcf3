"""Folds over all ranks in ceil(log2 N) rounds: dissemination (docs/protocol.md, 1.2).

In round j a rank sends what it has folded so far to rank + 2^j, and waits for what rank - 2^j sends, modulo
N. The fold is idempotent, so it is right for every N. A rank sends on only what it has received: who has the
last round has a value that all ranks put something into. (Hensgen, Finkel and Manber, "Two algorithms for
barrier synchronization", 1988.)

Must not know what is folded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import PeerFailure
from ..kernels.contract import Words
from ..kernels.threads import to_the_end

Ints = NDArray[np.int64]

MOST_ROUNDS = 32

logger: logging.Logger = logging.getLogger("ecemb")


class Wires(Protocol):
    """What carries notes, such as a `Transport`. A note is found by its sender and its tag."""

    rank: int
    world_size: int

    def send_note(self, words: Words, to: int, what: str, tag: int) -> None:
        """Sends, and waits for no receiver."""
        ...

    def receive_note(self, out: Words, source: int, what: str, tag: int) -> None:
        """Waits for a note, also once more for the same one."""
        ...


class Rounds:
    """One dissemination on this rank.

    An exception that a signal handler raises in `run`, such as KeyboardInterrupt, waits until the last round:
    the others would wait for the rounds of a rank that leaves between them. Only the end of a peer ends the
    rounds early, and that ends the other ranks too.

    Args:
        wires: the notes' carrier.
        tag: of round 0; round j has `tag` + j.
        fold: (own, received) -> folded, a new array; associative, commutative and idempotent.
        is_last: whether a received value ends this rank's rounds: it is sent on in all later ones, and no
            round is waited for.

    Attributes:
        value: int64 [m], what is folded so far; empty before `run`.
        is_over: whether `value` is what all ranks have, or ended the rounds.
    """

    def __init__(
        self,
        wires: Wires,
        tag: int,
        fold: Callable[[Ints, Ints], Ints],
        is_last: Callable[[Ints], bool],
    ) -> None:
        self.is_over: bool = False
        self.value = np.zeros(0, np.int64)
        self._wires, self._tag, self._fold, self._is_last = wires, tag, fold, is_last
        self._round = self._sent = 0

    def run(self, value: Ints, what: str) -> None:
        """Goes through all rounds.

        Args:
            value: int64 [m], what this rank puts in.
            what: names the wait in errors.

        Raises:
            PeerFailure: a peer died: `is_over` is false.
            BaseException: that of a signal handler, after the last round.
        """
        self.value = value
        to_the_end(partial(self._proceed, what), PeerFailure)

    def _proceed(self, what: str) -> None:
        """From where an interruption left off; a note that is sent twice does no harm."""
        wires, heard = self._wires, np.zeros_like(self.value)
        while not self.is_over and self._round < rounds(wires.world_size):
            step, tag = 1 << self._round, self._tag + self._round
            if self._sent == self._round:
                wires.send_note(self.value.view(np.uint64), (wires.rank + step) % wires.world_size, what, tag)
                self._sent += 1
            wires.receive_note(heard.view(np.uint64), (wires.rank - step) % wires.world_size, what, tag)
            if self._is_last(heard):
                self.value = heard
                say(wires, self._tag, heard, range(self._round + 1, rounds(wires.world_size)))
                break
            self.value, self._round = self._fold(self.value, heard), self._round + 1
        self.is_over = True


def rounds(world_size: int) -> int:
    """The number of rounds, ceil(log2 N)."""
    return (world_size - 1).bit_length()


def say(wires: Wires, tag: int, value: Ints, turns: Iterable[int] | None = None) -> None:
    """Sends a value to the receivers of some rounds, or of all, which may have ended; waits for none of them.

    Args:
        wires: the notes' carrier.
        tag: of round 0.
        value: int64 [m].
        turns: the rounds; None: all.
    """
    for j in range(rounds(wires.world_size)) if turns is None else turns:
        to = (wires.rank + (1 << j)) % wires.world_size
        try:
            wires.send_note(value.view(np.uint64), to, "leaving", tag + j)
        except PeerFailure as error:
            logger.debug("rank %d is not told: %s", to, error)
