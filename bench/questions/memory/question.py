"""How much memory does protection take, beside the tables themselves?

- `arena_over_tables`: the bytes of a rank's arena, as its file system counts them, without what grows with
  the step, over the bytes of its protected tensors, which lie in it. `bound` is 1 + r/k + 0.03.
- `arena_part_over_tables`: the same by what the memory holds. `rows` are the tables and the rank's own
  state; `slots` are two copies of the replicated state, whatever the tables' size (1 MiB each at least).
- `step_buffers_over_touched`: what each buffer that grows with the step has reserved, over the bytes of the
  rows that a step changes on a rank, for two sizes of tables (`table_bytes`, a rank) and of batches
  (samples a rank). These buffers don't depend on the tables' size.
- `step_touched_bytes`: those bytes of changed rows, in the largest step.

Low and high are over the ranks. Tables of dimension 64 with Adagrad, one process a rank. Then all processes
end without closing the job, n - k arenas are deleted, and a restart has to find the same bytes in the tables.
"""

from __future__ import annotations

import dataclasses
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.ranks import Ranks
from bench.harness.result import Arguments, Row, WrongResult, summary
from bench.questions.memory.rank import RECORD_BYTES, Order, work
from ecemb.coding.code import Code
from ecemb.memory.header import Found
from ecemb.memory.scan import remove

MIB = 1 << 20
CODES = (Code(4, 3), Code(6, 4), Code(10, 8))
"""Each is measured on n ranks."""
STEP_BUFFERS = ("row_journal", "inbox", "parity_journal")
ELSEWHERE = ("tables", "messages")
"""What a guard tells of that is no region of the arena."""
PARTS = {"rows": ("rows",), "parity": ("parity",), "slots": ("slot0", "slot1")}
"""Part of an arena -> its regions."""
HEADER = "header"
"""The part that is left: the file's first pages, and the code's generator."""
HEADER_BYTES = MIB // 16
"""More than this beside the regions is no header."""
ALLOWED = 0.03
"""Over 1 + r/k."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        table_bytes: Of a rank's protected tensors.
        other_table_bytes: The same, for a second look at the first code's step buffers.
        batches: Samples a rank takes in a step, ascending.
        steps: With each of them.
        arena_dir: Where arenas lie.
        timeout_s: Of every wait.
    """

    table_bytes: int = 128 * MIB
    other_table_bytes: int = 16 * MIB
    batches: tuple[int, ...] = (2048, 8192)
    steps: int = 3
    arena_dir: str = "/dev/shm"
    timeout_s: float = 600.0


FULL = Scale()
QUICK = dataclasses.replace(FULL, table_bytes=8 * MIB, other_table_bytes=2 * MIB, batches=(256, 1024))


@dataclass(frozen=True)
class Held:
    """What one rank held after its training.

    Attributes:
        file_bytes: Memory that its arena's file takes.
        answer: What it reported.
    """

    file_bytes: int
    answer: Mapping[str, Any]

    @property
    def table_bytes(self) -> int:
        return int(self.answer["tensor_bytes"])

    @property
    def arena_bytes(self) -> int:
        """The arena without what grows with the step."""
        return self.file_bytes - sum(self.answer["bytes"][name] for name in STEP_BUFFERS)

    def part_bytes(self, part: str) -> int:
        """What one of `PARTS` takes, or `HEADER`, which is the rest."""
        if part == HEADER:
            return self.arena_bytes - sum(self.part_bytes(other) for other in PARTS)
        return sum(self.answer["bytes"][name] for name in PARTS[part])


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    rows: list[Row] = []
    for code in CODES:
        held = train_and_recover(scale, code, scale.table_bytes, arguments.seed)
        rows += arena(code, scale.table_bytes, held)
        if code == CODES[0]:
            rows += buffers(code, scale.table_bytes, held)
            held = train_and_recover(scale, code, scale.other_table_bytes, arguments.seed)
            rows += buffers(code, scale.other_table_bytes, held)
    return rows


