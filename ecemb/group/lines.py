"""Lines: the ranks' own connections for notes, which are messages of some dozen bytes.

gloo announces a receiver to the sender, reads each message in a thread of its own, and wakes the thread that
waits for it. For a note that costs several times what the note does. Here a note waits in its socket until
the thread that needs it reads it.

The lines of rank i are those to i + 2^j and i - 2^j (mod N), as in a dissemination. All notes are of one
size on the wire. An exception of a signal handler loses none: a note is looked at, kept, and only then taken
from its socket; what is found there twice is dropped by its number. The newest notes are kept when they have
been received, so that a wait can be repeated.

Must not know what notes say.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

import numpy as np

from ..kernels.contract import Words
from .links import Link, drop

_HEAD = struct.Struct("=III4x")  # tag, number on the line, words
_LEAST_WORDS = 16
_KEPT = 64
"""Notes of a line. The end of a transaction has a few, and no rank is two of them ahead of another one."""
_TIME = struct.Struct("@ll")  # a struct timeval


class Lines:
    """Notes to and from the ranks that are linked with this one. Threads may share an object.

    Args:
        links: with other ranks, by their number; consumed. Nothing is sent before all ends are `Lines`.
        world_size: number of ranks.
        timeout_s: deadline of a wait.
    """

    def __init__(self, links: Sequence[Link], world_size: int, timeout_s: float) -> None:
        self._words = _LEAST_WORDS + world_size // 32
        size = _HEAD.size + 8 * self._words
        self._lines = {link.peer: _Line(link.release(), size, timeout_s) for link in links}

    def send(self, words: Words, to: int, tag: int) -> None:
        """Sends a note, and waits for nothing.

        Args:
            words: uint64 [m], m at most 16 + N // 32, read.
            to: a linked rank.
            tag: below 2^32; finds the note among those of this rank.

        Raises:
            ValueError: the note is too long.
            OSError: the line has ended.
        """
        if len(words) > self._words:
            raise ValueError(f"a note has at most {self._words} words, not {len(words)}")
        self._lines[to].send(tag, words.tobytes())

    def receive(self, out: Words, source: int, tag: int) -> None:
        """Waits for a note; may be called again for the same one.

        Args:
            out: uint64 [m], overwritten; as long as the note.
            source: a linked rank.
            tag: the note's.

        Raises:
            OSError: the line has ended or timed out, or carries something else than notes.
        """
        found = self._lines[source].receive(tag)
        if len(found) != out.nbytes:
            raise ConnectionError(f"rank {source} sent a note of {len(found)} bytes in place of {out.nbytes}")
        out[:] = np.frombuffer(found, np.uint64)

    def close(self) -> None:
        """Ends all lines. May be called twice."""
        for line in self._lines.values():
            line.close()


class _Line:
    """One connection.

    Args:
        connection: blocking from now on; consumed.
        size: bytes of a note on the wire.
        timeout_s: deadline of a wait.
    """

    def __init__(self, connection: socket.socket, size: int, timeout_s: float) -> None:
        connection.setblocking(True)  # and with deadlines of the kernel's: Python's own cost a call each
        limit = _TIME.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
        self._socket, self._size, self._timeout_s = connection, size, timeout_s
        self._notes: dict[int, bytes] = {}  # by tag, the oldest first
        self._sent = self._heard = 0  # number of the last note
        self._changed = threading.Condition()
        self._reader: int | None = None  # the thread that reads the socket, for all

    def send(self, tag: int, data: bytes) -> None:
        with self._changed:
            self._sent += 1
            head = _HEAD.pack(tag, self._sent, len(data) // 8)
            self._socket.sendall((head + data).ljust(self._size, b"\0"), socket.MSG_NOSIGNAL)

    def receive(self, tag: int) -> bytes:
        me = threading.get_ident()
        while True:
            try:
                with self._changed:
                    while tag not in self._notes and self._reader not in (None, me):
                        self._changed.wait()
                    if tag in self._notes:
                        return self._notes[tag]
                    self._reader = me
                self._read()
            finally:
                with self._changed:
                    if self._reader == me:
                        self._reader = None
                        self._changed.notify_all()

    def close(self) -> None:
        drop(self._socket)

    def _read(self) -> None:
        """Waits for the next note, and keeps it."""
        note = self._look()
        tag, number, words = _HEAD.unpack_from(note)
        if _HEAD.size + 8 * words > self._size:
            raise ConnectionError(f"a note of {words} words came")
        with self._changed:
            if number > self._heard:
                while len(self._notes) >= _KEPT:
                    del self._notes[next(iter(self._notes))]
                self._notes[tag] = note[_HEAD.size : _HEAD.size + 8 * words]
                self._heard = number
        self._socket.recv(self._size, socket.MSG_WAITALL)

    def _look(self) -> bytes:
        """Waits for the next note, which stays in the socket.

        A signal, or the deadline, can end a call that has a part of a note.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                note = self._socket.recv(self._size, socket.MSG_PEEK | socket.MSG_WAITALL)
            except BlockingIOError:
                note = b"-"
            if len(note) == self._size:
                return note
            if not note or self._has_ended():
                raise ConnectionError("the connection has ended")
            if time.monotonic() >= deadline:
                raise TimeoutError(f"nothing came within {self._timeout_s:.0f} s")

    def _has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))
