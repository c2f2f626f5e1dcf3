"""Exchanges over real connections: who gets what, and what becomes of one that is cut off."""

from __future__ import annotations

import datetime
import time
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ecemb.errors import NotEnoughSpace, PeerFailure
from ecemb.net.collectives import Fabric, Transport
from support.processes import DEADLINE_S, run_ranks


def new_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def opened(timeout_s: float, *, fabric: bool = False) -> Transport:
    transport = Transport(new_group(), timeout_s)
    if fabric:
        transport.fabric = fabric_of(timeout_s)
    return transport


def fabric_of(timeout_s: float) -> Fabric:
    """One whose exchanges have a deadline. To connect takes as long as it takes."""
    fabric = Fabric(new_group(), torch.device("cpu"), DEADLINE_S)
    fabric._timeout_s, fabric._deadline = timeout_s, datetime.timedelta(seconds=timeout_s)
    return fabric


def pass_on(fabric: bool) -> list[list[int]]:
    """Each rank sends runs of the same words to the next two, again and again; no rank hears from all."""
    transport = opened(DEADLINE_S, fabric=fabric)
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
    transport.exchange({}, {}, "an exchange of nothing")
    transport.close()
    return got


@pytest.mark.parametrize("fabric", [False, True])
def test_everybody_gets_what_was_sent_to_it_in_every_exchange(fabric: bool) -> None:
    for rank, got in enumerate(run_ranks(4, pass_on, fabric)):
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


def gathers() -> list[tuple[list[bytes], int]]:
    """Contents around the length that goes with the sizes, and the collectives that each takes."""
    transport, found = opened(DEADLINE_S), []
    for lengths in ((0, 0, 0), (56, 1, 0), (57, 1, 0), (3, 1000, 56)):
        own = bytes([65 + transport.rank]) * lengths[transport.rank]
        with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as calls:
            found.append((transport.gather(own, "the test"), calls.call_count))
    return found


def test_short_contents_of_all_ranks_take_one_collective() -> None:
    expected = [
        ([b"", b"", b""], 1),
        ([b"A" * 56, b"B", b""], 1),
        ([b"A" * 57, b"B", b""], 2),
        ([b"AAA", b"B" * 1000, b"C" * 56], 2),
    ]
    assert run_ranks(3, gathers) == [expected] * 3


def hear_late(what: str) -> str:
    """Rank 1 leaves; rank 0 comes to its wait when its part has long failed."""
    transport, ended = opened(DEADLINE_S), Transport.ended
    if transport.rank == 1:
        transport.close()
        return ""

    def late(self: Transport, work: dist.Work, what: str) -> None:
        while not work.is_completed():
            time.sleep(0.001)
        ended(self, work, what)

    with mock.patch.object(Transport, "ended", late), pytest.raises(PeerFailure) as raised:
        getattr(transport, what)(*WHAT_FAILS[what])
    return str(raised.value)


WHAT_FAILS = {
    "all_to_all": (np.zeros((2, 1), np.int64), "the test"),
    "gather": (b"some bytes", "the test"),
    "vote": (True, "the test"),
}


@pytest.mark.parametrize("what", WHAT_FAILS)
def test_a_collective_that_failed_before_it_was_waited_for_is_no_success(what: str) -> None:
    assert "lost a peer in the test" in run_ranks(2, hear_late, what)[0]


# --- over a fabric -------------------------------------------------------------------------------


def grow() -> list[int]:
    """Messages of other sizes in each exchange: what is left of a long one is not taken for a short one."""
    transport = opened(DEADLINE_S, fabric=True)
    peer, got = 1 - transport.rank, []
    for size in (3, 50, 2, 60):
        room = np.zeros(size, np.uint64)
        transport.exchange({peer: np.arange(size, dtype=np.uint64) + size}, {peer: room}, "the test")
        got.append(int(room.sum()))
    return got


def test_messages_grow_and_shrink_over_a_fabric() -> None:
    expected = [sum(range(size, 2 * size)) for size in (3, 50, 2, 60)]
    assert run_ranks(2, grow) == [expected, expected]


def be_left_alone() -> str:
    """Rank 1 announces what it never sends."""
    transport = opened(1, fabric=True)
    if transport.rank == 1:
        return ""
    with pytest.raises(PeerFailure) as raised:
        transport.exchange({}, {1: np.zeros(3, np.uint64)}, "the exchange of step 7")
    return str(raised.value)


def test_a_peer_that_sends_nothing_over_a_fabric_is_named_with_the_deadline() -> None:
    told, _ = run_ranks(2, be_left_alone)
    assert "rank 0 of 2 lost a peer in the exchange of step 7" in told
    assert "(deadline 1 s)" in told


def pretend() -> str:
    """A backend whose wait returns though nothing has come, as NCCL's may, whose works end elsewhere."""
    fabric = fabric_of(1)
    work = mock.Mock(is_completed=mock.Mock(return_value=False))
    with (
        mock.patch.object(dist, "batch_isend_irecv", return_value=[work]),
        pytest.raises(PeerFailure) as raised,
    ):
        fabric.exchange({}, {1 - fabric.rank: np.zeros(3, np.uint64)}, "the test")
    return str(raised.value)


def test_what_has_not_arrived_over_a_fabric_is_no_exchange() -> None:
    assert all("the wait has ended before it" in told for told in run_ranks(2, pretend))


def lack_room() -> str:
    fabric = Fabric(new_group(), torch.device("cpu"), DEADLINE_S)
    with (
        mock.patch.object(torch.Tensor, "new_empty", side_effect=[fabric._room, torch.OutOfMemoryError]),
        pytest.raises(NotEnoughSpace) as raised,
    ):
        fabric.exchange({1 - fabric.rank: np.zeros(8, np.uint64)}, {}, "the exchange of step 7")
    return str(raised.value)


def test_a_device_without_room_for_messages_is_named_with_what_it_lacks() -> None:
    for told in run_ranks(2, lack_room):
        assert "the exchange of step 7 needs 80 bytes of cpu's memory" in told
        assert "leave parity_backend out" in told
