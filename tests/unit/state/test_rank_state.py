"""What differs by rank comes back as it was: generators, tables' scalars, the user's objects."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ecemb.coding.rows import WORD_BYTES, arrange
from ecemb.errors import ConfigurationError, InconsistentArenas, LayoutMismatch, StepFailed
from ecemb.state import rank_state
from ecemb.state.rank_state import RankState
from support.refusals import refused

pytestmark = pytest.mark.usefixtures("kept_generators")


class Counter:
    """The smallest thing that has a state."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> Mapping[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: Any) -> None:
        self.state = dict(state_dict)


def state_of(*stateful: Any, scalars: dict[str, Any] | None = None) -> RankState:
    kept = {} if scalars is None else scalars
    return RankState(stateful, lambda: dict(kept), kept.update)


def draw() -> tuple[list[float], ...]:
    return (
        torch.randn(7).tolist(),
        torch.randperm(5).tolist(),
        np.random.standard_normal(3).tolist(),
        [float(np.random.randint(1000))],
        [random.random(), random.gauss(0, 1)],
    )


@pytest.mark.parametrize("before", [0, 1, 700])
def test_all_generators_go_on_where_they_were(before: int, seed: int) -> None:
    """Also in the middle of a pair of normal numbers, which numpy and python draw two at a time."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    for _ in range(before):
        np.random.standard_normal()
        random.gauss(0, 1)
        torch.rand(())
    data = state_of().pack()
    expected = draw()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    state_of().unpack(data)
    assert draw() == expected


def test_packing_changes_nothing_and_is_repeatable() -> None:
    """It happens in every step: it must draw nothing, and equal state gives equal bytes."""
    state = state_of(Counter(a=1), scalars={"t": {"step": 3}})
    first = state.pack()
    before = torch.get_rng_state()
    assert state.pack() == first
    assert torch.equal(torch.get_rng_state(), before)


def test_scalars_and_objects_come_back() -> None:
    tensor = torch.tensor([1.5, -0.0], dtype=torch.bfloat16)
    counter = Counter(best=0.25, seen=[1, 2], tensor=tensor, scalar=torch.tensor(7), nothing=None)
    scalars: dict[str, Any] = {"user": {"step": torch.tensor(3.0)}, "item": {"step": 4}}
    data = state_of(counter, scalars=scalars).pack()
    fresh, others = Counter(), {"user": {"step": torch.tensor(0.0)}, "item": {"step": 0}}
    state_of(fresh, scalars=others).unpack(data)
    assert fresh.state["best"] == 0.25
    assert fresh.state["seen"] == [1, 2]
    assert fresh.state["nothing"] is None
    assert torch.equal(fresh.state["tensor"].view(torch.int16), tensor.view(torch.int16))
    assert fresh.state["scalar"].shape == ()
    assert others == scalars


def test_learning_rate_schedules_go_on() -> None:
    def training() -> tuple[torch.optim.Optimizer, list[Any]]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=5)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return optimizer, [warm, decay, plateau]

    def run(optimizer: torch.optim.Optimizer, schedules: list[Any], steps: range) -> list[float]:
        rates: list[float] = []
        for step in steps:
            optimizer.step()
            schedules[0].step()
            schedules[1].step()
            schedules[2].step(np.float64(step // 3))  # metrics are numpy's numbers, as a rule
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, schedules = training()
    run(optimizer, schedules, range(4))
    data, rate = state_of(*schedules).pack(), optimizer.param_groups[0]["lr"]
    expected = run(optimizer, schedules, range(4, 9))
    optimizer, schedules = training()
    optimizer.step()
    state_of(*schedules).unpack(data)
    optimizer.param_groups[0]["lr"] = rate  # options of optimizers are replicated state
    assert run(optimizer, schedules, range(4, 9)) == expected


def test_an_object_without_the_two_methods_is_refused() -> None:
    for item in (object(), {"a": 1}, [1], 7):
        with pytest.raises(ConfigurationError, match=f"{type(item).__name__} lacks one of them"):
            state_of(item)


@pytest.mark.parametrize(
    "value", [object(), {1}, np.zeros(2), lambda: 0], ids=["object", "set", "array", "function"]
)
def test_a_state_that_weights_only_refuses_fails_at_once(value: object) -> None:
    """No pickle is loaded, and a type it refuses is found in protect()."""
    with pytest.raises(ConfigurationError, match=r"\(Counter\).state_dict\(\)\['x'\].*weights_only=True"):
        state_of(Counter(x=value))


def test_a_state_that_becomes_unreadable_later_fails_when_it_is_packed() -> None:
    counter = Counter(x=1)
    state = state_of(counter)
    counter.state["x"] = {1}
    with pytest.raises(ConfigurationError, match="is a builtins.set"):
        state.pack()


def test_a_state_dict_that_raises_is_not_hidden() -> None:
    class Broken(Counter):
        def state_dict(self) -> Mapping[str, Any]:
            raise NotImplementedError

    with pytest.raises(NotImplementedError):
        state_of(Broken())


def test_another_number_of_objects_than_was_packed_is_an_error() -> None:
    data = state_of(Counter(a=1)).pack()
    with pytest.raises(LayoutMismatch, match=r"objects in state= is 2, and was 1"):
        state_of(Counter(), At("more")).unpack(data)


def test_a_new_rank_takes_what_all_others_had_alike() -> None:
    """A schedule is the same on all ranks, a count of samples isn't; two objects may even be one on some."""
    states = [
        state_of(Counter(epoch=3, rate=0.1), At("seen", seen), scalars={"step": 9}).pack() for seen in (5, 6)
    ]
    schedule, seen, scalars = Counter(), At("seen"), {"step": 0}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    state_of(schedule, seen, scalars=scalars).unpack_common(states)
    assert (schedule.state, seen.state, scalars) == ({"epoch": 3, "rate": 0.1}, {"at": 0}, {"step": 9})
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(LayoutMismatch, match=r"objects in state= is 1, and was 2"):
        state_of(Counter()).unpack_common(states)


