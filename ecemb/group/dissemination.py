"""Folds over all ranks in ceil(log2 N) rounds: dissemination (docs/protocol.md, 1.2).

In round j a rank sends what it has folded so far to rank + 2^j, and waits for what rank - 2^j sends, modulo
N. The fold is idempotent, so it is right for every N. A rank sends on only what it has received: who has the
last round has a value that all ranks put something into. (Hensgen, Finkel and Manber, "Two algorithms for
barrier synchronization", 1988.)

Must not know what is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import PeerFailure
from ..kernels.contract import Words
from .interruptions import to_the_end

Ints = NDArray[np.int64]

MOST_ROUNDS = 32


class Wait(Protocol):
    """Waits for a message that is on its way."""

    def __call__(self, what: str = "", /) -> None:
        """Returns when it is there; `what` names the wait in errors, in place of the name from the start."""
        ...


class Wires(Protocol):
    """What carries the messages, such as a `Transport`. A message is found by its sender and its tag."""

    rank: int
    world_size: int

    def send(self, words: Words, to: int, what: str, tag: int) -> Callable[[], None]:
        """Starts sending; the result waits until it is received."""
        ...

    def expect(self, out: Words, source: int, what: str, tag: int) -> Wait:
        """Starts receiving; the result waits for the message."""
        ...

    def say(self, words: Words, to: int, tag: int) -> None:
        """Sends a message that the other rank may never receive."""
        ...


class Rounds:
    """One dissemination on this rank.

    The constructor starts to receive, so that a message never waits for its receiver: the earlier, the less
    it costs. `run` goes through the rounds. An exception that a signal handler raises there, such as
    KeyboardInterrupt, waits until the last round: the others would wait for the rounds of a rank that leaves
    between them. Only the end of a peer ends the rounds early, and that ends the other ranks too.

    Args:
        wires: the messages' carrier.
        tag: of round 0; round j has `tag` + j.
        size: m, the numbers of a value.
        fold: (own, received) -> folded, a new array; associative, commutative and idempotent.
        is_last: whether a received value ends this rank's rounds: it is sent on in all later ones, and no
            round is waited for.

    Attributes:
        value: int64 [m], what is folded so far; zeros before `run`.
        is_over: whether `value` is what all ranks have, or ended the rounds.
    """

    def __init__(
        self,
        wires: Wires,
        tag: int,
        size: int,
        fold: Callable[[Ints, Ints], Ints],
        is_last: Callable[[Ints], bool],
    ) -> None:
        self.is_over: bool = False
        self._wires, self._tag, self._fold, self._is_last, self._what = wires, tag, fold, is_last, ""
        self._round = 0
        self._sent: list[Callable[[], None]] = []
        self.value, *self._heard = np.zeros((1 + rounds(wires.world_size), size), np.int64)
        self._waits = [
            wires.expect(room.view(np.uint64), self._peer(-(1 << j)), "an agreement", tag + j)
            for j, room in enumerate(self._heard)
        ]

    def run(self, value: Ints, what: str) -> None:
        """Goes through all rounds.

        Args:
            value: int64 [m], what this rank puts in.
            what: names the wait in errors.

        Raises:
            PeerFailure: a peer died: `is_over` is false.
            BaseException: that of a signal handler, after the last round.
        """
        self.value, self._what = value, what
        to_the_end(self._proceed, PeerFailure)

    def _proceed(self) -> None:
        """From where an interruption left off; a message that is sent twice does no harm."""
        while not self.is_over and self._round < len(self._waits):
            j = self._round
            if len(self._sent) == j:
                sent = self.value.view(np.uint64)
                self._sent.append(self._wires.send(sent, self._peer(1 << j), self._what, self._tag + j))
            self._waits[j](self._what)
            told = self._heard[j]
            if self._is_last(told):
                self.value = told
                say(self._wires, self._tag, told, range(j + 1, len(self._waits)))
                self.is_over = True
                return
            self.value, self._round = self._fold(self.value, told), j + 1
        for wait in self._sent:  # who receives them has put something in, and so waits for them
            wait()
        self.is_over = True

    def _peer(self, offset: int) -> int:
        return (self._wires.rank + offset) % self._wires.world_size


def rounds(world_size: int) -> int:
    """The number of rounds, ceil(log2 N)."""
    return (world_size - 1).bit_length()


def say(wires: Wires, tag: int, value: Ints, turns: Iterable[int] | None = None) -> None:
    """Sends a value to the receivers of some rounds, or of all, and waits for none of them.

    Args:
        wires: the messages' carrier.
        tag: of round 0.
        value: int64 [m].
        turns: the rounds; None: all.
    """
    for j in range(rounds(wires.world_size)) if turns is None else turns:
        wires.say(value.view(np.uint64), (wires.rank + (1 << j)) % wires.world_size, tag + j)
