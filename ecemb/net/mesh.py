"""The ranks' own connections, on which the thread that needs a message receives it itself.

gloo announces each receiver to the sender, receives each message in a thread of its own, and wakes the thread
that waits for it. Here a thread sends and receives at the same time, from and to its own memory, so that no
order of ranks can block. A `Mesh` has this rank's connections with some other ranks. `Channels` are one
thread's end of some of them: a stream of bytes each way, in which earlier bytes give the receiver the length
of the next message. `Notes` are messages of some dozen bytes over a mesh, found by tags, for any thread.

All of them wait in `Channels.run`, which returns or raises when all bytes have moved, when a rank has ended,
at its deadline, or after `Mesh.hang_up`. The loop that sends and receives is machine code. Its state, the
rest of each message, is in memory: an exception of a signal handler comes between two calls of the loop, and
no byte is lost. The next call of `Channels.run` continues.

Must not know: the meaning of the bytes, except for the tags of notes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import PeerFailure
from ..kernels.contract import Words
from ..kernels.llvm import assembled
from .error_file import Activity, lost_peer
from .links import Link, kept_by

Array = NDArray[Any]

_CHANNEL_WORDS = 6
_SOCKET, _OUT_AT, _OUT_LEFT, _IN_AT, _IN_LEFT, _IN_FLAGS = range(_CHANNEL_WORDS)
_READS, _WRITES = 1 << 32, 4 << 32  # POLLIN and POLLOUT, where a struct pollfd has its events
_IDLE = (1 << 32) - 1  # a struct pollfd without socket and events
_LONGEST_MS = 2**31 - 1  # longest timeout of poll()
_MOST_BYTES = 1 << 62  # longest message
_OVER, _LATE, _AGAIN = 0, -1, -2  # results of the loop; from 1 on: the number of the channel that has ended

_NOTE = struct.Struct("=II")  # tag, words
_LEAST_WORDS = 16
_KEPT = 64
"""Notes of a peer that are kept. A transaction's end has a few notes, and no rank is two transactions ahead
of another."""


class Mesh:
    """This rank's connections with some other ranks, for one purpose.

    Args:
        links: a link with each of these ranks, whose `peer` is the rank; consumed. No end sends before all
            ends are meshes.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: longest time of a wait in which no byte is sent or received.
        activity: shows that the main thread waits.
        move: sends and receives in place of `loop`, by the same arguments; None: `loop`.

    Attributes:
        timeout_s: as given.
        world_size: as given.
        activity: as given.
    """

    def __init__(
        self,
        links: Sequence[Link],
        rank: int,
        world_size: int,
        timeout_s: float,
        activity: Activity | None = None,
        move: Callable[..., int] | None = None,
    ) -> None:
        self.world_size, self.timeout_s, self._rank = world_size, timeout_s, rank
        self._move = move
        self.activity = activity or Activity()
        self._sockets = {link.peer: link.release() for link in links}
        self._end = kept_by(self, list(self._sockets.values()))

    @property
    def peers(self) -> list[int]:
        """The ranks at the other ends."""
        return list(self._sockets)

    @property
    def move(self) -> Callable[..., int]:
        """Sends and receives the bytes of channels, see `loop`."""
        return self._move or loop()

    def channels(self, ranks: Sequence[int] | None = None) -> Channels:
        """This rank's end of the connections with some ranks, or with all.

        One thread at a time may send over a connection, and one may receive.
        """
        chosen = self._sockets if ranks is None else ranks
        return Channels(self, {rank: self._sockets[rank] for rank in chosen})

    def lost(self, what: str, waited_s: float, why: str) -> PeerFailure:
        """The error of a failed wait, see `lost_peer`; `why` is the failure."""
        error = ConnectionError(why)
        return lost_peer(self._rank, self.world_size, what, waited_s, self.timeout_s, error)

    def hang_up(self) -> None:
        """Shuts down all connections: ends all waits of any thread, on this rank and on its peers.

        `close` follows. May be called twice.
        """
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # the connection has ended
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all connections. No thread may wait any more. May be called twice."""
        self._end()


