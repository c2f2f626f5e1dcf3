"""An optimizer's step uses no gradient from before the transaction; what zero_grad() clears is no matter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ecemb
from ecemb.errors import UsageError
from ecemb.session import current
from ecemb.state.optimizers import NamedOptimizers
from support.guarded_training import initialise
from support.processes import launch
from support.refusals import refused

SGD, Adam = torch.optim.SGD, torch.optim.Adam
CARRIED = "would use a gradient of", "into one"
MODES = pytest.mark.parametrize("set_to_none", [True, False])


class Steps:
    """Optimizers in transactions of one step each, or as many as `window`."""

    def __init__(self, model: nn.Module, *optimizers: Any, window: int = 1) -> None:
        tables = {
            name: one.weight
            for name, one in model.named_modules()
            if isinstance(one, nn.EmbeddingBag) and one.sparse
        }
        self.named = NamedOptimizers(model, tables, tables.values(), optimizers)
        self.named.watch(lambda: True)
        self.number, self.window = 0, window

    @contextmanager
    def step(self) -> Iterator[int]:
        if self.number % self.window == 0:
            self.named.gradients.begin(self.number)
        yield self.number
        self.number += 1


@pytest.fixture
def steps() -> Iterator[Callable[..., Steps]]:
    made: list[Steps] = []

    def make(*args: Any, **options: Any) -> Steps:
        made.append(Steps(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.named.unwatch()
        assert not any(parameter._backward_hooks for parameter in one.named._held)


def backward(model: nn.Module, factor: float = 1.0) -> None:
    (factor * model(torch.rand(3, 2)).square().sum()).backward()


def two_groups() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    groups = [{"params": list(one.parameters()), "lr": 0.1 * (i + 1)} for i, one in enumerate(model)]
    return model, SGD(groups, lr=0.1)


@MODES
@pytest.mark.parametrize("warm", [0, 6])
def test_accumulation_over_transactions_is_refused(
    steps: Callable[..., Steps], set_to_none: bool, warm: int
) -> None:
    model, optimizer = two_groups()
    one = steps(model, optimizer)
    for _ in range(warm):
        with one.step():
            optimizer.zero_grad(set_to_none)
            backward(model)
            optimizer.step()
    with one.step():
        optimizer.zero_grad(set_to_none)
        backward(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with refused(UsageError, *CARRIED, f"'0.weight' that was made before step {warm + 1}"), one.step():
        backward(model)
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    assert one.named.gradients.refusal


@pytest.mark.parametrize("steps_apart", [1, 3])
def test_a_step_with_gradients_of_an_earlier_transaction_is_refused(
    steps: Callable[..., Steps], steps_apart: int
) -> None:
    model, optimizer = two_groups()
    one = steps(model, optimizer)
    with one.step():
        backward(model)
    for _ in range(steps_apart - 1):
        with one.step():
            pass
    with refused(UsageError, *CARRIED), one.step():
        optimizer.step()


def test_gradients_from_before_the_first_step_are_refused(steps: Callable[..., Steps]) -> None:
    model, optimizer = two_groups()
    one = steps(model, optimizer)
    backward(model)
    with refused(UsageError, *CARRIED, "before step 0"), one.step():
        optimizer.step()


def test_a_forgotten_zero_grad_is_refused(steps: Callable[..., Steps]) -> None:
    model, optimizer = two_groups()
    one = steps(model, optimizer)
    with one.step():
        backward(model)
        optimizer.step()
    with refused(UsageError, *CARRIED, "call zero_grad() in each step"), one.step():
        backward(model)
        optimizer.step()


@MODES
def test_an_update_that_is_left_out_is_fine(steps: Callable[..., Steps], set_to_none: bool) -> None:
    """As a GradScaler leaves it out, whose gradients overflow; also several times on end."""
    model, optimizer = two_groups()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    one = steps(model, optimizer)
    skipped = 0
    for factor in (1, math.inf, 1, 1, 1, math.inf, math.inf, 1):
        with one.step():
            optimizer.zero_grad(set_to_none)
            before = model[0].weight.detach().clone()
            scaler.scale(model(torch.rand(3, 2)).square().sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped += torch.equal(before, model[0].weight)
    assert skipped == 3


@MODES
def test_zeroing_behind_the_update_or_between_steps_is_fine(
    steps: Callable[..., Steps], set_to_none: bool
) -> None:
    model, optimizer = two_groups()
    one = steps(model, optimizer)
    for _ in range(4):
        with one.step() as number:
            for _ in range(3):  # the micro-batches of an update, in one step
                backward(model)
            if number != 2:
                optimizer.step()
        optimizer.zero_grad(set_to_none)


@MODES
def test_an_optimizer_in_every_second_step(steps: Callable[..., Steps], set_to_none: bool) -> None:
    """A generator whose gradients of the discriminator's loss are dropped, and one whose are kept."""
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.Sequential(generator, critic)
    first, second = Adam(critic.parameters()), Adam(generator.parameters())
    one = steps(model, first, second)
    for _ in range(7):
        with one.step() as number:
            first.zero_grad(set_to_none)
            backward(model, -1.0)  # adds to the generator's gradients of the step before
            first.step()
            if number % 2:
                second.zero_grad(set_to_none)
                backward(model)
                second.step()
    with one.step() as number:
        assert number % 2
        backward(model)
        with refused(UsageError, *CARRIED, "parameter '0.weight'"):
            second.step()


