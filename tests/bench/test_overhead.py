"""The cost of protection, on real ranks; and that models which differ would be noticed."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.harness.result import Arguments, Row, Unavailable, WrongResult, document
from bench.harness.thread_clocks import ThreadClocks, threads
from bench.questions.overhead import device, estimate, managed_collision
from bench.questions.overhead import question as overhead
from bench.questions.overhead.estimate import Strata
from bench.questions.overhead.question import QUICK, Scale, Steps, sparse_heavy
from bench.workloads import models, pairs, training_rank
from bench.workloads.training_rank import BARE, CONTROL, METHODS, PROTECTED, REPLICATION, RIVALS, Order
from ecemb.coding.code import Code
from ecemb.coding.rows import Column, TableLayout

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
    seed=7,
    timeout_s=600.0,
)
METRICS = {
    "overhead_cpu_pct": {PROTECTED, CONTROL},
    "overhead_wall_pct": {PROTECTED, CONTROL},
    "step_cpu_ms": {PROTECTED, BARE},
    "step_wall_ms": {PROTECTED, BARE},
    "step_p99_over_median": {PROTECTED, BARE},
    "bytes_sent_per_step": {PROTECTED},
    "touched_rows_per_step": {PROTECTED},
}
PHASES = {"capture", "compare", "state", "delta", "status", "exchange", "agree", "apply"}


def methods_of(rows: Sequence[Row], metric: str) -> set[Any]:
    return {row.labels["method"] for row in rows if row.metric == metric}


@pytest.mark.parametrize(
    ("scale", "window", "overlap"),
    [
        pytest.param(QUICK, 1, True, marks=pytest.mark.long, id="dlrm"),
        pytest.param(sparse_heavy(QUICK), 8, False, id="sparse-heavy"),
        pytest.param(QUICK, "auto", True, id="auto"),
    ],
)
@pytest.mark.parametrize("engine", [pytest.param("sparse", marks=pytest.mark.long), "torchrec"])
def test_models_stay_the_same_and_the_cost_is_told(
    engine: str, scale: Scale, window: Steps, overlap: bool
) -> None:
    if engine == "torchrec":
        pytest.importorskip("torchrec", reason="TorchRec is not installed")
    rows = overhead.measure(scale, engine, CODE, window, overlap, seed=3)
    assert {metric: methods_of(rows, metric) for metric in METRICS} == METRICS
    for row in rows:
        assert (row.labels["engine"], row.labels["code"], row.labels["r"]) == (engine, "(4, 3)", 1)
        assert (row.labels["window"], row.labels["overlap"]) == (window, "next step" if overlap else "none")
    (cost, _) = (row for row in rows if row.metric == "overhead_cpu_pct")
    assert (cost.labels["method"], cost.repeats) == (PROTECTED, scale.pairs)
    (touched,) = (row for row in rows if row.metric == "touched_rows_per_step")
    (sent,) = (row for row in rows if row.metric == "bytes_sent_per_step")
    assert 0 < touched.low < touched.high < scale.tables * scale.batch * scale.lookups * CODE.n
    assert sent.low > touched.low * scale.dim * 4
    waits = {"wait"} if overlap else set[str]()
    by_phase = {row.labels["phase"]: row for row in rows if row.metric == "phases_cpu_ms"}
    assert {*by_phase} - {"wait"} == PHASES | {"other", "network", "watch"}
    assert all(by_phase[name].low > 0 for name in PHASES)
    assert {row.labels["phase"] for row in rows if row.metric == "step_phase_ms"} - waits == PHASES
    (witness,) = (row for row in rows if row.metric == "phases_cpu_pct")
    assert witness.low > 0
    chosen = [row.value for row in rows if row.metric == "window_steps"]
    assert len(chosen) == (window == "auto") and all(1 <= steps == int(steps) for steps in chosen)


@pytest.mark.long
def test_a_managed_collision_is_measured_beside_plain_tables() -> None:
    """Over an interval between evictions; its models have the same maps at the end."""
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    rows = overhead.with_managed_collision(dataclasses.replace(QUICK, tables=2), "torchrec", [CODE], seed=3)
    assert {row.labels.get("engine") for row in rows} == {*managed_collision.ENGINES, None}
    (ratio,) = (row for row in rows if row.metric == "managed_over_plain")
    plain, managed = (
        next(row for row in rows if row.metric == "overhead_cpu_pct" and row.labels["engine"] == engine)
        for engine in managed_collision.ENGINES
    )
    assert ratio.value == managed.value / plain.value and ratio.repeats == models.EVICT_EVERY
    touched = {row.labels["engine"]: row.value for row in rows if row.metric == "touched_rows_per_step"}
    assert touched["managed"] > 2 * touched["torchrec"]  # maps and histories
    with pytest.raises(Unavailable, match="managed-collision"):
        overhead.with_managed_collision(QUICK, "sparse", [CODE], seed=3)


def test_whole_intervals_between_evictions_are_measured() -> None:
    assert [managed_collision.whole_intervals(pairs) for pairs in (2, 32, 40, 70)] == [32, 32, 32, 64]


def test_the_rival_is_compared_with_bare_models_of_its_own() -> None:
    rows = overhead.measure(dataclasses.replace(QUICK, methods=RIVALS), "sparse", CODE, 1, False, seed=3)
    assert methods_of(rows, "overhead_cpu_pct") == {REPLICATION, "control beside replication"}
    assert methods_of(rows, "bytes_sent_per_step") == {REPLICATION}
    assert not {"phases_cpu_ms", "step_phase_ms"} & {row.metric for row in rows}


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


def test_each_model_has_each_place_equally_often() -> None:
    turns = pairs.turns(9, METHODS, seed=1)
    assert turns == pairs.turns(9, METHODS, seed=1)
    for at in range(0, 9, 3):
        for place in zip(*turns[at : at + 3], strict=True):
            assert set(place) == set(METHODS)
    assert len(pairs.turns(4, METHODS, seed=1)) == 4


@pytest.mark.parametrize(
    ("steps", "window", "windows"),
    [(5, 1, 5), (32, 16, 3), (64, 16, 4), (32, 64, 3), (30, 1000, 3), (4, 64, 2), (2, 8, 1), (7, 2, 3)],
)
def test_each_window_is_measured_at_its_end_and_elsewhere(steps: int, window: int, windows: int) -> None:
    found = pairs.measured_places(steps, window, seed=5)
    assert found == pairs.measured_places(steps, window, seed=5)
    assert len(found) == windows and steps - 1 <= sum(map(len, found)) <= steps
    for places in found:
        assert places == sorted(set(places))
        assert places[0] >= 0 and places[-1] == window - 1
    assert {place for places in found for place in places} - {window - 1} or window == 1


def test_tables_are_known_by_their_numbers() -> None:
    names = [f"tables.{i}" for i in (0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9)]
    assert pairs.by_number(names, 12) == [f"tables.{i}" for i in range(12)]
    with pytest.raises(ValueError, match="from 0 on"):
        pairs.by_number(names[1:], 11)


def test_tables_of_a_buffer_are_captured_by_one_call() -> None:
    weight, other = (Column("weight", "float32", size) for size in (64, 32))
    layouts = [
        TableLayout(name, rows, (column,), group)
        for name, rows, column, group in [
            ("alone", 5, weight, ""),
            ("first", 3, weight, "a"),
            ("second", 4, weight, "a"),
            ("third", 2, other, "b"),
            ("unlike", 2, weight, "b"),
        ]
    ]
    expected = {"alone": (0, 0), "first": (1, 0), "second": (1, 3), "third": (3, 0), "unlike": (4, 0)}
    assert pairs.places_in_groups(layouts) == expected


def test_a_threads_clock_counts_its_work_alone() -> None:
    others = threads()
    done, begun = threading.Event(), threading.Event()

    def spin() -> None:
        while time.thread_time() < 0.05:
            pass
        begun.set()
        done.wait()

    thread = threading.Thread(target=spin)
    thread.start()
    begun.wait()
    clocks = ThreadClocks(threads() - others)
    spent = clocks.read()
    assert len(clocks) >= 1 and spent >= 0.05
    done.set()
    thread.join()
    assert clocks.read() >= spent  # it has ended


def test_threads_are_idle_while_bare_models_train() -> None:
    class Taken:
        def __init__(self) -> None:
            self.taken: dict[str, list[Any]] = {}

        def take(self, name: str, method: Any, batch: Any) -> None:
            self.taken.setdefault(name, []).append((9.0, batch, method, 5.0))

    slots: Any = Taken()
    bare: Any = {BARE: 0.2, CONTROL: 0.4}
    assert pairs.idle(bare, [1.0, 3.0], slots) == pytest.approx((0.2 + 0.2 + 0.4 + 0.4) / (1 + 3 + 1 + 3))
    assert [len(slots.taken[name]) for name in (BARE, CONTROL)] == [2, 2]


def test_resampling_finds_a_difference_and_none_where_there_is_none() -> None:
    rng = np.random.default_rng(3)
    load = rng.uniform(1, 3, 200)  # of the machine, which meets both models of a round
    noise = [load * rng.normal(1, 0.02, 200) for _ in range(3)]
    seconds = {PROTECTED: 1.05 * noise[0], BARE: noise[1], CONTROL: noise[2]}
    found = estimate.overheads(seconds, Strata([True] * 200, 1))
    assert 4 < found[PROTECTED].low < 5 < found[PROTECTED].high < 6
    assert -1 < found[CONTROL].low < 0 < found[CONTROL].high < 1


def test_launches_that_differ_widen_the_interval_whatever_the_rounds_of_each() -> None:
    """The error of a mean of L launches that differ by `s` is s / sqrt(L), with any number of rounds."""
    rng = np.random.default_rng(3)
    apart = rng.normal(0, 1, 8)
    launches = np.repeat(np.arange(8), 50)
    values = apart[launches] + rng.normal(0, 0.1, len(launches))
    alike, found = (Strata([True] * len(values), 1, of).mean(values) for of in ((), launches.tolist()))
    error = apart.std(ddof=1) / math.sqrt(8)
    assert found.value == alike.value == pytest.approx(values.mean())
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.15)
    assert alike.high - alike.low < (found.high - found.low) / 3


def test_both_kinds_of_rounds_are_of_the_launches_that_were_drawn() -> None:
    """One launch has no commit: its own rounds count, and other launches' commits."""
    commits, launches = [False, True, False, True, False, False], [0, 0, 1, 1, 2, 2]
    seconds = np.asarray([1.0, 10.0, 1.0, 10.0, 1.0, 1.0])
    found = Strata(commits, 10, launches).mean(seconds)
    assert (found.value, found.low, found.high) == pytest.approx((1.9, 1.9, 1.9))
    pairs = Strata([True, True], 1, [0, 1]).mean(np.asarray([1.0, 3.0]))
    assert (pairs.low, pairs.high) == pytest.approx((2 - math.sqrt(2), 2 + math.sqrt(2)))


