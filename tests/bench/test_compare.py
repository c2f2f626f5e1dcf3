"""A rank is killed under a rival, and all that it costs is told; broken promises are noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench import compare, tables
from bench.compare import QUICK, Scale, Told
from bench.compare_rank import Order
from bench.method import Account, Costs, Done, Life, Promise
from bench.result import WrongResult

EVERY = 2
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
    steps=12,
    killed=7,
    victims=(1,),
    every=EVERY,
    twin_steps=6,
    seed=1,
    timeout_s=1.0,
)
METRICS = {metric for sheet in tables.SHEETS["compare"] for metric in sheet}


def test_a_rank_is_killed_under_torchrun_and_the_costs_are_told() -> None:
    scale = dataclasses.replace(QUICK, methods=("cpr mfu",), ranks=2, rows=200, every=3)
    rows = compare.measure(scale, "sparse", seed=3)
    found = {row.metric: row for row in rows}
    assert found.keys() == METRICS and len(rows) == len(METRICS)
    assert all(
        row.labels == {"engine": "sparse", "every": 3, "setting": scale.setting, "method": "cpr mfu"}
        for row in rows
    )
    assert found["steps_run_again"].value in (0, 1)
    assert found["samples_lost"].value in (64 * 2, 2 * 64 * 2)
    assert found["bit_identical"].value == 0 and 0 < found["off_by"].value < 1
    assert 0 < found["recovery_s"].value <= found["caught_up_s"].value
    assert 0 < found["prepare_s"].value < found["recovery_s"].value
    assert found["written_bytes_per_step"].value > 0 and found["stored_over_tables"].value > 1
    assert found["overhead_cpu_pct"].repeats == 4


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


def told(digests: tuple[str, str] = ("a", "b"), again: int = 6, squared: float = 4.0) -> Told:
    """Of two ranks; steps take 2 s, those of the twin 1 s."""
    lives = [
        (life(0, 7, 2.0, cut_off=True, struck_at_s=at), life(again, 12, 2.0, begin_s=120.0))
        for at in (None, 115.0)
    ]
    twin = (life(0, 6, 1.0), life(0, 6, 1.0))
    ends = [{"digest": one, "squared_distance": squared, "table_bytes": 200} for one in digests]
    return Told(ORDER, ends, [Account(one) for one in lives], [[Account((one,)) for one in twin]] * 2)


def test_rows_say_what_ledgers_say() -> None:
    rows = compare.rows_of(told(), told(squared=100.0), {"method": "a rival"})
    assert {row.metric: row.value for row in rows} == {
        "steps_run_again": 2,  # 6 and 7
        "samples_lost": 0,
        "bit_identical": 1,
        "off_by": 0.2,
        "recovery_s": 7,
        "caught_up_s": 9,
        "prepare_s": 1.5,
        "recovery_sent_bytes": 80,
        "overhead_cpu_pct": 100,
        "overhead_wall_pct": 100,
        "step_wall_ms": 2000,
        "stall_ms_per_step": 500,
        "sent_bytes_per_step": 20,
        "written_bytes_per_step": 10,
        "memory_over_tables": 106 / 200,
        "stored_over_tables": 300 / 200,
    }


def test_stretches_begin_and_end_with_a_save() -> None:
    found = compare.stretches([life(3, 9, 1.0), life(3, 10, 1.0)], EVERY)
    assert [[(begin.step + 1, end.step + 1) for begin, end in one] for one in found] == [
        [(4, 6)] * 2,
        [(6, 8)] * 2,
    ]


def test_a_promise_that_is_kept() -> None:
    compare.check(told(), told(), Promise(bit_identical=True, steps_again=1))
    compare.check(told(("c", "d")), told(), Promise(bit_identical=False, steps_again=None))


def forgetting(one: Told) -> Told:
    first, second = one.accounts[1].lives
    costs = dataclasses.replace(second.costs, samples_lost=3.0)
    account = Account((first, dataclasses.replace(second, costs=costs)))
    return dataclasses.replace(one, accounts=[one.accounts[0], account])


def never_killed(one: Told) -> Told:
    return dataclasses.replace(one, accounts=[Account(account.lives[:1]) for account in one.accounts])


@pytest.mark.parametrize(
    ("found", "match"),
    [
        (told(("a", "c")), "a rival ended with other bytes"),
        (told(again=5), "rank 0: 3 steps were begun again, and not at most 1"),
        (forgetting(told()), "rank 1: 3 samples are lost"),
        (told(squared=float("nan")), "a rival ended with NaN or infinities"),
        (never_killed(told()), "rank 0: step 7 of the first of two lives was not cut off"),
    ],
)
def test_a_promise_that_is_broken(found: Told, match: str) -> None:
    with pytest.raises(WrongResult, match=match):
        compare.check(found, told(), Promise(bit_identical=True, steps_again=1))


def test_metrics_share_a_table() -> None:
    rows: list[Any] = [
        row.to_json() for row in compare.rows_of(told(), told(), {"every": 2, "method": "one"})
    ]
    rows += [row.to_json() for row in compare.rows_of(told(), told(), {"every": 2, "method": "two"})]
    shown = tables.sheet([row for row in rows if row["metric"] in ("steps_run_again", "recovery_s")])
    assert (
        shown
        == """every 2:

| method | `steps_run_again`, steps | `recovery_s`, s |
| :-- | --: | --: |
| one | 2 | 7 |
| two | 2 | 7 |"""
    )
    with pytest.raises(tables.BadResult, match="two rows of steps_run_again"):
        tables.sheet([*rows, rows[0]])


def test_the_full_scale_has_every_method() -> None:
    scale = Scale()
    assert set(QUICK.methods) < set(scale.methods)
    assert scale.killed % scale.every == scale.every // 2 and scale.steps > scale.killed + 2 * scale.every
