"""The controller: which recovery it takes, when, and what a failure before and after that goes back to.

Real ranks that are killed are in tests/contracts/test_methods.py.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from baselines.cpr.controller import Cpr
from baselines.full.writers import complete
from baselines.interval import MEASURED
from support.one_rank_training import QUIET, OnBags, equal, lose

pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]
DAY = timedelta(days=1)
TINY = 1e-12
"""A PLS target that only saving all the time could keep."""


class Killed(Exception):
    """Stands for the end of the process."""


def trained(folder: Path, script: OnBags, until: int, **options: Any) -> tuple[Cpr, int]:
    """One life."""
    method = Cpr(folder / "files", folder / "memory", **{"mtbf": DAY, **options})
    begin = method.prepare(script.training)
    for _ in range(begin, until):
        with method.step():
            script.step()
    return method, begin


@pytest.mark.slow
@pytest.mark.parametrize("priority", [None, "mfu"])
def test_partial_recovery_where_it_pays(priority: str | None, tmp_path: Path) -> None:
    script = OnBags()
    method, _ = trained(tmp_path, script, MEASURED - 1, priority=priority)
    assert method.choice is None and not method.memory() and complete(tmp_path / "files" / "full") == [0]
    assert trained(tmp_path, OnBags(), 0)[1] == 0  # not decided: full recovery
    script = OnBags()
    method, begin = trained(tmp_path, script, MEASURED + 3, priority=priority)
    assert begin == 0 and method.choice is not None and method.choice.policy.recovery == "partial"
    assert method.choice.partial_overhead < method.choice.full_overhead
    assert method.choice.pls == pytest.approx(0.1)
    assert method.choice.policy.interval_h == pytest.approx(2 * 0.1 * 24)
    assert method.memory() and not complete(tmp_path / "files" / "full")
    costs, end = method.costs(), script.end()
    assert costs.written_bytes > costs.stored_bytes > 0 and costs.memory_bytes > 0
    again = OnBags()
    method, begin = trained(tmp_path, again, 0, priority=priority)
    assert begin == MEASURED + 3 and equal(again.end(), end) and method.choice is None
    lose(method)
    method, begin = trained(tmp_path, OnBags(), MEASURED + 2, priority=priority)
    assert begin == MEASURED  # when partial recovery began
    method.close()
    assert not method.memory()


def test_full_recovery_where_partial_does_not_pay(tmp_path: Path) -> None:
    method, _ = trained(tmp_path, OnBags(), MEASURED + 2, pls=TINY)
    assert method.choice is not None and method.choice.policy.recovery == "full"
    assert method.choice.policy == method.choice.full and method.steps_lost == 0
    assert not method.memory() and complete(tmp_path / "files" / "full")
    method, begin = trained(tmp_path, OnBags(), MEASURED + 4, pls=0.1)
    assert begin in complete(tmp_path / "files" / "full") and method.choice is None  # decided once
    method.close()


def test_a_decision_counts_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(Cpr, "_write", killed)
    with pytest.raises(Killed):
        trained(tmp_path, OnBags(), MEASURED)
    monkeypatch.undo()
    assert list((tmp_path / "memory").rglob("*.rows"))
    method, begin = trained(tmp_path, OnBags(), 1)
    assert begin == 0 and not list((tmp_path / "memory").rglob("*.rows"))
    method, begin = trained(tmp_path, OnBags(), MEASURED + 1)
    assert begin == 0 and method.memory()


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"pls": 0.0}, "pls="),
        ({"mtbf": timedelta(0)}, "mtbf="),
        ({"priority": "lru"}, "priority="),
    ]
    for options, name in refused:
        with pytest.raises(ValueError, match=name):
            Cpr(tmp_path, tmp_path, **{"mtbf": DAY, **options})
