"""The roster: all workers get the same one, no dead worker's word counts, and the store stays small."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ecemb.errors import RendezvousError
from ecemb.memory.header import Constants, Header, State
from ecemb.net import roster as roster_module
from ecemb.net.assignment import Report, Roster, Worker
from support.arena_reports import header, report

DEADLINE_S = 300


class Starts:
    """Workers of one start after the other, as threads that agree over one store."""

    def __init__(self, open_store: Callable[[], dist.Store]) -> None:
        self._open = open_store
        self.store = open_store()
        self.rosters: dict[str, Roster] = {}
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def begin(self, index: int, size: int, nonce: str, arenas: Sequence[Report] = ()) -> None:
        """Starts a worker. When it is superseded, it comes again, with a stroke more in its nonce."""

        def run() -> None:
            name = nonce
            try:
                store, deadline = self._open(), time.monotonic() + DEADLINE_S
                while name not in self.rosters:
                    worker = Worker("host", name)
                    try:
                        self.rosters[name] = roster_module.agree(store, worker, arenas, index, size, deadline)
                    except roster_module.Superseded:
                        name += "'"
            except BaseException as error:  # noqa: BLE001 - raised again by join()
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def await_proposal(self, other_than: str = "") -> str:
        """Returns the leader's proposal once there is another one than `other_than`."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.store.check(["current"]):
                name = json.loads(self.store.get("current"))[0][-1]
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

    def die_after_announcing(self, index: int, nonce: str) -> None:
        client = roster_module._StoreClient(self._open(), time.monotonic() + DEADLINE_S)
        roster_module._announce(client, Worker("host", nonce), (), index)

    def die_after_proposing(self, size: int, nonce: str, *, mails: bool) -> None:
        """Runs a leader until it has proposed, and has mailed it to the workers or not."""

        class Dead(Exception):
            pass

        class Client(roster_module._StoreClient):
            def mail(self, keys: Sequence[str], value: str) -> None:
                if not mails and value != "again":
                    raise Dead
                super().mail(keys, value)

            def remove(self, *keys: str) -> None:
                if f"plan/{nonce}" in keys:  # it takes its own proposal, which would then count
                    raise Dead
                super().remove(*keys)

        client = Client(self._open(), time.monotonic() + DEADLINE_S)
        worker = Worker("host", nonce)
        roster_module._announce(client, worker, (), 0)
        with pytest.raises(Dead):
            roster_module._Leader(client, worker, size).lead()


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


def test_a_start_with_fewer_workers_leaves_no_entry_of_the_others(starts: Starts) -> None:
    """A later start with as many as before would take them for its own."""
    for size, name in ((3, "a"), (1, "b")):
        for index in range(size):
            starts.begin(index, size, f"{name}{index}", [report(0, "host", "abc")])
        starts.join()
    assert [starts.store.check([f"announce/{index}"]) for index in range(3)] == [True, False, False]


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


@pytest.mark.slow
def test_workers_of_an_earlier_start_are_not_proposed(starts: Starts) -> None:
    """torchrun reuses its store: the leader waits for those whom it knows to be dead."""
    for index in range(3):
        starts.begin(index, 3, f"old{index}")
    first = starts.agreed("old0", "old1", "old2")
    starts.begin(0, 3, "new0")
    starts.begin(1, 3, "new1")
    starts.begin(2, 3, "new2")
    second = starts.agreed("new0", "new1", "new2")
    assert second.prefix != first.prefix
    assert second.generation > first.generation
    assert json.loads(starts.store.get("current"))[0] == [second.prefix]


def test_a_leader_that_comes_last_does_not_let_the_others_run_ahead(starts: Starts) -> None:
    for index in range(2):
        starts.begin(index, 2, f"old{index}")
    starts.agreed("old0", "old1")
    starts.begin(1, 2, "new1")
    starts.begin(0, 2, "new0")
    starts.agreed("new0", "new1")


def test_a_worker_that_died_during_the_rendezvous_is_replaced_by_its_successor(starts: Starts) -> None:
    """The leader can't tell that it is dead, and proposes it; that proposal never counts."""
    starts.die_after_announcing(1, "dead")
    starts.begin(2, 3, "c")
    starts.begin(0, 3, "a")
    superseded = starts.await_proposal()
    starts.begin(1, 3, "b")
    roster = starts.agreed("a", "b", "c")
    assert roster.prefix != superseded
    assert not starts.store.check([f"roster/{superseded}"])


