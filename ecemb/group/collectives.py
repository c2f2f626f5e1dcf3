"""The collectives that the protocol uses, each with a name and a deadline.

The only module that calls torch.distributed's collectives. A rank that waits for a dead peer notices it at
once; ranks that wait for others learn it from the failure detector. A `Transport` runs over gloo, from host
memory; deltas to keepers of parity may go over a `Fabric` instead, from a device's memory.

A `PeerFailure` allows no conclusion about what other ranks received.
"""

from __future__ import annotations

import datetime
import enum
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import EcembError, NotEnoughSpace, PeerFailure
from ..kernels.contract import Words
from .dissemination import MOST_ROUNDS, Rounds, Wait
from .error_file import follows
from .whereabouts import Whereabouts

Ints = NDArray[np.int64]
T = TypeVar("T")

logger: logging.Logger = logging.getLogger("ecemb")

_MOST_BYTES = 1 << 30  # of one rank in `gather`; a larger size is an error
_NUMBERS = 1 << 20  # of one kind before they repeat
_EXCHANGES = 1 << 28  # tags of exchanges begin here, behind those of all kinds; other messages have tag 0


class Kind(enum.IntEnum):
    """What messages are about, beside their number and round."""

    STATUS = 0
    SIZE = 1
    DELTAS = 2
    VOTE = 3
    BARRIER = 4
    REQUEST = 5
    ANSWER = 6


class _Waits:
    """Waits for the work of a group, each time with a name and a deadline."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self._group = group
        self._timeout_s = timeout_s
        self._deadline = datetime.timedelta(seconds=timeout_s)
        self.whereabouts = Whereabouts()

    def close(self) -> None:
        """Ends the group. All ranks, each for itself."""
        dist.destroy_process_group(self._group)

    def _started(self, start: Callable[[], T | None], what: str) -> T:
        try:
            work = start()
        except RuntimeError as error:
            raise self._failure(what, 0.0, error) from error
        if work is None:
            raise EcembError(f"rank {self.rank} is not in the group that it uses for {what}")
        return work

    def _finish(self, work: dist.Work, what: str) -> None:
        """Waits for `work`; again, if a signal's handler raised when it had just ended."""
        if work.is_completed():
            return
        began = time.monotonic()
        try:
            with self.whereabouts.waiting():
                work.wait(self._deadline)  # with it NCCL's wait blocks the host
            if not work.is_completed():
                raise RuntimeError("the wait has ended before it")
        except RuntimeError as error:
            raise self._failure(what, time.monotonic() - began, error) from error

    def _failure(self, what: str, waited_s: float, error: RuntimeError) -> PeerFailure:
        text = (
            f"rank {self.rank} of {self.world_size} lost a peer in {what} after {waited_s:.1f} s "
            f"(deadline {self._timeout_s:.0f} s): {str(error).splitlines()[0]}; end this process, so "
            f"that torchrun restarts the job from its arenas (or raise timeout=, if the peer is only slow)"
        )
        return follows(PeerFailure(text))


