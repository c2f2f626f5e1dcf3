"""A thread that keeps signals away hears them afterwards, whatever its block does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from ecemb.kernels.threads import without_signals

SIGNAL = signal.SIGUSR2


def mask() -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


class Interrupt(Exception):
    """Raised by a handler."""


@pytest.fixture
def handle() -> Iterator[Callable[[Callable[..., None]], object]]:
    """Sets the handler of `SIGNAL`."""
    before = signal.getsignal(SIGNAL)
    yield lambda act: signal.signal(SIGNAL, act)
    signal.signal(SIGNAL, before)


def interrupt(*_: object) -> None:
    raise Interrupt


def test_signals_are_heard_at_the_end(handle: Callable[[Callable[..., None]], object]) -> None:
    heard: list[str] = []
    handle(lambda *_: heard.append("signal"))
    before = mask()
    with without_signals():
        signal.raise_signal(SIGNAL)
        assert SIGNAL in mask() and signal.SIGSEGV not in mask()
        heard.append("block")
    assert heard == ["block", "signal"] and mask() == before


def test_a_handler_that_raises(handle: Callable[[Callable[..., None]], object]) -> None:
    handle(interrupt)
    before, done = mask(), list[str]()

    def act() -> None:
        with without_signals():
            signal.raise_signal(SIGNAL)
            done.append("block")

    with pytest.raises(Interrupt):
        act()
    assert done == ["block"] and mask() == before


def test_a_handler_that_raises_as_signals_are_blocked(
    handle: Callable[[Callable[..., None]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that blocks them runs the handlers of those that came before."""
    handle(interrupt)
    before, block = mask(), signal.pthread_sigmask

    def late(how: int, numbers: set[signal.Signals]) -> set[int]:
        was = block(how, numbers)
        if numbers and how == signal.SIG_BLOCK:
            raise Interrupt
        return was

    monkeypatch.setattr(signal, "pthread_sigmask", late)
    with pytest.raises(Interrupt), without_signals():
        pass
    assert mask() == before


def test_an_error_of_the_block_is_raised() -> None:
    before = mask()
    with pytest.raises(ValueError, match="inside"), without_signals():
        raise ValueError("inside")
    assert mask() == before
