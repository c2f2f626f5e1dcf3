"""Full recovery in one process: what is saved comes back, whole checkpoints only, Young's interval.

Real ranks that are killed are in tests/contracts/test_methods.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec_models import batch, build, one_rank, optimizer_of

import ecemb
from baselines.full import FullRecovery, writers
from baselines.interval import MEASURED, Interval
from baselines.state import TrainingState
from baselines.young import young
from bench.method import Training

pytestmark = [  # torch's and TorchRec's own
    pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fbgemm.*an autograd kernel was not registered:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]
WRITERS = {"files": writers.Files, "dcp": writers.Dcp, "dcp async": writers.AsyncDcp}
every_writer = pytest.mark.parametrize("kind", WRITERS)


@pytest.fixture(scope="module", autouse=True)
def _world() -> Iterator[None]:
    with one_rank():
        yield


class Killed(Exception):
    """Stands for the end of the process."""


class Count:
    """A training's position."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Bags(nn.Module):
    """A table, one without rows, and a head with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.user = ecemb.nn.ShardedEmbeddingBag(9, 4)
        self.head = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))


class OnBags:
    """A training on ecemb.nn, with a table by hand that the optimizer makes state for late."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Bags()
        self.by_hand = nn.EmbeddingBag(5, 4, sparse=True)
        self.adagrad = torch.optim.Adagrad([self.model.user.weight], lr=0.1, lr_decay=0.1)
        self.late = torch.optim.SparseAdam(list(self.by_hand.parameters()), lr=0.1)
        self.dense = torch.optim.Adam(self.model.head.parameters(), lr=0.1)
        self.count = Count()
        self.training = Training(
            self.model, [self.adagrad, self.late, self.dense], {"by hand": self.by_hand}, [self.count]
        )

    def step(self) -> None:
        for optimizer in self.training.optimizers:
            optimizer.zero_grad()
        ids = torch.randint(5, (3, 2))
        self.model.head(self.model.user(ids) + self.by_hand(ids)).square().sum().backward()
        for optimizer in self.training.optimizers:
            optimizer.step()
        self.dense.param_groups[0]["lr"] *= 0.9
        self.count.steps += 1

    def end(self) -> list[Any]:
        found: list[Any] = [self.count.steps, self.dense.param_groups[0]["lr"], torch.get_rng_state()]
        found += [*self.model.state_dict().values(), self.by_hand.weight]
        for optimizer in self.training.optimizers:
            for state in optimizer.state.values():
                found += state.values()
        return found


class OnTorchRec:
    """A training on TorchRec's tables, under its combined optimizer."""

    def __init__(self) -> None:
        self.model = build({"user": (7, ("u",)), "item": (5, ("i",))}, "rowwise-adagrad")
        self.optimizer = optimizer_of(self.model)
        self.training = Training(self.model, [part for _, part in self.optimizer.optimizers])

    def step(self) -> None:
        self.optimizer.zero_grad()
        u, i = torch.randint(7, (4,)).tolist(), torch.randint(5, (2,)).tolist()
        self.model(batch({"u": [u, []], "i": [i, i]}))[0].backward()
        self.optimizer.step()

    def end(self) -> list[Any]:
        found: list[Any] = [value for table in ecemb.tables(self.model) for value in table.tensors.values()]
        found += list(self.model.module.over.parameters())
        found += [value for state in self.training.optimizers[1].state.values() for value in state.values()]
        return found


def equal(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(first, second, strict=True)
    )


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
    end = copy.deepcopy(script.end())

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


def test_another_training_is_refused(tmp_path: Path) -> None:
    protected(OnBags().training, tmp_path, "files")
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


def test_saves_come_at_youngs_interval(tmp_path: Path) -> None:
    script = OnBags()
    method, _ = protected(script.training, tmp_path, "files", every=None, mtbf=timedelta(microseconds=1))
    for _ in range(MEASURED + 2):
        with method.step():
            script.step()
    assert writers.complete(tmp_path)[-1] == MEASURED + 2
