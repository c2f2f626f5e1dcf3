"""What ledgers of killed ranks say, and what costs say of a long job; broken promises are noticed.

`make bench-quick` kills some in earnest.
"""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baselines.cpr.priority import Mfu, Ssu
from baselines.method import Costs, Promise
from bench.harness.ranks import RankFailed
from bench.harness.result import Arguments, BadOption, Incomplete, Row, WrongResult, once
from bench.harness.torchrun import LaunchFailed
from bench.methods import life as life_
from bench.methods.ledger import Account, Done, Ledger, Life, lives
from bench.methods.registry import METHODS, STAY
from bench.questions.compare import cases, charged, failures, families, measured
from bench.questions.compare import picture as compare_picture
from bench.questions.compare import question as compare
from bench.questions.compare import rows as compare_rows
from bench.questions.compare.beside_twins import FEW, RIVAL, WHOLE, looked_up
from bench.questions.compare.cases import BY_METHOD
from bench.questions.compare.failures import Deaths
from bench.questions.compare.measured import LOST, SECONDS, STALL, STALL_CPU, WRITTEN, Measured
from bench.questions.compare.question import FULL, QUICK
from bench.questions.compare.rank import Order
from bench.questions.compare.rows import Told
from bench.questions.overhead.estimate import Estimate
from bench.report import choosing, summary, tables
from bench.workloads.training_rank import BARE, CONTROL
from ecemb.net.staying import Stay

ORDER = Order(
    engine="sparse",
    method="a rival",
    folder="",
    memory="",
    reference="",
    job="job",
    tables=1,
    rows=9,
    dim=4,
    lookups=1,
    dense="small",
    batch=3,
    skew=1.0,
    steps=17,
    noted=(),
    kills=2,
    killed=9,
    victims=(1,),
    apart_s=(1.0, 2.0),
    every=4,
    bytes_per_s=1e6,
    seed=1,
    timeout_s=1.0,
)


def life(
    started: int,
    stop: int,
    *,
    begin_s: float = 100.0,
    cut_off: bool = False,
    struck_at_s: float | None = None,
) -> Life:
    """Of equal steps; one more is cut off."""
    done = tuple(
        Done(step, begin_s + 2.0 * passed, 4.0 * passed, Costs(0.5 * passed, 10 * passed, 20 * passed))
        for passed, step in enumerate(range(started, stop), 1)
    )
    begun = tuple(range(started, stop + cut_off))
    costs = dataclasses.replace(done[-1].costs, stored_bytes=300, memory_bytes=100 + started)
    return Life(started, 1.5, Costs(sent_bytes=40), begun, done, struck_at_s, done[-1].cpu_s, costs)


def told(digests: tuple[str, str] = ("a", "b"), again: int = 8, squared: float = 4.0) -> Told:
    """Of two ranks; steps take 2 s. Rank 1 dies in step 9, and then again in step 12."""
    lives = [
        (
            life(0, 9, begin_s=96.0, cut_off=True, struck_at_s=first),
            life(again, 12, begin_s=120.0, cut_off=True, struck_at_s=then),
            life(11, 17, begin_s=140.0),
        )
        for first, then in ((None, None), (115.0, 129.0))
    ]
    ends = [{"digest": one, "squared_distance": squared, "table_bytes": 200} for one in digests]
    return Told(ORDER, ends, [Account(one) for one in lives])


def test_rows_say_what_ledgers_say() -> None:
    rows = compare_rows.rows_of(told(), told(squared=100.0).ends, 1, {"method": "a rival"})
    assert {row.metric: row.value for row in rows} == pytest.approx(
        {
            "steps_run_again": 2,  # 8 and 9, 11 and 12
            "steps_forgotten": 0,
            "bit_identical": 1,
            "off_by": 0.2,
            "survives_ranks": 1,
            "next_step_s": (7 + 13) / 2,
            "caught_up_s": (9 + 15) / 2,
            "prepare_s": 1.5,
            "restart_sent_bytes": 80,
            "memory_over_tables": 111 / 200,
            "stored_over_tables": 300 / 200,
        }
    )
    everybody = {row.metric: row.value for row in compare_rows.rows_of(told(), told().ends, None, {})}
    assert everybody["survives_ranks"] == 2 and told().step_s == 2


def test_what_a_rank_has_forgotten_is_its_part_of_a_step() -> None:
    rows = compare_rows.rows_of(forgetting(told()), told().ends, 1, {})
    values = {row.metric: row.value for row in rows}
    assert values["steps_forgotten"] == pytest.approx(3 / (3 * 2) / 2 / 2)  # of two failures


