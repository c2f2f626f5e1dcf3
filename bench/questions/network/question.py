"""What do protection, agreement and a rebuild cost over links with a rate, beside this machine's loopback?

Each rank is on a host of its own: a network namespace, whose link to all others is limited in both
directions, to 1 or 10 Gbit/s. The `link` of a row says by which queue of the kernel: `netem`, which also
delays each packet by 0.2 ms, or, where the kernel lacks it, `tbf`, which has no delay. There another link has
one, by a `relay`: a process that carries packets of 65,000 bytes, takes processor time from the ranks, and
can't reach 10 Gbit/s. Agreement and recovery are measured there. On `loopback` the ranks are in the machine's
own network, without limits. Links take their turns, ascending and descending. All hosts share the machine's
processors, and the kernel, which carries the packets.

- `tcp_gbit_per_s`, `round_trip_us`: the control between two hosts without ecemb, a plain stream, and a byte
  that comes back.
- `step_wall_ms`: wall time of a step, of the slowest rank. A protected model and a bare one take turns in the
  same processes, on the same batches: tables of ecemb.nn with Adagrad under a small dense part.
  `added_wall_ms` and `added_wall_pct`: what the protected model's steps take longer; `commit_wall_ms`: the
  same in the steps that end a window. Means, and in brackets 95 % intervals, by resampling launches and the
  rounds of each.
- `phase_ms`: a rank's seconds by phase, as `guard.stats()` has them, of a step; the mean of the ranks, from
  the least to the most. `status`, `exchange` and `agree` are mostly the wait for slower ranks.
- `bytes_per_step`: what a rank sends for protection in a step, `counted_by` the guard, or over the link: what
  a protected step sends there beyond a bare one, with headers and acknowledgements. Packets are as large as
  hosts queue them, 16 to 64 KB; the frames of a network card, of 1,500 bytes, have some 4 % more headers.
  `link, training` is what a bare step sends. `link_over_guard` is the ratio of the first two.
- `agreement_us`: from the moment at which the last rank has come to a step's `status`, to its `exchange` of
  deltas, or to its vote (`agree`), until all ranks have left it, by ranks. The table is so small that a step
  is little else. Means with 95 % intervals, as above.
- `recovery_s`: all of `ecemb.protect`, where four ranks were killed, one has lost its memory, and their
  processes are there again; `rebuild_s`: its rebuild. `rebuild_mb_per_s`: what was lost, rows and parity,
  over the latter. `rebuild_over_link`: that speed over the control's stream in the same run.
  `rebuild_over_plain`: over that of plain gloo with the same messages between the same ranks, just after it.
  `received_over_lost`: what came over the replacement rank's link, over what was lost.
- `planned_s`, beside `measured_s`: what `ecemb plan` computes for the link's rate and for the round trip of
  the control: a step's exchange of deltas, an agreement (status, exchange and vote of a small table), a
  rebuild. It has a processor for each rank. Bytes that are counted by the `planner` are those of its rows.

In the end both models have to hold the same bytes, parity has to fit all rows, and a recovered rank has to
hold the bytes that it had before the kill.
"""

from __future__ import annotations

import dataclasses
import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.harness.links import Hosts, Link, Relayed, check
from bench.harness.ranks import Ranks
from bench.harness.result import Arguments, Label, Row, WrongResult, by_metric, once, summary
from bench.questions.network import planned
from bench.questions.network.rank import (
    EXCHANGE,
    METHODS,
    TOGETHER,
    Life,
    Talk,
    agree,
    live,
    plain,
    steps,
)
from bench.questions.overhead.estimate import Estimate, Floats, Strata
from bench.questions.recovery.wire import SAME
from bench.workloads.training_rank import BARE, PHASE, PROTECTED, Order
from ecemb.coding.code import Code
from ecemb.memory.scan import remove
from ecemb.tools.job import Job

CODE = Code(4, 3)
LOST = 1
"""The rank whose memory goes."""
LOOPBACK = "loopback"
LINKS = (Link("10 Gbit/s", 10, 200), Link("1 Gbit/s", 1, 200))

