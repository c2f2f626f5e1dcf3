"""How a process stays: in time or not, and all that ends with its session."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ecemb.net import rendezvous, replacement, staying
from ecemb.net.error_file import is_lost_connection
from ecemb.net.replacement import End
from ecemb.net.staying import Stay


@pytest.fixture(autouse=True)
def page() -> Iterator[object]:
    made = replacement.new_page()
    replacement.begin(made, 0)
    replacement.join()
    yield made
    replacement.begin(None, 0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying, "AWAY_S", 600.0)


def verdict(stay: Stay) -> tuple[threading.Thread, list[bool]]:
    """The failure detector's thread, and its result."""
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(stay.await_return()))
    replacement.peer_died()
    thread.start()
    return thread, results


def test_a_main_thread_that_is_back_in_time_stays() -> None:
    stay, ended = Stay(), list[str]()
    stay.at_hang_up(lambda: ended.append("hung up"))
    stay.at_hang_up(lambda: ended.append(str(1 // 0)))  # a connection that is closed by now
    stay.at_end(lambda: ended.append("first"))
    stay.at_end(lambda: ended.append("second"))
    stay.has_trained(2, "an arena")
    assert stay.is_possible and (stay.rank, stay.arena_id) == (2, "an arena")
    for session in range(1, 3):
        thread, results = verdict(stay)
        stay.end_session()
        assert ended == ["hung up", "second", "first"]
        assert stay.is_back()
        thread.join()
        assert results == [True]
        assert replacement.rejoins == session and replacement.follows_death()
        stay.begin_session(float(session))
        assert stay.began == session
        ended.clear()
        stay.at_hang_up(lambda: ended.append("hung up"))
        for name in ("first", "second"):
            stay.at_end(lambda name=name: ended.append(name))  # type: ignore[misc]


def test_a_late_main_thread_is_never_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staying, "AWAY_S", 0.0)
    stay = Stay()
    thread, results = verdict(stay)
    thread.join()
    stay.end_session()  # else the thread that aborts would look for further groups
    assert results == [False]
    assert not stay.is_back()
    assert replacement.rejoins == 0 and replacement.is_due()  # it ends, and is replaced


def test_a_process_that_has_left_the_job_is_not_back() -> None:
    stay = Stay()
    thread, _ = verdict(stay)
    stay.end_session()
    replacement.leave()
    assert not stay.is_back()
    stay._back.set()
    thread.join()


def test_an_error_at_the_end_of_a_session_is_raised() -> None:
    stay, ended = Stay(), list[str]()
    stay.at_end(lambda: ended.append("the other"))
    stay.at_end(lambda: 1 // 0)
    thread, _ = verdict(stay)
    with pytest.raises(ZeroDivisionError):
        stay.end_session()
    assert ended == ["the other"]
    assert stay.is_back()
    thread.join()


def test_groups_are_aborted_also_those_that_are_made_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self) -> None:
            self.aborted = threading.Event()

        def abort(self) -> None:
            assert not self.aborted.is_set()
            self.aborted.set()
            raise RuntimeError("it had ended")

    groups = [Group()]
    monkeypatch.setattr(staying, "_groups", lambda: list(groups))
    stay = Stay()
    thread, _ = verdict(stay)
    assert groups[0].aborted.wait(600)
    groups.append(Group())
    assert groups[1].aborted.wait(600)
    stay.end_session()
    assert stay.is_back()
    thread.join()


def test_the_groups_are_torchs(tmp_path: object) -> None:
    assert staying._groups() == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        other = dist.new_group()
        assert staying._groups() == [other, dist.group.WORLD]
    finally:
        dist.destroy_process_group()


def test_a_wait_at_the_store_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is the main thread of torch that makes a group. Other connections stay."""
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    other = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    errors: list[Exception] = []

    def waits() -> None:
        try:
            client.get("never")
        except Exception as error:  # noqa: BLE001 - whichever it is
            errors.append(error)

    client.set("there", "1")
    waiter = threading.Thread(target=waits)
    waiter.start()
    staying._hang_up_stores()
    waiter.join()
    assert [is_lost_connection(error) for error in errors] == [True]
    other.set("there", "1")
    assert other.get("there") == b"1"


def test_what_is_released_is_not_ended() -> None:
    stay = Stay()
    stay.has_trained(0, "")
    stay.at_end(lambda: os.abort())
    stay.release()
    assert not stay.is_possible
    thread, _ = verdict(stay)
    stay.end_session()
    assert stay.is_back()
    thread.join()


def test_there_is_one_for_the_process() -> None:
    assert staying.current() is None
    stay = Stay()
    staying.use(stay)
    assert staying.current() is stay
    staying.use(None)


def test_the_page_of_a_process_that_stays_keeps_its_progress(page: object) -> None:
    """Its death is not one of several in a row without a step, even if it comes before the next one."""
    replacement.made_progress()
    assert not replacement.stay()  # no peer has died
    replacement.peer_died()
    assert replacement.stay()
    assert replacement.read_page(page) == (End.IF_KILLED, True)  # type: ignore[arg-type]
    replacement.begin(None, 0)
    assert not replacement.stay()


def test_the_next_groups_have_the_names_of_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a death has cut off `init_process_group`, which leaves no group to destroy."""
    monkeypatch.setattr(rendezvous, "close_attached", lambda: None)
    distributed_c10d._world.group_count = 1
    rendezvous.end_session()
    assert distributed_c10d._world.group_count == 0
