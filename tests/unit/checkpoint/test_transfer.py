"""Rows of another training, by their ids: what is read, and which ids can't be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from ecemb.checkpoint import Piece, Stored, Transfer
from ecemb.checkpoint.transfer import Source, examine, read_ids, read_pieces
from ecemb.errors import ConfigurationError
from support.refusals import refused

ROWS, WIDTH = 9, 4
COLUMNS = [["weight", "float32", WIDTH]]
STORED = Stored("step-1", 1, {"job": "then", "tables": [[["user", ROWS, None, COLUMNS]]]})


class Reader:
    """A store of one table, in two ranges of columns; notes which rows are read."""

    def __init__(self) -> None:
        self.table = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH)
        self.read_rows: list[tuple[int, int]] = []

    def finished(self, job: str) -> str | None:
        return None

    def newest(self) -> Stored | None:
        return STORED

    def read(self, stored: Stored, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            rows = range(piece.start, piece.start + len(piece.tensor))
            self.read_rows.append((rows.start, rows.stop))
            columns = {"left": slice(0, 1), "right": slice(1, WIDTH)}.get(piece.table or "", slice(None))
            assert piece.shape == (ROWS, piece.tensor.shape[1])
            piece.tensor.copy_(self.table[rows.start : rows.stop, columns])


WHOLE = [Source("user", "weight", (ROWS, WIDTH), slice(0, WIDTH), slice(0, WIDTH))]
HALVES = [
    Source("left", "weight", (ROWS, 1), slice(0, 1), slice(0, 1)),
    Source("right", "weight", (ROWS, WIDTH - 1), slice(0, WIDTH - 1), slice(1, WIDTH)),
]


@pytest.mark.parametrize("sources", [WHOLE, HALVES])
@pytest.mark.parametrize("run", [1, 3, 100])
def test_rows_are_read_by_their_ids(sources: list[Source], run: int) -> None:
    reader, rows = Reader(), torch.full((5, WIDTH), -1.0)
    ids = np.array([4, 0, -1, 8, 8, 2, -1])  # of a table of 10 rows, of which this rank has 3 to 7
    piece = Piece("now.weight", (10, WIDTH), 3, rows, "now")
    read_ids(reader, STORED, piece, sources, ids, run * WIDTH * 4)
    expected = torch.full((5, WIDTH), -1.0)
    expected[[0, 1, 2]] = reader.table[[8, 8, 2]]
    assert torch.equal(rows, expected)
    assert all(first >= 2 and stop <= ROWS for first, stop in reader.read_rows)


def test_nothing_is_read_for_rows_that_stay_fresh() -> None:
    reader, rows = Reader(), torch.zeros(2, WIDTH)
    read_ids(reader, STORED, Piece("now.weight", (4, WIDTH), 2, rows, "now"), WHOLE, range(2), 100)
    assert not reader.read_rows and not rows.any()


@pytest.mark.parametrize("sources", [WHOLE, HALVES])
def test_runs_of_rows_are_read_where_they_stand(sources: list[Source]) -> None:
    reader, rows = Reader(), torch.zeros(3, WIDTH)
    read_pieces(reader, STORED, [Piece("now.weight", (ROWS, WIDTH), 4, rows, "now")], {"now.weight": sources})
    assert torch.equal(rows, reader.table[4:7])


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0.5], "ids are a range or integers"),
        (torch.zeros(2, 2, dtype=torch.int64), "ids are a range or integers"),
        (torch.tensor([True]), "ids are a range or integers"),
        ([0, -2], "ids are in [-2, 0]"),
        (range(ROWS + 1), f"ids are in [0, {ROWS}]"),
        (range(21), "21 ids, and the table has 20 rows"),
    ],
)
def test_ids_that_are_none_of_the_table_are_named(ids: Any, text: str) -> None:
    transfer = Transfer("there", ["user"], rows={"user": ids})
    _, problems = examine(transfer, STORED, [["user", 20, None, COLUMNS]], ["user"])
    assert any(text in one for one in problems), problems


@pytest.mark.parametrize("ids", [range(0), [], range(8, -1, -1), torch.tensor([3], dtype=torch.int32)])
def test_ids_may_be_few(ids: Any) -> None:
    transfer = Transfer("there", rows={"user": ids})
    taking, problems = examine(transfer, STORED, [["user", 20, None, COLUMNS]], ["user"])
    assert not problems and list(taking.rows) == ["user"] and list(taking.sources) == ["user.weight"]


def test_a_table_by_hand_has_no_order() -> None:
    _, problems = examine(Transfer("there"), STORED, [["user", None, 4, COLUMNS]], ["user"])
    assert "sharded by hand" in problems[0]


def test_one_table_is_given_in_a_list() -> None:
    with refused(ConfigurationError, "write ['user']"):
        Transfer("there", "user")
    with refused(ConfigurationError, "a mapping", "list"):
        Transfer("there", rows=[1])  # type: ignore[arg-type]
