"""A size with the first of its words: both ends keep the same room, whatever the messages' sizes are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ecemb.step.parcel import LEAST_SPARE, MARK, MOST, Parcel


def carried(sender: Parcel, receiver: Parcel, message: np.ndarray) -> tuple[np.ndarray, int]:
    """What arrives, and the words of it that needed a message of their own."""
    after = sender.pack(message, whole=True)
    assert len(sender.words) == len(receiver.words)
    receiver.words[:] = sender.words
    assert receiver.size == len(message)
    out = np.zeros(receiver.size, np.uint64)
    rest = receiver.unpack_(out)
    assert len(rest) == len(after)
    rest[:] = after
    for one in (sender, receiver):
        one.fit()
    return out, len(after)


def test_messages_of_any_sizes_arrive(seed: int) -> None:
    rng, words = random.Random(seed), np.random.default_rng(seed)
    sender, receiver = Parcel(), Parcel()
    for _ in range(200):
        size = rng.choice([0, 1, LEAST_SPARE, rng.randrange(5000), rng.randrange(MOST, 2 * MOST)])
        message = words.integers(0, 2**64, size, np.uint64)
        assert np.array_equal(carried(sender, receiver, message)[0], message)


@pytest.mark.parametrize("size", [0, 100, 50_000])
def test_a_message_like_the_last_one_needs_no_second_message(size: int) -> None:
    sender, receiver = Parcel(), Parcel()
    message = np.arange(size, dtype=np.uint64)
    assert carried(sender, receiver, message)[1] == size
    assert carried(sender, receiver, message)[1] == 0
    grown = np.arange(size + size // 20, dtype=np.uint64)
    assert carried(sender, receiver, grown)[1] == 0


def test_messages_are_sent_from_where_they_lie_if_enough_words_follow(seed: int) -> None:
    """And from a copy if not; the words of the messages stay as they are."""
    rng, random_words = random.Random(seed), np.random.default_rng(seed)
    senders, receivers = [Parcel(), Parcel()], [Parcel(), Parcel()]
    copied = 0
    for _ in range(200):
        memory = random_words.integers(0, 2**64, 6000, np.uint64)
        edges = [0, *sorted(rng.sample(range(2, 6001), 2))]
        before = memory.copy()
        messages = [memory[a + 1 : b] for a, b in itertools.pairwise(edges)]
        rests = [
            one.pack(message, whole=True, around=memory)
            for one, message in zip(senders, messages, strict=True)
        ]
        copied += sum(not np.may_share_memory(one.words, memory) for one in senders)
        for sender, receiver, message, rest in zip(senders, receivers, messages, rests, strict=True):
            assert len(sender.words) == len(receiver.words)
            receiver.words[:] = sender.words
            assert sender.size == receiver.size == len(message)
            out = np.zeros(len(message), np.uint64)
            receiver.unpack_(out)[:] = rest
            sender.fit()
            receiver.fit()
            assert np.array_equal(out, message)
        for a, b in itertools.pairwise(edges):
            assert np.array_equal(memory[a + 1 : b], before[a + 1 : b])
    assert 0 < copied < 200


def test_large_messages_take_no_room() -> None:
    sender, receiver = Parcel(), Parcel()
    for _ in range(2):
        assert carried(sender, receiver, np.zeros(MOST + 1, np.uint64))[1] == MOST + 1
    assert len(sender.words) == 1


def test_a_mark_is_as_long_as_what_is_waited_for() -> None:
    sender, receiver = Parcel(), Parcel()
    carried(sender, receiver, np.arange(1000, dtype=np.uint64))
    receiver.words[:] = sender.mark()
    assert receiver.size == MARK


def test_without_the_words_only_the_size_is_sent() -> None:
    parcel = Parcel()
    assert not len(parcel.pack(np.arange(9, dtype=np.uint64), whole=False))
    assert parcel.size == 9 and len(parcel.words) == 1
