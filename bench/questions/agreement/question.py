"""What does it cost the ranks to agree on a transaction, by their number?

Real ranks, one process each, forked from one server that has imported everything, train windows of two steps
with the code (4, 3) on tiny tables. ecemb's calls of torch.distributed are counted in the processes
themselves. The numbers of ranks take turns, ascending and descending, so that a change of the machine's speed
meets all of them.

- `agreement_messages_per_transaction`: messages that a rank sends for protection in one transaction: what the
  ranks say to one another, and the sizes and the deltas for the n - 1 ranks that keep a rank's parity.
- `agreement_messages_inside`: messages of a step that doesn't end a transaction.
- `agreement_bytes_per_transaction`: the same messages by `phase`; those of `exchange` are the deltas, which
  grow with the rows that change, not with the ranks.
- `agreement_cpu_ms`: processor time of a rank in one transaction in the phases that speak to other ranks, and
  in the threads that send and receive for them, by their own clocks, less what these take in as much time
  when no rank sends (gloo looks for messages a hundred times a second, as it does for the training). So ranks
  that share cores, and wait, pay no more than others. It is the mean of the ranks; low and high are over the
  rounds.
- `agreement_cpu_fixed_ms`, `agreement_cpu_us_per_message`: the straight line through these, by messages.
- `agreement_messages_modelled`, `agreement_cpu_modelled_ms`: of more ranks than were run: a line through the
  messages by `law`, whichever fits the ranks that were run exactly, and the time of as many messages by
  the line above. `log2`: a number for each doubling of the ranks. `linear`: a number for each rank.
- `agreement_cpu_crowded_ms`: processor time with 16 ranks while 4 `jobs` of 16 ranks train side by side, in
  64 processes. More processes on a processor find colder caches, whatever they run.
- `agreement_cpu_over`: processor time with 64 ranks over that with 16, in each round; median, least and most
  of the rounds. Six of them have the true median between least and most with a probability of 97 %. With one
  of the `jobs` at a time, caches that are colder count; with 4, it is what more ranks cost by themselves.

Parity has to fit all rows afterwards, and all messages have to be counted.
"""

from __future__ import annotations

import math
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.ranks import Ranks
from bench.harness.result import Arguments, Row, WrongResult, by_metric, once, summary
from bench.questions.agreement.rank import Order, work
from ecemb.coding.code import Code

Answers = Sequence[Mapping[str, Any]]
"""The reports of all ranks, in their order."""

