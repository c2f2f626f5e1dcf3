"""How long does a failure stop the training, and how much of that is recovery's?

Workers are killed by SIGKILL in the middle of a step, under stock torchrun, which stops all of them and
starts them again, and the clock runs until every rank has committed a new step.

- `recovery_s`: from the kill to the end of the first step, by phase. A phase begins when the last rank has
  ended the one before, and ends when the last rank has ended it, so that phases add up to the `total`.
  `noticed`: until torchrun has seen it, and ended a first survivor; `stopped`: until all are gone;
  `process`: until their successors are made; from `agree` to `rest of protect`: parts of `ecemb.protect`.
- `added_recovery_s`: the total less that of the same script without ecemb, in the same run. There the model
  starts from scratch, with tables of zeros that nothing has written: initialising them would take it long.
- `rebuild_gb_per_s`: what ranks have lost, rows and parity, over the time of `rebuild`.
- `rebuild_over_wire`: that speed over what plain gloo send and receive reach between the same processes just
  after it, with as much memory in flight as it likes: `same messages` is all that the rebuild sends on the
  same links, k times what is lost; `lost bytes alone` is each lost byte sent once, by one survivor, which on
  one machine, where the links share processors, is 1 / k of the work.

`kind` is what is lost: `process` loses no memory; with `memory` the killed ranks' arenas are deleted. Four
ranks, one thread each, all on one machine. Tables of dimension 64 with Adagrad, on the meta device before
protect; `table_bytes` is weights and optimizer state of a rank. The methods take turns. In the end every
rank's tables and dense parameters have to be those of an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import select
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.devices import ARENA
from bench.harness.result import Arguments, Label, Row, WrongResult, summary
from bench.harness.torchrun import Torchrun
from bench.questions.recovery.rank import BARE, PARTS, PROTECTED, RECORD_BYTES, Order
from bench.questions.recovery.wire import DIRECT, SAME
from ecemb.coding.code import Code

MIB = 1 << 20
RANKS = 4
STARTING = ("process", "interpreter", "import torch", "import ecemb", "process group", "model")
PHASES = ("noticed", "stopped", *STARTING, *PARTS, "rest of protect", "first step")
"""In their order; a run has those that it has marks of."""
TOTAL = "total"
_POLL_S = 0.01


@dataclass(frozen=True)
class Case:
    """One kind of loss.

    Attributes:
        kind: "process" or "memory".
        code: Of the parity.
        table_bytes: A rank's tables.
        victims: How many ranks are killed at once.
    """

    kind: str
    code: Code
    table_bytes: int
    victims: int

    @property
    def labels(self) -> dict[str, Label]:
        return {
            "kind": self.kind,
            "code": f"({self.code.n}, {self.code.k})",
            "table_bytes": self.table_bytes,
            "killed": self.victims,
        }


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        cases: One after the other.
        launches: Of each method, taking turns.
        kills: In each launch.
        batch: Samples a rank takes in a step.
        steps: Before a kill, and after the last one.
        arena_dir: Where arenas lie.
        timeout_s: Of one launch.
        device: Where tables are, one of `devices`.
    """

    cases: tuple[Case, ...] = (
        Case("process", Code(4, 3), 2048 * MIB, 1),
        Case("memory", Code(4, 3), 256 * MIB, 1),
        Case("memory", Code(4, 2), 256 * MIB, 2),
    )
    launches: int = 4
    kills: int = 5
    batch: int = 256
    steps: int = 4
    arena_dir: str = "/dev/shm"
    timeout_s: float = 600.0
    device: str = ARENA


FULL = Scale()
QUICK = dataclasses.replace(
    FULL, cases=(Case("memory", Code(4, 3), 8 * MIB, 1),), launches=1, kills=1, timeout_s=120.0
)


