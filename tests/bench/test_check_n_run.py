"""Check-N-Run's figures: bytes by pattern, policy and bits; quality after restores; stalls."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from baselines.check_n_run.policy import POLICIES
from baselines.check_n_run.quantize_scheme import EXACT, Scheme
from bench.harness.result import Arguments, Row, WrongResult, document, write
from bench.questions.check_n_run import quality as check_n_run_quality
from bench.questions.check_n_run import question as check_n_run
from bench.questions.check_n_run import stall as check_n_run_stall
from bench.questions.check_n_run import volumes as check_n_run_volumes
from bench.questions.check_n_run.access import LOCALITY, LONG, Law, Pattern, binned, patterns
from bench.questions.check_n_run.quality import Pair, moments, restore, trained
from bench.questions.check_n_run.stall import Block, Order, Told
from bench.questions.check_n_run.volumes import STATES, Look, Volumes, alone, checkpointed
from bench.report import pages
from bench.workloads import planted
from bench.workloads.click_training import Model
from bench.workloads.planted import draw

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's own
WRITERS = (check_n_run_stall.SYNCHRONOUS, "DCP, asynchronous", "check-n-run intermittent, 4 bits, thread")
FEW_ROWS = (500, 3, 40, 2000)
"""Of the tables of the trainings whose quality is compared."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Row]]:
    """The quick answer; its times are taken in this process, and of few writers."""

    def told(scale: check_n_run_stall.Scale, seed: int) -> list[Told]:
        files, memory = (str(tmp_path_factory.mktemp(name)) for name in ("files", "memory"))
        order = Order(**asdict(scale), seed=seed, job="job", files=files, memory=memory)
        with alone():
            return [check_n_run_stall.measured(order)]

    few = {name: check_n_run_stall.WRITERS[name] for name in WRITERS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_n_run_stall, "told", told)
        patch.setattr(check_n_run_stall, "WRITERS", few)
        patch.setattr(planted, "ROWS", FEW_ROWS)
        yield check_n_run.run(Arguments(quick=True))


def of(rows: list[Row], metric: str, **labels: object) -> list[Row]:
    return [row for row in rows if row.metric == metric and labels.items() <= row.labels.items()]


def test_patterns_are_what_they_are_calibrated_on() -> None:
    found = {pattern.name: pattern for pattern in patterns()}
    assert list(found) == ["published", *LOCALITY]
    for pattern in found.values():
        assert pattern.share(LONG) == pytest.approx(0.52, abs=0.002)
    assert found["published"].share(1) == pytest.approx(0.26, abs=0.002)
    for name, seen in LOCALITY.items():
        law = found[name].law
        bins = [float(share) for share in binned(np.array(law.alpha), np.array(1 / law.cutoff))]
        assert bins == pytest.approx([*seen, 1 - sum(seen)], abs=0.02)


def test_rows_change_as_often_as_their_law_says() -> None:
    pattern = Pattern("some", Law(0.3, 20.0))
    changed = pattern.changed(20_000, LONG, np.random.default_rng(1))
    again = pattern.changed(20_000, LONG, np.random.default_rng(1))
    assert all(np.array_equal(*both) for both in zip(changed, again, strict=True))
    for count in (1, 4, LONG):
        touched = len(set().union(*(rows.tolist() for rows in changed[:count])))
        assert touched / 20_000 == pytest.approx(pattern.share(count), abs=0.02)


def test_policies_write_and_keep_what_their_patterns_change(rows: list[Row]) -> None:
    intervals, share = check_n_run.QUICK.volumes.intervals, patterns()[0].share
    written, stored = (
        {policy: [row.value for row in of(rows, metric, policy=policy)] for policy in POLICIES}
        for metric in ("written_of_interval", "stored_of_interval")
    )
    assert all(len(of_policy) == intervals for of_policy in (*written.values(), *stored.values()))
    assert written["full"] == pytest.approx([100] * intervals, rel=0.02)
    for interval in range(intervals):
        assert written["one_shot"][interval] == pytest.approx(100 * share(interval + 1), rel=0.15)
        assert written["consecutive"][interval] == pytest.approx(26, rel=0.15)
    assert stored["one_shot"] == pytest.approx([100 + one for one in written["one_shot"]], rel=0.02)
    heaped = 100 + np.cumsum(written["consecutive"])
    assert stored["consecutive"] == pytest.approx(heaped.tolist(), rel=0.02)
    (between,) = of(rows, "intervals_between_full")
    assert between.labels["policy"] == "intermittent" and 6 <= between.low <= between.high <= 9


