"""How soon does training go on when memory was lost, and how fast, if the rebuild goes on beside it?

One of four ranks is killed with its memory in the middle of a step, under stock torchrun, which starts all
ranks again, by `ecemb-run`, with `rebuild="blocking"` or `"background"`: `rebuild` says which, and
`table_bytes` is weights and optimizer state of a rank. In the setting `uniform`, the model of the question
`recovery`, a step looks up rows that are drawn uniformly: the worst case for lookups, since each step needs
rows that nothing has needed before. `dlrm` is that of the question `overhead`: TorchRec's tables, with few
popular rows.

- `kill_to_step_s`: from the kill to the end of the first step of all ranks. The lost memory itself is freed
  later: a lost machine leaves the others nothing to free.
- `time_to_full_protection_s`: from the kill until no rank lacks anything, so that memory may be lost again:
  as ranks hear it between two steps, or before the first one, if all was rebuilt by then.
- `steps_while_rebuilding`: steps that ended before that.
- `throughput_while_rebuilding`: those in a second, without the first one, over steps in a second after it;
  only where they are at least `LEAST_STEPS`.
- `cpu_s_per_rebuilt_gb`: processor time of all ranks from the call of `ecemb.protect` until then, less that
  of as many steps after it, for each GB of rows and parity that was lost.
- `waited_for_rows_s`: in which the replacement rank waited for rows that a batch needs.

`dense` says what a step does besides its lookups and its commit. On `processors` ranks keep all processors
busy: `dlrm` with its dense part. With an `accelerator` each rank waits for `WAIT_S` seconds, as for a device
that computes, and leaves the processors idle; what stands for the dense part of `dlrm` is small.

Ranks share one machine, and so do the rebuild and the steps beside it. In the end every rank's tables and
dense parameters have to be those of an undisturbed run of as many steps.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.result import Arguments, Row, WrongResult, by_metric, summary
from bench.harness.torchrun import Torchrun
from bench.questions.overhead.question import FULL as OVERHEAD
from bench.questions.rebuild.rank import Order
from bench.questions.recovery.question import MIB, RANKS, Observer
from bench.questions.recovery.question import Life as Restart
from bench.questions.recovery.rank import BACKGROUND, BLOCKING, PROTECTED, RECORD_BYTES
from ecemb.coding.code import Code
from ecemb.memory.scan import arenas

PROCESSORS, ACCELERATOR = "processors", "accelerator"
"""What does a step's dense work."""
WAIT_S = 0.1
VICTIM = 1
CODE = Code(4, 3)
LEAST_STEPS = 5


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        script: Of a rank.
        record_bytes: Of a row: its weights, and the optimizer's state.
        batch: Samples that a rank takes in a step.
        steps: Of each life, once no rank lacks anything.
        tables: See `Order`, as for all that follow.
        dim: Of each row.
        skew: Of the rows' popularity.
        dense: What is above the tables, by what does the dense work.
    """

    script: str
    record_bytes: int
    batch: int
    steps: int
    tables: int = 0
    dim: int = 0
    skew: float = 0.0
    dense: Mapping[str, str] = field(default_factory=dict[str, str])


UNIFORM, DLRM = "uniform", "dlrm"
SETTINGS: Mapping[str, Setting] = {
    UNIFORM: Setting("bench.questions.rebuild.rank", RECORD_BYTES, batch=256, steps=40),
    DLRM: Setting(
        "bench.questions.rebuild.dlrm_rank",
        4 * OVERHEAD.dim + 8,  # row-wise Adagrad's sum, padded to a word
        batch=OVERHEAD.batch,
        steps=20,
        tables=OVERHEAD.tables,
        dim=OVERHEAD.dim,
        skew=OVERHEAD.skew,
        dense={PROCESSORS: OVERHEAD.dense, ACCELERATOR: "small"},
    ),
}
DLRM_BYTES = OVERHEAD.tables * OVERHEAD.rows // RANKS * SETTINGS[DLRM].record_bytes


@dataclass(frozen=True)
class Case:
    """What is lost, and beside which steps.

    Attributes:
        setting: One of `SETTINGS`.
        dense: What does a step's dense work.
        table_bytes: Of a rank's tables.
        launches: Of each kind of rebuild, taking turns.
    """

    setting: str
    dense: str
    table_bytes: int
    launches: int = 1


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        cases: One after the other.
        kills: In a launch.
        most_steps: Of each life, once no rank lacks anything, at most.
        code: Of the parity.
        arena_dir: Where arenas lie.
        timeout_s: Of one launch.
    """

    cases: tuple[Case, ...] = (
        Case(UNIFORM, ACCELERATOR, 256 * MIB),
        Case(UNIFORM, ACCELERATOR, 2048 * MIB),
        Case(DLRM, PROCESSORS, DLRM_BYTES),
        Case(DLRM, ACCELERATOR, DLRM_BYTES, launches=2),
    )
    kills: int = 3
    most_steps: int = 40
    code: Code = CODE
    arena_dir: str = "/dev/shm"
    timeout_s: float = 900.0