class At(Counter):
    """A position."""

    def __init__(self, name: str, at: int = 0) -> None:
        super().__init__(at=at)
        self.name = name


def test_positions_go_on_where_they_were_packed_in_the_order_they_are_bound() -> None:
    state = state_of(Counter(a=1))
    for name, at in (("first", 1), ("second", 2)):
        state.bind(At(name, at))
    state.positions[0].load_state_dict({"at": 5})
    fresh = state_of(Counter())
    fresh.unpack(state.pack())
    data = fresh.pack()  # positions that are not bound yet are kept
    again = state_of(Counter())
    again.unpack(data)
    assert again.pack() == data
    first, second = At("first"), At("second")
    again.bind(first)
    assert again.pack() == data
    again.bind(second)
    assert (first.state, second.state) == ({"at": 5}, {"at": 2})
    assert again.pack() == data and again.positions == [first, second]
    third = At("third", 7)
    again.bind(third)
    third.state["at"] = 8
    again.unpack(data)
    assert third.state == {"at": 7}  # bound since: as it was then


def test_a_generator_of_a_device_follows_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker may be on another device after a restart, and on a host with fewer."""
    states = [torch.tensor([i]) for i in range(3)]
    here = {"current": 1, "count": 3}
    held: dict[int, int] = {}
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: here["current"],
        device_count=lambda: here["count"],
        get_rng_state_all=lambda: states,
        set_rng_state=lambda state, device: held.update({device: int(state)}),
    )
    monkeypatch.setattr("ecemb.state.rank_state.torch.cuda", cuda)
    data = state_of().pack()
    for current, count, expected in (
        (1, 3, {0: 0, 1: 1, 2: 2}),
        (0, 3, {0: 1, 1: 0, 2: 2}),
        (0, 1, {0: 1}),
        (0, 0, {}),
    ):
        here.update(current=current, count=count)
        held.clear()
        state_of().unpack(data)
        assert held == expected


def test_positions_may_be_left_where_they_are() -> None:
    counter, position = Counter(a=1), At("one", 1)
    state = state_of(counter)
    state.bind(position)
    data = state.pack()
    counter.state, position.state = {"a": 2}, {"at": 2}
    state.unpack(data, positions=False)
    assert (counter.state, position.state) == ({"a": 1}, {"at": 2})
    state.unpack(data)
    assert position.state == {"at": 1}


def test_a_position_that_is_refused_is_still_there_for_another() -> None:
    class Picky(At):
        def load_state_dict(self, state_dict: Any) -> None:
            raise LayoutMismatch("another's")

    state, again = state_of(), state_of()
    state.bind(At("one", 1))
    again.unpack(state.pack())
    with pytest.raises(LayoutMismatch):
        again.bind(Picky("one"))
    position = At("one")
    again.bind(position)
    assert position.state == {"at": 1} and again.positions == [position]


def test_a_state_that_takes_more_than_its_room_names_the_largest_part() -> None:
    state = state_of(Counter(log=torch.zeros(5000)), scalars={"t": {"step": 1}})
    state.room_bytes = len(state.pack()) + 8
    state.pack()
    state.room_bytes -= 1
    with pytest.raises(
        StepFailed, match=r"largest part is state= object 0 \(Counter\) with 2\d{4} bytes.*logs"
    ):
        state.pack()
    state.bind(At("the data"))
    state.positions[0].load_state_dict({"at": torch.zeros(9000)})
    with pytest.raises(StepFailed, match="largest part is the data with 3"):
        state.pack()


def test_states_of_earlier_versions_are_read() -> None:
    """Checkpoints may have them."""
    scalars: dict[str, Any] = {"t": {"step": torch.tensor(4.0), "rate": 0.5}}
    torch.manual_seed(3)
    drawn, parts = rank_state._taken_apart(state_of(Counter(a=(1, 2.5)), scalars=scalars).pack())
    states, rest = rank_state.dump(drawn), rank_state.dump(parts)
    old = rank_state._SIZE.pack(len(states)) + states + rest
    torch.manual_seed(4)
    counter, kept = Counter(), {"t": {"step": torch.tensor(0.0), "rate": 0.0}}
    state_of(counter, scalars=kept).unpack(old)
    assert (counter.state, kept, torch.initial_seed()) == ({"a": (1, 2.5)}, scalars, 3)


def test_only_what_has_changed_differs_in_the_packed_bytes() -> None:
    """Scalars are in front, so the delta of a step that draws nothing ends there."""
    scalars: dict[str, Any] = {"t": {"step": 1, "rate": 0.5, "name": "Adagrad"}}
    state = state_of(Counter(a=1), scalars=scalars)
    before = np.frombuffer(state.pack(), np.uint8)
    scalars["t"]["step"] = 2
    after = np.frombuffer(state.pack(), np.uint8)
    assert len(before) == len(after) > 10_000
    assert np.flatnonzero(before != after).tolist() == [rank_state._SIZES.size + 8]


def test_a_change_between_steps_is_told_by_its_kind() -> None:
    scalars: dict[str, Any] = {"t": {"step": 1, "nan": float("nan"), "rate": torch.tensor([0.5])}}
    state = state_of(scalars=scalars)
    assert state.moved() == {}
    state.pack()
    assert state.moved() == {}
    scalars["t"]["rate"] = torch.tensor([0.5])
    assert state.moved() == {}
    packed = state.pack()
    scalars["t"]["step"] = True
    random.random()
    names = ["python's random generator", "options of a table's optimizer"]
    assert list(state.moved()) == names
    state.unpack(packed)
    assert state.moved() == {}


@pytest.mark.parametrize("tensor", [False, True])
def test_scalars_of_another_type_or_sign_have_changed(tensor: bool) -> None:
    """Whether tensors are among them or not."""
    scalars: dict[str, Any] = {"t": {"step": 1, "nan": float("nan"), "groups": [{"lr": 0.0}], "none": None}}
    if tensor:
        scalars["t"]["rate"] = torch.zeros(1)
    state = state_of(scalars=scalars)
    others = ("groups", [{"lr": -0.0}]), ("groups", [{"lr": np.float64(0)}]), ("none", 0)
    for key, value in (("step", True), ("step", 1.0), *others):
        then = scalars["t"][key]
        state.pack()
        scalars["t"] |= {key: value, "nan": float("nan")}
        assert list(state.moved()) == ["options of a table's optimizer"]
        scalars["t"][key] = then
        assert state.moved() == {}


def test_packed_state_that_is_cut_or_longer_is_damaged() -> None:
    data = state_of(Counter(a=1)).pack()
    for bad in (b"", b"ecemb rs", data[:20], data[:32], data[:-1], data + b"\0", bytes(40)):
        with pytest.raises(InconsistentArenas, match=f"{len(bad)} bytes of packed state|0 bytes of packed"):
            state_of(Counter()).unpack(bad)


# --- its record ---------------------------------------------------------------------------------


def test_the_record_holds_what_was_written_and_nothing_of_before() -> None:
    record = np.full(64, 0xFF, np.uint8)
    rank_state.write_(record, b"first, and longer")
    rank_state.write_(record, b"second")
    assert rank_state.read(record) == b"second"
    assert not record[8 + len(b"second") :].any()
    rank_state.write_(record, b"")
    assert rank_state.read(record) == b""


def test_a_record_that_was_never_written_is_empty() -> None:
    assert rank_state.read(np.zeros(64, np.uint8)) == b""


def test_the_room_lets_a_state_double() -> None:
    for size in (0, 1, 1000, 123_457):
        room = rank_state.room(size)
        assert room % WORD_BYTES == 0
        rank_state.write_(np.zeros(room, np.uint8), bytes(2 * size + 16000))
        assert rank_state.layout(room).words * WORD_BYTES == room


def test_the_layout_is_a_table_of_one_row() -> None:
    table = rank_state.layout(40)
    assert (table.rows, table.record_words, arrange([table])) == (1, 5, ([[0]], 64))


class Steps:
    """A counter."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Epochs(Steps):
    """Another one, whose state looks the same."""


