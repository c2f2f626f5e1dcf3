"""Requests: the ranks' own connections over which one asks others for words, and they answer.

A thread sends and receives at once, from and to its own memory, so that two ranks that both send don't wait
for each other. What follows, and how much, a receiver learns from what it has received.

Must not know: what a request asks for.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ..kernels.contract import Words
from .channels import Channels, Lost
from .error_file import lost_peer
from .links import Link, kept_by


class Requests:
    """This rank's connections with those that it asks, or that ask it.

    Args:
        links: with these ranks, by their number; consumed. Nothing is sent before all ends are `Requests`.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: deadline of a wait.

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        timeout_s: deadline of a wait.
    """

    def __init__(self, links: Sequence[Link], rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._sockets = {link.peer: link.release() for link in links}
        self._end = kept_by(self, list(self._sockets.values()))

    def dialogue(self, ranks: Sequence[int]) -> Dialogue:
        """The end of some connections, for one thread; no other thread has one of them."""
        return Dialogue(self, {rank: self._sockets[rank] for rank in ranks})

    def hang_up(self) -> None:
        """Ends all waits, here and at the other ends; `close` follows. May be called twice."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends all connections, when no thread waits. May be called twice."""
        self._end()


class Dialogue:
    """One thread's messages to and from some ranks.

    Args:
        of: whose connections these are.
        sockets: by rank; they must last as long.
    """

    def __init__(self, of: Requests, sockets: Mapping[int, socket.socket]) -> None:
        self._of, self._channels = of, Channels(sockets, of.timeout_s)
        self._unsent: dict[int, list[Words]] = {}

    def say(self, words: Words, to: int) -> None:
        """Has words (uint64 [m], contiguous) sent by the next `hear`, after what was said before.

        They must not change until a `hear` has sent them.
        """
        self._unsent.setdefault(to, []).append(words)

    def hear(self, outs: Mapping[int, Words], what: str, *, all_sent: bool = True) -> None:
        """Returns when `outs` are received and, with `all_sent`, all that was said is sent.

        A rank that has asked for more than fits on the way must not wait until all of it is sent: whom it
        asks reads no further request before its answer is on its way, and an answer is long too.

        Args:
            outs: rank -> uint64, contiguous, overwritten with what comes next from there.
            what: names the wait in the error.
            all_sent: if not, the next `hear` sends the rest.

        Raises:
            PeerFailure: a rank has ended, or nothing came or went before the deadline.
        """
        began = time.monotonic()
        for rank, parts in self._unsent.items():
            rest = self._channels.unsent(rank)
            if len(rest):
                parts = [rest, *(words.view(np.uint8) for words in parts)]
            self._channels.send(rank, parts[0] if len(parts) == 1 else np.concatenate(parts))
        self._unsent = {}
        for rank, words in outs.items():
            self._channels.expect(rank, words)
        try:
            self._channels.run(all_sent=all_sent)
        except Lost as error:
            of = self._of
            waited_s = time.monotonic() - began
            raise lost_peer(of.rank, of.world_size, what, waited_s, of.timeout_s, error) from error
