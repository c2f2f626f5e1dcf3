"""Checkpoints of TorchRec's tables come back with the same ranks, and with others."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from support.torchrec import checkpoint_runs
from support.torchrec.checkpoint_runs import assert_same

run = partial(checkpoint_runs.run, "checkpoint_worker.py")


def test_a_checkpoint_is_resumed_with_as_many_ranks_and_with_others(tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    undisturbed = run(3, "undisturbed", tmp_path / "a", 4)
    saved = run(3, "first", tmp_path / "b", 2)
    same = run(3, "second", tmp_path / "b", 4)
    assert_same(same["begins"], saved["ends"])
    assert_same(same["ends"], undisturbed["ends"])
    fewer = run(2, "third", tmp_path / "b", 6)
    assert_same(fewer["begins"], same["ends"])
    more = run(3, "differential", tmp_path / "b", 7)
    assert_same(more["begins"], fewer["ends"])
    kept = run(3, "elastic", tmp_path / "c", 4)
    assert_same(kept["ends"], same["ends"])
    next(iter((tmp_path / "c").rglob("*.arena"))).unlink()  # of one rank
    moved = run(2, "elastic", tmp_path / "c", 6)
    assert_same(moved["begins"], fewer["begins"])
    assert_same(moved["ends"], fewer["ends"])
    moved = run(3, "elastic", tmp_path / "c", 7)
    assert_same(moved["ends"], more["ends"])
