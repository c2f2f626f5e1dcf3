"""What each way of surviving failures costs a job: from what was measured, published or, else, chosen.

Owns: `Costs`, where each number says where it is from, and `methods`, the ways that are compared.

Must not know: when faults come.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from baselines.cpr import job as cpr_job
from baselines.cpr import overhead as cpr
from baselines.young import young
from bench import RESULTS
from bench.harness.result import Row
from bench.questions.simulate import step_cost
from bench.questions.simulate.training import Method
from ecemb.coding.code import Code
from ecemb.errors import PlacementError
from ecemb.step.interval import best
from ecemb.tools.cost import MONTH_H, Odds, host_recovery_s, losses_per_month, placed
from ecemb.tools.job import Job
from ecemb.tools.window_cost import DELTAS, DENSE_S_PER_GB, ROW_HEAD_BYTES, STATUS, on_the_way_s

LONGEST_H = 24.0
"""Between durable saves under a method that survives in memory (chosen)."""
PLS_TARGET = 0.1
"""CPR's (recalled from its emulation)."""
CPR_TOTAL_H = MONTH_H
"""Of training, which CPR's interval doesn't depend on."""
CHECK_N_RUN_H = 0.5
"""Between saves (published); Young's interval instead, where that is shorter (chosen)."""
OVERHEAD, ENGINE = "overhead.json", "torchrec"
"""The answer that the costs of a step are fitted to, and the engine of tables that they are of."""
OVER_LINKS = "network.json"
"""The answer that has rebuilds over links."""
COMPARED = "compare.json"
"""The answer that has the costs of saves."""
SAVES = {
    "copy": ("full dcp async", 0.8),
    "snapshots' copy": ("snapshots x2 beside", 0.8),
    "Check-N-Run's copy": ("check-n-run intermittent", 0.26 * 0.8),
}
"""Cost of a GB of a rank's tables -> the method that it is measured of, and what it is else (chosen)."""
TRACKING = {"CPR: step": "cpr vanilla", "Check-N-Run: step": "check-n-run intermittent"}
"""Cost that is a part of each step -> the method that it is measured of."""
FREE = "CPR: step, as published"
"""Name of a cost that only a panel of the map has."""
IDLE_NETWORK = 0.5
"""Of the time, training sends nothing (chosen): snapshots travel then, and slow no step down."""
MEASURED_RANKS, MEASURED_RECORD_BYTES = 4, 264
"""Of these measurements."""
CHOSEN_STEPS = {"ecemb": (0.0, 0.015, 0.0, 1e-6), "copies": (0.0, 0.005, 3e-7, 6e-7)}
"""`step_cost.TERMS` in seconds, where nothing was measured."""
CODES = (Code(4, 3), Code(8, 7), Code(6, 4), Code(10, 8))
BESIDE = "window auto"
WAYS = ("", "window 16", BESIDE)
"""Of ecemb: each step commits, or 16 together, or Young's number of them, beside the steps that follow."""


@dataclass(frozen=True)
class Cost:
    """One number that the simulation stands on.

    Attributes:
        value: Itself.
        unit: Of it.
        source: "measured", "published", "derived" or "chosen", and where.
        low: The lower end of its interval of 95 %, or of what is published; None if it has no interval.
        high: The upper end.
        more_is_better: Whether the upper end is the cheap one.
        drawn: Values in the draws of a fit, which other costs share; None if it is known by itself.
        end: "value", or the end of the interval at which it and those others are; see `together`.
    """

    value: float
    unit: str
    source: str
    low: float | None = None
    high: float | None = None
    more_is_better: bool = False
    drawn: step_cost.Floats | None = field(default=None, compare=False, repr=False)
    end: str = "value"

    def at(self, end: str) -> Cost:
        """The cost at the "cheap" or the "dear" end of its interval; else itself."""
        if self.drawn is not None:
            return replace(self, end=end)
        value = {"cheap": self.low, "dear": self.high}.get(end)
        if self.more_is_better:
            value = {"cheap": self.high, "dear": self.low}.get(end)
        return self if value is None else replace(self, value=max(value, 0.0))

    def row(self, name: str) -> Row:
        """As a row of the answer."""
        low, high = (self.value if one is None else one for one in (self.low, self.high))
        return Row("assumed", self.value, self.unit, low, high, 1, {"what": name, "marked": self.source})


