"""The workers' own connections: which workers are neighbours, their addresses, and links.

Owns the sockets over which workers watch each other. The neighbours of worker i of N are i + 2^j and
i - 2^j (mod N): all others while N is small, O(log N) of them when N is large. The end of one worker does not
separate the others.

All sockets are closed in forked children: a descriptor that is open there hides the end of this process from
its peers. `handshake` makes the connections, and `failure_detector` sends the messages.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import weakref
from collections.abc import Callable, Sequence

_CHUNK_BYTES = 4096
_SIOCGIFADDR = 0x8915

_sockets: set[socket.socket] = set()  # all that are open


def neighbours(index: int, size: int) -> list[int]:
    """The neighbours of worker `index` of `size`: i +- 2^j (mod size), ascending. Symmetric."""
    steps = [1 << j for j in range((size - 1).bit_length())]
    return sorted({(index + way * step) % size for step in steps for way in (1, -1)} - {index})


def calls(index: int, peer: int, size: int) -> bool:
    """Whether worker `index` is the end that connects: it is, if the peer is nearer upwards.

    So with three workers or more, every worker both calls and is called, and the callers of a worker that is
    gone notice at once.
    """
    return ((peer - index) % size, index) < ((index - peer) % size, peer)


def own_addresses(towards: str) -> tuple[str, ...]:
    """Addresses under which other workers may reach this host, the likeliest first.

    Those of the interfaces in GLOO_SOCKET_IFNAME, as for gloo; then the one that the route leads over; then
    all others.

    Args:
        towards: a host that all workers reach, such as MASTER_ADDR.
    """
    found = _of_interfaces(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    for family, address in _resolved(towards):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))  # sends nothing: it only looks up the route
            except OSError:
                continue
            found.append(str(probe.getsockname()[0]))
    local = [address for _, address in _resolved(socket.gethostname())]
    local += _of_interfaces([name for _, name in socket.if_nameindex()])
    found += [address for address in local if not address.startswith(("127.", "::1"))]
    return tuple(dict.fromkeys(one for one in found if not one.startswith("fe80:"))) or ("127.0.0.1",)


def _resolved(name: str) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except OSError:  # a hostname that does not resolve is common, and the other addresses are enough
        return []
    return [(family, str(address[0])) for family, _, _, _, address in found]


def _of_interfaces(names: Sequence[str]) -> list[str]:
    """IPv4 addresses of some of this host's interfaces: its name may resolve to 127.0.1.1 only."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # there is none of that name, or it has no IPv4 address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found


class Link:
    """A proven connection with a neighbour. Never waits.

    Args:
        peer: the neighbour's index.
        connection: kept by `keep`.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """For poll; -1 once closed."""
        return self._socket.fileno()

    def read(self) -> bool:
        """Reads what has come, at most 4 KiB. False if the connection has ended."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # reset, or given up by the kernel
            return False
        self._received += data
        return bool(data)

    def peek(self, size: int) -> bytes | None:
        """The next `size` received bytes, which stay in the buffer, or None if they have not all come."""
        return bytes(self._received[:size]) if len(self._received) >= size else None

    def take(self, size: int) -> bytes | None:
        """The next `size` received bytes, or None if they have not all come."""
        if len(self._received) < size:
            return None
        data = bytes(self._received[:size])
        del self._received[:size]
        return data

    def send(self, data: bytes) -> None:
        """Sends as much as the connection takes now, and keeps the rest. An end shows in `read`."""
        self._unsent += data
        try:
            sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]

    def finish(self) -> None:
        """Says that nothing more will be sent."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the peer was faster
            return

    def release(self) -> socket.socket:
        """The connection, which is the caller's now, before anything has come over it."""
        return self._socket

    def close(self) -> None:
        """Ends the connection. May be called twice."""
        drop(self._socket)


def listen() -> socket.socket:
    """A listening socket at a port of the kernel's choice, at all addresses of this host."""
    if socket.has_dualstack_ipv6():
        try:
            return keep(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        except OSError:  # no interface has an address of that family
            pass
    return keep(socket.create_server(("", 0)))


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets of this process."""
    one, other = socket.socketpair()
    return keep(one), keep(other)


def keep(connection: socket.socket) -> socket.socket:
    """Makes a socket non-blocking, and has it closed in forked children; `drop` ends it."""
    _sockets.add(connection)
    connection.setblocking(False)
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def drop(connection: socket.socket) -> None:
    """Closes a kept socket. May be called twice."""
    _sockets.discard(connection)
    connection.close()


def kept_by(owner: object, connections: Sequence[socket.socket]) -> Callable[[], object]:
    """Has kept sockets dropped with the object that uses them: the result does that, or its end."""
    ending = weakref.finalize(owner, lambda: [drop(one) for one in connections])
    ending.atexit = False
    return ending


def _close_in_child() -> None:
    for connection in list(_sockets):
        connection.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close_in_child)