@dataclass(frozen=True)
class Life:
    """One restart, from the kill before it.

    Attributes:
        killed_at: When; like all moments, on time.monotonic().
        gone_at: When each survivor of the kill had ended.
        told: What each rank reported when it had done its first step.
    """

    killed_at: float
    gone_at: Sequence[float]
    told: Sequence[Mapping[str, Any]]

    def phases(self) -> dict[str, float]:
        """Seconds by phase; they add up to the total."""
        ends = {"noticed": min(self.gone_at), "stopped": max(self.gone_at)}
        for phase in PHASES:
            if phase in self.told[0]["marks"]:
                ends[phase] = max(one["marks"][phase] for one in self.told)
        seconds, before = {}, self.killed_at
        for phase, end in ends.items():
            seconds[phase] = max(0.0, end - before)
            before = max(before, end)
        return seconds


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    rows: dict[str, list[Row]] = {}
    for case in scale.cases:
        for row in measure(scale, case, arguments.seed):
            rows.setdefault(row.metric, []).append(row)
    return [row for group in rows.values() for row in group]


def measure(scale: Scale, case: Case, seed: int) -> list[Row]:
    """Kills ranks under both methods in turns, and compares.

    Raises:
        WrongResult: A recovered training ended with other bytes than an undisturbed one, or recovered
            something else than was lost.
        LaunchFailed: torchrun did.
    """
    expected = launch(scale, case, PROTECTED, 0, seed)[1]
    lives: dict[str, list[Life]] = {BARE: [], PROTECTED: []}
    for _ in range(scale.launches):
        for method, found in lives.items():
            restarts, digests = launch(scale, case, method, scale.kills, seed)
            found += restarts
            if method == PROTECTED:
                check(case, scale, restarts, digests, expected)
    return rows_of(case, lives)


def launch(scale: Scale, case: Case, method: str, kills: int, seed: int) -> tuple[list[Life], list[str]]:
    """Trains under torchrun; after each of `kills` kills it starts again.

    An undisturbed training (no kills) makes as many steps as one of `scale.kills`.

    Returns:
        The restarts, and a digest of what each rank ended with.
    """
    rows = case.table_bytes // RECORD_BYTES
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-") as folder:
        order = Order(
            method=method,
            folder=folder,
            job=f"bench-recovery-{secrets.token_hex(4)}",
            arena_dir=scale.arena_dir,
            n=case.code.n,
            k=case.code.k,
            rows=rows,
            batch=scale.batch,
            steps=scale.steps if kills else scale.kills * (scale.steps - 1) + scale.steps,
            kills=kills,
            victims=tuple(range(1, 1 + case.victims)),
            with_memory=case.kind == "memory",
            seed=seed,
            timeout_s=scale.timeout_s,
            device=scale.device,
        )
        with (
            order.leaving_nothing(),
            Torchrun(
                RANKS,
                kills,
                "bench.questions.recovery.rank",
                str(order.write()),
                folder=Path(folder),
                name=method,
                timeout_s=scale.timeout_s,
            ) as torchrun,
        ):
            watch = Observer(order, torchrun)
            restarts = [watch.restart(life) for life in range(kills)]
            torchrun.wait()
            return restarts, [one["digest"] for one in watch.all(kills, "end.{}")]


