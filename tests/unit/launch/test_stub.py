"""What the stub does with signals until its worker has ended; the worker's side is the test."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Set
from types import SimpleNamespace
from typing import Any

import pytest

from ecemb.launch import server, stub, wire
from ecemb.launch.command import parse
from ecemb.net.replacement import End


class DiedBy(Exception):
    pass


def die_by(number: int) -> None:
    raise DiedBy(number)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    monkeypatch.setattr(stub, "_die_by", die_by)
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with near, far:
        yield near, far


def test_a_signal_that_comes_with_the_acceptance_is_passed_on(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM has a lower number than the SIGIO of the message, and is therefore seen first."""
    near, far = ends
    passed: list[object] = []

    def wait(heard: Set[int], seconds: float) -> object:
        if not passed:
            wire.send(far, {"what": "accepted", "said": []})
            passed.append(None)
            return SimpleNamespace(si_signo=signal.SIGTERM, si_pid=1)
        inbox = wire.Inbox(far)
        assert inbox.read()
        passed.append(inbox.take())
        wire.send(far, {"what": "ended", "status": 5, "end": End.IF_KILLED, "progress": True})
        return None

    monkeypatch.setattr(stub.signal, "sigtimedwait", wait)
    inbox = wire.Inbox(near)
    near.setblocking(False)
    info = stub._await_acceptance(near, inbox)
    ended = stub._follow(stub._Worker(near, inbox, info, "a log"), launcher=1)
    assert ended == stub._Ended(5, End.IF_KILLED, True, {signal.SIGTERM})
    assert passed[1:] == [{"what": "signal", "signal": signal.SIGTERM, "group": False}]


@pytest.mark.parametrize("answer", [None, {"what": "refused", "reason": "on purpose"}])
def test_a_signal_before_a_worker_runs_ends_the_stub(
    answer: dict[str, str] | None, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends

    def wait(heard: Set[int], seconds: float) -> object:
        if answer is not None:
            wire.send(far, answer)
        return SimpleNamespace(si_signo=signal.SIGTERM, si_pid=1)

    monkeypatch.setattr(stub.signal, "sigtimedwait", wait)
    near.setblocking(False)
    with pytest.raises(DiedBy):
        stub._await_acceptance(near, wire.Inbox(near))


KILLED, FAILED = 9, 75 << 8  # statuses


@pytest.mark.parametrize(
    ("status", "end", "passed", "is_replaced"),
    [
        (KILLED, End.IF_KILLED, set(), True),
        (signal.SIGSEGV, End.IF_KILLED, {signal.SIGUSR1}, True),
        (signal.SIGUSR1, End.IF_KILLED, {signal.SIGUSR1}, False),
        (KILLED, End.IF_KILLED, {signal.SIGTERM}, False),
        (signal.SIGINT, End.IF_KILLED, set(), False),
        (signal.SIGTERM, End.IF_KILLED, set(), False),
        (KILLED, End.PLAIN, set(), False),
        (KILLED, End.FINAL, set(), False),
        (FAILED, End.IF_KILLED, set(), False),
        (FAILED, End.PEER_DIED, set(), True),
        (1 << 8, End.PEER_DIED, set(), True),
        (FAILED, End.PEER_DIED, {signal.SIGTERM}, False),
        (FAILED, End.FINAL, set(), False),
        (0, End.IF_KILLED, set(), False),
    ],
)
def test_which_ends_are_replaced(status: int, end: End, passed: set[int], is_replaced: bool) -> None:
    assert stub._is_replaced(stub._Ended(status, end, True, passed)) == is_replaced


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("moment", ["as they are blocked", "later"])
def test_a_handler_that_raises_before_a_worker_is_accepted_leaves_no_signal_blocked(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that blocks signals runs the handlers of those that came before."""
    before, change = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.pthread_sigmask

    def late(how: int, numbers: Set[int]) -> Set[int]:
        was = change(how, numbers)
        if numbers and how == signal.SIG_BLOCK and moment != "later":
            raise Interrupt
        return was

    def ask(*_: object) -> None:
        raise Interrupt

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(stub, "_why_cold", lambda _: None)
    monkeypatch.setattr(stub, "_ask", ask)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "pthread_sigmask", late)
        command = parse(["script.py"])
        given = stub._prepared(command)
        with pytest.raises(Interrupt):
            stub._accepted(command, given)
    after = change(signal.SIG_SETMASK, before)
    assert after == before


def test_a_handler_that_raises_before_a_fork_leaves_no_signal_blocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the server would hear of no worker's end, and of no request to end."""
    before, change = signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.pthread_sigmask

    def late(how: int, numbers: Set[int]) -> Set[int]:
        was = change(how, numbers)
        if numbers and how == signal.SIG_BLOCK:
            raise Interrupt
        return was

    def fork() -> int:
        raise AssertionError("forked")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fork", fork)
        patched.setattr(signal, "pthread_sigmask", late)
        with pytest.raises(Interrupt):
            server._forked()
    after = change(signal.SIG_SETMASK, before)
    assert after == before


def test_a_message_that_was_sent_whole_is_sent_once(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other end may close as soon as it has read it: to send nothing more would be an error."""
    near, far = ends
    received: list[object] = []
    send = socket.send_fds

    def and_close(*arguments: Any) -> int:
        sent = send(*arguments)
        inbox = wire.Inbox(far)
        assert inbox.read()
        received.append(inbox.take())
        for descriptor in inbox.descriptors:
            os.close(descriptor)
        far.close()
        return sent

    monkeypatch.setattr(socket, "send_fds", and_close)
    wire.send(near, {"what": "run"}, [near.fileno()])
    assert received == [{"what": "run"}]