def test_objects_in_another_order_are_an_error() -> None:
    def state(*objects: Steps) -> RankState:
        return RankState(objects, dict, lambda _: None)

    data = state(Steps(), Epochs()).pack()
    state(Steps(), Epochs()).unpack(data)
    with pytest.raises(LayoutMismatch, match=r"state= object 0 is a .*Epochs, and was a .*Steps"):
        state(Epochs(), Steps()).unpack(data)


def named(**objects: Any) -> RankState:
    return RankState(objects, dict, lambda _: None)


def test_objects_of_one_class_come_back_by_name() -> None:
    data = named(warmup=Counter(at=1), decay=Counter(at=2)).pack()
    warmup, decay = Counter(), Counter()
    named(decay=decay, warmup=warmup).unpack(data)
    assert (warmup.state, decay.state) == ({"at": 1}, {"at": 2})
    warmup, decay = Counter(), Counter()
    named(decay=decay, warmup=warmup).unpack_common([data, data])
    assert (warmup.state, decay.state) == ({"at": 1}, {"at": 2})


def test_a_job_that_was_started_without_objects_names_none() -> None:
    with refused(
        LayoutMismatch, "state= has an object 'seen'", "pass no objects in state=, or use another job="
    ):
        named(seen=Counter()).unpack(named().pack())


