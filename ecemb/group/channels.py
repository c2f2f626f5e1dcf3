"""Channels: sockets over which a thread sends and receives at the same time, from and to its own memory.

Owns a loop of machine code, whose state (what is left of each message) is in memory: an exception of a signal
handler finds it between two calls of the loop, and loses no byte. What was begun goes on with the next call.

Must not know: what the bytes are, and which ranks are connected.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..kernels.llvm import assembled

Array = NDArray[Any]

_CHANNEL_WORDS = 6
_SOCKET, _OUT_AT, _OUT_LEFT, _IN_AT, _IN_LEFT, _IN_FLAGS = range(_CHANNEL_WORDS)
_READS, _WRITES = 1 << 32, 4 << 32  # POLLIN and POLLOUT, where a struct pollfd has its events
_IDLE = (1 << 32) - 1  # no socket, no events
_LONGEST_MS = 2**31 - 1  # of one wait of poll's
_MOST_BYTES = 1 << 62  # of a message
_OVER, _LATE, _AGAIN = 0, -1, -2  # or the channel that has ended, from 1 on

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


class Lost(Exception):
    """A connection has ended, carries nonsense, or nothing came over it before the deadline."""


@functools.cache
def loop() -> Callable[..., int]:
    """The loop: moves bytes until all are received and, with `all`, sent; or until a handler may run.

    Arguments: plan, polled, count, all, ms of a wait.
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


class Channels:
    """What is to be sent to some ranks, and to be received from them. One thread at a time.

    Args:
        sockets: TCP connections, by rank.
        timeout_s: deadline of a wait.
    """

    def __init__(self, sockets: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._places = {rank: at for at, rank in enumerate(sockets)}
        self._timeout_s = timeout_s
        self._plan = np.zeros((len(sockets), _CHANNEL_WORDS), np.int64)
        self._polled = np.zeros(len(sockets), np.int64)
        self._plan[:, _SOCKET] = [one.fileno() for one in sockets.values()]
        self._addresses = [one.__array_interface__["data"][0] for one in (self._plan, self._polled)]
        self._held: dict[tuple[int, int], Array] = {}  # what is sent from, and received to

    def send(self, rank: int, data: Array) -> None:
        """Has data sent by `run`; contiguous, read until it is.

        Args:
            rank: the receiver; nothing else is on its way there.
            data: of any dtype.
        """
        self._hold(rank, _OUT_AT, data)

    def unsent(self, rank: int) -> Array:
        """What is still to be sent to a rank: uint8, a view of what `send` was given."""
        left = int(self._plan[self._places[rank], _OUT_LEFT])
        if not left:
            return np.empty(0, np.uint8)
        data = self._held[rank, _OUT_AT].reshape(-1).view(np.uint8)
        return data[len(data) - left :]

    def expect(self, rank: int, out: Array) -> None:
        """Has `run` receive as much as fits into `out`; contiguous, overwritten.

        Args:
            rank: the sender; nothing else is expected from it.
            out: of any dtype.
        """
        self._plan[self._places[rank], _IN_FLAGS] = socket.MSG_DONTWAIT
        self._hold(rank, _IN_AT, out)

    def skip(self, rank: int, size_bytes: int) -> None:
        """Has `run` receive `size_bytes` from a rank, and drop them."""
        self._plan[self._places[rank], _IN_FLAGS] = socket.MSG_DONTWAIT | socket.MSG_TRUNC
        self._plan[self._places[rank], _IN_LEFT] = min(max(0, size_bytes), _MOST_BYTES)

    def run(self, *, all_sent: bool = True) -> None:
        """Returns when all that is expected is here and, with `all_sent`, all is sent.

        Raises:
            Lost: a rank has ended, or a wait has timed out.
            BaseException: that of a signal handler; the next call goes on.
        """
        deadline = time.monotonic() + self._timeout_s
        wait_s, left = self._timeout_s, list[int]()
        while True:
            ended = loop()(
                *self._addresses,
                len(self._polled),
                all_sent,
                min(math.ceil(wait_s * 1000), _LONGEST_MS),
            )
            if ended == _OVER:
                return
            if left != (left := self._plan[:, [_OUT_LEFT, _IN_LEFT]].ravel().tolist()):  # bytes came or went
                deadline = time.monotonic() + self._timeout_s
            wait_s = deadline - time.monotonic()
            if ended == _LATE or (ended == _AGAIN and wait_s <= 0):
                raise Lost(f"nothing came within {self._timeout_s:.0f} s")
            if ended != _AGAIN:
                raise Lost(f"the connection with rank {list(self._places)[ended - 1]} has ended")

    def _hold(self, rank: int, at: int, data: Array) -> None:
        self._held[rank, at] = data
        self._plan[self._places[rank], at : at + 2] = data.__array_interface__["data"][0], data.nbytes
