"""A job's memory moves in the benchmark as it does in life; another table than before is noticed."""

from __future__ import annotations

import pytest

from bench.harness.result import WrongResult
from bench.questions.elastic import question as elastic


def test_a_real_job_moves_with_a_host_lost() -> None:
    case = elastic.CASES[0]
    rows = {row.metric: row for row in elastic.of_case(elastic.QUICK, case, seed=1)}
    assert rows["move_s"].labels == {"from": 6, "to": 4, "lost": 2}
    assert rows["arenas_over_said"].value == pytest.approx(1, abs=0.01)
    assert rows["sent_over_rows"].value > 0 and rows["move_over_gloo"].value > 0


def test_moves_are_told_apart_by_their_labels() -> None:
    moves = [(len(case.before), len(case.after), len(case.lost)) for case in elastic.CASES]
    assert len(set(moves)) == len(moves)


def test_another_table_is_noticed() -> None:
    before = [{"step": 0, "next": 7}]
    with pytest.raises(WrongResult, match="other bits"):
        elastic.check(before, [{"kind": "move", "step": 1, "checksum": 8}])
    with pytest.raises(WrongResult, match="did not move"):
        elastic.check(before, [{"kind": "process", "step": 1, "checksum": 7}])
