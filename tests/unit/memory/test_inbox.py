"""The inbox: what is there when it is said to be."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from ecemb.coding.parity import Delta, write_heads_
from ecemb.coding.rows import Column, TableLayout
from ecemb.errors import InconsistentArenas, NotEnoughSpace
from ecemb.memory.arena import Arena
from ecemb.memory.journal import Inbox
from support.simulation import alone, message_of

SENDERS, HEAD = (5, 0, 2), 2

Words = NDArray[np.uint64]


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with alone(tmp_path, [TableLayout("a", 500, (Column("weight", "float32", 4),))]) as memory:
        yield memory.arena


@pytest.fixture
def inbox(arena: Arena) -> Inbox:
    return Inbox(arena, SENDERS, HEAD)


def delta(block: int, offsets: Sequence[int], fill: int) -> Delta:
    return Delta(block, np.array(offsets, np.int64), np.full((len(offsets), 2), fill, np.uint64))


def message(*sections: Sequence[Delta]) -> Words:
    """Sections with their heads."""
    parts = [np.concatenate([np.zeros(HEAD, np.uint64), message_of(*deltas)]) for deltas in sections]
    words = np.concatenate(parts)
    write_heads_(words, np.cumsum([0, *map(len, parts)]).tolist(), HEAD)
    return words


def fill(inbox: Inbox, sent: Mapping[int, Words]) -> None:
    for sender, words in inbox.receive({sender: len(words) for sender, words in sent.items()}).items():
        words[:] = sent[sender]


def test_every_senders_deltas_come_out_with_its_number(arena: Arena, inbox: Inbox, seed: int) -> None:
    rng = random.Random(seed)
    for transaction in range(50):
        sent = {
            sender: message(
                *[
                    [delta(block, range(rng.randrange(4)), rng.randrange(9))] * rng.randrange(3)
                    for block in range(rng.randint(1, HEAD))
                ]
            )
            for sender in SENDERS
        }
        fill(inbox, sent)
        inbox.seal(transaction)
        got = Inbox(arena, SENDERS, HEAD).deltas(transaction)  # as another process reads it
        for sender in SENDERS:
            mine = [one for source, one in got if source == sender]
            again = message_of(*mine)
            words, heads = sent[sender], np.zeros(len(sent[sender]), bool)
            at = 0
            while at < len(words):
                heads[at : at + HEAD] = True
                at += int(words[at])
            assert np.array_equal(again, words[~heads])


def test_nobody_sent_anything(inbox: Inbox) -> None:
    assert inbox.receive({}) == {}
    inbox.seal(1)
    assert inbox.deltas(1) == []


def test_an_inbox_that_is_not_sealed_or_another_ones_is_not_read(inbox: Inbox) -> None:
    with pytest.raises(InconsistentArenas, match="transaction 1 is prepared"):
        inbox.deltas(1)
    fill(inbox, {})
    inbox.seal(1)
    with pytest.raises(InconsistentArenas, match="transaction 2 is prepared.*holds 1"):
        inbox.deltas(2)
    inbox.receive({0: 5})  # the next transaction has begun to write
    with pytest.raises(InconsistentArenas, match="holds -1"):
        inbox.deltas(1)


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("value", [-1, 1 << 40, -(1 << 63), (1 << 63) - 1])
def test_places_of_nonsense_are_not_followed(arena: Arena, inbox: Inbox, number: int, value: int) -> None:
    fill(inbox, {0: message([delta(0, [1], 2)])})
    inbox.seal(1)
    arena.region("inbox").view(np.int64)[number] = value
    with pytest.raises(InconsistentArenas, match="claims messages at"):
        inbox.deltas(1)


@pytest.mark.parametrize("size", [-1, 0, 1, 10**6])
def test_a_section_of_nonsense_is_not_followed(inbox: Inbox, size: int) -> None:
    words = message([delta(0, [1], 2)], [delta(1, [1], 2)])
    words[int(words[0]) :][:1].view(np.int64)[0] = size
    fill(inbox, {0: words})
    inbox.seal(1)
    with pytest.raises(InconsistentArenas, match="announces a section of"):
        inbox.deltas(1)


def test_an_inbox_without_room_is_void(inbox: Inbox) -> None:
    fill(inbox, {})
    inbox.seal(1)
    full = mock.patch.object(Arena, "reserve", side_effect=NotEnoughSpace("full"))
    with full, pytest.raises(NotEnoughSpace):
        inbox.receive({0: 5})
    with pytest.raises(InconsistentArenas):
        inbox.deltas(1)
