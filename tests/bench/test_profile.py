"""A step's spans come from real ranks; bytes follow from the touched rows."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest

from bench.harness.result import Row, WrongResult
from bench.questions.profile import question as profile
from bench.questions.profile.question import LEAST, MOVED, OWN, PASSES, PHASES, QUICK, STEP, TRAINING
from bench.questions.profile.rank import OURS, Span, steps_of
from bench.report import tables
from ecemb.coding.code import Code


@pytest.mark.parametrize("engine", ["sparse", "torchrec"])
def test_a_step_is_all_its_spans(engine: str) -> None:
    if engine == "torchrec":
        pytest.importorskip("torchrec", reason="TorchRec is not installed")
    rows = profile.measure(dataclasses.replace(QUICK, pairs=2), engine, Code(4, 2), seed=3)

    def of(metric: str, **labels: str) -> list[Row]:
        return [row for row in rows if row.metric == metric and labels.items() <= row.labels.items()]

    names = {row.labels["span"]: row for row in of("span_ms")}
    assert {STEP, *TRAINING, *PHASES} <= set(names)
    assert all(0 < row.low <= row.high <= names[STEP].high for row in names.values())
    whole, *parts = of("timeline_ms")
    assert whole.labels["span"] == STEP
    for row in parts:
        assert 0 <= float(row.labels["begin_ms"]) <= float(row.labels["begin_ms"]) + row.value <= whole.value
    begins = {str(row.labels["span"]): float(row.labels["begin_ms"]) for row in parts}
    order = ("forward", "backward", "optimizer", "state", "status", "delta", "exchange", "agree", "apply")
    assert sorted(order, key=begins.__getitem__) == list(order)

    (touched,), (record,) = of("touched_rows_per_step"), of("record_bytes")
    assert record.value == {"sparse": 2 * 4 * QUICK.dim, "torchrec": 4 * (QUICK.dim + 1)}[engine]
    (least,) = of("network_bytes_per_step", method=LEAST)
    (sent,) = of("network_bytes_per_step", method=MOVED)
    assert least.value == 2 * touched.value * record.value
    assert (least.low < sent.low, least.value < sent.value, least.high < sent.high) == (True, True, True)
    for moved in of("memory_bytes_per_step", method=MOVED):
        (least,) = of("memory_bytes_per_step", method=LEAST, **{"pass": str(moved.labels["pass"])})
        assert least.high < moved.high
    assert all(row.low >= 1 for row in of("moved_over_least"))
    (moved,), (least,) = (of("at_copying_speed_ms", method=name) for name in (MOVED, LEAST))
    assert 0 < least.value < moved.value
    (copied,) = of("replicated_bytes_per_step")
    assert copied.low == copied.high > 0
    assert tables.metrics([row.to_json() for row in rows])


def test_the_least_is_what_the_page_derives() -> None:
    for r in (1, 2, 3):
        assert sum(one.least_bytes(r, 256) for one in PASSES) == (5 + 5 * r) * 256
        addresses = 8 * (4 + 4 * r)
        assert sum(one.moved_bytes(r, 256) for one in PASSES) == (5 + 5 * r) * 256 + addresses
    assert PASSES[0].moved_bytes(1, 260) == 2 * 264 + 16


class Range(NamedTuple):
    start: float
    end: float


class Event(NamedTuple):
    name: str
    time_range: Range


def test_spans_are_told_by_steps() -> None:
    events = [
        Event("aten::add", Range(1, 2)),
        Event(OURS + "apply", Range(5000, 6000)),
        Event(OWN + STEP, Range(1000, 6000)),
        Event(OWN + "forward", Range(1000, 3000)),
        Event(OWN + STEP, Range(7000, 8000)),
    ]
    assert steps_of(events) == [
        [Span(OWN + STEP, 0, 5), Span(OWN + "forward", 0, 2), Span(OURS + "apply", 4, 5)],
        [Span(OWN + STEP, 0, 1)],
    ]


NAMES = (*(OWN + name for name in (STEP, *TRAINING)), *(OURS + name for name in PHASES))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"wrong_words": 3}, "rank 1: 3 words of parity"),
        ({"steps": []}, "rank 1: 0 of 1 steps have a span"),
        ({"steps": [[Span(name, 0, 1) for name in NAMES[:-1]]]}, r"step 0 has no span \['ecemb.apply'\]"),
    ],
)
def test_a_run_that_shows_nothing(change: dict[str, Any], complaint: str) -> None:
    class Asked(NamedTuple):
        steps: int = 1

    answer = {"wrong_words": 0, "steps": [[Span(name, 0, 1) for name in NAMES]]}
    order: Any = Asked()
    profile.check(order, [answer, answer])
    with pytest.raises(WrongResult, match=complaint):
        profile.check(order, [answer, answer | change])
