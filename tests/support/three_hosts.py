"""Three processes that stand for three hosts: jobs of several lives there, each with a small training.

A *life* is what happens between a launch and the next. torchrun gives a worker another RANK in every life.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from support import training_lives
from support.training_lives import DIM, STEPS

WORLD = 3
ROWS = 14  # on three ranks: shards of 5, 5 and 4


@dataclass(frozen=True)
class Place:
    """Where a process is: which host it stands for, and where the arenas lie."""

    index: int
    root: str
    job: str = ""

    @property
    def host(self) -> str:
        return f"host{self.index}"

    def arenas(self) -> list[Path]:
        """Of this host."""
        return list(Path(self.root).glob(f"*/{self.job}/{self.host}/*.arena"))

    def lose(self, index: int) -> None:
        """The memory of one host is gone. Between two lives; that host's process does it."""
        if self.index == index:
            for path in self.arenas():
                path.unlink()


LIVES: dict[str, int] = {}


@contextmanager
def life(place: Place) -> Iterator[None]:
    """One launch of the job."""
    shift = LIVES[place.job] = LIVES.get(place.job, -1) + 1
    os.environ["RANK"] = str((place.index + shift) % WORLD)
    with training_lives.launched(place.job, place.root, place.host):
        yield


class Training(training_lives.Training):
    """The small training."""

    def __init__(
        self,
        *,
        rows: int = ROWS,
        device: str | None = None,
        kind: str = "adagrad",
        head: Callable[[], nn.Module] = lambda: nn.Linear(DIM, 1),
    ) -> None:
        super().__init__(head, rows=rows, device=device, kind=kind)

    def bits(self) -> str:
        """A digest of everything that must come back: all tensors, and what would be drawn next."""
        found = hashlib.sha256()
        states = [*self.sparse.state.values(), *self.dense.state.values()]
        tensors = [*self.model.parameters(), *(t for state in states for t in state.values())]
        for tensor in tensors:
            found.update(torch.as_tensor(tensor).detach().contiguous().numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        found.update(repr(self.schedule.state_dict()).encode())
        return found.hexdigest()


def unguarded(place: Place, **arguments: Any) -> str:
    """The digest after all steps without a guard."""
    with life(Place(place.index, place.root, place.job + "-unguarded")):
        training = Training(**arguments)
        for number in range(STEPS):
            training.step(number)
        return training.bits()
