"""Dense state comes back bit for bit, from this rank's slot or another's."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from ecemb.errors import ConfigurationError, InconsistentArenas, LayoutMismatch, NotEnoughSpace
from ecemb.memory.rank_memory import Slots
from ecemb.state import rank_state, serialize
from ecemb.state.flatten import Outline, unpacked
from ecemb.state.replicated import ReplicatedState
from support.simulation import alone

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
    with alone(tmp_path, [rank_state.layout(40)]) as memory:
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


def test_what_was_made_in_inference_mode_comes_back(slots: Slots) -> None:
    """As a frozen part that is loaded there: a buffer, parameters in and outside of the model, and state."""

    def made(value: float) -> tuple[Net, torch.optim.Optimizer]:
        model = Net(1)
        with torch.inference_mode():
            outside = nn.Parameter(torch.full((2,), value), requires_grad=False)
        optimizer = torch.optim.Adagrad([*model.first.parameters(), outside])
        with torch.inference_mode():
            model.first.register_buffer("table", torch.full((3,), value))
            model.first.register_parameter(
                "frozen", nn.Parameter(torch.full((2,), value), requires_grad=False)
            )
            optimizer.state[model.first.weight]["sum"] = torch.full_like(model.first.weight, value)
        return model, optimizer

    model, optimizer = made(1.0)
    ReplicatedState(model, [optimizer], []).save(slots, 3)
    for again, other in (made(2.0), (model, optimizer)):
        ReplicatedState(again, [other], []).load(slots, 3)
        assert everything(again, other) == everything(*made(1.0))
        outside = other.param_groups[0]["params"][-1]
        assert outside.tolist() == [1.0, 1.0]
        assert all(one.is_inference() for one in (again.first.table, again.first.frozen, outside))


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
    """What is kept of a slot from one save to the next has no numbers in it."""
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


def test_a_schedule_does_not_lay_a_slot_out_anew(slots: Slots) -> None:
    """Rates, betas and counters change in every step: only their words are written."""
    model = Net(1)
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    train(model, optimizer, range(1))
    optimizer.state[model.scale]["seen"] = 0
    state = ReplicatedState(model, [optimizer], [])
    with (
        mock.patch("ecemb.state.flatten.dump", side_effect=serialize.dump) as packed,
        mock.patch.object(Outline, "lay_out", autospec=True, side_effect=Outline.lay_out) as laid_out,
    ):
        for step in range(1, 8):
            train(model, optimizer, range(step, step + 1))
            rates = {"lr": 0.5**step, "betas": (0.9 - step / 100, 0.999)}
            optimizer.param_groups[0].update(rates)
            optimizer.state[model.scale]["seen"] = step
            save(state, slots, step)
    assert packed.call_count == 1 and laid_out.call_count == 2  # a slot each

    expected = everything(model, optimizer)
    train(model, optimizer, range(8, 9))
    optimizer.param_groups[0].update(lr=9.0, betas=(0.0, 0.0))
    optimizer.state[model.scale]["seen"] = 9
    state.load(slots, 7)  # an abort
    assert everything(model, optimizer) == expected

    model = Net(2)
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    ReplicatedState(model, [optimizer], []).load(slots, 7)
    assert everything(model, optimizer) == expected


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0, 1e-323, math.inf, -math.inf, 0.1],
        [*struct.unpack("<3Q", struct.pack("<3d", 1.0, 2.0, 3.0)), -1, 0, (1 << 53) + 1],
        [1, 1.0, True, False, 0, None, "1"],
        [(1 << 63) - 1, 1 << 63, -(1 << 63), -(1 << 63) - 1, 1 << 200],
        [1 + 2j, b"1", torch.float32, {"a": 1, 2: [3.0, (4,)]}, Counter(a=3), torch.Size([5])],
    ],
)
def test_numbers_come_back_as_they_were(values: list[Any], slots: Slots) -> None:
    """Each in turn in place of the one before: they are equal in part, and not the same."""
    model = Net(1)
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    state = ReplicatedState(model, [optimizer], [])
    (group,) = optimizer.param_groups
    group["all"] = values
    for transaction, value in enumerate(values):
        group["one"] = value
        save(state, slots, transaction)
        group.update(one="other", all="others")
        state.load(slots, transaction)
        assert [repr(group["one"]), repr(group["all"])] == [repr(value), repr(values)]


def test_bits_of_a_nan_option_come_back(slots: Slots) -> None:
    model = Net(1)
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    state = ReplicatedState(model, [optimizer], [])
    for transaction, bits_ in enumerate((0x7FF8_0000_0000_1234, 0xFFF8_0000_0000_0001)):
        (number,) = struct.unpack("<d", struct.pack("<Q", bits_))
        optimizer.param_groups[0]["lr"] = number
        save(state, slots, transaction)
        optimizer.param_groups[0]["lr"] = 0.0
        state.load(slots, transaction)
        assert struct.pack("<d", optimizer.param_groups[0]["lr"]) == struct.pack("<Q", bits_)


def test_a_damaged_number_is_noticed(slots: Slots) -> None:
    model = Net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.12345)
    state = ReplicatedState(model, [optimizer], [])
    state.save(slots, 0)
    memory = slots.read(0)
    memory[memory.tobytes().index(struct.pack("<d", 0.12345))] ^= 1
    with pytest.raises(InconsistentArenas, match="numbers of a slot of replicated state"):
        state.load(slots, 0)


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
    assert slots.read(0).tobytes() == slots.read(1).tobytes() == state.whole().tobytes()
    before = state.digest()
    assert before < 2**32
    with torch.no_grad():
        model.narrow.view(torch.int16)[3] ^= 1
    assert state.digest() != before
    state.save(slots, 1)
    assert slots.read(0).tobytes() != slots.read(1).tobytes() == state.whole().tobytes()


def test_what_was_in_a_slot_before_does_not_count(slots: Slots) -> None:
    """A replacement rank's slots hold nothing of earlier, other states between the tensors."""
    state = ReplicatedState(Net(1), [], [])
    slots.open(0, 2 * state.size_bytes + 4096)[:] = 0xA5
    save(state, slots, 0)
    state.save(slots, 1)
    assert slots.read(0).tobytes() == slots.read(1).tobytes()