def costs(results: Path = RESULTS, *, over_links: bool = False) -> dict[str, Cost]:
    """Returns all of them: measured ones from the answers about overhead and recovery in a folder.

    What a file doesn't have, or where there is none, is chosen.

    Args:
        results: The folder.
        over_links: Whether a rebuild is as fast as over links, if that was measured, not as on one machine.
    """
    found = {
        "storage": Cost(0.2, "GB/s", "derived: for a host, so that a save takes CPR's 5 minutes (recalled)"),
        "Check-N-Run's interval": Cost(CHECK_N_RUN_H, "h", "published; Young's where that is shorter"),
        "Check-N-Run's volume": Cost(1 / 6, "of full", "published: 1/17 to 1/6", 1 / 17, 1 / 6),
        "Check-N-Run's storage": Cost(1 / 2.5, "of full", "published: 1/8 to 1/2.5", 1 / 8, 1 / 2.5),
        "CPR's PLS target": Cost(PLS_TARGET, "PLS", "published (recalled)"),
        "idle network": Cost(
            IDLE_NETWORK, "of the time", "chosen: snapshots are sent in it, as GEMINI sends them"
        ),
        "between durable saves": Cost(LONGEST_H, "h", "chosen: at most, under what survives in memory"),
        FREE: Cost(0.0, "of a step", "published: its servers do nothing between saves"),
    }
    compared = _rows(results / COMPARED)
    found |= _step_costs(_rows(results / OVERHEAD))
    for name, (method, otherwise) in SAVES.items():
        found[name] = _compared(compared, "save_stall_cpu_s_per_gb", method, 1.0, "s/GB of a rank", otherwise)
    for name, method in TRACKING.items():
        found[name] = _compared(compared, "step_cpu_pct", method, 0.01, "of a step", 0.0)
    by_ranks = _by_ranks(_rows(results / "agreement.json"), found["ecemb: commit"].value)
    found |= {} if by_ranks is None else {"commit by ranks": by_ranks}
    recovery = _rows(results / "recovery.json")
    wanted = {"metric": "added_recovery_s", "kind": "process"}  # a rebuild comes on top
    found["added to a restart"] = _measured(recovery, wanted, 1.0, "s", "recovery.json", 1.0)
    wanted = {"metric": "rebuild_over_wire", "code": "(4, 3)", "over": "same messages"}
    rebuild = _measured(recovery, wanted, 1.0, "of the network", "recovery.json", 0.45)
    found["rebuild"] = replace(rebuild, more_is_better=True)
    if over_links and (rebuild := _over_links(_rows(results / OVER_LINKS))) is not None:
        found["rebuild"] = rebuild
    return found


def _over_links(rows: Sequence[Mapping[str, Any]]) -> Cost | None:
    """The part of a link's rate that a rebuild reaches where the link limits it; None if not measured."""
    parts = [row for row in rows if row["metric"] == "rebuild_over_link"]
    if not parts:
        return None
    most = max(parts, key=lambda row: row["value"])
    value, high = (min(1.0, most[key]) for key in ("value", "high"))
    source = f"measured: {OVER_LINKS}, {most['link']}"
    return Cost(value, "of the network", source, min(1.0, most["low"]), high, more_is_better=True)


