"""The rendezvous: all workers of a start get one roster, and no dead worker's word counts."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from reports import header, report

import ecemb
from ecemb import rendezvous
from ecemb.arena import Arena
from ecemb.directory import Directory
from ecemb.errors import ConfigurationError, NotInitialized, RendezvousError, UsageError
from ecemb.header import new_arena_id
from ecemb.roster import Report, Roster, Seat, Worker

DEADLINE_S = 30


# --- agreeing on it -----------------------------------------------------------------------------


class Starts:
    """Workers of one start after the other, as threads that agree over one store."""

    def __init__(self, open_store: Callable[[], dist.Store]) -> None:
        self._open = open_store
        self.store = open_store()
        self.rosters: dict[str, Roster] = {}
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def begin(self, index: int, size: int, nonce: str, arenas: Sequence[Report] = ()) -> None:
        worker = Worker("host", nonce, tuple(arenas))

        def run() -> None:
            try:
                store, deadline = self._open(), time.monotonic() + DEADLINE_S
                self.rosters[nonce] = rendezvous._agree(store, worker, index, size, deadline)
            except BaseException as error:  # noqa: BLE001 - raised again by join()
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def await_proposal(self, other_than: str = "") -> str:
        """Returns RANK 0's proposal once there is another one than `other_than`."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.store.check(["proposal"]):
                name = json.loads(self.store.get("proposal"))[0]
                if name != other_than:
                    return name
            time.sleep(0.001)
        raise AssertionError("no proposal")

    def join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        if self._errors:
            raise self._errors[0]
        self._threads.clear()

    def agreed(self, *nonces: str) -> Roster:
        self.join()
        roster = self.rosters[nonces[0]]
        assert all(self.rosters[nonce] == roster for nonce in nonces)
        assert tuple(worker.nonce for worker in roster.workers) == nonces
        return roster


@pytest.fixture(params=["hash", "tcp"])
def starts(request: pytest.FixtureRequest) -> Starts:
    if request.param == "hash":
        shared = dist.HashStore()
        return Starts(lambda: shared)
    timeout = timedelta(seconds=DEADLINE_S)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    clients = [server]
    port = server.port

    def client() -> dist.Store:
        clients.append(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout))
        return clients[-1]

    return Starts(client)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_workers_get_the_same_roster(starts: Starts, size: int, seed: int) -> None:
    order = random.Random(seed).sample(range(size), size)
    for index in order:
        starts.begin(index, size, f"n{index}", [report(0, "a", "ab")] if index == 0 else ())
    roster = starts.agreed(*(f"n{index}" for index in range(size)))
    assert roster.generation > 0
    assert 0 <= roster.generation_id < 2**62
    assert not roster.started
    assert not roster.finished
    assert roster.headers == [header(0, "ab")]


def test_what_an_earlier_start_left_in_the_store_counts_for_nothing(starts: Starts) -> None:
    """torchrun reuses its store: the leader first proposes with a dead worker's announcement."""
    for index in range(3):
        starts.begin(index, 3, f"old{index}")
    first = starts.agreed("old0", "old1", "old2")
    before = json.loads(starts.store.get("proposal"))[0]
    starts.begin(0, 3, "new0")
    starts.begin(1, 3, "new1")
    starts.await_proposal(other_than=before)  # with old2, who is dead
    starts.begin(2, 3, "new2")
    second = starts.agreed("new0", "new1", "new2")
    assert second.prefix != first.prefix
    assert second.generation > first.generation


def test_a_leader_that_comes_last_does_not_let_the_others_run_ahead(starts: Starts) -> None:
    for index in range(2):
        starts.begin(index, 2, f"old{index}")
    starts.agreed("old0", "old1")
    starts.begin(1, 2, "new1")
    starts.begin(0, 2, "new0")
    starts.agreed("new0", "new1")