def test_a_commit_counts_once_a_window() -> None:
    """Four windows of 100 steps, of which five are measured in each; a commit takes as long as 20 steps."""
    commits = ([False] * 4 + [True]) * 4
    seconds = np.where(commits, 21.0, 1.0)
    strata = Strata(commits, 100)
    assert strata.mean(seconds).value == pytest.approx(1.2)
    assert strata.ratio(seconds, np.ones(20)).low == pytest.approx(1.2)
    assert estimate.quantile(seconds, strata.weights, 0.5) == 1.0
    assert estimate.quantile(seconds, strata.weights, 0.98) == 1.0
    assert estimate.quantile(seconds, strata.weights, 0.995) == 21.0


def slots(cpu: Sequence[float], wall: float, beside: float = 0.0, watch: float = 0.0) -> list[Any]:
    return [(one, wall, beside, watch) for one in cpu]


def answer(rank: int) -> dict[str, Any]:
    """Two rounds, the second one a commit, in a window of two steps."""
    return {
        "slots": {
            PROTECTED: slots([1.1, 1.6], 2.0 + rank, beside=0.1, watch=0.05),
            BARE: slots([1.25, 1.25], 2.0, beside=0.2, watch=0.05),
            CONTROL: slots([1.05, 1.05], 2.0, watch=0.05),
        },
        "commits": [False, True],
        "cycles": [(0.7, 20.0)],
        "idle": 0.01,
        "window": 2,
        "protected_steps": 2,
        "counted": {
            PROTECTED: {"sent_bytes": 50.0, "touched_rows": 20.0, "phase apply": 0.004},
            BARE: {},
            CONTROL: {},
        },
        "phases_cpu_s": {"capture": 0.1, "state": 0.2, "apply": 0.3},
        "ends_cpu_s": 0.25,
        "beside_cpu_s": 0.55,
        "watch_cpu_s": 0.2,
        "wall_s": 10.0,
    }