def test_inside_a_window_gradients_may_add_up(steps: Callable[..., Steps]) -> None:
    model, optimizer = two_groups()
    one = steps(model, optimizer, window=2)
    for _ in range(6):
        with one.step() as number:
            backward(model)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    with one.step():
        optimizer.zero_grad()
    with one.step():
        backward(model)
    with refused(UsageError, *CARRIED, "before step 8"), one.step():
        backward(model)
        optimizer.step()


def test_sparse_gradients_of_tables(steps: Callable[..., Steps]) -> None:
    model = nn.Module()
    model.bag = nn.EmbeddingBag(9, 2, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    one = steps(model, optimizer)

    def look_up(*ids: int) -> None:
        model.bag(torch.tensor([ids])).square().sum().backward()

    for _ in range(3):
        with one.step():
            optimizer.zero_grad()
            look_up(1, 2, 2)
            look_up(2, 3)
            optimizer.step()
    with one.step():
        optimizer.zero_grad()
        look_up(5)
    with refused(UsageError, *CARRIED, "protected table 'bag'"), one.step():
        look_up(6)
        optimizer.step()


def test_a_closure_makes_the_gradients_anew(steps: Callable[..., Steps]) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    one = steps(model, optimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    for _ in range(4):
        with one.step():
            optimizer.step(closure)


def test_gradients_that_the_script_writes_are_of_this_step(steps: Callable[..., Steps]) -> None:
    """As copies of parameters in higher precision get theirs, and evolution strategies."""
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    one = steps(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(4):
        with one.step() as number:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.data.copy_(torch.rand_like(parameter))
            if number != 2:
                optimizer.step()


class Wrapper(torch.optim.Optimizer):
    """Passes all on to another optimizer, as TorchRec's do, without torch's hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def test_nothing_is_marked_where_every_parameter_is_updated(steps: Callable[..., Steps]) -> None:
    model = nn.Linear(2, 1)
    optimizer = Wrapper(SGD(model.parameters(), lr=0.1))
    one = steps(model, optimizer)
    for _ in range(6):
        with one.step() as number:
            hooks = [len(parameter._backward_hooks or ()) for parameter in model.parameters()]
            assert sum(hooks) == (number == 1)
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    with one.step():
        optimizer.zero_grad()
        backward(model)
    with refused(UsageError, *CARRIED, "SGD.step()"), one.step():
        backward(model)
        optimizer.step()


def test_frozen_parameters_keep_no_hook(steps: Callable[..., Steps]) -> None:
    model, optimizer = two_groups()
    one = steps(model, optimizer)
    with one.step():
        backward(model)
    model.requires_grad_(False)
    with refused(UsageError, *CARRIED), one.step():
        optimizer.step()
    one.named.unwatch()
    assert not any(parameter._backward_hooks for parameter in model.parameters())


# --- on real ranks ------------------------------------------------------------------------------------


def accumulating(folder: Path, meet: Barrier) -> dict[str, Any]:
    initialise(folder)
    torch.manual_seed(0)
    model = nn.Module()
    model.bags = ecemb.nn.ShardedEmbeddingBag(30, 4, device="meta")
    model.head = DistributedDataParallel(nn.Linear(4, 1))
    sparse = SGD([model.bags.weight], lr=0.1)
    dense = SGD(model.head.parameters(), lr=0.1)
    given: dict[str, Any] = {"optimizers": [sparse, dense], "code": ecemb.Code(2, 1)}
    flags = current().job_flags
    flags.set("refused", "Adam.step() would")  # as an earlier start of the launch has left it
    with refused(UsageError, "an earlier start of this launch was refused", "Adam.step() would"):
        ecemb.protect(model, **given)
    dist.barrier()
    flags.delete_key("refused")
    dist.barrier()

    guard = ecemb.protect(model, **given)

    def look_up(*, last: bool = True) -> None:
        with contextlib.nullcontext() if last else model.head.no_sync():
            model.head(model.bags(torch.randint(30, (4, 3)))).square().mean().backward()

    def update() -> None:
        for optimizer in (sparse, dense):
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        with guard.step():  # all micro-batches in one step
            look_up(last=False)
            look_up()
            update()
    with guard.step():
        look_up(last=False)
    with refused(UsageError, *CARRIED, "before step 4"), guard.step():
        look_up()
        update()
    return {"next": guard.next_step, "told": flags.get("refused").decode()}


def test_a_guard_refuses_accumulation_over_commits(tmp_path: Path) -> None:
    for found in launch(2, accumulating, tmp_path):
        assert found["next"] == 4
        assert "before step 4" in found["told"]
