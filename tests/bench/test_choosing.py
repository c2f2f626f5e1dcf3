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
from bench.report import choosing, summary
from bench.report.choosing import EXACT, UNKNOWN
from bench.report.headlines import Unknown


def simulated() -> list[dict[str, Any]]:
    """CPR is ahead for certain on 16 hosts; on 64 its interval reaches others'."""
    rows: list[Row] = []
    for hosts, reach in ((16, 0.01), (64, 0.2)):
        for method, ettr in (("CPR", 0.99), ("ecemb (4, 3), window auto", 0.95), ("full", 0.90)):
            labels = {"hosts": hosts, "method": method}
            rows.append(Row("ettr_by_hosts", ettr, "ratio", ettr - reach, ettr + reach / 10, 2, {**labels}))
            labels = {"mtbf_h": 0.3, "method": method}
            rows.append(Row("ettr_by_mtbf", ettr, "ratio", ettr, ettr, 1, {**labels}))
    for among, counts in (
        ("all", {"CPR": 44, "ecemb": 0, UNKNOWN: 5}),
        (EXACT, {"ecemb": 12, "live copies": 0, "Check-N-Run": 20, UNKNOWN: 17}),
    ):
        for name, cells in counts.items():
            rows.append(once("cells_ahead", "cells", cells, among=among, method=name))
            if among == EXACT and name != UNKNOWN:
                rows.append(once("cells_first", "cells", cells + 1, among=among, method=name))
                rows.append(once("cells_possible", "cells", cells + 9, among=among, method=name))
    for name, cells in (("CPR", 46), (UNKNOWN, 3)):
        rows.append(once("cells_ahead", "cells", cells, among="all, if CPR is free", method=name))
    for name, marked in (("step", "chosen"), ("copy", "measured: compare.json"), ("restart", "chosen")):
        rows.append(once("assumed", "s", 1.0, what=name, marked=marked))
    for among, factor, cells in (("all", 0.5, 9), (EXACT, 0.5, 3), (EXACT, 2.0, 8)):
        rows.append(once("cells_turned", "cells", cells, among=among, input="storage", times=factor))
    return [row.to_json() for row in rows]


DOCUMENTS = [{"question": "simulate", "rows": simulated()}]


def test_a_method_is_ahead_only_where_no_other_reaches_it() -> None:
    shown = choosing.shares(DOCUMENTS)
    ours = '**ecemb**, `window="auto"`'
    assert f"| {ours} | 0.95 (0.94 to 0.95) | 0.95 (0.75 to 0.97) | - |" in shown
    assert "| *ahead* | partial recovery (CPR) | cannot tell | - |" in shown
    assert f"| *ahead, if no sample may be lost* | {ours} | cannot tell | - |" in shown
    assert "| *ahead* | partial recovery (CPR) | - |" in choosing.mtbfs(DOCUMENTS)
    for table in (choosing.shares, choosing.mtbfs, choosing.verdicts):
        with pytest.raises(Unknown):
            table([])


def test_the_page_begins_with_one_table_of_methods_that_are_simulated() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert page.startswith("# Which method\n\n<!-- choices: compare -->\n")
    costs = simulate_methods.costs(Path("no results"))
    named = {method.name for method in simulate_methods.methods(simulate.JOB, costs)}
    assert {choice.simulated for choice in choosing.CHOICES} <= named
    assert (choosing.SIZES, choosing.MTBF_H) == (simulate.SIZES, simulate.MTBF_H)


def test_sentences_carry_the_verdicts_of_the_map() -> None:
    said = choosing.verdicts(DOCUMENTS)
    assert "**Where samples may be lost**, of 49 cells **CPR** leads 44 for certain. In 5 one" in said
    assert "of 49 cells **Check-N-Run** leads 20, **ecemb** leads 12 for certain. In 17 one" in said
    assert (
        "**Where samples may be lost, if CPR is free**, of 49 cells **CPR** leads 46 for certain. In 3 one"
        in said
    )
    assert "Chosen inputs count as exact there: step, restart." in said
    assert "it leads 12 cells for certain, 13 at the likeliest costs, and may lead 21." in said
    assert "where samples may be lost, if one input is halved or doubled: storage (9)." in said
    assert "where no sample may be lost, if one input is halved or doubled: storage (8)." in said
    assert summary.answer("simulate", DOCUMENTS) == (
        "cells of the map that lead for certain: CPR 44, cannot tell 5; without lost samples: ecemb 12, "
        "Check-N-Run 20, cannot tell 17"
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
