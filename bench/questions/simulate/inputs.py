"""The numbers that the simulation stands on: measured, published, derived or chosen, each with its range.

Owns: `Input`, and `inputs`, all of them for one profile of jobs. An input without a range would make a
verdict look more certain than it is, so that all have one: the interval of 95 % of a measurement, what is
published, or, for what is chosen, what is plausible.

Must not know: methods, faults.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bench import RESULTS
from bench.harness.result import Row
from bench.questions.simulate import step_cost
from bench.questions.simulate.profiles import Profile
from ecemb.tools.cost import COPY_BYTES_PER_S, FIRST_READ_BYTES_PER_S
from ecemb.tools.window_cost import BUS_BYTES_PER_S

ENGINE = "torchrec"
"""The engine of tables that the costs of a step are of."""
OVERHEAD = ("overhead.json", "overhead-xeon.json")
"""The answers, of one machine each, that the costs of a step are fitted to; the first is the likeliest."""
COMPARED = "compare.json"
"""The answer that has the costs of saves."""
OVER_LINKS = "network.json"
"""The answer that has rebuilds over links; without it, one machine's stand for them."""
KEPT = "cpr vanilla"
"""The method whose cost in each step is the most that CPR's may be: the repository's copy of it keeps dense
state in each step, as a job has to whose survivors are ended as well."""
CHANGED = 0.26
"""Part of the rows that half an hour changes (published: Check-N-Run)."""
MEASURED_RANKS = 4
CHOSEN_STEPS = {"ecemb": (0.0, 0.015, 0.0, 1e-6), "copies": (0.0, 0.005, 3e-7, 6e-7)}
"""`step_cost.TERMS` in seconds, where nothing was measured."""
End = Literal["value", "cheap", "dear"]


@dataclass(frozen=True)
class Input:
    """One number that the simulation stands on.

    Attributes:
        value: The likeliest one.
        unit: Of it.
        source: "measured", "fitted", "published", "derived" or "chosen", and where.
        low: The lower end of its range.
        high: The upper end.
        more_is_better: Whether the upper end is the cheap one.
        drawn: Values in the draws of a fit, which other inputs share; None if it is known by itself.
        end: "value", or the end of the range at which it and those others are; see `together`.
    """

    value: float
    unit: str
    source: str
    low: float
    high: float
    more_is_better: bool = False
    drawn: step_cost.Floats | None = field(default=None, compare=False, repr=False)
    end: End = "value"

    def at(self, end: End) -> Input:
        """The input at the "cheap" or the "dear" end of its range; else itself."""
        if self.drawn is not None:
            return replace(self, end=end)
        if end == "value":
            return self
        return replace(self, value=self.high if (end == "dear") != self.more_is_better else self.low)

    def row(self, name: str, profile: str) -> Row:
        """As a row of the answer."""
        labels = {"what": name, "marked": self.source, "job": profile}
        return Row("assumed", self.value, self.unit, self.low, self.high, 1, {**labels})


Inputs = Mapping[str, Input]


