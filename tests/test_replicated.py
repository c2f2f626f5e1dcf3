"""Dense state comes back bit for bit, from this rank's slot or another's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulation import alone
from torch import nn

from ecemb import rankstate
from ecemb.errors import ConfigurationError, InconsistentArenas, LayoutMismatch, NotEnoughSpace
from ecemb.replicated import ReplicatedState, Slots, unpacked

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "tensor-rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
}


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    with alone(tmp_path, [rankstate.layout(40)]) as memory:
        yield memory.slots


class Net(nn.Module):
    """Parameters and buffers of several types and shapes, 0-dim and empty ones too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.narrow = nn.Parameter(torch.randn(5, generator=generator).to(torch.bfloat16))
        self.scale = nn.Parameter(torch.randn((), generator=generator, dtype=torch.float64))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.rand(3, generator=generator) > 0.5)
        self.register_buffer("unsaved", torch.randn(2, generator=generator), persistent=False)
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter.normal_(generator=generator)

    def loss(self, step: int) -> torch.Tensor:
        x = torch.arange(6, dtype=torch.float32).reshape(2, 3).sin() + step
        out = self.norm(self.first(x)) * self.scale.float()
        return out.pow(2).mean() + self.narrow.float().pow(2).sum() + self.empty.sum()


