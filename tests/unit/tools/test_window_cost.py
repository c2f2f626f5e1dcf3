"""What windows cost, by the planner: against arithmetic by hand, the code's own limits, and measurements."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecemb.coding.code import Code
from ecemb.engines import device_image
from ecemb.kernels import threads
from ecemb.memory.rank_memory import journal_bytes
from ecemb.step import transaction
from ecemb.step.interval import LONGEST_S, MOST, published_mtbf
from ecemb.tools import window_cost
from ecemb.tools.job import Job, distinct
from ecemb.tools.window_cost import auto_steps, cost_of, memory_of, on_the_way_s, roomy_steps

CODE = Code(4, 3)
RESULTS = Path(__file__).resolve().parents[3] / "bench" / "results"
LARGE = Job(
    hosts=8,
    ranks_per_host=8,
    table_bytes=64 * 70e9,
    row_bytes=260,
    step_s=0.1,
    batch=2048,
    features=300,
    ids=10,
    device="cuda",
)
"""64 GPUs of a production model."""


@pytest.mark.parametrize(("rows", "skew"), [(50, 1.2), (5000, 0.0), (20_000, 1.05)])
def test_different_rows_are_those_of_a_draw(rows: int, skew: float, seed: int) -> None:
    share = np.arange(1, rows + 1) ** -skew
    drawn = np.random.default_rng(seed).choice(rows, 10_000, p=share / share.sum())
    assert distinct(rows, skew, 10_000) == pytest.approx(len(np.unique(drawn)), rel=0.03)
    exact = (1 - (1 - share / share.sum()) ** 10_000).sum()
    assert distinct(rows, skew, 10_000) == pytest.approx(exact, rel=1e-3)


def test_more_steps_change_more_rows_and_fewer_for_each_step() -> None:
    rows = [LARGE.changed_rows(steps) for steps in (1, 10, 100, 1000, 10**9)]
    assert rows == sorted(rows)
    assert all(many < 10 * few for few, many in itertools.pairwise(rows[:4]))
    assert rows[-1] == pytest.approx(LARGE.rank_rows)


def test_the_code_has_these_limits() -> None:
    """Those that are public there; the part of a device's memory is tested beside its code."""
    assert (transaction.SHARE, transaction.AT_ONCE_S) == (window_cost.SHARE, window_cost.AT_ONCE_S)
    assert threads.MOST_THREADS == window_cost.MOST_THREADS
    assert journal_bytes([1000], 1) == 1000 * window_cost.SPARE
    assert vars(device_image)["_STAGED_SHARE"] * window_cost.STAGED_SHARE == 1


def test_a_window_by_hand() -> None:
    """100 steps change 17 GB, more than a sixteenth of 80 GB: training waits until they are stored."""
    cost = cost_of(LARGE, CODE, 100)
    gb = LARGE.changed_rows(100) * 264 / 1e9
    assert gb == pytest.approx(17.05, abs=0.01)
    assert sum(cost.work_s.values()) == pytest.approx(3.0 * gb)
    assert cost.waits_s["rows that are stored at once"] == pytest.approx(gb * (1.1 + 1 / 25))
    exchange_s = cost.sent_bytes * 8 / 12.5e9  # eight ranks share the network
    late_s = (0.9 / 8 + 0.5) * gb + exchange_s - 10  # eight threads of twelve cores lay deltas out
    assert cost.waits_s["a commit that is late"] == pytest.approx(late_s)
    assert cost.overhead == pytest.approx(sum(cost.waits_s.values()) / 10)
    assert cost.replayed_steps == pytest.approx(149.5)
    assert cost.device_bytes == {"marks": LARGE.rank_rows, "staged rows": 0}
    roomy = cost_of(replace(LARGE, device_memory_bytes=16 * 18e9), CODE, 100)
    assert roomy.device_bytes["staged rows"] == pytest.approx(gb * 1e9)
    store_s = gb * (1.1 + 1 / 25)
    assert roomy.waits_s["a commit that is late"] == pytest.approx(late_s + store_s)
    two = cost_of(LARGE, Code(6, 4), 100)
    assert sum(two.work_s.values()) == pytest.approx(4.0 * gb)
    alone = cost_of(replace(LARGE, overlap=False), CODE, 100)
    assert alone.waits_s["the commit"] == pytest.approx(late_s + 10)
    assert alone.replayed_steps == pytest.approx(49.5)
    inside = cost_of(replace(LARGE, hosts=1), CODE, 100)
    assert window_cost.NETWORK in cost.used and window_cost.NETWORK not in inside.used


