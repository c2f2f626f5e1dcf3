"""Small trainings that use everything that a guard protects, for tests on real ranks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ecemb
from ecemb.memory.header import Header
from ecemb.memory.scan import arenas

TIMEOUT_S = 300


def initialise(folder: Path) -> None:
    ecemb.init_process_group("gloo", job="guard", arena_dir=folder, timeout=timedelta(seconds=TIMEOUT_S))


def headers(folder: Path) -> dict[int, Header]:
    """What lies in the arenas, by rank."""
    found = [one.header for one in arenas(folder) if one.header is not None]
    return {header.constants.rank: header for header in found}


class Progress:
    """State that differs by rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses[-4:]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.losses = list(state["losses"])


class Training:
    """A dense head over tables, with random numbers of every generator in each step.

    Args:
        model: has `head`, which is dense.
        tables: those by hand.
        weights: of all tables.
        look_up: gives features [batch, 3] for the head.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: dict[str, nn.Module],
        weights: list[nn.Parameter],
        look_up: Callable[[], Tensor],
    ) -> None:
        self.model, self.tables, self.weights, self.look_up = model, tables, weights, look_up
        self.sparse = torch.optim.Adagrad([{"params": weights}], lr=0.1)
        self.dense = torch.optim.Adam(model.head.parameters(), lr=0.01)
        self.progress = Progress()
        rank = dist.get_rank()
        torch.manual_seed(100 + rank)
        np.random.seed(200 + rank)
        random.seed(300 + rank)

    def protect(self, n: int, k: int, **options: Any) -> ecemb.Guard:
        arguments: dict[str, Any] = {"optimizers": [self.sparse, self.dense], "tables": self.tables}
        arguments |= {"state": self.progress}
        return ecemb.protect(self.model, code=ecemb.Code(n, k), **{**arguments, **options})

    def body(self) -> None:
        """One step's work: changes everything that there is."""
        self.sparse.zero_grad()
        self.dense.zero_grad()
        noise = random.random() + float(np.random.random()) + torch.rand(())
        loss = (self.model.head(self.look_up()) * noise).square().sum()
        loss.backward()
        for parameter in self.model.head.parameters():
            dist.all_reduce(parameter.grad)
        self.sparse.step()
        self.dense.step()
        self.progress.losses.append(loss.item())

    def undone(self) -> dict[str, str]:
        """A hash of what a failed step has not changed in the process, which is all but dense state."""
        return {name: one for name, one in self.snapshot().items() if not name.startswith("head")}

    def snapshot(self) -> dict[str, str]:
        """A hash of everything that a failed step must not change, by name."""
        found: dict[str, Any] = {"progress": self.progress.losses[-4:]}
        found |= {f"table {i}": weight for i, weight in enumerate(self.weights)}
        for i, weight in enumerate(self.weights):
            found |= {f"table {i} {name}": value for name, value in self.sparse.state[weight].items()}
        for name, parameter in self.model.head.named_parameters():
            found[f"head {name}"] = parameter
            found |= {f"head {name} {key}": value for key, value in self.dense.state[parameter].items()}
        found["torch"] = torch.get_rng_state()
        found["numpy"] = [
            part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()
        ]
        found["python"] = random.getstate()
        return {name: digest(value) for name, value in found.items()}


def whole_tables(script: Training) -> dict[str, list[list[float]]]:
    """Tables with their optimizer state, put together from all ranks."""
    found: dict[str, list[list[float]]] = {}
    for number, weight in enumerate(script.weights):
        for name, tensor in {"weight": weight, "sum": script.sparse.state[weight]["sum"]}.items():
            parts: list[list[list[float]]] = [[]] * dist.get_world_size()
            dist.all_gather_object(parts, tensor.tolist())
            found[f"{number} {name}"] = [row for part in parts for row in part]
    return found


def digest(value: object) -> str:
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        data = repr(value).encode()
    return hashlib.sha256(data).hexdigest()


class Bags(nn.Module):
    """Two sharded tables, the second of one row: all ranks' shards but the first one's are empty."""

    def __init__(self, users: int = 9, name: str = "users", device: str = "meta") -> None:
        super().__init__()
        self.table = nn.ModuleDict(
            {
                name: ecemb.nn.ShardedEmbeddingBag(users, 3, device=device),
                "tiny": ecemb.nn.ShardedEmbeddingBag(1, 3, dtype=torch.float64, device=device),
            }
        )
        self.head = nn.Linear(3, 1)


def bags(**options: Any) -> Training:
    torch.manual_seed(1)
    model = Bags(**options)
    users, tiny = model.table.values()

    def look_up() -> Tensor:
        zeros = torch.zeros(4, 1, dtype=torch.int64)
        return users(torch.randint(8, (4, 2))) + tiny(zeros).float()  # the last user is never met

    return Training(model, {}, [users.weight, tiny.weight], look_up)