def _step_costs(rows: Sequence[Mapping[str, Any]]) -> dict[str, Cost]:
    """What protection adds to a step, as `bench.questions.simulate.step_cost` has it."""
    found: dict[str, Cost] = {}
    for family, method in (("ecemb", "protected"), ("copies", "replication")):
        measured = step_cost.points(rows, method, ENGINE)
        fitted = step_cost.fit(measured)
        for name, chosen in zip(step_cost.TERMS, CHOSEN_STEPS[family], strict=True):
            one = fitted.get(name)
            if one is None:
                found[f"{family}: {name}"] = Cost(chosen, "s", f"chosen: {OVERHEAD} doesn't say")
            else:
                source = f"fitted: {len(measured)} measurements of {ENGINE} in {OVERHEAD}, 2 cores"
                found[f"{family}: {name}"] = Cost(one.value, "s", source, one.low, one.high, drawn=one.drawn)
        if family == "ecemb":
            power = step_cost.shrinking(measured)
            found["rows by window"] = Cost(power, "power", f"measured: {OVERHEAD}")
    source = "derived: as many more as rounds of messages by ranks, or none more"
    found["commit by ranks"] = Cost(1.0, "of log2", source, 0.0, 1.0)
    return found


def _by_ranks(rows: Sequence[Mapping[str, Any]], commit_s: float) -> Cost | None:
    """What a commit takes more with each `MEASURED_RANKS` times as many ranks, over itself.

    None where the answer to `agreement` doesn't say, or messages don't grow with the logarithm of the ranks.

    Args:
        rows: Of that answer.
        commit_s: A commit with `MEASURED_RANKS` ranks.
    """
    spent = {row["ranks"]: row for row in rows if row["metric"] == "agreement_cpu_ms"}
    law = {row["law"] for row in rows if row["metric"] == "agreement_cpu_modelled_ms"}
    many = max(spent, default=0)
    if law != {"log2"} or MEASURED_RANKS not in spent or many <= MEASURED_RANKS or commit_s <= 0:
        return None
    times = math.log2(many) / math.log2(MEASURED_RANKS) - 1

    def more(key: str, less: str) -> float:
        return max(0.0, (spent[many][key] - spent[MEASURED_RANKS][less]) / 1000 / commit_s / times)

    source = f"measured: agreement.json, {MEASURED_RANKS} to {many} ranks"
    return Cost(more("value", "value"), "of log2", source, more("low", "high"), more("high", "low"))


def added(job: Job, cost: Mapping[str, Cost], family: str, code: Code, way: str = "") -> tuple[float, int]:
    """Seconds that protection adds to a step, and steps in a window.

    Where the job has a round trip, messages wait for the network.

    Args:
        job: The job.
        cost: All of them; see `costs`.
        family: "ecemb" or "copies".
        code: Of the parity; of copies, (copies, 1).
        way: Of `WAYS`.
    """
    parity = code.r
    step, commit, row, row_and_parity = (cost[f"{family}: {name}"] for name in step_cost.TERMS)
    rounds = max(1.0, math.log2(job.ranks) / math.log2(MEASURED_RANKS))
    times = 1 + (rounds - 1) * cost["commit by ranks"].value
    dense_s = 2 * DENSE_S_PER_GB * job.dense_bytes / 1e9
    rows = job.changed_rows() * job.record_bytes / MEASURED_RECORD_BYTES
    commit_s = times * commit.value + dense_s
    rows_s = rows * (row.value + parity * row_and_parity.value)
    window = {"window 16": 16, BESIDE: best(commit_s + rows_s, job.step_s, job.mtbf_s)}.get(way, 1)
    rows *= window ** cost["rows by window"].value
    weights = ((step, 1.0), (commit, times / window), (row, rows), (row_and_parity, parity * rows))
    waits_s = _waited_s(job, family, code, way, window, rows) if job.round_trip_s else 0.0
    return dense_s / window + together(weights) + waits_s, window


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


