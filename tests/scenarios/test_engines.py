"""A training whose tables move from ecemb.nn to TorchRec and back, with other numbers of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from support.torchrec import checkpoint_runs
from support.torchrec.checkpoint_runs import assert_same

run = partial(checkpoint_runs.run, "engine_worker.py")


@pytest.mark.parametrize("store", ["folder", pytest.param("durable", marks=pytest.mark.long)])
def test_tables_move_to_torchrec_and_back_with_the_same_bits(store: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrec", reason="TorchRec is not installed")
    plain = run(3, "first", tmp_path, 0, store, "plain")
    assert plain["begins"]["step"] == 0 and plain["ends"]["step"] == 2
    fused = run(2, "second", tmp_path, 0, store, "torchrec")
    assert_same(fused["begins"], plain["ends"])
    again = run(4, "third", tmp_path, 0, store, "plain")
    assert_same(again["begins"], fused["ends"])
    for name in ("t0.weight", "t1.sum", "t2.weight", "head.weight"):
        assert not torch.equal(fused["ends"][name], plain["ends"][name]), name
    assert again["ends"]["step"] == 6
