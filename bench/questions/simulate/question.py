"""What should one use, on 16 to 4096 hosts, and which code and placement are enough?

An event simulation: faults of hosts and processes, drawn from a model or, with `--trace FILE`, replayed from
real clusters (InfiniteHBD's JSON, or LANL's CSV with `--system N,M` or `--system all`), strike a training
under each way of surviving. Who keeps whose parity is ecemb's own placement. No cluster was used: costs are
measured on one machine, published, or chosen, and `assumed` says which is which. Where closed formulas hold,
the simulation must be within 2 % of them, or there is no answer.

Faults: 4.2e-3 lost hosts per host and day (published: InfiniteHBD), three times as many dead processes
(published: DLRover), and in one of nine times several hosts at once, in sizes as in that trace.

- `simulated_over_formula`: by Young, Daly, Maeng et al., Kokolis et al. (its E[ETTR] as quoted in public
  code, not checked against the paper), and the planner's chance of loss.
- `ettr`: effective training-time ratio, what was trained over the time it took: the mean of several months.
  Faults "exponential"; "gamma 0.5": the same rate in swarms. In brackets: the worst and the best month.
- `ettr_by_hosts`, `ettr_by_mtbf`: the same; in brackets with all costs at the upper and at the lower end of
  their intervals. The latter is of 128 hosts, by hours between faults of the job.
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
- `best_ettr`: the picture; the method with the highest `ettr` on 128 hosts, and how far it is ahead of the
  best that isn't of its kind. All methods meet the same faults.
- `cells_ahead`: cells of that map in which a kind is ahead for certain: no other kind reaches it, wherever
  the costs are in their intervals; else `cannot tell`. `cells_first`: in which it is ahead where all costs
  have their likeliest values; `cells_possible`: in which it may be; `cells_second`: in which it is then the
  best that isn't of the winner's kind; `most_behind`: how far it is then behind, at most. By panel; `method`
  is the kind. CPR loses no samples where its controller chooses full recovery.
  The panels "all, if ..." are of the same map with one input that stands elsewhere: CPR's steps cost
  nothing, as its paper has it, where the repository's copy of CPR keeps dense state in each step, since
  torchrun ends survivors as well; snapshots are copied at the speed that `compare` measures of a save's copy,
  in place of a chosen one.
- `cells_turned`: cells of the map where another kind is ahead if an input is halved or doubled;
  `cells_to_ecemb`: where ecemb is ahead then. At the likeliest values, with fewer faults.
- `hours_to_failure`: what a percentage of the failures of a job on 16 hosts come within, since the start or
  the failure before: by traces, of hosts alone and with dead processes as in the model; and of Check-N-Run's
  jobs (its figure 3, as recalled), which fail of all causes.
- `trace_faults`: that the trace has; `skipped` of its lines or events could not be read.
- `assumed`: the inputs of the simulation, and their sources; in brackets the interval of 95 %, or the range
  that is published. The cost of a step has a part per step, one per commit, one per touched row, and one per
  touched row and block of parity, fitted to the answer to `overhead` with TorchRec's tables, on 4 ranks. They
  are known together better than each by itself: at the ends of costs, above, their sum is at those of its
  interval. With more ranks, a commit costs as much, or more with the logarithm of their number. In a window
  fewer rows are touched, as in the setting in which they come again least. Live copies are sent in each step:
  a rank that is lost within a window of copies alone would go back alone; with the transactions that prevent
  it they are ecemb's `Code(2, 1)`. Copies to memory are of a rank, in processor time, from the stalls of
  saves in `compare`. What is added to a restart is rather too much: 256 MiB of lost memory are rebuilt in it.
  With `--network GBIT,US` steps wait until status, bytes and vote have crossed such a network, with "auto"
  for the status alone; a rebuild reaches the part of a link's rate that `network` measures. Without it, costs
  of one machine stand for messages.
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
from bench.questions.simulate.methods import FREE, Cost, costs, measured, methods, rows_of
from bench.questions.simulate.picture import CANNOT_TELL, LOOKS, kind
from bench.questions.simulate.step_cost import TERMS
from bench.questions.simulate.training import Method, Outcome, train
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
MAP_HOSTS = 128
MAP_FAULTS, QUICK_MAP_FAULTS = 1000, 30
ENDS = ("value", "cheap", "dear")
"""Of the costs' intervals."""
TURNED: dict[str, tuple[str, ...]] = {
    "ecemb's cost of a step": tuple(f"ecemb: {name}" for name in TERMS),
    "copies' cost of a step": tuple(f"copies: {name}" for name in TERMS),
    "Check-N-Run's volume and storage": ("Check-N-Run's volume", "Check-N-Run's storage"),
    "storage": ("storage",),
    "copy to memory": ("copy", "snapshots' copy", "Check-N-Run's copy"),
    "what rivals do in each step": ("CPR: step", "Check-N-Run: step"),
    "CPR's PLS target": ("CPR's PLS target",),
    "network": (),
    "restart": (),
    "touched rows": (),
    "length of a step": (),
}
"""Inputs that are halved and doubled -> the costs that they are."""
ON_JOB = {
    "network": "network_bytes_per_s",
    "restart": "restart_s",
    "touched rows": "batch",
    "length of a step": "step_s",
}
"""Inputs of the job -> its attribute."""
REPLACED: dict[str, dict[str, str]] = {
    "if CPR does nothing between saves": {"CPR: step": FREE},
    "if snapshots are copied as fast as measured": {"snapshots' copy": "copy"},
}
"""Panels of the map beside "all" -> cost -> the cost that it has there."""
TURNED_FAULTS, QUICK_TURNED_FAULTS = 200, 5
JOB = Job(
    hosts=MAP_HOSTS,
    ranks_per_host=8,
    table_bytes=MAP_HOSTS * 64e9,
    batch=1e4,
    features=1,
    skew=0.0,
    row_bytes=516,
    step_s=0.25,
    network_bytes_per_s=12.5e9,
)
"""A host has 64 GB of tables and a network of 100 Gbit/s."""


