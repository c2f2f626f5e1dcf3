"""Trainings of one rank that use everything that a method has to bring back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecemb
from baselines.method import Method, Training
from support.torchrec import models
from support.torchrec.models import batch, build, optimizer_of

QUIET = [
    *models.QUIET,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]


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
            self.model, [self.adagrad, self.late, self.dense], {"by hand": self.by_hand}, [self.count], 3
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
        """A copy of all state."""
        found: list[Any] = [self.count.steps, self.dense.param_groups[0]["lr"], torch.get_rng_state()]
        found += [*self.model.state_dict().values(), self.by_hand.weight]
        for optimizer in self.training.optimizers:
            for state in optimizer.state.values():
                found += state.values()
        return copy.deepcopy([one.detach() if isinstance(one, Tensor) else one for one in found])


class OnTorchRec:
    """A training on TorchRec's tables, under its combined optimizer."""

    def __init__(self) -> None:
        self.model = build({"user": (7, ("u",)), "item": (5, ("i",))}, "rowwise-adagrad")
        self.optimizer = optimizer_of(self.model)
        self.training = Training(self.model, [part for _, part in self.optimizer.optimizers], samples=3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        u, i = torch.randint(7, (4,)).tolist(), torch.randint(5, (2,)).tolist()
        self.model(batch({"u": [u, []], "i": [i, i]}))[0].backward()
        self.optimizer.step()

    def end(self) -> list[Any]:
        """A copy of all state."""
        found: list[Any] = [value for table in ecemb.tables(self.model) for value in table.tensors.values()]
        found += list(self.model.module.over.parameters())
        found += [value for state in self.training.optimizers[1].state.values() for value in state.values()]
        return [value.detach().clone() for value in found]


def lose(method: Method) -> None:
    """Its machine's memory is gone."""
    for path in method.memory():
        path.unlink()


def equal(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(first, second, strict=True)
    )
