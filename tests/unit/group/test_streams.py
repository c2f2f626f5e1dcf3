"""Swaps over sockets: every byte where it belongs, in any order of ranks, whatever a handler raises."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.group.channels import Lost
from ecemb.group.streams import Streams
from support.linked import linked, together
from support.processes import DEADLINE_S

Words = NDArray[np.uint64]
LARGE = 1 << 18  # words: more than sockets hold


@contextmanager
def mesh(size: int, timeout_s: float = DEADLINE_S) -> Iterator[list[Streams]]:
    """Ranks of which each is linked with each other one."""
    streams = [Streams(one, timeout_s) for one in linked(size)]
    try:
        yield streams
    finally:
        for one in streams:
            one.close()


def swapped(streams: Streams, send: Mapping[int, Words], sources: Sequence[int]) -> dict[int, Words]:
    """A swap of messages that begin with their length."""
    heads = {source: np.zeros(1, np.uint64) for source in sources}
    swap = streams.swap(send, heads)
    swap.meet()
    rests = {source: np.zeros(int(head[0]) - 1, np.uint64) for source, head in heads.items()}
    swap.finish(rests)
    return {source: np.concatenate([heads[source], rests[source]]) for source in sources}


def message(rng: np.random.Generator, length: int) -> Words:
    words = rng.integers(0, 1 << 63, length, np.uint64)
    words[0] = length
    return words


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


def test_a_swap_with_nobody() -> None:
    with mesh(1) as (one,):
        assert swapped(one, {}, []) == {}


def test_a_handler_that_raises_loses_no_byte_and_is_heard_at_the_end() -> None:
    """As KeyboardInterrupt, again and again, while a large message comes slowly."""
    rng = np.random.default_rng(0)
    sent = [message(rng, 8 * LARGE) for _ in range(2)]
    raised = 0

    def interrupt(*_: object) -> None:
        nonlocal raised
        raised += 1
        if raised <= 5:
            raise KeyboardInterrupt

    with mesh(2) as (near, far):
        done: list[bool] = []

        def other() -> None:
            while not raised:
                time.sleep(0.001)
            done.append(np.array_equal(swapped(far, {0: sent[1]}, [0])[0], sent[0]))

        heads, rest = {1: np.zeros(1, np.uint64)}, np.zeros(8 * LARGE - 1, np.uint64)
        swap = near.swap({1: sent[0]}, heads)
        thread = threading.Thread(target=other, daemon=True)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            thread.start()
            signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
            with pytest.raises(KeyboardInterrupt):
                swap.meet()
            signal.setitimer(signal.ITIMER_REAL, 0)
            swap.finish({1: rest})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        thread.join(DEADLINE_S)
        assert raised and done == [True]
        assert np.array_equal(np.concatenate([heads[1], rest]), sent[1])


def test_what_nobody_wants_is_taken_all_the_same() -> None:
    """The sender waits for nothing, and the next message is not mistaken."""
    rng = np.random.default_rng(0)
    sent = [message(rng, 4 * LARGE), message(rng, 5)]
    got: list[Words] = []
    with mesh(2) as (one, other):

        def sends(me: int) -> None:
            if me == 0:
                for words in sent:
                    swapped(one, {1: words}, [])
                return
            heads = {0: np.zeros(1, np.uint64)}
            swap = other.swap({}, heads)
            swap.meet()
            swap.discard({0: int(heads[0][0]) - 1})
            swap.discard({0: 10**9})  # it is over
            swap.finish({})
            got.append(swapped(other, {}, [0])[0])

        together(2, sends)
    assert np.array_equal(got[0], sent[1])


def test_a_peer_that_has_ended() -> None:
    with mesh(3) as ranks:
        ranks[2].close()
        with pytest.raises(Lost, match="the connection with rank 2 has ended"):
            swapped(ranks[0], {1: np.ones(1, np.uint64)}, [2])
        with pytest.raises(Lost, match="the connection with rank 2 has ended"):
            swapped(ranks[1], {2: np.ones(LARGE, np.uint64)}, [0])


def test_a_message_that_does_not_come() -> None:
    with mesh(2, timeout_s=0.05) as (one, _), pytest.raises(Lost, match="nothing came within 0 s"):
        swapped(one, {}, [1])
