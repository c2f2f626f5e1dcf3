"""The cost of protection, on real ranks; and that twins which differ would be noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from bench import overhead, overhead_rank
from bench.overhead import QUICK
from bench.overhead_rank import BARE, PROTECTED, WARM_UP, Order
from bench.result import Arguments, Row, WrongResult
from ecemb.code import Code

CODE = Code(4, 3)
ORDER = Order("torchrec", "job", "/dev/shm", 4, 3, 2, 50, 4, 30, 1.05, 3, 2, 7, 60.0)
METRICS = {
    "overhead_cpu_pct": 1,
    "overhead_wall_pct": 1,
    "step_cpu_ms": 2,
    "step_wall_ms": 2,
    "bytes_sent_per_step": 1,
    "touched_rows_per_step": 1,
    "step_phase_ms": 6,
}


@pytest.mark.parametrize("engine", ["sparse", "torchrec"])
def test_twins_stay_the_same_and_their_cost_is_told(engine: str) -> None:
    if engine == "torchrec":
        pytest.importorskip("torchrec", reason="TorchRec is not installed")
    rows = overhead.measure(QUICK, engine, CODE, seed=3)
    found = {name: [row for row in rows if row.metric == name] for name in METRICS}
    assert {name: len(of) for name, of in found.items()} == METRICS
    assert sum(map(len, found.values())) == len(rows)
    for row in rows:
        assert (row.labels["engine"], row.labels["code"], row.labels["window"]) == (engine, "(4, 3)", 1)
    assert found["overhead_cpu_pct"][0].repeats == QUICK.repeats
    sent, touched = found["bytes_sent_per_step"][0], found["touched_rows_per_step"][0]
    assert 0 < touched.low < touched.high < QUICK.tables * QUICK.batch * CODE.n
    assert sent.low > touched.low * QUICK.dim * 4
    assert {row.labels["phase"] for row in found["step_phase_ms"]} == {
        "capture",
        "state",
        "delta",
        "exchange",
        "agree",
        "apply",
    }


def test_batches_are_the_same_again_and_skewed() -> None:
    order = dataclasses.replace(ORDER, rows=1000, batch=500)
    first, again, other = (overhead_rank.draw(order, rank, 2) for rank in (0, 0, 1))
    assert first[1].ids.equal(again[1].ids) and first[1].integers.equal(again[1].integers)
    assert not first[0].ids.equal(first[1].ids) and not first[0].ids.equal(other[0].ids)
    for table in range(order.tables):
        popular = [
            np.bincount(batches[0].ids[table].numpy(), minlength=1000).argmax() for batches in (first, other)
        ]
        assert popular[0] == popular[1]
        assert 100 < len(set(first[0].ids[table].tolist())) < 400


def test_each_twin_is_first_equally_often() -> None:
    turns = overhead_rank.turns(8, seed=1)
    assert turns == overhead_rank.turns(8, seed=1)
    for at in range(0, 8, 2):
        assert sorted(turns[at : at + 2]) == sorted([(PROTECTED, BARE), (BARE, PROTECTED)])
    assert len(overhead_rank.turns(3, seed=1)) == 3


ANSWER = {
    "digests": {PROTECTED: "ab", BARE: "ab"},
    "began": "aa",
    "committed_steps": WARM_UP + 6,
    "wrong_words": 0,
    "scrubbed": True,
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digests": {PROTECTED: "ab", BARE: "ac"}}, "rank 1: the protected model is not what its twin is"),
        ({"began": "ab"}, "rank 1: training has changed nothing"),
        ({"committed_steps": 6}, "rank 1: 6 of 8 steps"),
        ({"wrong_words": 5}, "rank 1: 5 words of parity"),
        ({"scrubbed": False}, "rank 1: 0 words of parity"),
    ],
)
def test_a_run_that_proves_nothing(change: dict[str, Any], complaint: str) -> None:
    overhead.check(ORDER, [ANSWER, ANSWER])
    with pytest.raises(WrongResult, match=complaint):
        overhead.check(ORDER, [ANSWER, ANSWER | change])


def test_a_sample_is_a_pair_of_blocks() -> None:
    def blocks(cpu: list[float], wall: list[float], **more: float) -> list[dict[str, float]]:
        return [{"cpu_s": c, "wall_s": w, **more} for c, w in zip(cpu, wall, strict=True)]

    counts = {"sent_bytes": 50.0, "captured_rows": 20.0, "phase apply": 0.004}
    answers = [
        {
            "blocks": {
                PROTECTED: blocks([1.2, 1.0], [2.0, 4.0], **counts),
                BARE: blocks([1.0, 1.0], [2.0, 1.0]),
            }
        },
        {
            "blocks": {
                PROTECTED: blocks([1.0, 1.0], [3.0, 2.0], **counts),
                BARE: blocks([1.0, 1.0], [1.0, 2.0]),
            }
        },
    ]
    rows = overhead.rows_of(answers, 10, {"code": "x"})

    def row(metric: str, **labels: str) -> Row:
        (one,) = [r for r in rows if r.metric == metric and labels.items() <= r.labels.items()]
        return one

    assert (row("overhead_cpu_pct").low, row("overhead_cpu_pct").high) == pytest.approx((0, 10))
    assert (row("overhead_wall_pct").low, row("overhead_wall_pct").high) == pytest.approx((50, 100))
    assert row("step_cpu_ms", method=BARE).value == pytest.approx(200)
    assert row("step_wall_ms", method=PROTECTED).high == pytest.approx(400)
    assert (row("bytes_sent_per_step").value, row("touched_rows_per_step").value) == (5, 2)
    assert row("step_phase_ms", phase="apply").value == pytest.approx(0.4)


def test_each_code_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Code]] = []

    def pretend(scale: Any, engine: str, code: Code, seed: int) -> list[Row]:
        asked.append((engine, code))
        return []

    monkeypatch.setattr(overhead, "measure", pretend)
    overhead.run(Arguments(quick=True, engine="sparse"))
    assert asked == [("sparse", Code(4, 3)), ("sparse", Code(4, 2))]
