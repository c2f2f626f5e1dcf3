"""Full recovery in one process: what is saved comes back, whole checkpoints only, Young's interval.

Real ranks that are killed are in tests/contracts/test_methods.py.
"""

from __future__ import annotations

import math
import random
import shutil
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ecemb
from baselines import pace
from baselines.full import CheckpointUnreadable, FullRecovery, writers
from baselines.interval import MEASURED, Interval
from baselines.method import Training
from baselines.state import TrainingState
from baselines.young import young
from support.killed_child import cut_off
from support.one_rank_training import QUIET, OnBags, OnTorchRec, equal

pytestmark = [*QUIET, pytest.mark.usefixtures("one_rank")]
WRITERS = {"files": writers.Files, "dcp": writers.Dcp, "dcp async": writers.AsyncDcp}
every_writer = pytest.mark.parametrize("kind", WRITERS)


class Killed(Exception):
    """Stands for the end of the process."""


def protected(training: Training, folder: Path, kind: str, **options: Any) -> tuple[FullRecovery, int]:
    method = FullRecovery(folder, WRITERS[kind](), **{"every": 3, **options})
    return method, method.prepare(training)


@every_writer
@pytest.mark.parametrize("make", [OnBags, OnTorchRec])
def test_after_a_rollback_training_goes_on_bit_by_bit(make: Any, kind: str, tmp_path: Path) -> None:
    script = make()
    torch.manual_seed(5)
    method, begin = protected(script.training, tmp_path, kind)
    for _ in range(begin, 8):
        with method.step():
            script.step()
    method.close()
    assert writers.complete(tmp_path) == [3, 6]
    costs = method.costs()
    assert costs.written_bytes > 0 and costs.stalled_s > 0 and costs.stored_bytes > 0
    assert (costs.memory_bytes > 0) == (kind == "dcp async")
    again = make()
    again.step()  # all of it is overwritten
    torch.manual_seed(6)
    method, begin = protected(again.training, tmp_path, kind)
    assert begin == 6
    for _ in range(begin, 8):
        with method.step():
            again.step()
    assert equal(again.end(), script.end())
    method.close()


@every_writer
def test_what_is_not_whole_does_not_count(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = OnBags()
    method, _ = protected(script.training, tmp_path, kind, every=1)
    with method.step():
        script.step()
    method.close()
    end = script.end()

    def killed(*_: object) -> None:
        raise Killed

    def to_the_end() -> None:
        with method.step():
            script.step()
        method.close()

    monkeypatch.setattr(writers.Writer, "_commit", killed)
    with pytest.raises(Killed):
        to_the_end()
    monkeypatch.undo()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-0", "step-1", "step-2.partial"]
    again = OnBags()
    method, begin = protected(again.training, tmp_path, kind, every=1)
    assert begin == 1 and equal(again.end(), end)
    with method.step():
        again.step()
    method.close()
    assert writers.complete(tmp_path) == [1, 2]


def save(folder: Path, step: int) -> None:
    writers.Files().save(
        folder, step, {"own": torch.full((3,), step)}, {"shared": torch.tensor(step)}, keep=1
    )


@pytest.mark.parametrize("kind", [writers.Files, writers.Dcp])
def test_storage_may_be_slow(
    kind: type[writers.Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append))
    writer = kind(100.0)
    writer.save(tmp_path, 1, {"own": torch.ones(3)}, {"shared": torch.ones(2)}, keep=1)
    assert max(slept) == pytest.approx(0.2)  # 20 bytes
    slept.clear()
    assert writer.load(writers.place(tmp_path, 1)).keys() == {"own", "shared"}
    assert max(slept) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="bytes_per_s="):
        kind(0)