def run(arguments: Arguments) -> list[Row]:
    """Answers the question.

    Raises:
        BadFile: `--trace` is no trace that is known, or has too few nodes.
        WrongResult: The simulation is too far from a formula.
    """
    quick = arguments.quick
    traces = [trace for path in arguments.traces for trace in read(path, arguments.system)]
    base = JOB if arguments.network is None else on_network(JOB, *arguments.network)
    all_costs = costs(arguments.results, over_links=arguments.network is not None)
    job = measured(base, all_costs)
    rows = checks(QUICK_FAULTS if quick else FAULTS, arguments.seed, 5 * CLOSE if quick else CLOSE)
    rows += trainings(job, all_costs, quick=quick, seed=arguments.seed)
    rows += within_costs(job, all_costs, quick=quick, seed=arguments.seed)
    rows += on_traces(job, all_costs, traces, quick=quick, seed=arguments.seed)
    rows += hours_to_failure(job, traces, QUICK_MONTHS if quick else MONTHS, arguments.seed)
    rows += losses(job, QUICK_SIZES if quick else SIZES)
    rows += map(said, traces)
    for trace in traces:
        rows += losses_of_trace(job, trace, QUICK_REPLAYED_H if quick else REPLAYED_H, arguments.seed)
    faults = QUICK_MAP_FAULTS if quick else MAP_FAULTS
    cells = list(best(job, all_costs, faults, arguments.seed))
    others = replaced(job, all_costs, faults, arguments.seed)
    tried = turned(job, all_costs, QUICK_TURNED_FAULTS if quick else TURNED_FAULTS, arguments.seed)
    return [*rows, *cells, *by_metric([*places([*cells, *others]), *tried]), *rows_of(all_costs, job)]


def on_network(job: Job, rate_gbit: float, round_trip_us: float) -> Job:
    """The job, whose hosts have a network of this rate and round trip."""
    return replace(job, network_bytes_per_s=rate_gbit * 1e9 / 8, round_trip_s=round_trip_us / 1e6)


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


