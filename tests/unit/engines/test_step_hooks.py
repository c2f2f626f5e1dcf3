"""The hooks next to an optimizer's update, and those of a guard that is gone."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ecemb.engines.sparse import StepHooks
from ecemb.errors import UsageError


def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return torch.optim.SGD([weight], lr=0.1)


def test_they_are_next_to_the_update_though_others_are_registered_later() -> None:
    calls: list[str] = []
    sgd = optimizer()
    sgd.register_step_post_hook(lambda *_: calls.append("post"))
    hooks = StepHooks(sgd, lambda *_: calls.append("before"), lambda *_: calls.append("after"))
    sgd.register_step_pre_hook(lambda *_: calls.append("pre"))
    for _ in range(2):
        calls.clear()
        sgd.step()
        assert calls == ["pre", "before", "after", "post"]
    hooks.remove()
    hooks.remove()
    calls.clear()
    sgd.step()
    assert calls == ["pre", "post"]


def test_a_removed_hook_is_an_error() -> None:
    sgd = optimizer()
    hooks = StepHooks(sgd, lambda *_: None, lambda *_: None)
    vars(sgd)["_optimizer_step_pre_hooks"].clear()
    with pytest.raises(UsageError, match=r"hooks of SGD were removed"):
        sgd.step()
    hooks.remove()


def test_garbage_is_collected_while_another_optimizer_calls_its_hooks() -> None:
    """That of a guard before this one, wherever in a step the collector runs."""
    calls: list[str] = []
    sgd = optimizer()
    hooks = StepHooks(sgd, lambda *_: calls.append("before"), lambda *_: calls.append("after"))
    collecting = register_optimizer_step_pre_hook(_collect)
    try:
        gone: list[Any] = [StepHooks(optimizer(), lambda *_: None, lambda *_: None)]
        gone.append(gone)
        del gone
        sgd.step()
    finally:
        collecting.remove()
    assert calls == ["before", "after"]
    hooks.remove()


def _collect(*_: Any) -> None:
    gc.collect()
