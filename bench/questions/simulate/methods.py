"""What each way of surviving failures costs a job.

Owns: `methods`, the ways that are compared, each at its own best or published interval.

Must not know: when faults come, where inputs are from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baselines.cpr import job as cpr_job
from baselines.cpr import overhead as cpr
from baselines.young import young
from bench.questions.simulate import step_cost
from bench.questions.simulate.inputs import CHANGED, MEASURED_RANKS, Inputs, together
from bench.questions.simulate.training import Method
from ecemb.coding.code import Code
from ecemb.errors import PlacementError
from ecemb.step.interval import best
from ecemb.tools.cost import MONTH_H, Odds, host_recovery_s, losses_per_month, placed
from ecemb.tools.job import Job
from ecemb.tools.window_cost import DELTAS, DENSE_S_PER_GB, ROW_HEAD_BYTES, STATUS, cost_of, on_the_way_s

CPR_TOTAL_H = MONTH_H
"""Of training, which CPR's interval doesn't depend on."""
HALF_HOUR_H = 0.5
"""The interval of which the changed rows of a save were measured."""
MEASURED_RECORD_BYTES = 264
"""Of the tables that the costs of a step are of."""
CODES = (Code(4, 3), Code(8, 7), Code(6, 4), Code(10, 8))
BESIDE = "window auto"
WAYS = ("", "window 16", BESIDE)
"""Of ecemb: each step commits, or 16 together, or Young's number of them, beside the steps that follow."""
KINDS = ("full", "Check-N-Run", "increments", "CPR", "snapshots", "live copies", "ecemb")
"""How the names of methods begin; methods of one kind do not compete with each other."""


def kind(method: str) -> str:
    """Returns the kind of a method, of `KINDS`.

    Raises:
        KeyError: It is of none.
    """
    for name in KINDS:
        if method.startswith(name):
            return name
    raise KeyError(method)