Answers = Sequence[Mapping[str, Any]]
"""The reports of all ranks, in their order."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        links: Beside loopback.
        launches: How often all of them take their turn.
        tables: Number of tables, of the model whose steps are compared.
        rows: Of each, over all ranks.
        dim: Of each row.
        batch: Samples of a rank in a step.
        skew: Of the rows' popularity.
        windows: Steps of a transaction -> rounds of a launch, whole windows.
        ranks: That agree.
        agreements: Steps in which they do, of a launch.
        lost_rows: Of a rank's table, whose memory is lost.
        arena_dir: Where arenas lie.
        timeout_s: Of every wait.
    """

    links: tuple[Link, ...] = LINKS
    launches: int = 3
    tables: int = 8
    rows: int = 100_000
    dim: int = 64
    batch: int = 1024
    skew: float = 1.2
    windows: Mapping[int, int] = field(default_factory=lambda: {1: 24, 16: 32})
    ranks: tuple[int, ...] = (4, 8)
    agreements: int = 60
    lost_rows: int = 400_000
    arena_dir: str = "/dev/shm"
    timeout_s: float = 300.0


FULL = Scale()
QUICK = dataclasses.replace(
    FULL,
    links=LINKS[-1:],
    launches=1,
    tables=2,
    rows=2000,
    dim=16,
    batch=64,
    windows={2: 4},
    ranks=(4,),
    agreements=3,
    lost_rows=2000,
)


class Ground:
    """Where ranks run: on hosts, or in the machine's own network.

    Args:
        hosts: None for the machine's own network.
        link: Of the hosts.

    Attributes:
        labels: Of all rows.
        rate_gbit: Of the link; 0 for none.
        is_counted: Whether links count bytes.
        is_delayed: Whether packets are delayed as the link is to delay them.
        trains: Whether steps of a training are measured.
    """

    def __init__(self, hosts: Hosts | None, link: Link | None) -> None:
        self._hosts = hosts
        self.labels: dict[str, Label] = {"link": LOOPBACK}
        self.rate_gbit = link.rate_gbit if link is not None else 0.0
        self.is_counted, self.is_delayed = hosts is not None, True
        self.trains = not isinstance(hosts, Relayed)
        if hosts is not None and link is not None:
            delay = f"{hosts.delay_us:g} us" if hosts.delay_us else "no delay"
            self.is_delayed = hosts.delay_us == link.delay_us
            self.labels = {"link": f"{link.name} by {hosts.queue}, {delay}"}

    def answers(
        self, count: int, function: Callable[..., None], *args: Any, deadline_s: float, by_end: bool = True
    ) -> list[Any]:
        """What ranks that call a function report, in the order of their RANK.

        Args:
            count: How many ranks.
            function: See `Ranks`.
            args: See `Ranks`.
            deadline_s: See `Ranks`.
            by_end: Whether they end by themselves; else all are killed when they have reported.

        Raises:
            RankFailed: One did.
        """
        if self._hosts is not None:
            started = self._hosts.ranks(count, function, *args, deadline_s=deadline_s)
        else:
            started = Ranks(count, function, *args, deadline_s=deadline_s)
        with started as ranks:
            found = ranks.answers()
            if by_end:
                ranks.finished()
        return found