FULL = Scale()
QUICK = dataclasses.replace(
    FULL,
    cases=(Case(DLRM, ACCELERATOR, 8 * MIB),),
    kills=1,
    most_steps=8,
)


@dataclass(frozen=True)
class Life:
    """One restart.

    Attributes:
        killed_at: When the victim was killed; like all moments, on time.monotonic().
        told: What each rank reported before the life's last step.
    """

    killed_at: float
    told: Sequence[Mapping[str, Any]]

    @property
    def to_step_s(self) -> float:
        return max(one["ends"][0] for one in self.told) - self.killed_at

    @property
    def to_whole_s(self) -> float:
        return max(one["whole_at"] for one in self.told) - self.killed_at

    @property
    def steps_beside(self) -> int:
        """Steps that ended while a rank lacked something; the same on all ranks."""
        return self.told[0]["whole_before"]

    @property
    def throughput(self) -> float | None:
        """Steps in a second while a rank was rebuilt, over those after it; None if these are too few."""
        ends, count = self.told[0]["ends"], self.steps_beside
        if count < LEAST_STEPS or len(ends) - count < LEAST_STEPS:
            return None
        beside = (count - 1) / (ends[count - 1] - ends[0])
        after = (len(ends) - 1 - count) / (ends[-1] - ends[count])
        return beside / after

    @property
    def cpu_s_per_gb(self) -> float:
        """Processor time of all ranks for each GB that was lost, without that of steps."""
        spent_s = 0.0
        for one in self.told:
            began_s, whole_s, ended_s = one["cpu_s"]
            step_s = (ended_s - whole_s) / (len(one["ends"]) - self.steps_beside)
            spent_s += whole_s - began_s - self.steps_beside * step_s
        return spent_s / (self.told[VICTIM]["lost_bytes"] / 1e9)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    rows: list[Row] = []
    for case in scale.cases:
        lives: dict[str, list[Life]] = {BLOCKING: [], BACKGROUND: []}
        for _ in range(case.launches):
            for rebuild, found in lives.items():
                found += launch(scale, case, rebuild, arguments.seed)
        for rebuild, found in lives.items():
            rows += rows_of(scale, case, rebuild, found)
    return by_metric(rows)


def launch(scale: Scale, case: Case, rebuild: str, seed: int) -> list[Life]:
    """Kills a rank, time and again, and compares the end with that of an undisturbed training.

    Raises:
        WrongResult: It ended with other bytes, or something else was recovered than was lost.
        LaunchFailed: torchrun did.
    """
    wait_s = WAIT_S if case.dense == ACCELERATOR else 0.0
    few = min(SETTINGS[case.setting].steps, scale.most_steps)
    lives, steps, digests = trained(scale, case, rebuild, scale.kills, few, wait_s, seed)
    check(lives)
    _, _, expected = trained(scale, case, rebuild, 0, steps, 0.0, seed)
    if digests != expected:
        ranks = [rank for rank, pair in enumerate(zip(digests, expected, strict=True)) if len(set(pair)) > 1]
        raise WrongResult(f"ranks {ranks} ended with other bytes than without a kill")
    return lives


