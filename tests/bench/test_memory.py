"""The memory that protection takes, on real ranks; and that a wrong arena would be noticed."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import pytest

from bench.harness.result import Row, WrongResult
from bench.questions.memory import question as memory
from bench.questions.memory.question import MIB, Held, Scale
from ecemb.coding.code import Code

CODE = Code(4, 3)
SCALE = Scale(table_bytes=96 * MIB, batches=(2048, 8192), steps=2, timeout_s=600)


@pytest.fixture(scope="module")
def held() -> list[Held]:
    return memory.train_and_recover(SCALE, CODE, SCALE.table_bytes, seed=1)


def test_an_arena_takes_no_more_than_its_bound(held: list[Held]) -> None:
    whole, *parts = memory.arena(CODE, SCALE.table_bytes, held)
    assert (whole.metric, whole.labels["code"]) == ("arena_over_tables", "(4, 3)")
    assert whole.repeats == 4
    assert 1 + 1 / 3 < whole.low <= whole.high <= 1 + 1 / 3 + 0.03 + 1e-9
    assert whole.labels["bound"] == pytest.approx(1 + 1 / 3 + 0.03, abs=1e-4)
    assert {row.labels["part"] for row in parts} == {"rows", "parity", "slots", "header"}
    assert sum(row.value for row in parts) == pytest.approx(whole.value, abs=1e-3)


def test_step_buffers_grow_with_the_step(held: list[Held]) -> None:
    ratios: dict[Any, list[Row]] = defaultdict(list)
    for row in memory.buffers(CODE, SCALE.table_bytes, held):
        ratios[row.labels.get("buffer")].append(row)
    small, large = ratios.pop(None)
    assert large.value > 2.5 * small.value > 2.5 * MIB
    assert set(ratios) == set(memory.STEP_BUFFERS)
    assert all(row.high < 0.01 for row in ratios.pop("parity_journal"))  # of one row
    for small, large in ratios.values():
        assert (small.labels["batch"], large.labels["batch"]) == SCALE.batches
        assert 1 < large.high < 1.6
        assert 1 < small.high < 1.6


ANSWER = {
    "rank": 0,
    "step": 6,
    "lost": (),
    "digest": "ab",
    "tensor_bytes": 900,
    "bytes": {"tables": 900, "rows": 1000, "inbox": 500},
}


def test_a_file_that_is_not_what_the_guard_says() -> None:
    memory.check_parts(0, Held(1500 + 8192, ANSWER))
    for size in (1400, 1500 + MIB):
        with pytest.raises(WrongResult, match=f"file takes {size} bytes"):
            memory.check_parts(0, Held(size, ANSWER))
    with pytest.raises(WrongResult, match="tensors of 901 bytes, 900 protected"):
        memory.check_parts(0, Held(1500 + 8192, ANSWER | {"tensor_bytes": 901}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"digest": "ac"}, "rank 0: the tables are not what they were"),
        ({"lost": ()}, r"ranks \[2\] were deleted after step 6; \[\] were rebuilt"),
        ({"step": 5}, "for step 5"),
    ],
)
def test_a_recovery_that_gives_something_else(change: dict[str, Any], complaint: str) -> None:
    recovered = ANSWER | {"lost": (2,)}
    memory.check_recovery([ANSWER], [recovered], [2])
    with pytest.raises(WrongResult, match=complaint):
        memory.check_recovery([ANSWER], [recovered | change], [2])


def test_each_code_is_measured_and_the_first_at_two_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Code, int]] = []
    stored = dict.fromkeys(("tables", "rows", "parity", "slot0", "slot1", *memory.STEP_BUFFERS), 1)
    phase = {"batch": 5, "touched_bytes": 1, "bytes": stored}

    def pretend(scale: Scale, code: Code, table_bytes: int, seed: int) -> list[Held]:
        asked.append((code, table_bytes))
        return [Held(8, {"tensor_bytes": 1, "bytes": stored, "phases": [phase]})]

    monkeypatch.setattr(memory, "train_and_recover", pretend)
    rows = memory.run(dataclasses.replace(memory.Arguments(), quick=True))
    sizes = memory.QUICK.table_bytes, memory.QUICK.other_table_bytes
    first, *others = memory.CODES
    assert asked == [(first, sizes[0]), (first, sizes[1]), *((code, sizes[0]) for code in others)]
    assert [r.labels["code"] for r in rows if r.metric == "arena_over_tables"] == [
        "(4, 3)",
        "(6, 4)",
        "(10, 8)",
    ]
    assert {r.labels["table_bytes"] for r in rows if r.metric == "step_touched_bytes"} == set(sizes)
