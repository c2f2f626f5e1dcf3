"""Hosts on links with a rate: what is measured there in small, and the arithmetic of its rows."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from bench.harness import links, relay
from bench.harness.links import Hosts, Link, credit
from bench.harness.result import Arguments, Row, Unavailable, WrongResult, by_metric, document
from bench.questions.network import question as network
from bench.questions.network.question import CODE, LOOPBACK, LOST, Found, Ground
from bench.questions.network.rank import EXCHANGE, STATUS, VOTE
from bench.report import pages, summary
from bench.workloads.training_rank import BARE, PROTECTED
from ecemb.tools.window_cost import MESSAGE_S

RANKS = 4
LINK = Link("1 Gbit/s", 1, 200)


def test_every_metric_is_measured_over_every_link(seed: int) -> None:
    try:
        rows = network.run(Arguments(quick=True, seed=seed))
    except Unavailable as error:
        pytest.skip(str(error))
    of_links = list(dict.fromkeys(str(row.labels["link"]) for row in rows))
    assert of_links[0] == LOOPBACK and of_links[1].startswith("1 Gbit/s by ")
    by_link = {link: {row.metric for row in rows if row.labels["link"] == link} for link in of_links}
    if relayed := by_link.pop("1 Gbit/s by relay, 200 us", None):
        assert {"agreement_us", "rebuild_over_link", "round_trip_us", "planned_s"} <= relayed
    assert (relayed is None) == ("netem" in of_links[1])
    for link, metrics in by_link.items():
        counted = (
            {"link_over_guard", "received_over_lost", "measured_s", "planned_s"}
            if link != LOOPBACK
            else set[str]()
        )
        assert metrics == by_link[LOOPBACK] | counted
    assert not list(Path("/run/netns").glob(f"ecemb-bench-{os.getpid()}-*"))


def test_a_link_is_limited_and_counts_what_a_rank_sends() -> None:
    try:
        with Hosts(2, LINK) as hosts:
            assert hosts.queue in (links.NETEM, links.TBF)
            assert hosts.delay_us == (LINK.delay_us if hosts.queue == links.NETEM else 0)
            ground = Ground(hosts, LINK)
            assert str(ground.labels["link"]).startswith(f"1 Gbit/s by {hosts.queue}, ")
    except Unavailable as error:
        pytest.skip(str(error))
    assert Ground(None, None).labels == {"link": LOOPBACK}
    assert links.moved_bytes() == (0, 0)  # this process is on no host


def test_a_relayed_packet_passes_two_links_and_a_delay() -> None:
    """At 1 MB/s, with a delay of 10 s: 1 MB takes a second on each link, and passes both at once."""
    links_of_hosts = relay.Links(1e6, 10.0)
    assert links_of_hosts.arrives(100.0, 1_000_000, 0, 1) == 111.0
    assert links_of_hosts.arrives(100.0, 1_000_000, 0, 2) == 112.0  # the sender's link is taken until 101
    assert links_of_hosts.arrives(100.0, 1_000_000, 3, 1) == 112.0  # the receiver's link is, until 111
    assert links_of_hosts.arrives(200.0, 500_000, 0, 1) == 210.5


def test_a_relay_knows_its_hosts() -> None:
    def packet(address: str, version: int = 4) -> bytes:
        return bytes([version << 4 | 5, *bytes(15), *map(int, address.split(".")), *bytes(100)])

    assert [relay.host_of(packet(relay.address(host)), 4) for host in range(5)] == [0, 1, 2, 3, None]
    assert relay.host_of(packet(relay.address(1), version=6), 4) is None
    assert relay.host_of(packet("10.213.78.0"), 4) is None


def test_a_machine_that_makes_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="network namespaces take root: run the question as root"):
        network.run(Arguments(quick=True))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(Unavailable, match="take the program tc, of iproute2"):
        network.run(Arguments(quick=True))


@pytest.mark.parametrize("rate_gbit", [0.1, 1, 2, 10, 100])
def test_a_link_that_was_idle_sends_a_little_at_once(rate_gbit: float) -> None:
    rate, packet_bytes, burst_bytes = credit(rate_gbit)
    assert rate == f"{1000 * rate_gbit:g}mbit"
    assert 1 << 14 <= packet_bytes < 1 << 16
    assert burst_bytes == max(2 * packet_bytes, 25_000 * rate_gbit)


def answers(**change: Any) -> list[dict[str, Any]]:
    """Of two rounds, the second of which ends a window; the last rank is the slowest one."""
    found: list[dict[str, Any]] = []
    for rank in range(RANKS):
        slow = 0.001 * (rank == RANKS - 1)
        found.append(
            {
                "rank": rank,
                "taken": {
                    PROTECTED: [(0.010 + slow, 0, 900), (0.017 + slow, 0, 3300)],
                    BARE: [(0.009 + slow, 0, 1000), (0.009 + slow, 0, 1000)],
                },
                "counted": {"sent_bytes": 2000, "phase status": 0.002 * (rank + 1)},
                "moments": {name: [(1.0 + slow, 1.5 - slow)] for name in (STATUS, EXCHANGE, VOTE)},
                "digests": {PROTECTED: "ab", BARE: "ab"},
                "committed_steps": 2,
                "wrong_words": 0,
            }
        )
    found[2] |= change
    return found


def value(rows: list[Row], metric: str, **labels: Any) -> float:
    (found,) = [one for one in rows if one.metric == metric and labels.items() <= one.labels.items()]
    return found.value


class Pretended(Ground):
    """Hosts that are not made, whose ranks report what they are given."""

    def __init__(self, *reports: list[dict[str, Any]]) -> None:
        super().__init__(None, None)
        self.is_counted, self._reports = True, list(reports)

    def answers(self, *_: Any, **__: Any) -> list[Any]:
        return self._reports.pop(0)


def test_what_steps_took_and_sent() -> None:
    rows = list(network.of_steps(Pretended(), 2, [answers(), answers()]))
    assert value(rows, "step_wall_ms", method=BARE) == pytest.approx(10)
    assert value(rows, "step_wall_ms", method=PROTECTED) == pytest.approx(14.5)
    assert value(rows, "added_wall_ms") == pytest.approx(4.5)
    assert value(rows, "added_wall_pct") == pytest.approx(45)
    assert value(rows, "commit_wall_ms") == pytest.approx(8)
    assert value(rows, "phase_ms", phase="status") == pytest.approx(2.5)
    assert value(rows, "bytes_per_step", counted_by="guard") == 1000
    assert value(rows, "bytes_per_step", counted_by="link") == 1100
    assert value(rows, "bytes_per_step", counted_by="link, training") == 1000
    assert value(rows, "link_over_guard") == pytest.approx(1.1)


def test_the_planner_is_beside_it() -> None:
    """Rows of 512 bytes over a link of 1 Gbit/s; a byte is back after 400 us."""
    ground = Pretended()
    plain = [{"gbit_per_s": [0.9]}, {"trip_us": [400.0]}]
    found = Found([plain], {2: [answers()]}, {8: [answers()]}, [life()])
    (sent,) = network.beside_planner(network.FULL, ground, found)
    assert sent.metric == "bytes_per_step" and sent.labels["counted_by"] == "planner"
    ground.rate_gbit = 1.0
    rows = list(network.beside_planner(network.FULL, ground, found))
    way_s = 0.2e-3
    exchange_s = value(rows, "planned_s", what="exchange, window 2")
    assert exchange_s == pytest.approx(way_s + 2 * sent.value / 125e6)
    assert value(rows, "measured_s", what="exchange, window 2") == pytest.approx(0.499)
    agreement_s = value(rows, "planned_s", what="agreement, 8 ranks")
    assert agreement_s == pytest.approx((3 + 1 + 3) * way_s + (3 + 3 + CODE.n - 1) * MESSAGE_S)
    assert value(rows, "measured_s", what="agreement, 8 ranks") == pytest.approx(3 * 0.499)
    lost_bytes = network.FULL.lost_rows * 512 * 4 / 3
    assert value(rows, "planned_s", what="rebuild") == pytest.approx(lost_bytes / (0.45 * 125e6))
    assert value(rows, "measured_s", what="rebuild") == 0.5


def test_an_agreement_lasts_from_the_last_rank_that_comes_to_the_last_that_leaves() -> None:
    rows = list(network.of_agreement(Pretended(), RANKS, [answers()]))
    assert [row.labels["what"] for row in rows] == [STATUS, EXCHANGE, VOTE]
    assert [row.value for row in rows] == pytest.approx([499_000] * 3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digests": {PROTECTED: "ab", BARE: "cd"}}, "rank 2: the protected model is not"),
        ({"committed_steps": 1}, "rank 2: 1 of 2 steps are committed"),
        ({"wrong_words": 7}, "rank 2: 7 words of parity"),
    ],
)
def test_steps_that_changed_something(change: dict[str, Any], complaint: str) -> None:
    network.train(network.QUICK, Pretended(answers()), 2, 2, seed=1)
    with pytest.raises(WrongResult, match=complaint):
        network.train(network.QUICK, Pretended(answers(**change)), 2, 2, seed=1)


def life(**change: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "rank": rank,
            "kind": "memory",
            "lost": (LOST,),
            "first": 3,
            "seconds": {"rebuild": 0.5},
            "total_s": 0.75,
            "memory_bytes": 40_000_000,
            "received_bytes": 44_000_000,
            "plain": {"same messages": 0.4},
            "digest": "ab",
        }
        for rank in range(RANKS)
    ]
    found[2] |= change
    return found


def test_how_fast_memory_came_back() -> None:
    rows = list(network.of_recovery(Pretended(), [life(seconds={"rebuild": 0.4}), life(total_s=0.8)], 1.0))
    assert value(rows, "recovery_s") == pytest.approx(0.775)
    assert value(rows, "rebuild_s") == 0.5
    assert value(rows, "rebuild_mb_per_s") == pytest.approx(80)
    assert value(rows, "rebuild_over_link") == pytest.approx(0.64)
    assert value(rows, "rebuild_over_plain") == pytest.approx(0.8)
    assert value(rows, "received_over_lost") == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "process", "lost": ()}, r"of kind process of ranks \[\] to step 3"),
        ({"first": 2}, r"of kind memory of ranks \[1\] to step 2, and not"),
        ({"digest": "cd"}, "rank 2 holds other bytes than before the kill"),
    ],
)
def test_a_recovery_of_something_else(
    change: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "forget", lambda _: None)
    network.recovered(network.QUICK, Pretended(life(), life()), seed=1)
    with pytest.raises(WrongResult, match=complaint):
        network.recovered(network.QUICK, Pretended(life(), life(**change)), seed=1)


def test_the_page_is_short_and_its_answer_one_line() -> None:
    rows: list[Row] = []
    for link, rate_gbit, trains in (
        (LOOPBACK, 0.0, True),
        ("10 Gbit/s by tbf, no delay", 10.0, True),
        ("1 Gbit/s by tbf, no delay", 1.0, True),
        ("1 Gbit/s by relay, 200 us", 1.0, False),
    ):
        ground = Pretended()
        ground.labels["link"], ground.rate_gbit, ground.is_counted = link, rate_gbit, rate_gbit > 0
        plain = [{"gbit_per_s": [0.9]}, {"trip_us": [400.0]}]
        found = Found([plain], {}, {4: [answers()], 8: [answers()]}, [life()])
        if trains:
            found.steps = {1: [answers()], 2: [answers()]}
        rows += [*network.rows_of(ground, found), *network.beside_planner(network.FULL, ground, found)]
    answered = document("network", Arguments(), by_metric(rows)) | {"file": "network"}
    assert len(pages.of_question("network", [answered], full=False).splitlines()) < 140
    assert summary.answer("network", [answered]) == (
        "what a commit adds to a step, and a rebuild's speed: loopback: 4.5 ms and 80 MB/s; "
        "10 Gbit/s by tbf, no delay: 4.5 ms and 80 MB/s; 1 Gbit/s by tbf, no delay: 4.5 ms and 80 MB/s"
    )