def test_a_promise_that_is_kept() -> None:
    failures.check(told(), told().ends, Promise(bit_identical=True, steps_again=1))
    failures.check(told(("c", "d")), told().ends, Promise(bit_identical=False, steps_again=None))


def forgetting(one: Told) -> Told:
    *others, last = one.accounts[1].lives
    costs = dataclasses.replace(last.costs, samples_lost=3.0)
    account = Account((*others, dataclasses.replace(last, costs=costs)))
    return dataclasses.replace(one, accounts=[one.accounts[0], account])


def never_killed(one: Told) -> Told:
    return dataclasses.replace(one, accounts=[Account(account.lives[:1]) for account in one.accounts])


def another_killed(one: Told) -> Told:
    return dataclasses.replace(one, order=dataclasses.replace(one.order, victims=(0,)))


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (told(("a", "c")), "a rival ended with other bytes"),
        (told(again=4), "rank 0: 6 steps were done again, and not at most 1 and the one .*, 2 times"),
        (forgetting(told()), "rank 1: 3 samples are lost"),
        (told(squared=float("nan")), "a rival ended with NaN or infinities"),
        (never_killed(told()), "rank 0: 1 lives, and 3 were to be"),
        (another_killed(told()), r"life 0: ranks \(1,\) were killed, and not \(0,\)"),
    ],
)
def test_a_promise_that_is_broken(found: Told, match: str) -> None:
    with pytest.raises(WrongResult, match=match):
        failures.check(found, told().ends, Promise(bit_identical=True, steps_again=1))


def test_all_ranks_die_in_turn_but_the_first() -> None:
    order = dataclasses.replace(ORDER, kills=5, victims=(1, 2))
    assert [order.struck(number, 4) for number in range(6)] == [(1, 2), (3,), (2,), (1,), (0,), ()]


def test_failures_come_before_a_training_ends() -> None:
    deaths = Deaths(kills=10, fewer=3, killed=11, apart=(2, 5), every=8)
    assert deaths.of(BY_METHOD["full files"]) == 10 and deaths.of(BY_METHOD["ecemb (6, 4)"]) == 3
    for case in cases.CASES:
        latest = deaths.killed + deaths.of(case) * deaths.apart[1]
        assert deaths.steps(case) > (deaths.killed + 2 * deaths.every if case.goes_back else latest)
    assert deaths.apart[1] < deaths.every < deaths.killed


def saved(whole_s: float, few_s: float) -> dict[str, dict[str, Any]]:
    """Seconds of saves that are all the same."""
    return {metric: {WHOLE: np.full(4, whole_s), FEW: np.full(4, few_s)} for metric in SECONDS}


def measure(**given: Any) -> Measured:
    found: dict[str, Any] = {
        "cpu_pct": None,
        "control_pct": None,
        "step_s": 0.0,
        "window": 1,
        "saves": saved(4.0, 1.0),
        "table_gb": {WHOLE: 2.0, FEW: 0.5},
        "rows": [],
    }
    return Measured(**(found | given))


def of_job(method: str, found: Measured, again: tuple[int, ...] = (1, 1)) -> dict[tuple[str, Any], Row]:
    rows = charged.rows_of(BY_METHOD[method], found, again, 0.5, {})
    return {(row.metric, row.labels["tables"]): row for row in rows}


def test_saves_are_charged_at_youngs_interval_and_by_the_size_of_the_tables() -> None:
    found = of_job("full files", measure())
    every_s = (2 * 4.0 * 14 * 3600) ** 0.5
    assert found["interval_s", "2 GB a rank"].value == pytest.approx(every_s)
    assert found["training_longer_pct", "2 GB a rank"].value == pytest.approx(100 * 4 / every_s)
    assert found["failure_takes_s", "2 GB a rank"].value == pytest.approx(every_s / 2)
    assert found["interval_s", "8 GB a rank"].value == pytest.approx((2 * 16.0 * 14 * 3600) ** 0.5)
    behind = of_job("full dcp async", measure())
    assert behind["failure_takes_s", "2 GB a rank"].value == pytest.approx(every_s / 2 + 4)


def test_the_steps_and_saves_of_a_method_are_charged_together() -> None:
    found = of_job("cpr vanilla", measure(cpu_pct=Estimate(3.0, 2.0, 5.0)))
    every_s = 2 * 0.1 * 4 * 14 * 3600
    cost = found["training_longer_pct", "2 GB a rank"]
    assert cost.value == pytest.approx(3 + 400 / every_s)
    assert (cost.value - cost.low, cost.high - cost.value) == (pytest.approx(1), pytest.approx(2))
    assert found["failure_takes_s", "2 GB a rank"].value == pytest.approx(every_s / 2 / 4)


