"""Streams: the ranks' own connections for deltas, to those that keep each other's parity.

In each transaction a rank sends a message to each of its keepers, and receives one from each rank whose
parity it keeps: a `Swap`. The thread that swaps moves the bytes itself, from the memory where they are to the
memory where they belong; gloo would move them in a thread of its own, after it has announced each receiver.
All messages are sent and received at once, so no order of ranks can block.

Must not know: what a message says, except that its receiver learns its size from its first words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..kernels.contract import Words
from .channels import Channels, Lost
from .interruptions import to_the_end
from .links import Link, kept_by


class Swap:
    """The messages of one transaction, on their way. One thread; nothing is sent before `meet`.

    An exception of a signal handler waits until the call is over, as the other ranks wait for it.

    Args:
        channels: with all ranks of `send` and `heads`.
        send: rank -> uint64, contiguous, read until the swap is over.
        heads: rank -> uint64, contiguous, overwritten with the first words of its message.
    """

    def __init__(self, channels: Channels, send: Mapping[int, Words], heads: Mapping[int, Words]) -> None:
        self._channels, self._is_resting = channels, False
        for rank, words in send.items():
            channels.send(rank, words)
        for rank, words in heads.items():
            channels.expect(rank, words)

    def meet(self) -> None:
        """Returns when all heads are there; meanwhile it sends.

        Raises:
            Lost: a rank has ended, or a wait has timed out.
            BaseException: that of a signal handler, when all heads are there.
        """
        to_the_end(lambda: self._channels.run(all_sent=False), Lost)

    def finish(self, rests: Mapping[int, Words]) -> None:
        """Receives the rest of the messages, and returns when all is sent as well.

        May be called again, as `discard` may: what was begun goes on.

        Args:
            rests: rank -> uint64, contiguous, overwritten with what follows its head.

        Raises:
            Lost: a rank has ended, or a wait has timed out.
            BaseException: that of a signal handler, when all is over.
        """
        if not self._is_resting:
            for rank, words in rests.items():
                self._channels.expect(rank, words)
        self._rest()

    def discard(self, sizes: Mapping[int, int]) -> None:
        """`finish`, where the rest of the messages is not wanted: it takes no memory.

        Args:
            sizes: rank -> words that follow its head.

        Raises:
            As `finish`.
        """
        if not self._is_resting:
            for rank, size in sizes.items():
                self._channels.skip(rank, 8 * size)
        self._rest()

    def _rest(self) -> None:
        self._is_resting = True
        to_the_end(self._channels.run, Lost)


class Streams:
    """This rank's connections for deltas.

    Args:
        links: with other ranks, by their number; consumed. Nothing is sent before all ends are `Streams`.
        timeout_s: deadline of a wait.
    """

    def __init__(self, links: Sequence[Link], timeout_s: float) -> None:
        self._sockets = {link.peer: link.release() for link in links}
        self._end = kept_by(self, list(self._sockets.values()))
        self._timeout_s = timeout_s

    def swap(self, send: Mapping[int, Words], heads: Mapping[int, Words]) -> Swap:
        """The messages of a transaction; see `Swap`."""
        return Swap(Channels(self._sockets, self._timeout_s), send, heads)

    def close(self) -> None:
        """Ends all connections. May be called twice."""
        self._end()
