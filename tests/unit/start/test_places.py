"""Where rows of all ranks stand: one compact text, and whole tables only."""

from __future__ import annotations

import pytest

from ecemb.checkpoint.contents import Shard
from ecemb.coding.rows import Column, TableLayout
from ecemb.errors import ConfigurationError, InconsistentArenas
from ecemb.start.history import check_hand, pack_places, unpack_places

COLUMNS = (Column("weight", "float32", 16), Column("sum", "float32", 16))


def shard(rows: int, start: int = 0, whole: int | None = 10, name: str = "t") -> Shard:
    return Shard(TableLayout(name, rows, COLUMNS), start, whole)


def test_what_is_unpacked_is_what_was_packed() -> None:
    places = [[shard(4), shard(3, whole=None, name="own")], [shard(6, 4)], []]
    text = pack_places(places)
    assert unpack_places(text) == places
    many = [[shard(1, rank, 500)] for rank in range(500)]
    assert len(pack_places(many)) < 500 * 12 + 100 and unpack_places(pack_places(many)) == many


@pytest.mark.parametrize("text", ["", "[1]", "[[], [[[0, 1, 2]]]]", '{"a": 1}'])
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(InconsistentArenas, match="can't be read"):
        unpack_places(text)


def test_shards_by_hand_are_a_whole_table() -> None:
    named = [["t"], ["t"]]
    check_hand([[shard(4)], [shard(6, 4)]], named)
    check_hand([[shard(6, 4)], [shard(4)]], named)
    check_hand([[shard(10)], [shard(0, 3)]], named)
    check_hand([[shard(10)], []], [["t"], []])
    for wrong in ([shard(3)], [shard(4, 1)], [shard(4, whole=11)], [shard(5)]):
        with pytest.raises(ConfigurationError, match="missing or twice"):
            check_hand([wrong, [shard(6, 4)]], named)
    with pytest.raises(ConfigurationError, match=r"not on ranks \[1\]"):
        check_hand([[shard(4)], [shard(6, 4)]], [["t"], []])
