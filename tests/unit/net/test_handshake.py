"""Meetings: neighbours find each other, whatever else is at the ports, and strangers find no neighbour."""

from __future__ import annotations

import ast
import dataclasses
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ecemb.errors import RendezvousError
from ecemb.net import links as links_module
from ecemb.net.links import Link, Listener, Peer, calls, connect, keep, neighbours
from support import holdings

SECRET = b"of this start"
DEADLINE_S = 300.0
HERE = "127.0.0.1"


class Workers:
    """Workers of one start, as threads."""

    def __init__(self, size: int, addresses: Sequence[str] = (HERE,)) -> None:
        self.size = size
        self.listeners = [Listener() for _ in range(size)]
        self.peers = [
            Peer(f"rank {i} (host h, pid {i})", tuple(addresses), self.listeners[i].port) for i in range(size)
        ]
        self.links: dict[int, list[Link]] = {}
        self.errors: dict[int, BaseException] = {}
        self._threads: dict[int, threading.Thread] = {}

    def near(self, index: int) -> dict[int, Peer]:
        return {peer: self.peers[peer] for peer in neighbours(index, self.size)}

    def begin(self, *indices: int, secret: bytes = SECRET, deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s

        def run(index: int) -> None:
            try:
                self.links[index] = connect(
                    self.listeners[index], index, self.size, self.near(index), secret, deadline
                )
            except BaseException as error:  # noqa: BLE001 - looked at by the test
                self.errors[index] = error

        for index in indices:
            self._threads[index] = threading.Thread(target=run, args=(index,), daemon=True)
            self._threads[index].start()

    def join(self, *indices: int) -> None:
        for index in indices or list(self._threads):
            self._threads[index].join(DEADLINE_S)
            assert not self._threads[index].is_alive()

    def met(self) -> None:
        """All are linked with their neighbours, and each link has the right one at its other end."""
        self.join()
        assert not self.errors
        for index, links in self.links.items():
            assert [link.peer for link in links] == neighbours(index, self.size)
            for link in links:
                link.send(bytes([index]))
        for links in self.links.values():
            for link in links:
                while (data := link.take(1)) is None:
                    assert link.read()
                assert data == bytes([link.peer])

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        self.join()
        for links in self.links.values():
            for link in links:
                link.close()


@contextmanager
def workers(size: int, addresses: Sequence[str] = (HERE,)) -> Iterator[Workers]:
    descriptors, threads = holdings.descriptors(), holdings.threads()
    found = Workers(size, addresses)
    try:
        yield found
    finally:
        found.close()
    assert not holdings.descriptors() - descriptors
    assert not holdings.threads() - threads


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 17])
def test_neighbours_meet(size: int) -> None:
    with workers(size) as start:
        start.begin(*range(size))
        start.met()
        for listener in start.listeners:
            assert listener.socket.fileno() == -1


def test_who_comes_late_is_awaited() -> None:
    with workers(4) as start:
        start.begin(1, 3)
        start.begin(0, 2)
        start.met()


# --- other addresses ----------------------------------------------------------------------------


def test_the_right_address_is_found_among_wrong_ones() -> None:
    wrong = ("192.0.2.1", "127.99.99.99", "::1")  # for documentation only; refuses, or another family
    with workers(3, (*wrong, HERE)) as start:
        start.begin(0, 1, 2)
        start.met()


def says_nothing(connection: socket.socket) -> None:
    connection.recv(1)


def talks(connection: socket.socket) -> None:
    connection.sendall(b"220 mail.example.org ESMTP, pleased to meet you, and a proof of nothing at all\r\n")


