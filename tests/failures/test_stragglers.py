"""Ranks that make other calls than the rest hang, and one line says which, and where they are."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from support import agents

DEADLINE_S = 300.0


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("save", "in guard.save(), before step 2, and ranks 1 and 2 are at the end of step 2"),
        ("short", "at the end of step 2, and rank 1 is in guard.close(), before step 2"),
    ],
)
def test_a_rank_that_is_elsewhere_is_named_once(how: str, line: str, tmp_path: Path) -> None:
    script, log = Path(__file__).with_name("straggler_worker.py"), tmp_path / "log"
    words = ["--nproc-per-node=3", str(script), str(tmp_path), how]
    agent = agents.start("support.moving_imports", words, log)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while "has waited for" not in log.read_text():
            assert time.monotonic() < deadline and agent.poll() is None, log.read_text()
            time.sleep(0.05)
        time.sleep(4.0)  # for what others would say, too, or what would be said again
        lines = [text for text in log.read_text().splitlines() if "has waited for" in text]
        begin, end = r"WARNING rank 0 has waited for \d+ s", "all ranks make the same calls in every step"
        assert len(lines) == 1 and re.fullmatch(rf"{begin} {re.escape(line)}: {end}", lines[0]), lines
    finally:
        agent.kill()  # and its workers end with it
        agent.wait()
