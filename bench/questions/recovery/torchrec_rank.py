"""One rank of the model of examples/torchrec_dlrm.py: tables sharded by TorchRec's planner under DLRM.

It imports at its top, as users' scripts do: `ecemb-run` finds there what it imports ahead. Marks, kills and
files are those of `rank`.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence

from bench.questions.recovery.rank import Order, Training, process_began, run

MARKS = {"process": process_began(), "interpreter": time.monotonic()}

import torch  # noqa: E402 - imports are measured one by one
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim import Optimizer  # noqa: E402

MARKS["import torch"] = time.monotonic()

from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: E402
from torchrec.distributed import DistributedModelParallel  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology  # noqa: E402
from torchrec.distributed.sharding_plan import get_default_sharders  # noqa: E402
from torchrec.distributed.types import ShardingPlan  # noqa: E402
from torchrec.models.dlrm import DLRM  # noqa: E402
from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward  # noqa: E402
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402

MARKS["import torchrec"] = time.monotonic()

import ecemb  # noqa: E402, F401 # pyright: ignore[reportUnusedImport]

MARKS["import ecemb"] = time.monotonic()

INTEGERS, CATEGORIES, DIM = 13, 26, 16
FEATURES = [f"category {i}" for i in range(CATEGORIES)]


def main(path: str) -> None:
    """Trains as the order in the file `path` says."""
    torch.set_num_threads(1)
    run(Clicks, Order.read(path), MARKS)


class Clicks(Training):
    """DLRM on made-up clicks."""

    def build(self) -> None:
        self.rows = max(1, self.order.rows * self.ranks // CATEGORIES)
        torch.manual_seed(self.order.seed)
        tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"table {i}", num_embeddings=self.rows, embedding_dim=DIM, feature_names=[feature]
                )
                for i, feature in enumerate(FEATURES)
            ],
        )
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.03})
        dlrm = DLRM(tables, INTEGERS, dense_arch_layer_sizes=[64, DIM], over_arch_layer_sizes=[64, 1])
        self.model = DistributedModelParallel(dlrm, device=torch.device("cpu"), plan=self.plan(dlrm))
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])

    def plan(self, dlrm: nn.Module) -> ShardingPlan | None:
        """TorchRec's own plan, which rank 0 keeps where its process stays; None: it is made each time."""
        if self.place is None:
            return None
        topology = Topology(self.ranks, "cpu", local_world_size=self.ranks)
        planner = EmbeddingShardingPlanner(topology=topology)
        plans: list[ShardingPlan | None] = [None]
        if self.rank == 0:
            plans = [self.place.keep("plan", lambda: planner.plan(dlrm, get_default_sharders()))]
        dist.broadcast_object_list(plans)
        return copy.deepcopy(plans[0])  # rank 0 keeps it as it is

    def protected(self) -> tuple[nn.Module, Sequence[Optimizer]]:
        return self.model, [self.optimizer]

    def train(self, number: int, *, dies: bool) -> None:
        random, batch = self.generator(number), self.order.batch
        ids = torch.randint(self.rows, (CATEGORIES * batch,), generator=random)
        lengths = torch.ones(CATEGORIES * batch, dtype=torch.int32)
        categories = KeyedJaggedTensor(FEATURES, ids, lengths=lengths)
        clicks = torch.randint(2, (batch,), generator=random).float()
        self.optimizer.zero_grad()
        logits = self.model(torch.rand(batch, INTEGERS, generator=random), categories).squeeze(1)
        functional.binary_cross_entropy_with_logits(logits, clicks).backward()
        if dies:
            self.perish()
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        for _, value in sorted(self.model.state_dict().items()):
            shards = value.local_shards() if hasattr(value, "local_shards") else None
            found += [value] if shards is None else [shard.tensor for shard in shards]
        return [tensor.detach().contiguous() for tensor in found]


if __name__ == "__main__":
    main(sys.argv[1])
