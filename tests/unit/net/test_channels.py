"""Messages over sockets: each byte where it belongs, in any order of ranks, whatever a handler raises."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.errors import PeerFailure
from ecemb.net import mesh as mesh_module
from ecemb.net.mesh import Channels, Mesh
from support.linked import mesh, together
from support.processes import DEADLINE_S

Words = NDArray[np.uint64]
LARGE = 1 << 18  # words: more than sockets hold
TIMEOUT_S = 10.0


def swapped(one: Mesh, send: Mapping[int, Words], sources: Sequence[int]) -> dict[int, Words]:
    """Messages that begin with their length."""
    ends = one.channels()
    for to, words in send.items():
        ends.send(to, words)
    heads = {source: np.zeros(1, np.uint64) for source in sources}
    ends.expect(heads)
    ends.run("a test", all_sent=False)
    rests = {source: np.zeros(int(head[0]) - 1, np.uint64) for source, head in heads.items()}
    ends.expect(rests)
    ends.run("a test")
    return {source: np.concatenate([heads[source], rests[source]]) for source in sources}


def received(ends: Channels, outs: Mapping[int, Words], *, all_sent: bool = True) -> None:
    ends.expect(outs)
    ends.run("a test", all_sent=all_sent)


def message(rng: np.random.Generator, length: int) -> Words:
    words = rng.integers(0, 1 << 63, length, np.uint64)
    words[0] = length
    return words


def words(first: int, size: int) -> Words:
    return np.arange(first, first + size, dtype=np.uint64)


# --- who gets what -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 5])
def test_everybody_has_what_was_sent_to_it(size: int, seed: int) -> None:
    """Time and again, of any lengths, from some ranks to some others."""
    rng, lengths = np.random.default_rng(seed), random.Random(seed)
    plans = [
        {
            (i, j): message(rng, lengths.choice([1, 2, 100, LARGE]))
            for i in range(size)
            for j in range(size)
            if i != j and lengths.random() < 0.8
        }
        for _ in range(6)
    ]
    right: list[bool] = []
    with mesh(size) as ranks:

        def run(me: int) -> None:
            for plan in plans:
                send = {j: words for (i, j), words in plan.items() if i == me}
                wanted = {i: words for (i, j), words in plan.items() if j == me}
                got = swapped(ranks[me], send, list(wanted))
                right.append(all(np.array_equal(got[source], wanted[source]) for source in wanted))

        together(size, run)
    assert len(right) == size * len(plans) and all(right)


def test_messages_with_nobody() -> None:
    with mesh(1) as (one,):
        assert swapped(one, {}, []) == {}


def test_what_nobody_wants_is_taken_all_the_same() -> None:
    """The sender waits for nothing, and the next message is not mistaken."""
    rng = np.random.default_rng(0)
    sent = [message(rng, 4 * LARGE), message(rng, 5)]
    got: list[Words] = []
    with mesh(2) as (one, other):

        def run(me: int) -> None:
            if me == 0:
                for words in sent:
                    swapped(one, {1: words}, [])
                return
            head, ends = np.zeros(1, np.uint64), other.channels()
            received(ends, {0: head}, all_sent=False)
            ends.expect({0: np.zeros(4, np.uint64)})
            ends.skip({0: int(head[0]) - 1})  # in place of what was expected
            ends.run("a test")
            ends.run("a test")  # it is over
            got.append(swapped(other, {}, [0])[0])

        together(2, run)
    assert np.array_equal(got[0], sent[1])


def test_requests_arrive_in_the_order_in_which_they_were_sent() -> None:
    """Many to each of two ranks, before any answer is waited for; each answers with what it was asked for.

    Requests and answers are both more than sockets hold, and who answers reads one request at a time.
    """
    sizes = [1, 7, *[LARGE] * 12, 1, LARGE]

    def ask(one: Mesh) -> None:
        ends = one.channels([1, 2])
        for number, size in enumerate(sizes):
            for rank in (1, 2):
                ends.send(rank, words(number, 1), words(rank, size))
        for number, size in enumerate(sizes):
            found = {rank: np.zeros(size + 1, np.uint64) for rank in (1, 2)}
            received(ends, found, all_sent=False)
            for rank, answer in found.items():
                assert np.array_equal(answer, np.append(words(rank, size), np.uint64(number)))
        for rank in (1, 2):
            ends.send(rank, words(99, 1))
        ends.run("a test")

    def answer(one: Mesh) -> None:
        ends, head = one.channels([0]), words(0, 1)
        received(ends, {0: head})
        while head[0] != 99:
            asked = np.zeros(sizes[int(head[0])], np.uint64)
            received(ends, {0: asked})
            ends.send(0, np.append(asked, head))
            received(ends, {0: head})

    with mesh(3) as ranks:
        together(3, lambda rank: (answer if rank else ask)(ranks[rank]))


def test_what_is_sent_while_more_is_unsent_comes_after_it() -> None:
    def ask(one: Mesh) -> None:
        ends, out = one.channels([1]), np.zeros(1, np.uint64)
        for number in range(6):
            ends.send(1, words(number * LARGE, LARGE))
            if number % 2:
                received(ends, {1: out}, all_sent=False)
        ends.run("a test")

    def read(one: Mesh) -> None:
        ends, found = one.channels([0]), np.zeros(6 * LARGE, np.uint64)
        ends.send(0, words(0, 3))
        received(ends, {0: found})
        assert np.array_equal(found, words(0, 6 * LARGE))

    with mesh(2) as ranks:
        together(2, lambda rank: (read if rank else ask)(ranks[rank]))


def test_ranks_that_both_send_more_than_sockets_hold_do_not_wait_for_each_other() -> None:
    with mesh(2) as ranks:

        def run(me: int) -> None:
            ends, out = ranks[me].channels([1 - me]), np.zeros(LARGE, np.uint64)
            ends.send(1 - me, words(me, LARGE))
            received(ends, {1 - me: out})
            assert np.array_equal(out, words(1 - me, LARGE))

        together(2, run)


# --- interruptions -------------------------------------------------------------------------------


def test_a_handler_that_raises_loses_no_byte() -> None:
    """As KeyboardInterrupt, again and again, while a large message comes slowly.

    It raises only in code that `ends.run` has called, and an exception of its own: raised a line later,
    KeyboardInterrupt ends the whole session.
    """
    rng = np.random.default_rng(0)
    sent = [message(rng, 8 * LARGE) for _ in range(2)]
    raised = 0

    class Interrupted(BaseException):
        pass

    def interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal raised
        while frame is not None and frame.f_code is not Channels.run.__code__:
            frame = frame.f_back
        if frame is not None and raised < 5:
            raised += 1
            raise Interrupted

    def to_its_end(run: Callable[[], None]) -> None:
        while True:
            try:
                return run()
            except Interrupted:
                pass

    with mesh(2) as (near, far):
        done: list[bool] = []

        def other() -> None:
            while not raised:
                time.sleep(0.001)
            done.append(np.array_equal(swapped(far, {0: sent[1]}, [0])[0], sent[0]))

        ends, found = near.channels(), np.zeros(8 * LARGE, np.uint64)
        ends.send(1, sent[0])
        ends.expect({1: found})
        thread = threading.Thread(target=other, daemon=True)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            thread.start()
            signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
            with pytest.raises(Interrupted):
                ends.run("a test")
            to_its_end(lambda: ends.run("a test"))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        thread.join(DEADLINE_S)
        assert raised and done == [True]
        assert np.array_equal(found, sent[1])


@pytest.mark.parametrize("parts", [1, 5])
def test_a_wait_lasts_from_the_last_byte_on_whatever_signals_come(parts: int) -> None:
    """Each ends a turn of the loop; 0.6 of the deadline pass in each, and bytes come in the first ones."""
    with mesh(2, TIMEOUT_S) as (mesh_of_0, _):
        one = mesh_of_0.channels()
        one.expect({1: np.zeros(100, np.uint8)})
        turns = itertools.count()

        def interrupted(*_: Any) -> int:
            if next(turns) < parts:
                one._plan[0, mesh_module._IN_LEFT] -= 1
            return mesh_module._AGAIN

        clock = itertools.count(0.0, 0.6 * TIMEOUT_S)
        with (
            mock.patch.object(mesh_module, "loop", return_value=interrupted),
            mock.patch.object(mesh_module.time, "monotonic", side_effect=clock),
            pytest.raises(PeerFailure, match="nothing came within 10 s"),
        ):
            one.run("a test")
        assert next(turns) - parts in (1, 2)


def test_bytes_that_come_after_a_late_signal_begin_a_new_deadline() -> None:
    """What the signal has left of the deadline passes after them: the rank is not lost."""
    turns = [
        (mesh_module._AGAIN, 0.0, 0),
        (mesh_module._AGAIN, 9.0, 0),
        (mesh_module._LATE, 1.5, 8),
        (mesh_module._LATE, 10.0, 0),
    ]
    now, waited_ms = 0.0, list[int]()
    with mesh(2, TIMEOUT_S) as (mesh_of_0, _):
        one = mesh_of_0.channels()
        one.expect({1: np.zeros(100, np.uint8)})

        def turn(*arguments: Any) -> int:
            nonlocal now
            ended, passed_s, came = turns[len(waited_ms)]
            waited_ms.append(arguments[-1])
            now += passed_s
            one._plan[0, mesh_module._IN_LEFT] -= came
            return ended

        with (
            mock.patch.object(mesh_module, "loop", return_value=turn),
            mock.patch.object(mesh_module.time, "monotonic", side_effect=lambda: now),
            pytest.raises(PeerFailure, match=r"after 20\.5 s .* nothing came within 10 s"),
        ):
            one.run("a test")
        assert waited_ms == [10000, 10000, 1000, 10000]


# --- ranks that end ------------------------------------------------------------------------------


def test_a_peer_that_has_ended() -> None:
    with mesh(3) as ranks:
        ranks[2].close()
        with pytest.raises(PeerFailure, match="the connection with rank 2 has ended"):
            swapped(ranks[0], {1: np.ones(1, np.uint64)}, [2])
        with pytest.raises(PeerFailure, match="the connection with rank 2 has ended"):
            swapped(ranks[1], {2: np.ones(LARGE, np.uint64)}, [0])


def waits(one: Mesh, sources: Sequence[int], text: str) -> None:
    with pytest.raises(PeerFailure, match=text):
        received(one.channels(sources), {rank: np.zeros(1, np.uint64) for rank in sources})


def test_a_wait_ends_when_a_rank_has_ended_or_when_its_own_side_hangs_up() -> None:
    ended = r"rank [02] of 3 lost a peer in a test .* the connection with rank 1 has ended"
    with mesh(3) as ranks:
        together(3, lambda rank: ranks[1].hang_up() if rank == 1 else waits(ranks[rank], [1], ended))
        together(3, lambda rank: ranks[0].hang_up() if rank == 2 else waits(ranks[rank], [1 - rank], "ended"))
        ranks[1].close()
        ranks[1].hang_up()


def test_a_wait_longer_than_the_deadline_names_it() -> None:
    with mesh(2, timeout_s=0.05) as ranks:
        waits(ranks[0], [1], r"lost a peer in a test after .* \(deadline 0 s\): nothing came within 0 s")
