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

from ecemb.local.state_slots import Savepoint
from ecemb.state.replicated import ReplicatedState
from ecemb.step.between_steps import Between
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


def scheduled(folder: Path, meet: Barrier, window: int, overlap: bool) -> dict[str, Any]:
    """A schedule, a buffer and all generators move behind each step; one step is aborted."""
    initialise(folder)
    training = bags(users=12)
    head: Any = training.model.head
    head.register_buffer("average", torch.zeros(3))
    schedule = torch.optim.lr_scheduler.ExponentialLR(training.dense, 0.5)
    sparse = torch.optim.lr_scheduler.ExponentialLR(training.sparse, 0.5)
    heard = Heard()
    guard = training.protect(
        2,
        1,
        window=window,
        overlap=overlap,
        state={"dense": schedule, "sparse": sparse, "progress": training.progress},
    )
    rates: list[Any] = []
    while guard.next_step < STEPS:
        began = [
            torch.rand(1).item(),
            np.random.rand(),
            random.random(),
            training.dense.param_groups[0]["lr"],
        ]
        average = head.average.clone()
        with guard.step() as step:
            first = torch.rand(1).item()
            training.body()
            head.average.add_(7)
            if step.number == ABORTED:
                step.abort()
        if step.aborted:
            assert torch.rand(1).item() == first
            assert torch.equal(head.average, average)
            assert schedule.last_epoch == sparse.last_epoch == step.number
        schedule.step()
        sparse.step()
        head.average.add_(1)
        rates.append([*began, training.sparse.param_groups[0]["lr"], head.average.tolist()])
    guard.close()
    return {"rates": rates, "words": sorted(heard.words), **training.snapshot()}


def test_an_abort_keeps_what_changed_between_steps_at_every_window(tmp_path: Path) -> None:
    ends: list[list[dict[str, Any]]] = []
    for window, overlap in ((1, False), (1, True), (2, False)):
        folder = tmp_path / f"{window} {overlap}"
        folder.mkdir()
        ends.append(launch(2, scheduled, folder, window, overlap))
        words = [end.pop("words") for end in ends[-1]]
        assert len(words[0]) == 3, words[0]
        assert "options of Adam" in words[0][0] and "lr of group 0" in words[0][0]
        assert "options of a table's optimizer" in words[0][1]
        assert "replicated state" in words[0][2] and "head.average" in words[0][2]
    for rank in range(2):
        rates = ends[0][rank]["rates"]
        assert [rate[3] for rate in rates] == [0.01 * 0.5**step for step in range(STEPS)]
        assert all(end[rank] == ends[0][rank] for end in ends[1:])


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
    ("change", "thing", "how", "only_options"),
    [
        (replaced_moment, "replicated state", "optimizers.0.state.1.exp_avg", False),
        (counted, "replicated state", "numbers", False),
        (written, "replicated state", "bias", False),
        (decayed, "options of Adam (number 0", "betas of group 0 was (0.9, 0.999) and is (0.5, 0.9)", True),
    ],
)
def test_what_has_changed_is_named(
    change: Callable[[Any, Any], None], thing: str, how: str, only_options: bool
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        optimizer.state[parameter]["count"] = 3
    state, store = ReplicatedState(model, [optimizer], []), Savepoint()
    state.save(store, 0)
    assert state.moved() == {}
    change(model, optimizer)
    ((what, says),) = state.moved().items()
    assert thing in what and how in says
    assert (state.begin(store, 0).options is not None) is only_options