# --- the slots ----------------------------------------------------------------------------------


def test_the_last_two_transactions_are_kept(slots: Slots) -> None:
    for transaction in (0, 1, 2, 3, 3):  # the last one twice: undone, and run again
        slots.open(transaction, 3)[:] = transaction
        slots.seal(transaction)
        slots._arena.set("committed", min(transaction, 2))
    assert slots.read(3).tolist() == [3, 3, 3]
    assert slots.read(2).tolist() == [2, 2, 2]
    for gone in (0, 1, 4):
        with pytest.raises(InconsistentArenas, match=f"state of transaction {gone} is not in exactly one of"):
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
        (nn.Linear(3, 2, bias=False), r"\(bias only then, none only now\)"),
        (
            nn.Sequential(nn.Linear(3, 2)),
            r"\(bias, weight only then, 0.bias, 0.weight only now\)",
        ),
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
    with pytest.raises(LayoutMismatch, match="parameter groups of SGD is 2, and was 1: add groups before"):
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


def lose_a_buffer(model: nn.Module) -> None:
    del model.norm.running_mean


def gain_a_module_with_buffers(model: nn.Module) -> None:
    model.other = nn.BatchNorm1d(2, affine=False)


def gain_extra_state(model: nn.Module) -> None:
    model.ways = Counting(1, 1)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lose_a_buffer, "buffer norm.running_mean has changed .*there before, None now"),
        (gain_a_module_with_buffers, "module other with buffers has changed .*None before, there now"),
        (gain_extra_state, "extra state of module ways has changed .*None before, there now"),
    ],
)
def test_a_commit_takes_only_what_the_scripts_model_can_take_back(
    change: Callable[[nn.Module], None], what: str, slots: Slots
) -> None:
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(2)})
    state = ReplicatedState(model, [], [])
    state.save(slots, 0)
    change(model)
    with pytest.raises(LayoutMismatch, match=what):
        state.save(slots, 1)
    again = nn.ModuleDict({"norm": nn.BatchNorm1d(2)})  # a restart, which knows nothing of the change
    ReplicatedState(again, [], []).load(slots, 0)


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