class Channels:
    """Streams of bytes to and from some ranks, with the data that is still to be sent and received.

    Used by one thread at a time.

    Args:
        mesh: owns the connections.
        sockets: rank -> socket; they last as long as the mesh.
    """

    def __init__(self, mesh: Mesh, sockets: Mapping[int, socket.socket]) -> None:
        self._mesh = mesh
        self._places = {rank: at for at, rank in enumerate(sockets)}
        self._plan = np.zeros((len(sockets), _CHANNEL_WORDS), np.int64)
        self._polled = np.zeros(len(sockets), np.int64)
        self._plan[:, _SOCKET] = [one.fileno() for one in sockets.values()]
        self._addresses = [one.__array_interface__["data"][0] for one in (self._plan, self._polled)]
        self._held = defaultdict[tuple[int, int], list[Array]](list)  # the memory to which the plan points

    def send(self, to: int, *parts: Array) -> None:
        """Queues data for a rank, which `run` sends after the data that is queued for it already.

        Args:
            to: the receiver.
            parts: arrays of any dtype, contiguous, sent one after the other; read until they are sent.
        """
        at, left = self._plan[self._places[to], _OUT_AT : _OUT_LEFT + 1].tolist()
        if not left and len(parts) == 1:
            self._hold(to, _OUT_AT, parts[0])
        else:
            unsent = (ctypes.c_char * left).from_address(at)  # of any length; string_at takes an int
            data = b"".join([unsent, *(part.data for part in parts)])
            self._hold(to, _OUT_AT, np.frombuffer(data, np.uint8))

    def expect(self, outs: Mapping[int, Array]) -> None:
        """Has `run` fill arrays with bytes that it receives.

        Args:
            outs: rank -> array of any dtype, contiguous, overwritten. No other data may be expected from the
                rank at this time.
        """
        for rank, out in outs.items():
            self._plan[self._places[rank], _IN_FLAGS] = socket.MSG_DONTWAIT
            self._hold(rank, _IN_AT, out)

    def skip(self, sizes: Mapping[int, int]) -> None:
        """Has `run` receive words (rank -> number of words) and drop them, without memory for them."""
        for rank, size in sizes.items():
            self._plan[self._places[rank], _IN_FLAGS] = socket.MSG_DONTWAIT | socket.MSG_TRUNC
            self._plan[self._places[rank], _IN_LEFT] = min(max(0, 8 * size), _MOST_BYTES)

    def run(self, what: str, *, all_sent: bool = True) -> None:
        """Sends and receives until all expected data is received and, with `all_sent`, all queued data sent.

        `all_sent` must be false for requests that are longer than the connection's buffers: the peer receives
        no further request before it has sent its answer, which may be as long, and so both ranks would wait.

        Args:
            what: names the wait in the error.
            all_sent: whether to wait until all queued data is sent; if not, the next call sends the rest.

        Raises:
            PeerFailure: a rank has ended, or no byte was sent or received for `timeout_s`.
            BaseException: the exception of a signal handler; the next call continues.
        """
        with self._mesh.activity.waiting():
            began = last = time.monotonic()
            wait_s, left, move = self._mesh.timeout_s, list[int](), self._mesh.move
            while True:
                ms = min(math.ceil(wait_s * 1000), _LONGEST_MS)
                ended = move(*self._addresses, len(self._polled), all_sent, ms)
                if ended == _OVER:
                    return
                now = time.monotonic()
                before, left = left, self._plan[:, [_OUT_LEFT, _IN_LEFT]].ravel().tolist()
                if left != before:  # bytes were sent or received
                    last = now
                wait_s = last + self._mesh.timeout_s - now  # after a signal, only the rest of the time
                if wait_s > 0 and (ended == _AGAIN or (ended == _LATE and before)):
                    continue
                why = f"nothing came within {self._mesh.timeout_s:.0f} s"
                if ended > 0:
                    why = f"the connection with rank {list(self._places)[ended - 1]} has ended"
                raise self._mesh.lost(what, now - began, why)

    def _hold(self, rank: int, at: int, data: Array) -> None:
        """Points the plan to data. An interruption leaves it pointing to the old or to the new data."""
        held = self._held[rank, at]
        held.append(data)
        self._plan[self._places[rank], at : at + 2] = data.__array_interface__["data"][0], data.nbytes
        del held[:-1]


