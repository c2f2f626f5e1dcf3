"""The public way to tables: what is reported is what changes, protected or not; nothing else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ecemb
from ecemb.coding.rows import TableLayout
from ecemb.engines.contract import Hooks
from ecemb.engines.discover import LiveTable, find
from ecemb.errors import ConfigurationError, UndeclaredWrite, UnsupportedTable
from support.refusals import refused
from support.row_listener import Heard

Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], set[str]]] = {
    "sgd": (torch.optim.SGD, set()),
    "adagrad": (torch.optim.Adagrad, {"sum"}),
    "sparse-adam": (torch.optim.SparseAdam, {"exp_avg", "exp_avg_sq"}),
}
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class Model(nn.Module):
    """Two tables and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.user = ecemb.nn.ShardedEmbeddingBag(9, 4)
        self.item = ecemb.nn.ShardedEmbeddingBag(5, 2)
        self.head = nn.Linear(1, 1)


def built(kind: str = "adagrad") -> tuple[Model, Optimizer]:
    model = Model()
    make, _ = OPTIMIZERS[kind]
    return model, make([model.user.weight, model.item.weight], lr=0.5)


def train(model: Model, optimizer: Optimizer, users: list[int], items: list[int]) -> None:
    optimizer.zero_grad()
    loss = model.user(torch.tensor([users])).sum() + model.item(torch.tensor([items])).sum()
    loss.backward()
    optimizer.step()


def test_what_is_no_optimizer_is_refused() -> None:
    model, _ = built()
    with refused(ConfigurationError, "optimizers=", "torch.optim.SGD", "Linear"):
        ecemb.tables(model, optimizers=[nn.Linear(1, 1)])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["list", "EmbeddingBag"])
def test_tables_without_keys_are_refused(name: str) -> None:
    table = nn.EmbeddingBag(3, 2, sparse=True)
    given: Any = {"list": [table], "EmbeddingBag": table}[name]
    with refused(ConfigurationError, "tables= takes a mapping", "{'user': table}", f"it is a {name}"):
        ecemb.tables(nn.Module(), tables=given)


def test_a_table_with_an_empty_name_is_refused() -> None:
    with refused(ConfigurationError, "tables= takes a mapping", "'' is empty: give this table a name"):
        ecemb.tables(nn.Module(), tables={"": nn.EmbeddingBag(3, 2, sparse=True)})


