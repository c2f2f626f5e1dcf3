"""A rebuild beside training is timed as it happens; and a training that ends elsewhere would be noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench.harness.result import Arguments, WrongResult
from bench.questions.rebuild import question as rebuild
from bench.questions.rebuild.question import (
    ACCELERATOR,
    BACKGROUND,
    BLOCKING,
    DLRM,
    PROCESSORS,
    QUICK,
    UNIFORM,
    Case,
    Life,
)


def told(**change: Any) -> dict[str, Any]:
    ends = [12.0, 12.5, 13.0, 13.5, 14.0, 14.5, 14.75, 15.0, 15.25, 15.5, 15.75]
    rank = {"kind": "memory", "lost": [1], "ends": ends, "whole_at": 14.1, "whole_before": 5, "waited_s": 0.5}
    rank |= {"cpu_s": [1.0, 4.5, 7.5], "lost_bytes": 2 * 10**9}
    return rank | change


LIFE = Life(killed_at=10.0, told=[told(), told(ends=[12.25, *told()["ends"][1:]], whole_at=14.2)])


def test_the_last_rank_counts() -> None:
    assert LIFE.to_step_s == 2.25 and LIFE.to_whole_s == pytest.approx(4.2)


def test_throughput_is_that_of_the_steps_beside_over_those_after() -> None:
    assert LIFE.steps_beside == 5
    assert LIFE.throughput == pytest.approx(2 / 4)
    assert Life(10.0, [told(whole_before=4)]).throughput is None


def test_processor_time_is_that_of_all_ranks_without_the_steps() -> None:
    """3 s for 6 steps after it, so that 2.5 of 3.5 s go to the 5 steps beside it; on both ranks."""
    assert LIFE.cpu_s_per_gb == pytest.approx(2 * 1.0 / 2)


def test_each_metric_has_a_row() -> None:
    case = Case(DLRM, ACCELERATOR, 64)
    rows = rebuild.rows_of(QUICK, case, BACKGROUND, [LIFE, LIFE])
    assert {row.metric for row in rows} == {
        "kill_to_step_s",
        "time_to_full_protection_s",
        "cpu_s_per_rebuilt_gb",
        "steps_while_rebuilding",
        "waited_for_rows_s",
        "throughput_while_rebuilding",
    }
    wanted = {"rebuild": BACKGROUND, "setting": DLRM, "dense": ACCELERATOR, "table_bytes": 64}
    assert all(row.repeats == 2 and wanted.items() <= row.labels.items() for row in rows)
    assert len(rebuild.rows_of(QUICK, case, BLOCKING, [LIFE])) == 3


@pytest.mark.parametrize("change", [{"lost": []}, {"lost": [2]}, {"kind": "process"}])
def test_a_recovery_of_something_else(change: dict[str, Any]) -> None:
    rebuild.check([LIFE])
    with pytest.raises(WrongResult, match="rank 1: a recovery of"):
        rebuild.check([LIFE, dataclasses.replace(LIFE, told=[told(), told(**change)])])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_killed_rank_is_rebuilt_before_training_and_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (Case(UNIFORM, PROCESSORS, 8 << 20), *QUICK.cases)
    monkeypatch.setattr(rebuild, "QUICK", dataclasses.replace(QUICK, cases=cases))
    rows = rebuild.run(Arguments(quick=True, seed=3))
    for metric in ("kill_to_step_s", "time_to_full_protection_s"):
        assert [row.labels["rebuild"] for row in rows if row.metric == metric] == [BLOCKING, BACKGROUND] * 2


def test_another_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([["a", "b"], ["a", "c"]])
    monkeypatch.setattr(rebuild, "trained", lambda *_: ([LIFE], 11, next(ends)))
    with pytest.raises(WrongResult, match=r"ranks \[1\] ended with other bytes"):
        rebuild.launch(QUICK, Case(UNIFORM, PROCESSORS, 64), BACKGROUND, seed=0)
