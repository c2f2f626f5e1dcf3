"""One rank: trains a few steps under a guard, and counts what it sends for protection."""

from __future__ import annotations

from dataclasses import dataclass

from bench.harness.messages import DELTAS, KINDS, counting
from bench.harness.phase_clocks import PhaseClocks
from bench.harness.ranks import Line
from bench.workloads.table_training import TableJob, TableTraining

DIM = 32
RECORD_BYTES = 2 * 4 * DIM
"""Of one row: its weights and Adagrad's sums, float32."""


@dataclass(frozen=True, kw_only=True)
class Order(TableJob):
    """What a rank is to do.

    Attributes:
        steps: That are counted.
    """

    steps: int
    dim: int = DIM


def work(line: Line, order: Order) -> None:
    """What one rank does."""
    training = TableTraining(order)
    guard = training.guard
    training.step()  # the first step compares more than others do
    before = guard.stats()
    phases = PhaseClocks(guard)
    with counting() as sent:
        sent.phase = lambda: phases.now
        for _ in range(order.steps):
            training.step()
    stats = guard.stats()
    report = guard.scrub()
    line.send(
        {
            "rank": training.rank,
            "sent": {kind: sent.of_kind(kind) for kind in KINDS},
            "unknown": sorted(sent.unknown),
            "peers": sorted(peer for peer, kinds in sent.kinds.items() if DELTAS in kinds),
            "sent_bytes": stats["sent_bytes"] - before["sent_bytes"],
            "touched_rows": stats["captured_rows"] - before["captured_rows"],
            "bytes": stats["bytes"],
            "wrong_words": report.wrong_words,
        }
    )
    training.end()
