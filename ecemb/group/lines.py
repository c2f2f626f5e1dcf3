"""Lines: the ranks' own connections for notes, which are messages of some dozen bytes.

gloo announces a receiver to the sender, reads each message in a thread of its own, and wakes the thread that
waits for it. For a note that costs several times what the note does. Here a note waits in its socket until
the thread that needs it reads it.

The lines of rank i are those to i + 2^j and i - 2^j (mod N), as in a dissemination. All notes are of one
size on the wire. The newest ones are kept when they have been received, so that a wait can be repeated which
an exception of a signal handler has interrupted.

Must not know what notes say.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence

import numpy as np

from ..kernels.contract import Words
from .channels import Channels, Lost
from .links import Link, kept_by

_HEAD = struct.Struct("=II")  # tag, words
_LEAST_WORDS = 16
_KEPT = 64
"""Notes of a line. The end of a transaction has a few, and no rank is two of them ahead of another one."""


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
        sockets = {link.peer: link.release() for link in links}
        self._lines = {peer: _Line(peer, one, size, timeout_s) for peer, one in sockets.items()}
        self._end = kept_by(self, list(sockets.values()))

    def send(self, words: Words, to: int, tag: int) -> None:
        """Sends a note, and waits for nothing.

        Args:
            words: uint64 [m], m at most 16 + N // 32, read.
            to: a linked rank.
            tag: below 2^32; finds the note among those of this rank.

        Raises:
            ValueError: the note is too long.
            Lost: the line has ended.
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
            Lost: the line has ended or timed out, or carries something else than notes.
        """
        found = self._lines[source].receive(tag)
        if len(found) != out.nbytes:
            raise Lost(f"rank {source} sent a note of {len(found)} bytes in place of {out.nbytes}")
        out[:] = np.frombuffer(found, np.uint64)

    def close(self) -> None:
        """Ends all lines. May be called twice."""
        self._end()


class _Line:
    """One connection.

    Args:
        peer: the rank at its other end.
        connection: must last as long.
        size: bytes of a note on the wire.
        timeout_s: deadline of a wait.
    """

    def __init__(self, peer: int, connection: socket.socket, size: int, timeout_s: float) -> None:
        self._peer = peer
        self._sending, self._reading = (Channels({peer: connection}, timeout_s) for _ in range(2))
        self._sent, self._read = np.zeros((2, size), np.uint8)
        self._sends = threading.Lock()
        self._notes: dict[int, bytes] = {}  # by tag, the oldest first
        self._changed = threading.Condition()
        self._reader: int | None = None  # the thread that reads the socket, for all
        self._reading.expect(peer, self._read)

    def send(self, tag: int, data: bytes) -> None:
        with self._sends:
            if len(self._sending.unsent(self._peer)):  # left by an interruption
                self._sending.run()
            note = (_HEAD.pack(tag, len(data) // 8) + data).ljust(len(self._sent), b"\0")
            self._sent[:] = np.frombuffer(note, np.uint8)
            self._sending.send(self._peer, self._sent)
            self._sending.run()

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
                self._keep_next()
            finally:
                with self._changed:
                    if self._reader == me:
                        self._reader = None
                        self._changed.notify_all()

    def _keep_next(self) -> None:
        """Waits for the next note, and keeps it; after an interruption the same one again."""
        self._reading.run()
        note = self._read.tobytes()
        tag, words = _HEAD.unpack_from(note)
        if _HEAD.size + 8 * words > len(note):
            raise Lost(f"rank {self._peer} sent a note of {words} words")
        with self._changed:
            if tag not in self._notes and len(self._notes) >= _KEPT:
                del self._notes[next(iter(self._notes))]
            self._notes[tag] = note[_HEAD.size : _HEAD.size + 8 * words]
        self._reading.expect(self._peer, self._read)
