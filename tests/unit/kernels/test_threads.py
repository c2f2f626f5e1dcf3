"""Threads: one that keeps signals away hears them afterwards; how many there are, and when they rest."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from ecemb.kernels import threads
from ecemb.kernels.threads import LOOK_S, IdleProcessors, numa_nodes, share_of_processors, without_signals

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


@pytest.mark.parametrize(
    ("processors", "processes", "share"), [(2, 4, 1), (2, 1, 2), (96, 8, 8), (40, 8, 5), (7, 2, 3)]
)
def test_processes_share_the_processors_of_their_host(processors: int, processes: int, share: int) -> None:
    assert share_of_processors(range(processors), [range(processors)] * processes) == share


def test_processes_that_are_bound_share_with_those_that_may_run_there() -> None:
    nodes = [range(12), range(12, 24)]
    by_node = [nodes[rank // 4] for rank in range(8)]
    assert [share_of_processors(own, by_node) for own in by_node] == [3] * 8
    of_their_own = [range(5 * rank, 5 * rank + 5) for rank in range(8)]
    assert [share_of_processors(own, of_their_own) for own in of_their_own] == [5] * 8
    assert share_of_processors(range(24), [range(24), *by_node]) == 24 // 5


def test_nodes_of_processors(tmp_path: Path) -> None:
    """Nodes whose hyperthreads are numbered apart, one without processors, and files that are no nodes."""
    for name, processors in (
        ("node0", "0-3,8-11\n"),
        ("node1", "4-7,12\n"),
        ("node2", "\n"),
        ("node10", "20"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(processors)
    (tmp_path / "node3").mkdir()
    (tmp_path / "online").write_text("0-2")
    assert numa_nodes([0, 11], tmp_path) == [0]
    assert numa_nodes([12], tmp_path) == [1]
    assert numa_nodes([20, 3, 4], tmp_path) == [0, 1, 10]
    assert numa_nodes([13], tmp_path) == numa_nodes([0], tmp_path / "missing") == []
    assert numa_nodes([0], Path("/sys/devices/system/node")) in ([0], [])


def test_a_look_counts_for_a_while() -> None:
    clock, running = mock.Mock(return_value=5.0), iter([0, 0, 9, 0, 0])
    said = mock.Mock(read_bytes=lambda: b"0 0 0 %d/50 7" % (1 + next(running)))
    with (
        mock.patch.object(threads, "_LOAD", said),
        mock.patch.object(os, "cpu_count", return_value=16),
        mock.patch.object(time, "monotonic", clock),
    ):
        idle, found = IdleProcessors(), list[bool]()
        for _ in range(15):
            found.append(idle.are_idle())
            clock.return_value += LOOK_S / 2.5
        assert found == [False] * 3 + [True] * 3 + [False] * 6 + [True] * 3