def test_work_beside_counts_for_the_commit_that_it_belongs_to() -> None:
    answers = [answer(0), answer(1)]
    cpu = estimate.cpu_s(answers)
    assert cpu[PROTECTED].tolist() == pytest.approx([2 * 1.0, 2 * (1.5 + 0.5)])
    assert cpu[BARE].tolist() == cpu[CONTROL].tolist() == pytest.approx([2.0, 2.0])
    assert estimate.wall_s(answers)[PROTECTED].tolist() == [3.0, 3.0]
    rows = list(overhead.rows_of(answers, {"window": 2}, overlap=True))

    def row(metric: str, **labels: str) -> Row:
        (one,) = [r for r in rows if r.metric == metric and labels.items() <= r.labels.items()]
        return one

    assert row("overhead_cpu_pct", method=PROTECTED).value == pytest.approx(50)
    control = row("overhead_cpu_pct", method=CONTROL)
    assert (control.low, control.high) == pytest.approx((0, 0))
    assert row("step_cpu_ms", method=BARE).value == pytest.approx(2000)
    assert row("step_cpu_ms", method=PROTECTED).value == pytest.approx(3000)
    assert row("overhead_wall_pct", method=PROTECTED).value == pytest.approx(50)
    assert row("bytes_sent_per_step", method=PROTECTED).value == 25
    assert row("touched_rows_per_step", method=PROTECTED).value == 10
    assert row("step_phase_ms", phase="apply").value == pytest.approx(2)
    assert row("phases_cpu_ms", phase="state").value == pytest.approx(100)
    assert row("phases_cpu_ms", phase="other").value == pytest.approx(25)
    assert row("phases_cpu_ms", phase="network").value == pytest.approx(75)
    assert row("phases_cpu_ms", phase="watch").value == pytest.approx(1000 * 0.02 * 2.5, rel=0.25)
    whole = [r.value for r in rows if r.metric == "phases_cpu_ms"]
    assert row("phases_cpu_pct").value == pytest.approx(100 * math.fsum(whole) / 1000)


