"""Streams: the ranks' own connections for deltas, to those that keep each other's parity.

In each transaction a rank sends a message to each of its keepers, and receives one from each rank whose
parity it keeps: a `Swap`. The thread that swaps moves the bytes itself, from the memory where they are to the
memory where they belong; gloo would move them in a thread of its own, after it has announced each receiver.

All messages are sent and received at once, so no order of ranks can block. Their state is in the memory of a
loop of machine code: an exception of a signal handler finds it between two calls of the loop, and loses no
byte. Such an exception waits until the swap is over, as the other ranks wait for it.

Must not know: what a message says, except that its receiver learns its size from its first words.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..kernels.contract import Words
from ..kernels.llvm import engine
from .links import Link, drop

_INTERRUPTIONS = 10  # exceptions of signal handlers; more are no interruptions
_CHANNEL_WORDS = 5
_SOCKET, _OUT_AT, _OUT_LEFT, _IN_AT, _IN_LEFT = range(_CHANNEL_WORDS)
_LONGEST_MS = 2**31 - 1  # of a wait of poll's
_MOST_WORDS = 1 << 56  # of a message that can be counted in bytes
_OVER, _LATE, _AGAIN = 0, -1, -2  # or the channel that has ended, from 1 on

_CODE: Final = """
define i64 @swap(ptr %plan, ptr %polled, i64 %count, i64 %all, i64 %flags, i64 %ms) {{
entry:
  %recv.flags = trunc i64 %flags to i32
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
  %first = mul i64 %i, 5
  %channel = getelementptr i64, ptr %plan, i64 %first
  %out.at = getelementptr i64, ptr %channel, i64 1
  %out.left = getelementptr i64, ptr %channel, i64 2
  %in.at = getelementptr i64, ptr %channel, i64 3
  %in.left = getelementptr i64, ptr %channel, i64 4
  %socket.wide = load i64, ptr %channel
  %socket = trunc i64 %socket.wide to i32
  %out = load i64, ptr %out.left
  %sends = icmp sgt i64 %out, 0
  br i1 %sends, label %send, label %receives
send:
  %out.from = load i64, ptr %out.at
  %out.pointer = inttoptr i64 %out.from to ptr
  %sent = call i64 inttoptr (i64 {send} to ptr)(i32 %socket, ptr %out.pointer, i64 %out, i32 {send_flags})
  %is.sent = icmp sgt i64 %sent, 0
  br i1 %is.sent, label %note.sent, label %not.sent
note.sent:
  %out.then = add i64 %out.from, %sent
  store i64 %out.then, ptr %out.at
  %out.rest = sub i64 %out, %sent
  store i64 %out.rest, ptr %out.left
  br label %receives
not.sent:
  %send.error.at = call ptr inttoptr (i64 {error} to ptr)()
  %send.error = load i32, ptr %send.error.at
  switch i32 %send.error, label %ended [ i32 {again}, label %receives
                                         i32 {interrupted}, label %receives ]
receives:
  %in = load i64, ptr %in.left
  %is.in = icmp sgt i64 %in, 0
  br i1 %is.in, label %receive, label %next
receive:
  %in.from = load i64, ptr %in.at
  %in.pointer = inttoptr i64 %in.from to ptr
  %got = call i64 inttoptr (i64 {recv} to ptr)(i32 %socket, ptr %in.pointer, i64 %in, i32 %recv.flags)
  %is.got = icmp sgt i64 %got, 0
  br i1 %is.got, label %note.got, label %not.got
note.got:
  %in.then = add i64 %in.from, %got
  store i64 %in.then, ptr %in.at
  %in.rest = sub i64 %in, %got
  store i64 %in.rest, ptr %in.left
  br label %next
not.got:
  %is.end = icmp eq i64 %got, 0
  br i1 %is.end, label %ended, label %receive.error
receive.error:
  %recv.error.at = call ptr inttoptr (i64 {error} to ptr)()
  %recv.error = load i32, ptr %recv.error.at
  switch i32 %recv.error, label %ended [ i32 {again}, label %next
                                         i32 {interrupted}, label %next ]
next:
  %out.now = load i64, ptr %out.left
  %in.now = load i64, ptr %in.left
  %out.counts = mul i64 %out.now, %all
  %left.out = or i64 %left, %out.counts
  %left.more = or i64 %left.out, %in.now
  %polled.first = getelementptr i64, ptr %polled, i64 %i
  %reads = icmp sgt i64 %in.now, 0
  %writes = icmp sgt i64 %out.now, 0
  %events.in = select i1 %reads, i64 4294967296, i64 0
  %events.out = select i1 %writes, i64 17179869184, i64 0
  %events = or i64 %events.in, %events.out
  %is.watched = icmp ne i64 %events, 0
  %entry.watched = or i64 %events, %socket.wide
  %entry.now = select i1 %is.watched, i64 %entry.watched, i64 4294967295
  store i64 %entry.now, ptr %polled.first
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
  %why = select i1 %is.late, i64 -1, i64 -2
  ret i64 %why
over:
  ret i64 0
ended:
  ret i64 %following
}}
"""
"""plan: `_CHANNEL_WORDS` numbers of each channel; polled: a struct pollfd of each, for POLLIN and POLLOUT."""


@functools.cache
def _swap() -> Callable[..., int]:
    """The loop: moves bytes until all are received and, with `all`, sent; or until a handler may run.

    Arguments: plan, polled, count, all, flags of recv, ms to wait.
    """
    library = ctypes.CDLL(None)
    calls = {
        "send": library.send,
        "recv": library.recv,
        "poll": library.poll,
        "error": library.__errno_location,
    }
    addresses = {name: ctypes.cast(call, ctypes.c_void_p).value for name, call in calls.items()}
    flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
    made: Any = engine(
        _CODE.format(**addresses, send_flags=flags, again=errno.EAGAIN, interrupted=errno.EINTR)
    )
    made.finalize_object()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # never freed
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4)
    return kind(made.get_function_address("swap"))


class Swap:
    """The messages of one transaction, on their way. One thread.

    The constructor sends nothing yet.

    Args:
        sockets: of the ranks.
        send: rank -> uint64, contiguous, read until the swap is over.
        heads: rank -> uint64, contiguous, overwritten with the first words of its message.
        timeout_s: deadline of a wait.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        send: Mapping[int, Words],
        heads: Mapping[int, Words],
        timeout_s: float,
    ) -> None:
        self._ranks = sorted({*send, *heads})
        self._held: list[object] = [send, heads]
        self._limit_ms, self._timeout_s = min(math.ceil(timeout_s * 1000), _LONGEST_MS), timeout_s
        self._flags, self._is_resting = socket.MSG_DONTWAIT, False
        self._plan = np.zeros((len(self._ranks), _CHANNEL_WORDS), np.int64)
        self._polled = np.zeros(len(self._ranks), np.int64)
        for channel, rank in zip(self._plan, self._ranks, strict=True):
            channel[_SOCKET] = sockets[rank].fileno()
            if rank in send:
                channel[_OUT_AT : _OUT_LEFT + 1] = _place(send[rank])
        self._expect(heads)

    def meet(self) -> None:
        """Returns when all heads are there; meanwhile it sends.

        Raises:
            OSError: a rank has ended, or a wait has timed out.
            BaseException: that of a signal handler, when all heads are there.
        """
        self._run(0)

    def finish(self, rests: Mapping[int, Words]) -> None:
        """Receives the rest of the messages, and returns when all is sent as well.

        May be called again, as `discard` may: what was begun goes on.

        Args:
            rests: rank -> uint64, contiguous, overwritten with what follows its head.

        Raises:
            OSError: a rank has ended, or a wait has timed out.
            BaseException: that of a signal handler, when all is over.
        """
        if not self._is_resting:
            self._expect(rests)
            self._is_resting = True
        self._run(1)

    def discard(self, sizes: Mapping[int, int]) -> None:
        """`finish`, where the rest of the messages is not wanted: it takes no memory.

        Args:
            sizes: rank -> words that follow its head.

        Raises:
            As `finish`.
        """
        if not self._is_resting:
            for channel, rank in zip(self._plan, self._ranks, strict=True):
                channel[_IN_LEFT] = 8 * min(max(sizes.get(rank, 0), 0), _MOST_WORDS)
            self._flags, self._is_resting = socket.MSG_DONTWAIT | socket.MSG_TRUNC, True
        self._run(1)

    def _expect(self, out: Mapping[int, Words]) -> None:
        self._held.append(out)
        for channel, rank in zip(self._plan, self._ranks, strict=True):
            if rank in out:
                channel[_IN_AT : _IN_LEFT + 1] = _place(out[rank])

    def _run(self, all_sent: int) -> None:
        raised: list[BaseException] = []
        plan, polled = self._plan.ctypes.data, self._polled.ctypes.data
        while True:
            try:
                ended = _swap()(plan, polled, len(self._ranks), all_sent, self._flags, self._limit_ms)
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                raised.append(error)
                if len(raised) > _INTERRUPTIONS:
                    raise
                continue
            if ended == _OVER:
                break
            if ended == _LATE:
                raise TimeoutError(f"nothing came within {self._timeout_s:.0f} s")
            if ended != _AGAIN:
                raise ConnectionError(f"the connection with rank {self._ranks[ended - 1]} has ended")
        if raised:
            raise raised[0]


class Streams:
    """This rank's connections for deltas.

    Args:
        links: with other ranks, by their number; consumed. Nothing is sent before all ends are `Streams`.
        timeout_s: deadline of a wait.
    """

    def __init__(self, links: Sequence[Link], timeout_s: float) -> None:
        self._sockets = {link.peer: link.release() for link in links}
        self._timeout_s = timeout_s

    def swap(self, send: Mapping[int, Words], heads: Mapping[int, Words]) -> Swap:
        """The messages of a transaction; see `Swap`."""
        return Swap(self._sockets, send, heads, self._timeout_s)

    def close(self) -> None:
        """Ends all connections. May be called twice."""
        for one in self._sockets.values():
            drop(one)


def _place(words: Words) -> tuple[int, int]:
    """The address of contiguous words, and their bytes."""
    return words.ctypes.data, words.nbytes