def train_and_recover(scale: Scale, code: Code, table_bytes: int, seed: int) -> list[Held]:
    """Trains on n ranks with `table_bytes` a rank; what each held, once a recovery has found it again.

    Raises:
        WrongResult: The arenas' files don't hold what the guards say, or don't give the tables back.
        RankFailed: A rank did.
    """
    order = Order(
        job=f"bench-memory-{secrets.token_hex(4)}",
        arena_dir=scale.arena_dir,
        n=code.n,
        k=code.k,
        rows=table_bytes * code.n // RECORD_BYTES,
        batches=scale.batches,
        steps=scale.steps,
        seed=seed,
        timeout_s=scale.timeout_s,
    )
    with order.leaving_nothing():
        with started(order) as ranks:
            answers = by_rank(ranks.answers())
            files = found(order)
            held = [Held(stored_bytes(files[rank].path), answer) for rank, answer in enumerate(answers)]
            ranks.dismiss()
        for rank, one in enumerate(held):
            check_parts(rank, one)
        lost = sorted(random.Random(seed).sample(range(code.n), code.r))
        for rank in lost:
            remove(files[rank])
        with started(order) as ranks:
            check_recovery(answers, by_rank(ranks.answers()), lost)
            ranks.finished()
    return held


def started(order: Order) -> Ranks:
    return Ranks(order.n, work, order, deadline_s=order.timeout_s)


def by_rank(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of logical ranks."""
    return sorted(answers, key=lambda answer: answer["rank"])


def found(order: Order) -> dict[int, Found]:
    """The job's arenas by rank; one that is not whole has a negative number."""
    return {
        one.header.constants.rank if one.header else -1 - at: one for at, one in enumerate(order.arenas())
    }


def stored_bytes(path: Path) -> int:
    """The memory that a file takes."""
    return path.stat().st_blocks * 512


def check_parts(rank: int, held: Held) -> None:
    """Compares an arena's file with what the guard says of its regions, and of its tables.

    Raises:
        WrongResult: They differ by more than the header, or the tables are not all the tensors.
    """
    told = held.answer["bytes"]
    if told["tables"] != held.table_bytes:
        raise WrongResult(f"rank {rank}: tensors of {held.table_bytes} bytes, {told['tables']} protected")
    header = held.file_bytes - sum(size for name, size in told.items() if name not in ELSEWHERE)
    if not 0 < header <= HEADER_BYTES:
        raise WrongResult(
            f"rank {rank}: the arena's file takes {held.file_bytes} bytes, {header} more than its regions, "
            f"which take {told}"
        )


def check_recovery(
    before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], lost: Sequence[int]
) -> None:
    """Compares what the ranks hold after a recovery with what they held before.

    Raises:
        WrongResult: It isn't the same, or other arenas were lost than were deleted.
    """
    for then, now in zip(before, after, strict=True):
        if (now["lost"], now["step"]) != (tuple(lost), then["step"]):
            raise WrongResult(
                f"rank {now['rank']}: ranks {lost} were deleted after step {then['step']}; "
                f"{list(now['lost'])} were rebuilt, for step {now['step']}"
            )
        if now["digest"] != then["digest"]:
            raise WrongResult(f"rank {now['rank']}: the tables are not what they were")


def arena(code: Code, table_bytes: int, held: Sequence[Held]) -> list[Row]:
    """Returns `arena_over_tables` and its parts for one code and size of tables."""
    labels = {"code": f"({code.n}, {code.k})", "table_bytes": table_bytes}
    bound = round(1 + code.r / code.k + ALLOWED, 4)
    rows = [
        summary(
            "arena_over_tables",
            "ratio",
            [one.arena_bytes / one.table_bytes for one in held],
            **labels,
            bound=bound,
        )
    ]
    for part in (*PARTS, HEADER):
        ratios = [one.part_bytes(part) / one.table_bytes for one in held]
        rows.append(summary("arena_part_over_tables", "ratio", ratios, **labels, part=part))
    return rows


def buffers(code: Code, table_bytes: int, held: Sequence[Held]) -> list[Row]:
    """Returns `step_buffers_over_touched` and `step_touched_bytes` for one code and size of tables."""
    rows: list[Row] = []
    for phases in zip(*(one.answer["phases"] for one in held), strict=True):
        labels = {
            "code": f"({code.n}, {code.k})",
            "table_bytes": table_bytes,
            "batch": phases[0]["batch"],
        }
        touched = [phase["touched_bytes"] for phase in phases]
        rows.append(summary("step_touched_bytes", "bytes", touched, **labels))
        for name in STEP_BUFFERS:
            ratios = [phase["bytes"][name] / phase["touched_bytes"] for phase in phases]
            rows.append(summary("step_buffers_over_touched", "ratio", ratios, buffer=name, **labels))
    return rows