def test_a_commit_rests_beside_busy_processors() -> None:
    """With 16 cores for eight ranks, half of them are busy: what is stored is all that is done in time."""
    gb = LARGE.changed_rows(100) * 264 / 1e9
    few = replace(LARGE, cores=16)
    cost = cost_of(few, CODE, 100)
    all_s = (0.9 / 2 + 0.5) * gb + cost.sent_bytes * 8 / 12.5e9
    assert cost.waits_s["a commit that is late"] == pytest.approx(all_s - 0.04 * 10)
    assert window_cost.RESTS in cost.used and window_cost.RESTS not in cost_of(LARGE, CODE, 100).used
    roomy = cost_of(replace(few, device_memory_bytes=16 * 18e9), CODE, 1)
    store_s = roomy.changed_bytes / 1e9 * (1.1 + 1 / 25)
    assert store_s > 0.1 and roomy.replayed_steps == 1
    assert [window_cost.rests(replace(LARGE, cores=cores)) for cores in (30, 31)] == [True, False]
    assert window_cost.rests(replace(LARGE, device="cpu", cores=1000))


def test_a_commit_in_time_costs_replays_only() -> None:
    small = replace(LARGE, table_bytes=64e9, features=10, ids=1, step_s=0.3)
    cost = cost_of(small, CODE, 200)
    assert "a commit that is late" not in cost.waits_s
    assert cost.used[window_cost.THREAD] < 1
    before_s = sum(cost.work_s.values()) - cost.work_s["apply"] - cost.work_s["delta"] * 7 / 8
    assert cost.replayed_steps == pytest.approx(99.5 + 200 * before_s / 60, rel=0.05)


def test_busy_processors_count() -> None:
    """With tables in host memory training keeps all processors busy: the commit thread slows it down."""
    job = replace(LARGE, device="cpu", table_bytes=64e9, features=10, ids=1, step_s=0.3, cores=16)
    cost = cost_of(job, CODE, 200)
    beside_s = sum(cost.work_s.values()) - cost.work_s["capture"]
    assert cost.waits_s["processors that are busy"] == pytest.approx(beside_s / 2)
    assert cost.waits_s["rows that are captured"] == pytest.approx(cost.work_s["capture"])
    crowded = cost_of(replace(job, cores=4), CODE, 200)
    assert crowded.overhead == pytest.approx(2 * cost.overhead, rel=0.4)
    few = cost_of(replace(job, device="cuda", cores=4), CODE, 200)
    assert few.waits_s["processors that are busy"] > few.window_s


def test_memory_by_hand() -> None:
    job = replace(LARGE, dense_bytes=6.4e9)
    parts = memory_of(job, CODE, 1e6)
    assert parts == pytest.approx(
        {
            "images": 70e9 * 264 / 260,
            "parity": 70e9 * 264 / 260 / 3,
            "journals": 2 * 1.125 * 272e6,
            "inbox": 1.125 * 272e6,
            "messages": 1.125 * 272e6,
            "dense state": 2 * 6.4e9 * 2 / 64,
        }
    )
    here = memory_of(replace(job, device="cpu", overlap=False), Code(4, 2), 1e6)
    assert "images" not in here and here["inbox"] == pytest.approx(2 * here["journals"])


def test_auto_has_room() -> None:
    steps = auto_steps(LARGE, CODE)
    assert (
        cost_of(LARGE, CODE, steps).used[window_cost.MEMORY]
        <= 1
        < (cost_of(LARGE, CODE, steps + 1).used[window_cost.MEMORY])
    )
    assert auto_steps(replace(LARGE, host_memory_bytes=1e15), CODE) == MOST
    assert auto_steps(replace(LARGE, host_memory_bytes=1e15, step_s=0.008), CODE) == LONGEST_S / 0.008
    assert roomy_steps(replace(LARGE, host_memory_bytes=1e9), CODE, MOST) == 1
    assert auto_steps(replace(LARGE, mtbf_h=1e-3), CODE) < 50


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def measured(question: str, metric: str, **labels: object) -> list[dict[str, Any]]:
    return [row for row in rows_of(question) if row["metric"] == metric and labels.items() <= row.items()]


