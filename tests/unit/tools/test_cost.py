"""The planner: each estimate against arithmetic by hand, and the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecemb.__main__ import main
from ecemb.coding.code import Code
from ecemb.coding.placement import HOST_FAULTS_PER_DAY
from ecemb.errors import ConfigurationError, PlacementError
from ecemb.tools.cost import BURST_SIZES, MONTH_H, after_host, after_process, compare, estimate, placed
from ecemb.tools.job import Job
from ecemb.tools.plan import page, text
from ecemb.tools.window_cost import cost_of

JOB = Job(
    hosts=8,
    ranks_per_host=4,
    table_bytes=3.2e12,
    row_bytes=512,
    step_s=0.2,
    batch=10_000,
    features=1,
    skew=0.0,
    window=1,
    overlap=False,
    network_bytes_per_s=1e10,
    mtbf_h=10,
    burst_share=0,
)


def test_times_of_recovery_by_hand() -> None:
    one = estimate(JOB, Code(4, 3))
    assert after_host(JOB, Code(4, 3)) == pytest.approx(
        {
            "another host": 120,
            "restart": 30,
            "allocation": 4e11 * (4 / 3) / (4.3e9 * 1.87),
            "rebuild": 4e11 * (4 / 3) / 2.64e9,
        }
    )
    assert after_host(replace(JOB, network_bytes_per_s=1e9), Code(4, 3))["rebuild"] == pytest.approx(
        4e11 * (4 / 3) / 0.45e9
    )
    assert one.host_recovery_s == sum(after_host(JOB, Code(4, 3)).values())
    alone = after_host(replace(JOB, ranks_per_host=1), Code(4, 3))
    assert alone["allocation"] == pytest.approx(4e11 * (4 / 3) / 4.3e9)
    there = replace(JOB, device="cuda")
    parts = after_process(there, cost_of(there, Code(4, 3)))
    assert parts["tables to the GPUs"] == pytest.approx(1e11 / 4.6e9)
    assert parts["undo"] == pytest.approx(10_000 * 512 * (1 / 1.2e9 + 1 / 8.1e9), rel=1e-3)
    fast = replace(there, network_bytes_per_s=1e15)
    assert after_host(fast, Code(4, 3))["rebuild"] == pytest.approx(1e11 * (4 / 3) / 0.66e9)
    down = (0.75 * one.process_recovery_s + 0.25 * one.host_recovery_s) / 36_000
    assert one.time_lost == pytest.approx(1 - (1 - down) / (1 + one.window.overhead))


def test_the_chance_of_loss_by_hand() -> None:
    """With r = 1 two lost hosts are too many when they are within n - 1 on the ring: 6 of 7 others.

    Another of 8 is lost while one is rebuilt with p 7/8 over 1 - p/8: the same may be lost again first.
    """
    one = estimate(JOB, Code(4, 3))
    again = -math.expm1(-0.025 * one.host_recovery_s / 3600)
    first = 0.025 * MONTH_H * (again * 7 / 8) / (1 - again / 8) * 6 / 7
    assert one.loss_per_month == one.loss_per_month_alone == pytest.approx(-math.expm1(-first), rel=0.01)
    two = estimate(JOB, Code(6, 4))
    assert 0 < two.loss_per_month < 1.5 * again * one.loss_per_month
    assert one.loss_per_month_bursts == 0


def test_bursts_and_racks() -> None:
    job = replace(JOB, hosts=32, burst_share=0.1, rack_hosts=4)
    hosts, racks = (estimate(job, Code(4, 3), spread) for spread in ("host", "rack"))
    assert hosts.loss_per_month_bursts > 0.5
    larger = sum(share for size, share in BURST_SIZES.items() if size > job.rack_hosts)
    bursts = job.host_faults_per_h * MONTH_H * job.burst_share
    assert racks.loss_per_month_bursts == pytest.approx(-math.expm1(-bursts * larger), rel=0.03)
    two = estimate(replace(job, rack_hosts=8, hosts=64), Code(6, 4), "rack")
    assert two.loss_per_month_bursts < 1e-4
    ranks = estimate(job, Code(4, 3), "rank")
    assert (ranks.survives, ranks.loss_per_month) == (0, pytest.approx(1, abs=1e-4))


def test_published_rates_are_the_default() -> None:
    job = replace(JOB, mtbf_h=None)
    assert job.host_faults_per_h == 8 * HOST_FAULTS_PER_DAY / 24
    assert job.process_faults_per_h == pytest.approx(3 * job.host_faults_per_h)


def test_what_does_not_fit() -> None:
    estimates, refused = compare(JOB)
    assert [(one.n, one.k) for one in estimates] == [(2, 1), (3, 1), (4, 3), (8, 7), (6, 4), (8, 5)]
    assert list(refused) == ["(10, 8) over hosts"]
    with pytest.raises(PlacementError, match=r"fits 1 host with 1 rank; parity needs at least 2 ranks"):
        compare(replace(JOB, hosts=1, ranks_per_host=1))
    with pytest.raises(PlacementError, match=r"these do: \(8, 7\), \(8, 6\)"):
        compare(JOB, [Code(9, 8)])


def test_a_job_of_too_many_ranks() -> None:
    with pytest.raises(
        ConfigurationError, match="at most 1,048,576 ranks.*262,144 ranks on each are 2,097,152"
    ):
        replace(JOB, ranks_per_host=1 << 18)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_a_job_is_its_estimates_are_numbers(data: st.DataObject) -> None:
    size = st.floats(1e-9, 1e18)
    window: Any = data.draw(st.one_of(st.just("auto"), st.integers(1, 10**18)))
    job = Job(
        hosts=data.draw(st.integers(1, 40)),
        ranks_per_host=data.draw(st.integers(1, 4)),
        table_bytes=data.draw(size),
        row_bytes=data.draw(size),
        step_s=data.draw(size),
        batch=data.draw(size),
        features=data.draw(st.integers(1, 10**18)),
        ids=data.draw(size),
        skew=data.draw(st.floats(0, 1e18)),
        dense_bytes=data.draw(st.floats(0, 1e18)),
        device=data.draw(st.sampled_from(["cpu", "cuda"])),
        window=window,
        overlap=data.draw(st.booleans()),
        cores=data.draw(st.integers(1, 10**18)),
        host_memory_bytes=data.draw(size),
        device_memory_bytes=data.draw(size),
        network_bytes_per_s=data.draw(size),
        restart_s=data.draw(st.floats(0, 1e18)),
        mtbf_h=data.draw(st.one_of(st.none(), size)),
        host_share=data.draw(st.floats(0, 1)),
        rack_hosts=data.draw(st.one_of(st.just(0), st.integers(0, 50))),
    )
    code = data.draw(st.sampled_from([Code(2, 1), Code(4, 3), Code(6, 4), Code(16, 8)]))
    try:
        estimates, _ = compare(job, [code])
    except PlacementError:
        return
    for one in estimates:
        numbers = list(_numbers(asdict(one)))
        assert all(math.isfinite(value) and value >= 0 for value in numbers), one
        assert one.loss_per_month_alone <= one.loss_per_month <= 1
    assert text(job, estimates) and page(job, estimates[0])


def _numbers(parts: Mapping[str, Any]) -> Iterator[float]:
    for value in parts.values():
        if isinstance(value, dict):
            yield from _numbers(cast(dict[str, Any], value))
        elif isinstance(value, float):
            yield value


WORDS = ["--hosts", "8", "--ranks-per-host", "4", "--table-gb", "3200", "--batch", "1e4", "--features", "1"]
WORDS += ["--skew", "0", "--row-bytes", "512", "--step-ms", "200", "--window", "1", "--no-overlap"]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--code", "4,3", "--code", "10,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 hosts x 4 ranks, 3.2 TB of tables")
    assert lines[1].startswith("a step of 200 ms changes 10,000 rows of 512 B of a rank, 5.12 MB")
    assert lines[4].split()[:2] == ["code", "survives"]
    assert lines[5].startswith("(4, 3)  any 1 host")
    assert lines[7] == "do not fit: (10, 8) over hosts"
    assert "codes that fit here: (8, 6), (8, 7)" in lines[8]


def test_the_command_shows_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--device", "cuda", "--device-memory-gb", "0.05", "--overlap", "--code", "4,3"]
    asked += ["--window", "20 s"]
    assert main(["plan", *WORDS, *asked]) == 0
    shown = capsys.readouterr().out
    assert "window of 100 steps, as given: 20 s, in which 511 MB of a rank's 100 GB change" in shown
    assert "training waits: rows that are stored at once 2.9%, begin and end of steps 0.2%" in shown
    assert "a failure takes back 0.51 windows: 51 steps" in shown
    assert "process: 52 s (restart 30 s, undo 0.49 s, tables to the GPUs 22 s)" in shown
    assert "; 34.4 GB stay free" in shown
    assert 'window="auto", overlap=False' in shown and "window=1, overlap=True" in shown
    assert main(["plan", *WORDS, "--host-memory-gb", "1", "--code", "4,3"]) == 0
    assert "no window has room in the hosts' memory: longer stripes" in capsys.readouterr().out


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--network-gbit", "80", "--mtbf-hours", "10", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["job"]["network_bytes_per_s"] == 1e10
    job = replace(JOB, burst_share=shown["job"]["burst_share"])
    assert shown["estimates"][2] == asdict(estimate(job, Code(4, 3)))
    assert list(shown["refused"]) == ["(10, 8) over hosts"]


def test_a_round_trip_makes_each_commit_longer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--round-trip-us", "400", "--code", "4,3"]) == 0
    assert "100 Gbit/s per host, 400 us there and back\n" in capsys.readouterr().out
    near, far = (estimate(replace(JOB, round_trip_s=trip_s), Code(4, 3)) for trip_s in (0.0, 400e-6))
    assert far.window.overhead > near.window.overhead


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--ranks-per-host", "1000000"]) == 1
    assert "ecemb: a job can have at most 1,048,576 ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", *WORDS, "--code", "3,3"])
    assert "a code is N,K with 1 <= K < N <= 256, for example 4,3; got '3,3'" in capsys.readouterr().err
    assert main(["plan", *WORDS, "--device-memory-gb", "80"]) == 1
    assert "--device-memory-gb goes with --device cuda; the device is cpu" in capsys.readouterr().err


@pytest.mark.parametrize("window", ["0", "1.5", "soon", "0 s", "-1", "1e3", ""])
def test_a_window_that_is_none(window: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *WORDS, f"--window={window}"])
    said = f"a window is auto, a whole number of steps from 1 on, or a time such as '30 s'; got {window!r}"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("window", "steps"), [("7", 7), ("2 s", 10), ("0.7s", 3), ("0.01 s", 1)])
def test_a_window_in_steps_or_in_seconds(window: str, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--window", window, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["window"] == steps


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--hosts", "0", r"a whole number from 1 to 1e+18"),
        ("--hosts", "1.5", r"a whole number from 1 to 1e+18"),
        ("--table-gb", "-3", r"a number above 0, at most 1e+09"),
        ("--table-gb", "1e300", r"a number above 0, at most 1e+09"),
        ("--step-ms", "fast", r"a number above 0, at most 1e+21"),
        ("--skew", "nan", r"a number from 0 to 1e+18"),
        ("--mtbf-hours", "0", r"a number above 0, at most 1e+18"),
        ("--row-bytes", "inf", r"a number above 0, at most 1e+18"),
        ("--ranks-per-host", f"1{'0' * 400}", r"a whole number from 1 to 1e+18"),
    ],
)
def test_a_number_out_of_range_is_told_by_its_option(
    option: str, value: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *WORDS, option, value])
    assert caught.value.code == 2
    assert f"argument {option}: it takes {rule}; got {value!r}" in capsys.readouterr().err


def test_the_command_plans_for_one_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--hosts", "1", "--code", "4,3", "--code", "8,7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 host x 4 ranks")
    assert "the host is lost, with all rows and parity" in lines[2]
    assert lines[5].startswith("(4, 3)  any 1 rank, no host") and "  lost  " in lines[5]
    assert lines[7] == "do not fit: (8, 7) over ranks"
    (one,), _ = compare(replace(JOB, hosts=1), [Code(4, 3)])
    lost_in_a_month = -math.expm1(-JOB.host_share / 10 * MONTH_H)
    assert (one.spread, one.survives) == ("rank", 0)
    assert one.loss_per_month == pytest.approx(lost_in_a_month, rel=1e-3)


def test_racks_take_turns() -> None:
    job = replace(JOB, hosts=6, ranks_per_host=2, rack_hosts=2)
    placement, hosts = placed(job, Code(3, 2), "rack")
    assert hosts == [0, 0, 2, 2, 4, 4, 1, 1, 3, 3, 5, 5]
    assert placement.spread([host // 2 for host in hosts])
    with pytest.raises(PlacementError, match=r"code \(4, 3\) needs 4 or more racks"):
        placed(job, Code(4, 3), "rack")
    with pytest.raises(PlacementError, match="with equally many hosts in each"):
        placed(replace(job, hosts=7), Code(4, 3), "rack")
