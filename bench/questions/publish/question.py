"""How fresh are the rows that a follower serves, and what does an interval write?

Two ranks, one process each, train tables of `ecemb.nn` under a guard, and save beside the training with
`guard.save(asynchronous=True)` every few steps, to a folder on disk. Another process follows: an
`ecemb.checkpoint.Follower`, which looks for a newer checkpoint 50 times a second, and keeps the weights. All
three share the machine's cores. At the end, the follower's rows must be those of a follower that has read the
last checkpoint alone, bit by bit, and where rows are stored exactly, those of the training.

- `writer`: torch.distributed.checkpoint, which is `guard.save(folder)`; the others are Check-N-Run's, by its
  policies, through a `DurableTier`. `bits`: of the weights; the optimizer's state is always exact here.
- `freshness_s`: from the moment at which the checkpoint is complete, for all who look, until its rows are
  served.
- `step_to_served_s`: from the end of the step that it is of: the copy, the write to disk and the commit come
  before.
- `written_mb`: bytes of all files of a checkpoint, weights, optimizer state and dense state, in 10^6. The
  first checkpoint, which is always full, doesn't count; a later one that is full does.
- `first_read_s`: a follower that starts reads the newest checkpoint, and what it is based on.
- `not_served`: checkpoints that a newer one had followed before the follower looked, in percent.
- `changed_rows_pct`: rows of rank 0 that change in an interval, in percent of all that it has.
"""

from __future__ import annotations

import importlib
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from baselines.check_n_run.codec import loaded, stored
from baselines.check_n_run.following import Increments
from baselines.check_n_run.manifest import manifest_path
from baselines.check_n_run.quantize_scheme import Scheme
from bench.harness.ranks import Ranks
from bench.harness.result import Arguments, Label, Row, WrongResult, by_metric, once, summary
from bench.questions.publish.rank import EXACT_BITS, FULL, KINDS, Kind, Order, Scale, work
from bench.workloads.training_rank import digest
from ecemb.checkpoint import Follower, Snapshot

POLL_S = 0.02
FOUR = Scheme("adaptive", 4)
IMPORTS = ("torch.distributed.checkpoint", "baselines.check_n_run.quantize")
"""What ranks and the follower import when they save or read first."""
MEGA = 1e6
WHOLE = Scale()
QUICK = Scale(
    tables=2, rows=400, dim=16, batch=32, every=2, saves=3, kinds=(FULL, KINDS[3], KINDS[-1]), timeout_s=280.0
)


@dataclass(frozen=True)
class Served:
    """One snapshot, when it was served.

    Attributes:
        step: see `Snapshot`.
        served: time of day.
        committed: time of day at which the checkpoint was complete.
        size_bytes: of its files.
    """

    step: int
    served: float
    committed: float
    size_bytes: int


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring.

    Raises:
        WrongResult: Other rows are served than were trained.
        RankFailed: A rank failed.
    """
    scale = QUICK if arguments.quick else WHOLE
    for module in IMPORTS:  # takes seconds, once in a process
        importlib.import_module(module)
    rows = torch.zeros(1, scale.dim)
    loaded(stored(rows, FOUR), FOUR, rows)  # compiles
    return by_metric([row for kind in scale.kinds for row in of_kind(scale, kind, arguments.seed)])


def of_kind(scale: Scale, kind: Kind, seed: int) -> Iterator[Row]:
    """What was measured of one way to save."""
    with (
        tempfile.TemporaryDirectory(prefix="ecemb-bench-") as files,
        tempfile.TemporaryDirectory(prefix="ecemb-bench-", dir=scale.memory) as memory,
    ):
        order = Order(
            **{**asdict(scale), "kinds": (), "memory": memory},
            job=f"bench-publish-{secrets.token_hex(4)}",
            arena_dir=scale.memory,
            n=scale.ranks,
            k=scale.ranks - 1,
            seed=seed,
            files=files,
            kind=kind,
        )
        found, last, answers = followed(order)
        began = time.perf_counter()
        alone = follower_of(order)
        alone.refresh()
        first_s = time.perf_counter() - began
    check(last, alone.snapshot, answers, exact=kind.bits == EXACT_BITS)
    ended = answers[0]["ended"]
    labels: dict[str, Label] = {"setting": scale.setting, "writer": kind.writer, "bits": kind.bits}
    yield summary("freshness_s", "s", [one.served - one.committed for one in found], **labels)
    yield summary("step_to_served_s", "s", [one.served - ended[one.step] for one in found], **labels)
    later = [one.size_bytes / MEGA for one in found if one.step > scale.every]
    yield summary("written_mb", "MB", later, **labels)
    yield summary("first_read_s", "s", [first_s], **labels)
    yield once("not_served", "%", 100 * (1 - len(found) / scale.saves), **labels)
    yield summary("changed_rows_pct", "%", answers[0]["changed_pct"], **labels)


def followed(order: Order) -> tuple[list[Served], Snapshot, list[dict[str, Any]]]:
    """Trains, and follows meanwhile.

    Returns:
        The snapshots; the last one; and the answer of each rank.

    Raises:
        WrongResult: The last checkpoint was never served.
        RankFailed: A rank failed.
    """
    found: list[Served] = []
    with order.leaving_nothing(), started(order) as ranks:
        follower = follower_of(order)
        while follower.step < order.last_step and follower.wait(order.timeout_s, poll_s=POLL_S):
            found.append(served(order, follower.snapshot))
        answers = ranks.answers()
        ranks.finished()
    if follower.step != order.last_step:
        raise WrongResult(
            f"{order.kind}: step {order.last_step} was saved, and step {follower.step} is served"
        )
    return found, follower.snapshot, answers


def started(order: Order) -> Ranks:
    """The training."""
    return Ranks(order.ranks, work, order, deadline_s=order.timeout_s, imports=IMPORTS)


def follower_of(order: Order) -> Follower:
    """Of a way to save."""
    return Follower(order.files if order.kind.writer == FULL.writer else Increments(order.files))


def served(order: Order, snapshot: Snapshot) -> Served:
    """What is known of a snapshot that has just been read.

    A checkpoint is complete when a folder or a manifest gets its name, by a rename, which the file system
    notes.
    """
    now = time.time()
    place = Path(order.files, snapshot.name)
    visible = place if order.kind.writer == FULL.writer else Path(order.files, manifest_path(snapshot.name))
    files = [path for path in {*place.rglob("*"), visible} if path.is_file()]
    return Served(snapshot.step, now, visible.stat().st_ctime, sum(path.stat().st_size for path in files))


def check(last: Snapshot, alone: Snapshot, answers: Sequence[Any], *, exact: bool) -> None:
    """Compares what is served.

    Raises:
        WrongResult: It is not what was saved.
    """
    if last.name != alone.name or last.tables.keys() != alone.tables.keys():
        raise WrongResult(f"{last.name} was served last, and {alone.name} is the newest checkpoint")
    for name, columns in last.tables.items():
        if not torch.equal(columns["weight"], alone.tables[name]["weight"]):
            raise WrongResult(f"table {name}: increments came to other rows than {alone.name} has")
    for answer in answers if exact else ():
        for name, start, rows, trained in answer["rows"]:
            if digest([last.rows(name, torch.arange(start, start + rows))]) != trained:
                raise WrongResult(f"table {name}: other rows from {start} on are served than were trained")
