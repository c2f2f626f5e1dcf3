"""A restart sums dense gradients as the run that never stopped does, to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ecemb.state.ddp_buckets import GradientBuckets, found_in, note_made
from support.processes import run_ranks

STEPS, CUT = 7, 4


class Net(nn.Module):
    """Gradients come in another order than the parameters were registered in, and not in one bucket.

    There is a buffer, which DistributedDataParallel broadcasts from rank 0 in each forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(61, 3)
        self.first = nn.Linear(17, 61)
        self.middle = nn.Linear(61, 61)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = torch.maximum(self.largest, x.max())
        return self.last(self.middle(self.first(x).relu()).relu()).square().mean()


def start(
    static: bool, frozen: str = ""
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, GradientBuckets]:
    torch.manual_seed(3)
    net = Net()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not (frozen and frozen in name))
    model = DistributedDataParallel(net, static_graph=static, bucket_cap_mb=0.01)  # type: ignore[arg-type]
    return model, torch.optim.Adam(model.parameters(), lr=0.1), GradientBuckets(found_in(model))


def train(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range, late: bool = False
) -> None:
    """With `late`, a first part's backward alone is under no_sync(), which comes too late for it."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        if late:
            loss = model(torch.randn(9, 17, generator=generator))
            with model.no_sync():
                loss.backward()
        model(torch.randn(9, 17, generator=generator)).backward()
        optimizer.step()


def restarted(static: bool, late: bool, cut: int, rehearses: bool) -> list[torch.Tensor]:
    """The parameters after STEPS steps, with a new process's model and reducer from step `cut` on."""
    model, optimizer, buckets = start(static)
    train(model, optimizer, range(cut), late)
    again, optimizer_again, buckets_again = start(static)
    again.load_state_dict(model.state_dict())
    optimizer_again.load_state_dict(optimizer.state_dict())
    buckets_again.set_state(buckets.state())
    if rehearses:
        kept = [parameter.grad for parameter in again.parameters()]
        buckets_again.rehearse()
        assert all(p.grad is grad for p, grad in zip(again.parameters(), kept, strict=True))
        assert again.module.largest == model.module.largest > 0
    train(again, optimizer_again, range(cut, STEPS), late)
    assert again.will_sync_module_buffers()
    if rehearses and cut > 2:
        assert buckets_again.state() == buckets.state()
    return [parameter.detach() for parameter in again.parameters()]


def same(static: bool, late: bool) -> list[tuple[bool, ...]]:
    """For each cut: whether it ends as the undisturbed run, with a rehearsal and without."""
    torch.set_num_threads(1)
    model, optimizer, buckets = start(static)
    train(model, optimizer, range(STEPS), late)
    end = [parameter.detach() for parameter in model.parameters()]
    assert len(buckets.state()[0]) == 1 + static and buckets._handles == [[]]  # nothing more is recorded
    outcomes: list[tuple[bool, ...]] = []
    for cut in range(1, CUT + 1):
        ends = [restarted(static, late, cut, rehearses) for rehearses in (True, False)]
        outcomes.append(tuple(all(map(torch.equal, end, one)) for one in ends))
    return outcomes


def on_one_device() -> None:
    """As on a GPU, where users give `device_ids`: each forward moves its inputs."""
    model, optimizer, buckets = start(False)
    model.device_ids, model.device_type = [0], "cpu"
    model.use_side_stream_for_tensor_copies = False
    train(model, optimizer, range(1))
    buckets.rehearse()


def test_a_wrapper_with_a_device_of_its_own_rehearses() -> None:
    run_ranks(2, on_one_device)


@pytest.mark.parametrize(("static", "late"), [(False, False), (True, False), (False, True)])
def test_a_restart_at_any_step_sums_as_before(static: bool, late: bool) -> None:
    for outcomes in run_ranks(4, same, static, late):
        assert [with_rehearsal for with_rehearsal, _ in outcomes] == [True] * CUT
        assert not all(without for _, without in outcomes), "the net doesn't show what rehearsals are for"


def aborted() -> list[list[list[int]]]:
    model, optimizer, buckets = start(static=False)
    before = buckets.state()
    train(model, optimizer, range(1))
    buckets.set_state(before)  # an abort: this process's reducer has seen it all the same
    return buckets.state()


def test_what_was_seen_is_kept_though_the_step_was_undone() -> None:
    (orders,) = run_ranks(2, aborted)[0]
    assert len(orders) == 1 and sorted(orders[0]) == list(range(6))


def refrozen(static: bool, before: str, after: str) -> list[list[list[int]]]:
    """What is kept of the order of gradients when other layers are frozen; training goes on."""
    model, optimizer, buckets = start(static, before)
    train(model, optimizer, range(2))
    again, optimizer_again, buckets_again = start(static, after)
    buckets_again.set_state(buckets.state())
    kept = buckets_again.state()
    buckets_again.rehearse()
    train(again, optimizer_again, range(2))
    ((order, *_),) = buckets_again.state()
    assert sorted(order) == list(range(4 if after else 6))
    return kept


@pytest.mark.parametrize(
    ("static", "before", "after", "kept"),
    [
        (False, "", "first", 0),
        (False, "first", "", 0),
        (False, "first", "last", 1),  # as many
        (True, "", "first", 0),
        (True, "first", "last", 2),
    ],
)
def test_a_restart_may_freeze_other_layers(static: bool, before: str, after: str, kept: int) -> None:
    for (orders,) in run_ranks(2, refrozen, static, before, after):
        assert len(orders) == kept


def unused() -> int:
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    return len(GradientBuckets(found_in(model)).state())


def hooks(model: nn.Module) -> int:
    """Hooks that the parameters have for a gradient that arrived, which each backward calls."""
    return sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters())


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("before", range(4))
def test_hooks_stay_only_until_no_order_can_be_seen_any_more(static: bool, before: int) -> None:
    """Also of modules that had backwards before: only those that lead to the buckets have an order."""
    assert run_ranks(2, _seen, static, before) == [(6, 0, max(0, 1 + static - before))] * 2


def _seen(static: bool, before: int) -> tuple[int, int, int]:
    torch.manual_seed(3)
    model = DistributedDataParallel(Net(), static_graph=static)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, range(before))
    buckets = GradientBuckets(found_in(model))
    found = hooks(model)
    train(model, optimizer, range(2 + static))
    (orders,) = buckets.state()
    return found, hooks(model), len(orders)


def test_modules_that_look_for_unused_parameters_keep_their_first_layout() -> None:
    assert run_ranks(1, unused) == [0]


def beside() -> list[list[str]]:
    """Which are found, by name: of two around parts of a model, one in it, one known, and one elsewhere."""
    note_made()
    model = nn.ModuleDict({name: nn.Linear(2, 1) for name in ("a", "b", "c", "d", "other")})
    wrapped = {name: DistributedDataParallel(model[name]) for name in ("b", "other", "a", "c")}
    model["c"] = wrapped["c"]
    del model["other"]
    known = [DistributedDataParallel(model["d"])]
    names = {id(module): name for name, module in wrapped.items()}

    def found(root: nn.Module) -> list[str]:
        return [names.get(id(module), "whole") for module in found_in(root, known)]

    gone = DistributedDataParallel(model["a"])
    gone.itself = [gone]  # garbage that only a collection takes away
    del gone
    return [found(model), found(model["b"]), found(nn.Linear(2, 1)), found(wrapped["other"])]


def test_wrappers_beside_the_model_are_found_in_the_order_of_its_parameters() -> None:
    for found in run_ranks(2, beside):
        assert found == [["c", "a", "b"], ["b"], [], ["other"]]
