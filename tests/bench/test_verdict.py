"""What a run prints: ten lines, and where the figures are; and how far it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import ROOT
from bench.harness.progress import Progress
from bench.harness.result import once
from bench.report.verdict import aligned, figures, verdict


def test_a_table_of_markdown_is_columns_of_text() -> None:
    second = (
        "| method | host memory | `same` bits |\n"
        "| :-- | --: | :-- |\n| **ecemb**, auto | 0.5x *m* | yes *m* |\n| full | none *m* | no *m* |"
    )
    assert aligned(second) == ["method       same bits", "ecemb, auto  yes", "full         no"]
    first = "| method | 3 h |\n| :-- | --: |\n| full | 9 *s* |\n| as published | ≤ 1 *p* |"
    assert aligned(first, second)[:3] == [
        "method        3 h  same bits",
        "full          9    no",
        "as published  ≤ 1",
    ]
    assert aligned(first, second)[3] == "ecemb, auto        yes"


def test_an_answer_without_a_sentence_is_its_metrics() -> None:
    rows = [{"metric": "rain_mm", "value": value, "unit": "mm"} for value in (1.0, 2.5)]
    rows.append({"metric": "sun_h", "value": 8.0, "unit": "h"})
    assert figures(rows) == "rain_mm 1 to 2.5 mm; sun_h 8 h"
    shown = verdict("weather", {"question": "weather", "rows": rows}, ROOT / "build" / "w.json")
    assert shown.splitlines() == [figures(rows), "3 figures: build/w.json; --verbose prints them all"]
    many = [{"metric": f"m{n}", "value": 1.0, "unit": "s"} for n in range(15)]
    assert figures(many).endswith("; m11 1 s; and 3 more")
    assert "elsewhere/w.json" in verdict("weather", {"rows": rows}, Path("/elsewhere/w.json"))


def test_methods_without_a_table_are_still_an_answer() -> None:
    rows = [once("step_cpu_pct", "%", 3.0, method="nothing", engine="sparse", ranks=4).to_json()]
    assert verdict("compare", {"question": "compare", "rows": rows}, Path("x")).startswith("step_cpu_pct 3 %")


def test_without_a_terminal_each_part_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("weather", 2) as progress:
        progress.part("rain")
        progress.part("sun")
    assert capsys.readouterr().err.splitlines() == [
        "weather: 1 of 2, after 0.0 min: rain",
        "weather: 2 of 2, after 0.0 min: sun",
    ]
