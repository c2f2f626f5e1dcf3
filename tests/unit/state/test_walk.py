"""A kept walk through replicated state, looked at again, says what another walk says, whatever changes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from ecemb.coding.placement import Share
from ecemb.errors import ConfigurationError
from ecemb.memory.rank_memory import StateCopy
from ecemb.state import walk
from ecemb.state.flatten import same, separated
from ecemb.state.replicated import ReplicatedState
from ecemb.state.walk import CachedWalk, TensorSlots


class Inner(torch.optim.Optimizer):
    """Has an optimizer in itself, and state under no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.state["steps"] = 3
        self.state["all"] = {"sum": torch.zeros(1), "seen": [1, 2.5], "options": {"a": 1}}

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Net(nn.Module):
    """Parameters and buffers of all kinds: shared, empty, scalar, not saved, of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.table = nn.Embedding(5, 2)
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("also", self.mean)
        self.register_buffer("none", None)
        self.register_buffer("mask", torch.ones(1).expand(3), persistent=False)


class Training:
    """A model with two optimizers, trained for a step, so that they have state."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model: Any = Net()
        self.outside = nn.Parameter(torch.ones(2))
        layers = self.model.layers
        self.adam: Any = torch.optim.Adam(
            [
                {"params": [*layers.parameters(), self.model.table.weight]},
                {"params": [self.model.scale], "lr": torch.tensor(0.5)},
            ],
            lr=0.25,
        )
        self.group, self.other = self.adam.param_groups
        self.group.update(
            note="a",
            big=1 << 70,
            many=[1, 2.0, (3, "b"), {"c": 4, "options": 5}],
            half=np.float64(0.5),
            whole=np.int32(7),
            when=np.datetime64(5, "ns"),
            mixed=(0.5, None, torch.zeros(1)),
            flag=True,
            shape=torch.Size([2, 3]),
            kind=torch.float32,
            nan=float("nan"),
            two=[["a", "a"], ["a"]],
        )
        self.inner: Any = Inner([self.outside])
        self.step()
        self.own: Any = self.adam.state[layers[0].weight]
        self.own.update(count=3, rates=(0.1, 2), name="x", more=OrderedDict(a=[], b=1.0))

    def step(self) -> None:
        for parameter in [*self.model.parameters(), self.outside]:
            parameter.grad = torch.ones_like(parameter)
        self.adam.step()
        self.inner.step()


Change = Callable[[Training], object]


def swapped(holder: Any, old: Any, new: Any, value: Any) -> None:
    """Takes a key away and adds another."""
    del holder[old]
    holder[new] = value


def reversed_(holder: dict[Any, Any]) -> None:
    items = list(holder.items())
    holder.clear()
    holder.update(reversed(items))


@torch.no_grad()
def written(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    tensor.data = value


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2)


def sparse() -> torch.Tensor:
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.ones(3).to_sparse_coo()


def traded(holder: Any, one: str, other: str) -> None:
    first, second = getattr(holder, one), getattr(holder, other)
    setattr(holder, one, second)
    setattr(holder, other, first)


