"""The models of `bench.workloads.models` as scripts: batches are drawn, each by its rank and number alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baselines.method import Training
from bench.workloads.models import Batch, Twin
from bench.workloads.scripts import Job
from bench.workloads.training_rank import drawn, popularity


@dataclass(frozen=True)
class Size:
    """Of a model and its batches; see `bench.workloads.training_rank.Order`."""

    tables: int
    rows: int
    dim: int
    batch: int
    lookups: int
    dense: str
    skew: float
    seed: int

    @classmethod
    def of(cls, job: Job) -> Size:
        """As the settings have it."""
        return cls(
            tables=job.number("tables", 26),
            rows=job.number("rows", 50_000),
            dim=job.number("dim", 32),
            batch=job.number("batch", 256),
            lookups=job.number("lookups", 1),
            dense=job.settings.get("dense", "dlrm"),
            skew=float(job.settings.get("skew", 1.2)),
            seed=job.seed,
        )


class DrawnClicks:
    """A script; see `bench.workloads.scripts`.

    Args:
        twin: Builds the model, one of those of `bench.workloads.models`.
    """

    def __init__(self, twin: Callable[..., Twin]) -> None:
        self._build = twin
        self._twin: Twin | None = None

    def build(self, job: Job) -> Training:
        size = Size.of(job)
        device = None if job.device.type == "cpu" else str(job.device)
        self._twin = twin = self._build(size.tables, size.rows, size.dim, size.dense, device)
        return Training(twin.model, twin.optimizers, samples=size.batch * job.ranks)

    def batch(self, job: Job, number: int) -> Batch:
        size = Size.of(job)
        heaped, popular = _popularity(size)
        made = drawn(size, heaped, popular, np.random.default_rng([job.seed, job.rank, number]))
        return Batch(*(tensor.to(job.device) for tensor in made))

    def train(self, training: Training, batch: Batch) -> None:
        if self._twin is None:
            raise RuntimeError("build() comes first")
        self._twin.train(batch)


@functools.cache
def _popularity(size: Size) -> tuple[NDArray[np.float64], list[NDArray[np.int64]]]:
    weights, popular = popularity(size)
    return np.cumsum(weights), popular
