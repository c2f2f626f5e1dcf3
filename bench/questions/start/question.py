"""Does a start, and a restart after a loss, go through with many ranks, and what does it ask of the store?

Real ranks, one process each, forked from one server that has imported everything; the store is one that
outlives them, as torchrun's does. The ranks train a few steps of a tiny model; then all are killed, one of
their arenas is removed, and the job is started again, with other RANKs, and trained on. Before anything is
reported, tables, optimizer state and dense part of every rank are compared bit for bit with those of a job
that was never killed.

- `start_s`: from a rank's first call of ecemb to the end of `protect`, at the fresh start, without imports.
- `restart_s`: the same at the restart, which recovers the lost rank.
- `store_value_bytes_max`: the largest value of the start that ecemb keeps in the store. With `simulated` 1 it
  is that of made-up hosts of 8 ranks, through the code that encodes it, of which no process runs.

Low and high are over the ranks. Many ranks on few cores take turns: seconds then say that it works, no more.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from bench.harness.ranks import Ranks
from bench.harness.result import Arguments, Row, WrongResult, by_metric, once, summary
from bench.questions.start.rank import KILLED, Order, work
from ecemb.coding.code import Code
from ecemb.memory.header import Header, Identity, State
from ecemb.memory.scan import remove
from ecemb.net import roster
from ecemb.net.assignment import Report, Roster, Worker

CODE = Code(4, 3)
PER_HOST = 8
SIMULATED_RANKS = (64, 512, 2048, 4096, 8192)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        ranks: How many there are.
        rows: Of the table on each.
        batch: Samples a rank takes in a step.
        steps: Before the kill, and after it.
        arena_dir: Where arenas lie.
        timeout_s: Of every wait.
    """

    ranks: tuple[int, ...] = (8, 64)
    rows: int = 200
    batch: int = 50
    steps: int = 3
    arena_dir: str = "/dev/shm"
    timeout_s: float = 1200.0


FULL = Scale()
QUICK = Scale(ranks=(5,), timeout_s=300.0)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    if arguments.setting:
        scale = replace(scale, ranks=(int(arguments.setting),))
    rows = [row for ranks in scale.ranks for row in measure(scale, ranks, arguments.seed)]
    for ranks in SIMULATED_RANKS:
        size = len(roster.write_roster(simulated(ranks)))
        rows.append(once("store_value_bytes_max", "bytes", size, ranks=ranks, simulated=1))
    return by_metric(rows)


def measure(scale: Scale, ranks: int, seed: int) -> list[Row]:
    """Starts, kills, and starts again, and compares the end with that of a job that was left alone.

    Raises:
        WrongResult: They differ.
        RankFailed: A rank did.
    """
    timeout = timedelta(seconds=scale.timeout_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    order = Order(
        job=f"bench-start-{secrets.token_hex(4)}",
        arena_dir=scale.arena_dir,
        port=store.port,
        life=KILLED,
        until=scale.steps,
        n=CODE.n,
        k=CODE.k,
        rows=scale.rows,
        batch=scale.batch,
        seed=seed,
        timeout_s=scale.timeout_s,
    )
    alone = replace(order, job=f"{order.job}-alone", until=2 * scale.steps)
    with order.leaving_nothing():
        with alone.leaving_nothing():
            undisturbed = lives(ranks, alone)
        before = lives(ranks, order)
        lost = ranks // 3
        gone = [one for one in order.arenas() if _rank(one.header) == lost]
        if [remove(one, force=True) for one in gone] != [True]:
            raise WrongResult(f"rank {lost} has {len(gone)} arenas, and should have one")
        after = lives(ranks, replace(order, life=KILLED + 1, until=2 * scale.steps))
        largest = stored(dist.PrefixStore(f"ecemb/{order.job}", store), ranks)
    check(undisturbed, before, after, scale.steps)
    return [
        summary("start_s", "s", [one["seconds"] for one in before], ranks=ranks),
        summary("restart_s", "s", [one["seconds"] for one in after], ranks=ranks),
        once("store_value_bytes_max", "bytes", largest, ranks=ranks, simulated=0),
    ]


def lives(ranks: int, order: Order) -> list[dict[str, Any]]:
    """One life of a job: the answers of all ranks, by rank. All are killed at its end."""
    with Ranks(ranks, work, order, deadline_s=order.timeout_s) as running:
        return sorted(running.answers(), key=lambda answer: answer["rank"])


def check(
    undisturbed: Sequence[Mapping[str, Any]],
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    steps: int,
) -> None:
    """Compares a job that was killed with one that was not.

    Raises:
        WrongResult: Some rank ended elsewhere, went on from another step, or holds parity that doesn't fit.
    """
    for told, first in ((undisturbed, 0), (before, 0), (after, steps)):
        if wrong := [one["rank"] for one in told if one["first"] != first or one["wrong_words"]]:
            raise WrongResult(f"ranks {wrong} did not go on from step {first}, or their parity doesn't fit")
    if wrong := [a["rank"] for a, b in zip(after, undisturbed, strict=True) if a["digest"] != b["digest"]]:
        raise WrongResult(f"ranks {wrong} of {len(after)} hold other bits than in a job that was not killed")


def stored(store: dist.Store, ranks: int) -> int:
    """Bytes of the largest value that the last start left."""
    plans, _, tables, _ = json.loads(store.get("current"))
    names = [*(f"roster/{name}" for name in plans), *(f"domains/{name}" for name in tables), "current"]
    names += [f"announce/{index}" for index in range(ranks)]
    return max(len(store.get(name)) for name in names)


def simulated(ranks: int) -> Roster:
    """The roster of a restart of this many ranks on hosts of 8."""
    hosts = [f"node-{host:05}.cluster.example.org" for host in range(ranks // PER_HOST)]
    domains = tuple(host for host in hosts for _ in range(PER_HOST))
    workers: list[Worker] = []
    reports: list[Report] = []
    for rank, host in enumerate(domains):
        address = f"10.{rank >> 16}.{rank >> 8 & 255}.7"
        workers.append(Worker(host, f"{rank:016x}", 1_000_000 + rank, (address,), 40_000))
        words = {"joined": 10**18, "generation_id": 2**61, "opened": 10**18}
        prepared = 10**6 + rank % 2
        header = Header(
            Identity("dlrm", f"{rank:016x}", rank, ranks, domains, fill=10**18),
            State.LIVE,
            **words,
            committed=10**6,
            prepared=prepared,
        )
        reports.append(Report(host, f"/dev/shm/ecemb-1000/dlrm/{host}/{rank:016x}.arena", header, None, None))
    secret = "ab" * 16
    return Roster(10**18 + 1, 2**61, "c" * 16, False, tuple(workers), tuple(reports), secret, 10**18)


def _rank(header: Header | None) -> int | None:
    return None if header is None else header.constants.rank
