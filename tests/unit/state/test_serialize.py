"""State as plain values: what is packed can be read back, or is refused when it is packed."""

from __future__ import annotations

import collections
import enum
import fractions
import math
import random
import struct
import types
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecemb.errors import ConfigurationError, InconsistentArenas
from ecemb.state.serialize import Packer, dump, load, plain, unpacked, with_scalars


def test_plain_values_come_back_as_they_were() -> None:
    value = {
        "numbers": [0, -1, 2**80, 1.5, math.inf, True, 1 + 2j],
        "text": ("", "ü", b"\x00\xff", b"", [b""]),
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


SCALARS = [
    np.float64(0.1),
    np.float32(0.1),
    np.float16(0.1),
    np.float64("-0.0"),
    np.float32("nan"),
    np.int8(-3),
    np.int32(3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.str_("abc"),
    np.str_(""),
    np.str_("a\0"),
    np.bytes_(b"ab\0\0"),
    np.datetime64(12345, "ns"),
]


def test_scalars_of_numpy_keep_their_type_and_their_bits() -> None:
    """A metric's mean is one, and a rate that became a float of 64 bits would round otherwise."""
    value = {"all": SCALARS, "one": (SCALARS[1],)}
    for got in (load(dump(value)), unpacked(Packer().pack(value)), with_scalars(plain(value))):
        for kept, one in zip([*got["all"], *got["one"]], [*SCALARS, SCALARS[1]], strict=True):
            assert kept.dtype == one.dtype and type(kept) is type(one)
            assert kept.tobytes() == one.tobytes()


def test_a_key_of_numpy_finds_what_it_found() -> None:
    assert load(dump({np.int64(3): "a"}))[np.int64(3)] == "a"
    with pytest.raises(ConfigurationError, match="a key in state is a numpy.datetime64"):
        plain({np.datetime64(5, "ns"): "a"})


def test_mappings_that_come_back_as_another_type_are_refused() -> None:
    for value in (types.MappingProxyType({"a": 1}), collections.defaultdict(int, b=1)):
        with pytest.raises(ConfigurationError, match=rf"history\['seen'\] is a .*{type(value).__qualname__}"):
            plain({"seen": value}, at="history")


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
        np.longdouble(1),
        np.datetime64("2026-01-01"),
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


# --- packed again and again -----------------------------------------------------------------------


def exact(value: Any) -> Any:
    """A description of a structure by types and bits, which == doesn't tell apart."""
    if isinstance(value, dict):
        return type(value), [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).tolist()
        return type(value), value.dtype, value.shape, value.requires_grad, data
    if isinstance(value, float):
        return float, struct.pack("<d", value)
    if isinstance(value, complex):
        return complex, struct.pack("<dd", value.real, value.imag)
    return type(value), value


TENSORS = st.builds(
    lambda dtype, size, turned: torch.arange(4 * size).reshape(4, size).to(dtype).T[: size if turned else 1],
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    st.integers(0, 40),
    st.booleans(),
)
NUMBERS = st.one_of(
    st.booleans(), st.integers(-2, 2), st.integers(), st.sampled_from([0.0, -0.0, math.nan, 1.0]), st.floats()
)
KEYS = st.one_of(st.text(max_size=2), st.integers(0, 1), st.booleans(), st.sampled_from([0.0, -0.0, None]))
LEAVES = st.one_of(
    NUMBERS,
    TENSORS,
    st.text(max_size=3),
    st.binary(max_size=3),
    st.none(),
    st.sampled_from([complex(0.0, -0.0), 0j, torch.Size([]), torch.Size([2]), torch.bfloat16]),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(collections.Counter),
    ),
    max_leaves=12,
)
COUNTED = st.builds(
    lambda rate, at, flag, data: {"rate": rate, "at": [at, (at, flag)], "data": torch.tensor(data)},
    *(NUMBERS, NUMBERS, NUMBERS, st.lists(st.floats(width=32), min_size=2, max_size=2)),
)


@pytest.mark.slow
@given(st.lists(st.one_of(COUNTED, STATES), min_size=1, max_size=6))
def test_what_is_packed_again_comes_back_with_its_types_and_bits(values: list[Any]) -> None:
    """Whether the structure is that of the call before, differs from it, or is only equal to it."""
    packer = Packer()
    for value in values:
        data = packer.pack(value)
        assert exact(unpacked(data)) == exact(load(dump(plain(value))))
        assert data == packer.pack(value) == Packer().pack(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (0j, complex(0.0, -0.0)),
        ({1: None}, {True: None}),
        ({0.0: None}, {-0.0: None}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([({"a": 1, "b": 2},)], [({"b": 2, "a": 1},)]),
        ({"a": 1}, collections.OrderedDict(a=1)),
        ({"a": 1}, collections.Counter(a=1)),
        (collections.Counter(), collections.Counter(a=0)),
        ((), torch.Size([])),
        ((2,), torch.Size([2])),
        ("a", b"a"),
        (2**63, -(2**63)),
        (2**63 - 1, 2**63),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), -torch.zeros(2)),
        (torch.zeros(100), torch.zeros(100, requires_grad=True)),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2)),
    ],
)
def test_what_only_looks_equal_is_told_apart(one: Any, other: Any) -> None:
    packer = Packer()
    for value in (one, other, one):
        assert exact(unpacked(packer.pack({"it": value}))["it"]) == exact(value)


def test_an_outline_is_dumped_once() -> None:
    packer = Packer()
    with mock.patch("ecemb.state.serialize.dump", wraps=dump) as dumped:
        for i in range(5):
            packer.pack({"step": i, "rate": 0.1 * i, "large": torch.arange(100) + i, "at": [np.int64(i)]})
        assert dumped.call_count == 1
        packer.pack({"step": True})
        assert dumped.call_count == 2


def test_a_tensor_that_several_have_is_packed_once() -> None:
    """Loaders' positions have one tensor of 13 KB in common."""
    large, small = torch.arange(1000), torch.arange(2)
    got = unpacked(data := Packer().pack({"a": [small, large, large[:500]], "b": large, "c": small}))
    assert len(data) < 1.7 * large.nbytes
    assert got["b"] is got["a"][1] and torch.equal(got["b"], large)
    assert torch.equal(got["a"][2], large[:500]) and torch.equal(got["c"], small)
    got["c"].add_(1)
    assert torch.equal(got["a"][0], small)


def test_a_value_that_cannot_be_read_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigurationError, match=r"the scalars\['a'\]\[1\] is a builtins.set"):
        Packer().pack({"a": [1, set()]}, "the scalars")


def test_damaged_bytes_raise_or_are_other_values(seed: int) -> None:
    """Checksums are the storage's business."""
    rng = random.Random(seed)
    good = Packer().pack({"a": [1, 2.5, 2**70], "b": (torch.arange(3), torch.arange(100)), "c": {"d": "e"}})
    told = 0
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        try:
            unpacked(bytes(bad))
        except InconsistentArenas:
            told += 1
    assert told > 30
    for bad in (b"", good[:7], good[:-1], good + b"\0", good[:8], bytes(100)):
        with pytest.raises(InconsistentArenas, match=f"{len(bad)} bytes of packed state can't be read back"):
            unpacked(bad)
