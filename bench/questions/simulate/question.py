"""What should one use, on 16 to 4096 hosts, and which code and placement are enough?

An event simulation: faults of hosts and processes, drawn from a model or, with `--trace FILE`, replayed from
real clusters (InfiniteHBD's JSON, or LANL's CSV with `--system N,M` or `--system all`), strike a training
under each way of surviving. Who keeps whose parity is ecemb's own placement. No cluster was used: inputs are
measured on one machine, published, derived or chosen, and `assumed` says which, with the range of each.
Where closed formulas hold, the simulation must be within 2 % of them, or there is no answer.

`job` is a profile of jobs: tables in host memory whose training keeps all processors busy, at 0.25 s a step,
and two of tables on GPUs, whose costs are those of `ecemb plan`: nothing of them was measured on a device.

Faults: 4.2e-3 lost hosts per host and day (published: InfiniteHBD), three times as many dead processes
(published: DLRover), and in one of nine times several hosts at once, in sizes as in that trace.

- `simulated_over_formula`: by Young, Daly, Maeng et al., Kokolis et al. (its E[ETTR] as quoted in public
  code, not checked against the paper), and the planner's chance of loss.
- `ettr`: effective training-time ratio, what was trained over the time it took: the mean of several months.
  Faults "exponential"; "gamma 0.5": the same rate in swarms. In brackets: the worst and the best month.
- `ettr_by_hosts`, `ettr_by_mtbf`: the same; in brackets the least and the most with one group of inputs at
  either end of its range. The latter is of 128 hosts, by hours between faults of the job. `ahead_by_hosts`,
  `ahead_by_mtbf`: the method that is ahead, as in the map below.
- `steps_run_again`: per fault. `samples_lost_pct`: what failed servers forgot, CPR's PLS.
- `ettr_on_trace`, `steps_run_again_on_trace`, `samples_lost_on_trace_pct`: the same for the hosts that a
  trace loses, with processes that die as many times more often as in the model. Each method saves at its own
  best interval for the trace's rate of faults. In brackets: the worst and the best of several draws of hosts.
- `data_lost_pct`: the chance that a month loses what then only the durable tier still has, by the planner's
  formula. `data_lost_on_trace_pct`: counted over replays of the trace on hosts drawn from it. Over ranks,
  parity may be on the host of its rows; over hosts is what `protect` does; over racks is the same when
  ranks were given to hosts so that racks take turns. `strike` says where hosts are that fail together:
  anywhere; or by rack: in one rack of 8, and those of a larger burst in the next one too. The trace does not
  record it.
- `best_ettr`: the map, on 128 hosts; the method with the highest `ettr` at the likeliest inputs, and how far
  it is ahead of the best that isn't of its kind. All methods meet the same faults. `among`: all; those that
  lose no samples (CPR loses none where its controller chooses full recovery); of these, those that keep no
  second copy of the tables in memory. `verdict`: the kind of this method, if it is also ahead of each other
  kind where the inputs stand worst for it against that kind, over the whole range of each; else
  `cannot tell`. `candidates`: all kinds that may be ahead.
- `cells_ahead`: cells of the map in which a kind is ahead for certain, or `cannot tell`. `cells_first`: in
  which it is ahead at the likeliest inputs; `cells_possible`: in which it may be; `cells_second`: in which it
  is then the best that isn't of the winner's kind; `most_behind`: how far it is then behind, at most.
- `cells_turned`: cells of the map where another kind is ahead if one group of inputs stands at the cheap or
  at the dear end of its range, and all others are likeliest; `cells_to_ecemb`: where ecemb is ahead then.
- `hours_to_failure`: what a percentage of the failures of a job on 16 hosts come within, since the start or
  the failure before: by traces, of hosts alone and with dead processes as in the model; and of Check-N-Run's
  jobs (its figure 3, as recalled), which fail of all causes.
- `trace_faults`: that the trace has; `skipped` of its lines or events could not be read.
- `assumed`: the inputs of the simulation, and their sources; in brackets the range of each: the interval of
  95 % of what is measured, what is published, or what is plausible. CPR does nothing between saves, as its
  paper has it, and at most what the repository's copy of it takes. The cost of a step has a part per step,
  one per commit, one per touched row, and one per touched row and block of parity, fitted to the answers to
  `overhead` of two machines with TorchRec's tables, on 4 ranks. They are known together better than each by
  itself: their sum is at the ends of its own interval. With more ranks, a commit costs as much, or more with
  the logarithm of their number. In a window fewer rows are touched, as in the setting in which they come
  again least. Live copies are sent in each step: a rank that is lost within a window of copies alone would
  go back alone; with the transactions that prevent it they are ecemb's `Code(2, 1)`. Copies to memory are of
  a rank, in processor time, from the stalls of saves in `compare`. Increments are derived from what IncrCP
  and LowDiff describe, and were not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean

import numpy as np

from bench.harness.result import Arguments, Label, Row, by_metric, once
from bench.questions.simulate.checks import CLOSE, checks
from bench.questions.simulate.faults import (
    TOGETHER_H,
    Fault,
    Trace,
    drawn,
    episodes,
    read,
    replayed,
    sets_by_size,
)
from bench.questions.simulate.inputs import Inputs, inputs
from bench.questions.simulate.methods import KINDS, as_given, kind, methods
from bench.questions.simulate.profiles import PROFILES, Profile
from bench.questions.simulate.training import Method, Outcome, train
from bench.questions.simulate.verdicts import CANNOT_TELL, PANELS, Case, Verdict, judge, leader
from ecemb.coding.code import Code
from ecemb.errors import PlacementError
from ecemb.tools.cost import MONTH_H, Odds, estimate, host_recovery_s, placed
from ecemb.tools.job import Job

CODES = (Code(2, 1), Code(4, 3), Code(8, 7), Code(3, 1), Code(6, 4), Code(10, 8))
SIZES, QUICK_SIZES = (16, 64, 256, 1024, 4096), (16, 64)
MONTHS, QUICK_MONTHS = 10, 2
FAULTS, QUICK_FAULTS = 40_000, 2000
REPLAYED_H, QUICK_REPLAYED_H = 4e6, 1.6e5
"""Of a trace, again and again on other hosts."""
TRACE_SIZES = (64, 400)
FAILING_HOSTS = 16
FAILED_WITHIN_H = {90: 13.5, 99: 53.9}
"""% of the failures of Check-N-Run's jobs -> hours that they come within (its figure 3; recalled)."""
RACK_HOSTS = 8
SHAPES = {"exponential": 1.0, "gamma 0.5": 0.5}
SHAPED = 256
"""Hosts of the job whose faults also come in swarms, and, as many as fit, from the trace."""
MTBF_H = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
TABLES_TB = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MAP_FAULTS, QUICK_MAP_FAULTS = 300, 10
COLUMN_MONTHS = 3
"""That are simulated for each number of hosts, at each end of each input."""
QUICK_MTBF_H, QUICK_TABLES_TB = MTBF_H[1::3], TABLES_TB[1::3]


