"""How long does a job's memory take to move to another number of ranks, and how much memory for the while?

A job of ranks on "hosts" of two, all on one machine, trains a step and ends without closing. Then another
number of ranks starts: `from` and `to` are the numbers, and `lost` says how many of the first ones' arenas
are deleted in between, all of one host. The table, of dimension 64 with Adagrad, must have the same bits
after the move.

- `move_s`: the part of `ecemb.protect` that fills the new arenas from the old ones, on the slowest rank.
- `settle_s`: what comes before it: the plan, undo and redo, the check of the space.
- `encode_s`: what comes after it: parity of the new code.
- `gb_per_s`: bytes of rows, weights and optimizer state, over `move_s`.
- `move_over_gloo`: `move_s` over what plain gloo takes, just after it and between the same processes, for the
  bytes that the move sends, on the same links, with as much memory in flight as it likes.
- `sent_over_rows`: the bytes that are sent between processes, over the bytes of the rows. Rows that stay in
  their process are not sent; a lost one passes through k processes.
- `arenas_over_said`: the most that all arenas took beside the old ones, over what the start said that they
  would take.
- `process_mb`: the most private memory that a process took for the move, beside what it had before, with
  torch's own; `bound_mb` is what the move says of itself.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.ranks import Ranks
from bench.harness.result import Arguments, Label, Row, WrongResult, by_metric, once, summary
from bench.questions.elastic.rank import RECORD_BYTES, Order, work
from ecemb.memory.scan import remove

MIB = 1 << 20
MEGA, GIGA = 1e6, 1e9
CODES = {6: (3, 2), 4: (2, 1), 2: (2, 1)}
"""Number of ranks -> code that survives the loss of a host of two, where there are more."""


@dataclass(frozen=True)
class Case:
    """One move.

    Attributes:
        before: Hosts of two ranks each, in the first launch.
        after: The same in the second one; a host that is missing there is lost.
    """

    before: str
    after: str

    @property
    def lost(self) -> set[str]:
        """Hosts whose memory is deleted."""
        return set(self.before) - set(self.after)


CASES = (Case("abc", "ac"), Case("ac", "acd"), Case("abc", "acde"))


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        table_bytes: Weights and optimizer state, over all ranks.
        cases: Which moves.
        times: How often each.
        arena_dir: Where arenas lie.
        timeout_s: Of every wait.
    """

    table_bytes: int = 768 * MIB
    cases: tuple[Case, ...] = CASES
    times: int = 2
    arena_dir: str = "/dev/shm"
    timeout_s: float = 600.0


FULL = Scale()
QUICK = dataclasses.replace(FULL, table_bytes=12 * MIB, cases=CASES[:2], times=1)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    return by_metric([row for case in scale.cases for row in of_case(scale, case, arguments.seed)])


def of_case(scale: Scale, case: Case, seed: int) -> Iterator[Row]:
    """What was measured of one move.

    Raises:
        WrongResult: The table has other bits after it.
        RankFailed: A rank failed.
    """
    runs = [moved(scale, case, seed + time) for time in range(scale.times)]
    labels: dict[str, Label] = {
        "from": 2 * len(case.before),
        "to": 2 * len(case.after),
        "lost": 2 * len(case.lost),
    }
    size = scale.table_bytes // RECORD_BYTES * RECORD_BYTES

    def slowest(phase: str) -> list[float]:
        return [max(one["seconds"][phase] for one in ranks) for ranks in runs]

    for phase in ("move", "settle", "encode"):
        yield summary(f"{phase}_s", "s", slowest(phase), **labels)
    yield summary("gb_per_s", "GB/s", [size / GIGA / one for one in slowest("move")], **labels)
    wire = [max(one["wire_s"] for one in ranks) for ranks in runs]
    pairs = zip(slowest("move"), wire, strict=True)
    yield summary("move_over_gloo", "x", [one / other for one, other in pairs], **labels)
    yield once("sent_over_rows", "x", runs[0][0]["sent_bytes"] / size, **labels)
    told = [max(one["arena_bytes"] for one in ranks) / ranks[0]["said_bytes"] for ranks in runs]
    yield summary("arenas_over_said", "x", told, **labels)
    own = [max(one["own_bytes"] for one in ranks) / MEGA for ranks in runs]
    yield summary("process_mb", "MB", own, **labels)
    yield once("bound_mb", "MB", runs[0][0]["buffer_bytes"] / MEGA, **labels)


def moved(scale: Scale, case: Case, seed: int) -> list[dict[str, Any]]:
    """The answers of the ranks after a move."""
    job = f"bench-elastic-{secrets.token_hex(4)}"
    first = ordered(scale, case.before, job, seed)
    with first.leaving_nothing():
        before = launched(first)
        for found in first.arenas():
            if found.host in case.lost:
                remove(Path(found.path))
        after = launched(ordered(scale, case.after, job, seed))
    check(before, after)
    return after


def ordered(scale: Scale, hosts: str, job: str, seed: int) -> Order:
    """A launch."""
    ranks = 2 * len(hosts)
    n, k = CODES.get(ranks, (2, 1))
    return Order(
        job=job,
        arena_dir=scale.arena_dir,
        n=n,
        k=k,
        seed=seed,
        timeout_s=scale.timeout_s,
        rows=scale.table_bytes // RECORD_BYTES,
        hosts=tuple(host for host in hosts for _ in range(2)),
    )


def launched(order: Order) -> list[dict[str, Any]]:
    """Runs a launch; its processes end, and their memory stays."""
    with Ranks(len(order.hosts), work, order, deadline_s=order.timeout_s) as ranks:
        answers = ranks.answers()
        ranks.dismiss()
    return answers


def check(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> None:
    """Compares the table before a move and after it.

    Raises:
        WrongResult: It didn't move, or has other bits.
    """
    if {one["kind"] for one in after} != {"move"} or after[0]["step"] != before[0]["step"] + 1:
        raise WrongResult(f"the memory did not move: {[(one['kind'], one['step']) for one in after]}")
    if after[0]["checksum"] != before[0]["next"]:
        raise WrongResult("the table has other bits after the move than before it")
