"""The first words of messages: both ends keep the same room, whatever the messages' sizes are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ecemb.step.parcel import LEAST, MARK, MOST, Parcel


def carried(sender: Parcel, receiver: Parcel, message: np.ndarray, around: np.ndarray) -> int:
    """The words of a message that needed one of their own; the others arrive."""
    first, after = sender.cut(message, around)
    assert len(first) == receiver.room
    size = len(message)
    assert np.array_equal(first[:size], message[: len(first)])
    assert np.array_equal(after, message[len(first) :])
    for one in (sender, receiver):
        one.fit(size)
    return len(after)


def test_messages_of_any_sizes_arrive(seed: int) -> None:
    rng, words = random.Random(seed), np.random.default_rng(seed)
    sender, receiver = Parcel(), Parcel()
    for _ in range(200):
        size = rng.choice([1, LEAST, rng.randrange(5000), rng.randrange(MOST, 2 * MOST)])
        around = words.integers(0, 2**64, size + rng.randrange(200), np.uint64)
        carried(sender, receiver, around[:size], around)


@pytest.mark.parametrize("size", [1, 100, 50_000])
def test_a_message_like_the_last_one_needs_no_second_message(size: int) -> None:
    sender, receiver = Parcel(), Parcel()
    around = np.arange(60_000, dtype=np.uint64)
    assert carried(sender, receiver, around[:size], around) == max(0, size - LEAST)
    assert carried(sender, receiver, around[:size], around) == 0
    assert carried(sender, receiver, around[: size + size // 20], around) == 0


def test_messages_are_sent_from_where_they_lie_if_enough_words_follow(seed: int) -> None:
    """Also where they overlap; from a copy if not enough follow. Nothing is written."""
    rng, memory = random.Random(seed), np.arange(6000, dtype=np.uint64)
    memory.flags.writeable = False
    senders, copied = [Parcel(), Parcel(), Parcel()], 0
    for _ in range(200):
        a, b, c = sorted(rng.sample(range(6001), 3))
        for one, message in zip(senders, (memory[a:b], memory[a:c], memory[b:c]), strict=True):
            first, _ = one.cut(message, memory)
            copied += not np.may_share_memory(first, memory)
            one.fit(len(message))
    assert 0 < copied < 600


def test_of_large_messages_only_the_first_words_travel_before() -> None:
    sender, receiver = Parcel(), Parcel()
    around = np.zeros(MOST + 1, np.uint64)
    for _ in range(2):
        assert carried(sender, receiver, around, around) == MOST + 1 - LEAST


def test_a_mark_is_as_long_as_what_is_waited_for() -> None:
    for size in itertools.chain([0, 1000], [MOST]):
        parcel = Parcel()
        parcel.fit(size)
        mark = parcel.mark().view(np.int64)
        assert len(mark) == parcel.room and mark[0] == MARK