class Notes:
    """Messages of some dozen bytes to and from the ranks of a mesh, found by their tags. For any threads.

    A note stays in the socket's buffer until a thread that waits for a note receives it. All notes have the
    same size on the wire. The newest received notes are kept, so that a wait which an exception of a signal
    handler has interrupted can be repeated.

    Args:
        mesh: carries notes, and no other data.

    Attributes:
        mesh: as given.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self._words = mesh, _LEAST_WORDS + mesh.world_size // 32
        self._lines = {peer: _Line(mesh, peer, _NOTE.size + 8 * self._words) for peer in mesh.peers}

    def send(self, words: Words, to: int, what: str, tag: int) -> None:
        """Sends a note. Does not wait for its receiver.

        Args:
            words: uint64 [m], m at most 16 + N // 32, read.
            to: a rank of the mesh.
            what: names the call in the error.
            tag: below 2^32; identifies the note among those of this rank.

        Raises:
            ValueError: the note is too long.
            PeerFailure: the connection has ended.
        """
        if len(words) > self._words:
            raise ValueError(f"a note has at most {self._words} words, not {len(words)}")
        self._lines[to].send(tag, words.tobytes(), what)

    def receive(self, out: Words, source: int, what: str, tag: int) -> None:
        """Waits for a note; may be called again for the same note.

        Args:
            out: uint64 [m], overwritten; as long as the note.
            source: a rank of the mesh.
            what: names the wait in the error.
            tag: tag of the note.

        Raises:
            PeerFailure: the connection has ended or timed out, or the received bytes are not the note.
        """
        note = self._lines[source].receive(tag, what)
        if len(note) != out.nbytes:
            why = f"rank {source} sent a note of {len(note)} bytes in place of {out.nbytes}"
            raise self.mesh.lost(what, 0.0, why)
        out[:] = np.frombuffer(note, np.uint64)


class _Line:
    """One connection for notes.

    Args:
        mesh: owns the connection.
        peer: the rank at the other end.
        size: bytes of a note on the wire.
    """

    def __init__(self, mesh: Mesh, peer: int, size: int) -> None:
        self._mesh, self._peer = mesh, peer
        self._sending, self._reading = (mesh.channels([peer]) for _ in range(2))
        self._sends = threading.Lock()
        self._read = np.zeros(size, np.uint8)
        self._notes: dict[int, bytes] = {}  # tag -> note, the oldest first
        self._changed = threading.Condition()
        self._reader: int | None = None  # the thread that receives notes for all threads
        self._reading.expect({peer: self._read})

    def send(self, tag: int, data: bytes, what: str) -> None:
        note = (_NOTE.pack(tag, len(data) // 8) + data).ljust(len(self._read), b"\0")
        with self._sends:
            self._sending.send(self._peer, np.frombuffer(note, np.uint8))
            self._sending.run(what)

    def receive(self, tag: int, what: str) -> bytes:
        me = threading.get_ident()
        while True:
            try:
                with self._changed:
                    while tag not in self._notes and self._reader not in (None, me):
                        with self._mesh.activity.waiting():
                            self._changed.wait()
                    if tag in self._notes:
                        return self._notes[tag]
                    self._reader = me
                self._keep_next(what)
            finally:
                with self._changed:
                    if self._reader == me:
                        self._reader = None
                        self._changed.notify_all()

    def _keep_next(self, what: str) -> None:
        """Receives the next note, and keeps it. After an interruption it continues with the same note."""
        self._reading.run(what)
        note = self._read.tobytes()
        tag, words = _NOTE.unpack_from(note)
        if _NOTE.size + 8 * words > len(note):
            raise self._mesh.lost(what, 0.0, f"rank {self._peer} sent a note of {words} words")
        with self._changed:
            if tag not in self._notes and len(self._notes) >= _KEPT:
                del self._notes[next(iter(self._notes))]
            self._notes[tag] = note[_NOTE.size : _NOTE.size + 8 * words]
        self._reading.expect({self._peer: self._read})


@functools.cache
def loop() -> Callable[..., int]:
    """The compiled loop that sends and receives.

    It returns when all bytes are received and, with `all`, sent; when no byte has moved for `ms`; when a
    signal has come, so that its handler can run; or when a connection has ended.

    Arguments: plan, polled, count, all, ms of a wait. Returns one of `_OVER`, `_LATE`, `_AGAIN`, or the
    number of the channel that has ended, from 1 on.
    """
    address = assembled(
        _CODE,
        "channels",
        ("send", "recv", "poll", "__errno_location"),
        words=_CHANNEL_WORDS,
        out_at=_OUT_AT,
        out_left=_OUT_LEFT,
        in_at=_IN_AT,
        in_left=_IN_LEFT,
        in_flags=_IN_FLAGS,
        flags=socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL,
        reads=_READS,
        writes=_WRITES,
        idle=_IDLE,
        again=errno.EAGAIN,
        interrupted=errno.EINTR,
        over=_OVER,
        late=_LATE,
        once_more=_AGAIN,
    )
    return ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3)(address)


_CODE: Final = """
define internal i1 @move(ptr %call, i32 %socket, ptr %at, ptr %left, i32 %flags) {{
entry:
  %size = load i64, ptr %left
  %is.any = icmp sgt i64 %size, 0
  br i1 %is.any, label %try, label %fine
try:
  %from = load i64, ptr %at
  %memory = inttoptr i64 %from to ptr
  %moved = call i64 %call(i32 %socket, ptr %memory, i64 %size, i32 %flags)
  %is.moved = icmp sgt i64 %moved, 0
  br i1 %is.moved, label %note, label %stuck
note:
  %then = add i64 %from, %moved
  store i64 %then, ptr %at
  %rest = sub i64 %size, %moved
  store i64 %rest, ptr %left
  br label %fine
stuck:
  %is.end = icmp eq i64 %moved, 0
  br i1 %is.end, label %ended, label %failed
failed:
  %error.at = call ptr inttoptr (i64 {__errno_location} to ptr)()
  %error = load i32, ptr %error.at
  switch i32 %error, label %ended [ i32 {again}, label %fine
                                    i32 {interrupted}, label %fine ]
fine:
  ret i1 false
ended:
  ret i1 true
}}