def test_a_value_can_be_computed_again_from_the_rounds_that_are_kept() -> None:
    answers = [answer(0), answer(1)]
    rows = list(overhead.rows_of(answers, {"window": 2}, overlap=True))
    kept = document("overhead", Arguments(), rows)["rounds"]
    assert len(kept) == 2 * 2  # processor and wall time, of the protected model and of the control
    for one in kept:
        (row,) = [r for r in rows if (r.metric, r.labels.get("method")) == (one["metric"], one["method"])]
        read = {name: np.array(one[name].split(), float) for name in row.rounds}
        strata = Strata(
            read["ends_transaction"].astype(bool).tolist(), 2, read["launch"].astype(int).tolist()
        )
        again = strata.ratio(read["method_ms"], read["bare_ms"]).times(100, less=1)
        assert again == pytest.approx((row.value, row.low, row.high))


def test_launches_add_up_to_one() -> None:
    launches = [[answer(0), answer(1)], [answer(0) | {"idle": 0.03, "wall_s": 30.0}, answer(1)]]
    first, other = estimate.joined(launches)
    assert (first["commits"], first["window"], first["launches"]) == ([False, True] * 2, 2, [0, 0, 1, 1])
    assert first["slots"][BARE] == 2 * answer(0)["slots"][BARE] and len(first["cycles"]) == 2
    assert first["counted"][PROTECTED] == {"sent_bytes": 100.0, "touched_rows": 40.0, "phase apply": 0.008}
    assert (first["protected_steps"], first["wall_s"]) == (4, 40.0)
    assert (first["idle"], other["idle"]) == (pytest.approx(0.025), pytest.approx(0.01))
    assert estimate.cpu_s([first, other])[BARE].tolist() == pytest.approx([2.0] * 4)