def inputs(profile: Profile, results: Path = RESULTS) -> dict[str, Input]:
    """Returns all of them for jobs of a profile: measured ones from the answers in a folder.

    What a file doesn't have, or where there is none, is chosen.
    """
    found = {
        "storage": Input(
            *(0.2, "GB/s", "of a host; derived: a save takes CPR's 5 minutes (recalled)"),
            *(0.2, 1.0, True),  # Llama 3's 2 TB/s for 2,048 hosts (recalled)
        ),
        "restart": Input(30.0, "s", "chosen: of all processes, imports and rendezvous among it", 5.0, 120.0),
        "replace a host": Input(120.0, "s", "chosen: a spare waits, or a host is found", 30.0, 900.0),
        "network": Input(12.5, "GB/s", "chosen: of a host, 10 to 400 Gbit/s", 1.25, 50.0, True),
        "round trip": Input(100.0, "us", "chosen: between hosts, 20 to 500", 20.0, 500.0),
        "idle network": Input(
            0.5, "of the time", "chosen: snapshots are sent in it, as GEMINI sends them", 0.25, 0.9, True
        ),
        "between durable saves": Input(
            24.0, "h", "chosen: at most, under what survives in memory", 6.0, 72.0, True
        ),
        "touched rows": Input(1.0, "times the profile's", f"chosen: {profile.rows_of}", *profile.rows_range),
        "Check-N-Run's interval": Input(
            0.5, "h", "published; its best one where that is shorter", 0.5, 0.5, True
        ),
        "Check-N-Run's volume": Input(1 / 6, "of full", "published: 1/17 to 1/6", 1 / 17, 1 / 6),
        "Check-N-Run's storage": Input(1 / 2.5, "of full", "published: 1/8 to 1/2.5", 1 / 8, 1 / 2.5),
        "rows by interval": Input(
            0.5, "power", "chosen: changed rows grow with it; 1 if none changes twice", 0.0, 0.8, True
        ),
        "CPR's PLS target": Input(0.1, "PLS", "published (recalled)", 0.02, 0.2, True),
        "encode": Input(0.1, "s/GB", "chosen: of a rank, for each parity block of a snapshot", 0.04, 0.2),
    }
    found |= _on_device() if profile.job.device == "cuda" else _on_processors(results)
    recovery = _rows(results / "recovery.json")
    added = {"metric": "added_recovery_s", "kind": "process"}  # a rebuild comes on top
    found["added to a restart"] = _measured(recovery, added, "s", Input(1.0, "s", "", 0.0, 2.0))
    rebuild = {"metric": "rebuild_over_wire", "code": "(4, 3)", "over": "same messages"}
    chosen = Input(0.45, "of the network", "", 0.3, 0.9, True)
    found["rebuild"] = _over_links(_rows(results / OVER_LINKS)) or _measured(
        recovery, rebuild, "of the network", chosen
    )
    return found


def _over_links(rows: Sequence[Mapping[str, Any]]) -> Input | None:
    """The part of a link's rate that a rebuild reaches where the link limits it; None if not measured."""
    parts = [row for row in rows if row["metric"] == "rebuild_over_link"]
    if not parts:
        return None
    most = max(parts, key=lambda row: row["value"])
    low, value, high = (min(1.0, most[key]) for key in ("low", "value", "high"))
    return Input(value, "of the network", f"measured: {OVER_LINKS}, {most['link']}", low, high, True)


def _on_device() -> dict[str, Input]:
    """What tables on GPUs cost: nothing of this was measured on a device."""
    copy = Input(1e9 / BUS_BYTES_PER_S, "s/GB of a rank", "chosen: PCIe, 10 to 50 GB/s", 0.02, 0.1)
    back_s = 1e9 / FIRST_READ_BYTES_PER_S + 1e9 / COPY_BYTES_PER_S
    source = "derived: first reads of memory by one thread, or as fast as PCIe"
    return {
        "copy": copy,
        "snapshots' copy": copy,
        "Check-N-Run's copy": replace(
            copy, value=CHANGED * copy.value, low=CHANGED * copy.low, high=CHANGED * copy.high
        ),
        "put back": Input(back_s, "s/GB of a rank", source, copy.low, back_s),
        "CPR: step": Input(0.0, "of a step", "published: its servers do nothing between saves", 0.0, 0.0),
        "Check-N-Run: step": Input(0.005, "of a step", "published: below 1 %", 0.0, 0.01),
        "ecemb: GPU host": Input(
            1.0, "times `ecemb plan`", "chosen: its cost of a window was not measured on a device", 0.5, 2.0
        ),
    }


def _on_processors(results: Path) -> dict[str, Input]:
    """What tables in host memory cost, whose training keeps all processors busy."""
    compared = _rows(results / COMPARED)

    def of(metric: str, method: str, scale: float, unit: str, otherwise: Input) -> Input:
        wanted = {"metric": metric, "method": method}
        return _measured(compared, wanted, unit, otherwise, COMPARED, scale)

    per_gb, unit = "save_stall_cpu_s_per_gb", "s/GB of a rank"
    copy = of(per_gb, "full dcp async", 1.0, unit, Input(0.4, unit, "", 0.2, 0.8))
    sent = of(per_gb, "snapshots x2", 1.0, unit, Input(0.8, unit, "", 0.4, 1.2))
    source = f"measured: {COMPARED}, a copy; at most a copy that is sent at once"
    kept = of("step_cpu_pct", KEPT, 0.01, "of a step", Input(0.0, "of a step", "", 0.0, 0.0))
    published = "published: its servers do nothing between saves; at most as measured with dense state kept"
    tracked = Input(0.005, "of a step", "", 0.0, 0.01)
    chosen = Input(CHANGED * copy.value, unit, "", CHANGED * copy.low, CHANGED * copy.high)
    found = {
        "copy": copy,
        "snapshots' copy": replace(copy, source=source, high=max(copy.high, sent.high)),
        "Check-N-Run's copy": of(per_gb, "check-n-run intermittent", 1.0, unit, chosen),
        "put back": replace(copy, source=f"as a copy: {copy.source}"),
        "CPR: step": Input(0.0, "of a step", published, 0.0, kept.high),
        "Check-N-Run: step": of("step_cpu_pct", "check-n-run intermittent", 0.01, "of a step", tracked),
        **_step_costs([(name, _rows(results / name)) for name in OVERHEAD]),
    }
    by_ranks = _by_ranks(_rows(results / "agreement.json"), found["ecemb: commit"].value)
    source = "derived: of the window before, beside half of its own; while processors are busy, all of it"
    found["undecided"] = Input(1.0, "windows", source, 0.0, 1.0)
    source = "derived: as many more as rounds of messages by ranks, or none more"
    found["commit by ranks"] = by_ranks or Input(1.0, "of log2", source, 0.0, 1.0)
    return found


