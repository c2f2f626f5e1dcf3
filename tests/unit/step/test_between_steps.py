"""What changes between two steps: an abort keeps it at every window, a warning says that a crash won't."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ecemb.memory.rank_memory import StateCopy
from ecemb.state.replicated import ReplicatedState
from ecemb.step.transaction import Between
from support.guarded_training import bags, initialise
from support.processes import launch

STEPS, ABORTED = 6, 3


class Heard(logging.Handler):
    """What was said between steps."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.words: list[str] = []
        logging.getLogger("ecemb").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if "is not made again" in record.getMessage():
            self.words.append(record.getMessage())


def scheduled(folder: Path, meet: Barrier, overlap: bool) -> dict[str, Any]:
    """A schedule, a buffer and all generators move behind and in front of each step; one step is aborted."""
    initialise(folder)
    training = bags(users=12)
    head: Any = training.model.head
    head.register_buffer("average", torch.zeros(3))
    optimizers = training.dense, training.sparse
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
    state = {"dense": schedules[0], "sparse": schedules[1], "progress": training.progress}
    heard = Heard()
    guard = training.protect(2, 1, overlap=overlap, state=state)

    def now() -> list[Any]:
        drawn = [torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()]
        rates = [one.param_groups[0]["lr"] for one in optimizers]
        return [*drawn, *rates, *(one.last_epoch for one in schedules), head.average.tolist()]

    rates: list[float] = []
    committed: list[Any] = []
    while guard.next_step < STEPS:
        torch.rand(1), np.random.rand(), random.random()
        rates.append(training.dense.param_groups[0]["lr"])
        with guard.step() as step:
            training.body()
            head.average.add_(7)
            if step.number == ABORTED:
                step.abort()
            else:
                committed = now()
        with guard.evaluation():
            torch.rand(1), np.random.rand(), random.random()
        assert now() == committed
        for schedule in schedules:
            schedule.step()
        head.average.add_(1)
    guard.close()
    return {"rates": rates, "words": sorted(heard.words), **training.snapshot()}


def test_an_abort_undoes_what_changed_between_steps_as_well(tmp_path: Path) -> None:
    ends: list[list[dict[str, Any]]] = []
    for overlap in (False, True):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        ends.append(launch(2, scheduled, folder, overlap))
        words = [end.pop("words") for end in ends[-1]]
        assert len(words[0]) == 3, words[0]
        assert "options of Adam" in words[0][0] and "lr of group 0" in words[0][0]
        assert "options of a table's optimizer" in words[0][1]
        assert "replicated state" in words[0][2] and "head.average" in words[0][2]
        assert all("after a failure or an abort" in one for one in words[0])
    assert ends[0] == ends[1]
    for end in ends[0]:
        assert end["rates"] == [0.01 * 0.5 ** (step - (step > ABORTED)) for step in range(STEPS)]


# --- who is told of ---------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture, *moved: set[str]) -> list[str]:
    """What a check of each step says."""
    between = Between()
    with caplog.at_level(logging.WARNING, "ecemb"):
        for step, things in enumerate(moved):
            between.check(step, dict.fromkeys(things, "how"))
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("moved", "when"),
    [
        ([set(), set(), set()], ""),
        ([{"lr"}, {"lr"}, {"lr"}, set(), {"lr"}], ""),  # in front of the step
        ([set(), {"lr"}, {"lr"}], "lr changed between steps 0 and 1 (how)"),
        ([set(), set(), {"lr"}, {"lr"}], "lr changed between steps 1 and 2 (how)"),
        ([{"lr"}, set(), {"lr"}], "lr changed between ecemb.protect() and the first step (how)"),
    ],
)
def test_what_code_in_front_of_a_step_changes_is_fine(
    moved: list[set[str]], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = said(caplog, *moved)
    assert len(words) == bool(when)
    assert all(when in one for one in words)


def test_every_thing_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    words = said(caplog, set(), {"lr"}, {"lr", "numpy"}, {"lr", "numpy"})
    assert [one.split()[0] for one in words] == ["lr", "numpy"]


def replaced_moment(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.bias]["exp_avg"] = torch.zeros(2)


def counted(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.bias]["count"] = 4


@torch.no_grad()
def written(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.bias.add_(1)


def decayed(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)


@pytest.mark.parametrize(
    ("change", "thing", "how"),
    [
        (replaced_moment, "replicated state", "optimizers.0.state.1.exp_avg"),
        (counted, "replicated state", "numbers"),
        (written, "replicated state", "bias"),
        (decayed, "options of Adam (number 0", "betas of group 0 was (0.9, 0.999) and is (0.5, 0.9)"),
    ],
)
def test_what_has_changed_is_named(change: Callable[[Any, Any], None], thing: str, how: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        optimizer.state[parameter]["count"] = 3
    state, store = ReplicatedState(model, [optimizer], []), StateCopy()
    state.save(store, 0)
    assert state.moved() == {}
    change(model, optimizer)
    ((what, says),) = state.moved().items()
    assert thing in what and how in says