@dataclass
class Found:
    """What was measured over one link, launch by launch.

    Attributes:
        plain: Of rank 0 and of rank 1, of each launch.
        steps: Window -> reports of all ranks, of each launch.
        agreed: Number of ranks -> reports of all ranks, of each launch.
        recovered: Reports of all ranks, of each launch.
    """

    plain: list[Answers] = field(default_factory=list[Answers])
    steps: dict[int, list[Answers]] = field(default_factory=dict[int, list[Answers]])
    agreed: dict[int, list[Answers]] = field(default_factory=dict[int, list[Answers]])
    recovered: list[Answers] = field(default_factory=list[Answers])


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring.

    Raises:
        Unavailable: No hosts can be made here.
        WrongResult: Protection or a recovery changed bytes.
    """
    check()
    scale = QUICK if arguments.quick else FULL
    with ExitStack() as stack:
        grounds = [Ground(None, None)]
        for link in scale.links:
            grounds.append(Ground(stack.enter_context(Hosts(max(scale.ranks), link)), link))
        if not grounds[-1].is_delayed:
            link = scale.links[-1]
            grounds.append(Ground(stack.enter_context(Relayed(max(scale.ranks), link)), link))
        found = [Found() for _ in grounds]
        for launch in range(scale.launches):
            places = range(len(grounds))[:: -1 if launch % 2 else 1]
            for place in places:
                measure(scale, grounds[place], found[place], arguments.seed + launch)
    rows: list[Row] = []
    for ground, one in zip(grounds, found, strict=True):
        rows += [*rows_of(ground, one), *beside_planner(scale, ground, one)]
    return by_metric(rows)


def measure(scale: Scale, ground: Ground, found: Found, seed: int) -> None:
    """One launch of everything over one link."""
    found.plain.append(ground.answers(2, plain, scale.timeout_s, deadline_s=scale.timeout_s))
    for window, rounds in scale.windows.items() if ground.trains else ():
        found.steps.setdefault(window, []).append(train(scale, ground, window, rounds, seed))
    for ranks in scale.ranks:
        found.agreed.setdefault(ranks, []).append(agreed(scale, ground, ranks, seed))
    found.recovered.append(recovered(scale, ground, seed))


def train(scale: Scale, ground: Ground, window: int, rounds: int, seed: int) -> Answers:
    """Trains a protected model and a bare one in turns.

    Raises:
        WrongResult: They differ, steps are missing, or parity doesn't fit.
    """
    order = Order(
        engine="sparse",
        **_job("steps", scale, seed),
        tables=scale.tables,
        rows=scale.rows,
        dim=scale.dim,
        lookups=1,
        dense="small",
        batch=scale.batch,
        skew=scale.skew,
        window=window,
        overlap=False,
        steps=rounds,
        methods=METHODS,
    )
    with order.leaving_nothing():
        answers = _by_rank(ground.answers(CODE.n, steps, order, deadline_s=scale.timeout_s))
    for rank, answer in enumerate(answers):
        if len(set(answer["digests"].values())) > 1:
            raise WrongResult(f"rank {rank}: the protected model is not what its bare twin is")
        if answer["committed_steps"] != rounds:
            raise WrongResult(f"rank {rank}: {answer['committed_steps']} of {rounds} steps are committed")
    _check_parity(answers)
    return answers


def agreed(scale: Scale, ground: Ground, ranks: int, seed: int) -> Answers:
    """Trains steps that are little else than their agreement.

    Raises:
        WrongResult: Parity doesn't fit.
    """
    order = Talk(**_job("agree", scale, seed), rows=200, batch=50, steps=scale.agreements)
    with order.leaving_nothing():
        answers = _by_rank(ground.answers(ranks, agree, order, deadline_s=scale.timeout_s))
    _check_parity(answers)
    return answers


def recovered(scale: Scale, ground: Ground, seed: int) -> Answers:
    """Kills all ranks, takes the memory of one, and has processes recover it.

    Raises:
        WrongResult: They hold other bytes than before, or recovered something else.
    """
    order = Life(**_job("lost", scale, seed), rows=scale.lost_rows, dim=scale.dim, batch=scale.batch, until=3)
    with order.leaving_nothing():
        before = _by_rank(ground.answers(CODE.n, live, order, deadline_s=scale.timeout_s, by_end=False))
        forget(order)
        after = _by_rank(ground.answers(CODE.n, live, order, deadline_s=scale.timeout_s, by_end=False))
    for old, new in zip(before, after, strict=True):
        rank = old["rank"]
        if (new["kind"], list(new["lost"]), new["first"]) != ("memory", [LOST], order.until):
            raise WrongResult(
                f"rank {rank}: a recovery of kind {new['kind']} of ranks {list(new['lost'])} to step "
                f"{new['first']}, and not of kind memory of ranks {[LOST]} to step {order.until}"
            )
        if old["digest"] != new["digest"]:
            raise WrongResult(f"rank {rank} holds other bytes than before the kill")
    return after


def forget(order: Life) -> None:
    """Removes the arena of the rank whose memory goes.

    Raises:
        WrongResult: It has none.
    """
    gone = [one for one in order.arenas() if one.header and one.header.constants.rank == LOST]
    if [remove(one, force=True) for one in gone] != [True]:
        raise WrongResult(f"rank {LOST} has {len(gone)} arenas, and should have one")


def _job(name: str, scale: Scale, seed: int) -> dict[str, Any]:
    """What all orders of ranks have."""
    return {
        "job": f"bench-network-{name}-{secrets.token_hex(4)}",
        "arena_dir": scale.arena_dir,
        "n": CODE.n,
        "k": CODE.k,
        "seed": seed,
        "timeout_s": scale.timeout_s,
    }


def _by_rank(answers: Answers) -> list[Mapping[str, Any]]:
    return sorted(answers, key=lambda answer: answer["rank"])


def _check_parity(answers: Answers) -> None:
    for rank, answer in enumerate(answers):
        if answer["wrong_words"]:
            raise WrongResult(f"rank {rank}: {answer['wrong_words']} words of parity don't fit the rows")


def rows_of(ground: Ground, found: Found) -> Iterator[Row]:
    """Returns all metrics of one link."""
    speeds = [speed for answers in found.plain for speed in answers[0]["gbit_per_s"]]
    trips = [trip for answers in found.plain for trip in answers[1]["trip_us"]]
    yield summary("tcp_gbit_per_s", "Gbit/s", speeds, **ground.labels)
    yield summary("round_trip_us", "us", trips, **ground.labels)
    for window, launches in found.steps.items():
        yield from of_steps(ground, window, launches)
    for ranks, launches in found.agreed.items():
        yield from of_agreement(ground, ranks, launches)
    yield from of_recovery(ground, found.recovered, statistics.median(speeds))


def beside_planner(scale: Scale, ground: Ground, found: Found) -> Iterator[Row]:
    """Returns what the planner computes for the same jobs, and beside its times what was measured.

    A link without a rate has no times: the planner knows no network that is a copy.
    """
    trips = [trip for answers in found.plain for trip in answers[1]["trip_us"]]
    labels, trip_s = ground.labels, statistics.median(trips) / 1e6

    def job(ranks: int = CODE.n, tables: int = scale.tables, rows: int = scale.rows) -> Job:
        return planned.job_on(
            ground.rate_gbit,
            trip_s,
            ranks=ranks,
            tables=tables,
            rows=rows,
            row_bytes=2 * 4 * scale.dim,
            batch=scale.batch,
            skew=scale.skew,
        )

    def pair(what: str, measured_s: float, planned_s: float) -> Iterator[Row]:
        yield once("measured_s", "s", measured_s, **labels, what=what)
        yield once("planned_s", "s", planned_s, **labels, what=what)

    for window in found.steps:
        sent = planned.deltas_bytes(job(), CODE, window) / window
        yield once("bytes_per_step", "bytes", sent, **labels, window=window, counted_by="planner")
    if not ground.rate_gbit:
        return
    for window, launches in found.steps.items():
        took_s = float(np.concatenate([together(answers, EXCHANGE) for answers in launches]).mean())
        yield from pair(f"exchange, window {window}", took_s, planned.deltas_s(job(), CODE, window))
    for ranks, launches in found.agreed.items():
        took_s = float(sum(together(answers, what).mean() for answers in launches for what in TOGETHER))
        took_s /= len(launches)
        yield from pair(f"agreement, {ranks} ranks", took_s, planned.agreement_s(job(ranks), CODE))
    rebuild_s = statistics.median(map(rebuild_of, found.recovered))
    yield from pair(
        "rebuild", rebuild_s, planned.rebuild_s(job(tables=1, rows=CODE.n * scale.lost_rows), CODE)
    )


def of_steps(ground: Ground, window: int, launches: Sequence[Answers]) -> Iterator[Row]:
    """Returns what steps took and sent."""
    labels: dict[str, Label] = {**ground.labels, "window": window}
    rounds = [len(answers[0]["taken"][BARE]) for answers in launches]
    of = [launch for launch, count in enumerate(rounds) for _ in range(count)]
    commits = [number % window == window - 1 for count in rounds for number in range(count)]
    seconds = {name: slowest(launches, name) for name in METHODS}
    strata = Strata(commits, window, of)

    def row(metric: str, unit: str, found: Estimate, repeats: int, **more: Label) -> Row:
        return Row(metric, found.value, unit, found.low, found.high, repeats, {**labels, **more})

    for name in METHODS:
        yield row("step_wall_ms", "ms", strata.mean(seconds[name]).times(1000), len(of), method=name)
    added = seconds[PROTECTED] - seconds[BARE]
    percent = strata.ratio(seconds[PROTECTED], seconds[BARE]).times(100, less=1)
    yield row("added_wall_pct", "%", percent, len(of))
    yield row("added_wall_ms", "ms", strata.mean(added).times(1000), len(of))
    ends = np.flatnonzero(commits)
    at_ends = Strata([True] * len(ends), 1, [of[number] for number in ends])
    yield row("commit_wall_ms", "ms", at_ends.mean(added[ends]).times(1000), len(ends))
    ranks = range(len(launches[0]))
    phases = [name for name in launches[0][0]["counted"] if name.startswith(PHASE)]
    for phase in phases:
        each = [1000 * counted(launches, rank, phase) / len(of) for rank in ranks]
        name = phase.removeprefix(PHASE)
        yield Row(
            "phase_ms", float(np.mean(each)), "ms", min(each), max(each), len(each), labels | {"phase": name}
        )
    by_guard = [counted(launches, rank, "sent_bytes") / len(of) for rank in ranks]
    yield summary("bytes_per_step", "bytes", by_guard, **labels, counted_by="guard")
    if ground.is_counted:
        sent = {name: [sent_bytes(launches, rank, name) / len(of) for rank in ranks] for name in METHODS}
        by_link = [a - b for a, b in zip(sent[PROTECTED], sent[BARE], strict=True)]
        yield summary("bytes_per_step", "bytes", by_link, **labels, counted_by="link")
        yield summary("bytes_per_step", "bytes", sent[BARE], **labels, counted_by="link, training")
        over = [a / b for a, b in zip(by_link, by_guard, strict=True)]
        yield summary("link_over_guard", "ratio", over, **labels)


def slowest(launches: Sequence[Answers], name: str) -> Floats:
    """Of each round of all launches, the wall time of the slowest rank in a model's step, in seconds."""
    each = [
        np.max([[taken[0] for taken in answer["taken"][name]] for answer in answers], axis=0)
        for answers in launches
    ]
    return np.concatenate(each)