def train(model: Net, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model.loss(step)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All state, tensors as (type, shape, bytes)."""

    def flat(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), bits(value)
        if isinstance(value, dict):
            return {key: flat(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [flat(item) for item in value]
        return value

    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {"model": flat(tensors), "optimizer": flat(optimizer.state_dict())}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit_in_another_process(kind: str, slots: Slots) -> None:
    model = Net(1)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    train(model, optimizer, range(3))
    ReplicatedState(model, [optimizer], []).save(slots, 3)
    kept = everything(model, optimizer)
    train(model, optimizer, range(3, 6))
    expected = everything(model, optimizer)

    again = Net(2)
    other = OPTIMIZERS[kind](list(again.parameters()))
    ReplicatedState(again, [other], []).load(slots, 3)
    assert everything(again, other) == kept
    train(again, other, range(3, 6))
    assert everything(again, other) == expected


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_undone_step_takes_new_optimizer_state_back(kind: str, slots: Slots) -> None:
    """Before its first step an optimizer has no state; after an undo it must have none again."""
    model = Net(1)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    state = ReplicatedState(model, [optimizer], [])
    state.save(slots, 0)
    before = everything(model, optimizer)
    train(model, optimizer, range(1))
    state.load(slots, 0)
    assert everything(model, optimizer) == before
    train(model, optimizer, range(1))
    first = everything(model, optimizer)
    state.load(slots, 0)
    train(model, optimizer, range(1))
    assert everything(model, optimizer) == first


def test_what_was_loaded_does_not_hang_on_the_slot(slots: Slots) -> None:
    """The slot is written over two steps later; optimizer state must not change with it."""
    model = Net(1)
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    train(model, optimizer, range(1))
    state = ReplicatedState(model, [optimizer], [])
    state.save(slots, 0)
    state.load(slots, 0)
    before = everything(model, optimizer)
    slots.read(0)[:] = 0xAA
    assert everything(model, optimizer) == before


def test_options_come_back_and_keep_their_types(slots: Slots) -> None:
    model = Net(1)
    groups = [{"params": [model.narrow], "lr": 0.5}, {"params": [model.scale], "betas": (0.1, 0.2)}]
    optimizer = torch.optim.Adam(groups, lr=1e-3)
    optimizer.param_groups[1]["initial_lr"] = np.float64(0.25)
    state = ReplicatedState(model, [optimizer], [])
    state.save(slots, 0)
    for group in optimizer.param_groups:
        group.update(lr=9.0, betas=(0.0, 0.0), initial_lr=0.0)
    state.load(slots, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3]
    assert optimizer.param_groups[1]["betas"] == (0.1, 0.2)
    assert optimizer.param_groups[1]["initial_lr"] == 0.25
    assert optimizer.param_groups[0]["params"][0] is model.narrow


def save(state: ReplicatedState, slots: Slots, transaction: int) -> None:
    """Saves it, and commits."""
    state.save(slots, transaction)
    slots._arena.set("committed", transaction)


def test_a_changed_option_reaches_the_next_slot(slots: Slots) -> None:
    """The outline is packed anew only when it changes; a schedule changes it in every step."""
    model = Net(1)
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    state = ReplicatedState(model, [optimizer], [])
    for transaction, rate in enumerate((0.5, 0.5, 0.25)):
        optimizer.param_groups[0]["lr"] = rate
        save(state, slots, transaction)
    optimizer.param_groups[0]["lr"] = 7.0
    state.load(slots, 2)
    assert optimizer.param_groups[0]["lr"] == 0.25
    state.load(slots, 1)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_special_values_keep_their_bits(slots: Slots) -> None:
    patterns = torch.tensor([0x7FC0_1234, 0x7F80_0001, -0x8000_0000, 0x7F80_0000, 1], dtype=torch.int32)
    model = nn.Module()
    model.register_buffer("x", patterns.clone().view(torch.float32))
    state = ReplicatedState(model, [], [])
    state.save(slots, 0)
    model.x.zero_()
    state.load(slots, 0)
    assert torch.equal(model.x.view(torch.int32), patterns)


def test_tensors_that_are_not_contiguous(slots: Slots) -> None:
    model = nn.Module()
    model.register_buffer("x", torch.arange(6.0).reshape(2, 3).t())
    state = ReplicatedState(model, [], [])
    state.save(slots, 0)
    model.x.zero_()
    state.load(slots, 0)
    assert torch.equal(model.x, torch.arange(6.0).reshape(2, 3).t())


def test_protected_parameters_are_left_to_parity(slots: Slots) -> None:
    model = nn.Module()
    model.table = nn.Embedding(1000, 64, sparse=True)
    model.dense = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    state = ReplicatedState(model, [optimizer], [model.table.weight])
    assert state.size_bytes < 100
    state.save(slots, 0)
    with torch.no_grad():
        model.table.weight.fill_(7)
        optimizer.state[model.table.weight]["sum"].fill_(8)
        model.dense.weight.fill_(9)
    state.load(slots, 0)
    assert (model.table.weight == 7).all()
    assert (optimizer.state[model.table.weight]["sum"] == 8).all()
    assert not (model.dense.weight == 9).any()


def test_the_digest_is_equal_iff_the_state_is(slots: Slots) -> None:
    model = Net(1)
    state = ReplicatedState(model, [], [])
    save(state, slots, 0)
    state.save(slots, 1)
    assert state.digest(slots, 0) == state.digest(slots, 1) < 2**32
    with torch.no_grad():
        model.narrow.view(torch.int16)[3] ^= 1
    state.save(slots, 1)
    assert state.digest(slots, 0) != state.digest(slots, 1)


def test_what_was_in_a_slot_before_does_not_count(slots: Slots) -> None:
    """A newcomer's slots hold nothing of earlier, other states between the tensors."""
    state = ReplicatedState(Net(1), [], [])
    slots.open(0, 2 * state.size_bytes + 4096)[:] = 0xA5
    save(state, slots, 0)
    state.save(slots, 1)
    assert state.digest(slots, 0) == state.digest(slots, 1)


# --- the slots ----------------------------------------------------------------------------------


def test_the_last_two_transactions_are_kept(slots: Slots) -> None:
    for transaction in (0, 1, 2, 3, 3):  # the last one twice: undone, and run again
        slots.open(transaction, 3)[:] = transaction
        slots.seal(transaction)
        slots._arena.set("committed", min(transaction, 2))
    assert slots.read(3).tolist() == [3, 3, 3]
    assert slots.read(2).tolist() == [2, 2, 2]
    for gone in (0, 1, 4):
        with pytest.raises(InconsistentArenas, match=f"state of transaction {gone} is not in one of"):
            slots.read(gone)


def test_a_slot_is_void_from_its_first_byte_to_its_seal(slots: Slots) -> None:
    """The slot of the last committed transaction is never written; that of the one before is."""
    for transaction in (0, 5):  # windows: transactions are any numbers apart
        slots.open(transaction, 3)[:] = transaction
        slots.seal(transaction)
        slots._arena.set("committed", transaction)
    slots.open(7, 3)[0] = 2
    assert slots.read(5).tolist() == [5, 5, 5]
    for transaction in (0, 7):
        with pytest.raises(InconsistentArenas):
            slots.read(transaction)


def test_a_state_that_outgrows_its_slot(slots: Slots) -> None:
    with pytest.raises(NotEnoughSpace, match="slot0"):
        slots.open(0, 1 << 20)


# --- what is refused ----------------------------------------------------------------------------


def test_a_dense_tensor_on_the_meta_device_is_refused() -> None:
    model = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigurationError, match="weight is on the meta device"):
        _ = ReplicatedState(model, [], []).size_bytes


def test_a_sparse_buffer_is_refused() -> None:
    model = nn.Module()
    with torch.sparse.check_sparse_tensor_invariants():
        model.register_buffer("x", torch.eye(2).to_sparse())
    with pytest.raises(ConfigurationError, match="x is on the meta device or not dense"):
        _ = ReplicatedState(model, [], []).size_bytes


