"""Links: who is next to whom, where a worker is reached, and sockets that never wait."""

from __future__ import annotations

import gc
import ipaddress
import os
import socket
from collections.abc import Iterator

import pytest

from ecemb.net import links
from ecemb.net.links import Link, calls, keep, neighbours, own_addresses, pair

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 12, 33, 100, 1000]


def reached(start: int, size: int, without: set[int]) -> set[int]:
    """Whom news from `start` reach if `without` are gone."""
    found, waiting = {start}, [start]
    while waiting:
        near = set(neighbours(waiting.pop(), size)) - found - without
        found |= near
        waiting += near
    return found


@pytest.mark.parametrize("size", SIZES)
def test_neighbours_are_mutual_and_few(size: int) -> None:
    near = [neighbours(index, size) for index in range(size)]
    for index, found in enumerate(near):
        assert found == sorted(set(found)) and index not in found
        assert all(index in near[other] for other in found)
        assert len(found) <= 2 * (size - 1).bit_length()
    if size <= 7:
        assert all(len(found) == size - 1 for found in near)


@pytest.mark.parametrize("size", [size for size in SIZES if 2 < size <= 100])
def test_no_two_workers_that_are_gone_cut_the_rest_apart(size: int) -> None:
    for one in (0, size // 2):
        for other in range(size):
            left = set(range(size)) - {one, other}
            assert not left or reached(min(left), size, {one, other}) == left


@pytest.mark.parametrize("size", SIZES)
def test_one_of_two_neighbours_calls_and_everyone_is_missed_by_somebody(size: int) -> None:
    for index in range(size):
        near = neighbours(index, size)
        assert all(calls(index, peer, size) != calls(peer, index, size) for peer in near)
        if size > 2:
            assert 0 < sum(calls(index, peer, size) for peer in near) < len(near)


def test_the_route_to_the_master_comes_first() -> None:
    found = own_addresses("127.0.0.1")
    assert found[0] == "127.0.0.1"
    assert len(set(found)) == len(found)
    for address in found:
        assert not ipaddress.ip_address(address).is_link_local
    assert not any(address.startswith("127.") for address in found[1:])


def test_names_that_nobody_resolves_leave_the_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    found = own_addresses("no-such-host.invalid")
    names = [name for _, name in socket.if_nameindex()]
    local = [address for address in links._of_interfaces(names) if not address.startswith("127.")]
    assert found == (tuple(local) or ("127.0.0.1",))


def test_the_interface_that_gloo_is_told_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one,lo")
    found = own_addresses("no-such-host.invalid")
    assert found[0] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    assert own_addresses("no-such-host.invalid")[1:] == found[2:]


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket]]:
    one, other = pair()
    link = Link(3, one)
    yield link, other
    link.close()
    links.drop(other)


def test_messages_are_taken_whole(ends: tuple[Link, socket.socket]) -> None:
    link, other = ends
    assert link.read() and link.take(1) is None
    other.send(b"abc")
    other.send(b"def")
    assert link.read() and link.take(7) is None
    assert (link.take(4), link.take(2), link.take(1)) == (b"abcd", b"ef", None)


def test_what_came_before_the_end_is_not_lost(ends: tuple[Link, socket.socket]) -> None:
    link, other = ends
    other.send(b"last")
    links.drop(other)
    assert link.read() and not link.read() and link.take(4) == b"last"
    link.send(b"nobody hears it")
    assert not link._unsent


def test_sending_never_waits(ends: tuple[Link, socket.socket]) -> None:
    link, other = ends
    sent = 0
    while not link._unsent:
        link.send(bytes(1 << 16))
        sent += 1 << 16
    received = 0
    while received < sent:
        try:
            received += len(other.recv(1 << 20))
        except BlockingIOError:
            link.send(b"")
    assert received == sent and not link._unsent


def test_a_reset_is_an_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        link = Link(0, keep(listener.accept()[0]))
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    other.close()
    assert not link.read()
    link.close()
    link.close()
    assert link.fileno() == -1


def test_forked_children_hold_no_link() -> None:
    one, other = pair()
    left, right = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(right, bytes([one.fileno() < 0, other.fileno() < 0, not links._sockets]))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(left, 3) == b"\1\1\1"
    assert {one, other} <= links._sockets
    for descriptor in (left, right):
        os.close(descriptor)
    for end in (one, other):
        assert not end.getblocking() and not end.get_inheritable()
        links.drop(end)


def test_sockets_end_with_the_object_that_uses_them(ends: tuple[Link, socket.socket]) -> None:
    class Owner:
        pass

    _, other = ends
    owner = Owner()
    end = links.kept_by(owner, [other])
    assert other.fileno() >= 0
    del owner
    gc.collect()
    assert other.fileno() == -1 and other not in links._sockets
    end()
