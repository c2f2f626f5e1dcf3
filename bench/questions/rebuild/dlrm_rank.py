"""One rank of the setting `dlrm` of the question `overhead`: few rows are popular, a step is mostly dense.

It imports at its top, as users' scripts do: `ecemb-run` finds there what it imports ahead.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrec.distributed.model_parallel  # noqa: F401 - the model imports it when it is built
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import ecemb
from bench.questions.rebuild.rank import Order, Rebuilding
from bench.questions.recovery.rank import built
from bench.workloads.models import torchrec_twin
from bench.workloads.training_rank import drawn, popularity


def main(path: str) -> None:
    """Trains as the order in the file `path` says."""
    order = Order.read(path)
    torch.set_num_threads(1)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir)
    built(Dlrm, order).run({})
    dist.destroy_process_group()


class Dlrm(Rebuilding):
    """Tables of TorchRec under the dense part of a DLRM, or under a small one."""

    def build(self) -> None:
        order = self.order
        torch.manual_seed(order.seed)
        rows = order.rows * self.ranks // order.tables
        self.drawn_by = dataclasses.replace(order, rows=rows)
        self.twin = torchrec_twin(order.tables, rows, order.dim, order.dense)
        self.heaped, self.popular = popularity_of(self.drawn_by)

    def protected(self) -> tuple[nn.Module, Sequence[Optimizer]]:
        return self.twin.model, self.twin.optimizers

    def train(self, number: int, *, dies: bool) -> None:
        random, twin = np.random.default_rng([self.order.seed, self.rank, number]), self.twin
        batch = drawn(self.drawn_by, self.heaped, self.popular, random)
        for optimizer in twin.optimizers:
            optimizer.zero_grad()
        self.wait_for_device()
        functional.binary_cross_entropy_with_logits(twin.logits(batch), batch.clicks).backward()
        if dies:
            self.perish()
        for optimizer in twin.optimizers:
            optimizer.step()

    def tensors(self) -> list[Tensor]:
        return [tensor.detach().contiguous() for tensor in self.twin.tensors()]


def popularity_of(order: Order) -> Sequence[NDArray[Any]]:
    """`popularity`, summed up. The first life writes it; the later ones map it, and wait for nothing."""
    paths = [Path(order.folder, f"{name}.npy") for name in ("heaped", "popular")]
    if not all(path.exists() for path in paths):
        weights, popular = popularity(order)
        for path, found in zip(paths, (np.cumsum(weights), np.stack(popular)), strict=True):
            partial = path.with_suffix(f".{os.getpid()}.npy")
            np.save(partial, found)
            partial.replace(path)
    return [np.load(path, mmap_mode="r") for path in paths]


if __name__ == "__main__":
    main(sys.argv[1])
