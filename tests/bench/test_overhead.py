"""The cost of protection, on real ranks; and that twins which differ would be noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from bench.harness.result import Arguments, Row, WrongResult
from bench.questions.overhead import question as overhead
from bench.questions.overhead.question import QUICK, Scale, sparse_heavy
from bench.workloads import training_rank
from bench.workloads.training_rank import BARE, METHODS, PROTECTED, REPLICATION, Order
from ecemb.coding.code import Code

CODE = Code(4, 3)
ORDER = Order(
    engine="torchrec",
    job="job",
    arena_dir="/dev/shm",
    n=4,
    k=3,
    tables=2,
    rows=50,
    dim=4,
    lookups=1,
    dense="dlrm",
    batch=30,
    skew=1.05,
    window=1,
    overlap=False,
    steps=3,
    repeats=2,
    seed=7,
    timeout_s=600.0,
)
METRICS = {
    "overhead_cpu_pct": 2,
    "overhead_wall_pct": 2,
    "step_cpu_ms": 3,
    "step_wall_ms": 3,
    "bytes_sent_per_step": 2,
    "touched_rows_per_step": 2,
}
PHASES = {"capture", "state", "delta", "heads", "exchange", "agree", "apply"}


@pytest.mark.parametrize(
    ("scale", "window", "overlap"),
    [(QUICK, 1, True), (sparse_heavy(QUICK), 3, False)],
    ids=["dlrm", "sparse-heavy"],
)
@pytest.mark.parametrize("engine", ["sparse", "torchrec"])
def test_twins_stay_the_same_and_their_cost_is_told(
    engine: str, scale: Scale, window: int, overlap: bool
) -> None:
    if engine == "torchrec":
        pytest.importorskip("torchrec", reason="TorchRec is not installed")
    rows = overhead.measure(scale, engine, CODE, window, overlap, seed=3)
    phases = PHASES | {"savepoint"} | ({"wait"} if overlap else set())
    counts = METRICS | {"step_phase_ms": len(phases)}
    found = {name: [row for row in rows if row.metric == name] for name in counts}
    assert {name: len(of) for name, of in found.items()} == counts
    assert sum(map(len, found.values())) == len(rows)
    for row in rows:
        assert (row.labels["engine"], row.labels["code"], row.labels["window"]) == (engine, "(4, 3)", window)
    assert found["overhead_cpu_pct"][0].repeats == QUICK.repeats
    (touched, copied), sent = found["touched_rows_per_step"], found["bytes_sent_per_step"]
    assert (touched.labels["method"], copied.labels["method"]) == (PROTECTED, REPLICATION)
    assert (touched.value, touched.low, touched.high) == (copied.value, copied.low, copied.high)
    assert 0 < touched.low < touched.high < scale.tables * scale.batch * scale.lookups * CODE.n
    for one in sent:
        assert one.low > touched.low * scale.dim * 4
    assert {row.labels["phase"] for row in found["step_phase_ms"]} == phases


def test_batches_are_the_same_again_and_skewed() -> None:
    order = dataclasses.replace(ORDER, rows=1000, batch=500)
    first, again, other = (training_rank.draw(order, rank, 2) for rank in (0, 0, 1))
    assert first[1].ids.equal(again[1].ids) and first[1].integers.equal(again[1].integers)
    assert not first[0].ids.equal(first[1].ids) and not first[0].ids.equal(other[0].ids)
    for table in range(order.tables):
        popular = [
            np.bincount(batches[0].ids[table].flatten().numpy(), minlength=1000).argmax()
            for batches in (first, other)
        ]
        assert popular[0] == popular[1]
        assert 100 < len(set(first[0].ids[table].flatten().tolist())) < 400


def test_each_twin_has_each_place_equally_often() -> None:
    turns = training_rank.turns(9, seed=1)
    assert turns == training_rank.turns(9, seed=1)
    for at in range(0, 9, 3):
        for place in zip(*turns[at : at + 3], strict=True):
            assert set(place) == set(METHODS)
    assert len(training_rank.turns(4, seed=1)) == 4


ANSWER = {
    "rank": 0,
    "digests": {PROTECTED: "ab", REPLICATION: "ab", BARE: "ab"},
    "began": "aa",
    "committed_steps": ORDER.warm_up + 6,
    "wrong_words": 0,
    "scrubbed": True,
    "columns": ["a", "b"],
    "replicas": {1: ["a", "b"]},
}
OTHER = ANSWER | {"rank": 1, "replicas": {0: ["a", "b"]}}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digests": ANSWER["digests"] | {BARE: "ac"}}, "rank 1: the protected model is not what its twin"),
        ({"digests": ANSWER["digests"] | {REPLICATION: "ac"}}, "rank 1: the replicated model is not what"),
        ({"began": "ab"}, "rank 1: training has changed nothing"),
        ({"committed_steps": 6}, "rank 1: 6 of 8 steps"),
        ({"wrong_words": 5}, "rank 1: 5 words of parity"),
        ({"scrubbed": False}, "rank 1: 0 words of parity"),
        ({"replicas": {}}, r"rank 1: holds replicas of ranks \[\] alone"),
        ({"replicas": {0: ["a", "c"]}}, "rank 1: its replica of rank 0 is not what that rank's rows are"),
    ],
)
def test_a_run_that_proves_nothing(change: dict[str, Any], complaint: str) -> None:
    overhead.check(ORDER, [ANSWER, OTHER])
    with pytest.raises(WrongResult, match=complaint):
        overhead.check(ORDER, [ANSWER, OTHER | change])


def test_a_sample_is_a_round_of_blocks() -> None:
    def blocks(cpu: list[float], wall: list[float], **more: float) -> list[dict[str, float]]:
        return [{"cpu_s": c, "wall_s": w, **more} for c, w in zip(cpu, wall, strict=True)]

    copied = {"sent_bytes": 70.0, "touched_rows": 20.0}
    counts = {"sent_bytes": 50.0, "touched_rows": 20.0, "phase apply": 0.004}
    answers = [
        {
            "blocks": {
                PROTECTED: blocks([1.2, 1.0], [2.0, 4.0], **counts),
                REPLICATION: blocks([1.0, 2.0], [2.0, 1.0], **copied),
                BARE: blocks([1.0, 1.0], [2.0, 1.0]),
            }
        },
        {
            "blocks": {
                PROTECTED: blocks([1.0, 1.0], [3.0, 2.0], **counts),
                REPLICATION: blocks([1.0, 1.0], [2.0, 3.0], **copied),
                BARE: blocks([1.0, 1.0], [1.0, 2.0]),
            }
        },
    ]
    rows = overhead.rows_of(answers, 10, {"code": "x"})

    def row(metric: str, **labels: str) -> Row:
        (one,) = [r for r in rows if r.metric == metric and labels.items() <= r.labels.items()]
        return one

    protected, replicated = ({"method": method} for method in (PROTECTED, REPLICATION))
    cpu = row("overhead_cpu_pct", **protected)
    assert (cpu.low, cpu.high) == pytest.approx((0, 10))
    wall = row("overhead_wall_pct", **protected)
    assert (wall.low, wall.high) == pytest.approx((50, 100))
    rival = row("overhead_cpu_pct", **replicated)
    assert (rival.low, rival.high) == pytest.approx((0, 50))
    assert row("step_cpu_ms", method=BARE).value == pytest.approx(200)
    assert row("step_wall_ms", **protected).high == pytest.approx(400)
    assert row("bytes_sent_per_step", **protected).value == 5
    assert row("bytes_sent_per_step", **replicated).value == 7
    assert row("touched_rows_per_step", **protected).value == 2
    assert row("step_phase_ms", phase="apply").value == pytest.approx(0.4)


@pytest.mark.parametrize(("quick", "codes"), [(False, overhead.CODES), (True, overhead.CODES[:1])])
def test_each_setting_code_and_window_is_measured(
    quick: bool, codes: tuple[Code, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, Code, int, bool]] = []

    def pretend(scale: Scale, engine: str, code: Code, window: int, overlap: bool, seed: int) -> list[Row]:
        asked.append((scale.name, engine, code, window, overlap))
        return []

    monkeypatch.setattr(overhead, "measure", pretend)
    for given, names in (
        ("", ("dlrm", "sparse-heavy")),
        ("dlrm", ("dlrm",)),
        ("sparse-heavy", ("sparse-heavy",)),
    ):
        asked.clear()
        overhead.run(Arguments(quick=quick, engine="sparse", setting=given))
        assert asked == [
            (name, "sparse", code, *commits)
            for name in names
            for code in codes
            for commits in overhead.COMMITS
        ]


def test_a_block_is_whole_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Order] = []

    def pretend(*args: Any, **_: Any) -> None:
        orders.append(args[2])
        raise ZeroDivisionError

    monkeypatch.setattr(overhead, "Ranks", pretend)
    for window in (1, 16):
        with pytest.raises(ZeroDivisionError):
            overhead.measure(overhead.FULL, "sparse", CODE, window, False, seed=0)
    assert [(order.steps, order.warm_up, order.repeats) for order in orders] == [(4, 2, 24), (16, 16, 8)]