def counted(launches: Sequence[Answers], rank: int, name: str) -> float:
    """What a rank's guard has counted in all launches together."""
    return sum(answers[rank]["counted"].get(name, 0.0) for answers in launches)


def sent_bytes(launches: Sequence[Answers], rank: int, name: str) -> int:
    """What a rank's host has sent in a model's steps, in all launches together."""
    return sum(sent for answers in launches for _, _, sent in answers[rank]["taken"][name])


def of_agreement(ground: Ground, ranks: int, launches: Sequence[Answers]) -> Iterator[Row]:
    """Returns how long ranks take for each part of an agreement."""
    for what in TOGETHER:
        each = [together(answers, what) for answers in launches]
        of = [launch for launch, times in enumerate(each) for _ in times]
        joined = np.concatenate(each)
        found = Strata([True] * len(joined), 1, of).mean(joined).times(1e6)
        labels: dict[str, Label] = {**ground.labels, "ranks": ranks, "what": what}
        yield Row("agreement_us", found.value, "us", found.low, found.high, len(joined), labels)


def together(answers: Answers, what: str) -> Floats:
    """Seconds from when the last rank has come to a phase until all have left it, of each time."""
    moments = np.array([answer["moments"][what] for answer in answers])  # [ranks, times, begin and end]
    return moments[:, :, 1].max(axis=0) - moments[:, :, 0].max(axis=0)