def run(arguments: Arguments) -> list[Row]:
    """Answers the question.

    Raises:
        BadFile: `--trace` is no trace that is known, or has too few nodes.
        WrongResult: The simulation is too far from a formula.
    """
    quick, seed = arguments.quick, arguments.seed
    traces = [trace for path in arguments.traces for trace in read(path, arguments.system)]
    rows = checks(QUICK_FAULTS if quick else FAULTS, seed, 5 * CLOSE if quick else CLOSE)
    by_profile = {profile: inputs(profile, arguments.results) for profile in PROFILES}
    for profile, given in by_profile.items():
        rows += trainings(profile, given, quick=quick, seed=seed)
        rows += on_traces(profile, given, traces, quick=quick, seed=seed)
        rows += in_columns(profile, given, quick=quick, seed=seed)
    (first, given), *_ = by_profile.items()
    job = as_given(first.job, given)
    rows += hours_to_failure(job, traces, QUICK_MONTHS if quick else MONTHS, seed)
    rows += losses(job, QUICK_SIZES if quick else SIZES)
    rows += map(said, traces)
    for trace in traces:
        rows += losses_of_trace(job, trace, QUICK_REPLAYED_H if quick else REPLAYED_H, seed)
    for profile, given in by_profile.items():
        rows += mapped(profile, given, quick=quick, seed=seed)
        rows += assumed(profile, given)
    return by_metric(rows)


def said(trace: Trace) -> Row:
    """What a trace has."""
    days = round(trace.hours / 24, 1)
    return once(
        "trace_faults",
        "faults",
        len(trace.losses),
        trace=trace.name,
        nodes=trace.nodes,
        days=days,
        skipped=trace.skipped,
    )


def sized(job: Job, hosts: int) -> Job:
    """The job on this many hosts: models grow with their hosts."""
    return replace(job, hosts=hosts, table_bytes=hosts * job.table_bytes / job.hosts)


