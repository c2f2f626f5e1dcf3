"""How old a recovery's evidence is, and what a start stores for later starts that find no arena."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from ecemb.coding.placement import Placement
from ecemb.recovery.execute import RecoveryReport
from ecemb.start import opening
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


@pytest.mark.parametrize(
    ("rank", "bound", "said"),
    [
        (2, False, "the processors of ranks 2 and 4 are on several NUMA nodes"),
        (4, False, ""),
        (2, True, ""),
        (3, False, ""),
    ],
    ids=["first", "another of its host", "bound", "alone on its host"],
)
def test_ranks_whose_processors_span_nodes_are_named_once(
    rank: int, bound: bool, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Processors 0 and 1 are on node 0, 2 and 3 on node 1."""
    monkeypatch.setattr(opening, "numa_nodes", lambda own: sorted({number // 2 for number in own}))
    processors = ((0, 1), (0, 1), (0, 1) if bound else (0, 1, 2), (0, 1, 2, 3), (2, 3) if bound else (1, 2))
    session = SimpleNamespace(rank=rank, hosts=("a", "a", "b", "c", "b"))
    start: Any = SimpleNamespace(session=session, world=SimpleNamespace(processors=processors))
    with caplog.at_level(logging.INFO, "ecemb"):
        here = opening._processors_here(start)
    assert here == ([processors[2], processors[4]] if rank != 3 else [processors[3]])
    assert said in caplog.text and len(caplog.records) == bool(said)


def test_the_mark_of_the_store_has_the_generation_that_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arena that joined an earlier one is stale, also if no other arena is left to say so."""
    monkeypatch.setattr(opening, "discard_superseded", lambda session: None)
    store = dist.HashStore()
    start: Any = SimpleNamespace(
        session=SimpleNamespace(job_flags=store, held=()),
        world=SimpleNamespace(generation=12, plan=SimpleNamespace(begins=True)),
        transport=SimpleNamespace(barrier=lambda what: None),
        earlier=None,
    )
    memory: Any = SimpleNamespace(arena=None)
    opening._flag_recovery(start)
    assert not store.check(["started"]), "until the new arenas are LIVE, those of before count"
    opening._supersede(start, memory)
    assert store.get("started") == b"12"
    start.world = SimpleNamespace(generation=14, plan=SimpleNamespace(begins=False))
    opening._flag_recovery(start)
    assert store.get("started") == b"14"