class Buffers(nn.Module):
    """Two buffers that begin as they are given, and whatever a test registers."""

    def __init__(self, one: torch.Tensor, other: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("one", one)
        self.register_buffer("other", other)

    def held(self) -> dict[str, Any]:
        return {name: None if one is None else one.tolist() for name, one in self._buffers.items()}


def apart() -> Buffers:
    return Buffers(torch.zeros(2), torch.ones(2))


def together() -> Buffers:
    both = torch.ones(2)
    return Buffers(both, both)


def diverge(model: Buffers) -> None:
    model.one = model.one + 1
    model.other = model.other * 5


def unite(model: Buffers) -> None:
    model.other = model.one
    model.one += 7


def register(model: Buffers) -> None:
    model.register_buffer("cached", torch.arange(3.0), persistent=False)


def clear(model: Buffers) -> None:
    model.one = None


@pytest.mark.parametrize("make", [apart, together])
@pytest.mark.parametrize("change", [diverge, unite, register, clear])
def test_buffers_that_come_go_meet_and_part(
    make: Callable[[], Buffers], change: Callable[[Buffers], None], slots: Slots
) -> None:
    model = make()
    state = ReplicatedState(model, [], [])
    state.save(slots, 0)
    before, kept = model.held(), dict(model.state_dict())
    change(model)
    state.load(slots, 0)  # an abort
    assert (model.held(), [*model.state_dict()]) == (before, [*kept])
    change(model)
    state.save(slots, 1)
    after, kept = model.held(), dict(model.state_dict())
    again = make()
    other = ReplicatedState(again, [], [])
    other.load(slots, 1)  # a restart
    assert (again.held(), [*again.state_dict()]) == (after, [*kept])
    assert (again.one is again.other) == (model.one is model.other)
    for one in (model, again):  # and what is one, or was, goes on so
        one.other += 1
    assert again.held() == model.held()
    for one in (state, other):
        one.load(slots, 1)
    assert again.held() == model.held() == after


def test_an_abort_writes_to_no_tensor_that_was_not_saved(slots: Slots) -> None:
    """A batch that became a buffer is the dataset's."""
    data, model = torch.arange(4.0).reshape(2, 2), apart()
    state = ReplicatedState(model, [], [])
    for first in (state, ReplicatedState(model, [], [])):
        if first is state:
            state.save(slots, 0)
        else:
            first.load(slots, 0)  # a restart
        own = model.other
        model.one = data[1]
        model.other.add_(3)
        first.load(slots, 0)
        assert data.tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert model.held() == {"one": [0.0, 0.0], "other": [1.0, 1.0]} and model.other is own


def test_buffers_that_trade_places_within_a_step_come_back(slots: Slots) -> None:
    model = apart()
    state = ReplicatedState(model, [], [])
    state.save(slots, 0)
    model.other, model.one = model.one, model.one + 1
    state.load(slots, 0)
    assert model.held() == {"one": [0.0, 0.0], "other": [1.0, 1.0]}


def test_tied_parameters_that_part_are_refused_when_they_are_saved(slots: Slots) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    state = ReplicatedState(model, [], [])
    state.save(slots, 0)
    model[1].weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(LayoutMismatch, match="1.weight has changed under protection"):
        state.save(slots, 1)


def test_a_protected_table_that_is_replaced_is_refused_when_it_is_saved(slots: Slots) -> None:
    """Neither parity nor dense state would have the new one's rows."""
    model = nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2))
    state = ReplicatedState(model, [], [model[0].weight])
    state.save(slots, 0)
    model[0].weight = nn.Parameter(torch.zeros(5, 2))
    with pytest.raises(LayoutMismatch, match="0.weight has changed under protection"):
        state.save(slots, 1)


class Counting(nn.Linear):
    """Keeps a number of its own."""

    count = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "mean": torch.full((2,), float(self.count))}

    def set_extra_state(self, state: Any) -> None:
        assert state["mean"].tolist() == [state["count"]] * 2
        self.count = state["count"]


def test_extra_state_of_modules_comes_back(slots: Slots) -> None:
    def made() -> tuple[Counting, ReplicatedState]:
        model = nn.Sequential(Counting(1, 1))
        return model[0], ReplicatedState(model, [], [])

    (layer, state), (other, again) = made(), made()
    layer.count = 5
    state.save(slots, 1)
    layer.count = 6
    state.load(slots, 1)
    again.load(slots, 1)
    assert (layer.count, other.count) == (5, 5)
    model = nn.Sequential(Counting(1, 1))
    state = ReplicatedState(model, [], [])
    model[0] = Counting(1, 1)
    state.load(slots, 1)
    assert model[0].count == 5
    with pytest.raises(LayoutMismatch, match="0 has extra state either only in the saved"):
        ReplicatedState(nn.Sequential(nn.Linear(1, 1)), [], []).load(slots, 1)