def together(weights: Sequence[tuple[Cost, float]]) -> float:
    """The sum of costs of one fit, each with its weight; at an end, it is that of the sum's own interval."""
    likeliest = sum(one.value * weight for one, weight in weights)
    end = weights[0][0].end
    drawn = [one.drawn * weight for one, weight in weights if one.drawn is not None]
    if end == "value" or not drawn:
        return likeliest
    found = float(np.percentile(sum(drawn), step_cost.ENDS_PCT[end]))
    return min(found, likeliest) if end == "cheap" else max(found, likeliest)


def rows_of(all_costs: Mapping[str, Cost], job: Job) -> list[Row]:
    """The numbers that the simulation stands on, as rows: costs, and the job's own."""
    network = "given" if job.round_trip_s else "chosen"
    trip = (("round trip", job.round_trip_s * 1e6, "us", network),) if job.round_trip_s else ()
    own = (
        *trip,
        ("restart", job.restart_s, "s", "chosen"),
        ("replace a host", job.replace_s, "s", "chosen: a spare waits"),
        ("network of a host", job.network_bytes_per_s / 1e9, "GB/s", network),
        ("tables on a host", job.table_bytes / job.hosts / 1e9, "GB", "chosen"),
        ("faults that take a host", job.host_share, "of all", "published: DLRover"),
        ("of those, several at once", job.burst_share, "of all", "derived from InfiniteHBD's trace"),
        ("step", job.step_s, "s", "chosen"),
        ("touched rows", job.changed_rows(), "rows of a rank in a step", "chosen"),
    )
    named = {**all_costs, **{name: Cost(value, unit, source) for name, value, unit, source in own}}
    return [one.row(name) for name, one in named.items()]


def measured(job: Job, all_costs: Mapping[str, Cost]) -> Job:
    """Returns the job, its rebuilds as fast as they were measured to be; see `costs`."""
    return replace(job, rebuild_over_network=all_costs["rebuild"].value)


