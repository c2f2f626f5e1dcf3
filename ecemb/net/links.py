"""The workers' own connections: neighbours, their addresses, and links that both ends have authenticated.

Owns the sockets over which workers watch each other. The neighbours of worker i of N are i + 2^j and
i - 2^j (mod N): all other workers while N is small, O(log N) of them when N is large. The end of one worker
does not separate the other workers.

All sockets are closed in forked children: a descriptor that is open there hides the end of this process from
its peers. `watch` sends the messages.

Bytes from the network are not trusted. A connection becomes a `Link` only when both ends have proved that
they know the secret of this start: each sends an HMAC over a random number of the answering end, and the
secret is never sent. Before its proof, a caller is sent a few dozen bytes, and is dropped after a few
seconds. When too many callers have not sent their proof, the oldest caller of the address with the most of
them is dropped, so that a new caller is always admitted.

All connections between ranks are made here, whatever they carry later: no other module accepts connections.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence

from ..errors import RendezvousError
from .wording import counted

_CHUNK_BYTES = 4096
_SIOCGIFADDR = 0x8915

_sockets: set[socket.socket] = set()  # all open sockets of this module


def neighbours(index: int, size: int) -> list[int]:
    """The neighbours of worker `index` of `size`: i +- 2^j (mod size), ascending. Symmetric."""
    steps = [1 << j for j in range((size - 1).bit_length())]
    return sorted({(index + way * step) % size for step in steps for way in (1, -1)} - {index})


def calls(index: int, peer: int, size: int) -> bool:
    """Whether worker `index` connects to `peer`, and not the reverse: if the way upwards to it is shorter.

    So with three workers or more, every worker has neighbours that connect to it: if it has ended, they get
    an error at once.
    """
    return ((peer - index) % size, index) < ((index - peer) % size, peer)


def own_addresses(towards: str) -> tuple[str, ...]:
    """Addresses under which other workers may reach this host, the likeliest first.

    First those of the interfaces in GLOO_SOCKET_IFNAME, as for gloo; then that of the interface on the route
    to `towards`; then all others.

    Args:
        towards: a host that all workers can reach, such as MASTER_ADDR.
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
    """IPv4 addresses of some of this host's interfaces, as its hostname may resolve to 127.0.1.1 only."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # there is no interface of that name, or it has no IPv4 address
                continue
            found.append(socket.inet_ntoa(answer[20:24]))
    return found


class Link:
    """An authenticated connection with a neighbour. No method blocks.

    Args:
        peer: the neighbour's index.
        connection: a socket that `keep` has returned.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The socket's descriptor, for poll; -1 once closed."""
        return self._socket.fileno()

    def read(self) -> bool:
        """Receives available bytes, at most 4 KiB. Returns False if the connection has ended."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:  # reset, or given up by the kernel
            return False
        self._received += data
        return bool(data)

    def peek(self, size: int) -> bytes | None:
        """The next `size` received bytes, which stay in the buffer; None if fewer are received."""
        return bytes(self._received[:size]) if len(self._received) >= size else None

    def take(self, size: int) -> bytes | None:
        """Takes the next `size` received bytes from the buffer; None if fewer are received."""
        data = self.peek(size)
        if data is not None:
            del self._received[:size]
        return data

    def send(self, data: bytes) -> None:
        """Sends as much as the connection accepts now, and keeps the rest for the next call.

        If the connection has ended, the bytes are dropped, and `read` returns False.
        """
        self._unsent += data
        try:
            sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._unsent)
        del self._unsent[:sent]

    def finish(self) -> None:
        """Shuts down the sending direction: the peer receives an end of file."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # the peer has closed the connection before
            return

    def release(self) -> socket.socket:
        """Returns the socket, which the caller owns from then on. Only before bytes were received."""
        return self._socket

    def close(self) -> None:
        """Closes the connection. May be called twice."""
        drop(self._socket)


