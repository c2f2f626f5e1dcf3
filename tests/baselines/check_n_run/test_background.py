"""Beside the training: one checkpoint at a time, at the bandwidth allowed; failures are raised in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baselines import pace
from baselines.check_n_run import background
from baselines.check_n_run.background import Background
from baselines.check_n_run.recovery import CheckNRun
from baselines.check_n_run.store import Folder
from baselines.check_n_run.writing import CheckpointFailed, write
from support.check_n_run.training import Life, is_right


def test_a_limited_checkpoint_takes_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: 5.0, sleep=slept.append))
    life = Life(Folder(tmp_path / "store"), tmp_path, "full", ranks=1)
    receipt = write(dataclasses.replace(life.jobs()[0], bytes_per_s=1000.0), life.store)
    assert max(slept) == pytest.approx(receipt.size_bytes / 1000)


def gone(child: background.Child) -> None:
    child._process.kill()


@pytest.mark.parametrize("process", [False, True])
def test_what_fails_beside_is_raised_in_training(
    *, process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    beside = Background(str(store), {}, process=process)
    try:
        assert beside.wait() is None
        life = Life(Folder(store), tmp_path, "one_shot", ranks=1)
        beside.start(life.jobs()[0])
        done = beside.wait()
        assert done is not None and done[1].size_bytes > 0 and beside.wait() is None
        assert is_right(Life(Folder(store), tmp_path / "other", "one_shot", ranks=1))
        job = dataclasses.replace(life.jobs()[0], copy=dataclasses.replace(done[0].copy, path="/no/such"))
        beside.start(job)
        with pytest.raises(CheckpointFailed, match=r"step 0 was not written: .*No such file.*/no/such"):
            beside.wait()
        if beside._child is not None:
            gone(beside._child)
            beside.start(job)
            with pytest.raises(CheckpointFailed, match=r"its process ended with -9"):
                beside.wait()
    finally:
        beside.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"keep": 0}, r"keep= is above 0; got 0"),
        ({"chunk_bytes": 0}, r"chunk_bytes="),
        ({"bytes_per_s": 0.0}, r"bytes_per_s="),
        ({"policy": "daily"}, r"policy="),
        ({"weights": -1.0}, r"restores.*-1"),
        ({"every": None}, r"every="),
        ({"target": "memory://x"}, r"memory://.*process=False"),
        ({"target": "nosuch://x"}, r"nosuch"),
    ],
)
def test_what_is_refused(options: dict[str, Any], told: str, tmp_path: Path) -> None:
    make: Callable[..., CheckNRun] = CheckNRun
    given = {"target": tmp_path, "memory": tmp_path, "every": 3, **options}
    with pytest.raises(ValueError, match=told):
        make(**given)
