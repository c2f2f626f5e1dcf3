"""The collectives that the protocol uses, each with a name and a deadline.

The only module that calls torch.distributed's collectives. A rank that waits for a dead peer notices it at
once; ranks that wait for others learn it from the failure detector. A `Transport` runs over gloo, from host
memory; deltas to keepers of parity may go over a `Fabric` instead, from a device's memory.

A `PeerFailure` allows no conclusion about what other ranks received.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import PeerFailure
from ..kernels.contract import Words
from .channels import Channels, Mesh, Notes
from .dissemination import MOST_ROUNDS, Rounds
from .error_file import follows
from .fabric import Fabric, Waits

Ints = NDArray[np.int64]
T = TypeVar("T")

logger: logging.Logger = logging.getLogger("ecemb")

_MOST_BYTES = 1 << 30  # of one rank in `gather`; a larger size is an error
_NUMBERS = 1 << 20  # of one kind before they repeat


class Kind(enum.IntEnum):
    """What notes are about, beside their number and round."""

    STATUS = 0
    VOTE = 1
    BARRIER = 2


class Transport(Waits):
    """This rank's end of the control group.

    Args:
        group: a gloo process group, for this object alone; that of the protocol has all ranks.
        timeout_s: deadline of every collective.

    Attributes:
        fabric: carries exchanges; None: they use the control group.
        notes: carry the rounds of disseminations; with no rank, before they are connected.
        streams: carry swaps; with no rank, before they are connected.
        sent_bytes: in exchanges and swaps, and point to point.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        # Messages go to gloo itself: the operators of a group, which choose a backend for each, cost more.
        self._gloo: Any = group._get_backend(torch.device("cpu"))  # pyright: ignore[reportPrivateUsage]
        self.fabric: Fabric | None = None
        self.streams = Mesh([], self.rank, self.world_size, timeout_s)
        self.notes = Notes(self.streams)
        self._exchanges = self._barriers = 0
        self.sent_bytes: int = 0

    def all_to_all(self, send: Ints, what: str) -> Ints:
        """Sends row p of `send` to rank p. All ranks.

        Args:
            send: int64 [world_size, h], read.
            what: names the wait in the error.

        Returns:
            int64 [world_size, h]; row p came from rank p.

        Raises:
            PeerFailure: a peer died or did not come before the deadline.
        """
        received = np.empty_like(send)
        self._all_to_all(send.reshape(-1), received.reshape(-1), None, None, what)
        return received

    def exchange(
        self,
        send: Mapping[int, Words],
        out: Mapping[int, Words],
        what: str,
    ) -> None:
        """Sends messages to some ranks, and receives those that others send here. All ranks.

        Remains of an interrupted exchange are never taken for another exchange's.

        Args:
            send: rank -> uint64, contiguous, read; they may overlap.
            out: rank -> uint64, contiguous, overwritten: as long as what that rank sends.
            what: names the wait in the error.

        Raises:
            PeerFailure: one of these peers died or did not come before the deadline; `out` holds anything.
        """
        if self.fabric is not None:
            self.sent_bytes += sum(words.nbytes for words in send.values())
            self.fabric.exchange(send, out, what)
            return
        self._exchanges += 1
        tag = 1 + self._exchanges % _NUMBERS  # other messages have tag 0
        received = [self.expect(words, source, what, tag) for source, words in out.items()]
        sent = [self.send(words, to, what, tag) for to, words in send.items()]
        for wait in (*received, *sent):
            wait()

    def swap(self, send: Mapping[int, Words], heads: Mapping[int, Words]) -> Channels:
        """Prepares the messages of a transaction to and from some ranks; `Channels.run` moves them.

        Args:
            send: rank -> uint64, contiguous, read until it is sent.
            heads: rank -> uint64, contiguous, overwritten with the first words of its message.
        """
        self.sent_bytes += sum(words.nbytes for words in send.values())
        channels = self.streams.channels()
        for to, words in send.items():
            channels.send(to, words)
        channels.expect(heads)
        return channels

    def tag(self, kind: Kind, number: int) -> int:
        """The tag of a note about something; with a round's number added, that of a note of this round.

        Args:
            kind: what it is about.
            number: how many of the kind came before; numbers 2^20 apart share a tag.
        """
        return (number % _NUMBERS * len(Kind) + kind) * MOST_ROUNDS

    def vote(self, yes: bool, what: str) -> list[bool]:
        """Sends one bit from every rank to every rank. All ranks; on return all ranks have voted."""
        return [told == b"\1" for told in self.gather(b"\1" if yes else b"\0", what)]

    def barrier(self, what: str) -> None:
        """Returns when all ranks have called it. All ranks."""
        self._barriers += 1
        tag, nothing = self.tag(Kind.BARRIER, self._barriers), np.zeros(1, np.int64)
        Rounds(self, tag, lambda own, _: own, lambda _: False).run(nothing, what)

    def gather(self, data: bytes, what: str) -> list[bytes]:
        """Returns the bytes of all ranks, in the order of ranks. All ranks.

        Raises:
            PeerFailure: a peer died or did not come before the deadline.
        """
        sizes = self.all_to_all(np.full((self.world_size, 1), len(data), np.int64), what)[:, 0]
        if int(sizes.min()) < 0 or int(sizes.max()) > _MOST_BYTES:
            raise PeerFailure(
                f"the ranks announce {sizes.tolist()} bytes in {what}, and none may send more than "
                f"{_MOST_BYTES}: the network is damaged, or the ranks run different versions of ecemb"
            )
        padded = data + bytes(-len(data) % 8)
        words = (-(-sizes // 8)).tolist()
        send = np.frombuffer(bytearray(padded * self.world_size), np.uint64)
        out = np.empty(sum(words), np.uint64)
        self._all_to_all(
            send.view(np.int64),
            out.view(np.int64),
            [len(padded) // 8] * self.world_size,
            words,
            what,
        )
        edges = np.cumsum([0, *words]).tolist()
        return [
            out[a:b].tobytes()[:size]
            for a, b, size in zip(edges[:-1], edges[1:], sizes.tolist(), strict=True)
        ]

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Runs `act` on every rank; if it fails on one, it fails on all. All ranks.

        Raises:
            EcembError: this rank's own error, or `PeerFailure` naming the ranks that failed and why.
        """
        try:
            result = act()
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}".encode() or b"?", what)
            raise
        told = self.gather(b"", what)
        failed = {rank: text.decode(errors="replace") for rank, text in enumerate(told) if text}
        if failed:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            text = f"{what} failed on {len(failed)} of {self.world_size} ranks: {reasons}"
            raise follows(PeerFailure(text), next(iter(failed.values())).partition(":")[0])
        return result

    def close(self) -> None:
        """Ends the control group, and the fabric. All ranks, each for itself."""
        for mesh in (self.streams, self.notes.mesh):
            mesh.close()
        if self.fabric is not None:
            self.fabric.close()
        super().close()

    def hang_up(self) -> None:
        """Ends all waits for notes and swaps, of any thread, here and at the other ends."""
        for mesh in (self.streams, self.notes.mesh):
            mesh.hang_up()

    def send_note(self, words: Words, to: int, what: str, tag: int) -> None:
        """Sends words to a rank that is linked for notes; see `Notes.send`."""
        self.sent_bytes += words.nbytes
        self.notes.send(words, to, what, tag)

    def receive_note(self, out: Words, source: int, what: str, tag: int) -> None:
        """Waits for words of a rank that is linked for notes; see `Notes.receive`."""
        self.notes.receive(out, source, what, tag)

    def send(self, words: Words, to: int, what: str, tag: int = 0) -> Callable[[], None]:
        """Starts sending words to one rank; call the result to wait until `words` may be reused."""
        self.sent_bytes += words.nbytes
        tensor = torch.from_numpy(words.view(np.int64))
        work: dist.Work = self.started(lambda: self._gloo.send([tensor], to, tag), what)
        return lambda: self.ended(work, what)

    def expect(self, out: Words, source: int, what: str, tag: int = 0) -> Callable[[], None]:
        """Starts receiving words (uint64, contiguous, overwritten) from one rank; call the result to wait.

        gloo announces each message and waits for its receiver, unless that receives already. Receivers of
        small messages therefore start early.
        """
        tensor = torch.from_numpy(out.view(np.int64))
        work: dist.Work = self.started(lambda: self._gloo.recv([tensor], source, tag), what)
        return lambda: self.ended(work, what)

    def _all_to_all(
        self,
        send: Ints,
        out: Ints,
        send_words: Sequence[int] | None,
        out_words: Sequence[int] | None,
        what: str,
    ) -> None:
        work = self.started(
            lambda: dist.all_to_all_single(
                torch.from_numpy(out),
                torch.from_numpy(send),
                None if out_words is None else list(out_words),
                None if send_words is None else list(send_words),
                group=self._group,
                async_op=True,
            ),
            what,
        )
        self.ended(work, what)