def loaded(optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def renamed(one: Any, name: str) -> None:
    one.__class__ = type(name, (type(one),), {})


SEEN_BY_A_LOOK: dict[str, Change] = {
    "nothing": lambda t: None,
    "a step": lambda t: t.step(),
    "a rate": lambda t: t.group.update(lr=0.125),
    "the same rate again": lambda t: t.group.update(lr=float("0.25")),
    "all betas": lambda t: t.group.update(betas=(0.5, 0.75)),
    "a step's count": lambda t: t.own.update(count=4),
    "a tuple in state": lambda t: t.own.update(rates=(0.5, 3)),
    "a number in a list": lambda t: t.group["many"].__setitem__(1, 7.0),
    "a number in a dict in a list": lambda t: t.group["many"][3].update(c=5),
    "options that are no optimizer's": lambda t: t.group["many"][3].update(options=6),
    "options in state": lambda t: t.inner.state["all"]["options"].update(a=2),
    "of an inner optimizer": lambda t: t.inner.base.param_groups[0].update(momentum=0.5),
    "state of no parameter": lambda t: t.inner.state.update(steps=4),
    "a list of it": lambda t: t.inner.state["all"]["seen"].__setitem__(0, 9),
    "a number of numpy": lambda t: t.group.update(half=np.float64(0.75), whole=np.int32(8)),
    "a NaN": lambda t: t.group.update(nan=-float("nan")),
    "signed zero": lambda t: t.group.update(lr=-0.0),
    "many numbers": lambda t: (t.group.update(lr=1.5), t.own.update(count=1), t.own["more"].update(b=2.0)),
    "a buffer's values": lambda t: written(t.model.mean),
    "a parameter's values": lambda t: written(t.model.scale),
    "a tensor option's values": lambda t: written(t.other["lr"]),
    "uncounted values": lambda t: t.model.mean.data.add_(3),
    "requires_grad": lambda t: t.model.scale.requires_grad_(False),
    "data of the same form": lambda t: set_data(t.model.scale, torch.ones(())),
    "data of inference": lambda t: set_data(t.model.mean, inference()),
    "the table's values": lambda t: written(t.model.table.weight),
    "a tensor option": lambda t: t.other.update(lr=torch.tensor(0.5)),
    "a moment replaced": lambda t: t.own.update(exp_avg=torch.ones(4, 3)),
    "moments that trade places": lambda t: t.own.update(
        exp_avg=t.own["exp_avg_sq"], exp_avg_sq=t.own["exp_avg"]
    ),
    "a buffer replaced": lambda t: setattr(t.model, "mask", torch.ones(3)),
    "many buffers replaced": lambda t: (
        setattr(t.model, "mask", torch.ones(3)),
        setattr(t.model.layers[1], "running_mean", torch.ones(4)),
    ),
    "buffers that trade places": lambda t: traded(t.model.layers[1], "running_mean", "running_var"),
    "state that is a buffer": lambda t: t.own.update(exp_avg=t.model.mean.expand(6, 2).reshape(4, 3)),
    "an option that is a buffer": lambda t: t.other.update(lr=t.model.layers[1].running_var.sum()),
}
NEEDS_A_WALK: dict[str, Change] = {
    "a rate that becomes an int": lambda t: t.group.update(lr=1),
    "a rate that becomes a tensor": lambda t: t.group.update(lr=torch.tensor(0.25)),
    "a rate that becomes numpy's": lambda t: t.group.update(lr=np.float64(0.25)),
    "another unit of time": lambda t: t.group.update(when=np.datetime64(5, "ps")),
    "a rate that becomes a tuple": lambda t: t.group.update(lr=(0.25,)),
    "a tuple that becomes a list": lambda t: t.group.update(betas=[0.9, 0.999]),
    "a tuple that gets longer": lambda t: t.group.update(betas=(0.9, 0.999, 0.9)),
    "a tuple of other types": lambda t: t.group.update(betas=(1, 0.999)),
    "a count that gets big": lambda t: t.own.update(count=1 << 63),
    "a big number": lambda t: t.group.update(big=(1 << 70) + 1),
    "a big number that gets small": lambda t: t.group.update(big=1),
    "a count that becomes a bool": lambda t: t.own.update(count=True),
    "a flag": lambda t: t.group.update(flag=False),
    "a mixed tuple": lambda t: t.group.update(mixed=(0.75, None, t.group["mixed"][2])),
    "a string": lambda t: t.own.update(name="y"),
    "a shape": lambda t: t.group.update(shape=torch.Size([3, 2])),
    "a type": lambda t: t.group.update(kind=torch.float64),
    "another option": lambda t: t.group.update(late=1),
    "one option fewer": lambda t: t.group.pop("note"),
    "an option for another": lambda t: swapped(t.group, "note", "notes", "a"),
    "options in another order": lambda t: reversed_(t.group),
    "state in another order": lambda t: reversed_(t.own),
    "a moment for another": lambda t: swapped(t.own, "exp_avg", "avg", t.own["exp_avg"]),
    "state gone": lambda t: t.adam.state.pop(t.model.scale),
    "all state gone": lambda t: t.adam.state.clear(),
    "state replaced": lambda t: t.adam.state.update({t.model.scale: dict(t.own)}),
    "a list that grows": lambda t: t.own["more"]["a"].append(1.0),
    "a list's item moved to another list": lambda t: t.own["more"]["a"].append(t.group["many"].pop()),
    "a list's item moved to the next list": lambda t: t.group["two"][1].append(t.group["two"][0].pop()),
    "an ordered dict in another order": lambda t: t.own["more"].move_to_end("a"),
    "another list with the same": lambda t: t.group.update(many=list(t.group["many"])),
    "state of no parameter for another": lambda t: swapped(t.inner.state, "steps", "count", 3),
    "another group": lambda t: t.adam.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "groups in another order": lambda t: t.adam.param_groups.reverse(),
    "a group copied": lambda t: t.adam.param_groups.__setitem__(0, dict(t.group)),
    "parameters in another order": lambda t: t.group["params"].reverse(),
    "a parameter fewer": lambda t: t.group["params"].pop(0),
    "parameters as a tuple": lambda t: t.group.update(params=tuple(t.group["params"])),
    "a loaded state": lambda t: loaded(t.adam),
    "other groups": lambda t: setattr(t.adam, "param_groups", [t.other, t.group]),
    "another dict of state": lambda t: setattr(t.adam, "state", {t.model.scale: dict(t.own)}),
    "another optimizer's class": lambda t: renamed(t.adam, "Other"),
    "a parameter replaced": lambda t: setattr(t.model, "scale", nn.Parameter(torch.ones(()))),
    "a parameter that is None": lambda t: setattr(t.model, "scale", None),
    "a parameter's name": lambda t: swapped(t.model._parameters, "scale", "size", t.model.scale),
    "a parameter added": lambda t: setattr(t.model, "late", nn.Parameter(torch.ones(1))),
    "the table replaced": lambda t: setattr(t.model.table, "weight", nn.Parameter(torch.ones(5, 2))),
    "a buffer of another shape": lambda t: setattr(t.model, "mask", torch.ones(4)),
    "a buffer that parts": lambda t: setattr(t.model, "also", torch.zeros(2)),
    "a buffer that joins": lambda t: setattr(t.model, "mask", t.model.mean),
    "a buffer that is a parameter": lambda t: setattr(t.model, "mask", t.model.scale.expand(3)),
    "a buffer that is a table": lambda t: t.model._buffers.update(mask=t.model.table.weight),
    "a sparse buffer": lambda t: setattr(t.model, "mask", sparse()),
    "buffers that become one": lambda t: (
        setattr(t.model.layers[1], "running_mean", t.model.layers[1].running_var),
    ),
    "a buffer that parts, and others that become one": lambda t: (
        setattr(t.model, "mean", torch.ones(2)),
        setattr(t.model.layers[1], "running_mean", t.model.layers[1].running_var),
    ),
    "buffers replaced by one": lambda t: (
        setattr(t.model.layers[1], "running_mean", t.model.mask),
        setattr(t.model, "mask", torch.ones(3)),
        setattr(t.model.layers[1], "running_var", t.model.layers[1].running_mean),
    ),
    "a moment of another shape": lambda t: t.own.update(exp_avg=torch.ones(3, 4)),
    "a moment that is a number": lambda t: t.own.update(exp_avg=1.0),
    "a buffer that is None": lambda t: setattr(t.model, "mask", None),
    "a buffer that is not None": lambda t: setattr(t.model, "none", torch.ones(1)),
    "a buffer added": lambda t: t.model.register_buffer("late", torch.ones(1), persistent=False),
    "a buffer added where none was": lambda t: t.model.layers.register_buffer("late", torch.ones(1)),
    "a buffer gone": lambda t: delattr(t.model, "mask"),
    "a buffer's name": lambda t: swapped(t.model._buffers, "mask", "masks", t.model.mask),
    "buffers in another order": lambda t: reversed_(t.model._buffers),
    "a module replaced": lambda t: t.model.layers.__setitem__(2, nn.Linear(4, 1)),
    "a module added": lambda t: t.model.layers.append(nn.BatchNorm1d(2)),
    "a module without tensors": lambda t: setattr(t.model, "relu", nn.ReLU()),
    "a module gone": lambda t: t.model.layers.__delitem__(2),
    "data of another type": lambda t: set_data(t.model.scale, torch.ones((), dtype=torch.float64)),
    "data of another shape": lambda t: set_data(t.model.mean, torch.ones(3)),
    "a resized buffer": lambda t: t.model.mean.set_(torch.zeros(4)),
    "the model in double": lambda t: t.model.double(),
    "the state's type": lambda t: set_data(t.own["exp_avg"], torch.ones(4, 3, dtype=torch.bfloat16)),
    "an option that can't be read back": lambda t: t.group.update(note={1}),
    "sparse state": lambda t: t.own.update(exp_avg=torch.eye(2).to_sparse_coo()),
}
CHANGES = SEEN_BY_A_LOOK | NEEDS_A_WALK


class Walking(ReplicatedState):
    """Keeps no walk."""

    _walk = property(lambda self: None, lambda self, value: None)  # pyright: ignore
    _slots = property(lambda self: None, lambda self, value: None)  # pyright: ignore


class Pair:
    """The same training's state, saved twice: by one that looks, and by one that walks."""

    def __init__(self, share: Share) -> None:
        self.training = Training()
        optimizers, table = [self.training.adam, self.training.inner], [self.training.model.table.weight]
        self.looks = ReplicatedState(self.training.model, optimizers, table)
        self.walks = Walking(self.training.model, optimizers, table)
        self.stores = StateCopy(), StateCopy()
        for store in self.stores:
            store.share = share

    def both(self, act: Callable[[ReplicatedState, StateCopy], object]) -> object:
        """What comes of it is equal."""
        results: list[object] = []
        for state, store in zip((self.looks, self.walks), self.stores, strict=True):
            try:
                results.append(act(state, store))
            except Exception as error:  # noqa: BLE001 - both fail, and equally
                results.append((type(error), str(error)))
        assert repr(results[0]) == repr(results[1])
        self.compare()
        return results[0]

    def compare(self) -> None:
        looks, walks = self.looks, self.walks
        assert same(looks._outline.value, walks._outline.value)
        assert looks._outline.head == walks._outline.head
        assert looks._last[1] == walks._last[1]
        assert [*map(id, looks._last[0])] == [*map(id, walks._last[0])]
        assert looks._seen is not None and walks._seen is not None
        assert [*map(id, looks._seen.tensors)] == [*map(id, walks._seen.tensors)]
        for part in ("versions", "rest", "options", "kinds"):
            assert repr(getattr(looks._seen, part)) == repr(getattr(walks._seen, part)), part
        assert self.stores[0].read(0).tobytes() == self.stores[1].read(0).tobytes()
        assert looks.digest() == walks.digest()

    def save(self) -> object:
        failed = self.both(lambda state, store: state.save(store, 0))
        if failed is None:  # the walk took out what another way of taking it out does
            value, tensors, numbers = separated(self.walks._collect(self.walks._slots_now()))
            assert same(self.looks._outline.value, value)
            assert [*map(id, self.looks._last[0])] == [*map(id, tensors)]
            assert self.looks._last[1] == numbers
        return failed

    def moved(self) -> object:
        return self.both(lambda state, _: state.moved())


@pytest.fixture
def pair() -> Pair:
    made = Pair(Share(1, (0,)))
    made.save()
    return made


@pytest.mark.parametrize("first", [*NEEDS_A_WALK, "a step", "many numbers"])
def test_a_look_says_what_a_walk_says(first: str, pair: Pair) -> None:
    follow(pair, CHANGES[first])


@pytest.mark.parametrize("first", SEEN_BY_A_LOOK)
def test_a_look_is_enough_where_containers_stay(first: str, pair: Pair) -> None:
    with mock.patch.object(pair.looks, "_collect", side_effect=AssertionError("a walk")):
        follow(pair, SEEN_BY_A_LOOK[first])


def follow(pair: Pair, change: Change) -> None:
    """Between steps, within one, and after others."""
    training = pair.training
    assert pair.moved() == {}
    change(training)
    pair.moved()
    pair.moved()
    pair.save()
    training.group["lr"] = 0.75
    pair.moved()
    pair.save()
    with contextlib.suppress(KeyError, AttributeError, IndexError):  # it may be possible only once
        change(training)
    pair.save()
    pair.moved()
    pair.save()


def test_numbers_beside_a_refused_value_are_not_kept(pair: Pair) -> None:
    """The step that set them is undone: they are the objects that they were."""
    group = pair.training.group
    group.update(last=3, refused=None)
    pair.save()
    group.update(last=4, refused={1})
    assert "set" in repr(pair.save())
    group.update(last=3, refused=None)
    assert pair.save() is None
    assert pair.moved() == {}


class Around(torch.optim.Optimizer):
    """Has no state of its own: it makes a new dict of the inner optimizers' each time."""

    def __init__(self, inner: list[torch.optim.Optimizer]) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner[0].param_groups

    @property
    def state(self) -> Any:
        return OrderedDict(self.inner[0].state)


def test_state_that_an_optimizer_makes_anew_is_found_each_time() -> None:
    """Another dict may have the address of one that is gone."""
    model = nn.Linear(1, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    state, store = ReplicatedState(model, [Around([inner])], []), StateCopy()
    found: list[int] = []
    for _ in range(100):
        inner.state[model.weight] = {"count": torch.zeros(1)}
        state.save(store, 0)
        state.moved()
        found.append(len(state._last[0]))
        inner.state.clear()
        state.save(store, 0)
        found.append(len(state._last[0]))
    assert found == [2, 1] * 100


def test_a_part_of_the_state_is_saved_by_a_look_as_by_a_walk() -> None:
    pair = Pair(Share(4, (1, 3)))
    pair.save()
    for change in ("a step", "a rate", "a buffer replaced", "a step"):
        CHANGES[change](pair.training)
        pair.save()
        assert pair.moved() == {}


def test_the_state_after_a_load_is_walked_through(pair: Pair) -> None:
    pair.training.step()
    for state, store in zip((pair.looks, pair.walks), pair.stores, strict=True):
        state.load(store, 0)
        assert state.moved() == {}
    pair.save()
    assert pair.moved() == {}
    for change in ("a step", "a rate", "a step"):
        CHANGES[change](pair.training)
        pair.moved()
        pair.save()


class Own(dict[str, Any]):
    """A dict that could hide anything."""


class Ways(nn.Linear):
    """Has extra state, which a function returns."""

    count = 0

    def get_extra_state(self) -> int:
        self.count += 1
        return self.count

    def set_extra_state(self, state: Any) -> None:
        self.count = state


def looks(model: nn.Module, groups: Any, change: Callable[[Any], object]) -> tuple[int, int]:
    """How often state was walked through in 12 steps with a change each, and how often a look was enough."""
    optimizer = torch.optim.SGD(groups, lr=0.1)
    state, store = ReplicatedState(model, [optimizer], []), StateCopy()
    found: list[bool] = []

    def refresh(self: CachedWalk, *, forms: bool) -> bool:
        found.append(original(self, forms=forms))
        return found[-1]

    original = CachedWalk.refresh
    with (
        mock.patch.object(state, "_collect", side_effect=state._collect) as walked,
        mock.patch.object(CachedWalk, "refresh", refresh),
    ):
        for _ in range(12):
            change(optimizer.param_groups[0])
            state.save(store, 0)
    return walked.call_count, sum(found)


def test_only_state_in_other_containers_is_walked_through_again() -> None:
    model = nn.Linear(1, 1)
    groups = [{"params": list(model.parameters())}]
    assert looks(model, groups, lambda group: group.update(late=[1])) == (12, 0)
    assert looks(model, groups, lambda group: group.update(lr=group["lr"] / 2)) == (1, 11)


def test_modules_are_walked_through_again_only_if_they_changed() -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mean", torch.zeros(1))
    groups = [{"params": list(model.parameters())}]
    with mock.patch("ecemb.state.walk._found", side_effect=walk._found) as found:
        looks(model, groups, lambda group: group.update(late=[1]))
        assert found.call_count == 1
        looks(model, groups, lambda group: setattr(model, "mean", torch.ones(1)))
        assert found.call_count == 2


def test_containers_of_known_types_are_looked_at_and_others_are_refused() -> None:
    model = nn.Linear(1, 1)
    groups: list[dict[str, Any]] = [{"params": list(model.parameters()), "value": OrderedDict(a=1)}]
    assert looks(model, groups, lambda group: None)[1] == 11
    for value in (Own(a=1), [Own()]):
        groups[0]["value"] = value
        with pytest.raises(ConfigurationError, match=r"\['options'\]\[0\]\['value'\].* is a .*Own"):
            looks(model, groups, lambda group: None)


def test_extra_state_is_asked_for_in_each_step() -> None:
    model = Ways(1, 1)
    assert looks(model, [{"params": list(model.parameters())}], lambda group: None) == (1, 11)
    assert model.count == 12


def test_extra_state_that_changes_is_saved() -> None:
    model, store = Ways(1, 1), StateCopy()
    state = ReplicatedState(model, [], [])
    for _ in range(3):
        state.save(store, 0)
        count, model.count = model.count, 0
        state.load(store, 0)
        assert model.count == count + 1  # asked for once more, after it was set


# --- the slots of a model's tensors -----------------------------------------------------------------


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_replaced_buffers_are_found_in_their_slots() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    slots = TensorSlots(model)
    model[1].running_mean = torch.ones(3)
    model[1].num_batches_tracked = torch.ones(())
    assert slots.refresh() and slots.refresh()
    now, walked = slots.tensors, named(model)
    assert list(now) == list(walked)
    assert all(now[name] is walked[name] for name in now)


def test_what_comes_and_goes_is_noticed() -> None:
    for change in (
        lambda model: model[0].register_buffer("more", torch.zeros(1)),
        lambda model: model[0].register_parameter("more", nn.Parameter(torch.zeros(1))),
        lambda model: model.append(nn.ReLU()),
        lambda model: delattr(model[0], "bias"),
        lambda model: setattr(model[0], "bias", None),
        lambda model: model.__delitem__(1),
        lambda model: setattr(model[1], "empty", torch.zeros(1)),
        lambda model: model.__setitem__(0, nn.Linear(2, 3)),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(3, 2))),
        lambda model: setattr(model[1], "running_mean", model[1].running_var),
    ):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        model[1].register_buffer("empty", None)
        slots = TensorSlots(model)
        assert slots.refresh()
        change(model)
        assert not slots.refresh()
        assert not slots.refresh()


def test_what_no_module_holds_is_looked_for_each_time() -> None:
    class Unusual(nn.Linear):
        elsewhere: Any = (nn.Parameter(torch.zeros(1)),)

        def named_parameters(self, *args: object, **kwargs: object) -> Any:
            return iter([(f"elsewhere.{i}", one) for i, one in enumerate(self.elsewhere)])

    model = Unusual(1, 1)
    slots = TensorSlots(model)
    assert slots.refresh()
    for elsewhere in ([nn.Parameter(torch.zeros(1))], [*model.elsewhere, nn.Parameter(torch.zeros(1))], []):
        model.elsewhere = elsewhere
        assert not slots.refresh()


@pytest.mark.filterwarnings("ignore:.*torch.jit:Warning")
def test_a_scripted_part_is_looked_at() -> None:
    model = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)), nn.Linear(1, 1))
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    assert looks(model, groups, lambda group: model[0](torch.randn(4, 2))) == (1, 11)
    slots = TensorSlots(model)
    model[0].running_mean = torch.ones(2)
    assert not slots.refresh()