def test_the_window_that_auto_chose_stays_in_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, int, int]] = []

    def pretend(*_: Any, window: Any, overlap: bool, steps: int, seed: int) -> Any:
        asked.append((window, steps, seed))
        return ORDER, [{"window": 61}]

    monkeypatch.setattr(overhead, "train", pretend)
    monkeypatch.setattr(overhead, "check", lambda *_: None)
    monkeypatch.setattr(overhead, "joined", len)
    scale = dataclasses.replace(overhead.FULL, pairs=81, launches=2)
    assert overhead.trained(scale, "sparse", CODE, "auto", True, 5) == 2
    assert asked == [("auto", 41, 5), (61, 40, 6)]


def test_the_slowest_steps_over_the_median() -> None:
    quiet, spike = np.ones(200), np.where(np.arange(200) < 10, 3.0, 1.0)
    strata = Strata([True] * 200, 1)
    seconds = {PROTECTED: spike, BARE: 2 * quiet, CONTROL: 2 * quiet}
    assert estimate.p99_over_median(seconds, strata, beside=False) == {PROTECTED: 3, BARE: 1}
    seconds = {PROTECTED: quiet, BARE: 2 * spike, CONTROL: 2 * quiet}
    assert estimate.p99_over_median(seconds, strata, beside=True) == {PROTECTED: 3, BARE: 3}
    seconds = {REPLICATION: spike, BARE: quiet, CONTROL: quiet}
    assert estimate.p99_over_median(seconds, strata, beside=False) == {REPLICATION: 3, BARE: 1}


ANSWER: Mapping[str, Any] = {
    "rank": 0,
    "digests": {PROTECTED: "ab", BARE: "ab", CONTROL: "ab"},
    "began": "aa",
    "committed_steps": 8,
    "expected_steps": 8,
    "window": 4,
    "window_at_end": 4,
    "wrong_words": 0,
    "scrubbed": True,
}
COPIED = {
    "rank": 0,
    "digests": {REPLICATION: "ab", BARE: "ab", CONTROL: "ab"},
    "began": "aa",
    "columns": ["a", "b"],
    "replicas": {1: ["a", "b"]},
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digests": {PROTECTED: "ab", BARE: "ac"}}, "rank 1: the model 'protected' is not what its bare"),
        ({"digests": {PROTECTED: "ab", BARE: "ab", CONTROL: "ac"}}, "rank 1: the model 'control' is not"),
        ({"began": "ab"}, "rank 1: training has changed nothing"),
        ({"committed_steps": 6}, "rank 1: 6 of 8 steps"),
        ({"window_at_end": 7}, "rank 1: the window changed from 4 to 7 steps"),
        ({"wrong_words": 5}, "rank 1: 5 words of parity"),
        ({"scrubbed": False}, "rank 1: 0 words of parity"),
    ],
)
def test_a_run_that_proves_nothing(change: dict[str, Any], complaint: str) -> None:
    other = {**ANSWER, "rank": 1}
    overhead.check(ORDER, [ANSWER, other])
    with pytest.raises(WrongResult, match=complaint):
        overhead.check(ORDER, [ANSWER, other | change])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digests": {REPLICATION: "ac", BARE: "ab"}}, "rank 1: the model 'replication' is not what its"),
        ({"replicas": {}}, r"rank 1: holds replicas of ranks \[\] alone"),
        ({"replicas": {0: ["a", "c"]}}, "rank 1: its replica of rank 0 is not what that rank's rows are"),
    ],
)
def test_copies_that_prove_nothing(change: dict[str, Any], complaint: str) -> None:
    order = dataclasses.replace(ORDER, methods=RIVALS)
    other = COPIED | {"rank": 1, "replicas": {0: ["a", "b"]}}
    overhead.check(order, [COPIED, other])
    with pytest.raises(WrongResult, match=complaint):
        overhead.check(order, [COPIED, other | change])


