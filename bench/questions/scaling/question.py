"""What does protection cost a rank when there are more ranks?

Counted on real ranks, of which each has a table of the same size and takes a batch of the same size,
with the code (4, 3). ecemb's calls of torch.distributed are counted in the processes themselves:

- `messages_per_step`, `peers_per_step`, `sent_bytes_per_step`: messages that a rank sends for protection in
  one step, the ranks that it sends to, and the bytes. `deltas` are messages of more than 64 bytes in the
  phase of the exchange. `agreement` are the others: they announce sizes, report aborts and failures, and
  vote. A rank that returns knows that all ranks have prepared. What they cost by the number of ranks is a
  question of its own, `agreement`. `empty` are the parts of a collective without anything to send.
- `touched_rows_per_step`: rows of a rank that change in a step.
- `sent_over_touched`: bytes of deltas over the bytes of those rows.
- `memory_over_tables`: what a rank's arena holds, by part, over the bytes of its tables. `step` is what
  grows with the step. Beside such small tables the rank's own state (random generators) shows in `rows`.

By the placement's arithmetic, for each rank of up to 4096:

- `delta_peers`: ranks that one sends deltas to.
- `parity_over_rows`: parity that it keeps, over its rows, when all ranks have as many.
- `rebuild_peers`: ranks that may be asked for blocks when its memory is lost.

Low and high are over the ranks. Counted and computed peers have to be the same, parity has to fit all rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.harness.messages import DELTAS, KINDS
from bench.harness.result import Arguments, Label, Row, WrongResult, by_metric, summary
from bench.questions.scaling.rank import RECORD_BYTES, Order, work
from bench.workloads.table_training import answers_of
from ecemb.coding.code import Code
from ecemb.coding.placement import Placement

CODE = Code(4, 3)
CODES = (CODE, Code(4, 2), Code(10, 8))
"""What the arithmetic is done for; the first is also counted."""
COMPUTED_RANKS = (4, 8, 16, 64, 256, 1024, 4096)
PARTS = {
    "rows": ("rows",),
    "parity": ("parity",),
    "slots": ("slot0", "slot1"),
    "step": ("row_journal", "inbox", "parity_journal"),
}
"""Part of an arena -> its regions."""


@dataclass(frozen=True)
class Scale:
    """How much is counted.

    Attributes:
        ranks: How many there are, ascending.
        rows: Of the table on each.
        batch: Samples a rank takes in a step.
        steps: That are counted.
        arena_dir: Where arenas lie.
        timeout_s: Of every wait.
    """

    ranks: tuple[int, ...] = (4, 8, 16)
    rows: int = 40_000
    batch: int = 2000
    steps: int = 5
    arena_dir: str = "/dev/shm"
    timeout_s: float = 600.0


FULL = Scale()
QUICK = Scale(ranks=(4, 6), rows=2000, batch=200, steps=2, timeout_s=250)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    counts = {ranks: count(scale, ranks, arguments.seed) for ranks in scale.ranks}
    rows = [
        row for ranks, answers in counts.items() for row in counted(answers, scale.steps, {"ranks": ranks})
    ]
    for code in CODES:
        for ranks in (ranks for ranks in COMPUTED_RANKS if ranks >= code.n):
            rows += computed(code, ranks)
    return by_metric(rows)


def count(scale: Scale, ranks: int, seed: int) -> list[dict[str, Any]]:
    """Trains on this number of ranks.

    Returns:
        The report of each rank, in their order.

    Raises:
        WrongResult: Counts don't agree with what the guard or the placement says.
        RankFailed: A rank did.
    """
    order = Order(
        job=f"bench-scaling-{secrets.token_hex(4)}",
        arena_dir=scale.arena_dir,
        n=CODE.n,
        k=CODE.k,
        rows=scale.rows,
        batch=scale.batch,
        steps=scale.steps,
        seed=seed,
        timeout_s=scale.timeout_s,
    )
    found = answers_of(ranks, work, order)
    check(Placement.ranks(CODE.n, CODE.k, ranks), found)
    return found


def check(placement: Placement, answers: Sequence[Mapping[str, Any]]) -> None:
    """Compares what was counted with what is said.

    Raises:
        WrongResult: It isn't the same.
    """
    for rank, answer in enumerate(answers):
        if answer["unknown"]:
            raise WrongResult(f"rank {rank} called {answer['unknown']}, whose messages are not counted")
        counted_bytes = sum(kind["bytes"] for kind in answer["sent"].values())
        if not 0 < answer["sent_bytes"] <= counted_bytes:
            raise WrongResult(
                f"rank {rank}: the guard says that {answer['sent_bytes']} bytes were sent; {counted_bytes} "
                f"were counted"
            )
        if answer["peers"] != keepers(placement, rank):
            raise WrongResult(
                f"rank {rank} sent deltas to ranks {answer['peers']}, and {keepers(placement, rank)} keep "
                f"its parity"
            )
        if answer["wrong_words"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")


def keepers(placement: Placement, rank: int) -> list[int]:
    """The ranks that keep parity of a rank's blocks."""
    return sorted({keeper for block in range(placement.k) for keeper in placement.keepers(rank, block)})


def sources(placement: Placement, rank: int) -> list[int]:
    """The ranks that hold other blocks of the stripes that a rank has a part in."""
    classes = placement.erasures([rank])
    return sorted({member for c in classes for member in placement.members(c)} - {rank})


def counted(answers: Sequence[Mapping[str, Any]], steps: int, labels: Mapping[str, Label]) -> list[Row]:
    """Returns what was counted on this number of ranks."""
    rows: list[Row] = []
    for metric, name, unit in (
        ("messages_per_step", "messages", "messages"),
        ("peers_per_step", "peers", "ranks"),
        ("sent_bytes_per_step", "bytes", "bytes"),
    ):
        for kind in KINDS:
            each = [answer["sent"][kind][name] / (1 if name == "peers" else steps) for answer in answers]
            if any(each):
                rows.append(summary(metric, unit, each, **labels, kind=kind))
    touched = [answer["touched_rows"] / steps for answer in answers]
    rows.append(summary("touched_rows_per_step", "rows", touched, **labels))
    over = [answer["sent"][DELTAS]["bytes"] / (answer["touched_rows"] * RECORD_BYTES) for answer in answers]
    rows.append(summary("sent_over_touched", "ratio", over, **labels))
    for part, regions in PARTS.items():
        each = [
            sum(answer["bytes"][name] for name in regions) / answer["bytes"]["tables"] for answer in answers
        ]
        rows.append(summary("memory_over_tables", "ratio", each, **labels, part=part))
    return rows


def computed(code: Code, ranks: int) -> list[Row]:
    """Returns what follows from the placement of this number of ranks."""
    placement = Placement.ranks(code.n, code.k, ranks)
    labels: dict[str, Label] = {"code": f"({code.n}, {code.k})", "ranks": ranks}
    every = range(ranks)
    return [
        summary("delta_peers", "ranks", [len(keepers(placement, p)) for p in every], **labels),
        summary("parity_over_rows", "ratio", [len(placement.kept(p)) / code.k for p in every], **labels),
        summary("rebuild_peers", "ranks", [len(sources(placement, p)) for p in every], **labels),
    ]