def test_an_interval_is_the_methods_own() -> None:
    rare = cases.interval_s(BY_METHOD["check-n-run intermittent"], 900.0, 1.0, 5e4, 4)
    often = cases.interval_s(BY_METHOD["check-n-run intermittent"], 0.1, 1.0, 5e4, 4)
    assert (rare, often) == (1800, pytest.approx(100))
    slow = cases.interval_s(BY_METHOD["check-n-run intermittent"], 0.1, 700.0, 5e4, 4)
    assert slow == 700  # no save begins before the one before is written
    whole, eighth = (cases.interval_s(BY_METHOD[f"cpr {one}"], 1, 1, 5e4, 4) for one in ("vanilla", "mfu"))
    assert whole == 8 * eighth


def test_what_a_failure_takes_from_ecemb_is_measured_but_for_long_windows() -> None:
    cost = Estimate(1.0, -1.0, 2.0)
    found = of_job("ecemb (4, 3)", measure(cpu_pct=cost), again=(1, 1, 2, 2))["failure_takes_s", "any"]
    assert found.value == pytest.approx(0.75) and found.low < 0.75 < found.high
    auto = of_job("ecemb (4, 3) window auto", measure(cpu_pct=cost, window=61))["failure_takes_s", "any"]
    assert auto.value == pytest.approx(31 * 0.5)
    assert set(of_job("nothing", measure(cpu_pct=cost))) == {("training_longer_pct", "any")}


def test_a_line_through_two_sizes_has_no_negative_parts() -> None:
    fixed, per_gb = measured.line(saved(4.0, 1.0)[LOST], {WHOLE: 2.0, FEW: 0.5})
    assert (fixed.value, per_gb.value) == (pytest.approx(0), pytest.approx(2))
    fixed, per_gb = measured.line(saved(1.0, 1.5)[LOST], {WHOLE: 2.0, FEW: 0.5})
    assert (fixed.value, per_gb.value) == (1.5, 0)


def answers() -> list[dict[str, Any]]:
    """Of two ranks; a step of the rival takes twice the others'. Saves go on beside training for a second."""
    slot = {RIVAL: [2.0, 2.0, 0.0, 0.0], BARE: [1.0, 1.0, 0.0, 0.0], CONTROL: [1.0, 1.0, 0.0, 0.0]}
    save = {"stall_s": 1.0, "whole_s": 3.0, "stalled_cpu_s": 0.5, "cpu_s": 1.5}
    save |= {"written_bytes": 7.0, "sent_bytes": 9.0, "table_bytes": 2e9}
    saves = {WHOLE: [save] * 3, FEW: [save | {"table_bytes": 1e9}] * 3}
    one = {
        "slots": {name: [times] * 4 for name, times in slot.items()},
        "commits": [True] * 4,
        "began": "0",
        "digests": dict.fromkeys(slot, "1"),
        "saves": saves,
    }
    return [one, one]


def test_rivals_are_compared_with_bare_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured.os, "sched_getaffinity", lambda _: {0, 1})
    found = measured.of_steps(answers(), RIVAL, 1, {})
    assert (found.cpu_pct, found.control_pct) == (Estimate(100, 100, 100), Estimate(0, 0, 0))
    values = {row.metric: row.value for row in (*found.rows, *measured.save_rows(answers(), {}))}
    assert values[STALL] == 1 and values[WRITTEN] == 3 and values[STALL_CPU] == 0.5
    assert values[LOST] == 1 + 2 * 1.0 / 2  # two ranks work for a second each, on two cores
    case = BY_METHOD["cpr vanilla"]
    measured.check(case, answers())
    for change, match in (({RIVAL: "2"}, "not what its bare twin is"), ({}, "has changed nothing")):
        wrong = answers()
        wrong[0] |= {"digests": wrong[0]["digests"] | change, "began": "1"}
        with pytest.raises(WrongResult, match=match):
            measured.check(case, wrong)


def test_steps_are_of_several_launches_and_saves_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def launched(_: Any, __: str, case: Any, pairs: int, saves: int, ___: int) -> list[dict[str, Any]]:
        asked.append((case.method, pairs, saves))
        return [one | {"idle": 0.0, "wall_s": 1.0} for one in answers()]

    monkeypatch.setattr(measured, "launched", launched)
    scale = dataclasses.replace(FULL.costs, pairs=81, launches=2, saves=8)
    for method in ("cpr vanilla", "full files", "cpr mfu"):
        measured.rival(scale, "sparse", BY_METHOD[method], 0, {})
    assert asked == [
        *(("cpr vanilla", 41, 8), ("cpr vanilla", 40, 0)),
        ("full files", 0, 8),
        ("cpr mfu", 50, 8),
    ]