def test_after_a_kill_at_any_moment_the_newest_is_complete(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "barrier", lambda: None)  # a forked child lacks gloo's threads
    save(tmp_path, 1)
    step, end, random_ = 1, 0, random.Random(seed)
    while True:
        end += 1
        killed = cut_off(end, lambda: save(tmp_path, step + 1), writers)  # noqa: B023
        newest = writers.complete(tmp_path)[-1]
        found = writers.Files().load(writers.place(tmp_path, newest))
        assert newest in (step, step + 1) and found["own"].tolist() == [newest] * 3
        assert int(found["shared"]) == newest
        if not killed:
            break
        if newest > step or random_.random() < 0.3:  # the next save removes what the kill left behind
            step = newest + 1
            save(tmp_path, step)
            assert [path.name for path in tmp_path.iterdir()] == [f"step-{step}"]
    assert end > 40


@every_writer
def test_what_can_not_be_read_is_named(kind: str, tmp_path: Path) -> None:
    script = OnBags()
    method, _ = protected(script.training, tmp_path, kind, every=1)
    with method.step():
        script.step()
    method.close()
    assert method.costs().stored_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    for path in writers.place(tmp_path, 1).iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CheckpointUnreadable, match="step-1 can't be read.*move it away"):
        protected(OnBags().training, tmp_path, kind, every=1)
    shutil.rmtree(writers.place(tmp_path, 1))
    assert protected(OnBags().training, tmp_path, kind, every=1)[1] == 0


def test_another_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    protected(OnBags().training, tmp_path, "files")
    for other, words in (
        (nn.Linear(4, 3), r"head\.0\.weight.*\(2, 4\).*\(3, 4\)"),
        (nn.Linear(4, 2).half(), "float16"),
    ):
        script = OnBags()
        script.model.head[0] = other
        script.training.optimizers[2].param_groups[0]["params"][:2] = other.parameters()
        with pytest.raises(ValueError, match=f"another training.*{words}"):
            protected(script.training, tmp_path, "files")
    state = TrainingState(OnBags().training)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="is of 1 ranks, and there are 2: start 1"):
        state.put(writers.Files().load(writers.place(tmp_path, 0)))
    monkeypatch.undo()
    other = OnBags()
    other.model.extra = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"another training.*model/extra"):
        protected(other.training, tmp_path, "files")


def test_tables_on_the_meta_device_are_refused() -> None:
    table = ecemb.nn.ShardedEmbeddingBag(9, 4, device="meta")
    with pytest.raises(ValueError, match=r"'a' is on the meta device.*CPU"):
        TrainingState(Training(nn.Module(), [], {"a": table}))


def test_the_interval_is_youngs() -> None:
    assert young(2.0, 100.0) == 20.0
    interval = Interval(None, timedelta(seconds=100))
    interval.saved(1.0)
    for _ in range(MEASURED):
        assert interval.steps is None
        interval.stepped(0.5)
    assert interval.steps == round(math.sqrt(2 * 1.0 * 100) / 0.5)
    interval.saved(3.0)
    assert interval.steps == round(math.sqrt(2 * 2.0 * 100) / 0.5)
    given = Interval(7, None)
    given.saved(1.0)
    given.stepped(1.0)
    assert given.steps == 7
    for every, mtbf in ((None, None), (1, timedelta(1)), (0, None), (None, timedelta(0))):
        with pytest.raises(ValueError, match=r"every=.*mtbf="):
            Interval(every, mtbf)


def test_saves_come_at_youngs_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("saved", "stepped"):  # each takes a second
        real = getattr(Interval, name)
        monkeypatch.setattr(Interval, name, lambda self, _, real=real: real(self, 1.0))
    script = OnBags()
    method, _ = protected(script.training, tmp_path, "files", every=None, mtbf=timedelta(microseconds=1))
    for _ in range(MEASURED + 2):
        with method.step():
            script.step()
    assert writers.complete(tmp_path)[-1] == MEASURED + 2


def test_a_later_life_measures_anew(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every": None, "mtbf": timedelta(hours=1)}
    protected(OnBags().training, tmp_path, "files", **options)
    script = OnBags()
    method, begin = protected(script.training, tmp_path, "files", **options)
    assert begin == 0 and method.interval.measured is None
    for _ in range(MEASURED):
        with method.step():
            script.step()
    assert writers.complete(tmp_path) == [0, MEASURED]  # to find out what a save takes
    assert method.interval.measured is not None and method.interval.steps is not None
