"""Where does the time of a protected step go, and how many bytes are moved in it?

A model is trained under torch's profiler, which shows its own steps and ecemb's phases as spans.

- `span_ms`: wall time of all spans of a name in a step of rank 0; median, smallest and largest over the
  steps. `exchange` and `agree` are mostly waiting for slower ranks; `capture` is a part of `backward`
  (TorchRec), or of `optimizer` (torch's). The profiler itself takes time: `overhead`
  asks what protection costs.
- `timeline_ms`: the spans of the one step of rank 0 that took the median time; docs/performance.md has their
  picture.
- `memory_bytes_per_step`: what a rank reads and writes in memory for the touched rows, pass by pass: records
  and addresses, as far as the passes follow from the code; sockets' own copies, dense state and
  the rank's own state are not in it. `least` is what no transaction with r parity blocks can do without.
- `network_bytes_per_step`: what a rank sends, as the guard counts it; `least` are the records alone, r times.
- `moved_over_least`: the ratio of the two.
- `copied_gb_per_s`: what a rank reads and writes in a second of processor time while all ranks do nothing but
  copy what no cache holds.
- `replicated_bytes_per_step`: read and written to copy dense parameters, their optimizers' state and buffers.
- `at_copying_speed_ms`: processor time of a rank in a step if the bytes in memory, replicated state included,
  went at that speed: a bound from below, without sockets, agreement, Python.
- `touched_rows_per_step`, `record_bytes`: of what.

The setting is `dlrm` of the question about overhead, with every step committed. Afterwards parity has to fit
every row, and each step has to have all its spans.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.harness.result import Arguments, Label, Row, WrongResult, once, summary
from bench.questions.overhead.question import CODES, Scale, train
from bench.questions.profile.rank import OURS, OWN, STEP, Span, work
from bench.workloads.training_rank import Order
from ecemb.coding.code import Code

TRAINING = ("forward", "backward", "optimizer")
PHASES = ("capture", "state", "status", "delta", "exchange", "agree", "apply")
WORD_BYTES = 8
"""Of an address, and what records are padded to."""
MOVED, LEAST = "moved", "least"


class Pass(NamedTuple):
    """One pass over the touched rows, or over what came of other ranks' rows.

    Attributes:
        phase: Of the step.
        what: It does.
        own: Records read or written for each touched row.
        kept: Records read or written for each parity block of each row; a keeper gets as many as it sends.
        addresses: Read or written for each touched row.
        kept_addresses: For each parity block of each row.
        least_own, least_kept: Records without which it can't be.
    """

    phase: str
    what: str
    own: int = 0
    kept: int = 0
    addresses: int = 0
    kept_addresses: int = 0
    least_own: int = 0
    least_kept: int = 0

    def moved_bytes(self, r: int, record_bytes: float) -> float:
        """For each touched row; records are padded to whole words."""
        words = -(-record_bytes // WORD_BYTES) * (self.own + r * self.kept)
        return (words + self.addresses + r * self.kept_addresses) * WORD_BYTES

    def least_bytes(self, r: int, record_bytes: float) -> float:
        """For each touched row."""
        return (self.least_own + r * self.least_kept) * record_bytes


PASSES = (
    Pass("capture", "old records, from rows to journal", own=2, addresses=2, least_own=2),
    Pass("delta", "old and new records, to a message", own=3, addresses=2, least_own=3),
    Pass("exchange", "messages out, messages into the inbox", kept=2, kept_addresses=2, least_kept=2),
    Pass("exchange", "addresses checked", kept_addresses=1),
    Pass("apply", "inbox times weight, added to parity", kept=3, kept_addresses=1, least_kept=3),
)
"""What ecemb does, in `RowJournal`, `Transport.exchange` and `ParityBlocks`; docs/performance.md says why the
least is what it is."""

FULL = Scale(pairs=15)
QUICK = Scale(tables=4, rows=2000, dim=16, batch=64, pairs=3, timeout_s=280)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    return [row for code in CODES for row in measure(scale, arguments.engine, code, arguments.seed)]


def measure(scale: Scale, engine: str, code: Code, seed: int) -> list[Row]:
    """Trains on n ranks.

    Raises:
        WrongResult: A span is missing, or parity doesn't fit the rows.
        RankFailed: A rank failed.
    """
    order, answers = train(scale, engine, code, work, window=1, overlap=False, steps=scale.pairs, seed=seed)
    answers = sorted(answers, key=lambda answer: answer["rank"])
    check(order, answers)
    labels: dict[str, Label] = {
        "engine": engine,
        "code": f"({code.n}, {code.k})",
        "setting": scale.setting,
    }
    first = answers[0]["steps"]
    return [*spans(first, labels), *timeline(first, labels), *volumes(answers, order, labels)]


def check(order: Order, answers: Sequence[Mapping[str, Any]]) -> None:
    """Looks for what has to be there.

    Raises:
        WrongResult: It isn't.
    """
    wanted = {*(OWN + name for name in (STEP, *TRAINING)), *(OURS + name for name in PHASES)}
    for rank, answer in enumerate(answers):
        if answer["wrong_words"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")
        if len(answer["steps"]) != order.steps:
            raise WrongResult(f"rank {rank}: {len(answer['steps'])} of {order.steps} steps have a span")
        for number, step in enumerate(answer["steps"]):
            if missing := wanted - {span.name for span in step}:
                raise WrongResult(f"rank {rank}: step {number} has no span {sorted(missing)}")


def name_of(span: Span) -> str:
    """As rows have it: without where it is from."""
    return span.name.removeprefix(OWN).removeprefix(OURS)


def spans(steps: Sequence[Sequence[Span]], labels: Mapping[str, Label]) -> list[Row]:
    """Returns `span_ms`."""
    names = dict.fromkeys(name_of(span) for step in steps for span in step)
    return [
        summary(
            "span_ms",
            "ms",
            [sum(s.end_ms - s.begin_ms for s in step if name_of(s) == name) for step in steps],
            **labels,
            span=name,
        )
        for name in names
    ]


def timeline(steps: Sequence[Sequence[Span]], labels: Mapping[str, Label]) -> list[Row]:
    """Returns `timeline_ms` of the step that took the median time."""
    middle = statistics.median_low(step[0].end_ms for step in steps)
    step = next(step for step in steps if step[0].end_ms == middle)
    return [
        once(
            "timeline_ms",
            "ms",
            round(span.end_ms - span.begin_ms, 4),
            **labels,
            span=name_of(span),
            begin_ms=round(span.begin_ms, 4),
        )
        for span in step
    ]


def volumes(answers: Sequence[Mapping[str, Any]], order: Order, labels: Mapping[str, Label]) -> list[Row]:
    """Returns bytes moved and bytes that have to be, of all ranks."""
    r, record_bytes = order.n - order.k, answers[0]["record_bytes"]
    touched = [answer["touched_rows"] / order.steps for answer in answers]
    sent = [answer["sent_bytes"] / order.steps for answer in answers]
    rows = [
        summary("touched_rows_per_step", "rows", touched, **labels),
        once("record_bytes", "bytes", record_bytes, **labels),
    ]
    for one in PASSES:
        for method, each in ((MOVED, one.moved_bytes), (LEAST, one.least_bytes)):
            values = [count * each(r, record_bytes) for count in touched]
            pass_of = {"phase": one.phase, "pass": one.what, "method": method}
            rows.append(summary("memory_bytes_per_step", "bytes", values, **labels, **pass_of))
    least = [count * r * record_bytes for count in touched]
    for method, values in ((MOVED, sent), (LEAST, least)):
        rows.append(summary("network_bytes_per_step", "bytes", values, **labels, method=method))
    moved_in_memory = sum(one.moved_bytes(r, record_bytes) for one in PASSES)
    least_in_memory = sum(one.least_bytes(r, record_bytes) for one in PASSES)
    rows.append(
        once("moved_over_least", "ratio", moved_in_memory / least_in_memory, **labels, where="memory")
    )
    over = [a / b for a, b in zip(sent, least, strict=True)]
    rows.append(summary("moved_over_least", "ratio", over, **labels, where="network"))
    dense = [2 * answer["dense_bytes"] for answer in answers]
    rates = [answer["copied_bytes_per_s"] for answer in answers]
    rows.append(summary("replicated_bytes_per_step", "bytes", dense, **labels))
    rows.append(summary("copied_gb_per_s", "GB/s", [rate / 1e9 for rate in rates], **labels))
    for method, each in ((MOVED, moved_in_memory), (LEAST, least_in_memory)):
        bounds = [
            1000 * (count * each + copied) / rate
            for count, copied, rate in zip(touched, dense, rates, strict=True)
        ]
        rows.append(summary("at_copying_speed_ms", "ms", bounds, **labels, method=method))
    return rows