def test_a_method_that_fails_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def undisturbed(*_: Any) -> Any:
        yield SimpleNamespace(told=SimpleNamespace(step_s=1.0))

    def killed(_: Any, __: Any, ___: str, case: Any, *____: Any) -> Any:
        if case.method == "full files":
            raise LaunchFailed("full files ended with 1")
        return [once("next_step_s", "s", 1, method=case.method)], [1]

    def cost(_: Any, __: str, case: Any, ___: int) -> Measured:
        if case.method == "cpr vanilla":
            raise RankFailed("rank 2 failed")
        return measure()

    monkeypatch.setattr(failures, "undisturbed", undisturbed)
    monkeypatch.setattr(failures, "killed", killed)
    monkeypatch.setattr(compare, "cost", cost)
    launches = dataclasses.replace(QUICK, methods=("ecemb (6, 4)", "full files", "cpr vanilla"))
    with pytest.raises(Incomplete, match="rank 2 failed\n\nfull files ended with 1") as found:
        compare.measure(launches, "sparse", 0)
    methods = [row.labels["method"] for row in found.value.rows if row.metric == "next_step_s"]
    assert methods == ["cpr vanilla", "ecemb (6, 4)"]
    assert {row.labels["method"] for row in found.value.rows if row.metric == families.COST} == {
        "ecemb (6, 4)"
    }


def compared() -> list[dict[str, Any]]:
    """Rows of two engines, with a control that reaches less far on `sparse`."""
    rows: list[Row] = []
    for engine, reach in (("sparse", 1.0), ("torchrec", 30.0)):
        for method in ("nothing", "ecemb (4, 3)", "ecemb (4, 3) window auto", "full files"):
            labels = {"engine": engine, "setting": "small", "method": method, "ranks": 4}
            step = Estimate(0.5, -reach, reach) if method != "ecemb (4, 3)" else Estimate(10.0, 9.0, 11.0)
            given = measure(cpu_pct=None if method == "full files" else step, window=61)
            rows += charged.rows_of(BY_METHOD[method], given, (1, 1), 0.5, labels)
            rows += compare_rows.rows_of(told(), told().ends, 1, labels)
            if method != "full files":
                rows.append(Row(families.STEP, *[step[0]], "%", *step[1:], 4, {**labels}))
                rows.append(Row(families.TWIN, 0.0, "%", -reach, reach, 4, {**labels}))
    return [row.to_json() for row in rows]


def test_names_of_a_group_of_marks_stand_on_its_left_if_another_mark_is_on_its_right() -> None:
    group = {"a": (0.2, 100.0), "b": (0.3, 150.0), "c": (0.4, 190.0)}
    marks = {**group, "right of them": (2.0, 120.0), "far": (9.0, 120.0), "above": (0.5, 1e5)}
    assert compare_picture.leftmost(marks, 10.0) == [*group]
    assert compare_picture.beside(group, 10.0, -1) == {name: (0.2, y) for name, (_, y) in group.items()}
    (x, y) = compare_picture.beside({"low": (1.0, 120.0), "high": (2.0, 120.0)}, 10.0, 1)["low"]
    assert (x, y) == (2.0, 120.0)


def test_the_picture_names_the_families_of_the_quietest_engine() -> None:
    rows = compared()
    assert families.quiet_engine(rows) == "sparse" and families.reach_pct(rows, "sparse") == 1.0
    assert families.reach_pct(rows[:1], "none") == float("inf")
    drawn = compare_picture.draw(rows)
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    assert {"ecemb", "ecemb, each step", "full checkpoints"} <= set(texts) and "live copies" not in texts
    assert any("without" in text for text in texts)
    assert "A failure takes 16 s of training from ecemb, up to 5.3 min from others" in drawn
    assert drawn == compare_picture.draw(rows)


def test_seconds_are_shown_as_one_would_say_them() -> None:
    assert [compare_picture.duration(one) for one in (0.15, 31, 89, 300, 5000, 40_000)] == [
        *("0.15 s", "31 s", "89 s", "5 min", "83 min", "11 h"),
    ]


def overheads(setting: str, each: float, auto: float | None) -> dict[str, Any]:
    labels = {"code": "(4, 3)", "method": "protected", "engine": "sparse", "setting": f"{setting}: large"}
    rows = [once("overhead_cpu_pct", "%", each, window=1, overlap="none", **labels)]
    if auto is not None:
        rows.append(once("overhead_cpu_pct", "%", auto, window="auto", overlap="next step", **labels))
    return {"question": "overhead", "rows": [row.to_json() for row in rows]}