def listen() -> socket.socket:
    """A socket that listens at a free port, at all addresses of this host."""
    if socket.has_dualstack_ipv6():
        try:
            return keep(socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True))
        except OSError:  # no interface has an IPv6 address
            pass
    return keep(socket.create_server(("", 0)))


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets of this process."""
    one, other = socket.socketpair()
    return keep(one), keep(other)


def keep(connection: socket.socket) -> socket.socket:
    """Makes a socket non-blocking, and has it closed in forked children; `drop` closes it."""
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
    """Closes kept sockets when their owner is collected, or when the result is called."""
    ending = weakref.finalize(owner, lambda: [drop(one) for one in connections])
    ending.atexit = False
    return ending


def _close_in_child() -> None:
    for connection in list(_sockets):
        connection.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_close_in_child)


_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HELLO = struct.Struct("!I32s")  # index of the caller, proof
_WELCOME = b"+"
_PROOF_S = 5.0  # time for the proof of a connection
_GUESTS = 64  # callers without a proof at a time, in addition to the expected callers
_STAGGER_S = 0.25  # before a peer's next address is tried, in parallel with the last
_PAUSE_S = 0.5  # before all of a peer's addresses are tried again
_TICK_S = 0.05
CHECK_S = 0.25
"""Time between two checks of `connect`."""
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


@dataclasses.dataclass(frozen=True)
class Peer:
    """One worker of this start.

    Attributes:
        name: for messages, e.g. "rank 2 (host b, pid 123)".
        addresses: possible addresses, the likeliest first.
        port: port of its listener.
    """

    name: str
    addresses: tuple[str, ...]
    port: int


class Listener:
    """The socket that neighbours connect to: open before this worker is announced, closed by `connect`."""

    def __init__(self) -> None:
        self.socket: socket.socket = listen()
        self.port: int = self.socket.getsockname()[1]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuses further connections. May be called twice."""
        drop(self.socket)


def connect(
    listener: Listener,
    index: int,
    size: int,
    peers: Mapping[int, Peer],
    secret: bytes,
    deadline: float,
    check: Callable[[], None] = lambda: None,
) -> list[Link]:
    """Links this worker with its neighbours. All workers.

    Args:
        listener: announced to the neighbours; closed when this function returns or raises.
        index: index of this worker, 0 to `size` - 1.
        size: number of workers.
        peers: index -> neighbour; each neighbour has this worker among its own neighbours.
        secret: known to the workers of this start only.
        deadline: on time.monotonic().
        check: called now and then while neighbours are missing; may raise an error, which ends the wait.

    Returns:
        A link with each neighbour, in the order of `peers`. A link may have received bytes already.

    Raises:
        RendezvousError: a neighbour ended, or was not linked before the deadline.
    """
    meeting = _Meeting(listener, index, size, peers, secret)
    try:
        return meeting.hold(deadline, check)
    except BaseException:
        for link in meeting.links.values():
            link.close()
        raise
    finally:
        meeting.close()


class _NotOurs(Exception):
    """The other end is not a worker of this start, or not the expected worker."""


@dataclasses.dataclass(eq=False)
class _Call:
    """The attempts to reach one peer, at all of its addresses."""

    peer: int
    untried: list[str]
    next_at: float = 0.0
    errors: dict[str, Exception] = dataclasses.field(default_factory=dict[str, Exception])


@dataclasses.dataclass(eq=False)
class _Contact:
    """A connection that is not a link yet.

    Attributes:
        socket: the connection.
        call: the call that it belongs to; None for a guest: a connection that the listener has accepted.
        address: address of the other end.
        until: deadline of the proof, on time.monotonic().
        handshake: yields the poll events that it waits for, and returns the link.
    """

    socket: socket.socket
    call: _Call | None
    address: str
    until: float
    handshake: Generator[int, None, Link] = dataclasses.field(init=False)