class Fabric(_Waits):
    """Messages from one device's memory to another's, over a group with a backend such as NCCL.

    All ranks, once: the constructor makes the group's connections, because point-to-point messages between
    some of the ranks may not be a group's first messages (`torch.distributed.batch_isend_irecv`).

    Args:
        group: a process group of all ranks, for this object alone.
        device: a device of this rank alone, for sending and receiving.
        timeout_s: deadline of every exchange.

    Raises:
        PeerFailure: the ranks can't reach each other.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        self.device = device
        self._room = torch.empty(0, dtype=torch.int64, device=device)
        here = torch.zeros(1, device=device)
        what = "connecting the devices"
        with self._on_device():
            self._finish(self._started(lambda: dist.all_reduce(here, group=group, async_op=True), what), what)

    def exchange(self, send: Mapping[int, Words], out: Mapping[int, Words], what: str) -> None:
        """See `Transport.exchange`. The messages in `out` are in host memory when this returns.

        The device's current stream is waited for.

        Raises:
            NotEnoughSpace: the device has no room for the messages; none was sent from here.
            PeerFailure: as for `Transport.exchange`.
        """
        messages = [*send.values(), *out.values()]
        if not messages:
            return
        sizes = [len(words) for words in messages]
        parts = self._taken(sum(sizes), what).split(sizes)
        held = [torch.from_numpy(words.view(np.int64)) for words in messages]
        with self._on_device():
            for part, words in zip(parts[: len(send)], held, strict=False):
                part.copy_(words, non_blocking=True)  # not pinned, so that it is read before this returns
            peers = [(dist.isend, rank) for rank in send] + [(dist.irecv, rank) for rank in out]
            operations = [
                dist.P2POp(start, part, group=self._group, group_peer=rank)
                for (start, rank), part in zip(peers, parts, strict=True)
            ]
            for work in self._started(lambda: dist.batch_isend_irecv(operations), what):
                self._finish(work, what)
            for words, part in zip(held[len(send) :], parts[len(send) :], strict=True):
                words.copy_(part)

    @property
    def held_bytes(self) -> int:
        """Device memory for messages."""
        return self._room.nbytes

    def _taken(self, size: int, what: str) -> torch.Tensor:
        """int64 [size] of the device's memory, of any content; the earlier content is lost."""
        if size > len(self._room):
            self._room = self._room.new_empty(0)  # free it first: both may not fit
            try:
                self._room = self._room.new_empty(size + size // 4)
            except torch.OutOfMemoryError as error:
                raise NotEnoughSpace(
                    f"{what} needs {8 * (size + size // 4)} bytes of {self.device}'s memory, which are not "
                    f"free: train with a smaller batch or window, or leave parity_backend out, so that "
                    f"deltas go from host memory"
                ) from error
        return self._room[:size]

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the device current, as NCCL requires."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


class Transport(_Waits):
    """This rank's end of the control group.

    Args:
        group: a gloo process group, for this object alone; that of the protocol has all ranks.
        timeout_s: deadline of every collective.

    Attributes:
        fabric: carries exchanges; None: they use the control group.
        sent_bytes: in exchanges, and point to point.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        # Messages go to gloo itself: the operators of a group, which choose a backend for each, cost more.
        self._gloo: Any = group._get_backend(torch.device("cpu"))  # pyright: ignore[reportPrivateUsage]
        self.fabric: Fabric | None = None
        self._last_words: list[object] = []  # kept for receivers that may not come
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
        tag = _EXCHANGES + self._exchanges % _NUMBERS
        received = [self.expect(words, source, what, tag) for source, words in out.items()]
        sent = [self.send(words, to, what, tag) for to, words in send.items()]
        for wait in (*received, *sent):
            wait()

    def tag(self, kind: Kind, number: int) -> int:
        """The tag of a message about something; with a round's number added, that of a message of this round.

        Args:
            kind: what it is about.
            number: how many of the kind came before; numbers 2^20 apart share a tag.
        """
        return 1 + (number % _NUMBERS * len(Kind) + kind) * MOST_ROUNDS

    def vote(self, yes: bool, what: str) -> list[bool]:
        """Sends one bit from every rank to every rank. All ranks; on return all ranks have voted."""
        return [told == b"\1" for told in self.gather(b"\1" if yes else b"\0", what)]

    def barrier(self, what: str) -> None:
        """Returns when all ranks have called it. All ranks."""
        self._barriers += 1
        tag, nothing = self.tag(Kind.BARRIER, self._barriers), np.zeros(1, np.int64)
        Rounds(self, tag, len(nothing), lambda own, _: own, lambda _: False).run(nothing, what)

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
        self._last_words.clear()
        if self.fabric is not None:
            self.fabric.close()
        super().close()

    def send(self, words: Words, to: int, what: str, tag: int = 0) -> Callable[[], None]:
        """Starts sending words to one rank; call the result to wait until `words` may be reused."""
        work = self._sent(words, to, what, tag)
        return lambda: self._finish(work, what)

    def say(self, words: Words, to: int, tag: int) -> None:
        """Sends words to one rank, which may never receive them: waits for no receiver, raises no error."""
        try:
            self._last_words.append((words, self._sent(words, to, "leaving", tag)))
        except PeerFailure as error:
            logger.debug("rank %d is not told: %s", to, error)

    def _sent(self, words: Words, to: int, what: str, tag: int) -> dist.Work:
        self.sent_bytes += words.nbytes
        tensor = torch.from_numpy(words.view(np.int64))
        try:
            work: dist.Work = self._gloo.send([tensor], to, tag)
        except RuntimeError as error:
            raise self._failure(what, 0.0, error) from error
        return work

    def receive(self, out: Words, source: int, what: str) -> None:
        """Receives words from one rank into `out` (uint64, contiguous, overwritten)."""
        self.expect(out, source, what)()

    def expect(self, out: Words, source: int, what: str, tag: int = 0) -> Wait:
        """Starts receiving words from one rank; call the result to wait until they are in `out`.

        gloo announces each message and waits for its receiver, unless that receives already. Receivers of
        small messages therefore start early.
        """
        tensor = torch.from_numpy(out.view(np.int64))
        try:
            work = self._gloo.recv([tensor], source, tag)
        except RuntimeError as error:
            raise self._failure(what, 0.0, error) from error

        def wait(now: str = "") -> None:
            self._finish(work, now or what)

        return wait

    def _all_to_all(
        self,
        send: Ints,
        out: Ints,
        send_words: Sequence[int] | None,
        out_words: Sequence[int] | None,
        what: str,
    ) -> None:
        work = self._started(
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
        self._finish(work, what)