def as_measured(name: str, setting: str, code: str, window: Any) -> Job:
    """The job of a measurement: four ranks on two processors, which they keep busy."""
    labels = {"setting": setting, "code": code, "window": window}
    (bare,) = measured(name, "step_cpu_ms", method="bare", **labels)
    steps = (
        measured(name, "window_steps", setting=setting, code=code)[0]["value"] if window == "auto" else window
    )
    tables, lookups, skew = (26, 1, 1.2) if setting.startswith("dlrm") else (10, 10, 1.05)
    row_bytes = 512 if name == "overhead-sparse" else 260  # Adagrad's state: of each element, or one of a row
    return Job(
        hosts=1,
        ranks_per_host=4,
        table_bytes=tables * 200_000 * row_bytes,
        row_bytes=row_bytes,
        step_s=bare["value"] / 1000 / 2,
        batch=1024,
        features=tables,
        ids=lookups,
        skew=skew,
        dense_bytes=12.2e6 if tables == 26 else 1e6,
        window=int(steps),
        overlap=bare["overlap"] != "none",
        cores=2,
        mtbf_h=published_mtbf(128).total_seconds() / 3600,
    )


CASES = [
    (name, setting, code, window)
    for name in ("overhead", "overhead-xeon", "overhead-sparse")
    for setting, code, window in dict.fromkeys(
        (row["setting"], row["code"], row["window"])
        for row in rows_of(name)
        if row["metric"] == "phases_cpu_ms"
    )
]


@pytest.mark.parametrize(("name", "setting", "code", "window"), CASES)
def test_steps_change_and_send_what_is_measured(name: str, setting: str, code: str, window: object) -> None:
    """All of TorchRec's tables; those of torch.optim choose another number of rows at their own pace."""
    labels = {"setting": setting, "code": code, "window": window, "method": "protected"}
    (touched,) = measured(name, "touched_rows_per_step", **labels)
    (sent,) = measured(name, "bytes_sent_per_step", **labels)
    job = as_measured(name, setting, code, window)
    cost = cost_of(job, Code(*map(int, code.strip("()").split(","))))
    near = 0.02 if window != "auto" else 0.25  # "auto" begins with windows of one step
    assert cost.changed_rows / cost.steps == pytest.approx(touched["value"], rel=near)
    assert 0.75 < sent["value"] * cost.steps / cost.sent_bytes < 1.35


@pytest.mark.parametrize(("name", "setting", "code", "window"), CASES)
def test_processor_time_is_what_is_measured(name: str, setting: str, code: str, window: object) -> None:
    """Within 1.6 for the machine that rates are of; the other's memory is faster, above all for few rows."""
    job = as_measured(name, setting, code, window)
    cost = cost_of(job, Code(*map(int, code.strip("()").split(","))))
    phases = measured(name, "phases_cpu_ms", setting=setting, code=code, window=window)
    fixed_s = sum(cost.waits_s[part] for part in ("begin and end of steps", "agreement and dense state"))
    reckoned_s = (sum(cost.work_s.values()) + fixed_s / 2) / cost.steps  # four ranks wait on two processors
    most = 1.6 if name == "overhead-xeon" else 2.4
    assert 0.65 < 1000 * reckoned_s / sum(row["value"] for row in phases) < most
    (percent,) = measured(name, "phases_cpu_pct", setting=setting, code=code, window=window) or [None]
    if percent is not None:
        assert 0.65 < 100 * cost.overhead / percent["value"] < most


@pytest.mark.parametrize(("name", "setting", "code", "window"), [case for case in CASES if case[3] == "auto"])
def test_auto_chooses_what_it_chose(name: str, setting: str, code: str, window: object) -> None:
    job = as_measured(name, setting, code, window)
    chosen = auto_steps(replace(job, window="auto"), Code(*map(int, code.strip("()").split(","))))
    assert isinstance(job.window, int)
    assert math.log2(chosen / job.window) == pytest.approx(0, abs=1)


@pytest.mark.parametrize("code", [Code(4, 3), Code(6, 4), Code(10, 8)])
def test_memory_is_what_a_small_job_measures(code: Code) -> None:
    job = replace(LARGE, hosts=code.n, ranks_per_host=1, device="cpu", row_bytes=512)
    (parity,) = measured("memory", "arena_part_over_tables", code=f"({code.n}, {code.k})", part="parity")
    parts = memory_of(job, code, 0)
    assert parts["parity"] * job.ranks / job.table_bytes == pytest.approx(parity["value"], rel=0.01)


@pytest.mark.parametrize("batch", [2048, 8192])
@pytest.mark.parametrize("table_bytes", [16 << 20, 128 << 20])
def test_room_for_a_step_is_what_a_small_job_measures(table_bytes: int, batch: int) -> None:
    """What grows does so in quarters: between what is needed and a quarter more."""
    (touched,) = measured("memory", "step_touched_bytes", batch=batch, table_bytes=table_bytes)
    buffers = measured("memory", "step_buffers_over_touched", batch=batch, table_bytes=table_bytes)
    job = replace(LARGE, device="cpu", overlap=False, row_bytes=512)
    parts = memory_of(job, CODE, touched["value"] / 512)
    for name, part in (("row_journal", "journals"), ("inbox", "inbox")):
        (row,) = (row for row in buffers if row["buffer"] == name)
        assert 0.85 < row["value"] * touched["value"] / parts[part] < 1.25


