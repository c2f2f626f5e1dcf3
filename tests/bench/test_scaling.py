"""What ranks send is counted where they send it; counts that don't fit what is said are noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.harness.messages import AGREEMENT, DELTAS, EMPTY, counting
from bench.harness.result import Row, WrongResult
from bench.questions.scaling import question as scaling
from bench.questions.scaling.question import CODE, Scale
from ecemb.coding.code import Code
from ecemb.coding.placement import Placement
from ecemb.net.collectives import Transport
from support.processes import run_ranks

SCALE = Scale(ranks=(5,), rows=4000, batch=200, steps=1, timeout_s=600)


def test_messages_are_counted_on_real_ranks() -> None:
    answers = scaling.count(SCALE, 5, seed=1)
    rows = scaling.counted(answers, SCALE.steps, {"ranks": 5})

    def row(metric: str, **labels: str) -> Row:
        (one,) = [r for r in rows if r.metric == metric and labels.items() <= r.labels.items()]
        return one

    assert row("peers_per_step", kind=DELTAS).low == row("peers_per_step", kind=DELTAS).high == CODE.n - 1
    assert 1 <= row("peers_per_step", kind=AGREEMENT).value <= 4
    assert 1 < row("sent_over_touched").value < 2
    assert row("memory_over_tables", part="parity").value == pytest.approx(
        row("memory_over_tables", part="rows").value / CODE.k, abs=0.02
    )
    assert row("messages_per_step", kind=AGREEMENT).low >= 1


def test_what_a_process_sends_for_training_is_not_counted() -> None:
    for rank, told in enumerate(run_ranks(3, send_a_little)):
        sizes, unknown = told
        others = {peer: [8 * (peer + 1), 0] for peer in range(3) if peer != rank}
        others[(rank + 1) % 3].append(800)
        assert sizes == others
        assert unknown == {"all_reduce"}
        assert dist.all_to_all_single.__module__ == "torch.distributed.distributed_c10d"


def send_a_little() -> tuple[dict[int, list[int]], set[str]]:
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    with counting() as sent:
        splits, got = [1, 2, 3], [rank + 1] * 3
        send, out = torch.zeros(6, dtype=torch.int64), torch.zeros(3 * (rank + 1), dtype=torch.int64)
        dist.all_to_all_single(out, send, got, splits, group=group)
        dist.all_to_all_single(torch.zeros(0), torch.zeros(0), group=group)
        wires, words = Transport(group, 600), np.zeros(100, np.uint64)
        sent_all = wires.send(words, (rank + 1) % 3, "a little")
        wires.expect(words.copy(), (rank - 1) % 3, "a little")()
        sent_all()
        dist.all_reduce(torch.zeros(1), group=group)
        dist.all_reduce(torch.zeros(1))
        dist.all_to_all_single(torch.zeros(3), torch.zeros(3))
    dist.all_to_all_single(torch.zeros(3), torch.zeros(3), group=group)
    return sent.sizes, sent.unknown


@pytest.mark.parametrize("code", scaling.CODES, ids=str)
def test_costs_of_a_rank_do_not_grow(code: Code) -> None:
    for ranks in (2 * code.n, 100, 1000):
        peers, parity, rebuild = scaling.computed(code, ranks)
        assert peers.low == peers.high == code.n - 1
        assert parity.low == parity.high == code.r / code.k
        assert code.n - 1 <= rebuild.low <= rebuild.high <= 2 * (code.n - 1)


SENT = {
    DELTAS: {"messages": 3, "peers": 3, "bytes": 900},
    AGREEMENT: {"messages": 6, "peers": 3, "bytes": 100},
    EMPTY: {"messages": 0, "peers": 0, "bytes": 0},
}


def answers(**change: Any) -> list[dict[str, Any]]:
    ranks = range(4)
    told = [
        {
            "rank": p,
            "sent": SENT,
            "unknown": [],
            "peers": [q for q in ranks if q != p],
            "sent_bytes": 900,
            "wrong_words": 0,
        }
        for p in ranks
    ]
    told[2] |= change
    return told


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"unknown": ["barrier"]}, r"rank 2 called \['barrier'\]"),
        ({"sent_bytes": 1001}, "rank 2: the guard says that 1001 bytes were sent; 1000 were counted"),
        ({"sent_bytes": 0}, "rank 2: the guard says that 0 bytes"),
        ({"peers": [0, 1]}, r"rank 2 sent deltas to ranks \[0, 1\], and \[0, 1, 3\] keep its parity"),
        ({"wrong_words": 7}, "rank 2: 7 words of parity"),
    ],
)
def test_counts_that_do_not_fit(change: dict[str, Any], complaint: str) -> None:
    placement = Placement.ranks(4, 3, 4)
    scaling.check(placement, answers())
    with pytest.raises(WrongResult, match=complaint):
        scaling.check(placement, answers(**change))