def trainings(base: Job, all_costs: Mapping[str, Cost], *, quick: bool, seed: int) -> list[Row]:
    """ETTR, steps run again and lost samples of all methods, by number of hosts and kind of faults."""
    months = QUICK_MONTHS if quick else MONTHS
    rows: list[Row] = []
    for hosts in QUICK_SIZES if quick else SIZES:
        job = sized(base, hosts)
        for arrivals in list(SHAPES) if hosts == SHAPED else ["exponential"]:
            rngs = [np.random.default_rng((seed + month, hosts)) for month in range(months)]
            given = [drawn(job, MONTH_H, rng, SHAPES[arrivals]) for rng in rngs]
            for method in methods(job, all_costs):
                outcomes = [train(method, faults, MONTH_H, hosts=hosts, ranks=job.ranks) for faults in given]
                labels: dict[str, Label] = {"hosts": hosts, "faults": arrivals, "method": method.name}
                rows += _rows(method, job, outcomes, labels)
    return by_metric(rows)


def within_costs(base: Job, all_costs: Mapping[str, Cost], *, quick: bool, seed: int) -> list[Row]:
    """ETTR by number of hosts, and by MTBF, with the costs at both ends of their intervals."""
    months = QUICK_MONTHS if quick else MONTHS
    jobs: list[tuple[str, Label, Job, float, int]] = [
        ("ettr_by_hosts", hosts, sized(base, hosts), MONTH_H, months)
        for hosts in (QUICK_SIZES if quick else SIZES)
    ]
    faults = QUICK_MAP_FAULTS if quick else MAP_FAULTS
    jobs += [("ettr_by_mtbf", hours, replace(base, mtbf_h=hours), faults * hours, 1) for hours in MTBF_H]
    rows: list[Row] = []
    for metric, size, job, hours, draws in jobs:
        rngs = [np.random.default_rng((seed + draw, job.hosts)) for draw in range(draws)]
        given = [drawn(job, hours, rng) for rng in rngs]
        found: dict[str, list[float]] = {}
        for end in ENDS:
            for method in methods(job, {name: one.at(end) for name, one in all_costs.items()}):
                ettrs = [train(method, one, hours, hosts=job.hosts, ranks=job.ranks).ettr for one in given]
                found.setdefault(method.name, []).append(mean(ettrs))
        label = "hosts" if metric == "ettr_by_hosts" else "mtbf_h"
        for name, ends in found.items():
            labels: dict[str, Label] = {label: size, "method": name}
            rows.append(Row(metric, ends[0], "ratio", min(ends), max(ends), draws, labels))
    return by_metric(rows)


def on_traces(
    base: Job, all_costs: Mapping[str, Cost], traces: Sequence[Trace], *, quick: bool, seed: int
) -> list[Row]:
    """The same on the faults of traces, each for a job of as many hosts as one can have."""
    rows: list[Row] = []
    for trace in traces:
        hosts = max(size for size in SIZES if size <= min(SHAPED, trace.nodes))
        job = at_rate(trace, sized(base, hosts))
        given: list[list[Fault]] = []
        for month in range(QUICK_MONTHS if quick else MONTHS):
            rng = np.random.default_rng((seed + month, hosts))
            died = drawn(replace(job, mtbf_h=1 / job.process_faults_per_h, host_share=0), trace.hours, rng)
            lost = replayed(trace, job, rng, by_rack=False)
            given.append(sorted([*died, *lost], key=lambda fault: fault.hour))
        for method in methods(job, all_costs):
            outcomes = [train(method, faults, trace.hours, hosts=hosts, ranks=job.ranks) for faults in given]
            labels: dict[str, Label] = {"trace": trace.name, "hosts": hosts, "method": method.name}
            rows += _rows(method, job, outcomes, labels, "_on_trace")
    return by_metric(rows)


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


def best(
    base: Job, all_costs: Mapping[str, Cost], faults: int, seed: int, ends: Sequence[str] = ENDS
) -> Iterator[Row]:
    """The map: the highest ETTR by MTBF and size, of all methods and of those that lose no samples.

    A method's ETTR goes from where all costs are at the dear end of their intervals to where all are at the
    cheap end. The best is ahead for certain if no method of another kind reaches it.
    """
    by_end = [{name: one.at(end) for name, one in all_costs.items()} for end in ends]
    for mtbf_h in MTBF_H:
        job = replace(base, mtbf_h=mtbf_h)
        hours = faults * mtbf_h
        struck = drawn(job, hours, np.random.default_rng(seed))
        for table_tb in TABLES_TB:
            job = replace(job, table_bytes=table_tb * 1e12)
            ettrs: dict[str, list[float]] = {}
            loses: set[str] = set()
            for costs_ in by_end:
                for method in methods(job, costs_):
                    outcome = train(method, struck, hours, hosts=job.hosts, ranks=job.ranks)
                    ettrs.setdefault(method.name, []).append(outcome.ettr)
                    loses |= {method.name} if method.back == "failed" else set()
            for among in ("all", "that lose no samples"):
                chosen = {name: one for name, one in ettrs.items() if among == "all" or name not in loses}
                yield _cell(chosen, {"among": among, "mtbf_h": mtbf_h, "table_tb": table_tb})