def hangs_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("act", [says_nothing, talks, hangs_up])
def test_something_else_answers_at_an_address(
    act: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the port of worker 1, another program listens at another address, which comes first."""
    monkeypatch.setattr(links_module, "listen", lambda: keep(socket.create_server((HERE, 0))))
    with workers(2) as start, socket.socket() as other:
        other.bind(("127.0.0.2", start.peers[1].port))
        other.listen()
        start.peers[1] = dataclasses.replace(start.peers[1], addresses=("127.0.0.2", HERE))
        begun = threading.Event()

        def serve() -> None:
            connection, _ = other.accept()
            begun.set()
            with connection:
                act(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        start.begin(0, 1)
        start.met()
        assert begun.wait(DEADLINE_S)
        for links in start.links.values():
            for link in links:
                link.close()
        thread.join(DEADLINE_S)


# --- strangers ----------------------------------------------------------------------------------


def call(start: Workers, index: int) -> socket.socket:
    return socket.create_connection((HERE, start.peers[index].port), timeout=DEADLINE_S)


def ended(connection: socket.socket) -> bool:
    """Whether the other end hangs up, after a greeting."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


def test_strangers_are_sent_away_and_disturb_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_PROOF_S", DEADLINE_S)
    with workers(4) as start:
        start.begin(2)
        garbage, too_short = (call(start, 2) for _ in range(2))
        garbage.sendall(os.urandom(1 << 16))
        too_short.sendall(b"x")
        too_short.shutdown(socket.SHUT_WR)
        assert ended(garbage) and ended(too_short)
        monkeypatch.setattr(links_module, "_PROOF_S", 0.3)
        slow, silent = (call(start, 2) for _ in range(2))
        with suppress(ConnectionError):  # it may have been sent away by now
            slow.sendall(b"a")
            slow.recv(1)
        assert ended(slow) and ended(silent)
        start.begin(0, 1, 3)
        start.met()
        for stranger in (garbage, too_short, slow, silent):
            stranger.close()


def test_a_crowd_of_strangers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_GUESTS", 3)
    monkeypatch.setattr(links_module, "_PROOF_S", 0.5)
    with workers(3) as start:
        start.begin(1)
        crowd = [call(start, 1) for _ in range(8)]
        assert all(ended(one) for one in crowd)
        start.begin(0, 2)
        start.met()
        for one in crowd:
            one.close()


def stranger(start: Workers, index: int, address: str = HERE) -> socket.socket:
    """A connection from an address, once it is admitted: it has the greeting, and says nothing."""
    connection = socket.create_connection(
        (HERE, start.peers[index].port), timeout=DEADLINE_S, source_address=(address, 0)
    )
    assert len(connection.recv(48, socket.MSG_WAITALL)) == 48
    return connection


def stays(connection: socket.socket) -> bool:
    """Whether the other end has not hung up yet."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True


def test_strangers_that_stay_keep_no_worker_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may wait, for as long as the start has, each calling again when it is sent away."""
    monkeypatch.setattr(links_module, "_PROOF_S", 2 * DEADLINE_S)
    assert calls(0, 1, 2)
    with workers(2) as start:
        start.begin(1)
        crowd = [stranger(start, 1) for _ in range(links_module._GUESTS + 1)]
        start.begin(0)
        start.met()
        for one in crowd:
            one.close()


def test_the_oldest_stranger_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_PROOF_S", 2 * DEADLINE_S)
    monkeypatch.setattr(links_module, "_GUESTS", 3)
    with workers(2) as start:
        start.begin(1)
        crowd = [stranger(start, 1) for _ in range(3 + 1)]  # one place is the neighbour's
        assert all(stays(one) for one in crowd)
        for oldest in range(2):
            crowd.append(stranger(start, 1))
            assert [stays(one) for one in crowd] == [False] * (oldest + 1) + [True] * 4
        start.begin(0)
        start.met()
        for one in crowd:
            one.close()


def test_an_address_with_many_strangers_sends_away_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_PROOF_S", 2 * DEADLINE_S)
    monkeypatch.setattr(links_module, "_GUESTS", 3)
    with workers(2) as start:
        start.begin(1)
        slow = stranger(start, 1, "127.0.0.2")
        crowd = [stranger(start, 1) for _ in range(20)]
        assert stays(slow)
        assert [stays(one) for one in crowd] == [False] * 17 + [True] * 3
        start.begin(0)
        start.met()
        for one in (slow, *crowd):
            one.close()


def test_without_descriptors_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_PROOF_S", 2 * DEADLINE_S)
    with workers(2) as start:
        start.begin(1)
        crowd = [stranger(start, 1) for _ in range(2)]
        accept, failures = socket.socket.accept, [errno.EMFILE]

        def fails_once(self: socket.socket) -> Any:
            if failures:
                raise OSError(failures.pop(), "all descriptors are in use")
            return accept(self)

        monkeypatch.setattr(socket.socket, "accept", fails_once)
        crowd.append(stranger(start, 1))
        assert not failures
        assert [stays(one) for one in crowd] == [False, True, True]
        start.begin(0)
        start.met()
        for one in crowd:
            one.close()


def test_the_deadline_says_how_many_strangers_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hang up, and one waits, when the deadline passes."""
    monkeypatch.setattr(links_module, "_PROOF_S", 9 * DEADLINE_S)
    passed = threading.Event()

    def monotonic() -> float:
        return time.monotonic() + (2 * DEADLINE_S if passed.is_set() else 0)

    monkeypatch.setattr(links_module, "time", SimpleNamespace(monotonic=monotonic))
    with workers(2) as start:
        start.begin(1)
        for _ in range(2):
            with stranger(start, 1) as one:
                one.shutdown(socket.SHUT_WR)
                assert ended(one)
        with stranger(start, 1):
            passed.set()
            start.join()
        text = str(start.errors[1])
        assert f"3 connections to this worker's port {start.peers[1].port} came without a proof" in text
        assert "127.0.0.1" in text.partition("the last one from")[2]


def test_connections_between_ranks_are_accepted_in_one_module() -> None:
    """A mesh has no listener of its own; the fork server's is no port."""
    package = Path(links_module.__file__).parents[1]
    accepting = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "accept"
    }
    assert accepting == {"net/links.py", "launch/server.py"}


