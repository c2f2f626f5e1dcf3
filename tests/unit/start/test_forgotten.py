"""State of the script that no recovery restores is named, where `protect` begins a job and one step later."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

import ecemb
from ecemb.errors import ConfigurationError
from support.guarded_training import initialise
from support.processes import launch
from support.refusals import refused


class EveryThird(torch.optim.SGD):
    """Counts its calls in an attribute, as wrappers of training frameworks do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.calls += 1
        super().step()


class Stream:
    """Batches that know their position."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 3:
            self.next += 1
            yield self.next
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("ecemb").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def named(line: str) -> list[str]:
    """The objects of a line."""
    return [
        part.split(" (")[0] for part in line.split("no recovery restores ")[1].split("; ") if " (" in part
    ]


class Script:
    """A table, a dense layer and their optimizers."""

    def __init__(self, folder: Path) -> None:
        initialise(folder)
        self.table, head = nn.Embedding(6, 2, sparse=True), nn.Linear(2, 1)
        self.model = nn.ModuleDict({"table": self.table, "head": head})
        self.sparse, self.dense = (
            torch.optim.SGD(self.table.parameters(), lr=0.1),
            EveryThird(head.parameters(), lr=0.1),
        )

    def protect(self, **options: Any) -> ecemb.Guard:
        optimizers = [self.sparse, self.dense]
        given: dict[str, Any] = {"optimizers": optimizers, "tables": {"t": self.table}, **options}
        return ecemb.protect(self.model, code=ecemb.Code(2, 1), **given)

    def step(self) -> None:
        for optimizer in (self.sparse, self.dense):
            optimizer.zero_grad()
        self.model["head"](self.table(torch.randint(6, (4,)))).square().sum().backward()
        self.sparse.step()
        self.dense.step()


def forget_much(folder: Path, meet: Barrier) -> list[str]:
    said, script = Said(), Script(folder)
    schedule = StepLR(script.dense, 2)
    average = AveragedModel(script.model["head"])
    with refused(ConfigurationError, "strict=True", "schedule (StepLR)", "average (AveragedModel)", "state="):
        script.protect(strict=True)
    with refused(ConfigurationError, "strict= is True or False", "'yes'"):
        script.protect(strict="yes")
    guard = script.protect()
    later = StepLR(script.sparse, 2)
    number = -1
    while number < 3:
        number += 1
        with guard.step():
            script.step()
            for one in (schedule, later):
                one.step()
            average.update_parameters(script.model["head"])
    guard.close()
    return said.lines


def give_all(folder: Path, meet: Barrier) -> list[str]:
    said, script = Said(), Script(folder)
    script.dense = torch.optim.SGD(script.model["head"].parameters(), lr=0.1)  # type: ignore[assignment]
    schedule = StepLR(script.dense, 2)
    guard = script.protect(state={"schedule": schedule}, strict=True)
    batches = guard.batches(Stream())
    shuffled = guard.batches(DataLoader([1, 2], shuffle=True, generator=torch.Generator()))
    held_out = DataLoader([1, 2], generator=torch.Generator())  # which seeds its workers
    for step in guard.steps(2):
        with step:
            assert [next(batches), len(held_out), next(shuffled) > 0]
            script.step()
            schedule.step()
    guard.close()
    return said.lines


def forget_positions(folder: Path, meet: Barrier) -> list[str]:
    said, script = Said(), Script(folder)
    script.dense = torch.optim.SGD(script.model["head"].parameters(), lr=0.1)  # type: ignore[assignment]
    guard = script.protect()
    numbers, lines = iter([1, 2, 3]), (number for number in range(3))
    batches = iter(DataLoader([1, 2]))
    steps = guard.steps(3)
    for step in steps:
        with step:
            script.step()
            next(numbers), next(lines)
    assert next(batches)
    guard.close()
    return said.lines


def forget_later(folder: Path, meet: Barrier) -> None:
    script = Script(folder)
    guard = script.protect(strict=True)
    later, own = StepLR(script.sparse, 2), DataLoader([1, 2], shuffle=True, generator=torch.Generator())
    with guard.step():
        script.step()
        later.step()
        assert len(own) == 2
    words = ("strict=True", "later (StepLR)", "own.sampler.generator (Generator)", "optimizers[1].calls")
    with refused(ConfigurationError, *words), guard.step():
        raise AssertionError
    with refused(ConfigurationError, "strict=True"), guard.step():
        raise AssertionError


def test_what_the_script_forgets_is_named_once_and_refused_with_strict(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    [lines] = launch(1, forget_much, folders[0])
    forgotten = [line for line in lines if "no recovery restores" in line]
    assert [named(line) for line in forgotten] == [
        ["schedule", "average"],
        ["later", "optimizers[1].calls", "the position in the data"],
    ]
    assert "guard.next_step" in forgotten[1] and "guard.steps()" in forgotten[1]
    [lines] = launch(1, give_all, folders[1])
    assert not [line for line in lines if "no recovery restores" in line]
    launch(1, forget_later, folders[2])
    [lines] = launch(1, forget_positions, folders[3])
    [line] = [line for line in lines if "no recovery restores" in line]
    assert sorted(named(line)) == ["batches", "lines", "numbers"] and "guard.batches(loader)" in line
