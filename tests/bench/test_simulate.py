"""The simulation: against formulas, against CPR's emulation, traces of both forms, and the answer's rows."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.cpr.emulation import emulate
from baselines.cpr.job import CprJob
from baselines.cpr.overhead import Costs, Policy
from bench import __main__ as command
from bench.harness.result import Arguments, BadFile, Row, WrongResult
from bench.harness.result import command as line
from bench.questions.simulate import checks as simulate_checks
from bench.questions.simulate import methods as simulate_methods
from bench.questions.simulate import picture as simulate_picture
from bench.questions.simulate import question as simulate
from bench.questions.simulate import step_cost
from bench.questions.simulate.faults import Fault, drawn, episodes, read, replayed, sets_by_size
from bench.questions.simulate.training import Method, train
from ecemb.coding.code import Code
from ecemb.coding.placement import Placement
from ecemb.tools.cost import BURST_SIZES, Odds

JOB = replace(simulate.JOB, hosts=32, rack_hosts=4, mtbf_h=1.0)
CHOSEN = simulate_methods.costs(Path("no results"))
"""Costs where nothing was measured."""
FULL = Method("full", "all", 0.0, 0.5, 0.5, interval_h=2.0, save_h=0.25)


@pytest.mark.slow
def test_formulas_are_met() -> None:
    rows = simulate_checks.checks(20_000, 0)
    assert len(rows) == 9
    assert all(abs(row.value - 1) <= 0.02 for row in rows)


def test_a_simulation_that_is_off_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_checks, "daly", lambda *_: 1.0)
    with pytest.raises(WrongResult, match=r"Daly 2006.*times the formula"):
        simulate_checks.checks(500, 0, 0.3)


@pytest.mark.parametrize("recovery", ["full", "partial"])
def test_the_same_faults_give_what_cprs_emulation_gives(recovery: str) -> None:
    hours = np.cumsum(np.random.default_rng(3).exponential(7.0, 200)).tolist()
    job, policy = CprJob(100.0, 7.0, 8), Policy("full" if recovery == "full" else "partial", 3.0)
    emulated = emulate(Costs(0.25, 0.5), job, policy, hours, "clock", 0)
    method = replace(FULL, back="all" if recovery == "full" else "failed", interval_h=3.0)
    faults = [Fault(hour, (0,)) for hour in hours]
    outcome = train(method, faults, 100 * (1 + emulated.overhead), hosts=8, ranks=8)
    assert outcome.trained_h == pytest.approx(100)
    assert outcome.again_h == pytest.approx(emulated.trained_again_h)
    assert outcome.pls == pytest.approx(emulated.pls)
    assert outcome.faults == emulated.failures


def test_saves_count_when_they_are_written() -> None:
    method = replace(FULL, lag_h=1.0)
    early, late = (train(method, [Fault(hour)], hour + 0.5, hosts=1, ranks=1) for hour in (5.4, 5.6))
    assert (early.trained_h, late.trained_h) == (2.0, 4.0)
    assert train(method, [], 5.4, hosts=1, ranks=1).trained_h == pytest.approx(4.9)


def test_nobody_goes_back_until_memory_is_not_enough() -> None:
    odds = Odds(Placement.ranks(3, 2, 6), range(6))
    live = Method("live", "none", 0.0, 0.1, 0.5, odds=odds, durable_interval_h=4.0, durable_h=2.0)
    once = train(live, [Fault(10.0, (0,)), Fault(11.0)], 20.0, hosts=6, ranks=6)
    assert (once.trained_h, once.again_h, once.unrecoverable) == (pytest.approx(19.4), 0, 0)
    both = train(live, [Fault(10.0, (0,)), Fault(10.25, (1,))], 20.0, hosts=6, ranks=6)
    assert (both.trained_h, both.again_h, both.unrecoverable) == (pytest.approx(8 + 7.75), 2, 1)
    apart = train(live, [Fault(10.0, (0,)), Fault(10.25, (3,))], 20.0, hosts=6, ranks=6)
    assert apart.unrecoverable == 0


def test_drawn_faults_have_the_jobs_rates() -> None:
    for shape in (1.0, 0.5):
        faults = drawn(JOB, 20_000, np.random.default_rng(0), shape)
        assert len(faults) == pytest.approx(20_000, rel=0.05)
        lost = [fault.hosts for fault in faults if fault.hosts]
        assert len(lost) == pytest.approx(5_000, rel=0.06)
        several = [hosts for hosts in lost if len(hosts) > 1]
        assert len(several) == pytest.approx(5_000 * JOB.burst_share, rel=0.15)
        assert all(len({host // 4 for host in hosts}) == -(-len(hosts) // 4) for hosts in several)
        assert {len(hosts) for hosts in lost} == {1, *BURST_SIZES}


def infinitehbd(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    events = [
        {"node_id": node, "event_time": day, "event_type": kind, "fault_type": {}}
        for node, day, kind in (
            ("a", 1.0, "fault_start"),
            ("b", 1.0, "fault_start"),
            ("a", 2.0, "fault_end"),
            ("c", 5.0, "fault_start"),
            ("c", 9.0, "fault_end"),
        )
    ]
    path.write_text(json.dumps([*events, {"event_type": "fault_start"}, 7]))
    return path


LANL = """System,machine type,nodes,procstot,procsinnode,nodenum,nodenumz,node install,node prod,node decom,\
fru type,mem,cputype,memtype,num intercon,purpose,Prob Started,Prob Fixed,Down Time,Facilities,Hardware,\
Human Error,Network,Undetermined,Software,Same Event
2,cluster,49,6152,80,0,0,5-Apr,5-Jun,current,part,80,1,1,0,graphics.fe,6/21/2005 10:54,6/21/2005 11:00,6,,\
Graphics Accel Hdwr,,,,,No
20,cluster,256,1024,4,7,6,1-Jan,2-Jan,current,part,80,1,1,0,compute,06/21/05 10:00,06/21/05 11:00,60,,,,,,,No
20,cluster,256,1024,4,8,7,1-Jan,2-Jan,current,part,80,1,1,0,compute,06/22/05 10:00,,,,,,,,,
20,cluster,256,1024,4,8,7,1-Jan,2-Jan,current,part,80,1,1,0,compute,soon,,,,,,,,,
20,cluster,256,1024,4,8,,1-Jan,2-Jan,current,part,80,1,1,0,compute,06/22/05 10:00,,,,,,,,,
20,cluster,999999999999,1024,4,8,7,1-Jan,2-Jan,current,part,80,1,1,0,compute,06/22/05 10:00,,,,,,,,,
20,"short
"""
"""The columns are the published ones."""
EVENT = '[{{"event_time": {}, "event_type": "fault_start", "node_id": 1}}]'


def test_infinitehbds_form(tmp_path: Path) -> None:
    (trace,) = read(infinitehbd(tmp_path))
    assert (trace.nodes, trace.hours, trace.skipped) == (400, 216.0, 2)
    assert trace.losses == ((24.0, 0), (24.0, 1), (120.0, 2))


OTHERWISE = "\ufeff" + LANL.replace("Prob Started", "prob started (mm/dd/yy hh:mm)")


@pytest.mark.parametrize("text", [LANL, OTHERWISE], ids=["published", "otherwise"])
def test_lanls_form(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lanl.csv"
    path.write_text(text, encoding="utf-8")
    (trace,) = read(path)
    assert (trace.name, trace.nodes, trace.hours, trace.skipped) == ("lanl.csv, system 20", 256, 24.0, 4)
    assert trace.losses == ((0.0, 0), (24.0, 1))
    assert trace.system == "20"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2", "begins like JSON and isn't"),
        ("[]", "has no fault that can be read"),
        ("a,b\n1,2\n", "neither JSON nor LANL's CSV: it has no column System"),
        (LANL.splitlines()[0], "has no fault that can be read"),
        ("\n".join(LANL.splitlines()[:2]), "system 2 has 49 nodes and goes over 0 hours; a job that is"),
        ("[" * 100_000, "begins like JSON and isn't"),
        (EVENT.format("NaN"), r"can be read \(1 lines can't\)"),
        (EVENT.format("1e99"), r"can be read \(1 lines can't\)"),
    ],
)
def test_no_traces(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BadFile, match=said):
        read(path)


def test_a_trace_on_a_job(tmp_path: Path) -> None:
    (trace,) = read(infinitehbd(tmp_path))
    job = replace(JOB, hosts=400)
    faults = replayed(trace, job, np.random.default_rng(0), by_rack=False)
    assert [fault.hour for fault in faults] == [24.0, 24.0, 120.0]
    assert len({fault.hosts for fault in faults}) == 3
    together, alone = replayed(trace, job, np.random.default_rng(0), by_rack=True)
    assert len({host // 4 for host in together.hosts}) == 1 and len(together.hosts) == 2
    assert len(alone.hosts) == 1
    with pytest.raises(BadFile, match="400 nodes; a job of 401 hosts can't be"):
        replayed(trace, replace(JOB, hosts=401), np.random.default_rng(0), by_rack=False)


def test_lanls_systems(tmp_path: Path) -> None:
    path = tmp_path / "lanl.csv"
    path.write_text(LANL + LANL.splitlines()[1].replace("6/21/2005 10:54", "6/22/2005 10:54") + "\n")
    assert [trace.system for trace in read(path)] == ["2"]
    assert [trace.nodes for trace in read(path, "20")] == [256]
    assert [trace.system for trace in read(path, "20,2")] == ["20", "2"]
    assert {trace.system for trace in read(path, "all")} == {"2", "20"}
    with pytest.raises(BadFile, match=r"--system 7: .* has the systems 2, 20; name some, or all"):
        read(path, "7,20")


def test_how_soon_a_job_fails_on_a_trace(tmp_path: Path) -> None:
    (trace,) = read(infinitehbd(tmp_path))
    often = replace(trace, losses=tuple((hour, node) for hour in range(0, 200, 20) for node in range(400)))
    found = list(simulate.hours_to_failure(simulate.JOB, [often], 2, 0))
    hours = {(row.labels["faults"], row.labels["percent"]): row.value for row in found}
    assert (hours["all", 90], hours["all", 99]) == (13.5, 53.9)
    assert hours["hosts", 90] == hours["hosts", 99] == 20  # hosts that fail together are one failure
    assert hours["hosts and processes", 90] < 20
    assert list(simulate.hours_to_failure(simulate.JOB, [], 2, 0)) == []


@pytest.mark.slow
def test_methods_are_at_their_best_for_a_traces_rate(tmp_path: Path) -> None:
    (trace,) = read(infinitehbd(tmp_path))
    job = simulate.at_rate(replace(trace, losses=trace.losses * 200), simulate.JOB)
    lost_per_h = 600 / 216 * job.hosts / 400
    assert job.host_faults_per_h == pytest.approx(lost_per_h)
    assert job.process_faults_per_h == pytest.approx(3 * lost_per_h)
    often, seldom = (
        {way.name: way for way in simulate_methods.methods(one, CHOSEN)}["full"]
        for one in (job, simulate.JOB)
    )
    assert often.interval_h < seldom.interval_h / 2


def test_episodes_and_sets() -> None:
    groups = episodes([(0.0, 1), (0.5, 2), (1.4, 2), (3.0, 5)], 1.0)
    assert [[host for _, host in group] for group in groups] == [[1, 2, 2], [5]]
    sets = sets_by_size([[3, 1, 3], [2], [], [0]])
    assert {size: found.tolist() for size, found in sets.items()} == {2: [[1, 3]], 1: [[2], [0]]}


def test_costs_say_where_they_are_from(tmp_path: Path) -> None:
    chosen = simulate_methods.costs(tmp_path)
    assert chosen["rebuild"].source == "chosen: recovery.json doesn't say"
    labels = {"metric": "rebuild_over_wire", "code": "(4, 3)", "over": "same messages"}
    row = labels | {"value": 0.25, "low": -1, "high": 0.5}
    (tmp_path / "recovery.json").write_text(json.dumps({"rows": [row]}))
    measured = simulate_methods.costs(tmp_path)["rebuild"]
    assert (measured.value, measured.source) == (0.25, "measured: recovery.json, 2 cores")
    assert (measured.low, measured.high) == (-1, 0.5)


def test_a_cost_that_noise_makes_negative_counts_as_none(tmp_path: Path) -> None:
    row = {"metric": "added_recovery_s", "kind": "process", "value": -0.3, "low": -1.4, "high": -0.1}
    (tmp_path / "recovery.json").write_text(json.dumps({"rows": [row]}))
    added = simulate_methods.costs(tmp_path)["added to a restart"]
    assert (added.value, added.low, added.high) == (0, -1.4, 0)
    assert added.row("added").low == -1.4


def test_rebuilds_take_what_was_measured() -> None:
    all_costs = CHOSEN

    def method(rebuild: float, name: str) -> Method:
        changed = all_costs | {"rebuild": replace(all_costs["rebuild"], value=rebuild)}
        (found,) = (one for one in simulate_methods.methods(JOB, changed) if one.name == name)
        return found

    lost_bytes = JOB.table_bytes / JOB.hosts * 4 / 3
    fast, slow = (method(rebuild, "ecemb (4, 3)").host_h for rebuild in (0.4, 0.2))
    assert 3600 * (slow - fast) == pytest.approx(2.5 * lost_bytes / JOB.network_bytes_per_s)
    assert method(0.4, "snapshots x2") == method(0.2, "snapshots x2")


@pytest.mark.parametrize(
    ("mtbf_h", "table_tb", "interval_h"),
    [(1.0, 4, 0.0425), (1e6, 4, 0.5), (1e-4, 100, 0.72), (1e6, 100, 0.72)],
)
def test_check_n_run_saves_as_often_as_young_or_each_half_an_hour(
    mtbf_h: float, table_tb: float, interval_h: float
) -> None:
    job = replace(JOB, mtbf_h=mtbf_h, table_bytes=table_tb * 1e12)
    ways = {one.name: one for one in simulate_methods.methods(job, CHOSEN)}
    method, full = ways["Check-N-Run"], ways["full"]
    assert method.interval_h == pytest.approx(interval_h, rel=0.02)
    assert method.interval_h >= method.lag_h
    restart_h = job.restart_s / 3600
    assert (full.process_h - restart_h) / (method.process_h - restart_h) == pytest.approx(2.5)


def test_methods_that_fit() -> None:
    names = {method.name for method in simulate_methods.methods(replace(JOB, hosts=4), CHOSEN)}
    assert {"full", "CPR", "Check-N-Run", "snapshots x2", "live copies x3", "ecemb (4, 3)"} <= names
    assert not {name for name in names if "(6, 4)" in name}


NONSENSE = st.one_of(
    st.binary(max_size=200),
    st.lists(st.sampled_from([*LANL.splitlines(), '"', ",,,", "\0", "20"]), max_size=8).map(
        lambda lines: "\n".join([LANL.splitlines()[0], *lines]).encode()
    ),
    st.lists(
        st.dictionaries(
            st.sampled_from(["node_id", "event_time", "event_type"]),
            st.one_of(st.floats(), st.none(), st.integers(), st.sampled_from(["fault_start", "1", []])),
        ),
        max_size=6,
    ).map(lambda events: json.dumps(events).encode()),
)


@settings(max_examples=80, deadline=None)
@given(content=NONSENSE)
def test_no_bytes_are_a_crash(content: bytes) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        path.write_bytes(content)
        try:
            (trace,) = read(path)
        except BadFile:
            return
        assert 16 <= trace.nodes <= 1 << 20 and 0 < trace.hours <= 24 * 366 * 100
        assert all(0 <= hour <= trace.hours and 0 <= node < trace.nodes for hour, node in trace.losses)


def test_a_small_cluster_is_replayed_in_whole_racks(tmp_path: Path) -> None:
    line = "2,cluster,49,6152,80,0,{node},5-Apr,5-Jun,current,part,80,1,1,0,compute,6/{day}/2005 10:54"
    path = tmp_path / "lanl.csv"
    lines = [line.format(node=node, day=1 + node // 2) for node in range(49)]
    path.write_text("\n".join([LANL.splitlines()[0], *lines]))
    found = list(simulate.losses_of_trace(simulate.JOB, *read(path), 500.0, 0))
    assert {row.labels["hosts"] for row in found} == {48}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    trace = infinitehbd(tmp_path_factory.mktemp("trace"))
    return simulate.run(Arguments(quick=True, traces=(trace,)))


@pytest.mark.slow
def test_the_answer(rows: list[Row]) -> None:
    assert {row.metric for row in rows} == {
        "simulated_over_formula",
        "ettr",
        "ettr_by_hosts",
        "ettr_by_mtbf",
        "steps_run_again",
        "samples_lost_pct",
        "ettr_on_trace",
        "steps_run_again_on_trace",
        "samples_lost_on_trace_pct",
        "data_lost_pct",
        "data_lost_on_trace_pct",
        "hours_to_failure",
        "trace_faults",
        "best_ettr",
        "cells_ahead",
        "cells_first",
        "cells_possible",
        "cells_second",
        "cells_turned",
        "cells_to_ecemb",
        "most_behind",
        "assumed",
    }
    assert all(0 < row.value <= 1 for row in rows if row.unit == "ratio" and "ettr" in row.metric)
    (said,) = (row for row in rows if row.metric == "trace_faults")
    assert (said.value, said.labels["nodes"], said.labels["skipped"]) == (3, 400, 2)
    assert {row.labels["hosts"] for row in rows if row.metric == "ettr_on_trace"} == {256}
    certain = {
        (row.labels["among"], row.labels["method"]): row.value for row in rows if row.metric == "cells_ahead"
    }
    assert certain["all, if CPR does nothing between saves", "CPR"] > certain["all", "CPR"]
    assert ("all, if snapshots are copied as fast as measured", "snapshots") in certain
    lost = {
        (row.labels["spread"], row.labels["code"]): row.value
        for row in rows
        if row.metric == "data_lost_pct" and (row.labels["hosts"], row.labels["strike"]) == (64, "by rack")
    }
    for code in ("(4, 3)", "(6, 4)"):
        assert lost["over ranks", code] > lost["over hosts", code] > 10 * lost["over racks", code]
    assert 0 < lost["over racks", "(6, 4)"] < lost["over racks", "(4, 3)"] / 100


@pytest.mark.slow
def test_the_cells_of_the_map_are_counted(rows: list[Row]) -> None:
    cells = [row for row in rows if row.metric == "best_ettr"]
    drawn = {cell.labels["among"] for cell in cells}
    for metric, label in (("cells_first", "method"), ("cells_second", "second"), ("cells_ahead", "verdict")):
        counted = {
            (row.labels["among"], row.labels["method"]): row.value
            for row in rows
            if row.metric == metric and row.labels["among"] in drawn
        }
        certain = metric == "cells_ahead"
        kinds = {*simulate_picture.LOOKS, *([simulate_picture.CANNOT_TELL] if certain else [])}
        assert {method for _, method in counted} == kinds
        found = Counter(
            (
                row.labels["among"],
                row.labels[label] if certain else simulate_picture.kind(str(row.labels[label])),
            )
            for row in cells
        )
        assert counted == dict.fromkeys(counted, 0) | found
    behind = [row for row in rows if row.metric == "most_behind" and row.labels["among"] in drawn]
    assert max(row.value for row in behind) == max(float(row.labels["ahead"]) for row in cells)


def test_a_kind_is_ahead_where_no_other_reaches_it() -> None:
    ettrs = {"CPR": [0.9, 0.92, 0.88], "ecemb (4, 3)": [0.85, 0.87, 0.8], "ecemb (6, 4)": [0.8, 0.9, 0.7]}
    cell = simulate._cell(ettrs, {})
    assert (cell.value, cell.low, cell.high) == (0.9, 0.88, 0.92)
    assert (cell.labels["verdict"], cell.labels["candidates"]) == ("cannot tell", "CPR, ecemb")
    del ettrs["ecemb (6, 4)"]
    cell = simulate._cell(ettrs, {})
    assert (cell.labels["verdict"], cell.labels["candidates"]) == ("CPR", "CPR")
    assert cell.labels["ahead"] == pytest.approx(0.05)


def test_costs_at_the_ends_of_their_intervals() -> None:
    cost = simulate_methods.Cost(0.5, "s", "measured", -0.1, 0.7)
    assert [cost.at(end).value for end in ("cheap", "value", "dear")] == [0, 0.5, 0.7]
    speed = replace(cost, more_is_better=True)
    assert [speed.at(end).value for end in ("cheap", "dear")] == [0.7, 0]
    chosen = simulate_methods.Cost(0.5, "s", "chosen")
    assert chosen.at("dear") == chosen
    volume = CHOSEN["Check-N-Run's volume"]
    assert (volume.at("cheap").value, volume.at("dear").value) == (1 / 17, 1 / 6)


POINTS = [
    step_cost.Point(f"{rows:g} rows", window, parity, rows / window**0.25, 0.0, 1e-4)
    for window in (1, 16)
    for parity in (1, 2)
    for rows in (5e3, 2e4, 8e4)
]


def test_the_cost_of_a_step_is_found_again() -> None:
    rng = np.random.default_rng(1)
    true = {"step": 0.002, "commit": 0.012, "row": 3e-7, "row and parity": 7e-7}

    def added(one: step_cost.Point) -> float:
        rows_s = one.rows * (true["row"] + one.parity * true["row and parity"])
        return true["step"] + true["commit"] / one.window + rows_s

    exact = [replace(one, added_s=added(one)) for one in POINTS]
    for name, one in step_cost.fit(exact).items():
        assert one.value == pytest.approx(true[name]) and one.low <= one.value <= one.high
    noisy = [replace(one, added_s=one.added_s + rng.normal(0, 1e-4)) for one in exact]
    for name, one in step_cost.fit(noisy).items():
        assert one.low <= true[name] <= one.high and one.high - one.low < 0.2 * one.value
    same_window = step_cost.fit([one for one in exact if one.window == 1])
    assert (same_window["step"].value, same_window["commit"].value) == (0, pytest.approx(0.014))
    assert step_cost.fit(POINTS[:3]) == {}


def test_rows_come_again_in_a_window_as_in_the_setting_in_which_they_do_least() -> None:
    assert step_cost.shrinking(POINTS) == pytest.approx(-0.25)
    seldom = [step_cost.Point("seldom", window, 1, 9e3 / window**0.1, 0.0, 1e-4) for window in (1, 256)]
    assert step_cost.shrinking([*POINTS, *seldom]) == pytest.approx(-0.1)
    assert step_cost.shrinking(POINTS[:1]) == 0


def test_measurements_that_disagree_widen_the_interval() -> None:
    rng = np.random.default_rng(2)
    off = [replace(one, added_s=0.01 + rng.normal(0, 0.01)) for one in POINTS]
    sure = [replace(one, added_s=0.01 / one.window) for one in POINTS]
    wide, narrow = (step_cost.fit(found)["commit"] for found in (off, sure))
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)


def test_the_interval_of_a_sum_is_narrower_than_the_sum_of_intervals() -> None:
    """Of few and of many rows, both known well: what a commit costs is not, and no more what a row does."""
    known = [
        step_cost.Point("any", 1, parity, rows, 0.01 + 1e-7 * rows, 5e-4)
        for parity in (1, 2)
        for rows in (2e4, 3e4)
    ]
    parts = step_cost.fit(known)
    weights = dict(zip(step_cost.TERMS, (1.0, 1.0, 2.5e4, 2.5e4), strict=True))

    def end(name: str) -> float:
        return simulate_methods.together(
            [
                (simulate_methods.Cost(one.value, "s", "fitted", drawn=one.drawn).at(name), weights[term])
                for term, one in parts.items()
            ]
        )

    low, high = (
        sum(weight * getattr(parts[name], at) for name, weight in weights.items()) for at in ("low", "high")
    )
    assert end("value") == pytest.approx(0.0125, rel=0.01)
    assert low < end("cheap") < end("value") < end("dear") < high
    assert end("dear") - end("cheap") < (high - low) / 3


def test_points_are_processor_time_with_their_intervals() -> None:
    labels = {"engine": "torchrec", "setting": "dlrm", "code": "(4, 2)", "r": 2, "window": "auto"}
    labels |= {"overlap": "next step"}
    percent = {"value": 2.0, "low": 1.02, "high": 2.98, "repeats": 32}
    rows: list[dict[str, Any]] = [
        {"metric": "overhead_cpu_pct", "method": "protected", **labels, **percent},
        {"metric": "touched_rows_per_step", "method": "protected", **labels, "value": 900.0},
        {"metric": "step_cpu_ms", "method": "bare", **labels, "value": 400.0},
    ]
    assert step_cost.points(rows, "protected", "torchrec") == []
    rows.append({"metric": "window_steps", **labels, "value": 190.0})
    (point,) = step_cost.points(rows, "protected", "torchrec")
    assert (point.setting, point.window, point.parity, point.rows) == ("dlrm", 190, 2, 900.0)
    assert point.added_s == pytest.approx(0.002)
    assert point.error_s == pytest.approx(0.0005)
    assert step_cost.points(rows, "replication", "torchrec") == []
    assert step_cost.points(rows, "protected", "sparse") == []


def test_a_commit_by_ranks_is_taken_from_what_ranks_pay_to_agree(tmp_path: Path) -> None:
    chosen = simulate_methods.costs(tmp_path)
    commit_ms = 1000 * chosen["ecemb: commit"].value
    rows: list[dict[str, Any]] = [
        {"metric": "agreement_cpu_ms", "ranks": ranks, "value": value, "low": value, "high": value}
        for ranks, value in ((4, commit_ms / 2), (64, commit_ms))
    ]
    rows.append({"metric": "agreement_cpu_modelled_ms", "ranks": 1024, "law": "log2", "value": 1.0})
    path = tmp_path / "agreement.json"
    path.write_text(json.dumps({"rows": rows}))
    found = simulate_methods.costs(tmp_path)["commit by ranks"]
    assert found.value == found.low == found.high == pytest.approx(0.25)
    assert found.source.startswith("measured: agreement.json")
    rows[-1]["law"] = "linear"
    path.write_text(json.dumps({"rows": rows}))
    assert simulate_methods.costs(tmp_path)["commit by ranks"] == chosen["commit by ranks"]


@pytest.mark.parametrize("way", ["window 16", "window auto"])
def test_ways_that_make_a_step_cheaper(way: str) -> None:
    each, _ = simulate_methods.added(JOB, CHOSEN, "ecemb", Code(4, 3))
    other, window = simulate_methods.added(JOB, CHOSEN, "ecemb", Code(4, 3), way)
    assert 0 < other <= each
    assert window > 1
    more, _ = simulate_methods.added(replace(JOB, hosts=1024), CHOSEN, "ecemb", Code(4, 3), way)
    assert more >= other or way == "window auto"  # which is longer, the dearer a commit is


@pytest.mark.slow
def test_the_map_is_a_picture(rows: list[Row]) -> None:
    shown = [row.to_json() for row in rows]
    drawn_ = simulate_picture.draw(shown)
    assert drawn_ == simulate_picture.draw(shown)
    root = ElementTree.fromstring(drawn_)
    text = " ".join("".join(one.itertext()) for one in root.iter() if one.tag.endswith("text"))
    assert "tables, TB" in text and "hours between faults of the job" in text
    assert "No sample may be lost: " in text and " of 49 cells" in text
    assert "cannot tell; marks: who may be ahead" in text
    with pytest.raises(KeyError):
        simulate_picture.kind("prayer")


def test_the_option_is_for_simulations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["drift", "--trace", "x"], "drift is not asked of a trace; simulate is"),
        (
            ["simulate", "--quick", "--trace", str(tmp_path / "none")],
            "No such file or directory; give the path",
        ),
    ):
        with pytest.raises(SystemExit):
            command.main(words)
        assert said in capsys.readouterr().err


def test_counted_losses_of_a_trace(tmp_path: Path) -> None:
    """Nodes a and b go at once: a pair that (2, 1) loses when neighbours, 2 of 399."""
    (trace,) = read(infinitehbd(tmp_path))
    lost = [
        row.value
        for row in simulate.losses_of_trace(simulate.JOB, trace, 3000 * trace.hours, 0)
        if row.labels["code"] == str((2, 1))
        and (row.labels["hosts"], row.labels["spread"], row.labels["strike"])
        == (400, "over hosts", "anywhere")
    ]
    months = trace.hours / simulate.MONTH_H
    assert lost == [pytest.approx(100 * 2 / 399 / months, rel=0.6)]
    assert Code(2, 1) in simulate.CODES


def of_compare(method: str, **metrics: tuple[float, float, float]) -> list[dict[str, Any]]:
    labels: dict[str, Any] = {"engine": "sparse", "method": method}
    return [
        Row(metric, value, "any", low, high, 9, {**labels}).to_json()
        for metric, (value, low, high) in metrics.items()
    ]


def test_saves_and_steps_of_rivals_cost_what_compare_says(tmp_path: Path) -> None:
    rows = [
        *of_compare("cpr vanilla", step_cpu_pct=(2.0, -1.0, 4.0)),
        *of_compare("full dcp async", save_stall_cpu_s_per_gb=(0.5, 0.4, 0.7)),
    ]
    (tmp_path / "compare.json").write_text(json.dumps({"rows": rows}))
    found = simulate_methods.costs(tmp_path)
    assert (found["CPR: step"].value, found["CPR: step"].low, found["CPR: step"].high) == (0.02, 0, 0.04)
    assert found["copy"].value == 0.5 and found["copy"].source.startswith("measured")
    assert found["Check-N-Run: step"].value == 0 and found["Check-N-Run's copy"].source.startswith("chosen")
    ways = {one.name: one for one in simulate_methods.methods(JOB, found)}
    rank_gb = JOB.table_bytes / JOB.hosts / JOB.ranks_per_host / 1e9
    assert ways["full, async"].save_h * 3600 == pytest.approx(rank_gb * 0.5)
    assert ways["CPR"].overhead == 0.02 and ways["Check-N-Run"].overhead == 0


def test_a_step_waits_for_its_messages_where_the_network_is_given() -> None:
    """128 hosts of 8 ranks: a status is between hosts in 8 of its 10 rounds."""
    near, code = replace(JOB, hosts=128, ranks_per_host=8), Code(4, 3)
    far = simulate.on_network(near, 10, 400)
    assert (far.network_bytes_per_s, far.round_trip_s) == (1.25e9, pytest.approx(400e-6))

    def waited_s(family: str, code: Code, way: str = "") -> float:
        return (
            simulate_methods.added(far, CHOSEN, family, code, way)[0]
            - (simulate_methods.added(near, CHOSEN, family, code, way)[0])
        )

    changed = far.changed_rows() * (far.record_bytes + 8)
    crossed_s = 8 * changed / 1.25e9 + 200e-6
    assert waited_s("copies", Code(2, 1)) == pytest.approx(crossed_s)
    assert waited_s("ecemb", code) == pytest.approx(crossed_s + 2 * 8 * 200e-6)
    _, window = simulate_methods.added(far, CHOSEN, "ecemb", code, simulate_methods.BESIDE)
    assert waited_s("ecemb", code, simulate_methods.BESIDE) == pytest.approx(8 * 200e-6 / window)
    assert {one.labels["what"]: one.value for one in simulate_methods.rows_of(CHOSEN, far)}[
        "round trip"
    ] == 400
    assert "round trip" not in {one.labels["what"] for one in simulate_methods.rows_of(CHOSEN, near)}


def test_a_rebuild_over_links_is_that_of_the_link_that_limits_it(tmp_path: Path) -> None:
    assert simulate_methods.costs(tmp_path, over_links=True)["rebuild"].source.startswith("chosen")
    rows = [
        {"metric": "rebuild_over_link", "link": link, "value": value, "low": value - 0.1, "high": value + 0.2}
        for link, value in (("loopback", 0.1), ("1 Gbit/s by tbf", 0.9))
    ]
    (tmp_path / "network.json").write_text(json.dumps({"rows": rows}))
    found = simulate_methods.costs(tmp_path, over_links=True)["rebuild"]
    assert (found.value, found.low, found.high) == (0.9, pytest.approx(0.8), 1.0)
    assert found.at("cheap").value == 1.0
    assert found.source == "measured: network.json, 1 Gbit/s by tbf"
    assert simulate_methods.costs(tmp_path)["rebuild"].source == "chosen: recovery.json doesn't say"


@pytest.mark.parametrize("network", ["10", "10,0", "-1,400", "fast,400", "10,400,1", "inf,1"])
def test_a_network_that_is_none(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["simulate", f"--network={network}"])
    assert f"both above 0, for example 10,400; got {network!r}" in capsys.readouterr().err


def test_a_network_is_for_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["drift", "--network", "10,400"])
    assert "drift is not asked of a network; simulate is" in capsys.readouterr().err
    assert line("simulate", Arguments(network=(10.0, 400.0))) == "python -m bench simulate --network 10,400"