def test_fewer_bits_are_fewer_bytes(rows: list[Row]) -> None:
    for metric in ("bandwidth_reduction", "capacity_reduction"):
        by_bits = {row.labels.get("bits"): row.value for row in of(rows, metric, state="none")}
        assert list(by_bits) == ["exact", "8", "4", "3", "2"]
        assert list(by_bits.values()) == sorted(by_bits.values())
        for bits in (2, 3, 4, 8):
            smaller = 4 * 16 / Scheme("asymmetric", bits).row_bytes(16)
            assert by_bits[str(bits)] / by_bits["exact"] == pytest.approx(smaller, rel=0.08)
        published = [row.value for row in of(rows, metric) if "bits" not in row.labels]
        assert published in ([6, 17], [2.5, 8])


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # TorchRec's
@pytest.mark.parametrize("state", ["Adagrad, exact", "Adagrad, 8 bits", "row-wise Adagrad, exact"])
def test_optimizer_state_is_stored_as_it_is_said(state: str) -> None:
    if state in check_n_run_volumes.NEEDS:
        pytest.importorskip(check_n_run_volumes.NEEDS[state])
    touched = [torch.arange(0, 3000, 2), torch.arange(1500)]
    with alone():
        script = STATES[state].script(3000, 32)
        found = checkpointed(script, touched, "consecutive", Scheme("asymmetric", 4), STATES[state].scheme)
    per_row = {"Adagrad, exact": 128, "Adagrad, 8 bits": 40, "row-wise Adagrad, exact": 4}[state] + 24
    assert found.full_bytes == 3000 * (132 if "row-wise" in state else 256)
    assert [look.written / per_row for look in found.looks] == pytest.approx([3000, 1500, 1500], rel=0.05)
    assert [look.is_full for look in found.looks] == [True, False, False] and not found.between_full
    assert found.looks[2].stored == sum(look.written for look in found.looks)


def test_what_is_wrong_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with alone():
        script = STATES["none"].script(50, 8)
        monkeypatch.setattr(check_n_run_volumes, "SLACK", 1e-3)
        with pytest.raises(WrongResult, match="weight is restored"):
            checkpointed(script, [torch.arange(9)], "full", Scheme("asymmetric", 2))
        monkeypatch.setattr(check_n_run_volumes, "manifest_path", lambda name: f"{name}.other")
        with pytest.raises(WrongResult, match="store differs"):
            checkpointed(script, [], "full")
    monkeypatch.setattr("bench.questions.check_n_run.access.CLOSE", 1e-4)
    with pytest.raises(WrongResult, match="locality 2021: a bin's share is off"):
        patterns()


def test_reductions_are_over_full_checkpoints() -> None:
    looks = [Look(100, 100, True), Look(20, 120, False), Look(60, 160, False), Look(100, 100, True)]
    found = Volumes(400, looks)
    bandwidth, capacity = check_n_run_volumes.reductions(found, {})
    assert bandwidth.value == pytest.approx(400 / 60) and capacity.value == pytest.approx(400 / 160)
    assert found.between_full == [3]


def test_each_choice_of_bits_is_trained_and_judged_by_the_rule(rows: list[Row]) -> None:
    size = check_n_run.QUICK.quality
    for metric in ("loss_added_pct", "loss_added", "auc_lost"):
        found = of(rows, metric, steps=size.steps)
        assert [row.labels["bits"] for row in found] == ["2", "3", "4", "8"]
        assert [row.labels["rule"] for row in found] == ["chosen", *["more than chosen"] * 3]
        assert {row.repeats for row in found} == {size.seeds}
        (longer,) = of(rows, metric, steps=size.longer[0])
        assert (longer.labels["bits"], longer.labels["rule"]) == ("2", "chosen")
    within = of(rows, "within_budget", steps=size.steps)
    assert [(row.labels["bits"], row.labels["budget"]) for row in within] == [
        (bits, budget) for bits in ("2", "3", "4", "8") for budget in check_n_run_quality.BUDGETS_PCT
    ]
    assert list(check_n_run_quality.choices(20)) == ["2", "3", "4", "8", "2, then 8"]
    assert list(check_n_run_quality.choices(20, all_=False)) == ["4"]
    falls_back = check_n_run_quality.choices(20)["2, then 8"]
    assert [falls_back(restores).bits for restores in (0, 1, 2, 19)] == [2, 2, 8, 8]
    assert [check_n_run_quality.ruled(20, bits) for bits in ("3", "4", "2, then 8")] == [
        "fewer than chosen",
        "chosen",
        "planned for 1",
    ]
    assert moments(400, 3) == [100, 200, 300] and moments(400, 0) == []


