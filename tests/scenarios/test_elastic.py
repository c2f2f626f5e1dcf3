"""A job goes on from memory with another number of ranks: the same bits as by a save and a resume."""

from __future__ import annotations

from pathlib import Path

import torch

from support import agents
from support.torchrec.checkpoint_runs import ROOT, assert_same

DEADLINE_S = 600.0
LAUNCHES = (("first", "a,b,c", 3, "b"), ("second", "a,c", 5, "c"), ("third", "a,d,e", 7, ""))
"""Name, hosts of two ranks each, the step after which it ends, and the host that is lost in that step."""


def launched(root: Path, way: str, launch: str, hosts: str, end: int, lost: str = "") -> str:
    """Runs one launch under torchrun; returns what it said."""
    worker = ROOT / "tests/support/elastic_worker.py"
    ranks = str(2 * len(hosts.split(",")))
    arguments = ["--nproc-per-node", ranks, str(worker), str(root), way, launch, hosts, str(end), lost]
    log = root / f"{way}-{launch}-log"
    code = agents.start("support.moving_imports", arguments, log).wait(DEADLINE_S)
    said = log.read_text()
    assert (code != 0) == bool(lost), said[-5000:]
    return said


def test_from_6_to_4_to_6_ranks_with_a_host_lost_each_time(tmp_path: Path) -> None:
    for launch, hosts, end, _ in LAUNCHES:
        launched(tmp_path, "durable", launch, hosts, end)
    for launch, hosts, end, lost in LAUNCHES:
        said = launched(tmp_path, "elastic", launch, hosts, end, lost)
        if launch != "first":
            assert "was lost and decoded" in said
    found = {path.name: torch.load(path) for path in tmp_path.glob("*.*s")}
    for launch in ("second.begins", "third.begins", "third.ends"):
        assert_same(found[f"elastic-{launch}"], found[f"durable-{launch}"])
    assert not list(tmp_path.rglob("*.arena"))
