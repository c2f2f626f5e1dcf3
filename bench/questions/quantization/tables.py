"""The rows that are stored: of untrained tables, and of trained ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.workloads.click_training import DENSE_LR, LAYERS, TABLES_LR
from bench.workloads.models import Dense
from bench.workloads.planted import ROWS, draw

MET = 20
"""Lookups of a row after which it counts as trained."""


def normal(rows: int, dim: int, seed: int) -> Tensor:
    """Rows of normal numbers, with a standard deviation of 0.1: float32 [rows, dim]."""
    return 0.1 * torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed))


def uniform(rows: int, dim: int, seed: int) -> Tensor:
    """Rows as DLRM's begin, evenly spread over +-1 / sqrt(dim): float32 [rows, dim]."""
    drawn = torch.rand(rows, dim, generator=torch.Generator().manual_seed(seed))
    return (2 * drawn - 1) * dim**-0.5


def trained(rows: int, dim: int, seed: int, *, steps: int, batch: int) -> Tensor:
    """Rows of the tables of a small DLRM, trained by Adagrad on the clicks of `bench.workloads.planted`.

    Args:
        rows: At most; those are drawn from that were looked up often.
        dim: Of the tables.
        seed: Of all that is drawn.
        steps: Of the training.
        batch: Samples in each.

    Returns:
        float32 [rows or fewer, dim].
    """
    clicks = draw(steps, batch, 0, seed).training
    generator = torch.Generator().manual_seed(seed)
    weight = nn.Parameter(torch.empty(sum(ROWS), dim))
    with torch.no_grad():
        weight.uniform_(-(dim**-0.5), dim**-0.5, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        dense = Dense(len(ROWS), dim, LAYERS, LAYERS)
    sparse = torch.optim.Adagrad([weight], lr=TABLES_LR)
    optimizer = torch.optim.Adam(dense.parameters(), lr=DENSE_LR)
    for step in range(steps):
        part = clicks.part(step * batch, (step + 1) * batch)
        sparse.zero_grad()
        optimizer.zero_grad()
        embedded = functional.embedding(part.ids, weight, sparse=True)
        logits = dense(part.integers, embedded).squeeze(1)
        functional.binary_cross_entropy_with_logits(logits, part.clicks).backward()
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # torch's default, less a warning
            sparse.step()
        optimizer.step()
    often = (clicks.ids.flatten().bincount(minlength=sum(ROWS)) >= MET).nonzero().squeeze(1)
    return weight.detach()[often[torch.randperm(len(often), generator=generator)[:rows]]]