class Ascent(torch.optim.Optimizer):
    """Has an optimizer in itself, as sharpness-aware minimization does, and a count under no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.Adam(self.param_groups, lr=0.1)
        self.param_groups = self.base.param_groups
        self.state["all"] = {"steps": 0, "sum": torch.zeros(1)}

    def step(self, closure: Any = None) -> None:
        self.state["all"]["steps"] += 1
        self.state["all"]["sum"] += 1
        self.param_groups[0]["late"] = self.state["all"]["steps"]
        self.base.step()


def test_all_state_of_an_optimizer_comes_back(slots: Slots) -> None:
    """That of an inner optimizer, of no parameter, and parameters that the model doesn't have."""

    def made() -> tuple[nn.Module, nn.Parameter, Ascent, ReplicatedState]:
        model, scale = nn.Linear(2, 1), nn.Parameter(torch.zeros(()))
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(2)
        optimizer = Ascent([*model.parameters(), scale])
        return model, scale, optimizer, ReplicatedState(model, [optimizer], [])

    def run(model: nn.Module, scale: nn.Parameter, optimizer: Ascent, _: object) -> None:
        optimizer.zero_grad()
        ((model(torch.ones(1, 2)) - 7).square().sum() * (-scale).exp() + scale).backward()
        optimizer.step()

    def seen(model: nn.Module, scale: nn.Parameter, optimizer: Ascent, _: object) -> Any:
        return everything(model, optimizer.base), scale.item(), str(optimizer.state["all"])

    one, other = made(), made()
    one[3].save(slots, 0)
    before = seen(*one)
    run(*one)
    one[3].load(slots, 0)  # an abort
    assert seen(*one) == before and "late" not in one[2].param_groups[0]
    for _ in range(3):
        run(*one)
    one[3].save(slots, 3)
    places = [tensor.data_ptr() for tensor in one[2].base.state[one[1]].values()]
    run(*one)
    one[3].load(slots, 3)
    assert places == [tensor.data_ptr() for tensor in one[2].base.state[one[1]].values()]
    other[3].load(slots, 3)  # a restart
    for each in (one, other):
        run(*each)
    assert seen(*one) == seen(*other) != before


def test_tensors_that_change_their_order_keep_their_names(slots: Slots) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = ReplicatedState(model, [optimizer], [])
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    state.save(slots, 1)
    kept = optimizer.state[model.bias]
    optimizer.state[model.bias] = {key: kept[key] for key in reversed(kept)}
    before = everything(model, optimizer)
    state.save(slots, 2)
    again = nn.Linear(1, 1)
    other = torch.optim.Adam(again.parameters(), lr=0.1)
    ReplicatedState(again, [other], []).load(slots, 2)
    assert everything(again, other) == before


def test_parameters_that_join_a_group_are_refused_when_they_are_saved(slots: Slots) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    state = ReplicatedState(model, [optimizer], [])
    optimizer.param_groups[0]["params"] += model[1].parameters()
    with pytest.raises(LayoutMismatch, match=r"the number of parameters in group 0 of optimizer 0 has .*\(2"):
        state.save(slots, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit:Warning")
def test_a_scripted_part_is_kept(slots: Slots) -> None:
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)))
    state = ReplicatedState(model, [], [])
    state.save(slots, 0)
    before = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    model(torch.randn(4, 2))
    state.load(slots, 0)
    assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == before


def test_what_has_no_shape_or_is_sharded_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"0\.\w+ has no shape yet: run a batch"):
        ReplicatedState(nn.Sequential(nn.LazyLinear(2)), [], []).save(mock.Mock(), 0)
    sharded = type("FullyShardedDataParallel", (nn.Linear,), {})
    with pytest.raises(ConfigurationError, match="0 is a FullyShardedDataParallel"):
        ReplicatedState(nn.Sequential(sharded(1, 1)), [], [])
    model = nn.Linear(1, 1)
    spread = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    with pytest.raises(ConfigurationError, match="ZeroRedundancyOptimizer partitions"):
        ReplicatedState(model, [spread(model.parameters(), lr=0.1)], [])


def test_sparse_optimizer_state_is_refused(slots: Slots) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = ReplicatedState(model, [optimizer], [])
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigurationError, match="sparse"):
        state.save(slots, 0)


@pytest.mark.parametrize("apart", [True, False], ids=["optimizers", "groups"])
def test_optimizers_that_trade_places_are_refused(apart: bool, slots: Slots) -> None:
    """Nothing else tells them apart: class, options and shapes are equal."""

    def started(*names: str) -> ReplicatedState:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("left", "right")})
        parts = [list(model[name].parameters()) for name in names]
        if apart:
            return ReplicatedState(model, [torch.optim.Adam(part) for part in parts], [])
        return ReplicatedState(model, [torch.optim.Adam([{"params": part} for part in parts])], [])

    started("left", "right").save(slots, 1)
    started("left", "right").load(slots, 1)
    number = 1 if apart else 0
    with pytest.raises(
        LayoutMismatch,
        match=rf"group 0 of optimizer 0 .*Adam\) has right.weight where left.weight was .*"
        rf"\(optimizer {number} now has left.weight\)",
    ):
        started("right", "left").load(slots, 1)


def test_an_optimizer_of_another_class_is_refused(slots: Slots) -> None:
    """Adam and AdamW have the same state and options, and train otherwise."""
    model = nn.Linear(2, 2)
    ReplicatedState(model, [torch.optim.Adam(model.parameters())], []).save(slots, 1)
    again = ReplicatedState(model, [torch.optim.AdamW(model.parameters())], [])
    with pytest.raises(
        LayoutMismatch, match=r"is a torch.optim.adamw.AdamW, and was a torch.optim.adam.Adam"
    ):
        again.load(slots, 1)
