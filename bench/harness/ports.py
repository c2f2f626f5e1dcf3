"""Ports of this machine that a process gets before it listens there."""

from __future__ import annotations

import socket
from types import TracebackType


class ReservedPort:
    """A free port that the kernel gives to no other process until `close`; its owner may listen there.

    A port that was merely seen to be free may be another process's before it is used. This one stays bound,
    by a socket that does not listen: the kernel then passes over it when it chooses a port, and a server that
    sets SO_REUSEADDR, as those of torch do, can listen there all the same.

    Attributes:
        number: of the port.
    """

    def __init__(self) -> None:
        try:  # of both families
            self._socket = socket.socket(socket.AF_INET6)
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._bind()
        except OSError:  # this machine has one of them
            self._socket = socket.socket()
            self._bind()

    def _bind(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Gives the port up."""
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
