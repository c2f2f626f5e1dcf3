"""A training is followed while it saves: what is served last is what was trained; what differs is noticed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from bench.harness.result import WrongResult
from bench.questions.publish import question as publish
from bench.questions.publish.rank import EXACT_BITS, FULL, KINDS
from bench.workloads.training_rank import digest
from ecemb.checkpoint import Snapshot


@pytest.mark.parametrize("kind", publish.QUICK.kinds, ids=lambda kind: f"{kind.writer}, {kind.bits}")
def test_a_real_training_is_followed(kind: Any) -> None:
    rows = {row.metric: row for row in publish.of_kind(publish.QUICK, kind, seed=1)}
    assert set(rows) == {
        *("freshness_s", "step_to_served_s", "written_mb"),
        *("first_read_s", "not_served", "changed_rows_pct"),
    }
    labels = rows["freshness_s"].labels
    assert (labels["writer"], labels["bits"]) == (kind.writer, kind.bits)
    assert rows["step_to_served_s"].low > rows["freshness_s"].low
    assert 0 < rows["changed_rows_pct"].value <= 100 and 0 <= rows["not_served"].value < 100
    assert rows["written_mb"].low > 0


def test_each_way_to_save_is_measured() -> None:
    assert len(set(KINDS)) == len(KINDS) == 9 and KINDS[0] == FULL
    assert publish.WHOLE.kinds == KINDS and set(publish.QUICK.kinds) < set(KINDS)
    assert publish.WHOLE.last_step == publish.WHOLE.every * publish.WHOLE.saves


def snapshot(value: float, name: str = "a") -> Snapshot:
    return Snapshot(name, 3, {"t": {"weight": torch.full((4, 2), float(value))}})


def test_what_differs_is_noticed() -> None:
    trained = [{"rows": [("t", 2, 2, digest([torch.ones(2, 2)]))]}]
    publish.check(snapshot(1), snapshot(1), trained, exact=True)
    with pytest.raises(WrongResult, match="other rows from 2 on are served than were trained"):
        publish.check(snapshot(2), snapshot(2), trained, exact=True)
    publish.check(snapshot(2), snapshot(2), trained, exact=False)
    with pytest.raises(WrongResult, match="increments came to other rows than a has"):
        publish.check(snapshot(1), snapshot(2), trained, exact=True)
    with pytest.raises(WrongResult, match="a was served last, and b is the newest"):
        publish.check(snapshot(1), snapshot(1, "b"), trained, exact=True)


def test_a_checkpoint_that_is_never_served(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf:
        step = -1
        snapshot = snapshot(1)

        def wait(self, *_: Any, **__: Any) -> bool:
            return False

    monkeypatch.setattr(publish, "follower_of", lambda order: Deaf())
    scale = dataclasses.replace(publish.QUICK, saves=1)
    with pytest.raises(WrongResult, match="step 2 was saved, and step -1 is served"):
        list(publish.of_kind(scale, KINDS[1], seed=1))
    assert KINDS[1].bits == EXACT_BITS
