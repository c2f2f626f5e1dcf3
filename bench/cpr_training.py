"""A DLRM of the example's size, trained on clicks that are drawn beforehand, while emulated servers fail.

Tables have the proportions of Criteo's. Clicks have a signal: each category, and some of the integers, make
one more or less likely, by weights that nobody tells the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from baselines.cpr.servers import Servers
from bench.overhead_models import INTEGERS, Dense

KAGGLE_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Rows of the 26 tables of Criteo's Kaggle data, as DLRM counts them."""
SCALE, LEAST = 200, 10
"""Tables have so many times fewer rows than Criteo's, but not fewer than this, if Criteo's have them."""
ROWS = tuple(max(min(rows, LEAST), rows // SCALE) for rows in KAGGLE_ROWS)
DIM, LAYERS = 16, (64,)
TABLES_LR, DENSE_LR = 0.03, 1e-3
WEIGHTS = 0.6
"""The largest weight of a category, in log odds."""


@dataclass(frozen=True)
class Clicks:
    """Samples, drawn beforehand.

    Attributes:
        integers: float32 [samples, INTEGERS].
        ids: int64 [samples, tables], rows of all tables one after another.
        clicks: float32 [samples].
    """

    integers: Tensor
    ids: Tensor
    clicks: Tensor

    def part(self, first: int, end: int) -> Clicks:
        return Clicks(self.integers[first:end], self.ids[first:end], self.clicks[first:end])


@dataclass(frozen=True)
class Data:
    """Of one seed.

    Attributes:
        training: As many samples as all steps take, each taken once.
        held_out: To be asked at the end.
        batch: Samples in a step.
    """

    training: Clicks
    held_out: Clicks
    batch: int

    @property
    def steps(self) -> int:
        return len(self.training.clicks) // self.batch

    def step(self, number: int) -> Clicks:
        return self.training.part(number * self.batch, (number + 1) * self.batch)


@dataclass(frozen=True)
class Failure:
    """Servers that fail together.

    Attributes:
        step: So many steps are done.
        servers: Their numbers.
    """

    step: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class Trained:
    """What became of a training.

    Attributes:
        log_loss: Of what was held out.
        auc: Of the same.
        pls: Counted.
        priority_bytes: What priorities took, on all servers.
        bookkeeping_s: What following rows and saving took.
        seconds: What all took.
        cpu_s: Of processor time.
    """

    log_loss: float
    auc: float
    pls: float
    priority_bytes: int
    bookkeeping_s: float
    seconds: float
    cpu_s: float


def draw(steps: int, batch: int, held_out: int, seed: int) -> Data:
    """Draws samples: low ids are frequent, as by Zipf's law."""
    rng = np.random.default_rng(seed)
    samples = steps * batch + held_out
    rows = np.array(ROWS)
    bases = np.cumsum([0, *ROWS[:-1]])
    ids = (rows ** rng.random((samples, len(ROWS)))).astype(np.int64) - 1 + bases
    integers = np.log1p(np.floor(np.exp(2 * rng.standard_normal((samples, INTEGERS)))))
    weights = WEIGHTS * rng.uniform(-1, 1, sum(ROWS))
    logits = weights[ids].sum(1) + 0.2 * (integers[:, :4] - 1).sum(1) - 1
    clicks = rng.random(samples) < 1 / (1 + np.exp(-logits))
    all_ = Clicks(torch.from_numpy(integers).float(), torch.from_numpy(ids), torch.from_numpy(clicks).float())
    return Data(all_.part(0, steps * batch), all_.part(steps * batch, samples), batch)


class Model:
    """All tables one after another, the dense part and their optimizers.

    Args:
        seed: Of what it starts with.
    """

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.empty(sum(ROWS), DIM))
        with torch.no_grad():
            self.weight.uniform_(-(DIM**-0.5), DIM**-0.5, generator=generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.dense = Dense(len(ROWS), DIM, LAYERS, LAYERS)
        self._sparse = torch.optim.Adagrad([self.weight], lr=TABLES_LR)
        self._optimizer = torch.optim.Adam(self.dense.parameters(), lr=DENSE_LR, fused=True)
        self.bounds = np.cumsum([0, *ROWS]).tolist()

    def tables(self) -> dict[str, dict[str, Tensor]]:
        """Of each table its weight and its optimizer's state; live."""
        tensors = {"weight": self.weight.detach(), "sum": self._sparse.state[self.weight]["sum"]}
        return {
            f"table {number}": {kind: tensor[first:end] for kind, tensor in tensors.items()}
            for number, (first, end) in enumerate(pairwise(self.bounds))
        }

    def logits(self, clicks: Clicks) -> Tensor:
        embedded = functional.embedding(clicks.ids, self.weight, sparse=True)
        return self.dense(clicks.integers, embedded).squeeze(1)

    def train(self, clicks: Clicks, touch: Callable[[str, Tensor], object] | None = None) -> None:
        """One step.

        Args:
            clicks: Its samples.
            touch: Called with each table and its rows that are about to change: int64 [m], ascending.
        """
        self._sparse.zero_grad()
        self._optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(self.logits(clicks), clicks.clicks).backward()
        gradient = self.weight.grad
        if gradient is None:
            raise RuntimeError("backward() has left no gradient of the tables")
        self.weight.grad = gradient.coalesce()
        if touch is not None:
            touched = self.weight.grad.indices()[0]
            cuts = torch.searchsorted(touched, torch.tensor(self.bounds)).tolist()
            for number, (first, end) in enumerate(pairwise(cuts)):
                touch(f"table {number}", touched[first:end] - self.bounds[number])
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # torch's default, less a warning
            self._sparse.step()
        self._optimizer.step()

    def judged(self, clicks: Clicks) -> tuple[float, float]:
        """Log loss and AUC."""
        with torch.no_grad():
            logits = self.logits(clicks)
            loss = functional.binary_cross_entropy_with_logits(logits, clicks.clicks)
        return float(loss), auc(logits, clicks.clicks)


def train(
    data: Data,
    seed: int,
    *,
    servers: int,
    every: int,
    failures: Sequence[Failure] = (),
    priority: str | None = None,
) -> Trained:
    """Trains a model from its start to its end.

    Args:
        data: What it is trained on.
        seed: Of what the model starts with.
        servers: That hold the tables.
        every: Steps in which the volume of everything is saved once (T_save).
        failures: Each strikes when so many steps are done.
        priority: See `baselines.cpr.saving`.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    model = Model(seed)
    emulated = Servers(model.tables(), servers, data.steps, every=every, priority=priority)
    for step in range(data.steps):
        for failure in failures:
            if failure.step == step:
                emulated.fail(step, failure.servers)
        model.train(data.step(step), emulated.touch)
        emulated.end(step + 1)
    log_loss, area = model.judged(data.held_out)
    return Trained(
        log_loss=log_loss,
        auc=area,
        pls=emulated.pls,
        priority_bytes=emulated.priority_bytes,
        bookkeeping_s=emulated.touched_s + emulated.saving_s,
        seconds=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu_began,
    )


def auc(logits: Tensor, clicks: Tensor) -> float:
    """Probability that a click scores higher than a non-click; ties count half."""
    _, place, counts = logits.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).double()[place]
    positive = clicks.sum()
    above = ranks[clicks == 1].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (len(clicks) - positive)))
