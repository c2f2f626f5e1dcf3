"""`ecemb.run` without a death, and what a place keeps."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ecemb
from ecemb.errors import ConfigurationError, UsageError
from ecemb.net import staying
from ecemb.place import Place, _oldest_graph
from support.refusals import refused


def drawn() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def test_it_is_built_once_and_the_generators_are_as_after_it() -> None:
    place, built = Place(), list[Any]()

    def build() -> nn.Module:
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        built.append(nn.Linear(3, 3))
        return built[-1]

    first = place.keep("model", build)
    after = drawn()
    assert place.keep("model", build) is first is built[0]
    assert drawn() == after
    assert place.keep("other", lambda: None) is None
    assert len(built) == 1


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_what_ends_with_the_session_is_not_kept() -> None:
    wrapped = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    of_a_group = ecemb.nn.ShardedEmbeddingBag(8, 4, group=dist.group.WORLD)
    guard = ecemb.Guard.__new__(ecemb.Guard)
    place = Place()
    for what, words in (
        (wrapped, ("module '0' of it (DistributedDataParallel)", "uses a process group")),
        ([1, {"table": of_a_group}], ("it (ShardedEmbeddingBag)", "has a process group of its own")),
        ((guard,), ("a guard", "call ecemb.protect() in each call")),
    ):
        with refused(ConfigurationError, "place.keep('x')", *words):
            place.keep("x", lambda what=what: what)  # type: ignore[misc]
    kept = ecemb.nn.ShardedEmbeddingBag(8, 4)
    assert place.keep("x", lambda: kept) is kept  # of the default group, whichever it is


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("a peer died")


def test_a_backward_of_the_oldest_graph_drops_what_a_failed_one_has_left() -> None:
    """The part of a graph that had not run yet, with its hooks and all that they refer to."""
    oldest = _oldest_graph()
    table = nn.Linear(1, 1)
    alive = weakref.ref(table)
    weight = torch.ones(2, requires_grad=True)
    looked_up = weight * 2
    looked_up.register_hook(functools.partial(lambda _, gradient: gradient, table))
    with pytest.raises(RuntimeError, match="a peer died"):
        (looked_up + Fails.apply(weight)).sum().backward()
    del table, looked_up
    gc.collect()
    assert alive() is not None
    oldest.backward(retain_graph=True)
    gc.collect()
    assert alive() is None


def test_without_a_death_it_is_a_plain_call() -> None:
    assert ecemb.run(lambda place: place.calls) == 1
    assert staying.current() is None

    def fails(place: Place) -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose") as caught:
        ecemb.run(fails)
    assert caught.traceback[-1].name == "fails"
    assert staying.current() is None


@pytest.mark.usefixtures("group")
def test_it_is_called_first() -> None:
    with refused(UsageError, "initialised already", "in the function that ecemb.run() calls"):
        ecemb.run(lambda place: None)


def test_it_is_called_once() -> None:
    with refused(UsageError, "ecemb.run() is running already"):
        ecemb.run(lambda place: ecemb.run(lambda place: None))
    assert staying.current() is None
