"""The control group's gloo: on the training's device if it has one, else on its own."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ecemb.coding.placement import Placement
from ecemb.errors import PeerFailure
from ecemb.net import network
from ecemb.recovery.plan import Rebuild, RecoveryPlan
from ecemb.start import opening
from support.processes import run_ranks, session_of


def gloo_threads() -> int:
    """Threads that wait for gloo's messages."""
    names: list[str] = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append(path.read_text())
    return sum(name.startswith("gloo") for name in names)


def opened() -> tuple[int, list[bytes]]:
    """Opens a control group; the gloo threads that this made, and what all ranks said in it."""
    before = gloo_threads()
    transport = opening.control_group(session_of(), notes=True)
    made = gloo_threads() - before
    said = transport.gather(str(transport.rank).encode(), "a test")
    with mock.patch.object(transport, "_gloo", mock.Mock(side_effect=AssertionError("over gloo"))):
        transport.barrier("a test")  # by notes
    transport.close()
    dist.all_reduce(torch.zeros(1))  # the training's group still works
    return made, said


def shares() -> list[tuple[int, list[bytes]]]:
    return [opened(), opened()]


def has_its_own() -> tuple[int, list[bytes]]:
    """As where the training has none."""
    with mock.patch.object(network, "training_devices", tuple):
        return opened()


def bound() -> tuple[int, list[bytes]]:
    """As after init_process_group(device_id=), which torch refuses without a device."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)
    try:
        return opened()
    finally:
        world.bound_device_id = None


def test_groups_beside_a_training_that_has_given_its_device() -> None:
    said = [b"0", b"1"]
    assert run_ranks(2, bound) == [(0, said)] * 2


def test_the_control_group_uses_the_gloo_thread_of_the_training() -> None:
    said = [b"0", b"1", b"2"]
    assert run_ranks(3, shares) == [[(0, said), (0, said)]] * 3


def test_a_device_of_its_own_where_the_training_has_none() -> None:
    said = [b"0", b"1"]
    assert run_ranks(2, has_its_own) == [(1, said)] * 2


def connected(folder: Path) -> list[bool]:
    """Whether all ranks had connected when this one could send notes, and when it could send deltas."""
    session, connect = session_of(), network.connect

    def late(*args: Any) -> Any:
        made = connect(*args)
        time.sleep(0.1 * session.rank)
        (folder / f"{session.rank} {args[-2].hex()}").touch()
        return made

    with mock.patch.object(network, "connect", late):
        transport = opening.control_group(session, notes=True)
        seen = [len(list(folder.iterdir())) >= session.world_size]
        made = opening.swap_mesh(session, transport, Placement.ranks(3, 2, 3))
        seen.append(len(list(folder.iterdir())) == 2 * session.world_size)
    made.close()
    transport.close()
    return seen


def test_no_rank_sends_before_all_have_connected(tmp_path: Path) -> None:
    """What comes earlier could be taken for a part of a handshake."""
    assert run_ranks(3, connected, tmp_path) == [[True, True]] * 3


def deadlines() -> float:
    """Of this rank's waits in a rebuild."""
    session = session_of()
    task = Rebuild(0, 0, 1, ((1, 0),))
    plan = RecoveryPlan("memory", 3, (0, 2), (1,), rebuild=(task,))
    made = opening.requests(session, opening.control_group(session, notes=True), plan)
    if session.rank < 2:
        channels, words = made.channels([1 - session.rank]), np.zeros(1, np.uint64)
        channels.send(1 - session.rank, np.ones(1, np.uint64))
        channels.expect({1 - session.rank: words})
        channels.run("a test")
        assert words[0] == 1
    made.close()
    return made.timeout_s


def test_a_holder_waits_for_requests_as_long_as_a_rebuild_may_last() -> None:
    holder, replacement, _ = run_ranks(3, deadlines)
    assert holder >= 7 * 86400 and replacement == 60


def hung_up() -> list[str]:
    """Another thread of rank 0 hangs up, while both ranks wait for notes and deltas of each other."""
    session = session_of()
    transport = opening.control_group(session, notes=True)
    transport.swap_mesh = opening.swap_mesh(session, transport, Placement.ranks(2, 1, 2))
    peer, told = 1 - transport.rank, list[str]()
    other = threading.Thread(target=transport.hang_up if transport.rank == 0 else str)
    other.start()
    with pytest.raises(PeerFailure) as raised:
        transport.swap({}, {peer: np.zeros(1, np.uint64)}).run("a swap")
    told.append(str(raised.value))
    other.join()
    with pytest.raises(PeerFailure) as raised:
        transport.barrier("a barrier")
    told.append(str(raised.value))
    transport.gather(b"", "the end")  # over gloo
    transport.close()
    return told


def test_all_waits_for_notes_and_deltas_end_when_a_rank_hangs_up() -> None:
    for rank, (swap, barrier) in enumerate(run_ranks(2, hung_up)):
        assert f"rank {rank} of 2 lost a peer in a swap" in swap
        assert f"rank {rank} of 2 lost a peer in a barrier" in barrier
        assert all(f"the connection with rank {1 - rank} has ended" in text for text in (swap, barrier))


def test_a_group_without_gloo() -> None:
    group = mock.Mock()
    with mock.patch.object(network.dist, "group", mock.Mock(WORLD=group)):
        assert not network.training_devices()  # of another backend
        group._get_backend.side_effect = RuntimeError("no backend for cpu")
        assert not network.training_devices()
    with mock.patch.object(network.dist, "group", mock.Mock(WORLD=None)):
        assert not network.training_devices()