CODE = Code(4, 3)
MODELLED_RANKS = (256, 1024, 4096)
COMPARED = (64, 16)
LAWS: dict[str, Callable[[int], float]] = {
    "log2": lambda ranks: math.ceil(math.log2(ranks)),
    "linear": lambda ranks: ranks - 1,
}
"""Name -> what the number of messages grows with."""
_EXACT = 1e-6


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        ranks: How many there are, ascending.
        rows: Of the table on each.
        batch: Samples a rank takes in a step.
        transactions: That are measured in a round.
        rounds: How often all numbers of ranks take their turn.
        arena_dir: Where arenas lie.
        timeout_s: Of every wait.
    """

    ranks: tuple[int, ...] = (4, 8, 16, 64)
    rows: int = 200
    batch: int = 50
    transactions: int = 20
    rounds: int = 6
    arena_dir: str = "/dev/shm"
    timeout_s: float = 1200.0


FULL = Scale()
QUICK = Scale(ranks=(4, 5, 8), transactions=3, rounds=1, timeout_s=280.0)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    if arguments.setting:
        scale = replace(scale, ranks=(int(arguments.setting),))
    many, few = COMPARED
    launches = [(ranks, 1) for ranks in scale.ranks]
    if {many, few} <= set(scale.ranks):
        launches.append((few, many // few))
    rounds: dict[tuple[int, int], list[Answers]] = {launch: [] for launch in launches}
    for number in range(scale.rounds):
        for ranks, jobs in launches[:: -1 if number % 2 else 1]:
            rounds[ranks, jobs].append(count(scale, ranks, arguments.seed + number, jobs))
    alone = {ranks: answers for (ranks, jobs), answers in rounds.items() if jobs == 1}
    rows = [row for ranks, answers in alone.items() for row in counted(answers, ranks)]
    return by_metric([*rows, *compared(rounds), *modelled(rows)])


def count(scale: Scale, ranks: int, seed: int, jobs: int = 1) -> Answers:
    """Trains on this number of ranks, in one job or in several side by side.

    Returns:
        The report of each rank, in their order, job by job.

    Raises:
        WrongResult: Messages were not counted, or parity doesn't fit.
        RankFailed: A rank failed.
    """
    answers: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-") as meeting, ExitStack() as stack:
        running: list[Ranks] = []
        for number in range(jobs):
            order = Order(
                job=f"bench-agreement-{secrets.token_hex(4)}",
                arena_dir=scale.arena_dir,
                n=CODE.n,
                k=CODE.k,
                rows=scale.rows,
                batch=scale.batch,
                transactions=scale.transactions,
                seed=seed + number,
                timeout_s=scale.timeout_s,
                meeting=Path(meeting),
                jobs=jobs,
            )
            stack.enter_context(order.leaving_nothing())
            running.append(stack.enter_context(Ranks(ranks, work, order, deadline_s=scale.timeout_s)))
        for job in running:
            found = sorted(job.answers(), key=lambda answer: answer["rank"])
            job.finished()
            check(found)
            answers += found
    return answers


def check(answers: Answers) -> None:
    """Looks for what has to be there.

    Raises:
        WrongResult: It isn't.
    """
    for rank, answer in enumerate(answers):
        if answer["unknown"]:
            raise WrongResult(f"rank {rank} called {answer['unknown']}, whose messages are not counted")
        if answer["wrong_words"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")
        if not all(messages_of(step) for step in answer["ends"]):
            raise WrongResult(f"rank {rank} committed without a message")


def messages_of(step: Mapping[str, Sequence[int]]) -> int:
    """All messages of a step."""
    return sum(messages for messages, _ in step.values())


def counted(rounds: Sequence[Answers], ranks: int) -> Iterator[Row]:
    """Returns what was counted on this number of ranks."""
    answers = [answer for of_round in rounds for answer in of_round]
    transactions = len(answers[0]["ends"])
    for metric, steps in (
        ("agreement_messages_per_transaction", "ends"),
        ("agreement_messages_inside", "inside"),
    ):
        each = [messages_of(step) for answer in answers for step in answer[steps]]
        yield summary(metric, "messages", each, ranks=ranks)
    for phase in dict.fromkeys(phase for answer in answers for step in answer["ends"] for phase in step):
        each = [
            sum(step.get(phase, (0, 0))[1] for step in answer["ends"]) / transactions for answer in answers
        ]
        yield summary("agreement_bytes_per_transaction", "bytes", each, ranks=ranks, phase=phase)
    yield summary("agreement_cpu_ms", "ms", [cpu_ms(of_round) for of_round in rounds], ranks=ranks)


def cpu_ms(answers: Answers) -> float:
    """Processor time of a transaction, the mean of the ranks."""
    spent_s = statistics.fmean(sum(answer["cpu_s"].values()) for answer in answers)
    return 1000 * spent_s / len(answers[0]["ends"])


def compared(rounds: Mapping[tuple[int, int], Sequence[Answers]]) -> Iterator[Row]:
    """Returns how processor time grows with the ranks, if both numbers were run.

    Args:
        rounds: By number of ranks, and of jobs side by side.
    """
    many, few = COMPARED
    for ranks, jobs in rounds:
        if ranks != few or (many, 1) not in rounds:
            continue
        spent = [cpu_ms(answers) for answers in rounds[few, jobs]]
        if jobs > 1:
            yield summary("agreement_cpu_crowded_ms", "ms", spent, ranks=few, jobs=jobs)
        each = [cpu_ms(answers) / less for answers, less in zip(rounds[many, 1], spent, strict=True)]
        yield summary("agreement_cpu_over", "ratio", each, ranks=many, than=few, jobs=jobs)


def modelled(rows: Sequence[Row]) -> Iterator[Row]:
    """Returns lines through what was counted, and what they say of more ranks."""
    messages = of(rows, "agreement_messages_per_transaction")
    cpu = of(rows, "agreement_cpu_ms")
    if len(cpu) < len(LAWS) + 1:
        return
    per_message, fixed = np.polyfit([messages[ranks] for ranks in cpu], [*cpu.values()], 1)
    yield once("agreement_cpu_fixed_ms", "ms", float(fixed))
    yield once("agreement_cpu_us_per_message", "us", 1000 * float(per_message))
    for law, grows in LAWS.items():
        of_ranks = np.array([grows(ranks) for ranks in messages])
        slope, least = np.polyfit(of_ranks, [*messages.values()], 1)
        off = np.abs(least + slope * of_ranks - [*messages.values()]).max()
        if off > _EXACT * max(messages.values()):
            continue
        for ranks in MODELLED_RANKS:
            many = float(least + slope * grows(ranks))
            yield once("agreement_messages_modelled", "messages", many, ranks=ranks, law=law)
            spent = float(fixed + per_message * many)
            yield once("agreement_cpu_modelled_ms", "ms", spent, ranks=ranks, law=law)
        return


def of(rows: Sequence[Row], metric: str) -> dict[int, float]:
    """A metric's values by number of ranks."""
    return {int(row.labels["ranks"]): row.value for row in rows if row.metric == metric}
