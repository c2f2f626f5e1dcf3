"""How old a recovery's evidence is: a warning if there is none, and no block was to spare."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ecemb.coding.placement import Placement
from ecemb.recovery.execute import RecoveryReport
from ecemb.start.opening import _log_evidence

SAID = "parity was last known to fit all rows, from comparisons beside training: "


@pytest.mark.parametrize(
    ("lost", "facts", "is_expected", "level", "says"),
    [
        ((0, 1), {}, True, logging.WARNING, "never yet. Nor were the blocks that survived compared"),
        ((0,), {"in_background": True}, True, logging.WARNING, "never yet. Nor were the blocks"),
        ((0,), {}, True, logging.INFO, "never yet"),
        ((0, 1), {}, False, logging.INFO, "never yet"),
        ((0, 1), {"verified_step": 4}, True, logging.INFO, "3 steps before the loss"),
    ],
    ids=["none to spare", "not compared in the background", "one to spare", "verify=0", "compared"],
)
def test_a_recovery_without_evidence_is_a_warning(
    lost: tuple[int, ...],
    facts: dict[str, Any],
    is_expected: bool,
    level: int,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory: Any = SimpleNamespace(geometry=SimpleNamespace(placement=Placement(3, 1, (2, 0, 1))))
    report = RecoveryReport("memory", 7, lost, 0, False, 0, {}, **facts)
    with caplog.at_level(logging.INFO, "ecemb"):
        _log_evidence(memory, report, is_expected=is_expected)
    [record] = caplog.records
    assert record.levelno == level and record.getMessage().startswith(SAID + says)
