"""The rendezvous: the public call, as far as one process can go, and the claim on memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ecemb
from ecemb import session
from ecemb.errors import ConfigurationError, NotInitialized, RendezvousError, UsageError
from ecemb.memory.arena import Arena
from ecemb.memory.scan import Directory
from ecemb.net import rendezvous, replacement
from ecemb.net.assignment import Assignment
from ecemb.net.error_file import cause_of
from ecemb.net.roster import StoreGone, Superseded
from support.arena_holders import constants

DEADLINE_S = 300


# --- claiming the memory ------------------------------------------------------------------------


@pytest.fixture
def left_behind(tmp_path: Path) -> tuple[Directory, Path]:
    """An arena that an earlier process left."""
    directory = Directory(tmp_path, "job", "a")
    arena = Arena.create(directory, constants(job="job", regions=(("rows", 0),)), {})
    arena.close()
    return directory, arena.path


def test_the_seat_gets_its_arena_locked(left_behind: tuple[Directory, Path]) -> None:
    directory, path = left_behind
    found = directory.scan(timeout_s=0)
    arena = rendezvous.claim(found, path.stem, 0, 1)
    try:
        assert arena.header() == found[0].header
        assert directory.scan(timeout_s=0)[0].holder is not None
    finally:
        arena.close()


def test_an_arena_that_changed_after_it_was_reported_is_not_taken(
    left_behind: tuple[Directory, Path],
) -> None:
    directory, path = left_behind
    found = directory.scan(timeout_s=0)
    other = Arena.attach(path)
    other.set("committed", 9)
    other.close()
    with pytest.raises(RendezvousError, match="changed while this worker was claiming it"):
        rendezvous.claim(found, path.stem, 0, 1)


def test_a_seat_whose_arena_is_not_on_this_host_is_an_error(
    left_behind: tuple[Directory, Path],
) -> None:
    directory, _ = left_behind
    with pytest.raises(RendezvousError, match="rank 1 was given arena 12345678"):
        rendezvous.claim(directory.scan(timeout_s=0), "12345678", 1, 1)


def test_options_of_torch_reach_its_group(tmp_path: Path) -> None:
    """A device and options of a backend that this machine may not have."""
    asked: list[dict[str, Any]] = []
    device, options = torch.device("cuda", 3), object()
    store, own = dist.HashStore(), Assignment(rank=0, arena_id=None)
    with (
        mock.patch.object(dist, "init_process_group", lambda *_, **given: asked.append(given)),
        mock.patch.object(rendezvous.hook, "prepare"),
        mock.patch.dict("os.environ"),
    ):
        for given in ({"device_id": device, "pg_options": options}, {"device_id": None, "pg_options": None}):
            assert rendezvous.make_group("nccl", store, own, 1, [], 1.0, 1800.0, given) == (None, ())
    patience = {"store": store, "rank": 0, "world_size": 1, "timeout": timedelta(seconds=1800)}
    assert asked == [{**patience, "device_id": device, "pg_options": options}, patience]


# --- the public call, as far as one process can go ----------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """torchrun's variables; nothing listens at the port."""
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def begin(tmp_path: Path, job: str = "job", timeout_s: float = 0.2, host: str = "a") -> None:
    timeout = timedelta(seconds=timeout_s)
    ecemb.init_process_group("gloo", job=job, arena_dir=tmp_path, host=host, timeout=timeout)


def test_there_is_no_session_before_it_is_initialised() -> None:
    with pytest.raises(NotInitialized, match="ecemb.init_process_group"):
        session.current()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        *((name, "x") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")),
    ],
)
def test_without_torchruns_environment(
    name: str, value: str | None, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if value is None:
        environment.delenv(name)
    else:
        environment.setenv(name, value)
    with pytest.raises(ConfigurationError, match="environment has no usable"):
        begin(tmp_path)


@pytest.mark.parametrize("job", ["", "a/b", "../x", ".hidden", "x" * 65, "new\nline", "ü"])
def test_a_jobs_name_is_a_plain_name(job: str, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="job"):
        begin(tmp_path, job=job)
    assert not list(tmp_path.rglob("*.arena"))


def test_a_hosts_name_is_a_plain_name(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="host"):
        begin(tmp_path, host="rack 1/host 2")


def test_an_arena_dir_has_to_exist(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="missing"):
        begin(tmp_path / "missing")


@pytest.mark.parametrize("timeout_s", [0, -1])
def test_a_timeout_is_positive(timeout_s: float, environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="timeout must be positive"):
        begin(tmp_path, timeout_s=timeout_s)


def test_a_store_that_does_not_answer(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RendezvousError, match="no store answers at 127.0.0.1:1"):
        begin(tmp_path)


def test_torch_distributed_must_not_be_initialised_before(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="in place of"):
            begin(tmp_path)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("agents", "shared", "index", "warns"),
    [
        (3, "True", 0, True),
        (3, "True", 1, False),
        (3, "False", 0, False),
        (1, "True", 0, False),
    ],
)
def test_agents_that_share_their_store_are_warned_that_none_can_be_replaced(
    environment: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    agents: int,
    shared: str,
    index: int,
    warns: bool,
) -> None:
    timeout = timedelta(seconds=DEADLINE_S)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    port = server.port if shared == "True" or index else 0
    environment.setenv("GROUP_WORLD_SIZE", str(agents))
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    rendezvous.connect_store("127.0.0.1", port, index, timeout)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == warns


