"""Parts of the way to FBGEMM's tables that need no FBGEMM: versions, shards, views of moved storages."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import nn

from ecemb.engines import internals, torchrec
from ecemb.engines.contract import Move, repoint
from ecemb.engines.fbgemm import check_inside, local
from ecemb.engines.internals import own, version
from ecemb.errors import UnsupportedTable


def test_a_name_that_is_gone_is_an_error_with_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "version", lambda package: f"9.9 of {package}")
    thing = types.SimpleNamespace(there=None)
    assert own(thing, "there") is None
    with pytest.raises(UnsupportedTable) as caught:
        own(thing, "gone")
    for word in ("SimpleNamespace", "'gone'", "torchrec 9.9", "fbgemm-gpu 9.9", internals.TESTED, "install"):
        assert word in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


@pytest.mark.parametrize("there", [(), ("torchrec.distributed", "torchrec.distributed.types")])
def test_a_torchrec_that_lacks_something_says_what_to_install(
    there: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchrec"]:
        monkeypatch.delitem(sys.modules, name)
    assert torchrec.find(nn.Linear(1, 1)) is None
    for name in ("torchrec", *there):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(
        UnsupportedTable, match=r"ShardedModule of torchrec.*pip install --no-deps torchrec=="
    ):
        torchrec.find(nn.Linear(1, 1))


def test_versions_are_those_of_any_build() -> None:
    assert version("torch").split(".")[0].isdigit()
    assert version("no-such-package-of-ours") == "unknown"


def test_local_tensors_of_what_a_model_may_show() -> None:
    one, two = torch.ones(2), torch.zeros(3)

    class Sharded:
        """As ShardedTensor and LocalShardsWrapper have it."""

        def __init__(self, shards: list[Any]) -> None:
            self.shards = shards

        def local_shards(self) -> list[Any]:
            return self.shards

    class Distributed:
        """As DTensor has it."""

        def __init__(self, value: Any) -> None:
            self.value = value

        def to_local(self) -> Any:
            return self.value

    assert local(one) == [one]
    assert local(Sharded([types.SimpleNamespace(tensor=one), types.SimpleNamespace(tensor=two)])) == [
        one,
        two,
    ]
    assert local(Distributed(one)) == [one]
    assert local(Distributed(Sharded([one, two]))) == [one, two]


def test_all_views_follow_a_storage_that_moves() -> None:
    old, other = torch.arange(24.0), torch.arange(24.0)
    parameter = nn.Parameter(old.view(4, 6))
    holder = {"row": old.view(4, 6)[2], "column": old.view(4, 6)[:, 1], "tail": old[20:], "empty": old[:0]}
    bystander = other[3:]
    graph = (old.clone().requires_grad_() * 2).detach()
    span = torch.arange(24.0) + 100
    storage = old.untyped_storage()
    repoint([Move(storage, span)])
    assert old.data_ptr() == span.data_ptr() == parameter.data_ptr()
    assert parameter.shape == (4, 6) and parameter.requires_grad and parameter.is_leaf
    assert holder["row"].tolist() == [112.0, 113.0, 114.0, 115.0, 116.0, 117.0]
    assert holder["column"].tolist() == [101.0, 107.0, 113.0, 119.0] and holder["column"].stride() == (6,)
    assert holder["tail"].tolist() == [120.0, 121.0, 122.0, 123.0]
    assert bystander.tolist() == other[3:].tolist() and graph.data_ptr() != span.data_ptr()
    span[0] = 7
    assert parameter[0, 0].item() == 7


def test_a_view_outside_of_the_arena_is_refused() -> None:
    spans = [torch.zeros(4), torch.zeros(6)]
    check_inside("tables", [spans[0][3:], spans[1], torch.empty(0)], spans)
    with pytest.raises(UnsupportedTable, match=r"gc.unfreeze\(\) before ecemb.protect\(\)"):
        check_inside("tables", [spans[0], torch.zeros(1)], spans)
