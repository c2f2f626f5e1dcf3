"""One bit a row: what was touched is what is reported, in any order and with repeats."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given

from baselines.check_n_run.tracking import TouchedRows


@given(st.integers(1, 70), st.data())
def test_what_was_touched_is_told(rows: int, data: st.DataObject) -> None:
    touched, wanted = TouchedRows(rows), set[int]()
    for numbers in data.draw(st.lists(st.lists(st.integers(0, rows - 1)), max_size=4)):
        touched.touch(torch.tensor(numbers, dtype=torch.int64))
        wanted |= set(numbers)
        assert touched.numbers().tolist() == sorted(wanted)
        assert touched.count() == len(wanted)
    touched.clear()
    assert touched.count() == 0 and touched.numbers().tolist() == []
    assert touched.memory_bytes == -(-rows // 8)


def test_many_rows_are_told_over_all_parts() -> None:
    rows = 20_000_003
    touched = TouchedRows(rows)
    wanted = torch.arange(5, rows, 999_983)
    touched.touch(wanted.flip(0).repeat(2))
    assert torch.equal(touched.numbers(), wanted) and touched.count() == len(wanted)


def test_a_shard_may_be_empty() -> None:
    touched = TouchedRows(0)
    touched.touch(torch.empty(0, dtype=torch.int64))
    assert touched.count() == 0 and touched.numbers().tolist() == []