@dataclass(frozen=True)
class AnyHost:
    """The odds of copies in the memory of one's own host: no lost host comes back from them."""

    def broken(self, lost: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of sets of lost hosts, int64 [sets, hosts], which are more than memory gives back: all."""
        return np.ones(len(lost), np.bool_)


def added(job: Job, given: Inputs, family: str, code: Code, way: str = "") -> tuple[float, int]:
    """Seconds that protection adds to a step of tables in host memory, and steps in a window.

    What was measured on one machine, and the time that messages are on their way between hosts.

    Args:
        job: The job.
        given: All inputs.
        family: "ecemb" or "copies".
        code: Of the parity; of copies, (copies, 1).
        way: Of `WAYS`.
    """
    step, commit, row, row_and_parity = (given[f"{family}: {name}"] for name in step_cost.TERMS)
    rounds = max(1.0, math.log2(job.ranks) / math.log2(MEASURED_RANKS))
    times = 1 + (rounds - 1) * given["commit by ranks"].value
    dense_s = 2 * DENSE_S_PER_GB * job.dense_bytes / 1e9
    rows = job.changed_rows() * job.record_bytes / MEASURED_RECORD_BYTES
    commit_s = times * commit.value + dense_s
    rows_s = rows * (row.value + code.r * row_and_parity.value)
    window = {"window 16": 16, BESIDE: best(commit_s + rows_s, job.step_s, job.mtbf_s)}.get(way, 1)
    rows *= window ** given["rows by window"].value
    weights = ((step, 1.0), (commit, times / window), (row, rows), (row_and_parity, code.r * rows))
    return dense_s / window + together(weights) + _waited_s(job, family, code, way, window, rows), window


def _waited_s(job: Job, family: str, code: Code, way: str, window: int, rows: float) -> float:
    """Seconds of a step in which training waits until messages have crossed the network.

    Args:
        job: The job.
        family: See `added`, as for the code and the way.
        code: Of the parity.
        way: Of `WAYS`.
        window: Steps of a transaction.
        rows: That a step sends, of `MEASURED_RECORD_BYTES`.
    """
    sent_bytes = code.r * window * rows * MEASURED_RECORD_BYTES * (1 + ROW_HEAD_BYTES / job.record_bytes)
    ways_s = on_the_way_s(job, code, sent_bytes)
    if family == "copies":  # nothing is agreed on
        return ways_s[DELTAS]
    return (ways_s[STATUS] if way == BESIDE else sum(ways_s.values())) / window


def as_given(job: Job, given: Inputs) -> Job:
    """Returns the job with what inputs say of it."""
    return replace(
        job,
        restart_s=given["restart"].value,
        replace_s=given["replace a host"].value,
        network_bytes_per_s=1e9 * given["network"].value,
        round_trip_s=1e-6 * given["round trip"].value,
        rebuild_over_network=given["rebuild"].value,
        batch=job.batch * given["touched rows"].value,
    )


def methods(job: Job, given: Inputs, spread: str = "host") -> list[Method]:
    """Returns all ways of surviving that fit a job, each at its own best or published interval.

    Args:
        job: The job; what `given` says of its machines and rows is taken from there.
        given: All inputs; see `bench.questions.simulate.inputs`.
        spread: Of parity and copies; see `ecemb.tools.cost.placed`.
    """
    job = as_given(job, given)
    value = {name: one.value for name, one in given.items()}
    host_bytes = job.table_bytes / job.hosts
    rank_gb = host_bytes / job.ranks_per_host / 1e9
    copy_h, snapshot_h, changes_h, back_h = (
        rank_gb * value[name] / 3600 for name in ("copy", "snapshots' copy", "Check-N-Run's copy", "put back")
    )
    store_h = host_bytes / (value["storage"] * 1e9) / 3600
    share_h = host_bytes / min(value["storage"] * 1e9 * job.hosts, job.network_bytes_per_s) / 3600
    network_h = host_bytes / job.network_bytes_per_s / 3600
    idle_network_h = network_h / value["idle network"]
    restart_h, replace_h = job.restart_s / 3600, job.replace_s / 3600
    mtbf_h = job.mtbf_s / 3600

    def stored(
        name: str, save_h: float, lag_h: float, load_h: float, interval_h: float, overhead: float = 0.0
    ) -> Method:
        """No save begins before the one before is written."""
        down_h = restart_h + load_h
        return Method(
            name,
            "all",
            overhead=overhead,
            process_h=down_h,
            host_h=replace_h + down_h,
            interval_h=max(interval_h, lag_h),
            save_h=save_h,
            lag_h=lag_h,
        )

    tracked, power = value["Check-N-Run: step"], value["rows by interval"]
    written_h = store_h * value["Check-N-Run's volume"]
    each_h = of_changes(changes_h, written_h, power, mtbf_h, value["Check-N-Run's interval"])
    share = (each_h / HALF_HOUR_H) ** power
    loaded_h = store_h * value["Check-N-Run's storage"]
    found = [
        stored("full", store_h, 0.0, store_h, young(store_h, mtbf_h)),
        stored("full, async", copy_h, store_h, store_h, young(copy_h, mtbf_h)),
        stored("Check-N-Run", changes_h * share, written_h * share, loaded_h, each_h, tracked),
        _increments(job, value["copy"], value["storage"], store_h),
        replace(_partial(job, store_h, share_h, value["CPR's PLS target"]), overhead=value["CPR: step"]),
    ]

    def durable(lost_per_h: float) -> dict[str, Any]:
        """The tier below what is in memory, for this rate of losses of it."""
        most_h = value["between durable saves"]
        every_h = max(min(young(copy_h, 1 / lost_per_h) if lost_per_h else most_h, most_h), store_h)
        return {"durable_interval_h": every_h, "durable_h": replace_h + restart_h + store_h}

    def in_memory(name: str, code: Code, **how: Any) -> None:
        odds = _odds(job.hosts, job.ranks_per_host, job.rack_hosts, code, spread)
        if odds is not None:
            below = durable(sum(losses_per_month(job, odds, how["host_h"])) / MONTH_H)
            how["overhead"] = how.get("overhead", 0.0) + copy_h / below["durable_interval_h"]
            found.append(Method(name, odds=odds, **below, **how))

    def snapshots(name: str, code: Code, save_h: float, lag_h: float, **how: Any) -> None:
        how.setdefault("interval_h", young(save_h, mtbf_h))
        how["interval_h"] = max(how["interval_h"], lag_h)
        how |= {"process_h": restart_h + back_h, "host_h": replace_h + restart_h + network_h}
        in_memory(f"snapshots {name}", code, back="all", save_h=save_h, lag_h=lag_h, **how)

    for copies in (2, 3):
        snapshots(f"x{copies}", Code(copies, 1), snapshot_h, idle_network_h * (copies - 1))
    for code in CODES:
        encode_h = code.r * rank_gb * value["encode"] / 3600
        snapshots(f"coded ({code.n}, {code.k})", code, snapshot_h + encode_h, idle_network_h * code.r)
    sent_h = CHANGED * idle_network_h
    often_h = of_changes(changes_h, sent_h, power, mtbf_h, HALF_HOUR_H)
    part = (often_h / HALF_HOUR_H) ** power
    snapshots(
        "differential x2", Code(2, 1), changes_h * part, sent_h * part, interval_h=often_h, overhead=tracked
    )
    below = durable(job.host_faults_per_h)
    found.append(
        Method(
            "snapshots on the own host",
            "all",
            overhead=copy_h / below["durable_interval_h"],
            process_h=restart_h + back_h,
            interval_h=young(snapshot_h, 1 / job.process_faults_per_h),
            save_h=snapshot_h,
            odds=AnyHost(),
            **below,
        )
    )
    live = [(f"live copies x{copies}", Code(copies, 1), "copies", "") for copies in (2, 3)]
    for way in WAYS:
        live += [(f"ecemb ({one.n}, {one.k}){way and ', '}{way}", one, "ecemb", way) for one in CODES]
    for name, code, family, way in live:
        overhead, process_s, again_s = _protected(job, given, family, code, way)
        in_memory(
            name,
            code,
            back="none",
            overhead=overhead,
            process_h=(process_s + again_s) / 3600,
            host_h=(host_recovery_s(job, code) + value["added to a restart"] + again_s) / 3600,
        )
    return found


def _protected(job: Job, given: Inputs, family: str, code: Code, way: str) -> tuple[float, float, float]:
    """Part of a step that protection adds, seconds after a process's death, and of steps that run again.

    What runs again counts as recovery: half a window, and the window before as far as it is undecided.
    """
    if job.device == "cuda":
        steps = {"": 1, "window 16": 16}.get(way)
        window = cost_of(job, code, steps)
        overhead = window.overhead * given["ecemb: GPU host"].value
        process_s = job.restart_s + given["added to a restart"].value
        process_s += job.table_bytes / job.ranks / 1e9 * given["put back"].value
        return overhead, process_s, window.replayed_steps * job.step_s
    added_s, window_steps = added(job, given, family, code, way)
    undecided = window_steps * given["undecided"].value if window_steps > 1 else 0.0
    again_s = ((window_steps - 1) / 2 + undecided) * job.step_s
    return added_s / job.step_s, job.restart_s + given["added to a restart"].value, again_s


def of_changes(save_h: float, written_h: float, power: float, mtbf_h: float, most_h: float) -> float:
    """The best interval of a method that saves changed rows, whose number grows with a power of it.

    It minimises save(t) / t + t / (2 M), with save(t) = save (t / half an hour)^power, by its derivative; no
    save begins before the one before is written.

    Args:
        save_h: What a save of half an hour's rows stops the training for.
        written_h: How long it takes to be written.
        power: Below 1.
        mtbf_h: M.
        most_h: The longest interval.
    """
    scale = HALF_HOUR_H**power
    best_h = (2 * mtbf_h * save_h * (1 - power) / scale) ** (1 / (2 - power))
    written = (written_h / scale) ** (1 / (1 - power))
    return max(min(best_h, most_h), written)


@cache
def _odds(hosts: int, ranks_per_host: int, rack_hosts: int, code: Code, spread: str) -> Odds | None:
    """Of a job's placement, which depends on no more of it; None where the code doesn't fit."""
    job = Job(
        hosts=hosts,
        ranks_per_host=ranks_per_host,
        table_bytes=1.0,
        row_bytes=1.0,
        step_s=1.0,
        batch=1.0,
        rack_hosts=rack_hosts,
    )
    try:
        placement, host_of = placed(job, code, spread)
    except PlacementError:
        return None
    return Odds(placement, host_of, rack_hosts)


def _increments(job: Job, copy_s_per_gb: float, storage: float, store_h: float) -> Method:
    """Changed rows are written after each step; derived from the methods of IncrCP and LowDiff.

    A new full save is written as often as increments have its size. So storage takes twice the increments,
    and on average half of a full save's bytes are read beside it. Where storage is slower than that, training
    waits for it.

    Args:
        job: The job.
        copy_s_per_gb: That training stands still for changed rows to be copied.
        storage: GB/s of a host.
        store_h: Hours to read a full save.
    """
    rank_gb = job.changed_rows() * job.record_bytes / 1e9
    written_s = 2 * rank_gb * job.ranks_per_host / storage
    waits_s = rank_gb * copy_s_per_gb + max(0.0, written_s - job.step_s)
    down_h = job.restart_s / 3600 + 1.5 * store_h
    return Method(
        "increments each step",
        "all",
        overhead=waits_s / job.step_s,
        process_h=down_h,
        host_h=job.replace_s / 3600 + down_h,
        interval_h=job.step_s / 3600,
        lag_h=min(written_s, job.step_s) / 3600,
    )


def _partial(job: Job, store_h: float, share_h: float, pls: float) -> Method:
    """CPR: what its controller chooses, by `baselines.cpr.overhead`."""
    down_h = job.restart_s / 3600 + share_h
    asked = cpr_job.CprJob(CPR_TOTAL_H, job.mtbf_s / 3600, job.hosts)
    choice = cpr.choose(cpr.Costs(store_h, down_h), asked, pls)
    back = "failed" if choice.policy.recovery == "partial" else "all"
    if back == "all":
        down_h = job.restart_s / 3600 + store_h
    return Method(
        "CPR",
        back,
        process_h=down_h,
        host_h=job.replace_s / 3600 + down_h,
        interval_h=choice.policy.interval_h,
        save_h=store_h,
    )