def trainings(profile: Profile, given: Inputs, *, quick: bool, seed: int) -> Iterator[Row]:
    """ETTR, steps run again and lost samples of all methods, by number of hosts and kind of faults."""
    months = QUICK_MONTHS if quick else MONTHS
    for hosts in QUICK_SIZES if quick else SIZES:
        job = sized(profile.job, hosts)
        for arrivals in list(SHAPES) if hosts == SHAPED else ["exponential"]:
            rngs = [np.random.default_rng((seed + month, hosts)) for month in range(months)]
            struck = [drawn(job, MONTH_H, rng, SHAPES[arrivals]) for rng in rngs]
            for method in methods(job, given):
                outcomes = [train(method, faults, MONTH_H, hosts=hosts, ranks=job.ranks) for faults in struck]
                labels: dict[str, Label] = {"job": profile.name, "hosts": hosts, "faults": arrivals}
                yield from _rows(method, job, outcomes, labels | {"method": method.name})


def in_columns(profile: Profile, given: Inputs, *, quick: bool, seed: int) -> Iterator[Row]:
    """ETTR by number of hosts, and by MTBF, and who is ahead, over the ranges of inputs."""
    months, faults = (QUICK_MONTHS, QUICK_MAP_FAULTS) if quick else (COLUMN_MONTHS, MAP_FAULTS)
    cases: list[tuple[str, Label, Job, float, int]] = [
        ("hosts", hosts, sized(profile.job, hosts), MONTH_H, months)
        for hosts in (QUICK_SIZES if quick else SIZES)
    ]
    cases += [
        ("mtbf_h", hours, replace(profile.job, mtbf_h=hours), faults * hours, 1)
        for hours in (QUICK_MTBF_H if quick else MTBF_H)
    ]
    for label, size, job, hours, draws in cases:
        rngs = [np.random.default_rng((seed + draw, job.hosts)) for draw in range(draws)]
        verdict = judge(Case(job, given, [drawn(job, hours, rng) for rng in rngs], hours))
        labels: dict[str, Label] = {"job": profile.name, label: size}
        on = label.removesuffix("_h")
        for name, ettr in verdict.ettrs.items():
            low, high = verdict.ranges[name]
            yield Row(f"ettr_by_{on}", ettr, "ratio", low, high, draws, labels | {"method": name})
        for among in PANELS:
            yield _ahead(f"ahead_by_{on}", verdict, among, labels)


def on_traces(
    profile: Profile, given: Inputs, traces: Sequence[Trace], *, quick: bool, seed: int
) -> Iterator[Row]:
    """The same on the faults of traces, each for a job of as many hosts as one can have."""
    for trace in traces:
        hosts = max(size for size in SIZES if size <= min(SHAPED, trace.nodes))
        job = at_rate(trace, sized(profile.job, hosts))
        struck: list[list[Fault]] = []
        for month in range(QUICK_MONTHS if quick else MONTHS):
            rng = np.random.default_rng((seed + month, hosts))
            died = drawn(replace(job, mtbf_h=1 / job.process_faults_per_h, host_share=0), trace.hours, rng)
            lost = replayed(trace, job, rng, by_rack=False)
            struck.append(sorted([*died, *lost], key=lambda fault: fault.hour))
        for method in methods(job, given):
            outcomes = [train(method, faults, trace.hours, hosts=hosts, ranks=job.ranks) for faults in struck]
            labels: dict[str, Label] = {"job": profile.name, "trace": trace.name, "hosts": hosts}
            yield from _rows(method, job, outcomes, labels | {"method": method.name}, "_on_trace")


def hours_to_failure(base: Job, traces: Sequence[Trace], draws: int, seed: int) -> Iterator[Row]:
    """How soon jobs fail on the hosts of traces, beside Check-N-Run's. Failures within minutes are one."""
    if not traces:
        return
    labels: dict[str, Label] = {"source": "Check-N-Run (recalled)", "faults": "all"}
    for percent, hours in FAILED_WITHIN_H.items():
        yield once("hours_to_failure", "h", hours, percent=percent, **labels)
    for trace in traces:
        job = at_rate(trace, sized(base, FAILING_HOSTS))
        found: dict[str, list[float]] = {"hosts": [], "hosts and processes": []}
        for draw in range(draws):
            rng = np.random.default_rng((seed + draw, FAILING_HOSTS))
            lost = [fault.hour for fault in replayed(trace, job, rng, by_rack=False)]
            died = drawn(replace(job, mtbf_h=1 / job.process_faults_per_h, host_share=0), trace.hours, rng)
            for name, struck in (("hosts", lost), ("hosts and processes", [*lost, *(f.hour for f in died)])):
                gaps = np.diff([0.0, *sorted(struck)])
                found[name] += gaps[gaps > TOGETHER_H].tolist()
        for name, hours_ in found.items():
            if hours_:
                labels = {"source": trace.name, "faults": name}
                for percent in FAILED_WITHIN_H:
                    within = float(np.percentile(hours_, percent))
                    yield once("hours_to_failure", "h", within, percent=percent, **labels)