def test_an_option_that_cannot_be_read_back_is_refused_when_it_is_saved(slots: Slots) -> None:
    """Found at a recovery, it would cost the job."""
    model = Net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["note"] = {1, 2}
    with pytest.raises(ConfigurationError, match=r"\['note'\] is a builtins.set"):
        ReplicatedState(model, [optimizer], []).save(slots, 0)


def saved(slots: Slots, optimizers: int = 1, groups: int = 1) -> None:
    model = nn.Linear(3, 2)
    parameters = list(model.parameters())
    parts = [{"params": parameters[i::groups]} for i in range(groups)]
    ReplicatedState(model, [torch.optim.SGD(parts, lr=0.1) for _ in range(optimizers)], []).save(slots, 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 3), r"weight is .*shape \(3, 3\), and was .*shape \(2, 3\)"),
        (nn.Linear(3, 2, bias=False), "differing: .*bias"),
        (nn.Sequential(nn.Linear(3, 2)), "differing: .*0.weight"),
        (nn.Linear(3, 2, dtype=torch.float64), "weight is torch.float64 .* was torch.float32"),
    ],
    ids=["shape", "fewer", "names", "type"],
)
def test_another_model_is_refused(model: nn.Module, message: str, slots: Slots) -> None:
    saved(slots)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = everything(model, optimizer)
    with pytest.raises(LayoutMismatch, match=message):
        ReplicatedState(model, [optimizer], []).load(slots, 0)
    assert everything(model, optimizer) == before


class Lazy(nn.Module):
    """Buffers that a step fills, whose shape it changes, and one whose places are all one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 1)
        self.register_buffer("mean", None)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("mask", torch.ones(1).expand(3), persistent=False)

    def run(self, step: int) -> None:
        self.mean = torch.full((2,), float(step))
        self.seen = torch.arange(step + 2.0)
        with torch.no_grad():
            self.head.weight.add_(step)

    def held(self) -> list[Any]:
        return [None if one is None else one.tolist() for one in (self.mean, self.seen, self.mask)]


def test_a_refused_restart_has_neither_filled_buffers_nor_set_options(slots: Slots) -> None:
    """The optimizer that differs is the last one."""

    def built(groups: int) -> tuple[Lazy, ReplicatedState, torch.optim.Optimizer]:
        model = Lazy()
        first = torch.optim.SGD(model.parameters(), lr=0.1 * groups)
        parameters = list(model.parameters())
        other = torch.optim.SGD([{"params": parameters[i::groups]} for i in range(groups)], lr=0.1)
        return model, ReplicatedState(model, [first, other], []), first

    model, state, _ = built(1)
    model.run(3)
    state.save(slots, 0)
    model, state, first = built(2)
    before, held = everything(model, first), model.held()
    with pytest.raises(LayoutMismatch, match="SGD has 2 parameter groups, and had 1: add groups before"):
        state.load(slots, 0)
    assert (everything(model, first), model.held()) == (before, held)


def test_buffers_come_back_as_they_were_filled(slots: Slots) -> None:
    model = Lazy()
    state = ReplicatedState(model, [], [])
    state.save(slots, 0)
    before = model.held()
    model.run(1)
    state.load(slots, 0)  # an abort
    assert model.held() == before == [None, [0.0], [1.0, 1.0, 1.0]]
    model.run(2)
    state.save(slots, 1)
    model.run(3)
    state.load(slots, 1)
    assert model.held() == [[2.0, 2.0], [0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0]]
    again = Lazy()  # a restart
    state = ReplicatedState(again, [], [])
    state.load(slots, 1)
    assert again.held() == model.held() and torch.equal(again.head.weight, model.head.weight)
    again.run(4)
    state.save(slots, 2)
    assert any(torch.equal(tensor, torch.full((2,), 4.0)) for tensor in unpacked(slots.read(2))[2])


def test_what_a_restart_could_not_put_back_is_refused_when_it_is_saved(slots: Slots) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    state = ReplicatedState(model, [optimizer], [])
    state.save(slots, 0)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    with pytest.raises(LayoutMismatch, match=r"groups of optimizer 0 has changed .*\(1 before, 2 now\)"):
        state.save(slots, 1)
    del optimizer.param_groups[1]
    model[1] = nn.Linear(3, 1)
    with pytest.raises(LayoutMismatch, match="1.weight has changed under protection"):
        state.save(slots, 1)


@pytest.mark.parametrize(("optimizers", "groups"), [(0, 1), (2, 1), (1, 2)])
def test_other_optimizers_are_refused(optimizers: int, groups: int, slots: Slots) -> None:
    saved(slots, optimizers, groups)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    before = everything(model, optimizer)
    with pytest.raises(LayoutMismatch, match="optimizers|parameter groups"):
        ReplicatedState(model, [optimizer], []).load(slots, 0)
    assert everything(model, optimizer) == before