class _Meeting:
    """Links this worker with its neighbours, in one loop over all sockets: no connection blocks another."""

    def __init__(
        self, listener: Listener, index: int, size: int, peers: Mapping[int, Peer], secret: bytes
    ) -> None:
        self.links: dict[int, Link] = {}
        self._listener, self._index, self._peers, self._secret = listener, index, peers, secret
        self._calls = {
            peer: _Call(peer, list(one.addresses)) for peer, one in peers.items() if calls(index, peer, size)
        }
        self._contacts: dict[_Contact, None] = {}  # the oldest first
        self._most_guests = _GUESTS + len(peers) - len(self._calls)
        self._strangers, self._last_stranger = 0, ""  # guests that ended without a proof
        self._selector = selectors.PollSelector()  # an epoll's set would be shared with forked children
        self._selector.register(listener.socket, selectors.EVENT_READ)

    def hold(self, deadline: float, check: Callable[[], None]) -> list[Link]:
        """Runs until all neighbours are linked."""
        check_at = time.monotonic() + CHECK_S
        while missing := [peer for peer in self._peers if peer not in self.links]:
            now = time.monotonic()
            if now > check_at:
                check()
                check_at = now + CHECK_S
            for peer in missing:
                if peer in self._calls:
                    self._dial(self._calls[peer], now)
            is_called = False
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener.socket:
                    is_called = True
                elif isinstance(key.data, _Contact):
                    self._advance(key.data)
                elif isinstance(key.data, Link) and not key.data.read():
                    name = self._peers[key.data.peer].name
                    raise RendezvousError(f"{name} ended while the workers were connecting: see its log")
            if is_called:  # last: a guest whose proof has been received is a link before it could be dropped
                self._admit(now)
            for contact in [one for one in self._contacts if one.until < now]:
                self._end(contact, TimeoutError(errno.ETIMEDOUT, f"no proof came within {_PROOF_S:.0f} s"))
            if now > deadline and len(self.links) < len(self._peers):
                raise RendezvousError(self._late())
        return [self.links[peer] for peer in self._peers]

    def close(self) -> None:
        """Closes all connections that are not links, and the listener."""
        for contact in list(self._contacts):
            self._end(contact)
        self._listener.close()
        self._selector.close()

    def _dial(self, call: _Call, now: float) -> None:
        """Tries a peer's next address if the last address has failed, or has not answered for a while."""
        is_tried = any(contact.call is call for contact in self._contacts)
        if is_tried and (now < call.next_at or not call.untried):
            return
        peer = self._peers[call.peer]
        if not call.untried:
            if all(isinstance(error, ConnectionRefusedError) for error in call.errors.values()):
                raise RendezvousError(
                    f"{_reach(peer)} refuses connections: it ended while the workers were connecting (see "
                    f"its log), or a firewall is between"
                )
            if now < call.next_at + _PAUSE_S:
                return
            call.untried = list(peer.addresses)
        address = call.untried.pop(0)
        call.next_at = now + _STAGGER_S
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            connection = keep(socket.socket(family, socket.SOCK_STREAM))
        except OSError as error:  # this host lacks the address family
            call.errors[address] = error
            return
        error = connection.connect_ex((address, peer.port))
        contact = _Contact(connection, call, address, now + _PROOF_S)
        contact.handshake = self._introduce(contact, call.peer, 0 if error == errno.EINPROGRESS else error)
        self._begin(contact)

    def _admit(self, now: float) -> None:
        """Accepts one connection. If there are too many guests, drops one of them first."""
        try:
            connection, (address, *_) = self._listener.socket.accept()
        except OSError as error:  # the caller has hung up, or this process is out of descriptors
            if error.errno in _NO_DESCRIPTOR:
                self._send_away()
            return
        keep(connection)
        if sum(contact.call is None for contact in self._contacts) >= self._most_guests:
            self._send_away()
        contact = _Contact(connection, None, str(address), now + _PROOF_S)
        contact.handshake = self._answer(connection)
        self._begin(contact)

    def _send_away(self) -> None:
        """Drops the oldest guest of the address with the most guests."""
        guests = [contact for contact in self._contacts if contact.call is None]
        crowds = Counter(guest.address for guest in guests)
        if guests:
            self._end(max(guests, key=lambda guest: crowds[guest.address]))  # the first, so the oldest

    def _begin(self, contact: _Contact) -> None:
        self._contacts[contact] = None
        self._selector.register(contact.socket, selectors.EVENT_READ, contact)
        self._advance(contact)

    def _advance(self, contact: _Contact) -> None:
        """Continues a handshake whose socket is ready."""
        if contact not in self._contacts:  # another address of the peer has become the link
            return
        try:
            events = next(contact.handshake)
        except StopIteration as end:
            link: Link = end.value
            self.links[link.peer] = link
            self._forget(contact)
            self._selector.register(link, selectors.EVENT_READ, link)
            for other in [one for one in self._contacts if one.call and one.call is contact.call]:
                self._end(other)
        except (OSError, _NotOurs) as error:
            self._end(contact, error)
        else:
            self._selector.modify(contact.socket, events, contact)

    def _end(self, contact: _Contact, error: Exception | None = None) -> None:
        self._forget(contact)
        drop(contact.socket)
        if contact.call is None:
            self._strangers, self._last_stranger = self._strangers + 1, contact.address
        elif error is not None:
            contact.call.errors[contact.address] = error

    def _forget(self, contact: _Contact) -> None:
        del self._contacts[contact]
        self._selector.unregister(contact.socket)

    def _introduce(self, contact: _Contact, peer: int, error: int) -> Generator[int, None, Link]:
        """The caller's part of the handshake: the answering end has to send its proof first."""
        connection = contact.socket
        if not error:
            yield selectors.EVENT_WRITE
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        greeting = yield from _read(connection, _NONCE_BYTES + _PROOF_BYTES)
        nonce, proof = greeting[:_NONCE_BYTES], greeting[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"answers", peer, peer, nonce)):
            raise _NotOurs("something else answers there")
        _say(connection, _HELLO.pack(self._index, self._proof(b"calls", self._index, peer, nonce)))
        contact.until = float("inf")  # the peer may have made its link already, which needs this connection
        yield from _read(connection, len(_WELCOME))
        return Link(peer, connection)

    def _answer(self, connection: socket.socket) -> Generator[int, None, Link]:
        """The listener's part of the handshake."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        _say(connection, nonce + self._proof(b"answers", self._index, self._index, nonce))
        caller, proof = _HELLO.unpack((yield from _read(connection, _HELLO.size)))
        if not hmac.compare_digest(proof, self._proof(b"calls", caller, self._index, nonce)):
            raise _NotOurs("it does not know the secret of this start")
        if caller not in self._peers or caller in self._calls or caller in self.links:
            raise _NotOurs(f"worker {caller} has no reason to call")
        _say(connection, _WELCOME)
        return Link(caller, connection)

    def _proof(self, role: bytes, who: int, whom: int, nonce: bytes) -> bytes:
        return hmac.digest(self._secret, role + struct.pack("!II", who, whom) + nonce, "sha256")

    def _late(self) -> str:
        missing: list[str] = []
        for peer in self._peers:
            if peer not in self.links:
                call = self._calls.get(peer)
                errors = {} if call is None else call.errors
                why = "has not called" if call is None else "does not answer"
                why += "".join(f", {address}: {error}" for address, error in errors.items())
                missing.append(f"{_reach(self._peers[peer])} {why}")
        return (
            f"the workers were not connected before the deadline of the rendezvous: {'; '.join(missing)}. "
            f"See their logs; a firewall between hosts must let workers reach each other at any port"
            f"{self._called()}"
        )

    def _called(self) -> str:
        """The sentence about connections without a proof, for the error; empty if there were none."""
        waiting = [contact.address for contact in self._contacts if contact.call is None]
        if not (count := self._strangers + len(waiting)):
            return ""
        return (
            f". {counted(count, 'connection')} to this worker's port {self._listener.port} came without a "
            f"proof of this start's secret, the last one from {[self._last_stranger, *waiting][-1]}: if that "
            f"is no worker of the job, keep strangers away from the workers' ports"
        )


def _reach(peer: Peer) -> str:
    return f"{peer.name} at {', '.join(peer.addresses)}, port {peer.port},"


def _read(connection: socket.socket, size: int) -> Generator[int, None, bytes]:
    """Receives exactly `size` bytes, and no byte after them."""
    data = b""
    while len(data) < size:
        yield selectors.EVENT_READ
        try:
            part = connection.recv(size - len(data))
        except BlockingIOError:
            continue
        if not part:
            raise ConnectionAbortedError(errno.ECONNABORTED, "it hung up")
        data += part
    return data


def _say(connection: socket.socket, data: bytes) -> None:
    if connection.send(data, socket.MSG_NOSIGNAL) < len(data):  # a handshake's few bytes fit the buffer
        raise ConnectionAbortedError(errno.ECONNABORTED, "it takes nothing")
