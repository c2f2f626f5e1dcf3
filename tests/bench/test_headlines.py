"""Ours beside what is published: read from the answers, on both engines."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.result import Arguments, Row, document, once, summary
from bench.report import headlines

COSTS = {headlines.OURS: 8.0, headlines.AUTO: 4.0, headlines.FILES: 16.0}
SECONDS = {headlines.OURS: (1.0, 1.0), headlines.FILES: (4.0, 16.0), headlines.SNAPSHOTS: (2.0, 8.0)}


def compared(engine: str, factor: float = 1.0) -> dict[str, Any]:
    rows = [
        once(
            "training_longer_pct",
            "%",
            value * (factor if name == headlines.AUTO else 1),
            method=name,
            engine=engine,
        )
        for name, value in COSTS.items()
    ]
    rows.append(summary("step_cpu_pct", "%", [7, 8 * factor, 17], method=headlines.OURS, engine=engine))
    rows.append(summary("control_cpu_pct", "%", [-1, 0, 0.5], method=headlines.OURS, engine=engine))
    for name, (next_s, takes_s) in SECONDS.items():
        rows.append(once("next_step_s", "s", next_s, method=name, engine=engine))
        rows.append(once("failure_takes_s", "s", takes_s, method=name, engine=engine))
    for name, stall_s in ((headlines.FILES, 20.0), (headlines.SNAPSHOTS, 4.0), (headlines.INTERMITTENT, 0.9)):
        rows.append(once("save_stall_s", "s", stall_s, method=name, engine=engine))
    return document("compare", Arguments(), rows)


def emulated() -> dict[str, Any]:
    def row(data: str, recovery: str, value: float) -> Row:
        labels = {"data": data, "recovery": recovery, "setting": "base", "source": "emulated"}
        return once("overhead_pct", "%", value, **labels)

    rows = [row("kaggle", "full", 8.333), row("kaggle", "partial", 0.5)]
    rows += [row("terabyte", "full", 8.0), row("terabyte", "partial", 0.6)]
    for setting, value in (("production, a", 58.4), ("production, b", 93.2), ("base", 3.0)):
        rows.append(once("overhead_removed_pct", "%", value, setting=setting, source="emulated"))
    for statistic, costs in (("mean", (8.0, 12.0)), ("P90", (15.0, 25.0))):
        labels = {"statistic": statistic, "source": "emulated on the clock"}
        rows += [once("handling_pct", "%", cost, mtbf_h=str(cost), **labels) for cost in costs]
        rows.append(once("handling_pct", "%", 99, statistic=statistic, source="published"))
    return document("cpr", Arguments(), rows)


def checked() -> dict[str, Any]:
    labels = {"pattern": "published", "policy": "intermittent", "state": headlines.ROW_WISE}
    found = [
        once("bandwidth_reduction", "ratio", value, bits=bits, **labels)
        for bits, value in (("8", 7.5), ("4", 13.0), ("2", 20.0))
    ]
    return document("check_n_run", Arguments(), found)


def simulated() -> dict[str, Any]:
    found = [
        once("hours_to_failure", "h", value, percent=percent, faults=faults, source="a trace")
        for percent, value in ((90, 40.0), (99, 90.0))
        for faults in ("hosts", "hosts and processes")
    ]
    return document("simulate", Arguments(), found)


def judged(data: str, *losses: float) -> dict[str, Any]:
    rows = [summary("loss_added", "nats", losses, method="cpr vanilla", data=data)]
    return document("quality", Arguments(), rows)


def test_lines_say_ours_and_why() -> None:
    documents = [compared("torchrec", 2), emulated(), compared("sparse"), checked(), simulated()]
    documents += [judged("some ratings", 0.001, 0.002, 0.003), judged("clicks", 0.01, 0.02, 0.03)]
    lines = headlines.lines(documents)
    assert all(len(line) == len(headlines.HEADS) for line in lines)
    here = [line[2] for line in lines]
    assert here[0] == "8 % (7 to 17; control -1 to 0.5) / 16 % (7 to 17; control -1 to 0.5)"
    assert here[1:3] == ["75 % / 50 %", "10x / 10x"]
    assert here[3:7] == [
        "8.33 % -> 0.5 %, 8 % -> 0.6 %",
        "58 to 93 %",
        "8 to 12 % on average, 15 to 25 % for one of ten",
        "0.02 nats added (0.01 to 0.03) on clicks; 0.002 nats added (0.001 to 0.003) on some ratings",
    ]
    assert "7.5 to 20x, with 4 bits 13x" in here
    assert "0.05 % / 0.05 %" in here
    assert "40 h and 90 h (a trace)" in here
    assert here[-2:] == ["2x / 2x", "5x / 5x"]
    assert here.count(headlines.NOT_MEASURED) == 1  # capacity


def test_what_is_unknown_on_one_engine_does_not_hide_the_others_figure() -> None:
    without = compared("torchrec")
    without["rows"] = [row for row in without["rows"] if row["metric"] != "training_longer_pct"]
    here = [line[2] for line in headlines.lines([without, compared("sparse")])]
    assert here[1] == f"75 % / {headlines.UNKNOWN}"
    here = [line[2] for line in headlines.lines([without])]
    assert here[1] == headlines.NOT_MEASURED


def test_where_nothing_was_measured_there_is_no_table() -> None:
    assert headlines.lines([]) == []
    with pytest.raises(headlines.Unknown, match="overhead_wall_pct"):
        headlines.value([], "overhead_wall_pct", method="one")


def test_a_gain_on_nothing_is_none() -> None:
    with pytest.raises(headlines.Unknown):
        headlines.reduced(lambda metric, method, key="value": -1.0)
