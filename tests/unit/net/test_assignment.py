"""Who gets which rank: ranks follow their memory, replacement ranks take what is missing."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecemb.errors import ArenaBusy, InconsistentArenas, RendezvousError
from ecemb.memory.header import NONE, State
from ecemb.net.assignment import Assignment, Report, Roster, Worker, assign
from support.arena_reports import header, report


def workers_on(hosts: Sequence[str]) -> list[Worker]:
    """One worker for each name, in the order of torchrun's RANK."""
    return [Worker(host, f"nonce {index}") for index, host in enumerate(hosts)]


def ranks_by_host(workers: Sequence[Worker], assignments: Sequence[Assignment]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for worker, assignment in zip(workers, assignments, strict=True):
        found.setdefault(worker.host, set()).add(assignment.rank)
    return found


# --- assignments --------------------------------------------------------------------------------------


def test_a_fresh_start_keeps_torchruns_ranks() -> None:
    workers = workers_on("abab")
    assert assign(workers, []) == tuple(Assignment(index, None) for index in range(4))


def test_arenas_that_hold_nothing_leave_torchruns_ranks_too() -> None:
    reports = [
        report(1, "a", "ab", state=State.INIT, prepared=0, committed=NONE),
        report(0, "b", "ab", state=State.FINISHED),
        Report("b", "/b/x", None, "its creation was cut short", None),
    ]
    assert assign(workers_on("ab"), reports) == (Assignment(0, None), Assignment(1, None))


def test_ranks_follow_their_memory_wherever_torchrun_puts_the_workers() -> None:
    domains = "aabbcc"
    reports = [report(rank, host, domains) for rank, host in enumerate(domains)]
    workers = workers_on("cabcba")
    assignments = assign(workers, reports)
    assert ranks_by_host(workers, assignments) == {"a": {0, 1}, "b": {2, 3}, "c": {4, 5}}
    assert all(assignment.arena_id == f"{assignment.rank:08x}" for assignment in assignments)


def test_a_worker_that_stayed_gets_its_own_arena_again() -> None:
    """Also if the memory of lower ranks on its host is lost, or other workers would come first."""
    reports = [report(rank, "a", "aaaa") for rank in (1, 3)]
    for keeps in ([None, 1, None, 3], [None, None, None, 3], [3, None, 1, None], [7, 1, 7, None]):
        workers = [
            dataclasses.replace(one, keeps="" if rank is None else f"{rank:08x}")
            for one, rank in zip(workers_on("aaaa"), keeps, strict=True)
        ]
        assignments = assign(workers, reports)
        assert sorted(one.rank for one in assignments) == [0, 1, 2, 3]
        assert sorted(one.arena_id or "" for one in assignments) == ["", "", f"{1:08x}", f"{3:08x}"]
        for one, rank in zip(assignments, keeps, strict=True):
            if rank in (1, 3):
                assert one == Assignment(rank, f"{rank:08x}")


def test_a_new_host_takes_a_lost_hosts_ranks_whole() -> None:
    """Section 2.5: failure domains stay what the position table says."""
    domains = "abcabcabc"  # b and c are lost; x and y come in their place
    reports = [report(rank, "a", domains) for rank in (0, 3, 6)]
    workers = workers_on("xyaxayaxy")
    assignments = assign(workers, reports)
    found = ranks_by_host(workers, assignments)
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
    assignments = assign(workers, reports)
    assert sorted(assignment.rank for assignment in assignments) == list(range(6))


def test_a_lost_arena_is_replaced_where_the_rest_of_its_domain_lives_now() -> None:
    """z replaced b and lost one of its two arenas, in the moment in which x replaces all of c."""
    domains = "aabbc"
    reports = [report(0, "a", domains), report(1, "a", domains), report(2, "z", domains)]
    for order in ("aazzx", "xzzaa", "zxaaz"):
        workers = workers_on(order)
        found = ranks_by_host(workers, assign(workers, reports))
        assert found == {"a": {0, 1}, "z": {2, 3}, "x": {4}}


def test_a_host_that_took_anothers_ranks_keeps_to_them() -> None:
    """b holds what was c's, and lost one arena of it; e replaces d, which held what was b's."""
    domains = "aabbcc"
    reports = [report(0, "a", domains), report(1, "a", domains), report(4, "b", domains)]
    workers = workers_on("eabbae")
    assert ranks_by_host(workers, assign(workers, reports)) == {"a": {0, 1}, "b": {4, 5}, "e": {2, 3}}


def test_a_host_that_was_replaced_comes_back_for_another_one() -> None:
    """Its stale arenas give it neither assignments nor its former ranks, which live on d."""
    domains = "aabbcc"
    alive = {"joined": 5, "opened": 5}
    reports = [report(rank, "a", domains, **alive) for rank in (0, 1)]
    reports += [report(rank, "d", domains, **alive) for rank in (2, 3)]
    for rank in (2, 3):
        old = header(rank, domains, joined=4, opened=4)
        old = dataclasses.replace(old, constants=dataclasses.replace(old.constants, arena_id=f"{rank:07x}f"))
        reports.append(Report("b", f"/b/{rank}", old, None, None))
    workers = workers_on("babdda")
    assignments = assign(workers, reports)
    assert ranks_by_host(workers, assignments) == {"a": {0, 1}, "d": {2, 3}, "b": {4, 5}}
    assert {assignment.rank for assignment in assignments if assignment.arena_id is None} == {4, 5}


def test_a_new_host_of_the_lost_ones_name_takes_its_ranks() -> None:
    domains = "aabbcc"
    reports = [report(rank, host, domains) for rank, host in enumerate(domains) if host != "b"]
    workers = workers_on("bacbca")
    assignments = assign(workers, reports)
    assert ranks_by_host(workers, assignments) == {"a": {0, 1}, "b": {2, 3}, "c": {4, 5}}
    assert {assignment.rank for assignment in assignments if assignment.arena_id is None} == {2, 3}


def test_hosts_of_different_sizes_are_replaced_by_their_like() -> None:
    domains = "abbbccd"  # b, c and d are lost
    reports = [report(0, "a", domains)]
    workers = workers_on("xyzyazy")
    assert ranks_by_host(workers, assign(workers, reports)) == {
        "a": {0},
        "x": {6},
        "y": {1, 2, 3},
        "z": {4, 5},
    }


def test_hosts_of_other_sizes_share_few_domains() -> None:
    """Two hosts of three for three lost ones of two: none gets more than two domains."""
    domains = "aabbccdd"
    reports = [report(0, "a", domains), report(1, "a", domains)]
    for order in ("xyxyxyaa", "aayyyxxx", "yaxxayyx"):
        workers = workers_on(order)
        found = ranks_by_host(workers, assign(workers, reports))
        assert found == {"a": {0, 1}, "x": {2, 3, 4}, "y": {5, 6, 7}}


def test_fewer_hosts_with_more_workers_share_the_lost_ranks() -> None:
    domains = "aabbcc"
    reports = [report(rank, host, domains) for rank, host in enumerate(domains) if host != "c"]
    workers = workers_on("ababab")
    assert ranks_by_host(workers, assign(workers, reports)) == {"a": {0, 1, 4}, "b": {2, 3, 5}}


def test_a_host_with_the_memory_of_two_domains_keeps_both() -> None:
    """After x alone took over from b and c, which had one rank each."""
    domains = "aabc"
    reports = [report(rank, host, domains) for rank, host in enumerate("aaxx")]
    workers = workers_on("xaax")
    assignments = assign(workers, reports)
    assert ranks_by_host(workers, assignments) == {"a": {0, 1}, "x": {2, 3}}
    lost_one = reports[:3]  # and what it loses of them comes back to it
    workers = workers_on("xaax")
    assert ranks_by_host(workers, assign(workers, lost_one)) == {"a": {0, 1}, "x": {2, 3}}


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
    assert assign(workers_on("ba"), reports) == (Assignment(1, None), Assignment(0, "00000000"))


@st.composite
def launches(draw: st.DrawFn) -> tuple[list[str], list[str], set[int]]:
    """Domains of ranks; where the workers run now; ranks whose memory is lost."""
    names = "abcdef"[: draw(st.integers(1, 6))]
    domains = draw(st.lists(st.sampled_from(names), min_size=1, max_size=10))
    away = draw(st.sets(st.sampled_from(names)))
    new = dict(zip("abcdef", "UVWXYZ"[::-1], strict=True))  # in another order than those they replace
    now = [new[host] if host in away else host for host in domains]
    lost = {rank for rank, host in enumerate(domains) if host in away}
    lost |= draw(st.sets(st.sampled_from(range(len(domains)))))
    return domains, draw(st.permutations(now)), lost


@settings(max_examples=150, deadline=None)
@given(launches(), st.randoms(use_true_random=False))
def test_every_launch_seats_every_rank_once(
    launch: tuple[list[str], list[str], set[int]], rng: random.Random
) -> None:
    domains, hosts, lost = launch
    reports = [report(r, host, domains) for r, host in enumerate(domains) if r not in lost]
    workers = workers_on(hosts)
    assignments = assign(workers, reports)
    assert sorted(assignment.rank for assignment in assignments) == list(range(len(domains)))
    if len(lost) < len(domains):
        for worker, assignment in zip(workers, assignments, strict=True):
            assert (assignment.arena_id is None) == (assignment.rank in lost)
            if assignment.rank not in lost:
                assert worker.host == domains[assignment.rank]
        # Every host replaced by one of its size: each domain stays in one place, whole.
        sizes = Counter(domains)
        if len(set(sizes.values())) == len(sizes):
            found = ranks_by_host(workers, assignments)
            groups = {frozenset(r for r, d in enumerate(domains) if d == x) for x in sizes}
            assert {frozenset(ranks) for ranks in found.values()} == groups
    rng.shuffle(reports)
    assert assign(workers, reports) == assignments


def test_another_number_of_workers_holds_the_arenas_of_its_hosts() -> None:
    """New ranks follow the old ranks of their hosts, whatever torchrun numbers them."""
    reports = [report(rank, host, "aabbcc") for rank, host in enumerate("aabbcc") if host != "b"]
    names = {rank: f"{rank:08x}" for rank in range(6)}
    assert assign(workers_on("ccdaa"), reports) == (
        Assignment(2, None, (names[4],)),
        Assignment(3, None, (names[5],)),
        Assignment(4, None),
        Assignment(0, None, (names[0],)),
        Assignment(1, None, (names[1],)),
    )
    assert assign(workers_on("ca"), reports) == (
        Assignment(1, None, (names[4], names[5])),
        Assignment(0, None, (names[0], names[1])),
    )
    one = assign(workers_on("aaaa"), [report(0, "a", "a")])
    assert one == (Assignment(0, None, (names[0],)), *(Assignment(rank, None) for rank in (1, 2, 3)))


def test_a_host_with_more_arenas_than_workers_is_refused() -> None:
    reports = [report(rank, host, "aab") for rank, host in enumerate("aab")]
    with pytest.raises(
        RendezvousError, match=r"'a' holds the arenas of ranks \[0, 1\].* there is 1: start 2"
    ):
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


def test_memory_that_the_job_went_on_without_is_nobodys_seat() -> None:
    """All ranks that went on without it are lost; the store still knows that they did."""
    workers, reports = workers_on("ab"), [report(0, "a", "ab")]
    assert assign(workers, reports, opened=1) == (Assignment(0, "00000000"), Assignment(1, None))
    assert assign(workers, reports, opened=2) == (Assignment(0, None), Assignment(1, None))


def test_only_the_headers_that_can_be_read_are_its_headers() -> None:
    first, damaged = report(0, "a", "ab"), Report("a", "/a/1", None, "cut", None)
    roster = Roster(1, 1, "", False, (Worker("a", "1"),), (first, damaged))
    assert roster.headers == [first.header]