def _step_costs(answers: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> dict[str, Input]:
    """What protection adds to a step, as `bench.questions.simulate.step_cost` has it.

    The likeliest is that of the first machine. The range is of the draws of all machines together, so that it
    is as wide as machines differ.
    """
    found: dict[str, Input] = {}
    for family, method in (("ecemb", "protected"), ("copies", "replication")):
        measured = {name: step_cost.points(rows, method, ENGINE) for name, rows in answers}
        fits = {name: fit for name, points in measured.items() if (fit := step_cost.fit(points))}
        for term, chosen in zip(step_cost.TERMS, CHOSEN_STEPS[family], strict=True):
            if not fits:
                found[f"{family}: {term}"] = Input(
                    chosen, "s", "chosen: nothing was measured", 0.0, 2 * chosen
                )
                continue
            first, drawn = (
                next(iter(fits.values()))[term],
                np.concatenate([one[term].drawn for one in fits.values()]),
            )
            low, high = (float(np.percentile(drawn, at)) for at in step_cost.ENDS_PCT.values())
            source = f"fitted: {ENGINE} in {' and '.join(fits)}, 2 cores each"
            found[f"{family}: {term}"] = Input(
                first.value, "s", source, min(low, first.value), max(high, first.value), drawn=drawn
            )
        if family == "ecemb":
            powers = [step_cost.shrinking(points) for points in measured.values() if points] or [0.0]
            found["rows by window"] = Input(
                powers[0], "power", f"measured: {OVERHEAD[0]}", min(powers), max(*powers, powers[0])
            )
    return found


def _by_ranks(rows: Sequence[Mapping[str, Any]], commit_s: float) -> Input | None:
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
    return Input(more("value", "value"), "of log2", source, more("low", "high"), more("high", "low"))


def together(weights: Sequence[tuple[Input, float]]) -> float:
    """The sum of inputs of one fit, each with its weight; at an end, it is that of the sum's own interval."""
    likeliest = sum(one.value * weight for one, weight in weights)
    end = weights[0][0].end
    drawn = [one.drawn * weight for one, weight in weights if one.drawn is not None]
    if end == "value" or not drawn:
        return likeliest
    found = float(np.percentile(sum(drawn), step_cost.ENDS_PCT[end]))
    return min(found, likeliest) if end == "cheap" else max(found, likeliest)


def _rows(path: Path) -> list[Mapping[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []


def _measured(
    rows: Sequence[Mapping[str, Any]],
    wanted: Mapping[str, Any],
    unit: str,
    otherwise: Input,
    name: str = "recovery.json",
    scale: float = 1.0,
) -> Input:
    """The row with these labels that is known best; what noise makes negative counts as 0."""
    found = [row for row in rows if all(row.get(label) == value for label, value in wanted.items())]
    if not found:
        return replace(otherwise, unit=unit, source=f"chosen: {name} doesn't say")
    best = min(found, key=lambda row: row["high"] - row["low"])
    low, value, high = (max(0.0, best[key] * scale) for key in ("low", "value", "high"))
    source = (
        f"measured: {name}, {best['engine']}, 2 cores" if "engine" in best else f"measured: {name}, 2 cores"
    )
    return replace(otherwise, value=value, unit=unit, source=source, low=low, high=high)
