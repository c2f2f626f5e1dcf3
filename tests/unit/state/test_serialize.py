"""State as plain values: what is packed can be read back, or is refused when it is packed."""

from __future__ import annotations

import collections
import enum
import fractions
import math
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ecemb.errors import ConfigurationError
from ecemb.state.serialize import dump, load, plain


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "numbers": [0, -1, 2**80, 1.5, math.inf, True, 1 + 2j],
        "text": ("", "ü", b"\x00\xff"),
        "nothing": None,
        3: {"nested": ({}, [], ())},
        "kinds": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
    }
    got = load(dump(plain(value)))
    assert got == value
    assert type(got["numbers"][5]) is bool


def test_tensors_keep_their_bits() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64):
        tensor = torch.tensor([0, 1], dtype=dtype)
        got = load(dump(plain([tensor, tensor[0], tensor[:0]])))
        assert [(t.dtype, t.shape) for t in got] == [(dtype, (2,)), (dtype, ()), (dtype, (0,))]
        assert torch.equal(got[0], tensor)
    nan = torch.tensor([0x7FC0_1234], dtype=torch.int32).view(torch.float32)
    assert torch.equal(load(dump(plain(nan))).view(torch.int32), nan.view(torch.int32))


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 1000])
def test_small_tensors_and_large_ones_come_back_alike(size: int) -> None:
    for tensor in (torch.arange(size, dtype=torch.float64), torch.arange(2 * size).reshape(size, 2).T):
        got = load(dump({"a": [tensor, (tensor, "text")]}))
        for one in (got["a"][0], got["a"][1][0]):
            assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(one, tensor)
            one.add_(0)  # it can be written
        assert got["a"][1][1] == "text"


def test_many_small_tensors_take_little_room() -> None:
    """An optimizer has a count of steps for each table."""
    assert len(dump([torch.tensor(7.0) for _ in range(100)])) < 100 * 100


def test_numbers_of_numpy_become_pythons() -> None:
    """A metric's mean is a numpy number, and weights_only refuses those."""
    got = plain({"best": np.float64(0.5), "epoch": np.int32(3), "done": np.bool_(True)})
    assert got == {"best": 0.5, "epoch": 3, "done": True}
    assert [type(value) for value in got.values()] == [float, int, bool]


def test_mappings_become_dicts() -> None:
    got = plain(types.MappingProxyType({"a": collections.defaultdict(int, b=1)}))
    assert got == {"a": {"b": 1}}
    assert type(got) is type(got["a"]) is dict


def test_dicts_that_can_be_read_back_keep_their_type() -> None:
    """MultiStepLR counts its milestones in a Counter; SequentialLR hands its state_dict on as it is."""
    value = {"seen": collections.Counter("abba"), "kept": collections.OrderedDict(b=[1], a=torch.arange(2))}
    got = load(dump(plain(value)))
    assert type(got["seen"]) is collections.Counter and got["seen"] == value["seen"]
    assert type(got["kept"]) is collections.OrderedDict and list(got["kept"]) == ["b", "a"]
    assert torch.equal(got["kept"]["a"], torch.arange(2))


def test_equal_structures_have_equal_bytes() -> None:
    """Ranks compare digests of them, and may have come by their strings in different ways."""
    one, other = "rate", "".join(["ra", "te"])
    assert one is not other
    assert dump([{one: 1}, {one: one}]) == dump([{one: 1}, {other: other}])


def test_views_that_torch_resolves_late_come_back() -> None:
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    got = load(dump(plain([conjugate, conjugate.imag])))
    assert torch.equal(got[0], conjugate) and torch.equal(got[1], conjugate.imag)


def test_a_tensor_of_another_device_comes_to_this_one() -> None:
    with mock.patch.object(torch.serialization, "location_tag", return_value="cuda:7"):
        data = dump(torch.arange(1000))
    assert torch.equal(load(data).cpu(), torch.arange(1000))


def test_tensors_can_be_taken_out_in_order() -> None:
    taken: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> object:
        taken.append(tensor)
        return len(taken)

    tensors = [torch.zeros(i) for i in range(3)]
    got = plain({"a": tensors[0], "b": [tensors[1], (tensors[2], 7)]}, take)
    assert got == {"a": 1, "b": [2, (3, 7)]}
    assert all(a is b for a, b in zip(taken, tensors, strict=True))


class Colour(enum.Enum):
    RED = 1


class Number(float):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        lambda: None,
        {1, 2},
        Colour.RED,
        Number(1.0),
        np.zeros(3),
        fractions.Fraction(1, 2),
        torch.Generator(),
        torch.nn.Linear(1, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_are_refused_with_their_place(value: Any) -> None:
    """Found when it is packed: found at a recovery it would cost the job."""
    name = type(value).__qualname__
    with pytest.raises(ConfigurationError, match=rf"history\['best'\]\[1\] is a .*{name}"):
        plain({"best": [1, value]}, at="history")