# --- replacements ---------------------------------------------------------------------------------


class Meetings:
    """Attempts to meet, each of which ends as given; the store and the memory are always there."""

    def __init__(self, patched: pytest.MonkeyPatch, *ends: object) -> None:
        self.attempts = self.connections = 0
        self._ends = list(ends)
        patched.setattr(rendezvous, "connect_store", self._connect)
        patched.setattr(rendezvous, "_assemble", self._assemble)

    def _connect(self, *_: object) -> dist.Store:
        self.connections += 1
        return dist.HashStore()

    def _assemble(self, *_: object) -> tuple[Any, Any]:
        self.attempts += 1
        end = self._ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end, ()

    def __call__(self, folder: Path) -> rendezvous.Met:
        return rendezvous.meet("job", Directory(folder, "job", "a"), timedelta(seconds=DEADLINE_S))


@pytest.fixture
def replaced() -> Iterator[None]:
    """This process stands for one that has replaced another."""
    replacement.begin(replacement.new_page(), 1)
    replacement.join()
    yield
    replacement.begin(None, 0)


def test_workers_meet_again_when_one_was_replaced(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    meet = Meetings(environment, Superseded(), Superseded(), "roster")
    assert meet(tmp_path).roster == "roster"
    assert (meet.attempts, meet.connections) == (3, 1)  # RANK 0 may host the store, and its port is taken


def test_a_replacement_comes_to_the_store_of_the_new_rank_0(
    environment: pytest.MonkeyPatch, tmp_path: Path, replaced: None
) -> None:
    meet = Meetings(environment, StoreGone("gone"), "roster")
    assert meet(tmp_path).roster == "roster"


@pytest.mark.parametrize("agents", [False, True])
def test_a_store_that_ends_ends_other_starts(
    environment: pytest.MonkeyPatch, tmp_path: Path, agents: bool, request: pytest.FixtureRequest
) -> None:
    """That of torchrun's agent does not come back, and a first worker has no predecessor with a store."""
    if agents:
        request.getfixturevalue("replaced")
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agents))
    with pytest.raises(StoreGone):
        Meetings(environment, StoreGone("gone"), "roster")(tmp_path)


def test_a_replacement_leaves_the_restart_to_torchrun_if_an_arena_is_still_held(
    environment: pytest.MonkeyPatch, left_behind: tuple[Directory, Path], replaced: None
) -> None:
    directory, _ = left_behind
    [free] = directory.scan(timeout_s=0)
    held = dataclasses.replace(free, holder=1)
    environment.setattr(Directory, "scan", lambda self, timeout_s: [held])
    with pytest.raises(RendezvousError, match="holds its arena") as raised:
        Meetings(environment, "roster")(directory.arena_dir)
    assert cause_of(raised.value) == "" and not replacement.is_possible()


def test_a_replacement_leaves_the_restart_to_torchrun_if_others_do_not_come(
    environment: pytest.MonkeyPatch, tmp_path: Path, replaced: None
) -> None:
    """The agent of another host has died, say, with its workers."""
    environment.setattr(rendezvous, "_PATIENCE_S", 0.01)
    environment.setattr(rendezvous, "connect_store", lambda *_: dist.HashStore())
    environment.setenv("WORLD_SIZE", "2")
    with pytest.raises(RendezvousError, match="so that torchrun restarts all workers"):
        rendezvous.meet("job", Directory(tmp_path, "job", "a"), timedelta(seconds=DEADLINE_S))
    assert not replacement.is_possible()
