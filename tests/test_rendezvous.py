"""Who is which rank: ranks follow their memory, and no dead worker's word counts."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import ecemb
from ecemb import rendezvous
from ecemb.arena import Arena
from ecemb.directory import Directory
from ecemb.errors import (
    ArenaBusy,
    ConfigurationError,
    InconsistentArenas,
    NotInitialized,
    RendezvousError,
    UsageError,
)
from ecemb.header import NONE, Constants, Header, State, new_arena_id
from ecemb.rendezvous import Report, Roster, Seat, Worker, assign

DEADLINE_S = 30


def header(rank: int, domains: Sequence[str], **words: int | State) -> Header:
    size = len(domains)
    constants = Constants(
        job="job",
        arena_id=f"{rank:08x}",
        rank=rank,
        world_size=size,
        n=2,
        k=1,
        positions=tuple(range(size)),
        domains=tuple(domains),
        layout_hash="",
        layout="",
        block_words=((1,),) * size,
        regions=(("rows", 0),),
    )
    defaults = {"state": State.LIVE, "joined": 1, "generation_id": 7, "opened": 1}
    return Header(constants, **{**defaults, "committed": 3, "prepared": 3, **words})


def report(rank: int, host: str, domains: Sequence[str], **words: int | State) -> Report:
    return Report(host, f"/{host}/{rank}", header(rank, domains, **words), None, None)


def workers_on(hosts: Sequence[str]) -> list[Worker]:
    """One worker for each name, in the order of torchrun's RANK."""
    return [Worker(host, f"nonce {index}", ()) for index, host in enumerate(hosts)]


