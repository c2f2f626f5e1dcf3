"""Every optimizer that changes what a guard keeps is known to it, or raises before it changes anything."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ecemb
from ecemb.engines import torchrec
from ecemb.errors import ConfigurationError, UnsupportedOptimizer, UsageError
from ecemb.state.optimizers import NamedOptimizers
from support.guarded_training import initialise
from support.processes import launch
from support.refusals import refused

SGD, AdamW = torch.optim.SGD, torch.optim.AdamW


class Ncf(nn.Module):
    """Neural collaborative filtering: two tables, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.users = ecemb.nn.ShardedEmbeddingBag(20, 4)
        self.items = ecemb.nn.ShardedEmbeddingBag(30, 4)
        self.dense = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.dense(torch.cat([self.users(users), self.items(items)], dim=1))


def train(
    model: Ncf, optimizers: list[torch.optim.Optimizer], step: ecemb.Guard | Any, factor: float
) -> None:
    """One step's body: the same dense gradients on all ranks, for a factor of nan those of a broken batch."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    users, items = torch.arange(8)[:, None], torch.arange(8, 16)[:, None]
    loss = factor * model(users, items).square().mean()
    if not torch.isfinite(loss):
        step.abort("the loss is not finite")
    loss.backward()
    for parameter in model.dense.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    for optimizer in optimizers:
        optimizer.step()


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    before = copy.deepcopy(model.state_dict())
    yield
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def forgotten(folder: Path, meet: Barrier) -> dict[str, Any]:
    initialise(folder)
    model = Ncf()
    sparse = SGD([model.users.weight, model.items.weight], lr=0.1)
    dense = AdamW(model.dense.parameters(), lr=0.1)
    given: dict[str, Any] = {"code": ecemb.Code(2, 1)}
    with refused(ConfigurationError, "'dense.0.weight'", "none of the optimizers=", "without_optimizer="):
        ecemb.protect(model, optimizers=[sparse], **given)
    with refused(UnsupportedOptimizer, "['users', 'items']", "pass their optimizer", "guard.touch"):
        ecemb.protect(model, optimizers=[dense], **given)

    guard = ecemb.protect(model, optimizers=[sparse, dense], **given)
    for factor in (1.0, float("nan"), 1.0):
        with guard.step() as step:
            train(model, [sparse, dense], step, factor)
    for state in dense.state.values():
        assert torch.isfinite(state["exp_avg"]).all()

    with refused(UsageError, "AdamW.step() changes parameter 'dense.0.weight' outside of a step"):
        dense.step()
    late = torch.optim.Adam(model.dense.parameters())
    with refused(UsageError, "Adam.step() would change parameter 'dense.0.weight'", "not one of"):
        late.step()
    later = SGD([model.items.weight])
    with untouched(model), refused(UsageError, "SGD.step()", "protected table 'items'"), guard.step() as step:
        train(model, [later], step, 1.0)
    return {"next": guard.next_step}


def test_a_forgotten_optimizer_is_an_error(tmp_path: Path) -> None:
    assert launch(2, forgotten, tmp_path) == [{"next": 3}] * 2


# --- without a guard --------------------------------------------------------------------------------


def named(model: nn.Module, *optimizers: Any, tables: Any = None, without: Any = ()) -> NamedOptimizers:
    stepped = {name: table.weight for name, table in (tables or {}).items()}
    return NamedOptimizers(model, stepped, stepped.values(), optimizers, without)


def test_what_no_optimizer_changes_is_frozen_or_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = SGD(model[0].parameters())
    with refused(ConfigurationError, "['1.weight', '1.bias']"):
        named(model, first)
    named(model, first, without=[model[1]])
    named(model, first, without=[model[1].weight, model[1].bias])
    model[1].requires_grad_(False)
    named(model, first)
    with refused(ConfigurationError, "takes parameters and modules", "str"):
        named(model, first, without=["1.weight"])
    with refused(ConfigurationError, "parameter '0.weight', which SGD in optimizers= changes"):
        named(model, first, without=[model])


def test_a_table_has_an_optimizer_or_is_named() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    with refused(UnsupportedOptimizer, "tables ['user']"):
        named(nn.Module(), tables={"user": table})
    named(nn.Module(), tables={"user": table}, without=[table])
    named(nn.Module(), SGD(table.parameters()), tables={"user": table})
    named(nn.Module(), tables={"user": table.requires_grad_(False)})


class Ahead(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = [inner]

    def step(self, closure: Any = None) -> None:
        self.inner[0].step()


def test_who_is_known() -> None:
    """Optimizers within named ones are, and those that share their state; others' models are their affair."""
    model, open_ = nn.Linear(2, 2), True
    inner = SGD(model.parameters(), lr=0.1)
    optimizers = named(model, Ahead(inner))
    optimizers.watch(lambda: open_)
    try:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        inner.step()
        Ahead(inner).inner[0].step()
        same = SGD(model.parameters(), lr=0.1)
        same.state = inner.state
        same.step()
        other = nn.Linear(2, 2)
        SGD(other.parameters()).step()
        with refused(UsageError, "SGD.step() would change parameter 'bias'"):
            SGD([*other.parameters(), model.bias]).step()
        open_ = False
        SGD(other.parameters()).step()
        with refused(UsageError, "outside of a step"):
            inner.step()
    finally:
        optimizers.unwatch()
    inner.step()


def test_a_guard_that_was_given_up_hinders_nobody() -> None:
    model = nn.Linear(2, 2)
    optimizers = named(model, SGD(model.parameters()))
    optimizers.watch(lambda: False)
    del optimizers
    AdamW(model.parameters()).step()


def test_optimizers_that_run_in_backward_are_known() -> None:
    model, parts = nn.Linear(2, 2), list[SGD]()
    for parameter in model.parameters():  # as torch.distributed.optim and TorchRec do it
        parts.append(SGD([parameter], lr=0.1))
        parameter._in_backward_optimizers = parts[-1:]
        parameter.register_post_accumulate_grad_hook(lambda _, part=parts[-1]: part.step())
    assert torchrec.leaves(model, []) == parts
    optimizers = named(model, *torchrec.leaves(model, []))
    optimizers.watch(lambda: True)
    try:
        before = model.weight.detach().clone()
        model(torch.ones(1, 2)).sum().backward()
        assert not torch.equal(model.weight, before)
    finally:
        optimizers.unwatch()
