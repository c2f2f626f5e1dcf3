"""What to use: tables and sentences follow the answers, and what docs/choosing.md says by hand is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import RESULTS, ROOT
from bench.harness.result import Row, once
from bench.questions.simulate import methods as simulate_methods
from bench.questions.simulate import question as simulate
from bench.questions.simulate.inputs import inputs
from bench.questions.simulate.profiles import PROFILES
from bench.questions.simulate.verdicts import PANELS
from bench.report import choosing, summary
from bench.report.choosing import EXACT, UNKNOWN
from bench.report.headlines import Unknown

JOB = "slow steps"


def simulated() -> list[dict[str, Any]]:
    """CPR is ahead for certain on 16 hosts; on 64 ecemb may be."""
    rows: list[Row] = []
    for hosts, reach, candidates in ((16, 0.01, "CPR"), (64, 0.2, "CPR, ecemb")):
        for method, ettr in (("CPR", 0.99), ("ecemb (4, 3), window auto", 0.95), ("full", 0.90)):
            labels = {"job": JOB, "hosts": hosts, "method": method}
            rows.append(Row("ettr_by_hosts", ettr, "ratio", ettr - reach, ettr + reach / 10, 2, {**labels}))
            labels = {"job": JOB, "mtbf_h": 0.3, "method": method}
            rows.append(Row("ettr_by_mtbf", ettr, "ratio", ettr, ettr, 1, {**labels}))
        labels = {"job": JOB, "hosts": hosts, "among": "all", "candidates": candidates}
        rows.append(once("ahead_by_hosts", "ratio", 0.99, **labels))
    for among, certain, first in (
        ("all", {"CPR": 44, "ecemb": 0, UNKNOWN: 5}, {"CPR": 49}),
        (EXACT, {"ecemb": 12, "Check-N-Run": 20, UNKNOWN: 17}, {"ecemb": 20, "Check-N-Run": 29}),
    ):
        for metric, counts in (("cells_ahead", certain), ("cells_first", first)):
            for name, cells in counts.items():
                rows.append(once(metric, "cells", cells, job=JOB, among=among, method=name))
    for end, name, cells in (("cheap", "storage", 3), ("dear", "storage", 8), ("dear", "network", 0)):
        rows.append(once("cells_turned", "cells", cells, job=JOB, among=EXACT, input=name, end=end))
    return [row.to_json() for row in rows]


DOCUMENTS = [{"question": "simulate", "rows": simulated()}]


def test_a_method_is_ahead_for_certain_only_where_no_other_may_be() -> None:
    shown = choosing.shares(DOCUMENTS)
    ours = '**ecemb**, `window="auto"`'
    assert f"| {ours} | 0.95 (0.94 to 0.95) | 0.95 (0.75 to 0.97) | - |" in shown
    assert f"| *ahead, {JOB}, samples may be lost* | **CPR** | CPR (or ecemb) | - |" in shown
    assert f"| {ours} | 0.95 | - |" in choosing.mtbfs(DOCUMENTS)  # no interval, if none would be seen
    for table in (choosing.shares, choosing.mtbfs, choosing.verdicts):
        with pytest.raises(Unknown):
            table([])


def test_the_page_begins_with_one_table_of_methods_that_are_simulated() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert page.startswith("# Which method\n\n<!-- screen: compare -->\n")
    given = inputs(PROFILES[0], Path("no results"))
    named = {method.name for method in simulate_methods.methods(PROFILES[0].job, given)}
    assert {choice.simulated for choice in choosing.CHOICES} <= named
    assert (choosing.SIZES, choosing.MTBF_H) == (simulate.SIZES, simulate.MTBF_H)
    assert tuple(choosing.PANELS) == PANELS


def test_the_map_is_a_table_by_jobs_and_what_is_allowed() -> None:
    said = choosing.verdicts(DOCUMENTS)
    assert f"| {JOB} | samples may be lost | 5 | CPR 44 | CPR 49 |" in said
    assert (
        f"| {JOB} | no sample may be lost | 17 | Check-N-Run 20, ecemb 12 | Check-N-Run 29, ecemb 20 |"
        in said
    )
    assert f"- **{JOB}**, cells that turn where no sample may be lost: storage (8)." in said
    assert summary.answer("simulate", DOCUMENTS) == (
        "cells of the map, first at the likeliest inputs where no sample may be lost: "
        f"{JOB}: Check-N-Run 29, ecemb 20"
    )


def test_what_the_page_says_of_codes_is_in_the_answer() -> None:
    """(6, 4) and (10, 8) lose less than (4, 3) and (8, 7), and short stripes less than long ones."""
    rows = json.loads((RESULTS / "simulate.json").read_text(encoding="utf-8"))["rows"]
    lost: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        if row["metric"] == "data_lost_pct" and row["spread"] == "over hosts":
            lost.setdefault((row["strike"], row["hosts"]), {})[row["code"]] = row["value"]
    assert lost
    for of_code in lost.values():
        assert max(of_code["(6, 4)"], of_code["(10, 8)"]) < min(of_code["(4, 3)"], of_code["(8, 7)"])
        assert of_code["(6, 4)"] <= of_code["(10, 8)"] and of_code["(4, 3)"] <= of_code["(8, 7)"]
