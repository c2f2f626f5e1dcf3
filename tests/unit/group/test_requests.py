"""Requests and answers over sockets: in order, both ways at once; who waits for a lost rank gets an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.errors import PeerFailure
from ecemb.group.requests import Requests
from support.linked import linked, together
from support.processes import DEADLINE_S

LARGE = 1 << 18  # words: more than sockets hold


@contextmanager
def mesh(size: int, timeout_s: float = DEADLINE_S) -> Iterator[list[Requests]]:
    """Ranks of which each is linked with each other one."""
    ranks = [Requests(links, rank, size, timeout_s) for rank, links in enumerate(linked(size))]
    try:
        yield ranks
    finally:
        for one in ranks:
            one.close()


def words(first: int, size: int) -> NDArray[np.uint64]:
    return np.arange(first, first + size, dtype=np.uint64)


def test_requests_are_heard_in_the_order_in_which_they_were_said() -> None:
    """Many to each of two ranks, before any answer is waited for; each answers with what it was asked for.

    Requests and answers are both more than sockets hold, and who answers reads one request at a time.
    """
    sizes = [1, 7, *[LARGE] * 12, 1, LARGE]

    def ask(one: Requests) -> None:
        dialogue = one.dialogue([1, 2])
        for number, size in enumerate(sizes):
            for rank in (1, 2):
                dialogue.say(words(number, 1), rank)
                dialogue.say(words(rank, size), rank)
        for number, size in enumerate(sizes):
            found = {rank: np.zeros(size + 1, np.uint64) for rank in (1, 2)}
            dialogue.hear(found, "a test", all_sent=False)
            for rank, answer in found.items():
                assert np.array_equal(answer, np.append(words(rank, size), np.uint64(number)))
        for rank in (1, 2):
            dialogue.say(words(99, 1), rank)
        dialogue.hear({}, "a test")

    def answer(one: Requests) -> None:
        dialogue, head = one.dialogue([0]), words(0, 1)
        dialogue.hear({0: head}, "a test")
        while head[0] != 99:
            asked = np.zeros(sizes[int(head[0])], np.uint64)
            dialogue.hear({0: asked}, "a test")
            dialogue.say(np.append(asked, head), 0)
            dialogue.hear({0: head}, "a test")

    with mesh(3) as ranks:
        together(3, lambda rank: (answer if rank else ask)(ranks[rank]))


def test_what_is_said_while_more_is_unsent_comes_after_it() -> None:
    def ask(one: Requests) -> None:
        dialogue, out = one.dialogue([1]), np.zeros(1, np.uint64)
        for number in range(6):
            dialogue.say(words(number * LARGE, LARGE), 1)
            if number % 2:
                dialogue.hear({1: out}, "a test", all_sent=False)
        dialogue.hear({}, "a test")

    def read(one: Requests) -> None:
        dialogue, found = one.dialogue([0]), np.zeros(6 * LARGE, np.uint64)
        for number in range(3):
            dialogue.say(words(number, 1), 0)
        dialogue.hear({0: found}, "a test")
        assert np.array_equal(found, words(0, 6 * LARGE))

    with mesh(2) as ranks:
        together(2, lambda rank: (read if rank else ask)(ranks[rank]))


def test_ranks_that_both_send_more_than_sockets_hold_do_not_wait_for_each_other() -> None:
    def run(one: Requests) -> None:
        dialogue, out = one.dialogue([1 - one.rank]), np.zeros(LARGE, np.uint64)
        dialogue.say(words(one.rank, LARGE), 1 - one.rank)
        dialogue.hear({1 - one.rank: out}, "a test")
        assert np.array_equal(out, words(1 - one.rank, LARGE))

    with mesh(2) as ranks:
        together(2, lambda rank: run(ranks[rank]))


def waits(one: Requests, heard: Sequence[int], text: str) -> None:
    with pytest.raises(PeerFailure, match=text):
        one.dialogue(heard).hear({rank: np.zeros(1, np.uint64) for rank in heard}, "a test")


def test_who_waits_hears_that_a_rank_has_ended_or_that_its_own_side_hangs_up() -> None:
    ended = r"rank [02] of 3 lost a peer in a test .* the connection with rank 1 has ended"
    with mesh(3) as ranks:
        together(3, lambda rank: ranks[1].hang_up() if rank == 1 else waits(ranks[rank], [1], ended))
        together(3, lambda rank: ranks[0].hang_up() if rank == 2 else waits(ranks[rank], [1 - rank], "ended"))
        ranks[1].close()
        ranks[1].hang_up()


def test_who_waits_longer_than_the_deadline_names_it() -> None:
    with mesh(2, timeout_s=0.05) as ranks:
        waits(ranks[0], [1], r"lost a peer in a test after .* \(deadline 0 s\): nothing came")