class Observer:
    """Looks on from outside: what the ranks leave in the folder, and when their processes end."""

    def __init__(self, order: Order, torchrun: Torchrun) -> None:
        self._order, self._torchrun = order, torchrun

    def restart(self, life: int) -> Life:
        """Has the victims of a life killed, and waits until the next one has done its first step."""
        pids = [one["pid"] for one in self.all(life, "{}")]
        survivors = [pid for rank, pid in enumerate(pids) if rank not in self._order.victims]
        waiting = {os.pidfd_open(pid) for pid in survivors}
        gone: list[float] = []
        try:
            self._order.leave(life, "watched", True)
            poll = select.poll()
            for descriptor in waiting:
                poll.register(descriptor, select.POLLIN)
            while len(gone) < len(waiting):
                self._torchrun.check("the survivors of a kill to be stopped")
                for descriptor, _ in poll.poll(1000):
                    gone.append(time.monotonic())
                    poll.unregister(descriptor)
        finally:
            for descriptor in waiting:
                os.close(descriptor)
        killed_at = min(self._read(life, f"killed.{rank}") for rank in self._order.victims)
        return Life(killed_at, gone, self.all(life + 1, "{}"))

    def all(self, life: int, what: str) -> list[Any]:
        """Waits until every rank has left a file, and reads them, in the order of ranks."""
        names = [what.format(rank) for rank in range(RANKS)]
        while not all(self._order.file(life, name).exists() for name in names):
            self._torchrun.check(f"{', '.join(names)} of life {life}")
            time.sleep(_POLL_S)
        return [self._read(life, name) for name in names]

    def _read(self, life: int, name: str) -> Any:
        return json.loads(self._order.file(life, name).read_text(encoding="utf-8"))


def check(
    case: Case, scale: Scale, restarts: Sequence[Life], digests: Sequence[str], expected: Sequence[str]
) -> None:
    """Compares recoveries with what was lost, and what they ended with.

    Raises:
        WrongResult: It isn't that, or not the bytes of an undisturbed training.
    """
    lost = list(range(1, 1 + case.victims)) if case.kind == "memory" else []
    for number, life in enumerate(restarts, 1):
        for rank, one in enumerate(life.told):
            step = number * (scale.steps - 1)
            if (one["kind"], one["lost"], one["step"]) != (case.kind, lost, step):
                raise WrongResult(
                    f"rank {rank}: a recovery of kind {one['kind']} of ranks {one['lost']} to step "
                    f"{one['step']}, and not of kind {case.kind} of ranks {lost} to step {step}"
                )
    if list(digests) != list(expected):
        differing = [
            rank for rank, pair in enumerate(zip(digests, expected, strict=True)) if len(set(pair)) > 1
        ]
        raise WrongResult(f"ranks {differing} ended with other bytes than without a kill")


def rows_of(case: Case, lives: Mapping[str, Sequence[Life]]) -> list[Row]:
    """Returns all rows of a case; those that compare with torchrun alone, if it was launched."""
    rows: list[Row] = []
    samples = {method: [life.phases() for life in restarts] for method, restarts in lives.items()}
    totals = {method: [sum(phases.values()) for phases in each] for method, each in samples.items()}
    for phase in PHASES:
        for method, each in samples.items():
            if phase in each[0]:
                values = [phases[phase] for phases in each]
                rows.append(summary("recovery_s", "s", values, **case.labels, phase=phase, method=method))
    for method, values in totals.items():
        rows.append(summary("recovery_s", "s", values, **case.labels, phase=TOTAL, method=method))
    if BARE in totals:
        added = [ours - bare for ours, bare in zip(totals[PROTECTED], totals[BARE], strict=True)]
        rows.append(summary("added_recovery_s", "s", added, **case.labels))
    if case.kind == "memory":
        rows += rebuilds(case, lives[PROTECTED])
    return rows


def rebuilds(case: Case, restarts: Sequence[Life]) -> list[Row]:
    """Returns how fast the rebuild was, and over plain sends and receives."""
    took = [max(one["rebuild_s"] for one in life.told) for life in restarts]
    lost = [life.told[0]["wire"][f"{DIRECT} bytes"] for life in restarts]
    speeds = [size / seconds / 1e9 for size, seconds in zip(lost, took, strict=True)]
    rows = [summary("rebuild_gb_per_s", "GB/s", speeds, **case.labels)]
    for sent in (SAME, DIRECT):
        wire = [max(one["wire"][sent] for one in life.told) for life in restarts]
        ratios = [alone / seconds for alone, seconds in zip(wire, took, strict=True)]
        rows.append(summary("rebuild_over_wire", "ratio", ratios, **case.labels, over=sent))
    return rows
