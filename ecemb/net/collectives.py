"""The collectives that the protocol uses, each with a name and a deadline.

The only module that calls torch.distributed's collectives. A rank that waits for a dead peer gets an error at
once; ranks that wait for other ranks learn of the death from the failure detector. A `Transport` runs over
gloo, from host memory; deltas to keepers of parity may go over a `Fabric` instead, from a device's memory.

A `PeerFailure` allows no conclusion about what other ranks received.

A `Dissemination` folds values of all ranks. In round j each rank sends its folded value to rank + 2^j, and
receives that of rank - 2^j, modulo N. The fold is idempotent, so the result is right for every N. A value
that a rank sends includes all that it has received: after the last round, a rank has a value to which all
ranks have contributed. (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.)

Must not know: the meaning of values and messages.
"""

from __future__ import annotations

import datetime
import enum
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..errors import EcembError, NotEnoughSpace, PeerFailure
from ..kernels.contract import Words
from ..kernels.threads import to_the_end
from .error_file import Activity, follows, lost_peer
from .mesh import Channels, Mesh, Notes

logger: logging.Logger = logging.getLogger("ecemb")


T = TypeVar("T")


class Waits:
    """Starts a group's work and waits for it, each time with a name and a deadline.

    Args:
        group: the process group.
        timeout_s: deadline of a wait, in seconds.

    Attributes:
        rank: this rank, in the group.
        world_size: number of ranks of the group.
        activity: shows that the main thread waits.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self._group = group
        self._timeout_s = timeout_s
        self._deadline = datetime.timedelta(seconds=timeout_s)
        self.activity = Activity()

    def close(self) -> None:
        """Destroys the group. All ranks, without waiting for each other."""
        dist.destroy_process_group(self._group)

    def started(self, start: Callable[[], T | None], what: str) -> T:
        """Starts work; `what` names it in the error.

        Raises:
            PeerFailure: a peer has died.
        """
        try:
            work = start()
        except RuntimeError as error:
            raise self.failure(what, 0.0, error) from error
        if work is None:
            raise EcembError(f"rank {self.rank} is not in the group that it uses for {what}")
        return work

    def ended(self, work: dist.Work, what: str) -> None:
        """Waits for `work`, once; `what` names the wait in the error.

        Work that a peer's death has ended is completed as well: only the wait shows which it is.

        Raises:
            PeerFailure: a peer died, or the work did not end before the deadline.
        """
        began = time.monotonic()
        try:
            with self.activity.waiting():
                work.wait(self._deadline)  # a deadline makes NCCL's wait block the host
            if not work.is_completed():
                raise RuntimeError("the wait has ended before it")
        except RuntimeError as error:
            raise self.failure(what, time.monotonic() - began, error) from error

    def failure(self, what: str, waited_s: float, error: Exception) -> PeerFailure:
        """The error of a failed wait, see `lost_peer`."""
        return lost_peer(self.rank, self.world_size, what, waited_s, self._timeout_s, error)


class Fabric(Waits):
    """Messages from one device's memory to another's, over a group with a backend such as NCCL.

    All ranks construct it, once: the constructor makes the group's connections, because the first messages of
    a group may not be point-to-point messages between some of its ranks
    (`torch.distributed.batch_isend_irecv`).

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
        here = torch.zeros(1, dtype=torch.float32, device=device)
        what = "connecting the devices"
        with self._on_device():
            self.ended(self.started(lambda: dist.all_reduce(here, group=group, async_op=True), what), what)

    def exchange(self, send: Mapping[int, Words], out: Mapping[int, Words], what: str) -> None:
        """See `Transport.exchange`. The messages in `out` are in host memory when this returns.

        Waits for the device's current stream.

        Raises:
            NotEnoughSpace: the device has too little free memory for the messages; this rank has sent none.
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
            for work in self.started(lambda: dist.batch_isend_irecv(operations), what):
                self.ended(work, what)
            for words, part in zip(held[len(send) :], parts[len(send) :], strict=True):
                words.copy_(part)

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory that hold messages."""
        return self._room.nbytes

    def _taken(self, size: int, what: str) -> torch.Tensor:
        """int64 [size] of the device's memory, with arbitrary content, which overlaps earlier results.

        Args:
            size: words.
            what: names the exchange in the error.

        Raises:
            NotEnoughSpace: the device has too little free memory.
        """
        if size > len(self._room):
            self._room = self._room.new_empty(0)  # free it first: both may not fit
            try:
                self._room = self._room.new_empty(size + size // 4)
            except torch.OutOfMemoryError:
                raise NotEnoughSpace(
                    f"{what} needs {8 * (size + size // 4)} bytes of {self.device}'s memory, which are not "
                    f"free: train with a smaller batch or window, or leave parity_backend out, so that "
                    f"deltas go from host memory"
                ) from None
        return self._room[:size]

    def _on_device(self) -> AbstractContextManager[object]:
        """Makes the device current, as NCCL requires."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()


Ints = NDArray[np.int64]


_MOST_BYTES = 1 << 30  # of one rank's data in `gather`; a larger announced size is an error
_SHORT_WORDS = 7  # of data that `gather` sends with its size: with it, a cache line
_NUMBERS = 1 << 20  # numbers of notes of one kind, or of exchanges, before they repeat in tags


class Kind(enum.IntEnum):
    """The purpose of a note; its tag has the kind, a number and the round (`Transport.tag`)."""

    STATUS = 0
    VOTE = 1
    BARRIER = 2
    VERIFICATION = 3


class Transport(Waits):
    """This rank's end of the control group.

    Args:
        group: a gloo process group, for this object alone; the group of the protocol has all ranks.
        timeout_s: deadline of every collective.

    Attributes:
        fabric: carries exchanges; None: they use the control group.
        notes: carries the notes of disseminations; without ranks before it is connected.
        swap_mesh: carries swaps; without ranks before it is connected.
        sent_bytes: bytes sent in exchanges, swaps, notes and point-to-point messages.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        super().__init__(group, timeout_s)
        # Messages use gloo directly: the group's operators, which choose a backend for each, cost more.
        self._gloo: Any = group._get_backend(torch.device("cpu"))  # pyright: ignore[reportPrivateUsage]
        self.fabric: Fabric | None = None
        self.swap_mesh = Mesh([], self.rank, self.world_size, timeout_s)
        self.notes = Notes(self.swap_mesh)
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
        self._all_to_all(send.reshape(-1), received.reshape(-1), what)
        return received

    def exchange(
        self,
        send: Mapping[int, Words],
        out: Mapping[int, Words],
        what: str,
    ) -> None:
        """Sends messages to some ranks, and receives the messages of some ranks. All ranks.

        Each exchange has a tag of its own: a message of an interrupted exchange is never received by another.

        Args:
            send: rank -> uint64, contiguous, read; the arrays may overlap.
            out: rank -> uint64, contiguous, overwritten: as long as the message of that rank.
            what: names the wait in the error.

        Raises:
            PeerFailure: one of these peers died or did not come before the deadline; the content of `out` is
                arbitrary.
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
        """Prepares a transaction's messages to and from some ranks; `Channels.run` sends and receives them.

        Args:
            send: rank -> uint64, contiguous, read until it is sent.
            heads: rank -> uint64, contiguous, overwritten with the first words of that rank's message.
        """
        self.sent_bytes += sum(words.nbytes for words in send.values())
        channels = self.swap_mesh.channels()
        for to, words in send.items():
            channels.send(to, words)
        channels.expect(heads)
        return channels

    def tag(self, kind: Kind, number: int) -> int:
        """The tag of round 0 of a dissemination; round j has this tag + j.

        Args:
            kind: purpose of the dissemination.
            number: its number among those of its kind; numbers 2^20 apart share a tag.
        """
        return (number % _NUMBERS * len(Kind) + kind) * MOST_ROUNDS

    def vote(self, yes: bool, what: str) -> list[bool]:
        """Sends one bit from every rank to every rank. All ranks; on return all ranks have voted.

        Returns:
            Rank -> its bit.

        Raises:
            PeerFailure: as for `gather`.
        """
        return [answer == b"\1" for answer in self.gather(b"\1" if yes else b"\0", what)]

    def barrier(self, what: str) -> None:
        """Returns when all ranks have called it. All ranks.

        Raises:
            PeerFailure: a peer died or did not come before the deadline.
        """
        self._barriers += 1
        tag, nothing = self.tag(Kind.BARRIER, self._barriers), np.zeros(1, np.int64)
        Dissemination(self, tag, lambda own, _: own, lambda _: False).run(nothing, what)

    def gather(self, data: bytes, what: str) -> list[bytes]:
        """Returns the bytes of all ranks, in the order of ranks. All ranks.

        In one collective if all of them are short, otherwise in two.

        Raises:
            PeerFailure: a peer died or did not come before the deadline.
        """
        padded = data + bytes(-len(data) % 8)
        first = np.zeros(1 + _SHORT_WORDS, np.int64)
        first[0], short = len(data), np.frombuffer(padded, np.int64)[:_SHORT_WORDS]
        first[1 : 1 + len(short)] = short
        received = self.all_to_all(np.tile(first, (self.world_size, 1)), what)
        sizes = received[:, 0]
        if int(sizes.min()) < 0 or int(sizes.max()) > _MOST_BYTES:
            raise PeerFailure(
                f"the ranks announce {sizes.tolist()} bytes in {what}, and none may send more than "
                f"{_MOST_BYTES}: the network is damaged, or the ranks run different versions of ecemb"
            )
        if int(sizes.max()) <= 8 * _SHORT_WORDS:
            return [row[1:].tobytes()[:size] for row, size in zip(received, sizes.tolist(), strict=True)]
        words = (-(-sizes // 8)).tolist()
        send = np.frombuffer(bytearray(padded * self.world_size), np.uint64)
        out = np.empty(sum(words), np.uint64)
        sizes_sent = [len(padded) // 8] * self.world_size
        self._all_to_all(send.view(np.int64), out.view(np.int64), what, words, sizes_sent)
        edges = np.cumsum([0, *words]).tolist()
        return [
            out[a:b].tobytes()[:size]
            for a, b, size in zip(edges[:-1], edges[1:], sizes.tolist(), strict=True)
        ]

    def together(self, what: str, act: Callable[[], T]) -> T:
        """Runs `act` on every rank; if it fails on one rank, all ranks raise. All ranks.

        Raises:
            EcembError: this rank's own error, or `PeerFailure` naming the ranks that failed and why.
        """
        try:
            result = act()
        except Exception as error:
            self.gather(f"{type(error).__name__}: {error}".encode() or b"?", what)
            raise
        answers = self.gather(b"", what)
        failed = {rank: text.decode(errors="replace") for rank, text in enumerate(answers) if text}
        if failed:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            text = f"{what} failed on {len(failed)} of {self.world_size} ranks: {reasons}"
            raise follows(PeerFailure(text), next(iter(failed.values())).partition(":")[0])
        return result

    def close(self) -> None:
        """Closes the meshes, and destroys the fabric's and the control group. All ranks, without waiting."""
        for mesh in (self.swap_mesh, self.notes.mesh):
            mesh.close()
        if self.fabric is not None:
            self.fabric.close()
        super().close()

    def disconnect(self) -> None:
        """Closes the meshes of a process that stays; its groups are aborted. No thread may wait any more."""
        for mesh in (self.swap_mesh, self.notes.mesh):
            mesh.close()

    def hang_up(self) -> None:
        """Ends all waits for notes and swaps, of any thread, on this rank and on its peers."""
        for mesh in (self.swap_mesh, self.notes.mesh):
            mesh.hang_up()

    def send_note(self, words: Words, to: int, what: str, tag: int) -> None:
        """Sends a note to a rank; see `Notes.send`."""
        self.sent_bytes += words.nbytes
        self.notes.send(words, to, what, tag)

    def receive_note(self, out: Words, source: int, what: str, tag: int) -> None:
        """Waits for a note of a rank; see `Notes.receive`."""
        self.notes.receive(out, source, what, tag)

    def send(self, words: Words, to: int, what: str, tag: int = 0) -> Callable[[], None]:
        """Starts sending words to one rank; call the result, once, to wait until `words` may be reused."""
        self.sent_bytes += words.nbytes
        tensor = torch.from_numpy(words.view(np.int64))
        work: dist.Work = self.started(lambda: self._gloo.send([tensor], to, tag), what)
        return lambda: self.ended(work, what)

    def expect(self, out: Words, source: int, what: str, tag: int = 0) -> Callable[[], None]:
        """Starts receiving words from one rank; call the result, once, to wait.

        A gloo sender announces each message and waits for the receiver, unless the receiver has started to
        receive before. Receivers of small messages therefore start early.

        Args:
            out: uint64, contiguous, overwritten.
            source: the rank.
            what: names the wait in the error.
            tag: of the message.
        """
        tensor = torch.from_numpy(out.view(np.int64))
        work: dist.Work = self.started(lambda: self._gloo.recv([tensor], source, tag), what)
        return lambda: self.ended(work, what)

    def _all_to_all(self, send: Ints, out: Ints, what: str, *sizes: list[int]) -> None:
        """Sends a part of `send` to each rank, and receives a part of `out` from each.

        Args:
            send: int64, read.
            out: int64, overwritten.
            what: names the wait in the error.
            *sizes: words of the parts of `out`, and of the parts of `send`; parts are equal by default.
        """
        tensors = torch.from_numpy(out), torch.from_numpy(send)
        work = self.started(
            lambda: dist.all_to_all_single(*tensors, *sizes, group=self._group, async_op=True), what
        )
        self.ended(work, what)


MOST_ROUNDS = 32


class Dissemination:
    """One dissemination on this rank.

    `run` raises an exception of a signal handler, such as KeyboardInterrupt, only after the last round: if a
    rank left between two rounds, other ranks would wait for its notes. Only the end of a peer ends the rounds
    early, and that ends the other ranks also.

    Args:
        transport: carries the notes.
        tag: of round 0; round j has `tag` + j.
        fold: (own, received) -> folded, a new array; associative, commutative and idempotent.
        is_last: whether a received value ends this rank's rounds: the rank sends it in all later rounds, and
            receives no more.

    Attributes:
        value: int64 [m], the value folded so far; empty before `run`.
        is_over: whether all rounds are done: `value` is the folded value of all ranks, or has ended the
            rounds.
    """

    def __init__(
        self,
        transport: Transport,
        tag: int,
        fold: Callable[[Ints, Ints], Ints],
        is_last: Callable[[Ints], bool],
    ) -> None:
        self.is_over: bool = False
        self.value = np.zeros(0, np.int64)
        self._transport, self._tag, self._fold, self._is_last = transport, tag, fold, is_last
        self._round = self._sent = 0

    def run(self, value: Ints, what: str) -> None:
        """Goes through all rounds.

        Args:
            value: int64 [m], the value of this rank.
            what: names the wait in errors.

        Raises:
            PeerFailure: a peer died: `is_over` is false.
            BaseException: the exception of a signal handler, after the last round.
        """
        self.value = value
        to_the_end(partial(self._proceed, what), PeerFailure)

    def _proceed(self, what: str) -> None:
        """Does the remaining rounds. After an interruption it may send a note again, which does no harm."""
        transport, received = self._transport, np.zeros_like(self.value)
        rank, size = transport.rank, transport.world_size
        while not self.is_over and self._round < rounds(size):
            step, tag = 1 << self._round, self._tag + self._round
            if self._sent == self._round:
                transport.send_note(self.value.view(np.uint64), (rank + step) % size, what, tag)
                self._sent += 1
            transport.receive_note(received.view(np.uint64), (rank - step) % size, what, tag)
            if self._is_last(received):
                self.value = received
                say(transport, self._tag, received, range(self._round + 1, rounds(size)))
                break
            self.value, self._round = self._fold(self.value, received), self._round + 1
        self.is_over = True


def rounds(world_size: int) -> int:
    """The number of rounds of a dissemination, ceil(log2 N)."""
    return (world_size - 1).bit_length()


def say(transport: Transport, tag: int, value: Ints, only: Iterable[int] | None = None) -> None:
    """Sends a value to the receivers of some rounds, or of all, without waiting. Receivers may have ended.

    Args:
        transport: carries the notes.
        tag: of round 0.
        value: int64 [m].
        only: the rounds; None: all.
    """
    for j in range(rounds(transport.world_size)) if only is None else only:
        to = (transport.rank + (1 << j)) % transport.world_size
        try:
            transport.send_note(value.view(np.uint64), to, "leaving", tag + j)
        except PeerFailure as error:
            logger.debug("rank %d is not told: %s", to, error)
