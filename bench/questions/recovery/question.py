"""How long does a failure stop the training, by restarts and without one, and how much is recovery's?

Workers are killed by SIGKILL in the middle of a step, under stock torchrun, and the clock runs until every
rank has committed a new step. The starts take turns: `start` is `cold` where torchrun stops all workers and
starts python, `warm` where it starts `ecemb-run --no-replace`, `replaced` where `ecemb-run` replaces workers
by itself, and `stays` where the training is in `ecemb.run` as well, which calls it again in the processes
that live. Where the rebuild alone differs from another case, workers are replaced.

- `kill_to_step_s`: from the kill to the end of the first step.
- `over_warm`: its median over that of warm starts in the same run, with the 95 % interval: restarts of both
  starts are resampled 10,000 times.
- `stayed`: of the processes that were not killed, the part that has stayed.
- `recovery_phase_s`: `kill_to_step_s` by phase. A phase begins when the last rank has ended the one before,
  and ends when the last rank has ended it, so that phases add up. `noticed`: until a first survivor has
  ended; `stopped`: until all are gone; `process`: until their successors are made, or forked; `interpreter`:
  until the script's first line; `back`, where processes stay, in place of all before it: until the
  last of them calls the training again; `model`: the script's own construction, with torch's compiler, which
  an optimizer imports; from `agree` to `rest of protect`: parts of `ecemb.protect`.
- `first_start_s`: from torchrun's launch to the end of the first step of all ranks; `first_start_cpu_s`: the
  processor time of all processes until then.
- `added_recovery_s`: `kill_to_step_s` of cold starts less that of the same script without ecemb, in the same
  run. There the model starts from scratch, with tables of zeros that nothing has written: initialising them
  would take it long.
- `rebuild_gb_per_s`: what ranks have lost, rows and parity, over the time of `rebuild`.
- `rebuild_over_wire`: that speed over what plain gloo send and receive reach between the same processes just
  after it, with as much memory in flight as it likes: `same messages` is all that the rebuild sends on the
  same links, k times what is lost; `lost bytes alone` is each lost byte sent once, by one survivor, which on
  one machine, where the links share processors, is 1 / k of the work.

`kind` is what is lost: `process` loses no memory; with `memory` the killed ranks' arenas are deleted, and
`rebuild` says how they are rebuilt: `blocking`, before the first step, or in the `background`, where the next
kill comes when nothing lacks any more. Four ranks, one thread each, all on one machine. `engine` is `sparse`:
tables of `ecemb.nn`, dimension 64, with Adagrad, on the meta device before protect, which a process that
stays keeps; or `torchrec`: the model of examples/torchrec_dlrm.py, which is built again. Where processes
stay, rank 0, which is never killed, keeps the plan of TorchRec's planner and sends it to the others.
`table_bytes` is weights and optimizer state of a rank. In the end every rank's tables and dense parameters
have to be those of an undisturbed run, which starts cold.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import secrets
import select
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.harness.devices import ARENA
from bench.harness.result import Arguments, Incomplete, Label, Row, WrongResult, by_metric, summary
from bench.harness.torchrun import Torchrun
from bench.questions.recovery.rank import (
    BACK,
    BACKGROUND,
    BARE,
    BLOCKING,
    PARTS,
    PROTECTED,
    RECORD_BYTES,
    Order,
)
from bench.questions.recovery.wire import DIRECT, SAME
from ecemb.coding.code import Code

MIB = 1 << 20
RANKS = 4
CODE = Code(4, 3)
COLD, WARM, REPLACED, STAYS = "cold", "warm", "replaced", "stays"
"""Starts."""
SPARSE, TORCHREC = "sparse", "torchrec"
"""Engines of tables."""
SCRIPTS = {
    SPARSE: ("bench.questions.recovery.rank", RECORD_BYTES),
    TORCHREC: ("bench.questions.recovery.torchrec_rank", 4 * 16 + 4),  # weights, and row-wise Adagrad's sum
}
"""Engine -> the module that a rank runs, and the bytes of a row of its tables."""
IMPORTS = ("import torch", "import torchrec", "import ecemb")
BEFORE_BACK = ("process", "interpreter", *IMPORTS)
"""Phases of a replacement, while the others come back."""
STARTING = (*BEFORE_BACK, BACK, "process group", "model")
PHASES = ("noticed", "stopped", *STARTING, *PARTS, "rest of protect", "first step")
"""In their order; a run has those that it has marks of."""
RESAMPLED = 10_000
_POLL_S = 0.01


@dataclass(frozen=True)
class Case:
    """One kind of loss.

    Attributes:
        kind: "process" or "memory".
        code: Of the parity.
        table_bytes: A rank's tables.
        victims: How many ranks are killed at once.
        engine: Of the tables.
        alone: Whether the same script without ecemb is killed as well; only with the engine `SPARSE`.
        launches: Of each method, taking turns.
        kills: In each launch; `ecemb-run` replaces a worker 20 times in a minute.
        starts: How ranks start.
        rebuild: How lost memory is rebuilt.
    """

    kind: str
    code: Code
    table_bytes: int
    victims: int = 1
    engine: str = SPARSE
    alone: bool = False
    launches: int = 1
    kills: int = 3
    starts: tuple[str, ...] = (COLD, WARM, REPLACED, STAYS)
    rebuild: str = BLOCKING

    @property
    def labels(self) -> dict[str, Label]:
        return {
            "kind": self.kind,
            "code": f"({self.code.n}, {self.code.k})",
            "table_bytes": self.table_bytes,
            "killed": self.victims,
            "engine": self.engine,
            "rebuild": self.rebuild if self.kind == "memory" else "none",
        }


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        cases: One after the other.
        batch: Samples a rank takes in a step.
        steps: Before a kill, and after the last one.
        arena_dir: Where arenas lie.
        timeout_s: Of one launch.
        device: Where tables are, one of `devices`.
    """

    cases: tuple[Case, ...] = (
        Case("process", CODE, 64 * MIB, launches=2, kills=10),
        Case("process", CODE, 2048 * MIB, alone=True, starts=(COLD, STAYS)),
        Case("memory", CODE, 256 * MIB, alone=True),
        Case("memory", CODE, 256 * MIB, launches=2, kills=10, starts=(WARM, STAYS), rebuild=BACKGROUND),
        Case("memory", CODE, 1024 * MIB, starts=(REPLACED,)),
        Case("memory", Code(4, 2), 256 * MIB, victims=2, starts=(REPLACED,)),
        Case(
            "process", CODE, 256 * MIB, engine=TORCHREC, launches=2, kills=10, starts=(WARM, REPLACED, STAYS)
        ),
        Case("memory", CODE, 256 * MIB, engine=TORCHREC, starts=(REPLACED, STAYS)),
    )
    batch: int = 256
    steps: int = 4
    arena_dir: str = "/dev/shm"
    timeout_s: float = 600.0
    device: str = ARENA


