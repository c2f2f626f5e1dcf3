"""The setting that measures comparisons beside training: its rows from made reports."""

from __future__ import annotations

from typing import Any

import pytest

from bench.harness.result import WrongResult
from bench.questions.overhead.verification import COMPARED, CONTROL, NOT, TIMES, rows_of


def report(**changed: Any) -> dict[str, Any]:
    """Of one rank: 10 s of processor time and 5 s of wall time a block, and 2 % more where it compares.

    The block at the default takes 20 s, 0.04 of them for comparisons.
    """
    blocks = {NOT: [(10.0, 5.0)] * 4, CONTROL: [(10.0, 5.0)] * 4, COMPARED: [(10.2, 5.1)] * 4}
    return {"blocks": blocks, "verify_s": 0.04, "wall_s": 20.0, "verified": 1.5, "wrong_words": 0, **changed}


def test_the_cost_is_that_of_blocks_with_comparisons_over_those_without() -> None:
    rows = rows_of([report(), report(verify_s=0.08)], {"code": "(4, 3)"})
    found = {(row.metric, row.labels.get("method")): row.value for row in rows}
    assert found == {
        ("verification_cpu_pct", COMPARED): pytest.approx(2 / TIMES),
        ("verification_cpu_pct", CONTROL): pytest.approx(0),
        ("verification_wall_pct", COMPARED): pytest.approx(2 / TIMES),
        ("verification_wall_pct", CONTROL): pytest.approx(0),
        ("verification_phase_pct", None): pytest.approx(0.3),
        ("verified_pct", None): 150,
    }


@pytest.mark.parametrize("changed", [{"wrong_words": 3}, {"verified": 0.0}])
def test_a_run_without_comparisons_or_with_differences_is_no_result(changed: dict[str, Any]) -> None:
    with pytest.raises(WrongResult):
        rows_of([report(), report(**changed)], {})
