"""Ours beside what is published: read from the answers, on both engines."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.result import Arguments, Row, document, once, summary
from bench.report import headlines

WALL = {headlines.OURS: 4.0, headlines.FILES: 16.0}


def compared(engine: str, factor: float = 1.0) -> dict[str, Any]:
    rows = [
        once("overhead_wall_pct", "%", value * factor, method=name, engine=engine)
        for name, value in WALL.items()
    ]
    rows += [
        once("written_bytes_per_step", "bytes", size, method=name, engine=engine)
        for name, size in ((headlines.WHOLE, 700.0), (headlines.FEW_BITS, 100.0 * factor))
    ]
    rows += [
        once(metric, "ms" if "ms" in metric else "steps", of_one * factor, method=name, engine=engine)
        for name, stall_ms, interval in ((headlines.FILES, 20.0, 6.0), (headlines.SNAPSHOTS, 15.0, 4.0))
        for metric, of_one in (("stall_ms_per_step", stall_ms), ("interval_steps", interval))
    ]
    rows.append(summary("overhead_wall_pct", "%", [-5, 1, 2], method=headlines.CONTROL, engine=engine))
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


def test_lines_say_ours_and_why() -> None:
    lines = headlines.lines([compared("torchrec", 2), emulated(), compared("sparse"), checked(), simulated()])
    assert all(len(line) == len(headlines.HEADS) for line in lines)
    here = [line[2] for line in lines]
    read = "(nothing against itself: 1 %, -5 to 2 %"
    assert here[0] == f"4 % {read}: cannot tell) / 8 % {read})"
    assert here[1] == f"75 % {read}) / 75 % {read})"
    assert here[3:6] == [
        "8.33 % -> 0.5 %, 8 % -> 0.6 %",
        "58 to 93 %",
        "8 to 12 % on average, 15 to 25 % for one of ten",
    ]
    assert "7.5 to 20x, with 4 bits 13x" in here
    assert "40 h and 90 h (a trace)" in here
    assert "7x / 3.5x" in here
    assert here[-1] == "2x / 2x"
    assert here.count(headlines.NOT_MEASURED) == len(lines) - 9


def test_what_is_unknown_on_one_engine_does_not_hide_the_others_figure() -> None:
    without = compared("torchrec", -1)  # full checkpoints cost less than nothing there
    here = [line[2] for line in headlines.lines([without, compared("sparse")])]
    read = "(nothing against itself: 1 %, -5 to 2 %"
    assert here[1] == f"75 % {read}) / {headlines.UNKNOWN}"
    here = [line[2] for line in headlines.lines([without])]
    assert here[1] == headlines.NOT_MEASURED


def test_where_nothing_was_measured_there_is_no_table() -> None:
    assert headlines.lines([]) == []
    with pytest.raises(headlines.Unknown, match="overhead_wall_pct"):
        headlines.value([], "overhead_wall_pct", method="one")


def test_a_gain_on_nothing_is_none() -> None:
    with pytest.raises(headlines.Unknown):
        headlines.reduced(lambda metric, method, key="value": -1.0)
