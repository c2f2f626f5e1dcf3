"""What the stub does with signals until its worker has ended; the worker's side is the test."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Set
from types import SimpleNamespace

import pytest

from ecemb.launch import stub, wire


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
        wire.send(far, {"what": "ended", "status": 5})
        return None

    monkeypatch.setattr(stub.signal, "sigtimedwait", wait)
    inbox = wire.Inbox(near)
    near.setblocking(False)
    info = stub._await_acceptance(near, inbox)
    assert stub._follow(stub._Worker(near, inbox, info, 1, "a log")) == 5
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
