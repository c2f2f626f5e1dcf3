"""What travels to the keepers: cut at the blocks, addressed to r ranks, packed into words."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecemb.delta import HEAD_WORDS, Delta, address, pack, split, unpack
from ecemb.placement import Placement


def delta(block: int, row: int, offsets: Sequence[int], lengths: Sequence[int], fill: int) -> Delta:
    starts = np.cumsum([0, *lengths]).astype(np.int64)
    words = np.arange(starts[-1]).astype(np.uint64) + np.uint64(fill)
    return Delta(block, row, np.array(offsets, np.int64), starts, words)


def same(a: Delta, b: Delta) -> bool:
    arrays = ((a.offsets, b.offsets), (a.starts, b.starts), (a.words, b.words))
    return (a.block, a.row) == (b.block, b.row) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in arrays
    )


# --- packing ------------------------------------------------------------------------------------


@st.composite
def messages(draw: st.DrawFn) -> list[list[Delta]]:
    lengths = st.lists(st.integers(0, 4), max_size=5)
    return [
        [
            delta(
                draw(st.integers(0, 255)),
                draw(st.integers(0, 255)),
                [draw(st.integers(0, 2**62)) for _ in sizes],
                sizes,
                draw(st.integers(0, 2**63)),
            )
            for sizes in draw(st.lists(lengths, max_size=3))
        ]
        for _ in range(draw(st.integers(1, 4)))
    ]


@settings(max_examples=150, deadline=None)
@given(messages())
def test_messages_come_out_as_they_went_in(sent: list[list[Delta]]) -> None:
    words, lengths = pack(sent)
    assert words.dtype == np.uint64
    assert lengths == [sum(d.size_words for d in message) for message in sent]
    assert len(words) == sum(lengths)
    at = 0
    for message, length in zip(sent, lengths, strict=True):
        got = list(unpack(words[at : at + length]))
        at += length
        assert len(got) == len(message)
        assert all(same(a, b) for a, b in zip(got, message, strict=True))


def test_unpacked_deltas_are_views_of_the_inbox() -> None:
    words, _ = pack([[delta(1, 0, [5], [2], 7)]])
    (got,) = unpack(words)
    words[-1] = 99
    assert got.words[-1] == 99


def test_no_message_takes_no_words() -> None:
    words, lengths = pack([[], []])
    assert len(words) == 0
    assert lengths == [0, 0]
    assert list(unpack(words)) == []


def test_the_size_of_a_delta_is_what_it_takes() -> None:
    one = delta(0, 0, [3, 9], [2, 5], 0)
    assert one.size_words == HEAD_WORDS + 2 + 3 + 7 == len(pack([[one]])[0])


# --- splitting ----------------------------------------------------------------------------------


@st.composite
def changed_records(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[int]]:
    """(address, length) of records, ascending and apart, and bounds that cut no record."""
    lengths = draw(st.lists(st.integers(1, 4), max_size=12))
    edges = np.cumsum([0, *lengths]).tolist()
    bounds = [0, *sorted(draw(st.lists(st.sampled_from(edges), max_size=5))), edges[-1]]
    records = [(a, b - a) for a, b in itertools.pairwise(edges)]
    return [record for record in records if draw(st.booleans())], bounds


@settings(max_examples=200, deadline=None)
@given(changed_records())
def test_every_record_goes_to_its_block(case: tuple[list[tuple[int, int]], list[int]]) -> None:
    records, bounds = case
    addresses = np.array([a for a, _ in records], np.int64)
    starts = np.cumsum([0, *(size for _, size in records)]).astype(np.int64)
    words = np.arange(starts[-1]).astype(np.uint64)
    got = list(split(addresses, starts, words, bounds))
    assert [d.block for d in got] == sorted({d.block for d in got})
    rebuilt = []
    for one in got:
        assert one.row == 0
        assert one.starts[0] == 0
        assert len(one.offsets) == len(one.starts) - 1 > 0
        assert one.starts[-1] == len(one.words)
        low, high = bounds[one.block], bounds[one.block + 1]
        for i, offset in enumerate(one.offsets.tolist()):
            part = one.words[one.starts[i] : one.starts[i + 1]]
            assert low <= low + offset
            assert low + offset + len(part) <= high
            rebuilt.append((low + offset, part.tolist()))
    expected = [(a, words[starts[i] : starts[i + 1]].tolist()) for i, (a, _) in enumerate(records)]
    assert rebuilt == expected


# --- addressing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placement",
    [
        Placement.ranks(2, 1, 2),
        Placement.ranks(4, 2, 7),
        Placement(3, 1, (2, 0, 3, 1)),
        Placement(4, 3, (1, 0, 2, 4, 3)),
    ],
)
def test_each_block_goes_to_the_keepers_of_its_parity_and_to_nobody_else(
    placement: Placement,
) -> None:
    r = placement.n - placement.k
    for rank in range(placement.world_size):
        blocks = [delta(block, 0, [block], [1], block) for block in range(placement.k)]
        outgoing = address(blocks, placement, rank)
        assert len(outgoing) == placement.world_size
        assert outgoing[rank] == []  # nobody keeps its own parity
        sent = [(keeper, d) for keeper, message in enumerate(outgoing) for d in message]
        assert len(sent) == r * placement.k
        for keeper, d in sent:
            stripe_class = placement.stripe_class(rank, d.block)
            assert (stripe_class, d.row) in placement.kept(keeper)
            assert same(d, delta(d.block, d.row, [d.block], [1], d.block))
        assert len({(d.block, d.row) for _, d in sent}) == len(sent)