def methods(job: Job, all_costs: Mapping[str, Cost], spread: str = "host") -> list[Method]:
    """Returns all ways of surviving that fit a job, each at its own best or published interval.

    Whatever of a job's speed `costs` has, is taken from there.

    Half a window's steps run again after a fault, which counts as recovery.

    Args:
        job: The job.
        all_costs: See `costs`.
        spread: Of parity and copies; see `ecemb.tools.cost.placed`.
    """
    cost = {name: one.value for name, one in all_costs.items()}
    job = measured(job, all_costs)
    host_bytes = job.table_bytes / job.hosts
    rank_gb = host_bytes / job.ranks_per_host / 1e9
    copy_h, snapshot_h, changes_h = (rank_gb * cost[name] / 3600 for name in SAVES)
    store_h = host_bytes / (cost["storage"] * 1e9) / 3600
    share_h = host_bytes / min(cost["storage"] * 1e9 * job.hosts, job.network_bytes_per_s) / 3600
    network_h = host_bytes / job.network_bytes_per_s / 3600
    idle_network_h = network_h / cost["idle network"]
    restart_h, replace_h = job.restart_s / 3600, job.replace_s / 3600
    mtbf_h = job.mtbf_s / 3600

    def stored(
        name: str,
        save_h: float,
        lag_h: float,
        load_h: float,
        longest_h: float = math.inf,
        overhead: float = 0.0,
    ) -> Method:
        """Each `longest_h` at most; no save begins before the one before is written."""
        down_h = restart_h + load_h
        return Method(
            name,
            "all",
            overhead=overhead,
            process_h=down_h,
            host_h=replace_h + down_h,
            interval_h=max(min(young(save_h, mtbf_h), longest_h), lag_h),
            save_h=save_h,
            lag_h=lag_h,
        )

    found = [
        stored("full", store_h, 0.0, store_h),
        stored("full, async", copy_h, store_h, store_h),
        stored(
            "Check-N-Run",
            changes_h,
            store_h * cost["Check-N-Run's volume"],
            store_h * cost["Check-N-Run's storage"],
            cost["Check-N-Run's interval"],
            cost["Check-N-Run: step"],
        ),
        replace(_partial(job, store_h, share_h, mtbf_h), overhead=cost["CPR: step"]),
    ]

    def in_memory(name: str, code: Code, **given: Any) -> None:
        odds = _odds(job.hosts, job.ranks_per_host, job.rack_hosts, code, spread)
        if odds is None:
            return
        lost_per_h = sum(losses_per_month(job, odds, given["host_h"])) / MONTH_H
        longest_h = young(copy_h, 1 / lost_per_h) if lost_per_h else LONGEST_H
        durable_interval_h = max(min(longest_h, LONGEST_H), store_h)
        given["overhead"] = given.get("overhead", 0.0) + copy_h / durable_interval_h
        found.append(
            Method(
                name,
                odds=odds,
                durable_interval_h=durable_interval_h,
                durable_h=replace_h + restart_h + store_h,
                **given,
            )
        )

    for copies in (2, 3):
        code = Code(copies, 1)
        in_memory(
            f"snapshots x{copies}",
            code,
            back="all",
            interval_h=max(young(snapshot_h, mtbf_h), idle_network_h * code.r),
            save_h=snapshot_h,
            lag_h=idle_network_h * code.r,
            process_h=restart_h + snapshot_h,
            host_h=replace_h + restart_h + network_h,
        )
    added_h = cost["added to a restart"] / 3600
    live = [(f"live copies x{copies}", Code(copies, 1), "copies", "") for copies in (2, 3)]
    for way in WAYS:
        live += [(f"ecemb ({one.n}, {one.k}){way and ', '}{way}", one, "ecemb", way) for one in CODES]
    for name, code, family, way in live:
        added_s, window = added(job, all_costs, family, code, way)
        again_h = (window - 1) / 2 * job.step_s / 3600  # half a window runs again
        in_memory(
            name,
            code,
            back="none",
            overhead=added_s / job.step_s,
            process_h=restart_h + added_h + again_h,
            host_h=host_recovery_s(job, code) / 3600 + added_h + again_h,
        )
    return found


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


def _partial(job: Job, store_h: float, share_h: float, mtbf_h: float) -> Method:
    """CPR: what its controller chooses, by `baselines.cpr.overhead`."""
    down_h = job.restart_s / 3600 + share_h
    asked = cpr_job.CprJob(CPR_TOTAL_H, mtbf_h, job.hosts)
    choice = cpr.choose(cpr.Costs(store_h, down_h), asked, PLS_TARGET)
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


def _rows(path: Path) -> list[Mapping[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def _compared(
    rows: Sequence[Mapping[str, Any]], metric: str, method: str, scale: float, unit: str, otherwise: float
) -> Cost:
    """Of the engine on which it is known best; what noise makes negative counts as 0."""
    found = [row for row in rows if row["metric"] == metric and row["method"] == method]
    if not found:
        return Cost(otherwise, unit, "chosen: compare.json doesn't say")
    best_known = min(found, key=lambda row: row["high"] - row["low"])
    low, value, high = (max(0.0, best_known[key] * scale) for key in ("low", "value", "high"))
    return Cost(value, unit, f"measured: compare.json, {best_known['engine']}, 2 cores", low, high)


def _measured(
    rows: Sequence[Mapping[str, Any]],
    wanted: Mapping[str, Any],
    scale: float,
    unit: str,
    name: str,
    otherwise: float,
) -> Cost:
    """The first row with these labels; where noise makes a small cost negative, it counts as 0."""
    for row in rows:
        if all(row.get(label) == value for label, value in wanted.items()):
            low, value, high = (row[key] * scale for key in ("low", "value", "high"))
            return Cost(max(0.0, value), unit, f"measured: {name}, 2 cores", low, max(0.0, high))
    return Cost(otherwise, unit, f"chosen: {name} doesn't say")