def test_the_fewest_bits_within_a_budget_stand_beside_the_rules() -> None:
    lost = {(3, "2"): 0.5, (3, "3"): 0.2, (3, "4"): 0.005, (3, "2, then 8"): 0.0, (9, "2"): 0.3}
    pairs = {of: [Pair(0.0, pct - 0.1, 0.0), Pair(0.0, pct + 0.1, 0.0)] for of, pct in lost.items()}
    found = [
        (row.labels["restores"], row.labels["asked_by"], row.value)
        for row in check_n_run_quality.least_bits(pairs, {})
    ]
    assert found == [
        (3, "published budget", 4),
        (3, "calibrated budget", 3),
        (3, "rule", 3),
        (9, "published budget", 32),
        (9, "calibrated budget", 32),
        (9, "rule", 4),
    ]


def test_restores_change_what_they_lose_and_exact_ones_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted, "ROWS", FEW_ROWS)
    data = draw(6, 32, 500, seed=2)
    assert trained(data, 2, 2, lambda _: EXACT) == trained(data, 2)
    assert trained(data, 2, 2, lambda _: Scheme("adaptive", 2)) != trained(data, 2)
    model = Model.of(data, 2)
    before = model.weight.detach().clone()
    restore(model, Scheme("asymmetric", 8))
    steps = (before.amax(1) - before.amin(1)) / 255
    off = (model.weight.detach() - before).abs().amax(1)
    assert (off <= 1.01 * steps).all() and off.max() > 0


def test_all_writers_stall_and_are_compared(rows: list[Row]) -> None:
    repeats = check_n_run.QUICK.stalls.repeats
    for metric in ("stall_ms", "stall_over_synchronous", "whole_after_ms", "checkpoint_cpu_ms"):
        found = of(rows, metric)
        assert tuple(row.labels["writer"] for row in found) == WRITERS
        assert all(row.repeats == repeats and row.value > 0 for row in found)
    (full, _, quantized) = of(rows, "checkpoint_bytes")
    assert 0 < quantized.value < full.value
    (tracked,) = of(rows, "tracking_pct")
    assert tracked.low > 0
    noted = [row.labels["noted_in"] for row in of(rows, "tracking_ns_per_row")]
    off_the_shelf = ["ids, by TorchRec's ModelDeltaTracker"] if find_spec("torchrec") else []
    assert noted == ["one bit", "a byte, by torch", *off_the_shelf]


def test_ranks_waits_are_the_longest_and_their_work_is_added_up() -> None:
    first = Block(1.0, 3.0, 0.5, 0.1, 2.1)
    second = replace(first, stall_s=2.0, cpu_s=0.25)
    name, other = "check-n-run full", check_n_run_stall.SYNCHRONOUS
    written = {other: 1.0, name: 2.0}
    told = [Told({other: [one], name: [one]}, written) for one in (first, second)]
    found = list(check_n_run_stall.rows_of(told, check_n_run.QUICK.stalls))
    values = {row.metric: row.value for row in found if row.labels["writer"] == name}
    assert values == pytest.approx(
        {
            "stall_ms": 2000,
            "stall_over_synchronous": 1,
            "whole_after_ms": 3000,
            "checkpoint_cpu_ms": 750,
            "checkpoint_bytes": 4,
            "tracking_pct": 5,
        }
    )


def test_the_page_and_the_picture(rows: list[Row], tmp_path: Path) -> None:
    answer = document("check_n_run", Arguments(), rows)
    write(tmp_path / "check_n_run.json", answer)
    pages.write(tmp_path)
    page = tmp_path / "results" / "check_n_run.md"
    written = page.read_text(encoding="utf-8")
    assert "_of_interval" not in written
    browsed = (tmp_path / "results.html").read_text(encoding="utf-8")
    shown = {row.metric for row in rows if f"<strong><code>{row.metric}</code></strong>" in browsed}
    assert shown == {row.metric for row in rows if not row.metric.endswith("_of_interval")}
    texts: set[str] = set()
    for file, _, painted in pages.PICTURES["check_n_run"]:
        assert f"]({file})" in written
        drawn = page.with_name(file).read_text(encoding="utf-8")
        assert drawn == painted(answer["rows"])
        texts |= {element.text for element in ElementTree.fromstring(drawn).iter() if element.text}
    assert {*POLICIES, "1 restore", "AUC lost", "the published budget", "the calibrated budget"} <= texts
    assert any(text.startswith("Intermittent differentials write") for text in texts)
