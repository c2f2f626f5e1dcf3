"""What travels to the keepers: laid out block by block, a run of words for each of n - 1 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecemb.coding.parity import (
    HEAD_WORDS,
    Delta,
    Scratch,
    blank,
    messages,
    parted,
    sections,
    size_words,
    unpack,
    write_heads_,
)
from ecemb.coding.placement import Placement
from support.simulation import message_of


def delta(block: int, offsets: Sequence[int], width: int, fill: int) -> Delta:
    words = np.arange(len(offsets) * width).astype(np.uint64) + np.uint64(fill)
    return Delta(block, np.array(offsets, np.int64), words.reshape(len(offsets), width))


def same(a: Delta, b: Delta) -> bool:
    arrays = ((a.offsets, b.offsets), (a.words, b.words))
    return a.block == b.block and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in arrays)


# --- one message --------------------------------------------------------------------------------

DELTAS = st.builds(
    delta,
    st.integers(0, 255),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=5),
    st.integers(0, 4),
    st.integers(0, 2**63),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(DELTAS, max_size=4))
def test_a_message_comes_out_as_it_went_in(sent: list[Delta]) -> None:
    words = message_of(*sent)
    got = list(unpack(words))
    assert len(got) == len(sent)
    assert all(same(a, b) for a, b in zip(got, sent, strict=True))
    assert len(words) == sum(size_words(*one.words.shape) for one in sent)


def test_unpacked_deltas_are_views_of_the_inbox() -> None:
    words = message_of(delta(1, [5], 2, 7))
    (got,) = unpack(words)
    words[-1] = 99
    assert got.words[0, -1] == 99


def test_the_size_of_a_delta_is_what_it_takes() -> None:
    assert size_words(2, 5) == HEAD_WORDS + 2 + 2 * 5 == len(message_of(delta(0, [3, 9], 5, 0)))


def test_a_blank_delta_is_a_part_of_the_message() -> None:
    out = np.full(20, 9, np.uint64)
    laid = blank(out, 3, 2, 4)
    laid.offsets[:], laid.words[:] = [7, 8], 1
    assert out.tolist() == [3, 2, 4, 7, 8, *[1] * 8, *[9] * 7]


def test_scratch_is_given_out_again() -> None:
    scratch = Scratch()
    first = scratch.room(10)
    first[:] = 5
    assert np.shares_memory(first, scratch.room(7))
    assert len(scratch.room(100)) == 100


# --- many messages ------------------------------------------------------------------------------


def test_messages_end_to_end_are_parted_by_sender() -> None:
    words = np.arange(6, dtype=np.uint64)
    got = parted(words, [0, 2, 0, 4, 0])
    assert {sender: part.tolist() for sender, part in got.items()} == {1: [0, 1], 3: [2, 3, 4, 5]}
    got[3][0] = 77
    assert words[2] == 77
    assert parted(words[:0], [0, 0]) == {}


PLACEMENTS = [
    Placement.ranks(2, 1, 2),
    Placement.ranks(4, 2, 7),
    Placement.ranks(7, 4, 9),
    Placement.ranks(6, 1, 6),
    Placement(3, 1, (2, 0, 3, 1)),
    Placement(4, 3, (1, 0, 2, 4, 3)),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_block_goes_to_the_keepers_of_its_parity_and_to_nobody_else(placement: Placement) -> None:
    for rank in range(placement.world_size):
        blocks = [delta(block, [block], 1, block) for block in range(placement.k)]
        edges = np.cumsum([0, *(size_words(1, 1) for _ in blocks)]).tolist()
        sent = messages(message_of(*blocks), edges, placement, rank)
        assert rank not in sent  # nobody keeps its own parity
        assert len(sent) == placement.n - 1
        got = [(one.block, keeper) for keeper, words in sent.items() for one in unpack(words)]
        keepers = [placement.keepers(rank, block) for block in range(placement.k)]
        assert sorted(got) == sorted((block, one) for block, kept in enumerate(keepers) for one in kept)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_first_words_of_a_message_say_how_long_it_is(placement: Placement) -> None:
    r = placement.r
    for rank in range(placement.world_size):
        parts = [np.full(r + 3 * block, block, np.uint64) for block in range(placement.k)]
        words, edges = np.concatenate(parts), np.cumsum([0, *map(len, parts)]).tolist()
        write_heads_(words, edges, r)
        for keeper, message in messages(words, edges, placement, rank).items():
            blocks = placement.recipients(rank)[keeper]
            assert int(message[: len(blocks)].sum()) == len(message)
            found = list(sections(message, r))
            assert [one.tolist() for one in found] == [[block] * 3 * block for block in blocks]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_blocks_that_did_not_change_are_not_sent(placement: Placement) -> None:
    changed = delta(placement.k - 1, [0], 1, 5)
    edges = [0] * placement.k + [size_words(1, 1)]
    sent = messages(message_of(changed), edges, placement, 0)
    assert sent.keys() == set(placement.keepers(0, placement.k - 1))
    assert messages(np.empty(0, np.uint64), [0] * (placement.k + 1), placement, 0) == {}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_recipients_are_the_keepers_of_neighbouring_blocks(placement: Placement) -> None:
    for rank in range(placement.world_size):
        found = placement.recipients(rank)
        assert len(found) == placement.n - 1 and rank not in found
        pairs = {(block, keeper) for keeper, blocks in found.items() for block in blocks}
        blocks = range(placement.k)
        assert pairs == {(block, one) for block in blocks for one in placement.keepers(rank, block)}
        assert sum(map(len, found.values())) == placement.k * (placement.n - placement.k)
        assert all(a + 1 == b for run in found.values() for a, b in itertools.pairwise(run))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_senders_are_those_that_a_rank_is_a_recipient_of(placement: Placement) -> None:
    ranks = range(placement.world_size)
    for rank in ranks:
        senders = placement.senders(rank)
        assert sorted(senders) == [one for one in ranks if rank in placement.recipients(one)]
