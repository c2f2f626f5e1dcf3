"""One rank of the setting `dlrm` of the question `overhead`: few rows are popular, a step is mostly dense.

It imports at its top, as users' scripts do: `ecemb-run` finds there what it imports ahead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.questions.rebuild.rank import DIM, Order, Rebuilding, process_began

MARKS = {"process": process_began(), "interpreter": time.monotonic()}

import numpy as np  # noqa: E402 - imports are measured one by one
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torchrec.distributed.model_parallel  # noqa: E402, F401 - `torchrec_twin` needs it
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

import ecemb  # noqa: E402
from bench.workloads.models import INTEGERS, Batch, torchrec_twin  # noqa: E402
from bench.workloads.training_rank import popularity  # noqa: E402


@dataclass(frozen=True)
class Drawn:
    """What batches are drawn by, see `Clicks`; `rows` are those of a table, over all ranks."""

    tables: int
    rows: int
    lookups: int
    batch: int
    skew: float
    seed: int


def main(path: str) -> None:
    """Trains as the order in the file `path` says."""
    order = Order.read(path)
    torch.set_num_threads(1)
    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir)
    Dlrm(order, MARKS).run()
    dist.destroy_process_group()


class Dlrm(Rebuilding):
    """Tables of TorchRec under the dense part of a DLRM, or under a small one."""

    def build(self) -> None:
        order = self.order
        torch.manual_seed(order.seed)
        rows = order.rows * self.ranks // order.tables
        self.by = Drawn(order.tables, rows, 1, order.batch, order.skew, order.seed)
        self.twin = torchrec_twin(order.tables, rows, DIM, order.dense)
        weights, self.popular = popularity(self.by)
        self.heaped = np.cumsum(weights)

    def protected(self) -> tuple[nn.Module, Sequence[Optimizer]]:
        return self.twin.model, self.twin.optimizers

    def train(self, number: int, *, dies: bool) -> None:
        batch, twin = self.drawn(number), self.twin
        for optimizer in twin.optimizers:
            optimizer.zero_grad()
        self.wait_for_device()
        functional.binary_cross_entropy_with_logits(twin.logits(batch), batch.clicks).backward()
        if dies:
            self.perish()
        for optimizer in twin.optimizers:
            optimizer.step()

    def drawn(self, number: int) -> Batch:
        """This rank's batch in a step."""
        by = self.by
        random = np.random.default_rng([by.seed, self.rank, number])
        places = np.searchsorted(self.heaped, random.random((by.tables, by.batch, by.lookups)))
        places = np.minimum(places, by.rows - 1)
        ids = np.stack([rows[place] for rows, place in zip(self.popular, places, strict=True)])
        integers = random.random((by.batch, INTEGERS), np.float32)
        clicks = random.integers(0, 2, (by.batch, 1)).astype(np.float32)
        return Batch(*map(torch.from_numpy, (integers, ids, clicks)))

    def tensors(self) -> list[Tensor]:
        return [tensor.detach().contiguous() for tensor in self.twin.tensors()]


if __name__ == "__main__":
    main(sys.argv[1])