def trained(
    scale: Scale, case: Case, rebuild: str, kills: int, steps: int, wait_s: float, seed: int
) -> tuple[list[Life], int, list[str]]:
    """One launch of torchrun: its restarts, all its steps, and the digests that the ranks ended with."""
    setting = SETTINGS[case.setting]
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-") as folder:
        order = Order(
            method=PROTECTED,
            folder=folder,
            job=f"bench-rebuild-{secrets.token_hex(4)}",
            arena_dir=scale.arena_dir,
            n=scale.code.n,
            k=scale.code.k,
            rows=case.table_bytes // setting.record_bytes,
            batch=setting.batch,
            steps=steps,
            kills=kills,
            victims=(VICTIM,),
            with_memory=True,
            seed=seed,
            timeout_s=scale.timeout_s,
            rebuild=rebuild,
            tables=setting.tables,
            dim=setting.dim,
            skew=setting.skew,
            dense=setting.dense.get(case.dense, ""),
            wait_s=wait_s,
        )
        with (
            order.leaving_nothing(),
            Torchrun(
                RANKS,
                kills,
                setting.script,
                str(order.write()),
                folder=Path(folder),
                name=rebuild,
                timeout_s=scale.timeout_s,
                warm=True,
            ) as torchrun,
        ):
            observer = Observer(order, torchrun)
            restarts = [restart(order, observer, life) for life in range(kills)]
            torchrun.wait()
            ended = observer.all(kills, "end.{}")
            lives = [Life(one.killed_at, one.told) for one in restarts]
            return lives, ended[0]["steps"], [one["digest"] for one in ended]


def restart(order: Order, observer: Observer, life: int) -> Restart:
    """Has the victim of a life killed; its memory is freed when the next life is over.

    A kernel frees the memory of a process before it reports the death, and takes the longer the more that is.
    A machine that is lost leaves the others nothing to free.
    """
    observer.all(life, "{}")
    held = [
        os.open(one.path, os.O_RDONLY)
        for one in arenas(order.arena_dir)
        if one.job == order.job and one.header is not None and one.header.constants.rank in order.victims
    ]
    try:
        return observer.restart(life)
    finally:
        for descriptor in held:
            os.close(descriptor)


def check(lives: Sequence[Life]) -> None:
    """Compares recoveries with what was lost.

    Raises:
        WrongResult: It isn't that.
    """
    for life in lives:
        for rank, one in enumerate(life.told):
            if (one["kind"], one["lost"]) != ("memory", [VICTIM]):
                raise WrongResult(
                    f"rank {rank}: a recovery of kind {one['kind']} of ranks {one['lost']}, and not of kind "
                    f"memory of ranks {[VICTIM]}"
                )


def rows_of(scale: Scale, case: Case, rebuild: str, lives: Sequence[Life]) -> list[Row]:
    """Returns the rows of the restarts of one kind."""
    code = f"({scale.code.n}, {scale.code.k})"
    labels = {"rebuild": rebuild, "code": code, **dataclasses.asdict(case)}
    rows = [
        summary("kill_to_step_s", "s", [life.to_step_s for life in lives], **labels),
        summary("time_to_full_protection_s", "s", [life.to_whole_s for life in lives], **labels),
    ]
    rows.append(summary("cpu_s_per_rebuilt_gb", "s", [life.cpu_s_per_gb for life in lives], **labels))
    if rebuild == BACKGROUND:
        beside = [float(life.steps_beside) for life in lives]
        waited = [max(one["waited_s"] for one in life.told) for life in lives]
        rows.append(summary("steps_while_rebuilding", "steps", beside, **labels))
        rows.append(summary("waited_for_rows_s", "s", waited, **labels))
        ratios = [ratio for life in lives if (ratio := life.throughput) is not None]
        if ratios:
            rows.append(summary("throughput_while_rebuilding", "ratio", ratios, **labels))
    return rows
