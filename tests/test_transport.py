"""Exchanges over real connections: who gets what, and what becomes of one that is cut off."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from processes import run_ranks

from ecemb.errors import PeerFailure
from ecemb.transport import Transport


def opened(timeout_s: float) -> Transport:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return Transport(group, timeout_s)


def pass_on() -> list[list[int]]:
    """Each rank sends runs of the same words to the next two, again and again; nobody hears from all."""
    transport = opened(30)
    size, rank = transport.world_size, transport.rank
    words = np.arange(6, dtype=np.uint64) + 10 * rank
    got: list[list[int]] = []
    for _ in range(3):
        words += 100
        room = {(rank - d) % size: np.zeros(d + 2, np.uint64) for d in (1, 2)}
        send = {(rank + 1) % size: words[:3], (rank + 2) % size: words[2:6]}
        transport.exchange(send, room, "the test")
        got.append([int(word) for d in (1, 2) for word in room[(rank - d) % size]])
    assert transport.sent_bytes == 3 * 7 * 8
    return got


def test_everybody_gets_what_was_sent_to_it_in_every_exchange() -> None:
    for rank, got in enumerate(run_ranks(4, pass_on)):
        for i, words in enumerate(got):
            one, two = (100 * (i + 1) + 10 * ((rank - d) % 4) for d in (1, 2))
            assert words == [one, one + 1, one + 2, two + 2, two + 3, two + 4, two + 5]


def be_cut_off() -> list[int]:
    """Rank 0 receives nothing of what rank 1 sends it first, and asks for what it sends next."""
    transport = opened(2)
    words = np.full(3, 7, np.uint64)
    if transport.rank == 1:
        with pytest.raises(PeerFailure):
            transport.exchange({0: words}, {}, "the first exchange")
        return []
    with (
        mock.patch.object(Transport, "expect", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        transport.exchange({}, {1: words}, "the first exchange")
    room = np.zeros(3, np.uint64)
    with pytest.raises(PeerFailure, match="the second exchange"):
        transport.exchange({}, {1: room}, "the second exchange")
    return room.tolist()


def test_what_is_left_of_an_exchange_is_not_taken_for_anothers() -> None:
    assert run_ranks(2, be_cut_off) == [[0, 0, 0], []]
