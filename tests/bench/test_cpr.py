"""CPR's figures: model beside emulation, and quality beside PLS."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines.cpr.priority import PRIORITIES
from baselines.cpr.setups import KAGGLE, sweeps
from bench.harness.result import Arguments, Row, WrongResult, document, write
from bench.questions.cpr import overhead as cpr_overhead
from bench.questions.cpr import picture as cpr_picture
from bench.questions.cpr import quality as cpr_quality
from bench.questions.cpr import question as cpr
from bench.questions.cpr.quality import PRODUCTIVE, SETTINGS, Pair, mean, slopes_of
from bench.questions.cpr.training import train
from bench.report import pages
from bench.workloads import click_training
from bench.workloads.click_training import Failure
from bench.workloads.planted import ROWS, draw


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return cpr.run(Arguments(quick=True))


def of(rows: list[Row], metric: str, **labels: object) -> list[Row]:
    return [row for row in rows if row.metric == metric and labels.items() <= row.labels.items()]


def test_calibrated_settings_are_called_so_and_agree(rows: list[Row]) -> None:
    for data, published in (("kaggle", (8.5, 0.53)), ("terabyte", (8.2, 0.68))):
        for recovery, figure in zip(("full", "partial"), published, strict=True):
            line = {
                row.labels["source"]: row
                for row in of(rows, "overhead_pct", data=data, setting="base", recovery=recovery)
            }
            assert line["published"].value == pytest.approx(figure)
            assert all(cpr_overhead.CALIBRATED in str(row.labels["why"]) for row in line.values())
            assert line["emulated"].value == pytest.approx(line["formula"].value, rel=0.1)
    others = [row for row in of(rows, "overhead_pct") if row.labels["setting"] != "base"]
    assert others and not any(cpr_overhead.CALIBRATED in str(row.labels["why"]) for row in others)


def test_what_failures_cost_jobs_is_beside_what_is_published(rows: list[Row]) -> None:
    found = {(row.labels["statistic"], row.labels["mtbf_h"]): row.value for row in of(rows, "handling_pct")}
    assert (found["mean", "14 to 30"], found["P90", "14 to 30"]) == (13.0, 30.0)
    for mtbf_h in ("14", "30"):
        assert 0 < found["mean", mtbf_h] < found["P90", mtbf_h] < 60
    assert found["mean", "30"] < found["mean", "14"]


def test_lines_that_differ_say_why(rows: list[Row]) -> None:
    lines: dict[tuple[object, ...], dict[object, float]] = {}
    for row in of(rows, "overhead_pct"):
        key = tuple(row.labels[name] for name in ("data", "setting", "recovery", "why"))
        lines.setdefault(key, {})[row.labels["source"]] = row.value
    for (*_, why), line in lines.items():
        apart = max(abs(line[name] / line["formula"] - 1) for name in ("formula, whole saves", "emulated"))
        assert why or apart < 0.15
    assert {row.value for row in of(rows, "overhead_removed_pct", source="published")} == {91.0}
    assert len(of(rows, "overhead_removed_pct")) == 2 * 6 * 4


def test_pls_is_what_its_formula_says(rows: list[Row]) -> None:
    many = [row for row in of(rows, "pls") if row.labels["failures"] == cpr.QUICK_LONG[0]]
    assert len(many) == 5 * 3
    for emulated in (row for row in many if row.labels["source"] == "emulated"):
        (formula,) = of(many, "pls", **{**emulated.labels, "source": "formula"})
        assert emulated.value == pytest.approx(formula.value, rel=0.1)


def test_what_disagrees_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    point = cpr_overhead.evaluate(sweeps(KAGGLE)[0], arrivals="progress", runs=2, seed=0)
    off = replace(point, full=replace(point.full, overhead=2 * point.full.overhead))
    with pytest.raises(WrongResult, match="apart"):
        cpr_overhead.check(off)
    monkeypatch.setattr(cpr_overhead, "expected_pls", lambda job, hours: 1.0)
    with pytest.raises(WrongResult, match="by its formula 1.0"):
        cpr_overhead.pls(20, 2, seed=0)
    monkeypatch.setattr(cpr, "MEMORY_PCT", {**cpr.MEMORY_PCT, "mfu": (0.1, 6.25)})
    with pytest.raises(WrongResult, match="mfu takes 0.78"):
        list(cpr.memory())
    setting = SETTINGS[0]
    pairs = {(setting, method): [Pair(0, len(method), 0.0, 0.0)] for method in setting.methods}
    with pytest.raises(WrongResult, match="PLS differ"):
        cpr_quality.check(setting, pairs)


def test_bookkeeping_is_within_what_is_published(rows: list[Row]) -> None:
    measured = of(rows, "bookkeeping_memory_pct", source="measured")
    assert [row.labels["priority"] for row in measured] == ["mfu", "mfu", "ssu", "ssu", "scar", "scar"]
    for row in measured:
        (published,) = of(rows, "bookkeeping_memory_pct", **{**row.labels, "source": "published"})
        assert row.value == pytest.approx(published.value, rel=0.01)


def test_settings_are_the_papers_and_have_one_pls_for_all_methods() -> None:
    steps = cpr.SIZE.steps
    assert [setting.every(steps) for setting in SETTINGS] == [80, 400, 800, 40, 160, 88]
    assert [len(setting.failures(steps, 0)) for setting in SETTINGS] == [2, 2, 2, 20, 20, 5]
    assert all(len(failure.servers) == 4 for failure in PRODUCTIVE.failures(steps, 0))
    few, same, *_ = SETTINGS
    assert few.failures(steps, 1) == same.failures(steps, 1) != few.failures(steps, 2)
    assert {setting.methods for setting in SETTINGS[:3]} == {("vanilla", *PRIORITIES)}
    assert cpr.SIZE.settings == SETTINGS and cpr.SIZE.seeds >= 5


def test_slopes_go_through_nothing_lost() -> None:
    first, second, _, other, *_ = SETTINGS
    points = {first: (0.1, 0.02), second: (0.2, 0.04), other: (0.2, 9.0)}
    pairs = {(setting, "mfu"): [Pair(4, *point, 0.0)] for setting, point in points.items()}
    assert slopes_of(first.name, "mfu", "loss", pairs) == {4: pytest.approx(0.2)}
    row = mean("loss_per_pls", "nats", [1.0, 2.0, 3.0], method="mfu")
    assert (row.value, row.high - row.value) == (2.0, pytest.approx(4.303 / math.sqrt(3)))


def test_failures_cost_quality_and_saves_alone_dont() -> None:
    data = draw(60, 128, 4000, seed=5)
    assert data.steps == 60 and int(data.training.ids.max()) < sum(ROWS)
    alone, saving = (train(data, 5, servers=8, every=every) for every in (1000, 16))
    assert (alone.log_loss, alone.auc, alone.pls) == (saving.log_loss, saving.auc, saving.pls)
    assert alone.pls == 0 and alone.auc > 0.55, alone
    all_ = Failure(59, tuple(range(8)))
    lost = train(data, 5, servers=8, every=1000, failures=[all_])
    assert lost.pls == pytest.approx(59 / 60) and lost.log_loss > alone.log_loss and lost.auc < alone.auc


def test_auc() -> None:
    clicks = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert click_training.auc(torch.tensor([1.0, 2.0, 3.0, 4.0]), clicks) == 1
    assert click_training.auc(torch.tensor([1.0, 3.0, 3.0, 4.0]), clicks) == 0.875
    assert click_training.auc(torch.zeros(4), clicks) == 0.5


def test_the_page_and_the_picture(rows: list[Row], tmp_path: Path) -> None:
    answer = document("cpr", Arguments(), rows)
    write(tmp_path / "cpr.json", answer)
    pages.write(tmp_path)
    page = tmp_path / "results" / "cpr.md"
    written = page.read_text(encoding="utf-8")
    assert "](quality-against-pls.svg)" in written and "| published | formula |" in written
    assert "of_pair" not in written
    drawn = page.with_name("quality-against-pls.svg").read_text(encoding="utf-8")
    assert drawn == cpr_picture.draw(answer["rows"])
    texts = {element.text for element in ElementTree.fromstring(drawn).iter() if element.text}
    assert {"vanilla", "mfu", "AUC lost", "log loss added, nats"} <= texts and "scar" not in texts
