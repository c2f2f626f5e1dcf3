"""A DLRM of the example's size, trained on clicks while servers of its tables fail; what keeps it alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from baselines.state import put_in
from bench.workloads.clicks import Clicks, Data
from bench.workloads.models import Dense

DIM, LAYERS = 16, (64,)
TABLES_LR, DENSE_LR = 0.03, 1e-3


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        steps: Of each training.
        batch: Samples in a step.
        held_out: Samples.
        seeds: Of each training, or pair of trainings.
    """

    steps: int = 500
    batch: int = 256
    held_out: int = 50_000
    seeds: int = 5


@dataclass(frozen=True)
class Failure:
    """Servers that fail together.

    Attributes:
        step: Number of steps that are done.
        servers: Their numbers.
    """

    step: int
    servers: tuple[int, ...]


class Kept(Protocol):
    """What keeps a training alive. `baselines.cpr.servers.Servers` is one."""

    def touch(self, table: str, rows: Tensor) -> None:
        """These rows are about to change.

        Args:
            table: Which.
            rows: int64 [any number], ascending, as often as they are looked up, read.
        """
        ...

    def end(self, step: int) -> None:
        """Called when `step` steps are done."""
        ...

    def fail(self, step: int, servers: Sequence[int]) -> int | None:
        """These servers fail together when `step` steps are done.

        Returns:
            The step to go on with; None: the one that comes next anyway.
        """
        ...


class Judged(NamedTuple):
    """What a model knows of samples.

    Attributes:
        log_loss: In nats.
        auc: Area under the ROC curve.
    """

    log_loss: float
    auc: float


class Model:
    """All tables one after another, the dense part and their optimizers.

    Args:
        rows: Of each table.
        integers: Of each sample.
        seed: Of what it starts with.
    """

    def __init__(self, rows: Sequence[int], integers: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.empty(sum(rows), DIM))
        with torch.no_grad():
            self.weight.uniform_(-(DIM**-0.5), DIM**-0.5, generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.dense = Dense(len(rows), DIM, LAYERS, LAYERS, integers)
        self._sparse = torch.optim.Adagrad([self.weight], lr=TABLES_LR)
        self._optimizer = torch.optim.Adam(self.dense.parameters(), lr=DENSE_LR, fused=True)
        self.bounds = np.cumsum([0, *rows]).tolist()

    @classmethod
    def of(cls, data: Data, seed: int) -> Model:
        """A new one for these samples."""
        return cls(data.rows, data.training.integers.shape[1], seed)

    def tables(self) -> dict[str, dict[str, Tensor]]:
        """Of each table its weight and its optimizer's state; live."""
        tensors = {"weight": self.weight.detach(), "sum": self._sparse.state[self.weight]["sum"]}
        return {
            f"table {number}": {kind: tensor[first:end] for kind, tensor in tensors.items()}
            for number, (first, end) in enumerate(pairwise(self.bounds))
        }

    def state(self) -> dict[str, Tensor]:
        """All that a step changes, by name; live. "weight" is that of all tables."""
        found = {"weight": self.weight.detach()}
        found |= {f"tables/{name}": value for name, value in self._sparse.state[self.weight].items()}
        for name, parameter in self.dense.named_parameters():
            found[f"dense/{name}"] = parameter.detach()
            entry = self._optimizer.state.get(parameter, {})
            found |= {f"dense/{name}/{key}": value for key, value in entry.items()}
        return found

    def put(self, saved: Mapping[str, Tensor]) -> None:
        """Brings it to what `state` gave: copies of it, which are read."""
        if len(saved) < len(self.state()):  # the dense optimizer makes its state in the first step
            self._optimizer.state.clear()
        put_in(self.state(), saved)

    def logits(self, clicks: Clicks) -> Tensor:
        embedded = functional.embedding(clicks.ids, self.weight, sparse=True)
        return self.dense(clicks.integers, embedded).squeeze(1)

    def train(self, clicks: Clicks, touch: Callable[[str, Tensor], object] | None = None) -> None:
        """One step.

        Args:
            clicks: Its samples.
            touch: Called with each table and its rows that are about to change: see `Kept.touch`.
        """
        self._sparse.zero_grad()
        self._optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(self.logits(clicks), clicks.clicks).backward()
        gradient = self.weight.grad
        if gradient is None:
            raise RuntimeError("backward() has left no gradient of the tables")
        looked_up = gradient._indices()[0]
        self.weight.grad = gradient.coalesce()
        if touch is not None:
            touched = looked_up.sort().values
            cuts = torch.searchsorted(touched, torch.tensor(self.bounds)).tolist()
            for number, (first, end) in enumerate(pairwise(cuts)):
                touch(f"table {number}", touched[first:end] - self.bounds[number])
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # torch's default, less a warning
            self._sparse.step()
        self._optimizer.step()

    @torch.no_grad()
    def judged(self, clicks: Clicks) -> Judged:
        """What it knows of these samples."""
        logits = self.logits(clicks)
        loss = functional.binary_cross_entropy_with_logits(logits, clicks.clicks)
        return Judged(float(loss), auc(logits, clicks.clicks))


def train(model: Model, data: Data, kept: Kept, failures: Sequence[Failure] = ()) -> int:
    """Trains a model from its start to its end.

    Args:
        model: New.
        data: What it is trained on.
        kept: Keeps it alive.
        failures: Each strikes once, when its number of steps is done.

    Returns:
        Steps that were run again.
    """
    waiting = sorted(failures, key=lambda failure: failure.step, reverse=True)
    step = run = 0
    while step < data.steps:
        while waiting and waiting[-1].step <= step:
            back = kept.fail(step, waiting.pop().servers)
            step = step if back is None else back
        model.train(data.step(step), kept.touch)
        step += 1
        run += 1
        kept.end(step)
    return run - data.steps


def auc(logits: Tensor, clicks: Tensor) -> float:
    """Probability that a click scores higher than a non-click; ties count half."""
    _, place, counts = logits.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]
    positive = clicks.sum()
    above = ranks[clicks == 1].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (len(clicks) - positive)))