def test_each_setting_has_the_auto_of_its_own_runs() -> None:
    documents = [overheads("dlrm", 5, 1), overheads("dlrm", 6, 2), overheads("other", 9, None)]
    documents += [overheads("sparse-heavy", 30, 4), overheads("sparse-heavy", 40, 4)]
    said = summary.answer("overhead", documents)
    assert "dlrm, sparse: 5 to 6 %, window auto 1 to 2 %; other, sparse: 9 %; sparse-heavy" in said
    assert "sparse-heavy, sparse: 30 to 40 %, window auto 4 %" in said
    (worst,) = choosing.worst(documents)
    assert worst.startswith("**The worst case**") and "a commit in each step takes 30 to 40 % more" in worst
    assert not choosing.worst(documents[:3])


def test_metrics_share_a_table() -> None:
    rows: list[Any] = [
        row.to_json() for row in compare_rows.rows_of(told(), told().ends, 1, {"every": 2, "method": "one"})
    ]
    two = compare_rows.rows_of(told(), told().ends, 1, {"every": 2, "method": "two"})
    rows += [row.to_json() for row in two if row.metric != "steps_run_again"]
    shown = tables.sheet([row for row in rows if row["metric"] in ("steps_run_again", "prepare_s")])
    assert (
        shown
        == """every 2:

| method | `steps_run_again`, steps | `prepare_s`, s |
| :-- | --: | --: |
| one | 2 | 1.5 |
| two | - | 1.5 |"""
    )
    with pytest.raises(tables.BadResult, match="two rows of steps_run_again"):
        tables.sheet([*rows, rows[0]])


def test_cprs_ranks_stay_and_count_their_lives_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(STAY) <= set(METHODS) and {"cpr vanilla", *cases.PRIORITIES} <= set(STAY)
    order = dataclasses.replace(ORDER, folder=str(tmp_path), stays=True)
    assert Order.read(str(order.write())) == order
    ledger = Ledger(order.ledgers, 2)
    for note in ({"started": 0}, {"begun": 0}, {"started": 1}):
        assert lives(order.ledgers, 1) == 0
        ledger.note(**note)
    ledger.close()
    assert lives(order.ledgers, 2) == 2
    stay, made = Stay(), list[bool]()
    monkeypatch.setattr(life_.dist, "get_rank", lambda: 3)
    monkeypatch.setattr(life_.replacement, "made_progress", lambda: made.append(True))
    life_.goes_on()  # in a script that `ecemb.run` doesn't call
    monkeypatch.setattr(life_.staying, "current", lambda: stay)
    life_.goes_on()
    assert stay.rank == 3 and made == [True, True]


def test_priorities_have_rows_to_save() -> None:
    for kind in (Mfu, Ssu):
        ranked = kind(torch.zeros(80, 2))
        looked_up(ranked, torch.tensor([3, 5]))
        assert ranked.rows_to_save(torch.zeros(80, 2)).tolist() == [3, 5]


def test_methods_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(compare, "measure", lambda scale, *_: asked.append(scale.methods) or [])
    compare.run(Arguments(methods=("full files", "ecemb (4, 3)")))
    assert asked == [("full files", "ecemb (4, 3)")]
    with pytest.raises(BadOption, match=r"--methods has 'prayer'; there are: nothing, ecemb \(4, 3\)"):
        compare.run(Arguments(methods=("prayer",)))


def test_the_full_scale_has_every_method_of_the_pages() -> None:
    assert set(QUICK.methods) | set(FULL.methods) <= set(METHODS)
    assert {family.shown for family in families.FAMILIES} | {families.CONTROL} == set(QUICK.methods)
    assert set(QUICK.methods) <= set(FULL.methods)
    assert (FULL.costs.tables, FULL.costs.rows, FULL.costs.dim) == (26, 200_000, 64)
    assert BY_METHOD["ecemb (6, 4)"].ranks == 6 and BY_METHOD["full dcp async"].ranks == 4
    assert "check-n-run model tracker" not in [case.method for case in cases.on("sparse", FULL.methods)]


def test_the_methods_of_the_pages_are_measured_alone_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def pretend(scale: compare.Scale, engine: str, seed: int) -> list[Row]:
        asked.append(scale.methods)
        return []

    monkeypatch.setattr(compare, "measure", pretend)
    for setting in ("", "pages"):
        compare.run(Arguments(engine="sparse", setting=setting))
    assert asked[0] == FULL.methods
    shown = {family.shown for family in families.FAMILIES} | {families.CONTROL}
    assert set(asked[1]) == shown | {"cpr mfu", "cpr ssu"}
