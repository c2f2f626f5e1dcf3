"""Tables of several engines, numbered through: each call goes to the engine whose table it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ecemb.coding.rows import Column, TableLayout
from ecemb.engines.contract import Hooks, Ids
from ecemb.engines.discover import Tables, find
from ecemb.errors import ConfigurationError, UnsupportedTable, UsageError
from support.refusals import refused


@dataclasses.dataclass
class OneTable:
    name: str
    layout: TableLayout
    is_off_arena: bool = False


class Recorder:
    """An engine that records what it is asked."""

    def __init__(self, name: str, tables: Sequence[str]) -> None:
        self.name = name
        columns = (Column("weight", "float32", 4),)
        self.tables = [OneTable(key, TableLayout(key, 5, columns)) for key in tables]
        self.parameters: list[Any] = [f"{name} parameter"]
        self.left_out: list[Any] = [f"{name} module"]
        self.calls: list[tuple[Any, ...]] = []
        self.hooks: Hooks | None = None

    def place(self, stored: Sequence[Any], *, fresh: bool) -> None:
        self.calls.append(("place", list(stored), fresh))

    def watch(self, hooks: Hooks) -> None:
        self.hooks = hooks

    def unwatch(self) -> None:
        self.hooks = None

    def touch(self, index: int, ids: Ids) -> None:
        self.calls.append(("touch", index, ids.tolist()))

    def touch_all(self, index: int) -> None:
        self.calls.append(("touch_all", index))

    def check(self) -> None:
        self.calls.append(("check",))

    def mark_clean(self) -> None:
        self.calls.append(("mark_clean",))

    def state(self) -> dict[str, Any]:
        return {"of": self.name}

    def set_state(self, state: Mapping[str, Any], renamed: Mapping[str, str]) -> None:
        self.calls.append(("set_state", dict(state), dict(renamed)))


def three() -> tuple[Tables, list[Recorder]]:
    engines = [Recorder("first", ["a", "b"]), Recorder("none", []), Recorder("last", ["c"])]
    return Tables(engines), engines


def test_each_engine_gets_its_own() -> None:
    tables, (first, none, last) = three()
    assert [table.name for table in tables.tables] == ["a", "b", "c"]
    stored: list[Any] = [10, 11, 12]
    tables.place(stored, fresh=True)
    assert first.calls == [("place", [10, 11], True)]
    assert none.calls == [("place", [], True)] and last.calls == [("place", [12], True)]
    assert tables.parameters == ["first parameter", "none parameter", "last parameter"]
    assert tables.left_out == ["first module", "none module", "last module"]
    for call in (tables.check, tables.mark_clean):
        call()
        assert all(engine.calls[-1] == (call.__name__,) for engine in (first, none, last))


def test_captured_tables_are_numbered_through() -> None:
    tables, (first, none, last) = three()
    captured: list[tuple[int, list[int]]] = []
    tables.watch(Hooks(lambda index, ids: captured.append((index, ids.tolist())), lambda: True, list))
    for engine in (last, first):
        assert engine.hooks is not None
        for number in range(len(engine.tables)):
            engine.hooks.capture(number, np.array([number]))
    assert captured == [(2, [0]), (0, [0]), (1, [1])]
    tables.unwatch()
    assert first.hooks is None and none.hooks is None and last.hooks is None


def test_a_declared_write_goes_to_its_table() -> None:
    tables, (first, _, last) = three()
    is_open = False
    with refused(UsageError, "inside `with guard.step():`"):
        tables.touch("a", torch.tensor([1]))
    tables.watch(Hooks(lambda *_: None, lambda: is_open, list))
    with refused(UsageError, "inside `with guard.step():`"):
        tables.touch("a", torch.tensor([1]))
    is_open = True
    tables.touch("b", torch.tensor([[3, 1], [3, 0]], dtype=torch.int32))
    tables.touch("c", torch.tensor([], dtype=torch.int64))
    tables.touch("c")
    assert first.calls == [("touch", 1, [0, 1, 3])]
    assert last.calls == [("touch", 0, []), ("touch_all", 0)]
    with refused(UsageError, "'d'", "['a', 'b', 'c']"):
        tables.touch("d", torch.tensor([1]))
    for rows in ([5], [-1], [0, 7]):
        with refused(UsageError, "0..4", "local shard"):
            tables.touch("a", torch.tensor(rows))
    given: Any
    for given, told in (
        (torch.tensor([False, True]), "a bool tensor: of a mask, pass mask.nonzero()"),
        (torch.tensor([1.0]), "a float32 tensor"),
        ([1, 2], "a list"),
        (np.array([1, 2]), "a ndarray"),
    ):
        with refused(UsageError, "guard.touch('a', …) takes row numbers, an integer tensor", told):
            tables.touch("a", given)
    assert len(first.calls) == 1


def test_two_tables_of_one_name_are_refused() -> None:
    with refused(ConfigurationError, "['b']", "rename in tables="):
        Tables([Recorder("first", ["a", "b"]), Recorder("last", ["b"])])


def test_state_is_by_engine() -> None:
    tables, (first, _, last) = three()
    state = tables.state()
    assert state == {name: {"of": name} for name in ("first", "none", "last")}
    tables.set_state(state)
    assert first.calls == [("set_state", {"of": "first"}, {})]
    tables.set_state({"first": {}, "new": {}}, {"a": "x"})  # tables of the others were of the new one's
    assert first.calls[1:] == [("set_state", {}, {"a": "x"})] and len(last.calls) == 1


def test_rows_of_a_group_are_told_by_table() -> None:
    engine = Recorder("one", ["a", "b", "c"])
    columns = engine.tables[0].layout.columns
    for table, rows in zip(engine.tables, (5, 0, 3), strict=True):
        table.layout = TableLayout(table.name, rows, columns, group="together")
    tables = Tables([Recorder("none", ["x"]), engine])
    heard: list[tuple[int, list[int]]] = []
    tables.listen(lambda index, ids: heard.append((index, ids.tolist())))
    assert engine.hooks is not None
    engine.hooks.capture(0, np.array([7, 1, 5, 1]))
    engine.hooks.capture(2, np.array([2]))
    assert heard == [(1, [1, 1]), (3, [2, 0]), (3, [2])]


@pytest.mark.parametrize("other", ["table", "parameter", "buffer", "a part of it"])
def test_a_table_in_the_memory_of_something_else_is_refused(other: str) -> None:
    """It would be moved away from it, so that one is trained without the other."""
    table, model = nn.Embedding(6, 2, sparse=True), nn.Module()
    model.table = table
    weight = table.weight.detach()
    tables: dict[str, nn.Module] = {"table": table}
    if other == "table":
        tables["twin"] = nn.Embedding(6, 2, sparse=True, _weight=weight)
    elif other == "buffer":
        model.register_buffer("twin", weight)
    else:
        model.twin = nn.Parameter(weight if other == "parameter" else weight[2:4])
    with refused(UnsupportedTable, "'table'", "'twin'", "share memory", "the same nn.Parameter", "clone()"):
        find(model, tables, [])


def test_tables_beside_each_other_in_one_piece_of_memory_are_none_of_the_others() -> None:
    memory, model = torch.zeros(10, 2), nn.Module()
    tables: dict[str, nn.Module] = {
        name: nn.Embedding(len(part), 2, sparse=True, _weight=part)
        for name, part in (("a", memory[:4]), ("none", memory[4:4]), ("b", memory[4:8]))
    }
    model.a = model.again = tables["a"]
    model.dense, model.alias = nn.Parameter(memory[8:]), nn.Parameter(memory[8:])
    assert [table.name for table in find(model, tables, [])[0].tables] == ["a", "none", "b"]