def test_a_worker_of_another_start_is_no_worker_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline passes for worker 1 alone, once it has called the stranger: no other has ended."""
    assert calls(1, 2, 3)
    end, late = links_module._Meeting._end, set[int]()

    def ends(self: links_module._Meeting, contact: Any, error: Exception | None = None) -> None:
        end(self, contact, error)
        if self._index == 1 and isinstance(error, links_module._NotOurs):
            late.add(threading.get_ident())

    def monotonic() -> float:
        return time.monotonic() + (2 * DEADLINE_S if threading.get_ident() in late else 0)

    monkeypatch.setattr(links_module._Meeting, "_end", ends)
    monkeypatch.setattr(links_module, "time", SimpleNamespace(monotonic=monotonic))
    with workers(3) as start:
        start.begin(0, 1)
        start.begin(2, secret=b"of another start")
        start.join()
        assert set(start.errors) == {0, 1, 2}
        text = str(start.errors[1])
        assert "rank 2" in text and "something else answers there" in text
        assert "before the deadline" in text


def test_a_proof_is_good_for_one_connection_and_one_neighbour_only() -> None:
    """What was overheard, or comes from a worker in another's name, opens nothing."""
    caller, index = next((a, b) for a in range(3) for b in range(3) if a != b and calls(a, b, 3))
    third = ({0, 1, 2} - {caller, index}).pop()
    with workers(3) as start:
        prover = links_module._Meeting(Listener(), caller, 3, start.near(caller), SECRET)
        start.begin(index)

        def hello(nonce: bytes, who: int = caller, whom: int = index) -> bytes:
            return links_module._HELLO.pack(who, prover._proof(b"calls", who, whom, nonce))

        def answer(make: Callable[[bytes], bytes]) -> bytes:
            with call(start, index) as connection:
                greeting = connection.recv(48, socket.MSG_WAITALL)
                assert greeting[16:] == prover._proof(b"answers", index, index, greeting[:16])
                connection.sendall(make(greeting[:16]))
                return connection.recv(1)

        assert answer(lambda nonce: hello(bytes(16))) == b""
        assert answer(lambda nonce: hello(nonce, whom=third)) == b""
        assert answer(lambda nonce: hello(nonce, who=third)) == b""  # whom it calls itself
        assert answer(lambda nonce: hello(nonce, who=index)) == b""
        assert answer(lambda nonce: hello(nonce, who=7)) == b""
        with call(start, index) as connection:
            connection.sendall(hello(connection.recv(48, socket.MSG_WAITALL)[:16]))
            assert connection.recv(1) == b"+"
            assert answer(hello) == b""  # it has called already
            prover.close()
            start.listeners[third].close()
            start.join()
        assert isinstance(start.errors[index], RendezvousError)


# --- peers that don't come ----------------------------------------------------------------------


def test_the_deadline_names_who_does_not_answer_and_who_has_not_called() -> None:
    """As if ranks 0 and 2 were stopped: their kernels still take calls."""
    with workers(3) as start:
        start.begin(1, deadline_s=0.5)
        start.join()
        text = str(start.errors[1])
        assert isinstance(start.errors[1], RendezvousError)
        for peer in (0, 2):
            why = "does not answer" if calls(1, peer, 3) else "has not called"
            assert (
                f"rank {peer} (host h, pid {peer}) at 127.0.0.1, port {start.peers[peer].port}, {why}" in text
            )
        assert "before the deadline" in text


@pytest.mark.parametrize("gone", [0, 1, 2, 3])
def test_a_worker_that_died_while_connecting_ends_the_meeting_at_once(gone: int) -> None:
    with workers(4) as start:
        start.listeners[gone].close()
        start.begin(*(index for index in range(4) if index != gone))
        start.join()
        assert len(start.errors) == 3
        texts = [str(error) for error in start.errors.values()]
        assert any(f"rank {gone} (host h, pid {gone})" in text and "refuses" in text for text in texts)
        for text in texts:
            assert "refuses connections" in text or "ended while the workers were connecting" in text


def test_a_worker_that_ends_after_it_was_linked_ends_the_meeting_at_once() -> None:
    """Worker 2 calls 0, which still waits for 1."""
    assert calls(2, 0, 3)
    with workers(3) as start:
        start.begin(0)
        caller = links_module._Meeting(start.listeners[2], 2, 3, {0: start.peers[0]}, SECRET)
        [link] = caller.hold(time.monotonic() + DEADLINE_S, lambda: None)
        caller.close()
        link.close()
        start.join()
        error = start.errors[0]
        assert isinstance(error, RendezvousError)
        assert "rank 2 (host h, pid 2) ended while the workers were connecting" in str(error)
