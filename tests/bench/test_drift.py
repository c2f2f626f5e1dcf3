"""Drift of float parity, beside parity of bits, which gives back every bit or no answer."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench.harness.result import Arguments, Row, WrongResult
from bench.questions.drift import picture as drift_picture
from bench.questions.drift import question as drift
from ecemb.coding.code import Code


def chosen(rows: list[Row], metric: str, method: str) -> list[Row]:
    return [row for row in rows if row.metric == metric and row.labels["method"] == method]


def test_floats_drift_and_bits_dont() -> None:
    rows = drift.run(Arguments(quick=True))
    for metric in ("rebuilt_error", "rebuilt_error_worst"):
        assert all(1e-8 < row.value < 1e-3 for row in chosen(rows, metric, "float32"))
        assert all(row.high < 1e-10 for row in chosen(rows, metric, "float64"))
        assert all(row.high == 0 for row in chosen(rows, metric, "bits"))
        seeds = {row.labels["steps"]: row.repeats for row in chosen(rows, metric, "bits")}
        assert seeds == {drift.QUICK_STEPS[0]: drift.QUICK_SEEDS, drift.QUICK_STEPS[1]: 1}
    lost = {(row.labels["code"], row.labels["method"]): row.value for row in rows if row.unit == "rows"}
    assert lost == {
        (code, method): float(method != "bits")
        for code in ("(4, 3)", "(6, 4)")
        for method in ("float32", "float64", "bits")
    }
    drawn = drift_picture.draw([row.to_json() for row in rows])
    texts = {element.text for element in ElementTree.fromstring(drawn).iter() if element.text}
    assert {"code (4, 3)", "code (6, 4)", "steps", "float32, sgd", "bits"} <= texts
    assert "Rows rebuilt from parity of bits are off by 0; of float32 up to" in drawn


def test_bits_that_are_lost_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "multiply", lambda weight, block: block & 0xFE)
    with pytest.raises(WrongResult, match="rank 0"):
        drift.one_nan(Code(4, 3), 0)