class VirtualWait:
    """In place of the event that ends the commit thread's rests: the window's end sets it."""

    def __init__(self) -> None:
        self.now_s = self.worked_s = 0.0
        self.window_s = 0.0

    def clear(self) -> None:
        """Nothing is set before the window's end."""

    def wait(self, rest_s: float) -> None:
        """Rests until the window's end at most."""
        self.now_s = max(self.now_s, min(self.now_s + rest_s, self.window_s))

    def work(self, part_s: float) -> None:
        self.now_s, self.worked_s = self.now_s + part_s, self.worked_s + part_s


@pytest.mark.parametrize("window_s", [1.0, 10.0, 60.0])
@pytest.mark.parametrize(
    ("store_s", "parts_s"), [(0, 0.003), (0, 0.03), (0, 1), (0, 5), (2.5, 3), (0.2, 0.1)]
)
def test_training_waits_for_the_commit_as_reckoned(
    store_s: float, parts_s: float, window_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the class that paces the commit thread, in virtual time, beside busy processors."""
    wait = VirtualWait()
    wait.window_s = window_s
    monkeypatch.setattr(transaction.threading, "Event", lambda: wait)
    monkeypatch.setattr(transaction, "_work", lambda: wait.worked_s)
    monkeypatch.setattr(threads.IdleProcessors, "are_idle", lambda _: False)
    throttle = transaction.CommitThrottle()
    throttle.begin()
    throttle.start()
    wait.work(store_s)
    parts = max(1, round(parts_s / 0.002))
    for _ in range(parts):
        wait.work(parts_s / parts)
        throttle.rest()
    late_s = max(0.0, wait.now_s - window_s)
    assert window_cost.late_s(store_s, parts_s, window_s) == pytest.approx(late_s, abs=0.03 * window_s)


def ways(hosts: int, per_host: int) -> int:
    """Messages between hosts that the last rank of a dissemination waits for, one after another."""
    ranks = hosts * per_host
    waited = [0] * ranks
    for number in range((ranks - 1).bit_length()):
        before = [(rank - (1 << number)) % ranks for rank in range(ranks)]
        waited = [
            max(waited[rank], waited[other] + (rank // per_host != other // per_host))
            for rank, other in enumerate(before)
        ]
    return max(waited)


@pytest.mark.parametrize("hosts", [2, 3, 4, 8, 13, 64])
@pytest.mark.parametrize("per_host", [1, 2, 3, 4, 6, 8])
def test_a_status_is_on_its_way_between_hosts_as_often_as_its_rounds(hosts: int, per_host: int) -> None:
    job = replace(LARGE, hosts=hosts, ranks_per_host=per_host, round_trip_s=2.0)
    found = on_the_way_s(job, CODE, 0.0)
    assert found["status"] == found["vote"] and found["deltas"] == 1
    if hosts.bit_count() == per_host.bit_count() == 1:
        assert found["status"] == ways(hosts, per_host)
    assert ways(hosts, per_host) <= found["status"] <= ways(hosts, per_host) + 2
    if per_host == 1:
        assert found["status"] == math.ceil(math.log2(hosts)) == ways(hosts, 1)


def test_the_network_by_hand() -> None:
    """One gigabyte of a rank, eight ranks of a host at 100 Gbit/s, or three connections at 5 Gbit/s each."""
    far = replace(LARGE, round_trip_s=0.4e-3)
    assert on_the_way_s(far, CODE, 1e9) == pytest.approx(
        {"status": 0.8e-3, "deltas": 0.2e-3 + 8 / 12.5, "vote": 0.8e-3}
    )
    fast = replace(far, network_bytes_per_s=1e15)
    assert on_the_way_s(fast, CODE, 1e9)["deltas"] == pytest.approx(0.2e-3 + 1 / 3 / 0.625)
    assert set(on_the_way_s(replace(far, hosts=1), CODE, 1e9).values()) == {0.0}
    near = replace(far, overlap=False, round_trip_s=0.0)
    added_s = [sum(cost_of(job, CODE, 1).waits_s.values()) for job in (replace(far, overlap=False), near)]
    assert added_s[0] - added_s[1] == pytest.approx(0.8e-3 + 0.2e-3 + 0.8e-3)
