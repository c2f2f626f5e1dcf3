"""What ranks say to one another is counted where they say it, and lines go through it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench.harness.result import Row, WrongResult, once
from bench.questions.agreement import question as agreement
from bench.questions.agreement import rank
from bench.questions.agreement.question import CODE, QUICK

ENDS = {"status": (3, 120), "exchange": (3, 900), "agree": (3, 3)}
ANSWER: dict[str, Any] = {
    "rank": 0,
    "inside": [{}, {}],
    "ends": [ENDS, ENDS],
    "unknown": [],
    "cpu_s": {"status": 0.002, "agree": 0.001, "network": 0.003},
    "wrong_words": 0,
}


def taking(ms: float) -> list[dict[str, Any]]:
    """The answers of two ranks that take this in a transaction, in the mean."""
    return [
        ANSWER | {"rank": rank, "cpu_s": {"status": share * ms / 1000, "agree": share * ms / 1000}}
        for rank, share in enumerate((0.75, 1.25))
    ]


def test_real_ranks_agree_at_the_end_of_a_window_alone() -> None:
    scale = dataclasses.replace(QUICK, ranks=(5,), transactions=2)
    answers = agreement.count(scale, 5, seed=1, jobs=2)
    assert [answer["rank"] for answer in answers] == [*range(5), *range(5)]
    rows = list(agreement.counted([answers], 5))
    values = {row.metric: row for row in rows}
    assert values["agreement_messages_inside"].high == 0
    assert values["agreement_messages_per_transaction"].low >= CODE.n - 1
    assert values["agreement_cpu_ms"].low > 0
    assert {row.labels["phase"] for row in rows if "phase" in row.labels} >= {"exchange", "agree"}


def test_jobs_side_by_side_are_measured_when_all_have_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    monkeypatch.setattr(rank.dist, "barrier", lambda: together.append(len(list(tmp_path.iterdir()))))
    first, second = (
        rank.Order(
            job=job,
            arena_dir=str(tmp_path),
            n=CODE.n,
            k=CODE.k,
            rows=1,
            batch=1,
            transactions=1,
            seed=0,
            timeout_s=0,
            meeting=tmp_path,
            jobs=2,
        )
        for job in ("first", "second")
    )
    with pytest.raises(TimeoutError, match="first: not all of 2 jobs have begun"):
        rank.meet(first, 0)
    assert not together
    rank.meet(second, 0)
    rank.meet(second, 1)
    assert together == [2, 2]


def test_messages_and_time_of_a_transaction() -> None:
    rounds = [taking(2), taking(4), taking(6)]
    rows = {(row.metric, row.labels.get("phase")): row for row in agreement.counted(rounds, 2)}
    assert rows["agreement_messages_per_transaction", None].value == 9
    assert rows["agreement_messages_inside", None].value == 0
    assert rows["agreement_bytes_per_transaction", "exchange"].value == 900
    assert (cpu := rows["agreement_cpu_ms", None]).value == pytest.approx(4)
    assert (cpu.low, cpu.high) == pytest.approx((2, 6))


def test_numbers_of_ranks_are_compared_round_by_round_alone_and_beside_other_jobs() -> None:
    few, many = [taking(2), taking(4), taking(1)], [taking(4), taking(4), taking(3)]
    assert not list(agreement.compared({(16, 1): few}))
    (over,) = agreement.compared({(16, 1): few, (64, 1): many})
    assert (over.low, over.value, over.high) == pytest.approx((1, 2, 3))
    assert over.labels == {"ranks": 64, "than": 16, "jobs": 1}
    _, crowded, beside = agreement.compared({(16, 1): few, (64, 1): many, (16, 4): many})
    assert (crowded.low, crowded.value, crowded.high) == pytest.approx((3, 4, 4))
    assert (beside.value, beside.labels["jobs"]) == (pytest.approx(1), 4)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"unknown": ["barrier"]}, r"rank 1 called \['barrier'\]"),
        ({"wrong_words": 7}, "rank 1: 7 words of parity"),
        ({"ends": [ENDS, {}]}, "rank 1 committed without a message"),
    ],
)
def test_counts_that_prove_nothing(change: dict[str, Any], complaint: str) -> None:
    agreement.check([ANSWER, ANSWER])
    with pytest.raises(WrongResult, match=complaint):
        agreement.check([ANSWER, ANSWER | change])


@pytest.mark.parametrize(
    ("law", "messages", "at_4096"),
    [
        ("log2", {4: 10, 8: 12, 16: 14, 64: 18}, 30),
        ("linear", {4: 9, 8: 17, 16: 33, 64: 129}, 8193),
        ("", {4: 9, 8: 17, 16: 20, 64: 90}, 0),
    ],
)
def test_more_ranks_follow_from_those_that_were_run(
    law: str, messages: dict[int, int], at_4096: float
) -> None:
    rows: list[Row] = []
    for ranks, sent in messages.items():
        rows.append(once("agreement_messages_per_transaction", "messages", sent, ranks=ranks))
        rows.append(once("agreement_cpu_ms", "ms", 0.5 + 0.02 * sent, ranks=ranks))
    found = list(agreement.modelled(rows))
    values = {(row.metric, row.labels.get("ranks")): row for row in found}
    assert values["agreement_cpu_fixed_ms", None].value == pytest.approx(0.5)
    assert values["agreement_cpu_us_per_message", None].value == pytest.approx(20)
    assert {row.labels["law"] for row in found if "law" in row.labels} == ({law} if law else set())
    if law:
        assert values["agreement_messages_modelled", 4096].value == pytest.approx(at_4096)
        assert values["agreement_cpu_modelled_ms", 4096].value == pytest.approx(0.5 + 0.02 * at_4096)
