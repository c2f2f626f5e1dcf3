"""Messages between the command and its fork server, on a stream socket.

A message is one JSON object after its length; descriptors travel with its first byte. Nothing is ever
unpickled. Both ends check that the other is of the same user before a message is read.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence

MOST_DESCRIPTORS = 250
"""Descriptors in one message; the kernel takes 253."""

MOST_BYTES = 1 << 27
"""Bytes of one message. The kernel takes 6 MiB of arguments and environment, which fit well when escaped."""

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("iII")
_CHUNK_BYTES = 1 << 16


class Foreign(Exception):
    """The other end is of another user."""


def check_peer(connection: socket.socket) -> None:
    """Returns if the process at the other end, or the one that made its listener, is this user's.

    Raises:
        Foreign: it belongs to another user.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise Foreign(f"the other end is of user {user}, and this process of user {os.geteuid()}")


def send(connection: socket.socket, message: Mapping[str, object], descriptors: Sequence[int] = ()) -> None:
    """Sends one message.

    Raises:
        OSError: the other end is gone; `BlockingIOError` if a connection that doesn't block has no room.
    """
    body = json.dumps(message).encode()
    data = _LENGTH.pack(len(body)) + body
    sent = socket.send_fds(connection, [data], descriptors) if descriptors else 0
    if left := data[sent:]:  # nothing is sent as well, and the other end may be gone once it has all
        connection.sendall(left)


class Inbox:
    """The bytes that have come on a connection.

    Attributes:
        descriptors: received descriptors that no caller has taken; the taker closes them.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._bytes = bytearray()
        self.descriptors: list[int] = []

    def read(self) -> bool:
        """Reads the bytes that have come.

        Returns:
            False once the other end is gone.

        Raises:
            BlockingIOError: nothing has come yet, and the connection doesn't block.
        """
        try:
            data, descriptors, _, _ = socket.recv_fds(
                self._connection, _CHUNK_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        self._bytes += data
        self.descriptors += descriptors
        return bool(data)

    def take(self) -> dict[str, object] | None:
        """The next complete message; None if there is none yet.

        Raises:
            ValueError: the bytes are not a message.
            RecursionError: they are one of more levels than can be parsed.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > MOST_BYTES:
            raise ValueError(f"a message has at most {MOST_BYTES} bytes, and this one {length}")
        stop = _LENGTH.size + length
        if len(self._bytes) < stop:
            return None
        message = json.loads(bytes(self._bytes[_LENGTH.size : stop]))
        del self._bytes[:stop]
        if not isinstance(message, dict):
            raise ValueError("a message is a JSON object")
        return message