FULL = Scale()
QUICK = dataclasses.replace(
    FULL,
    cases=(
        Case("process", CODE, 8 * MIB, alone=True, kills=1),
        Case("memory", CODE, 8 * MIB, kills=1),
        Case("memory", CODE, 8 * MIB, kills=1, starts=(WARM, STAYS), rebuild=BACKGROUND),
        Case("process", CODE, 8 * MIB, engine=TORCHREC, kills=1),
    ),
)


@dataclass(frozen=True)
class Life:
    """One restart, from the kill before it.

    Attributes:
        killed_at: When; like all moments, on time.monotonic().
        gone_at: When each survivor of the kill had ended; empty where processes may stay.
        told: What each rank reported when it had done its first step.
        stayed: The part of the survivors' processes that stayed.
    """

    killed_at: float
    gone_at: Sequence[float]
    told: Sequence[Mapping[str, Any]]
    stayed: float = 0.0

    def phases(self) -> dict[str, float]:
        """Seconds by phase; they add up to the time from the kill to the end of the first step."""
        ends = {"noticed": min(self.gone_at), "stopped": max(self.gone_at)} if self.gone_at else {}
        marks: list[Mapping[str, float]] = [one["marks"] for one in self.told]
        left_out = BEFORE_BACK if any(BACK in one for one in marks) else ()
        for phase in PHASES:
            if phase not in left_out and (moments := [one[phase] for one in marks if phase in one]):
                ends[phase] = max(moments)
        seconds, before = {}, self.killed_at
        for phase, end in ends.items():
            seconds[phase] = max(0.0, end - before)
            before = max(before, end)
        return seconds