@pytest.mark.parametrize(
    ("now", "text"),
    [
        ({"warmup": Counter()}, r"state= has no object 'decay', and had one .*\('warmup', 'decay'\)"),
        ({}, r"state= has no object 'warmup', and had one"),
        (
            {"warmup": Counter(), "decay": Counter(), "seen": Counter()},
            r"state= has an object 'seen', and had none of that name",
        ),
        (
            {"decay": Epochs(), "warmup": Counter()},
            r"state= object 'decay' is a .*Epochs, and was a .*Counter .* under their original names",
        ),
    ],
)
def test_objects_under_other_names_are_an_error(now: dict[str, Any], text: str) -> None:
    data = named(warmup=Counter(at=1), decay=Counter(at=2)).pack()
    kept = [item.state for item in now.values() if isinstance(item, Counter)]
    for call in (lambda: named(**now).unpack(data), lambda: named(**now).unpack_common([data])):
        with pytest.raises(LayoutMismatch, match=text):
            call()
    assert [item.state for item in now.values() if isinstance(item, Counter)] == kept


def test_states_without_names_go_by_order() -> None:
    """Those of a list; and those that were saved before there were names, also of one class."""
    counter, steps = Counter(), Steps()
    named(first=counter, second=steps).unpack(state_of(Counter(at=1), Steps()).pack())
    assert counter.state == {"at": 1}
    state_of(counter, steps).unpack(named(one=Counter(at=5), other=Steps()).pack())
    assert counter.state == {"at": 5}
    drawn, parts = rank_state._taken_apart(named(a=Counter(at=1), b=Counter(at=2)).pack())
    for unknown in ("names", "kinds"):
        del parts[unknown]
        states, rest = rank_state.dump(drawn), rank_state.dump(parts)
        old = rank_state._SIZE.pack(len(states)) + states + rest
        warmup, decay = Counter(), Counter()
        named(warmup=warmup, decay=decay).unpack(old)
        assert (warmup.state, decay.state) == ({"at": 1}, {"at": 2})
        with pytest.raises(LayoutMismatch, match=r"objects in state= is 1, and was 2"):
            named(warmup=warmup).unpack(old)


class Tally(Counter, dict[str, int]):
    """A mapping with a state of its own: one object, not several with names."""


def test_what_may_be_given_as_state() -> None:
    counter, steps, tally = Counter(), Steps(), Tally()
    assert rank_state.objects_of(None) == {}
    assert rank_state.objects_of(counter) == {0: counter}
    assert rank_state.objects_of(tally) == {0: tally}
    assert rank_state.objects_of((counter, steps)) == {0: counter, 1: steps}
    assert list(rank_state.objects_of({"b": counter, "a": Counter()})) == ["b", "a"]
    for given, text in (
        ([steps, counter, Counter()], r"objects 1 and 2 in state= both have .*Counter.*state=\{\"warmup\": "),
        ({3: counter}, "keys are strings.*; 3 is not a string"),
        ({"dice": random.Random(1)}, "Random lacks one of them"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            rank_state.objects_of(given)