def ranks_by_host(workers: Sequence[Worker], seats: Sequence[Seat]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for worker, seat in zip(workers, seats, strict=True):
        found.setdefault(worker.host, set()).add(seat.rank)
    return found


# --- assign -------------------------------------------------------------------------------------


def test_a_fresh_start_keeps_torchruns_ranks() -> None:
    workers = workers_on("abab")
    assert assign(workers, []) == tuple(Seat(index, None) for index in range(4))


def test_arenas_that_hold_nothing_leave_torchruns_ranks_too() -> None:
    reports = [
        report(1, "a", "ab", state=State.INIT, prepared=0, committed=NONE),
        report(0, "b", "ab", state=State.FINISHED),
        Report("b", "/b/x", None, "its creation was cut short", None),
    ]
    assert assign(workers_on("ab"), reports) == (Seat(0, None), Seat(1, None))


def test_ranks_follow_their_memory_wherever_torchrun_puts_the_workers() -> None:
    domains = "aabbcc"
    reports = [report(rank, host, domains) for rank, host in enumerate(domains)]
    workers = workers_on("cabcba")
    seats = assign(workers, reports)
    assert ranks_by_host(workers, seats) == {"a": {0, 1}, "b": {2, 3}, "c": {4, 5}}
    assert all(seat.arena_id == f"{seat.rank:08x}" for seat in seats)


def test_a_new_host_takes_a_lost_hosts_ranks_whole() -> None:
    """Section 2.5: failure domains stay what the position table says."""
    domains = "abcabcabc"  # b and c are lost; x and y come in their place
    reports = [report(rank, "a", domains) for rank in (0, 3, 6)]
    workers = workers_on("xyaxayaxy")
    seats = assign(workers, reports)
    found = ranks_by_host(workers, seats)
    assert found["a"] == {0, 3, 6}
    assert {frozenset(found["x"]), frozenset(found["y"])} == {
        frozenset({1, 4, 7}),
        frozenset({2, 5, 8}),
    }


def test_a_host_that_comes_back_without_memory_takes_its_own_ranks() -> None:
    domains = "aabbcc"  # b and c rebooted, and torchrun numbered c's workers first
    reports = [report(rank, "a", domains) for rank in (0, 1)]
    workers = workers_on("ccaabb")
    assert ranks_by_host(workers, assign(workers, reports)) == {
        "a": {0, 1},
        "b": {2, 3},
        "c": {4, 5},
    }


def test_a_lost_arena_is_replaced_on_its_own_host_first() -> None:
    domains = "aabb"  # rank 1's arena on a is gone, and so is all of b, which x replaces
    reports = [report(0, "a", domains)]
    workers = workers_on("axxa")
    assert ranks_by_host(workers, assign(workers, reports)) == {"a": {0, 1}, "x": {2, 3}}


def test_newcomers_of_odd_numbers_still_fill_every_rank() -> None:
    domains = "aaabbb"
    reports = [report(rank, "a", domains) for rank in (0, 1, 2)]
    workers = workers_on("xyyaaa")
    seats = assign(workers, reports)
    assert sorted(seat.rank for seat in seats) == list(range(6))


def test_arenas_outlive_a_move_of_the_domains() -> None:
    """After x replaced b, the position table still says b; x's arenas are found on x."""
    domains = "aabb"
    reports = [report(rank, host, domains) for rank, host in enumerate("aaxx")]
    workers = workers_on("xaxa")
    assert ranks_by_host(workers, assign(workers, reports)) == {"a": {0, 1}, "x": {2, 3}}


def test_a_stale_arena_gives_nobody_a_seat() -> None:
    domains = "ab"
    reports = [
        report(0, "a", domains, joined=2, opened=2),
        report(1, "b", domains, joined=1, opened=1),
    ]
    assert assign(workers_on("ba"), reports) == (Seat(1, None), Seat(0, "00000000"))


@st.composite
def launches(draw: st.DrawFn) -> tuple[list[str], list[str], set[int]]:
    """Domains of ranks; where the workers run now; ranks whose memory is lost."""
    names = "abcdef"[: draw(st.integers(1, 6))]
    domains = draw(st.lists(st.sampled_from(names), min_size=1, max_size=10))
    away = draw(st.sets(st.sampled_from(names)))
    now = [host.upper() if host in away else host for host in domains]  # replaced by new hosts
    lost = {rank for rank, host in enumerate(domains) if host in away}
    lost |= draw(st.sets(st.sampled_from(range(len(domains)))))
    return domains, draw(st.permutations(now)), lost


@settings(max_examples=300, deadline=None)
@given(launches(), st.randoms(use_true_random=False))
def test_every_launch_seats_every_rank_once(
    launch: tuple[list[str], list[str], set[int]], rng: random.Random
) -> None:
    domains, hosts, lost = launch
    reports = [report(r, host, domains) for r, host in enumerate(domains) if r not in lost]
    workers = workers_on(hosts)
    seats = assign(workers, reports)
    assert sorted(seat.rank for seat in seats) == list(range(len(domains)))
    if len(lost) < len(domains):
        for worker, seat in zip(workers, seats, strict=True):
            assert (seat.arena_id is None) == (seat.rank in lost)
            if seat.rank not in lost:
                assert worker.host == domains[seat.rank]
        # Every host replaced by one of its size: each domain stays in one place, whole.
        sizes = Counter(domains)
        if len(set(sizes.values())) == len(sizes):
            found = ranks_by_host(workers, seats)
            groups = {frozenset(r for r, d in enumerate(domains) if d == x) for x in sizes}
            assert {frozenset(ranks) for ranks in found.values()} == groups
    rng.shuffle(reports)
    assert assign(workers, reports) == seats


def test_another_number_of_workers_is_refused() -> None:
    reports = [report(rank, "a", "aaa") for rank in range(3)]
    with pytest.raises(RendezvousError, match="started with 3 ranks, and this launch has 4"):
        assign(workers_on("aaaa"), reports)


def test_a_host_with_more_arenas_than_workers_is_refused() -> None:
    reports = [report(rank, host, "aab") for rank, host in enumerate("aab")]
    with pytest.raises(RendezvousError, match=r"'a' holds the arenas of ranks \[0, 1\].*1 workers"):
        assign(workers_on("abb"), reports)


def test_an_arena_that_a_living_process_holds_is_an_error_with_its_pid() -> None:
    """Section 1: a held lock is reported and awaited, and never read as "no arena"."""
    held = dataclasses.replace(report(0, "a", "ab"), holder=4711)
    with pytest.raises(ArenaBusy, match="/a/0 on a by process 4711"):
        assign(workers_on("ab"), [held, report(1, "b", "ab")])


def test_contradicting_arenas_are_refused() -> None:
    twin = dataclasses.replace(header(0, "ab").constants, arena_id="f" * 8)
    second = Report("b", "/b/0", dataclasses.replace(header(0, "ab"), constants=twin), None, None)
    with pytest.raises(InconsistentArenas, match="two valid arenas"):
        assign(workers_on("ab"), [report(0, "a", "ab"), second])


# --- the roster ---------------------------------------------------------------------------------


def test_a_roster_comes_back_from_json_as_it_was() -> None:
    arenas = (
        report(0, "a", "ab"),
        Report("a", "/a/x", None, "the checksum doesn't match", 12),
    )
    roster = Roster(
        generation=2**62,
        generation_id=2**62 - 1,
        prefix="abc",
        started=True,
        finished=False,
        workers=(Worker("a", "1", arenas), Worker("b", "2", ())),
    )
    text = roster.to_json()
    assert Roster.from_json(text) == Roster.from_json(text.encode()) == roster
    assert json.loads(text)["started"] is True


def test_arenas_that_all_workers_of_a_host_report_count_once() -> None:
    first, second, damaged = (
        report(0, "a", "ab"),
        report(1, "b", "ab"),
        Report("a", "/a/1", None, "cut", None),
    )
    same_path_elsewhere = dataclasses.replace(second, path=first.path)
    workers = (
        Worker("a", "1", (first, damaged)),
        Worker("a", "2", (first, damaged)),
        Worker("b", "3", (same_path_elsewhere,)),
    )
    roster = Roster(1, 1, "", False, False, workers)
    assert roster.reports == [first, damaged, same_path_elsewhere]
    assert roster.headers == [first.header, second.header]


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
    starts.store.set("started", "1")
    starts.store.set("finished", "1")
    starts.begin(0, 1, "a")
    roster = starts.agreed("a")
    assert roster.started
    assert roster.finished


def test_the_generation_is_above_every_reported_one() -> None:
    """Section 2.2: also above a clock that runs ahead elsewhere, and `opened` counts as well."""
    store = dist.HashStore()
    far = 2**62
    for words in ({"joined": far}, {"opened": far}):
        worker = Worker("a", "n", (report(0, "a", "ab", **words),))
        roster = rendezvous._agree(store, worker, 0, 1, time.monotonic() + DEADLINE_S)
        assert roster.generation == far + 1


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