@dataclass(frozen=True)
class Launch:
    """One launch of torchrun.

    Attributes:
        first_s: From the launch to the end of the first step of all ranks.
        first_cpu_s: Processor time of all processes until then.
        restarts: After each kill.
        digests: Of what each rank ended with.
    """

    first_s: float
    first_cpu_s: float
    restarts: Sequence[Life]
    digests: Sequence[str]


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring.

    Raises:
        Incomplete: TorchRec isn't installed; the rest was measured.
    """
    scale = QUICK if arguments.quick else FULL
    cases = [case for case in scale.cases if arguments.setting in ("", case.engine)]
    without = [case for case in cases if case.engine == TORCHREC and not _has_torchrec()]
    rows: list[Row] = []
    for case in cases:
        if case not in without:
            rows += measure(scale, case, arguments.seed)
    if without:
        raise Incomplete(by_metric(rows), "torchrec is not installed, and nothing was measured with it")
    return by_metric(rows)


def _has_torchrec() -> bool:
    return importlib.util.find_spec("torchrec") is not None


def measure(scale: Scale, case: Case, seed: int) -> list[Row]:
    """Kills ranks by each start, and without ecemb if the case asks for it, in turns; compares.

    Raises:
        WrongResult: A recovered training ended with other bytes than an undisturbed one, or recovered
            something else than was lost.
        LaunchFailed: torchrun did.
    """
    expected = launch(scale, case, PROTECTED, 0, seed).digests
    alone: list[Life] = []
    starts: dict[str, list[Launch]] = {start: [] for start in case.starts}
    for _ in range(case.launches):
        if case.alone:
            alone += launch(scale, case, BARE, case.kills, seed).restarts
        for start, found in starts.items():
            one = launch(scale, case, PROTECTED, case.kills, seed, start)
            check(case, scale, one.restarts, one.digests, expected)
            found.append(one)
    lives = {start: [life for one in found for life in one.restarts] for start, found in starts.items()}
    return [*rows_of(case, lives, alone), *first_starts(case, starts)]


def launch(scale: Scale, case: Case, method: str, kills: int, seed: int, start: str = COLD) -> Launch:
    """Trains under torchrun; after each of `kills` kills it starts again.

    An undisturbed training (no kills) makes as many steps as one of `case.kills`.
    """
    module, record_bytes = SCRIPTS[case.engine]
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-") as folder:
        order = Order(
            method=method,
            folder=folder,
            job=f"bench-recovery-{secrets.token_hex(4)}",
            arena_dir=scale.arena_dir,
            n=case.code.n,
            k=case.code.k,
            rows=case.table_bytes // record_bytes,
            batch=scale.batch,
            steps=scale.steps if kills else case.kills * (scale.steps - 1) + scale.steps,
            kills=kills,
            victims=tuple(range(1, 1 + case.victims)),
            with_memory=case.kind == "memory",
            seed=seed,
            timeout_s=scale.timeout_s,
            device=scale.device,
            stays=start == STAYS,
            rebuild=case.rebuild,
        )
        with (
            order.leaving_nothing(),
            Torchrun(
                RANKS,
                kills,
                module,
                str(order.write()),
                folder=Path(folder),
                name=f"{method}, {start}",
                timeout_s=scale.timeout_s,
                warm=start != COLD,
                replaces=start in (REPLACED, STAYS),
            ) as torchrun,
        ):
            watch = Observer(order, torchrun)
            first_s = watch.first() - torchrun.began
            first_cpu_s = torchrun.cpu_s()
            restarts = [watch.restart(life) for life in range(kills)]
            torchrun.wait()
            digests = [one["digest"] for one in watch.all(kills, "end.{}")]
            return Launch(first_s, first_cpu_s, restarts, digests)


class Observer:
    """Looks on from outside: what the ranks leave in the folder, and when their processes end."""

    def __init__(self, order: Order, torchrun: Torchrun) -> None:
        self._order, self._torchrun = order, torchrun

    def first(self) -> float:
        """Waits for the first step of the first life; when its last rank had done it."""
        return max(one["marks"]["first step"] for one in self.all(0, "{}"))

    def restart(self, life: int) -> Life:
        """Has the victims of a life killed, and waits until the next one has done its first step."""
        pids = [one["pid"] for one in self.all(life, "{}")]
        survivors = [pid for rank, pid in enumerate(pids) if rank not in self._order.victims]
        waiting = {os.pidfd_open(pid) for pid in survivors if not self._order.stays}
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
        told = self.all(life + 1, "{}")
        killed_at = min(self._read(life, f"killed.{rank}") for rank in self._order.victims)
        stayed = set(survivors) & {one["pid"] for one in told}
        return Life(killed_at, gone, told, len(stayed) / len(survivors))

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


def rows_of(case: Case, starts: Mapping[str, Sequence[Life]], alone: Sequence[Life] = ()) -> list[Row]:
    """Returns the rows of a case's kills.

    Args:
        case: The case.
        starts: How ranks start -> restarts after a kill.
        alone: Restarts of the same script without ecemb.
    """
    rows: list[Row] = []
    samples = {start: [life.phases() for life in restarts] for start, restarts in starts.items()}
    totals = {start: [sum(phases.values()) for phases in each] for start, each in samples.items()}
    for start, values in totals.items():
        rows.append(summary("kill_to_step_s", "s", values, **case.labels, start=start))
    rows += [over_warm(case, start, totals) for start in totals if WARM in totals and start != WARM]
    if STAYS in starts:
        rows.append(summary("stayed", "ratio", [life.stayed for life in starts[STAYS]], **case.labels))
    for phase in PHASES:
        for start, each in samples.items():
            values = [phases.get(phase, 0.0) for phases in each]
            if any(phase in phases for phases in each):
                rows.append(summary("recovery_phase_s", "s", values, **case.labels, start=start, phase=phase))
    if alone:
        bare = [sum(life.phases().values()) for life in alone]
        added = [ours - theirs for ours, theirs in zip(totals[COLD], bare, strict=True)]
        rows.append(summary("added_recovery_s", "s", added, **case.labels))
    if case.kind == "memory" and case.rebuild == BLOCKING:
        rows += rebuilds(case, [life for restarts in starts.values() for life in restarts])
    return rows


def over_warm(case: Case, start: str, totals: Mapping[str, Sequence[float]]) -> Row:
    """Returns the median of a start's times over that of warm starts, with its 95 % interval."""
    random = np.random.default_rng(0)
    medians: list[NDArray[np.float64]] = []
    for values in (np.asarray(totals[start]), np.asarray(totals[WARM])):
        drawn = random.integers(len(values), size=(RESAMPLED, len(values)))
        medians.append(np.median(values[drawn], axis=1))
    low, high = (float(end) for end in np.percentile(medians[0] / medians[1], (2.5, 97.5)))
    ratio = statistics.median(totals[start]) / statistics.median(totals[WARM])
    return Row(
        *("over_warm", ratio, "ratio", min(low, ratio), max(high, ratio), len(totals[start])),
        labels={**case.labels, "start": start},
    )


def first_starts(case: Case, starts: Mapping[str, Sequence[Launch]]) -> list[Row]:
    """Returns how long the first start of all ranks took."""
    rows: list[Row] = []
    for start, found in starts.items():
        for metric, values in (
            ("first_start_s", [one.first_s for one in found]),
            ("first_start_cpu_s", [one.first_cpu_s for one in found]),
        ):
            rows.append(summary(metric, "s", values, **case.labels, start=start))
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