@pytest.mark.parametrize(("quick", "codes"), [(False, overhead.CODES), (True, overhead.CODES[:1])])
def test_each_setting_code_and_window_is_measured(
    quick: bool, codes: tuple[Code, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, int, Code, bool, Steps, bool]] = []

    def pretend(scale: Scale, engine: str, code: Code, window: Steps, overlap: bool, seed: int) -> list[Row]:
        rival = REPLICATION in scale.methods
        asked.append((scale.name, engine, scale.pairs, code, rival, window, overlap))
        return []

    monkeypatch.setattr(overhead, "measure", pretend)

    def cases_of(engine: str) -> list[tuple[bool, Steps, bool]]:
        commits = overhead.COMMITS if engine == "torchrec" else overhead.BESIDE_COMMITS
        rivals: list[tuple[bool, Steps, bool]] = [(True, 1, False)] if engine == "torchrec" else []
        return [*((False, *one) for one in commits), *rivals]

    for engine, given, names in (
        ("torchrec", "", ("dlrm",) if quick else ("dlrm", "sparse-heavy")),
        ("sparse", "", ("dlrm",) if quick else ("dlrm", "sparse-heavy")),
        ("sparse", "dlrm", ("dlrm",)),
        ("sparse", "sparse-heavy", ("sparse-heavy",)),
    ):
        asked.clear()
        overhead.run(Arguments(quick=quick, engine=engine, setting=given, pairs=77))
        assert asked == [
            (name, engine, overhead.FEWER if case[0] else 77, code, *case)
            for name in names
            for code in codes
            for case in cases_of(engine)
        ]


def test_pairs_go_where_verdicts_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[tuple[str, str], set[int]] = {}

    def pretend(scale: Scale, engine: str, *_: Any) -> list[Row]:
        asked.setdefault((engine, scale.name), set()).add(scale.pairs)
        return []

    monkeypatch.setattr(overhead, "measure", pretend)
    for engine in ("torchrec", "sparse"):
        overhead.run(Arguments(engine=engine))
    few = {overhead.FEWER}
    assert asked == {
        ("torchrec", "dlrm"): few | {overhead.FULL.pairs},
        ("torchrec", "sparse-heavy"): few,
        ("sparse", "dlrm"): few,
        ("sparse", "sparse-heavy"): few,
    }


def test_auto_is_given_a_mean_time_between_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[Order] = []

    def pretend(*args: Any, **_: Any) -> None:
        orders.append(args[2])
        raise ZeroDivisionError

    monkeypatch.setattr(overhead, "Ranks", pretend)
    for window in (16, "auto"):
        with pytest.raises(ZeroDivisionError):
            overhead.measure(overhead.FULL, "sparse", CODE, window, False, seed=0)
    fixed, auto = orders
    assert (fixed.window, fixed.mtbf_s) == (16, None)
    assert fixed.steps == overhead.FULL.pairs // overhead.FULL.launches
    assert auto.window == "auto" and auto.mtbf_s is not None and 3600 < auto.mtbf_s < 86400


def test_a_device_that_trains_leaves_processors_to_commits() -> None:
    order: Any = SimpleNamespace(n=4, dim=64)
    at_full_share = device.rows_a_step(order, 0.05, 8)
    assert at_full_share * 256 / 0.05 * device.CORE_S_PER_GB * 1e-9 == pytest.approx(1 / 3, rel=1e-3)
    assert device.rows_a_step(order, 0.05, 2) == pytest.approx(at_full_share / 2, abs=1)
    assert device.rounds_of(20, 10, 0.01) == 20 and device.rounds_of(20, 1000, 0.05) == device.LEAST_ROUNDS
    blocks = {PROTECTED: [(2.5, 10.1)] * 4, BARE: [(0.5, 10.0)] * 4, CONTROL: [(0.5, 10.0)] * 4}
    answer = {
        "window": 20,
        "bytes_per_s": 2e8,
        "blocks": blocks,
        "undecided": 11.0,
        "began": "0",
        "digests": dict.fromkeys(blocks, "1"),
        "wrong_words": 0,
        "scrubbed": True,
    }
    rows = device.rows_of([answer, answer], {"step_ms": 50})
    values = {(row.metric, row.labels.get("method")): row.value for row in rows}
    assert values["device_wall_pct", PROTECTED] == pytest.approx(1.0)
    assert values["device_wall_pct", CONTROL] == pytest.approx(0.0)
    assert values["replayed_windows", None] == 0.55 and values["device_mb_per_s", None] == 200
    assert values["device_cores", None] == pytest.approx(2 / 10.1)
    for change in ({"wrong_words": 3}, {"began": "1"}, {"digests": {PROTECTED: "2", BARE: "1"}}):
        with pytest.raises(WrongResult):
            device.rows_of([answer | change], {})