def at_rate(trace: Trace, job: Job) -> Job:
    """The job with the trace's rate of lost hosts, and as many dead processes to one of these as before."""
    lost_per_h = len(trace.losses) / trace.hours * job.hosts / trace.nodes
    host_share = job.host_faults_per_h / (job.host_faults_per_h + job.process_faults_per_h)
    return replace(job, mtbf_h=host_share / lost_per_h, host_share=host_share)


def _rows(
    method: Method, job: Job, outcomes: Sequence[Outcome], labels: dict[str, Label], on: str = ""
) -> Iterator[Row]:
    ettrs = [outcome.ettr for outcome in outcomes]
    yield Row(f"ettr{on}", mean(ettrs), "ratio", min(ettrs), max(ettrs), len(ettrs), {**labels})
    faults = sum(outcome.faults for outcome in outcomes)
    again_h = sum(outcome.again_h for outcome in outcomes)
    yield once(f"steps_run_again{on}", "steps", again_h * 3600 / job.step_s / max(1, faults), **labels)
    if method.back == "failed":
        lost = [100 * outcome.pls for outcome in outcomes]
        yield Row(f"samples_lost{on}_pct", mean(lost), "%", min(lost), max(lost), len(lost), {**labels})


def losses(base: Job, sizes: Sequence[int]) -> Iterator[Row]:
    """The chance of loss in a month by code, placement and number of hosts, by the planner's formula."""
    for strike, rack_hosts in (("anywhere", 0), ("by rack", RACK_HOSTS)):
        for hosts in sizes:
            job = replace(sized(base, hosts), rack_hosts=rack_hosts)
            for code in CODES:
                for spread in ("rank", "host", "rack") if rack_hosts else ("rank", "host"):
                    try:
                        chance = 100 * estimate(job, code, spread).loss_per_month
                    except PlacementError:
                        continue  # not enough racks for it
                    yield _loss("data_lost_pct", code, spread, hosts, strike, chance)


def losses_of_trace(base: Job, trace: Trace, replayed_h: float, seed: int) -> Iterator[Row]:
    """The same, counted over replays of a trace on hosts drawn from it, of as many hours together."""
    replays = math.ceil(replayed_h / trace.hours)
    for strike in ("anywhere", "by rack"):
        for hosts in [size for size in TRACE_SIZES if size <= trace.nodes] or [racks(trace.nodes)]:
            job = replace(sized(base, hosts), rack_hosts=RACK_HOSTS)
            window_h = max(host_recovery_s(job, code) for code in CODES) / 3600
            rng = np.random.default_rng((seed, hosts))
            groups: list[set[int]] = []
            for _ in range(replays):
                faults = replayed(trace, job, rng, by_rack=strike == "by rack")
                ordered = sorted((fault.hour, fault.hosts) for fault in faults)
                groups += [
                    {host for _, lost in group for host in lost} for group in episodes(ordered, window_h)
                ]
            sets = sets_by_size(groups)
            months = replays * trace.hours / MONTH_H
            for code in CODES:
                for spread in ("rank", "host", "rack"):
                    try:
                        placement, host_of = placed(job, code, spread)
                    except PlacementError:
                        continue
                    odds = Odds(placement, host_of, job.rack_hosts)
                    broken = sum(int(odds.broken(lost).sum()) for lost in sets.values())
                    chance = 100 * abs(math.expm1(-broken / months))
                    yield _loss(
                        "data_lost_on_trace_pct", code, spread, hosts, strike, chance, trace=trace.name
                    )


def racks(nodes: int) -> int:
    """The most nodes that are whole racks."""
    return nodes // RACK_HOSTS * RACK_HOSTS


def _loss(metric: str, code: Code, spread: str, hosts: int, strike: str, chance: float, **more: Label) -> Row:
    return once(
        metric,
        "%",
        chance,
        **more,
        strike=strike,
        hosts=hosts,
        spread=f"over {spread}s",
        code=f"({code.n}, {code.k})",
    )