def of_recovery(ground: Ground, launches: Sequence[Answers], gbit_per_s: float) -> Iterator[Row]:
    """Returns how long recoveries took, and how fast memory was rebuilt.

    Args:
        ground: Where.
        launches: Reports of all ranks.
        gbit_per_s: What a plain stream reached.
    """
    labels = ground.labels
    lost = [answers[LOST] for answers in launches]
    rebuild_s = [rebuild_of(answers) for answers in launches]
    yield summary("recovery_s", "s", [max(one["total_s"] for one in a) for a in launches], **labels)
    yield summary("rebuild_s", "s", rebuild_s, **labels)
    speeds = [one["memory_bytes"] / s / 1e6 for one, s in zip(lost, rebuild_s, strict=True)]
    yield summary("rebuild_mb_per_s", "MB/s", speeds, **labels)
    yield summary("rebuild_over_link", "ratio", [8e-3 * one / gbit_per_s for one in speeds], **labels)
    plain_s = [max(answer["plain"][SAME] for answer in answers) for answers in launches]
    over = [a / b for a, b in zip(plain_s, rebuild_s, strict=True)]
    yield summary("rebuild_over_plain", "ratio", over, **labels)
    yield once("lost_mb", "MB", lost[0]["memory_bytes"] / 1e6, **labels)
    if ground.is_counted:
        received = [one["received_bytes"] / one["memory_bytes"] for one in lost]
        yield summary("received_over_lost", "ratio", received, **labels)


def rebuild_of(answers: Answers) -> float:
    """Seconds of a rebuild, of the rank that took longest."""
    return max(answer["seconds"].get("rebuild", 0.0) for answer in answers)