def test_a_module_dict_has_keys() -> None:
    given: Any = nn.ModuleDict({"user": nn.EmbeddingBag(3, 2, sparse=True)})
    assert [table.name for table in ecemb.tables(nn.Module(), tables=given)] == ["user"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_are_told_before_they_change_without_a_guard(kind: str) -> None:
    model, optimizer = built(kind)
    tables = ecemb.tables(model, optimizers=optimizer)
    assert [(table.name, table.rows) for table in tables] == [("user", 9), ("item", 5)]
    heard = Heard(tables)
    model.user(torch.tensor([[8]])).sum().backward()  # no step: nothing changes
    with torch.no_grad():
        model.item(torch.tensor([[1]]))
    assert heard.rows == heard.changed() == {"user": set(), "item": set()}
    train(model, optimizer, [1, 4, 4], [0])
    assert heard.rows == heard.changed() == {"user": {1, 4}, "item": {0}}
    assert set(tables[0].tensors) == {"weight"} | OPTIMIZERS[kind][1]


def test_tensors_are_the_trainings_own() -> None:
    model, optimizer = built()
    user, _ = ecemb.tables(model, optimizers=[optimizer])
    for tensor in user.tensors.values():
        tensor[3] = 7
    assert model.user.weight[3].tolist() == optimizer.state[model.user.weight]["sum"][3].tolist() == [7] * 4


def test_shards_say_where_they_stand() -> None:
    model, optimizer = built()
    by_hand = nn.Embedding(3, 2, sparse=True)
    both = torch.optim.SGD(by_hand.parameters(), lr=0.5)
    tables = ecemb.tables(model, optimizers=[optimizer, both], tables={"by hand": by_hand})
    assert {table.name: table.whole for table in tables} == {"user": (0, 9), "item": (0, 5), "by hand": None}


def test_state_that_is_not_there_yet_is_not_shown() -> None:
    model, optimizer = built("sparse-adam")
    _, item = ecemb.tables(model, optimizers=optimizer)
    assert set(item.tensors) == {"weight"}


def test_an_ended_hook_hears_nothing_and_others_do() -> None:
    model, optimizer = built()
    first, second = (Heard(ecemb.tables(model, optimizers=optimizer)) for _ in range(2))
    both = Heard(first.tables)
    for end in [*first.ends, *first.ends]:
        end()
    train(model, optimizer, [2], [3])
    assert first.rows == {"user": set(), "item": set()}
    assert second.rows == both.rows == {"user": {2}, "item": {3}}
    for end in [*second.ends, *both.ends]:
        end()
    train(model, optimizer, [5], [4])
    assert second.rows == both.rows == {"user": {2}, "item": {3}}
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_loading_touches_all_rows_and_is_not_refused() -> None:
    model, optimizer = built()
    tables = ecemb.tables(model, optimizers=optimizer)
    heard = Heard(tables)
    optimizer.load_state_dict(optimizer.state_dict())
    assert heard.rows == {"user": set(range(9)), "item": set(range(5))}
    heard = Heard(tables)
    model.user.load_state_dict({"weight": torch.ones(9, 4)})
    assert heard.rows == heard.changed() == {"user": set(range(9)), "item": set()}


def test_a_table_by_hand_and_one_without_an_optimizer() -> None:
    model, optimizer = built()
    by_hand = nn.EmbeddingBag(3, 2, sparse=True)
    user, *_, other = ecemb.tables(model, tables={"other": by_hand})
    assert (other.name, other.rows, set(other.tensors)) == ("other", 3, {"weight"})
    with refused(ConfigurationError, "'user'", "ecemb.tables(model, optimizers=[...])"):
        user.on_touch(lambda _: None)
    by_hand.requires_grad_(requires_grad=False)
    other.on_touch(lambda _: None)  # nothing trains it, so there is nothing to hear
    with refused(UnsupportedTable, "sparse=True"):
        ecemb.tables(model, optimizers=optimizer, tables={"dense": nn.EmbeddingBag(3, 2)})


def test_what_a_hook_raises_the_step_raises() -> None:
    model, optimizer = built()
    user, _ = ecemb.tables(model, optimizers=optimizer)

    def full(rows: torch.Tensor) -> None:
        raise RuntimeError(f"no room for {rows.tolist()}")

    user.on_touch(full)
    before = model.user.weight.detach().clone()
    with pytest.raises(RuntimeError, match="no room for"):
        train(model, optimizer, [1], [1])
    assert torch.equal(model.user.weight, before)


def test_beside_a_guard_both_hear_and_the_guard_still_refuses() -> None:
    model, optimizer = built("sgd")
    early = Heard(ecemb.tables(model, optimizers=optimizer))
    found, _ = find(model, {}, [optimizer])
    late: list[LiveTable] = []
    captured: list[tuple[int, list[int]]] = []
    found.place([Stored(table.layout) for table in found.tables], fresh=True)  # type: ignore[misc]
    found.watch(Hooks(lambda *row: captured.append((row[0], row[1].tolist())), lambda: True, list))
    late = ecemb.tables(model)  # the guard's own: it knows the optimizers
    heard = Heard(late)
    train(model, optimizer, [6, 7], [2])
    assert early.rows == heard.rows == heard.changed() == {"user": {6, 7}, "item": {2}}
    assert captured == [(0, [6, 7]), (1, [2])]
    found.touch("item", torch.tensor([4]))
    assert heard.rows["item"] == {2, 4} and captured[-1] == (1, [4])
    found.mark_clean()
    with torch.no_grad():
        model.user.weight[0] = 1
    with refused(UndeclaredWrite, "'user'"):
        train(model, optimizer, [1], [1])
    found.unwatch()
    train(model, optimizer, [3], [3])  # the guard is closed: who listens still hears
    assert 3 in heard.rows["user"] & heard.rows["item"] & early.rows["user"]
    assert len(captured) == 3


class Stored:
    """Memory for a table, as an arena would give it."""

    def __init__(self, layout: TableLayout) -> None:
        self.columns = [
            torch.zeros(layout.rows, column.row_bytes, dtype=torch.uint8).numpy() for column in layout.columns
        ]
