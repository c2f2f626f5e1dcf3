"""What a simulated job trains, and its plain twin, which has neither ecemb nor failures.

Each rank has tables of its own, sharded by hand: `user` and `item`, which optimizers of torch change, and
`hand`, which the step writes by itself. Dense parameters are the same on all ranks. What a step does depends
on its number and on the state, so that a step that is lost, or runs twice, shows in the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import ecemb


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run trains.

    Attributes:
        seed: of rows and steps.
        hosts: rank -> its host.
        code: n and k.
        domain: `failure_domain=`.
        steps: of the whole training.
        window: steps of a transaction.
        overlap: as of `protect`.
        rebuild: as of `protect`.
        rows: rank -> rows of its tables.
        dims: columns of the tables.
        aborts: (step, rank): the rank aborts the step, whenever it runs.
        cancels: (step, rank): the rank begins the step, cancels it, and begins it again, in each life.
        verify: share of time in which parity is compared.
        compare_every: commits between two comparisons of dense state.
    """

    seed: int
    hosts: tuple[str, ...]
    code: tuple[int, int]
    domain: Any
    steps: int
    window: int
    overlap: bool
    rebuild: Any
    rows: tuple[tuple[int, int, int], ...]
    dims: tuple[int, int, int]
    aborts: frozenset[tuple[int, int]]
    cancels: frozenset[tuple[int, int]]
    verify: float
    compare_every: int

    @property
    def size(self) -> int:
        return len(self.hosts)


class Counter:
    """State of a rank that is no tensor."""

    def __init__(self, rank: int) -> None:
        self.value = rank

    def run(self, step: int) -> None:
        self.value = (self.value * 5 + step + 1) % 2**61

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Model(nn.Module):
    """The tables and dense layers of a rank."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__()
        user, item, hand = job.rows[rank]
        self.user = nn.EmbeddingBag(user, job.dims[0], mode="sum", sparse=True)
        self.item = nn.Embedding(item, job.dims[1], sparse=True)
        self.hand = nn.Embedding(hand, job.dims[2], sparse=True)
        self.hand.weight.requires_grad_(False)
        self.head = nn.Linear(3, 2)
        with torch.no_grad():
            for i, table in enumerate((self.user, self.item, self.hand)):
                rng = np.random.default_rng([job.seed, rank, i])
                table.weight.copy_(torch.from_numpy(rng.standard_normal(table.weight.shape, np.float32)))
            for parameter in self.head.parameters():
                parameter.fill_(1.0)


class Training:
    """A rank's training.

    Args:
        job: what is trained.
        rank: the rank.
        moment: called where the process may end.
    """

    def __init__(self, job: Job, rank: int, moment: Callable[[], None] = lambda: None) -> None:
        self.job, self.rank, self.moment = job, rank, moment
        self.model = Model(job, rank)
        self.counter = Counter(rank)
        self.optimizers = [
            torch.optim.Adagrad([self.model.user.weight], lr=0.3),
            torch.optim.SGD([self.model.item.weight], lr=0.1),
            torch.optim.SGD(self.model.head.parameters(), lr=0.01, momentum=0.9),
        ]

    def protect(self) -> ecemb.Guard:
        """Protects it. All ranks."""
        job, model = self.job, self.model
        return ecemb.protect(
            model,
            optimizers=self.optimizers,
            tables={"user": model.user, "item": model.item, "hand": model.hand},
            code=ecemb.Code(*job.code),
            state={"counter": self.counter},
            window=job.window,
            overlap=job.overlap,
            failure_domain=job.domain,
            compare_every=job.compare_every,
            verify=job.verify,
            rebuild=job.rebuild,
        )

    def step(
        self, number: int, touch: Callable[[str, torch.Tensor], None] = lambda table, rows: None
    ) -> None:
        """The body of a step."""
        rng = np.random.default_rng([self.job.seed, self.rank, number, 7])
        model = self.model
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        user, item, hand = (
            torch.from_numpy(rng.integers(0, rows, size=3)) for rows in self.job.rows[self.rank]
        )
        loss = model.user(user, torch.tensor([0, 1])).sum() * (number + 1) + model.item(item).pow(2).sum()
        self.moment()
        loss.backward()
        for parameter in model.head.parameters():
            parameter.grad = parameter.detach() * 0.1 + number
        for optimizer in self.optimizers:
            optimizer.step()
            self.moment()
        rows = torch.unique(hand)
        touch("hand", rows)
        with torch.no_grad():
            for part in rows.split(1):
                self.moment()
                model.hand.weight[part] = model.hand.weight[part] * 0.5 + (number + 1)
        self.counter.run(number)

    def state(self) -> dict[str, bytes]:
        """All state of this rank, by name."""
        tensors: dict[str, Any] = dict(self.model.state_dict())
        for i, optimizer in enumerate(self.optimizers):
            for p, values in enumerate(optimizer.state.values()):
                for name, value in values.items():
                    tensors[f"optimizer{i}.{p}.{name}"] = value
        found = {
            name: value.detach().numpy().tobytes()
            for name, value in tensors.items()
            if isinstance(value, torch.Tensor)
        }
        return {**found, "counter": str(self.counter.value).encode()}


def twin(job: Job) -> list[list[dict[str, bytes]]]:
    """[rank][steps that have ended] -> the state of a training without failures."""
    found: list[list[dict[str, bytes]]] = []
    aborted = {step for step, _ in job.aborts}
    for rank in range(job.size):
        training = Training(job, rank)
        states = [training.state()]
        for number in range(job.steps):
            if number not in aborted:
                training.step(number)
            states.append(training.state())
        found.append(states)
    return found


def difference(found: dict[str, bytes], expected: dict[str, bytes]) -> str:
    """The names of what differs."""
    names = [name for name in expected if found.get(name, expected[name]) != expected[name]]
    return ", ".join(names)