def _cell(ettrs: Mapping[str, Sequence[float]], labels: dict[str, Label]) -> Row:
    ranked = sorted(ettrs, key=lambda name: -ettrs[name][0])
    winner = ranked[0]
    low, high = min(ettrs[winner]), max(ettrs[winner])
    others = [name for name in ranked if kind(name) != kind(winner)]
    near = list(dict.fromkeys(kind(name) for name in others if max(ettrs[name]) >= low))
    labels |= {
        "method": winner,
        "second": others[0],
        "ahead": ettrs[winner][0] - ettrs[others[0]][0],
        "verdict": CANNOT_TELL if near else kind(winner),
        "candidates": ", ".join([kind(winner), *near]),
    }
    return Row("best_ettr", ettrs[winner][0], "ratio", low, high, 1, labels)


def replaced(base: Job, all_costs: Mapping[str, Cost], faults: int, seed: int) -> Iterator[Row]:
    """The cells of the map of all methods, once for each of `REPLACED`."""
    for panel, costs_ in REPLACED.items():
        changed = {**all_costs, **{name: all_costs[other] for name, other in costs_.items()}}
        for cell in best(base, changed, faults, seed):
            if cell.labels["among"] == "all":
                yield replace(cell, labels={**cell.labels, "among": f"all, {panel}"})


def turned(base: Job, all_costs: Mapping[str, Cost], faults: int, seed: int) -> Iterator[Row]:
    """What would turn the map: cells whose best kind is another, if one input is halved or doubled."""
    before = list(best(base, all_costs, faults, seed, ENDS[:1]))
    for name, factor in ((name, factor) for name in TURNED for factor in (0.5, 2.0)):
        job = base
        changed = dict(all_costs)
        if name in ON_JOB:
            job = replace(job, **{ON_JOB[name]: getattr(job, ON_JOB[name]) * factor})
        for cost in TURNED[name]:
            changed[cost] = replace(changed[cost], value=changed[cost].value * factor)
        after = list(best(job, changed, faults, seed, ENDS[:1]))
        for among in ("all", "that lose no samples"):
            pairs = [
                (kind(str(old.labels["method"])), kind(str(new.labels["method"])))
                for old, new in zip(before, after, strict=True)
                if old.labels["among"] == among
            ]
            labels: dict[str, Label] = {"among": among, "input": name, "times": factor}
            yield once("cells_turned", "cells", sum(old != new for old, new in pairs), **labels)
            yield once("cells_to_ecemb", "cells", sum(new == "ecemb" for _, new in pairs), **labels)


def places(cells: Sequence[Row]) -> Iterator[Row]:
    """In how many cells of the map each kind is ahead for certain, first or second, by panel."""
    panels: dict[Label, list[Row]] = {}
    for cell in cells:
        panels.setdefault(cell.labels["among"], []).append(cell)
    for among, panel in panels.items():
        for name in (*LOOKS, CANNOT_TELL):
            certain = sum(row.labels["verdict"] == name for row in panel)
            yield once("cells_ahead", "cells", certain, among=among, method=name)
        for name in LOOKS:
            labels = {"among": among, "method": name}
            behind = [row.labels["ahead"] for row in panel if kind(str(row.labels["second"])) == name]
            first = sum(kind(str(row.labels["method"])) == name for row in panel)
            possible = sum(name in str(row.labels["candidates"]).split(", ") for row in panel)
            yield once("cells_first", "cells", first, **labels)
            yield once("cells_possible", "cells", possible, **labels)
            yield once("cells_second", "cells", len(behind), **labels)
            if behind:
                yield once("most_behind", "ratio", max(map(float, behind)), **labels)
