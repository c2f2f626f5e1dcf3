"""The planner: each estimate against arithmetic by hand, and the command line."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecemb.__main__ import main
from ecemb.coding.code import Code
from ecemb.coding.placement import HOST_FAULTS_PER_DAY
from ecemb.errors import ConfigurationError, PlacementError
from ecemb.tools.cost import BURST_SIZES, MONTH_H, Job, compare, estimate, placed
from ecemb.tools.plan import text

JOB = Job(
    hosts=8,
    ranks_per_host=4,
    table_bytes=3.2e12,
    touched_rows=10_000,
    row_bytes=512,
    step_s=0.2,
    network_bytes_per_s=1e10,
    mtbf_h=10,
    burst_share=0,
)


def test_costs_by_hand() -> None:
    one = estimate(JOB, Code(4, 3))
    assert one.step_bytes == 10_000 * 520
    assert one.memory_bytes == pytest.approx(1e11 / 3 + 1.25 * 10_000 * 2 * 520)
    dense = estimate(replace(JOB, dense_bytes=1e9), Code(4, 3))
    assert dense.memory_bytes - one.memory_bytes == pytest.approx(2e9 * 2 / JOB.ranks)
    assert estimate(replace(JOB, row_bytes=505), Code(4, 3)).step_bytes == one.step_bytes
    sent_s, memory_s = 4 * one.step_bytes / 1e10, 8 * 10_000 * 512 / 5e9
    assert one.overhead == pytest.approx((sent_s + memory_s + 6e-4) / 0.2)
    assert one.host_recovery_s == pytest.approx(150 + 4e11 * (4 / 3) / 4.5e9)
    assert one.time_lost == pytest.approx((0.75 * 30 + 0.25 * one.host_recovery_s) / 36_000)
    assert estimate(JOB, Code(4, 2)).step_bytes == 2 * one.step_bytes


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
    job = Job(
        hosts=data.draw(st.integers(1, 40)),
        ranks_per_host=data.draw(st.integers(1, 4)),
        table_bytes=data.draw(size),
        touched_rows=data.draw(st.floats(0, 1e18)),
        row_bytes=data.draw(size),
        step_s=data.draw(size),
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
        numbers = [value for value in asdict(one).values() if isinstance(value, float)]
        assert all(math.isfinite(value) and value >= 0 for value in numbers), one
        assert one.loss_per_month_alone <= one.loss_per_month <= 1
    assert text(job, estimates)


RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"


def measured(question: str, metric: str, **labels: object) -> list[dict[str, Any]]:
    rows = json.loads((RESULTS / f"{question}.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["metric"] == metric and labels.items() <= row.items()]


@pytest.mark.parametrize("code", [Code(4, 3), Code(6, 4), Code(10, 8)])
def test_memory_is_what_a_small_job_measures(code: Code) -> None:
    job = replace(JOB, hosts=code.n, ranks_per_host=1, touched_rows=0)
    (parity,) = measured("memory", "arena_part_over_tables", code=f"({code.n}, {code.k})", part="parity")
    assert estimate(job, code).memory_over_tables == pytest.approx(parity["value"], rel=0.01)


@pytest.mark.parametrize("batch", [2048, 8192])
@pytest.mark.parametrize("table_bytes", [16 << 20, 128 << 20])
def test_room_for_a_step_is_what_a_small_job_measures(table_bytes: int, batch: int) -> None:
    """What grows does so in quarters: as much as is reckoned at the most, and that less a fifth."""
    (touched,) = measured("memory", "step_touched_bytes", batch=batch, table_bytes=table_bytes)
    buffers = measured("memory", "step_buffers_over_touched", batch=batch, table_bytes=table_bytes)
    assert len(buffers) == 3
    job = replace(JOB, hosts=4, ranks_per_host=1, table_bytes=4e-9, touched_rows=touched["value"] / 512)
    reckoned = estimate(job, Code(4, 3)).memory_bytes / touched["value"]
    assert 0.8 < sum(row["value"] for row in buffers) / reckoned < 1.05


@pytest.mark.parametrize("code", [Code(4, 3), Code(4, 2)])
def test_bytes_of_a_step_are_what_a_small_job_measures(code: Code) -> None:
    """Of TorchRec's tables with row-wise Adagrad: 64 floats and one, beside heads and a rank's own state."""
    labels = {"engine": "torchrec", "code": f"({code.n}, {code.k})", "window": 1, "overlap": "none"}
    for sent in measured("overhead", "bytes_sent_per_step", method="protected", **labels):
        if not sent["setting"].startswith("dlrm"):
            continue
        same = {"method": "protected", "setting": sent["setting"], **labels}
        (touched,) = measured("overhead", "touched_rows_per_step", **same)
        job = replace(JOB, touched_rows=touched["value"], row_bytes=260)
        assert 1 < sent["value"] / estimate(job, code).step_bytes < 1.08
        return
    pytest.fail("overhead.json has no such row")


WORDS = ["--hosts", "8", "--ranks-per-host", "4", "--table-gb", "3200", "--touched-rows", "1e4"]
WORDS += ["--row-bytes", "512", "--step-ms", "200"]


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--code", "4,3", "--code", "10,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 hosts x 4 ranks, 3.2 TB of tables")
    assert lines[3].split()[:2] == ["code", "survives"]
    assert lines[4].startswith("(4, 3)  any 1 host")
    assert lines[6] == "do not fit: (10, 8) over hosts"
    assert "codes that fit here: (8, 6), (8, 7)" in lines[7]


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--network-gbit", "80", "--mtbf-hours", "10", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["job"]["network_bytes_per_s"] == 1e10
    job = replace(JOB, burst_share=shown["job"]["burst_share"])
    assert shown["estimates"][2] == estimate(job, Code(4, 3)).__dict__
    assert list(shown["refused"]) == ["(10, 8) over hosts"]


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS, "--ranks-per-host", "1000000"]) == 1
    assert "ecemb: a job can have at most 1,048,576 ranks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", *WORDS, "--code", "3,3"])
    assert "a code is N,K with 1 <= K < N <= 256, for example 4,3; got '3,3'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--hosts", "0", r"a whole number from 1 to 1e+18"),
        ("--hosts", "1.5", r"a whole number from 1 to 1e+18"),
        ("--table-gb", "-3", r"a number above 0, at most 1e+09"),
        ("--table-gb", "1e300", r"a number above 0, at most 1e+09"),
        ("--step-ms", "fast", r"a number above 0, at most 1e+21"),
        ("--touched-rows", "nan", r"a number from 0 to 1e+18"),
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
    assert "the host is lost, with all rows and parity" in lines[1]
    assert lines[4].startswith("(4, 3)  any 1 rank, no host") and "  lost  " in lines[4]
    assert lines[6] == "do not fit: (8, 7) over ranks"
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
