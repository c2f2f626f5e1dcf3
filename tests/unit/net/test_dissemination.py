"""Folds over all ranks: every rank gets all of it, in ceil(log2 N) messages, or hears of a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from ecemb.errors import PeerFailure
from ecemb.net.collectives import Dissemination, rounds, say
from support.simulation import Hub, Wires

LAST = 99
SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 21]


def on_all(size: int, act: Callable[[Wires], object]) -> list[object]:
    """Runs a function on each rank, in threads over one hub on which no rank ends."""
    hub, found = Hub(size), dict[int, object]()

    def run(rank: int) -> None:
        try:
            found[rank] = act(Wires(hub, rank, size))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


def begun(wires: Wires, tag: int = 1000) -> Dissemination:
    return Dissemination(wires, tag, folded, lambda told: int(told[0]) == LAST)


def go(one: Dissemination, value: int) -> None:
    one.run(np.array([value, 1 << one._transport.rank], np.int64), "a test")


def folded(own: np.ndarray, told: np.ndarray) -> np.ndarray:
    return np.array([max(own[0], told[0]), own[1] | told[1]], np.int64)


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_has_something_of_all(size: int) -> None:
    def act(wires: Wires) -> object:
        found: list[list[int]] = []
        for turn in range(3):  # one after the other, with nothing between them
            one = begun(wires, 1000 + 100 * turn)
            go(one, (wires.rank + turn) % 5)
            found.append(one.value.tolist())
        assert wires.sent_messages == 3 * rounds(size)
        return found

    everything = (1 << size) - 1
    expected = [[max((rank + turn) % 5 for rank in range(size)), everything] for turn in range(3)]
    assert on_all(size, act) == [expected] * size


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_value_that_ends_the_rounds_reaches_all_and_nobody_waits(size: int) -> None:
    """The rank that says it takes no part in the rounds, and leaves."""
    for leaving in range(0, size, 3):

        def act(wires: Wires, leaving: int = leaving) -> object:
            if wires.rank == leaving:
                say(wires, 1000, np.array([LAST, 0], np.int64))
                return LAST
            one = begun(wires)
            go(one, 1)
            assert one.is_over
            return int(one.value[0])

        assert on_all(size, act) == [LAST] * size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("at", ["send", "wait"])
def test_an_interrupted_rank_goes_through_all_rounds_first(at: str, size: int) -> None:
    def act(wires: Wires) -> object:
        if wires.rank == size - 1:
            interrupt(wires, at)
        one = begun(wires)
        try:
            go(one, wires.rank)
        except KeyboardInterrupt:
            assert wires.rank == size - 1 and one.is_over
        return int(one.value[0])

    assert on_all(size, act) == [size - 1] * size


def interrupt(wires: Wires, at: str) -> None:
    """Ctrl-C when the first note was sent, or has come."""
    send, receive = wires.send_note, wires.receive_note
    done: list[bool] = []

    def raises_once() -> None:
        if not done:
            done.append(True)
            raise KeyboardInterrupt

    def sends(*args: object) -> None:
        send(*args)  # pyright: ignore
        if at == "send":
            raises_once()

    def receives(*args: object) -> None:
        receive(*args)  # pyright: ignore
        if at == "wait":
            raises_once()

    wires.send_note, wires.receive_note = sends, receives  # pyright: ignore


def test_the_end_of_a_peer_ends_the_rounds() -> None:
    hub = Hub(2)
    hub.end(1)
    one = begun(Wires(hub, 0, 2))
    with pytest.raises(PeerFailure):
        go(one, 1)
    assert not one.is_over


def test_what_fails_again_and_again_is_no_interruption() -> None:
    def act(wires: Wires) -> object:
        one = begun(wires)
        if wires.rank == 0:
            one._fold = lambda own, told: 1 / 0  # pyright: ignore
            with pytest.raises(ZeroDivisionError):
                go(one, 1)
            say(wires, 1000, np.array([LAST, 0], np.int64))
            return None
        go(one, 1)
        return None

    assert on_all(2, act) == [None, None]
