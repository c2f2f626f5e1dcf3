"""Which stored values stand for a table's: names, ranges of columns, states of optimizers."""

from __future__ import annotations

from typing import Any

import pytest

from ecemb.checkpoint.transfer import Match, Source
from ecemb.coding.rows import base

F32 = "float32"


def table(name: str, rows: int | None, *columns: tuple[str, int], dtype: str = F32) -> list[Any]:
    own = 3 if rows is None else None
    return [name, rows, own, [[column, dtype, width] for column, width in columns]]


def facts(*of_ranks: list[Any]) -> dict[str, Any]:
    return {"tables": list(of_ranks)}


ADAGRAD = (("weight", 8), ("sum", 8))
FUSED = (("weight", 8), ("momentum1", 8))
PLAIN = facts([table("user", 10, *ADAGRAD)], [table("user", 10, *ADAGRAD)])
PARTS = facts(
    [table("b.user[:, 0:2]", 10, ("weight", 2), ("momentum1", 2))],
    [table("b.user[:, 2:8]", 10, ("weight", 6), ("momentum1", 6))],
)


def problems(match: Match, mine: list[Any]) -> list[str]:
    found = list(match.problems_of_names())
    match.sources(mine, match.then(mine[0]), found)
    return found


def test_a_base_name_has_no_columns() -> None:
    assert base("b.user[:, 0:2]") == "b.user" and base("user") == "user"
    (parts,) = Match(PARTS, [], {}).stored.values()
    assert [part.values for part in parts] == [range(2), range(2, 8)]


def test_a_table_of_the_same_name_is_read_as_it_is() -> None:
    match = Match(PLAIN, ["user"], {})
    mine = table("user", 10, *ADAGRAD)
    assert not problems(match, mine)
    for key, (source,) in match.sources(mine, "user", []).items():
        assert source.key == key and source.is_whole(8) and source.shape == (10, 8)


def test_ranges_of_columns_are_put_together() -> None:
    match = Match(PARTS, ["user"], {"user": "b.user"})
    mine = table("user", 10, *ADAGRAD)
    assert not problems(match, mine)
    assert match.sources(mine, "b.user", [])["user.sum"] == [
        Source("b.user[:, 0:2]", "momentum1", (10, 2), slice(0, 2), slice(0, 2)),
        Source("b.user[:, 2:8]", "momentum1", (10, 6), slice(0, 6), slice(2, 8)),
    ]


def test_a_table_is_taken_apart_by_columns() -> None:
    everywhere = ["b.user[:, 0:5]", "b.user[:, 5:8]"]
    match = Match(PLAIN, everywhere, {"b.user": "user"})
    mine = table("b.user[:, 5:8]", 10, ("weight", 3), ("momentum1", 3))
    assert not problems(match, mine)
    (source,) = match.sources(mine, "user", [])["b.user[:, 5:8].momentum1"]
    assert source == Source("user", "sum", (10, 8), slice(5, 8), slice(0, 3))


def test_a_name_of_now_counts_before_one_of_then() -> None:
    match = Match(PLAIN, ["user"], {"user": "b.user"})  # saved after the move
    assert match.then("user") == "user" and not problems(match, table("user", 10, *ADAGRAD))


def test_a_state_for_each_row_is_of_its_columns() -> None:
    rowwise = facts([table("user", 10, ("weight", 8), ("momentum1", 1))])
    match = Match(rowwise, ["user"], {})
    assert not problems(match, table("user", 10, ("weight", 8), ("momentum1", 1)))
    assert "sum (8 x float32) now" in problems(match, table("user", 10, *ADAGRAD))[0]
    half = table("user[:, 0:4]", 10, ("weight", 4), ("momentum1", 1))
    (text,) = problems(Match(rowwise, ["user[:, 0:4]", "user[:, 4:8]"], {}), half)
    assert "momentum1 (1 x float32) now" in text


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (table("user", 11, *ADAGRAD), "11 rows now, and 10 there"),
        (table("user", 10, ("weight", 4), ("sum", 4)), "rows of 4 values now, and of 8 there"),
        (table("user", 10, ("weight", 8)), "user.sum is there, and this optimizer keeps no such state"),
        (table("user", 10, *ADAGRAD, dtype="float16"), "weight (8 x float16) now, and weight (8 x float32)"),
        (table("user", 10, ("weight", 8), ("exp_avg", 8)), "exp_avg (8 x float32) now"),
        (table("item", 10, *ADAGRAD), "table 'item': it isn't there"),
        (table("hand", 10, *ADAGRAD), "sharded by hand, in an order that isn't known"),
    ],
)
def test_what_differs_is_named(mine: list[Any], text: str) -> None:
    held = facts([table("user", 10, *ADAGRAD), table("hand", None, *ADAGRAD)])
    assert any(text in one for one in problems(Match(held, [mine[0]], {}), mine))


@pytest.mark.parametrize(
    ("renamed", "text"),
    [
        ({"ghost": "old"}, "'ghost', and this model has no table of this name"),
        ({"user": "item"}, "'item' as an earlier name, and this model has a table of this name"),
        ({"user": "tag"}, "the checkpoint has tables of both names"),
        ({"user": "old", "item": "old"}, "gives one table to several"),
    ],
)
def test_names_that_contradict_each_other_are_named(renamed: dict[str, str], text: str) -> None:
    held = facts([table(name, 10, *ADAGRAD) for name in ("user", "tag")])
    assert any(text in one for one in Match(held, ["user", "item"], renamed).problems_of_names())


def test_without_states_the_optimizer_may_be_another() -> None:
    match = Match(PLAIN, ["user"], {}, states=False)
    found: list[str] = []
    assert list(match.sources(table("user", 10, ("weight", 8), ("exp_avg", 8)), "user", found)) == [
        "user.weight"
    ]
    assert not found
