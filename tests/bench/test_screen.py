"""The first screen of README.md and docs/choosing.md: sums that follow from the answers, in marked cells."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from bench import RESULTS, ROOT
from bench.harness import register
from bench.harness.result import Row, once
from bench.methods import JOB_MTBF
from bench.questions.compare.cases import BY_METHOD, HALF_HOUR_S
from bench.questions.compare.families import CONTROL, COST, NEXT, STEP, TAKES, TWIN
from bench.report import choosing, figures, screen, summary
from bench.report.headlines import Unknown
from bench.report.screen import Line, Taken

PAGES = (ROOT / "README.md", ROOT / "docs" / "choosing.md")
HOUR_S = 3600.0


def of(method: str, steps: tuple[float, float, float] | None, save_s: float = 0.0) -> list[dict[str, Any]]:
    """Rows of a method with tables of 2 GB a rank, whose saves take `save_s` for each GB."""
    labels: dict[str, Any] = {
        "engine": "sparse",
        "setting": "small",
        "storage": "500 MB/s a rank",
        "ranks": 4,
    }
    labels |= {"method": method}
    rows = [once(NEXT, "s", 10.0, **labels), once("bit_identical", "0 or 1", 1, **labels)]
    rows += [once("survives_ranks", "ranks", 4 if save_s or method == CONTROL else 1, **labels)]
    rows += [once("memory_over_tables", "ratio", 0.5, **labels)]
    rows += [once("stored_over_tables", "ratio", 1.0 if save_s else 0.0, **labels)]
    for metric in (STEP, TWIN) if steps else ():
        value, low, high = steps or (0.0, 0.0, 0.0)
        rows.append(Row(metric, value, "%", low, high, 4, {**labels}))
    if method != CONTROL:
        rows.append(once(TAKES, "s", 16.0, **labels, tables="2 GB a rank" if save_s else "any"))
    rows.append(once(COST, "%", 1.0, **labels, tables="2 GB a rank" if save_s else "any"))
    for metric in ("lost_s", "until_written_s", "stall_s") if save_s else ():
        rows.append(once(f"fixed_{metric}", "s", 0.0, **labels))
        rows.append(once(f"save_{metric}_per_gb", "s/GB", save_s, **labels))
    return [row.to_json() for row in rows]


def compared() -> dict[str, Any]:
    rows = of(CONTROL, (0.5, -1.0, 1.0)) + of("ecemb (4, 3)", (10.0, 9.0, 11.0))
    rows += of("ecemb (4, 3) window auto", (0.5, -1.0, 1.0)) + of("full files", None, 2.0)
    rows += of("cpr vanilla", (3.0, 2.0, 4.0), 2.0)
    return {"question": "compare", "rows": rows}


RECOVERED = {
    "question": "recovery",
    "rows": [
        once(
            "rebuild_gb_per_s", "GB/s", speed, killed=1, rebuild="blocking", engine=engine, table_bytes=size
        ).to_json()
        for speed, engine, size in ((0.5, "sparse", 2), (0.25, "sparse", 1), (9.0, "torchrec", 3))
    ],
}


def cells(markdown: str) -> dict[str, list[str]]:
    """Name of a method -> its cells, of the tables of a text, one after another."""
    found: dict[str, list[str]] = {}
    for line in markdown.splitlines():
        if line.startswith("| ") and not line.startswith(("| :--", "| method")):
            name, *rest = line.strip("| ").split(" | ")
            found.setdefault(name, []).extend(rest)
    return found


def test_a_training_loses_steps_saves_lost_work_and_the_time_to_the_next_step() -> None:
    shown = cells(screen.screen([compared(), RECOVERED]))
    every_s = math.sqrt(2 * 2.0 * 10 * 3 * HOUR_S)  # Young, of a save of 10 GB
    files = 100 * (20.0 / every_s + (every_s / 2 + 10 + 2.0 * (10 - 2)) / (3 * HOUR_S))
    assert shown["full checkpoints"][0].split(" / ")[1] == f"{files:.2g}"
    rebuilt_s = (100 - 2) / 0.5
    each_step = 10 + 100 * (16 + 10 + rebuilt_s) / (14 * HOUR_S)
    assert shown["**ecemb**, commit in each step"][1] == f"10 / 10 / {each_step:.2g} *s*"


def test_a_cost_whose_interval_has_0_in_it_counts_with_its_upper_end() -> None:
    shown = cells(screen.screen([compared(), RECOVERED]))
    assert shown['**ecemb**, `window="auto"`'][2].startswith("≤ 1 / 1 / ")
    assert shown["no protection"][:3] == ["all of it *s*"] * 3
    assert shown["no protection"][5] == "all: back to step 0 *s*"


def test_costs_as_published_stand_beside_ours() -> None:
    """CPR: nothing in steps, and no work that runs again."""
    shown = cells(screen.screen([compared(), RECOVERED]))
    published = shown["partial recovery (CPR), steps as published"]
    assert len(published) == 3 and published[2].endswith(" *p*") and not published[2].startswith("≤")
    ours = [float(one) for one in shown["partial recovery (CPR)"][2].removesuffix(" *s*").split(" / ")]
    for one, other in zip(ours, published[2].removesuffix(" *p*").split(" / "), strict=True):
        assert one == pytest.approx(3 + float(other), abs=0.06)


def test_saves_of_changed_rows_are_of_as_many_as_change_in_the_interval() -> None:
    case = BY_METHOD["check-n-run intermittent"]
    hour = Taken(case, 4, 0.0, False, Line(4.0), Line(8.0), 0.0, Line(0.0))
    rare = hour.total_pct(1000.0, 1.0)  # each half an hour, as measured
    assert rare == pytest.approx(100 * (4 / HALF_HOUR_S + (HALF_HOUR_S / 2 + 8) / (1000 * HOUR_S)))
    often = hour.total_pct(0.5, 1.0)
    every_s = min(
        range(10, 1800),
        key=lambda s: 4 * (s / HALF_HOUR_S) ** 0.5 / s + s / 2 / (0.5 * HOUR_S),
    )
    share = (every_s / HALF_HOUR_S) ** 0.5
    again_s = every_s / 2 + 8 * share
    assert often == pytest.approx(100 * (4 * share / every_s + again_s / (0.5 * HOUR_S)), rel=0.01)


def test_where_nothing_was_compared_there_is_no_screen() -> None:
    with pytest.raises(Unknown):
        screen.screen([])
    alone = screen.screen([compared()])
    assert "the speed of a rebuild under ecemb" in alone
    assert summary.answer("compare", [compared()]).startswith(
        "time lost in all with 2 GB a rank and 14 h between failures: **ecemb**, "
    )
    assert JOB_MTBF.total_seconds() / HOUR_S in screen.HOURS


def test_the_screen_says_where_it_is_from_and_if_it_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "RESULTS", tmp_path)
    kept = {"run": "1", "outcome": "kept", "digest": "d", "when": "2026-01-02T03:04:05+00:00"}
    (tmp_path / register.NAME).write_text(json.dumps(kept) + "\n")
    machine = {"processor": "a processor", "cores": 2}
    document = {**compared(), "commit": "0123456789", "machine": machine}
    first = screen.screen([document]).splitlines()[0]
    assert first.endswith("a rank. Measured on a processor, 2 cores, at commit 01234567.")
    first = screen.screen([document | {"stale": "changed since: ecemb/step", "seal": "d"}]).splitlines()[0]
    assert "Measured on 2026-01-02 on a processor" in first
    assert first.endswith("at commit 01234567, **stale**: code that it measures has changed since.")


def test_what_was_never_run_is_said_until_it_was() -> None:
    assert "any of this on GPUs" in screen.never([compared()])
    on_devices = {"question": "compare_cluster", "rows": [{"device": "cuda"}]}
    assert "any of this on GPUs" not in screen.never([compared(), on_devices])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_first_screen_is_true(page: Path) -> None:
    """It is near the top, each cell is marked, and its sums are those of the figures in bench/results."""
    text = page.read_text(encoding="utf-8")
    first = text.index("<!-- screen: compare -->")
    assert text[:first].count("\n") < 20
    shown = text[first : text.index("<!-- end -->", first)]
    table = cells(shown)
    assert len(table) >= len(choosing.CHOICES) and "no protection" in table
    assert all(re.search(r" \*[msp]\*$", cell) for line in table.values() for cell in line)
    compare = next(one for one in figures.load(RESULTS) if one["question"] == "compare")
    assert compare["commit"][:8] in shown and ("**stale**" in shown) == ("stale" in compare)
    values: dict[str, float] = {}
    for row in compare["rows"]:
        if row["method"] == "full files" and row["engine"] == "torchrec":
            values.setdefault(row["metric"], row["value"])
    save_s = values["fixed_lost_s"] + 100 * values["save_lost_s_per_gb"]
    for hours, cell in zip(screen.HOURS, table["full checkpoints"], strict=False):
        every_s = math.sqrt(2 * save_s * hours * HOUR_S)
        read_s = (100 - 0.34) / 0.2 * values["stored_over_tables"]
        lost = 100 * (save_s / every_s + (every_s / 2 + values[NEXT] + read_s) / (hours * HOUR_S))
        assert float(cell.split(" / ")[2].split()[0]) == pytest.approx(lost, rel=0.06)
    for said in ("**The worst case**", "**Never run**", "**Your own job**", "**Overhead of steps**"):
        assert said in shown
