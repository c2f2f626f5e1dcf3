"""Notes over sockets: found by their tags, by any thread, whatever a signal's handler raises on the way."""

from __future__ import annotations

import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.errors import PeerFailure
from ecemb.net.links import Link, pair
from ecemb.net.mesh import Channels, Mesh, Notes
from support.processes import DEADLINE_S

Words = NDArray[np.uint64]


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


@contextmanager
def two(
    timeout_s: float = DEADLINE_S, size: int = 2, wire: tuple[socket.socket, socket.socket] | None = None
) -> Iterator[tuple[Notes, Notes]]:
    """The ends of one connection, of ranks 0 and 1."""
    one, other = wire or pair()
    near, far = (
        Notes(Mesh([Link(peer, end)], 1 - peer, size, timeout_s)) for peer, end in ((1, one), (0, other))
    )
    try:
        yield near, far
    finally:
        near.mesh.close()
        far.mesh.close()


def send(notes: Notes, said: Words, to: int, tag: int) -> None:
    notes.send(said, to, "a test", tag)


def heard(notes: Notes, source: int, tag: int, size: int = 1) -> list[int]:
    out = np.zeros(size, np.uint64)
    notes.receive(out, source, "a test", tag)
    return out.tolist()


def test_a_note_is_found_by_its_tag() -> None:
    with two() as (near, far):
        for tag in (5, 3, 9):
            send(near, words(tag, tag + 1), 1, tag)
        assert [heard(far, 0, tag, 2) for tag in (9, 5, 3)] == [[9, 10], [5, 6], [3, 4]]
        assert [heard(far, 0, tag, 2) for tag in (3, 5)] == [[3, 4], [5, 6]]  # once more


def test_old_notes_are_forgotten() -> None:
    with two() as (near, far):
        for number in range(1000):
            send(near, words(number), 1, number)
            assert heard(far, 0, number) == [number]
        assert heard(far, 0, 990) == [990]
        assert len(far._lines[0]._notes) < 100


def test_a_note_of_no_words_and_the_longest_one() -> None:
    with two(size=640) as (near, far):
        send(near, words(), 1, 1)
        send(near, words(*range(36)), 1, 2)
        assert (heard(far, 0, 1, 0), heard(far, 0, 2, 36)) == ([], [*range(36)])
        with pytest.raises(ValueError, match="at most 36 words, not 37"):
            send(near, words(*range(37)), 1, 3)


def test_threads_wait_for_notes_of_one_line_at_the_same_time(seed: int) -> None:
    """A thread that reads what another one waits for keeps it for that one."""
    rng, count = random.Random(seed), 40
    with two() as (near, far):
        got: dict[int, list[int]] = {}

        def wait(tag: int) -> None:
            got[tag] = heard(far, 0, tag)

        threads = [threading.Thread(target=wait, args=(tag,), daemon=True) for tag in range(count)]
        for thread in threads:
            thread.start()
        for tag in rng.sample(range(count), count):
            send(near, words(100 + tag), 1, tag)
        for thread in threads:
            thread.join(DEADLINE_S)
        assert got == {tag: [100 + tag] for tag in range(count)}


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError("of the user's alarm")])
@pytest.mark.parametrize("name", ["run", "expect"])
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("call", range(1, 4))
def test_an_interrupted_wait_loses_no_note(call: int, is_after: bool, name: str, error: Any) -> None:
    """What a handler raises goes through, whatever it is; the wait is repeated."""
    method, calls = getattr(Channels, name), 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not is_after:
            raise error
        found = method(*arguments, **named)
        if calls == call:
            raise error
        return found

    with two() as (near, far):
        for tag in range(4):
            send(near, words(100 + tag), 1, tag)
        got: list[list[int]] = []
        raised = 0
        with mock.patch.object(Channels, name, interrupted):
            for tag in range(4):
                while len(got) == tag:
                    try:
                        got.append(heard(far, 0, tag))
                    except (KeyboardInterrupt, TimeoutError):
                        raised += 1
        assert (got, raised) == ([[100], [101], [102], [103]], 1)


def test_a_signal_that_cuts_a_wait_short_in_the_middle_of_a_note() -> None:
    """As DataLoader's handler of SIGCHLD, which raises nothing."""
    sending, receiving = pair()
    with two(wire=(sending, receiving)) as (near, far):
        send(near, words(7), 1, 1)
        note = receiving.recv(1000)
        sending.sendall(note[:50])
        handled: list[int] = []
        before = signal.signal(signal.SIGALRM, lambda number, _: handled.append(number))

        def rest() -> None:
            while not handled:
                time.sleep(0.01)
            sending.sendall(note[50:])

        thread = threading.Thread(target=rest, daemon=True)
        try:
            thread.start()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            assert heard(far, 0, 1) == [7]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        thread.join(DEADLINE_S)
        sending.sendall(note[:50])
        near.mesh.close()
        with pytest.raises(PeerFailure, match="the connection with rank 0 has ended"):
            heard(far, 0, 2)


def test_a_connection_that_has_ended() -> None:
    with two() as (near, far):
        send(near, words(1), 1, 1)
        near.mesh.close()
        assert heard(far, 0, 1) == [1]  # what was sent before
        with pytest.raises(PeerFailure, match="the connection with rank 0 has ended"):
            heard(far, 0, 2)
        with pytest.raises(PeerFailure, match="the connection with rank 0 has ended"):
            send(far, words(1), 0, 1)


def test_all_threads_that_wait_for_notes_hear_that_this_side_hangs_up() -> None:
    """One of them reads the connection, and the others wait for that one."""
    told: list[str] = []
    with two() as (_, far):

        def wait(tag: int) -> None:
            with pytest.raises(PeerFailure, match="rank 1 of 2 lost a peer in a test") as raised:
                heard(far, 0, tag)
            told.append(str(raised.value))

        threads = [threading.Thread(target=wait, args=(tag,), daemon=True) for tag in range(3)]
        for thread in threads:
            thread.start()
        far.mesh.hang_up()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert len(told) == 3


def test_a_note_that_is_interrupted_on_its_way_is_sent_before_the_next_one() -> None:
    run, full = Channels.run, [True]

    def interrupted(self: Channels, what: str, **more: bool) -> None:
        if full.pop() if full else False:
            raise KeyboardInterrupt
        run(self, what, **more)

    with two() as (near, far):
        with mock.patch.object(Channels, "run", interrupted):
            with pytest.raises(KeyboardInterrupt):
                send(near, words(1), 1, 1)
            send(near, words(2), 1, 2)
        assert (heard(far, 0, 1), heard(far, 0, 2)) == ([1], [2])


def test_a_note_that_does_not_come() -> None:
    with two(timeout_s=0.05) as (_, far), pytest.raises(PeerFailure, match="nothing came within 0 s"):
        heard(far, 0, 1)


def test_what_is_not_a_note() -> None:
    sending, receiving = pair()
    with two(wire=(sending, receiving)) as (near, far):
        send(near, words(1, 2), 1, 1)
        with pytest.raises(PeerFailure, match="rank 0 sent a note of 16 bytes in place of 8"):
            heard(far, 0, 1)
        sending.sendall(b"\xff" * len(near._lines[1]._read))
        with pytest.raises(PeerFailure, match="rank 0 sent a note of 4294967295 words"):
            heard(far, 0, 2)