def test_a_worker_that_died_during_the_rendezvous_is_replaced_by_its_successor(
    starts: Starts,
) -> None:
    starts.store.set("announce/1", Roster(0, 0, "", False, False, (Worker("host", "dead", ()),)).to_json())
    starts.begin(0, 2, "a")
    starts.await_proposal()
    starts.begin(1, 2, "b")
    starts.agreed("a", "b")


def test_the_marks_reach_the_roster(starts: Starts) -> None:
    starts.store.set("started", "12")
    starts.store.set("finished", "1")
    starts.begin(0, 1, "a")
    roster = starts.agreed("a")
    assert roster.started
    assert roster.opened == 12
    assert roster.finished


def test_the_generation_is_above_every_reported_one() -> None:
    """Section 2.2: also above a clock that runs ahead elsewhere, and `opened` counts as well."""
    far = 2**62
    for words in ({"joined": far}, {"opened": far}):
        store = dist.HashStore()
        worker = Worker("a", "n", (report(0, "a", "ab", **words),))
        roster = rendezvous._agree(store, worker, 0, 1, time.monotonic() + DEADLINE_S)
        assert roster.generation == far + 1


def test_the_generation_is_above_every_one_that_the_store_has_seen() -> None:
    """Also of a start that nobody survived to report, led by a host whose clock was ahead."""
    far = 2**62
    for mark in ("generation", "started"):
        store = dist.HashStore()
        store.set(mark, str(far))
        for above in (1, 2):
            roster = rendezvous._agree(store, Worker("a", "n", ()), 0, 1, time.monotonic() + DEADLINE_S)
            assert roster.generation == far + above
        store.set(mark, "soon")
        with pytest.raises(RendezvousError, match=f"mark `{mark}` is b'soon'"):
            rendezvous._agree(store, Worker("a", "n", ()), 0, 1, time.monotonic() + DEADLINE_S)


@pytest.mark.parametrize(
    ("index", "announced", "silent"),
    [
        (0, (), r"\[1, 2\]"),  # nobody else has come
        (0, (1,), r"\[2\]"),
        (0, (1, 2), r"\[1, 2\]"),  # what they left there is an earlier start's
        (1, (0, 2), r"\[0\]"),  # the leader's word is an earlier start's
    ],
)
def test_the_deadline_names_who_is_missing(index: int, announced: tuple[int, ...], silent: str) -> None:
    store = dist.HashStore()
    for other in announced:
        dead = Worker("host", f"dead{other}", ())
        store.set(f"announce/{other}", Roster(0, 0, "", False, False, (dead,)).to_json())
    with pytest.raises(RendezvousError, match=rf"3 workers .* no word from torchrun ranks {silent}"):
        rendezvous._agree(store, Worker("host", "me", ()), index, 3, time.monotonic() - 1)


# --- claiming the memory ------------------------------------------------------------------------


@pytest.fixture
def left_behind(tmp_path: Path) -> tuple[Directory, Path]:
    """An arena that an earlier process left."""
    directory = Directory(tmp_path, "job", "a")
    constants = dataclasses.replace(header(0, "ab").constants, arena_id=new_arena_id())
    arena = Arena.create(directory, constants, {})
    arena.close()
    return directory, arena.path


def test_the_seat_gets_its_arena_locked(left_behind: tuple[Directory, Path]) -> None:
    directory, path = left_behind
    found = directory.scan(timeout_s=0)
    arena = rendezvous._claim(found, Seat(0, path.stem), 1)
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
        rendezvous._claim(found, Seat(0, path.stem), 1)


def test_a_seat_whose_arena_is_not_on_this_host_is_an_error(
    left_behind: tuple[Directory, Path],
) -> None:
    directory, _ = left_behind
    with pytest.raises(RendezvousError, match="rank 1 was given arena 12345678"):
        rendezvous._claim(directory.scan(timeout_s=0), Seat(1, "12345678"), 1)


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
        rendezvous.current()


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
    environment.setenv("MASTER_PORT", str(port))
    environment.setenv("GROUP_WORLD_SIZE", str(agents))
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    rendezvous._store(index, timeout)
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caplog.text) == warns