def test_a_start_without_a_proposal_is_not_proposed_once_its_successors_have_come(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader died first: no rank has recorded its members. And one worker comes after all others."""
    for index in range(3):
        starts.begin(index, 3, f"old{index}")
    starts.agreed("old0", "old1", "old2")
    starts.die_after_announcing(1, "unproposed")
    looked, read = threading.Event(), roster_module._Leader._read

    def reads(self: roster_module._Leader) -> list[Roster]:
        found = read(self)
        looked.set()
        return found

    monkeypatch.setattr(roster_module._Leader, "_read", reads)
    starts.begin(0, 3, "a")
    assert looked.wait(DEADLINE_S)
    come = starts.store.add("arrivals", 0)
    starts.begin(1, 3, "b")
    while starts.store.add("arrivals", 0) == come:
        time.sleep(0.001)
    starts.begin(2, 3, "c")
    starts.agreed("a", "b", "c")


@pytest.mark.parametrize("mails", [False, True])
@pytest.mark.parametrize("leaders", [1, 2])
def test_workers_that_a_dead_leader_proposed_come_again_for_its_successor(
    starts: Starts, leaders: int, mails: bool
) -> None:
    """Only the leader was replaced: the others live, and wait for its mail or for its verdict."""
    for index in range(3):
        starts.begin(index, 3, f"old{index}")
    starts.agreed("old0", "old1", "old2")
    for index in (1, 2):
        starts.begin(index, 3, f"n{index}")
    for number in range(leaders):
        starts.die_after_proposing(3, f"dead{number}", mails=mails)
    starts.begin(0, 3, "n0")
    starts.agreed("n0", "n1" + leaders * "'", "n2" + leaders * "'")


def test_a_worker_is_replaced_once_another_one_has_announced_itself_under_its_index(starts: Starts) -> None:
    for index in range(2):
        starts.begin(index, 2, f"n{index}")
    roster, deadline = starts.agreed("n0", "n1"), time.monotonic() + DEADLINE_S
    assert not roster_module.is_replaced(starts.store, roster.workers[1], 1, deadline)
    starts.die_after_announcing(1, "successor")
    assert roster_module.is_replaced(starts.store, roster.workers[1], 1, deadline)
    assert not roster_module.is_replaced(starts.store, roster.workers[0], 0, deadline)


def test_a_whole_start_that_died_leaves_nothing_that_counts(starts: Starts) -> None:
    for index in range(3):
        starts.die_after_announcing(index, f"dead{index}")
    for index in (2, 0, 1):
        starts.begin(index, 3, f"n{index}")
    starts.agreed("n0", "n1", "n2")


def test_the_marks_reach_the_roster(starts: Starts) -> None:
    starts.store.set("started", "12")
    starts.store.set("finished", "1")
    starts.begin(0, 1, "a")
    roster = starts.agreed("a")
    assert roster.started
    assert roster.opened == 12
    assert roster.finished


def alone(store: dist.Store, nonce: str, reports: Sequence[Report] = ()) -> Roster:
    return roster_module.agree(store, Worker("a", nonce), reports, 0, 1, time.monotonic() + DEADLINE_S)


def test_the_generation_is_above_every_reported_one() -> None:
    """Also above a clock that runs ahead elsewhere, and `opened` counts as well."""
    far = 2**62
    for words in ({"joined": far}, {"opened": far}):
        roster = alone(dist.HashStore(), "n", [report(0, "a", "a", **words)])
        assert roster.generation == far + 2


def test_the_generation_is_above_every_one_that_the_store_has_seen() -> None:
    """Also of a start that no rank survived to report, led by a host whose clock was ahead."""
    far = 2**62
    for mark in ("generation", "started"):
        store = dist.HashStore()
        store.set(mark, str(far))
        for above in (2, 4):  # a start that moves memory takes the number in between
            assert alone(store, f"n{above}").generation == far + above
        store.set(mark, "soon")
        with pytest.raises(RendezvousError, match=f"mark `{mark}` with the value b'soon'"):
            alone(store, "n3")


def test_a_start_that_meets_another_launch_remembers_that_the_job_had_started() -> None:
    """The other launch may have ended, and its memory gone, when this one is started again."""
    store = dist.HashStore()
    held = dataclasses.replace(report(0, "a", "a", opened=9), holder=4711)
    assert alone(store, "n1", [held]).opened == 9
    again = alone(store, "n2")
    assert (again.started, again.opened) == (True, 9)


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
        client = roster_module._StoreClient(store, time.monotonic() + DEADLINE_S)
        roster_module._announce(client, Worker("host", f"dead{other}"), (), other)
    with pytest.raises(RendezvousError, match=rf"3 workers .* no word from torchrun ranks {silent}"):
        roster_module.agree(store, Worker("host", "me"), (), index, 3, time.monotonic() - 1)


# --- what it takes of the store -----------------------------------------------------------------


class Recorder:
    """One client of a store; notes how often it asks for what, and every value's size by key.

    Args:
        store: shared by all clients.
        sizes: key -> bytes of its value now; shared by all clients.
        largest: key -> bytes of the largest value it ever had; shared as well.
    """

    def __init__(self, store: dist.Store, sizes: dict[str, int], largest: dict[str, int]) -> None:
        self._store, self._sizes, self._largest = store, sizes, largest
        self.asked: Counter[str] = Counter()

    def _note(self, key: str, size: int) -> None:
        self._sizes[key] = size
        self._largest[key] = max(self._sizes[key], self._largest.get(key, 0))

    def set(self, key: str, value: bytes) -> None:
        self.asked["set"] += 1
        self._note(key, len(value))
        self._store.set(key, value)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.asked["multi_set"] += 1
        for key, value in zip(keys, values, strict=True):
            self._note(key, len(value))
            self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        self.asked["add" if amount else "look"] += 1
        self._note(key, 8)
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        self.asked["compare_set"] += 1
        self._note(key, len(value))
        return self._store.compare_set(key, expected, value)

    def delete_key(self, key: str) -> bool:
        self.asked["delete_key"] += 1
        self._sizes.pop(key, None)
        return self._store.delete_key(key)

    def check(self, keys: list[str]) -> bool:
        self.asked["look" if keys[0].startswith("verdict/") else "check"] += 1
        return self._store.check(keys)

    def __getattr__(self, name: str) -> Any:  # get, multi_get, wait
        self.asked[name] += 1
        return getattr(self._store, name)


@pytest.mark.slow
@dataclasses.dataclass
class Cluster:
    """Simulated hosts of 8 ranks with 26 tables each, over one store that stays."""

    hosts: int
    per_host: int = 8
    store: dist.Store = dataclasses.field(default_factory=dist.HashStore)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    largest: dict[str, int] = dataclasses.field(default_factory=dict)
    starts: int = 0

    def reports(self) -> list[list[Report]]:
        """By host: what a scan there finds, after this many starts."""
        names = tuple(f"node-{host:04}.cluster.example.org" for host in range(self.hosts))
        ranks = len(names) * self.per_host
        tables = [
            [f"sparse_arch.tables.t{t}.weight", 10_000_000 // ranks, 48, ["float32"]] for t in range(26)
        ]
        constants = Constants(
            job="dlrm-production",
            arena_id="0" * 16,
            rank=0,
            world_size=ranks,
            domains=tuple(name for name in names for _ in range(self.per_host)),
            n=10,
            k=8,
            positions=tuple(range(ranks)),
            layout_hash="ab" * 16,
            layout=json.dumps({"tables": tables, "rank_state_bytes": 16384, "lineage": "ab" * 8}),
            block_words=((123_456_789,) * 8,) * ranks,
            regions=(("rows", 1 << 33),),
            fill=1,
        )
        random.seed(self.starts)
        found: list[list[Report]] = []
        for host, name in enumerate(names):
            here: list[Report] = []
            for rank in range(host * self.per_host, (host + 1) * self.per_host):
                own = dataclasses.replace(constants, rank=rank, arena_id=f"{rank:016x}").identity
                t = 10**6 + random.randrange(2)
                words = {
                    "joined": 10**18 + self.starts,
                    "opened": 10**18 + self.starts,
                    "generation_id": 2**61,
                }
                one = Header(own, State.LIVE, **words, committed=t - 1, prepared=t)
                path = f"/dev/shm/ecemb-1000/dlrm-production/{name}/{own.arena_id}.arena"
                here.append(Report(name, path, one, None, None))
            found.append(here)
        return found

    def start(self) -> tuple[Roster, Recorder, list[Recorder]]:
        """All announce themselves; the leader and one other run to the end, the rest take the proposal."""
        self.starts += 1
        found = self.reports()
        workers = [
            Worker(
                here[0].host, f"{self.starts:08x}{index:08x}", 10**6 + index, (f"10.0.{h % 256}.7",), 40_000
            )
            for h, here in enumerate(found)
            for index in range(h * self.per_host, (h + 1) * self.per_host)
        ]
        size, deadline = len(workers), time.monotonic() + DEADLINE_S
        clients = [Recorder(self.store, self.sizes, self.largest) for _ in workers]
        rosters: dict[int, Roster] = {}

        def run(index: int) -> None:
            arenas = found[index // self.per_host]
            rosters[index] = roster_module.agree(
                clients[index], workers[index], arenas, index, size, deadline
            )

        store_clients = [roster_module._StoreClient(client, deadline) for client in clients]
        for index in range(1, size - 1):
            roster_module._announce(
                store_clients[index], workers[index], found[index // self.per_host], index
            )
        threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in (0, size - 1)]
        for thread in threads:
            thread.start()
        for index in range(1, size - 1):
            name = store_clients[index].wait(f"plan/{workers[index].nonce}")
            roster_module._take(store_clients[index], name, workers[index].nonce, size)
        for thread in threads:
            thread.join(DEADLINE_S)
        assert rosters[0] == rosters[size - 1]
        assert rosters[0].reports == tuple(one for here in found for one in here)
        return rosters[0], clients[0], clients[1:]


@pytest.mark.slow
def test_a_start_of_2048_ranks_with_26_tables_stores_small_values_only() -> None:
    cluster = Cluster(hosts=256)
    _, leader, others = cluster.start()
    assert max(cluster.largest.values()) < 256 << 10
    assert max(size for key, size in cluster.largest.items() if key.startswith("announce/")) < 2048
    asked = leader.asked
    assert sum(asked.values()) - asked["look"] < 256
    assert all(sum(one.asked.values()) <= 16 for one in others)


def test_the_store_keeps_nothing_of_older_starts() -> None:
    cluster = Cluster(hosts=4)
    cluster.start()
    kept = sorted(key.split("/")[0] for key in cluster.sizes)
    total = sum(cluster.sizes.values())
    for _ in range(5):
        roster, *_ = cluster.start()
        assert sorted(key.split("/")[0] for key in cluster.sizes) == kept
        assert sum(cluster.sizes.values()) < total + 100
        assert [key for key in cluster.sizes if key.startswith("roster/")] == [f"roster/{roster.prefix}"]
        assert not [key for key in cluster.sizes if key.startswith("plan/")]


def test_what_a_start_needs_of_the_store_does_not_grow_with_its_tables() -> None:
    """The first tables' constants are in no rank's entry, and in no roster."""
    roster, *_ = Cluster(hosts=4).start()
    text = roster_module.write_roster(roster)
    assert b"sparse_arch" not in text
    assert len(text) < 8192


def test_a_roster_that_the_store_would_refuse_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store resets the connection of the process that sends more than 8 MiB."""
    assert roster_module.MOST_BYTES < 8 << 20
    monkeypatch.setattr(roster_module, "MOST_BYTES", 100)
    with pytest.raises(RendezvousError, match=r"announce/0 of this start takes \d+ bytes.* at most 100"):
        alone(dist.HashStore(), "n", [report(0, "a", "a")])


def test_a_store_that_ends_is_said_to_have_ended() -> None:
    timeout = timedelta(seconds=DEADLINE_S)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            roster_module.agree(client, Worker("a", "n"), (), 1, 2, time.monotonic() + DEADLINE_S)
        except RendezvousError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    server.wait(["announce/1"])
    del server
    thread.join(DEADLINE_S)
    assert "store does not answer any more" in str(errors[0])


def test_a_roster_comes_back_as_it_was() -> None:
    reports = (report(0, "a", "ab"), Report("a", "/a/x", None, "the checksum doesn't match", 12))
    named = dataclasses.replace(reports[0], path="/a/00000000.arena", holder=0)
    workers = (Worker("a", "1", 7, ("10.0.0.1", "fe80::1"), 65535, "00000007"), Worker("b", "2"))
    roster = Roster(2**62, 2**62 - 1, "abc", False, workers, (*reports, named), "ab" * 16, 2**61)
    tables = {roster_module.digest(("a", "b")): ("a", "b")}
    assert roster_module.read_roster(roster_module.write_roster(roster), tables.__getitem__) == roster
