"""Real kills at random moments of writing; `make kills` is the long form."""

from __future__ import annotations

from pathlib import Path

from support.check_n_run.kills import kills


def test_what_was_whole_comes_back_after_a_kill(tmp_path: Path, seed: int) -> None:
    found = list(kills(tmp_path, 8, seed))
    assert all(one.holds for one in found), found