def mapped(profile: Profile, given: Inputs, *, quick: bool, seed: int) -> Iterator[Row]:
    """The map of a profile, by MTBF and size, and what would turn it."""
    faults = QUICK_MAP_FAULTS if quick else MAP_FAULTS
    cells: list[tuple[dict[str, Label], Verdict]] = []
    for mtbf_h in QUICK_MTBF_H if quick else MTBF_H:
        job, hours = replace(profile.job, mtbf_h=mtbf_h), faults * mtbf_h
        struck = [drawn(job, hours, np.random.default_rng(seed))]
        for table_tb in QUICK_TABLES_TB if quick else TABLES_TB:
            case = Case(replace(job, table_bytes=table_tb * 1e12), given, struck, hours)
            labels: dict[str, Label] = {"job": profile.name, "mtbf_h": mtbf_h, "table_tb": table_tb}
            cells.append((labels, judge(case)))
    for among in PANELS:
        rows = [_ahead("best_ettr", verdict, among, labels) for labels, verdict in cells]
        yield from rows
        yield from places(rows, {"job": profile.name, "among": among})
        yield from turned([verdict for _, verdict in cells], profile.name, among)


def _ahead(metric: str, verdict: Verdict, among: str, labels: Mapping[str, Label]) -> Row:
    """The method that is ahead in a panel, with the verdict."""
    ettrs = verdict.panel(among)
    ranked = sorted(ettrs, key=lambda name: -ettrs[name])
    winner, second = ranked[0], next(name for name in ranked if kind(name) != kind(ranked[0]))
    said: dict[str, Label] = {
        "among": among,
        "method": winner,
        "second": second,
        "ahead": ettrs[winner] - ettrs[second],
        "verdict": verdict.certain[among],
        "candidates": ", ".join(verdict.candidates[among]),
    }
    return Row(metric, ettrs[winner], "ratio", *verdict.ranges[winner], 1, {**labels, **said})


def turned(verdicts: Sequence[Verdict], job: str, among: str) -> Iterator[Row]:
    """What would turn a panel: cells whose best kind is another, with one group of inputs at an end."""
    before = [leader(verdict.panel(among)) for verdict in verdicts]
    for group, end in verdicts[0].moved:
        after = [verdict.moved[group, end][among] for verdict in verdicts]
        labels: dict[str, Label] = {"job": job, "among": among, "input": group, "end": end}
        turns = sum(old != new for old, new in zip(before, after, strict=True))
        yield once("cells_turned", "cells", turns, **labels)
        yield once("cells_to_ecemb", "cells", sum(new == "ecemb" for new in after), **labels)


def places(panel: Sequence[Row], labels: Mapping[str, Label]) -> Iterator[Row]:
    """In how many cells of a panel each kind is ahead for certain, first or second."""
    for name in (*KINDS, CANNOT_TELL):
        certain = sum(row.labels["verdict"] == name for row in panel)
        yield once("cells_ahead", "cells", certain, **labels, method=name)
    for name in KINDS:
        of_kind = {**labels, "method": name}
        behind = [row.labels["ahead"] for row in panel if kind(str(row.labels["second"])) == name]
        first = sum(kind(str(row.labels["method"])) == name for row in panel)
        possible = sum(name in str(row.labels["candidates"]).split(", ") for row in panel)
        yield once("cells_first", "cells", first, **of_kind)
        yield once("cells_possible", "cells", possible, **of_kind)
        yield once("cells_second", "cells", len(behind), **of_kind)
        if behind:
            yield once("most_behind", "ratio", max(map(float, behind)), **of_kind)


def assumed(profile: Profile, given: Inputs) -> Iterator[Row]:
    """The numbers that the simulation of a profile stands on: its inputs, and the job's own."""
    job = profile.job
    own = (
        ("tables on a host", job.table_bytes / job.hosts / 1e9, "GB", "chosen; the map has others"),
        ("faults that take a host", job.host_share, "of all", "published: DLRover"),
        ("of those, several at once", job.burst_share, "of all", "derived from InfiniteHBD's trace"),
        ("step", job.step_s, "s", "chosen; other profiles have others"),
        ("rows of a step", job.changed_rows(), "different rows of a rank", profile.rows_of),
    )
    for name, one in given.items():
        yield one.row(name, profile.name)
    for name, value, unit, source in own:
        yield once("assumed", unit, value, what=name, marked=source, job=profile.name)