define i64 @channels(ptr %plan, ptr %polled, i64 %count, i64 %all, i64 %ms) {{
entry:
  br label %round
round:
  br label %each
each:
  %i = phi i64 [ 0, %round ], [ %following, %next ]
  %left = phi i64 [ 0, %round ], [ %left.more, %next ]
  %is.one = icmp slt i64 %i, %count
  br i1 %is.one, label %one, label %judge
one:
  %following = add i64 %i, 1
  %first = mul i64 %i, {words}
  %channel = getelementptr i64, ptr %plan, i64 %first
  %out.at = getelementptr i64, ptr %channel, i64 {out_at}
  %out.left = getelementptr i64, ptr %channel, i64 {out_left}
  %in.at = getelementptr i64, ptr %channel, i64 {in_at}
  %in.left = getelementptr i64, ptr %channel, i64 {in_left}
  %in.flags.at = getelementptr i64, ptr %channel, i64 {in_flags}
  %in.flags.wide = load i64, ptr %in.flags.at
  %in.flags = trunc i64 %in.flags.wide to i32
  %socket.wide = load i64, ptr %channel
  %socket = trunc i64 %socket.wide to i32
  %no.out = call i1 @move(ptr inttoptr (i64 {send} to ptr), i32 %socket,
                          ptr %out.at, ptr %out.left, i32 {flags})
  br i1 %no.out, label %ended, label %receive
receive:
  %no.in = call i1 @move(ptr inttoptr (i64 {recv} to ptr), i32 %socket,
                         ptr %in.at, ptr %in.left, i32 %in.flags)
  br i1 %no.in, label %ended, label %next
next:
  %out = load i64, ptr %out.left
  %in = load i64, ptr %in.left
  %out.counts = mul i64 %out, %all
  %left.out = or i64 %left, %out.counts
  %left.more = or i64 %left.out, %in
  %polled.at = getelementptr i64, ptr %polled, i64 %i
  %reads = icmp sgt i64 %in, 0
  %writes = icmp sgt i64 %out, 0
  %events.in = select i1 %reads, i64 {reads}, i64 0
  %events.out = select i1 %writes, i64 {writes}, i64 0
  %events = or i64 %events.in, %events.out
  %is.watched = icmp ne i64 %events, 0
  %watched = or i64 %events, %socket.wide
  %entry.now = select i1 %is.watched, i64 %watched, i64 {idle}
  store i64 %entry.now, ptr %polled.at
  br label %each
judge:
  %is.over = icmp eq i64 %left, 0
  br i1 %is.over, label %over, label %wait
wait:
  %limit = trunc i64 %ms to i32
  %ready = call i32 inttoptr (i64 {poll} to ptr)(ptr %polled, i64 %count, i32 %limit)
  %is.ready = icmp sgt i32 %ready, 0
  br i1 %is.ready, label %round, label %waited
waited:
  %is.late = icmp eq i32 %ready, 0
  %why = select i1 %is.late, i64 {late}, i64 {once_more}
  ret i64 %why
over:
  ret i64 {over}
ended:
  ret i64 %following
}}
"""
"""plan: `_CHANNEL_WORDS` numbers of each channel; polled: a struct pollfd of each, as one number."""
