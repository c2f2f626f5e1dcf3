"""What ledgers of killed ranks say; broken promises are noticed. `make bench-quick` kills some in earnest."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ElementTree
from datetime import timedelta
from typing import Any

import pytest
import torch

from baselines.method import Costs, Promise
from bench.harness.result import Incomplete, WrongResult
from bench.harness.torchrun import LaunchFailed
from bench.methods.ledger import Account, Done, Life
from bench.methods.registry import METHODS, ScaledJob
from bench.questions.compare import families
from bench.questions.compare import picture as compare_picture
from bench.questions.compare import question as compare
from bench.questions.compare import rows as compare_rows
from bench.questions.compare.question import FULL, QUICK, RULES, Scale
from bench.questions.compare.rank import Order, learnable
from bench.questions.compare.rows import Told
from bench.report import summary, tables
from bench.report.headlines import Unknown
from bench.workloads.models import Batch

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
    held_out=1,
    killed=9,
    victims=(1,),
    killed_after_s=1.0,
    next_victim=0,
    mtbf_steps=8,
    step_h=0.5,
    step_s=1.0,
    bytes_per_s=1e6,
    twin_steps=10,
    seed=1,
    timeout_s=1.0,
)
METRICS = {metric for sheet in tables.SHEETS["compare"] for metric in sheet}


def life(
    started: int,
    stop: int,
    step_s: float,
    *,
    begin_s: float = 100.0,
    cut_off: bool = False,
    struck_at_s: float | None = None,
) -> Life:
    """Of equal steps; one more is cut off."""
    done = tuple(
        Done(
            step,
            begin_s + step_s * passed,
            2 * step_s * passed,
            Costs(0.5 * passed, 10 * passed, 20 * passed),
        )
        for passed, step in enumerate(range(started, stop), 1)
    )
    begun = tuple(range(started, stop + cut_off))
    costs = dataclasses.replace(done[-1].costs, stored_bytes=300, memory_bytes=100 + started)
    return Life(started, 1.5, Costs(sent_bytes=40), begun, done, struck_at_s, done[-1].cpu_s, costs)


def told(
    digests: tuple[str, str] = ("a", "b"), again: int = 8, squared: float = 4.0, auc: float = 0.7
) -> Told:
    """Of two ranks; steps take 2 s, those of the twin 1 s. Rank 1 dies in step 9, rank 0 in step 12."""
    lives = [
        (
            life(0, 9, 2.0, begin_s=96.0, cut_off=True, struck_at_s=first),
            life(again, 12, 2.0, begin_s=120.0, cut_off=True, struck_at_s=then),
            life(11, 17, 2.0, begin_s=140.0),
        )
        for first, then in ((None, 129.0), (115.0, None))
    ]
    ends = [
        {
            "digest": one,
            "squared_distance": squared,
            "table_bytes": 200,
            "interval_steps": 2,
            "log_loss": 1 - auc,
            "auc": auc,
        }
        for one in digests
    ]
    twin = Account((life(0, 10, 1.0),))
    return Told(ORDER, ends, [Account(one) for one in lives], [{0: twin, 2: twin}] * 2)


def test_rows_say_what_ledgers_say() -> None:
    reference = dataclasses.replace(told(squared=100.0, auc=0.75))
    rows = compare_rows.rows_of(told(), reference, 1, {"method": "a rival"})
    assert {row.metric: row.value for row in rows} == pytest.approx(
        {
            "interval_steps": 2,
            "steps_run_again": 4,  # 8 and 9, 11 and 12
            "samples_lost": 0,
            "given_up_steps": 4,
            "bit_identical": 1,
            "off_by": 0.2,
            "log_loss_added": 0.05,
            "auc": 0.7,
            "auc_lost": 0.05,
            "survives_ranks": 1,
            "recovery_s": (7 + 13) / 2,
            "caught_up_s": (9 + 15) / 2,
            "prepare_s": 1.5,
            "recovery_sent_bytes": 80,
            "overhead_cpu_pct": 100,
            "overhead_wall_pct": 100,
            "step_wall_ms": 2000,
            "stall_ms_per_step": 500,
            "sent_bytes_per_step": 20,
            "written_bytes_per_step": 10,
            "memory_over_tables": 111 / 200,
            "stored_over_tables": 300 / 200,
            "time_scale": 0.5 * 3600 / 2,
        }
    )
    assert {row.metric for row in rows} == METRICS
    everybody = {row.metric: row.value for row in compare_rows.rows_of(told(), reference, None, {})}
    assert everybody["survives_ranks"] == 2


def test_the_first_steps_of_a_life_do_not_count() -> None:
    found = compare_rows.settled([life(3, 12, 1.0), life(3, 13, 1.0)])
    assert [(begin.step, end.step) for begin, end in found] == [(8, 11)] * 2
    assert compare_rows.settled([life(0, 6, 1.0), life(0, 9, 1.0)]) == []


def test_what_a_rank_has_forgotten_is_its_part_of_a_step() -> None:
    rows = compare_rows.rows_of(forgetting(told()), told(), 1, {})
    values = {row.metric: row.value for row in rows}
    assert values["given_up_steps"] == pytest.approx(4 + 3 / (3 * 2) / 2)


def test_lives_count_by_their_steps() -> None:
    short, long = ([(done[0], done[-1])] for done in (life(0, 3, 1.0).done, life(0, 9, 1.0).done))
    row = compare_rows.pooled("stall", "ms", [2.0, 40.0], [short, long], {})
    assert (row.value, row.low, row.high) == (4.2, 1.0, 5.0)


def test_a_promise_that_is_kept() -> None:
    compare.check(told(), told(), Promise(bit_identical=True, steps_again=1))
    compare.check(told(("c", "d")), told(), Promise(bit_identical=False, steps_again=None))


def forgetting(one: Told) -> Told:
    *others, last = one.accounts[1].lives
    costs = dataclasses.replace(last.costs, samples_lost=3.0)
    account = Account((*others, dataclasses.replace(last, costs=costs)))
    return dataclasses.replace(one, accounts=[one.accounts[0], account])


def never_killed(one: Told) -> Told:
    return dataclasses.replace(one, accounts=[Account(account.lives[:1]) for account in one.accounts])


def another_killed(one: Told) -> Told:
    return dataclasses.replace(one, order=dataclasses.replace(one.order, next_victim=1))


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (told(("a", "c")), "a rival ended with other bytes"),
        (told(again=5), "rank 0: 7 steps were begun again, and not at most 1 and the one .*, 2 times"),
        (forgetting(told()), "rank 1: 3 samples are lost"),
        (told(squared=float("nan")), "a rival ended with NaN or infinities"),
        (never_killed(told()), "rank 0: 1 lives, and 3 were to be"),
        (another_killed(told()), r"life 1: ranks \(0,\) were killed, and not \(1,\)"),
    ],
)
def test_a_promise_that_is_broken(found: Told, match: str) -> None:
    with pytest.raises(WrongResult, match=match):
        compare.check(found, told(), Promise(bit_identical=True, steps_again=1))


def test_a_method_that_fails_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    def under(scale: Scale, engine: str, method: str, *_: Any) -> list[Any]:
        if method == "full files":
            raise LaunchFailed("full files ended with 1")
        return [method]

    launches = dataclasses.replace(QUICK, methods=("ecemb (6, 4)", "full files", "cpr vanilla"))
    monkeypatch.setattr(compare, "launched", lambda *_: pytest.MonkeyPatch.context())
    monkeypatch.setattr(compare, "under", under)
    with pytest.raises(Incomplete, match="full files ended with 1") as found:
        compare.measure(launches, "sparse", 0)
    assert found.value.rows == ["cpr vanilla", "ecemb (6, 4)"]


def test_clicks_can_be_learnt_and_are_the_same_for_all_methods() -> None:
    ids = torch.arange(9).repeat(400)[None, :, None]
    batch = Batch(torch.zeros(3600, 13), ids, torch.zeros(3600, 1))
    (first,), (again,), (other,) = (learnable([batch], ORDER, rank) for rank in (0, 0, 1))
    assert torch.equal(first.clicks, again.clicks) and not torch.equal(first.clicks, other.clicks)
    means = [one.clicks.reshape(400, 9).mean(0) for one in (first, other)]
    assert torch.corrcoef(torch.stack(means))[0, 1] > 0.8 and means[0].std() > 0.05


def test_each_method_has_its_own_rule() -> None:
    job = ScaledJob(mtbf_steps=56, step_s=0.2, step_h=0.25, ranks=4)
    assert job.mtbf == timedelta(seconds=11.2)
    assert (job.pls_steps, job.check_n_run_steps) == (45, 2)
    rules = {method: compare.rule(method) for method in FULL.methods}
    assert rules["nothing"] == "never" and rules["cpr controlled"] == "controller"
    assert rules["ecemb (6, 4) window 16"] == "each 16" and rules["ecemb copies x2"] == "each step"
    assert set(RULES.values()) < set(rules.values())


def compared() -> list[dict[str, Any]]:
    """Rows of two engines, with a control that is quieter on `sparse`."""
    rows: list[dict[str, Any]] = []
    for engine, noise in (("sparse", 3.0), ("torchrec", 30.0)):
        for method, overhead in (("nothing", noise), ("ecemb (4, 3)", 10.0), ("full files", -2.0)):
            labels = {"engine": engine, "method": method, "ranks": 4}
            found = [row.to_json() for row in compare_rows.rows_of(told(), told(), 1, labels)]
            for row in found:
                if row["metric"] == families.OVERHEAD:
                    row |= {"value": overhead, "low": overhead - 0.5, "high": overhead + 0.5}
            rows += found
    return rows


def test_the_picture_names_the_families_of_the_quietest_engine() -> None:
    rows = compared()
    assert families.quiet_engine(rows) == "sparse" and families.noise_pct(rows, "sparse") == 3.5
    assert families.noise_pct(rows, "none") == 0
    drawn = compare_picture.draw(rows)
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    assert {"ecemb", "full checkpoints"} <= set(texts) and "live copies" not in texts
    assert any("too small to measure" in text for text in texts)
    assert "from others; ecemb costs 10 % of each step" in drawn
    assert drawn == compare_picture.draw(rows)


def test_overheads_below_the_controls_are_not_told() -> None:
    documents = [{"question": "compare", "rows": compared()}]
    shown = summary.methods(documents)
    assert "| **ecemb**, commit in each step | 10 % (9.5 to 10) |" in shown
    assert "| full checkpoints | cannot tell (-2.5 to -1.5) |" in shown
    assert "| no protection | 3 % (2.5 to 3.5) |" in shown and shown.count("| yes |") > 1
    assert "differs from its twin by up to 3.5 %" in shown
    assert "| no step may run again" in summary.choices(documents)
    with pytest.raises(Unknown):
        summary.methods([])


def test_metrics_share_a_table() -> None:
    rows: list[Any] = [
        row.to_json() for row in compare_rows.rows_of(told(), told(), 1, {"every": 2, "method": "one"})
    ]
    two = compare_rows.rows_of(told(), told(), 1, {"every": 2, "method": "two"})
    rows += [row.to_json() for row in two if row.metric != "steps_run_again"]
    shown = tables.sheet([row for row in rows if row["metric"] in ("steps_run_again", "prepare_s")])
    assert (
        shown
        == """every 2:

| method | `steps_run_again`, steps | `prepare_s`, s |
| :-- | --: | --: |
| one | 4 | 1.5 |
| two | - | 1.5 |"""
    )
    with pytest.raises(tables.BadResult, match="two rows of interval_steps"):
        tables.sheet([*rows, rows[0]])


def test_the_full_scale_has_every_method_and_enough_steps() -> None:
    assert set(QUICK.methods) | set(FULL.methods) <= set(METHODS)
    for scale in (FULL, QUICK):
        assert scale.steps > scale.killed + scale.later + 5
    assert (FULL.ranks_of("ecemb (6, 4)"), FULL.ranks_of("ecemb (4, 3)"), FULL.ranks_of("full dcp")) == (
        6,
        4,
        4,
    )
