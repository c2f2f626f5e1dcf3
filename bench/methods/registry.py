"""All methods by name: ecemb, replication, and the rivals of `baselines/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ecemb
from baselines.check_n_run.quantize_scheme import Scheme
from baselines.check_n_run.recovery import CheckNRun
from baselines.cpr import job as cpr_job
from baselines.cpr.controller import Cpr
from baselines.cpr.pls import interval_for_pls
from baselines.cpr.recovery import PartialRecovery
from baselines.float_parity import FloatParity
from baselines.full import FullRecovery
from baselines.full.writers import AsyncDcp, Dcp, Files, Writer
from baselines.method import Costs, Method, Promise, Training
from baselines.snapshot import Coded, Copies, SnapshotRecovery
from baselines.snapshot.redundancy import Redundancy
from ecemb.session import current
from ecemb.step.transaction import BESIDE

MTBF = timedelta(hours=1)
"""Mean time between failures, for those that choose by it, where no scaled job is given."""
PLS_TARGET = 0.1
"""CPR's (recalled from its emulation)."""
CHECK_N_RUN_H = 0.5
"""Hours between Check-N-Run's checkpoints (published)."""


class Nothing:
    """No protection: after a failure, the training begins again."""

    promise = Promise(bit_identical=True, steps_again=None)
    interval_steps = None

    def prepare(self, training: Training) -> int:
        return 0

    def step(self) -> AbstractContextManager[object]:
        return nullcontext()

    def memory(self) -> Sequence[Path]:
        return ()

    def costs(self) -> Costs:
        return Costs()

    def close(self) -> None: ...


class Ecemb:
    """ecemb itself. Live copies are its `Code(r + 1, 1)`: parity of one block is a copy of it.

    Args:
        code: The (n, k) code.
        window: Steps that are committed together.
        overlap: Deltas are sent beside the next step's body.
    """

    def __init__(self, code: ecemb.Code, window: int = 1, *, overlap: bool = False) -> None:
        self._code, self._window, self._overlap = code, window, overlap
        self._guard: ecemb.Guard | None = None
        self._closed = Costs()
        self.interval_steps = window
        again = window * (2 if overlap else 1) - 1
        self.promise = Promise(bit_identical=True, steps_again=again, survives=code.n - code.k)

    def prepare(self, training: Training) -> int:
        self._guard = ecemb.protect(
            training.model,
            optimizers=training.optimizers,
            tables=training.tables,
            state=training.state,
            code=self._code,
            window=self._window,
            overlap=self._overlap,
            failure_domain="rank",
        )
        return self._guard.next_step

    def step(self) -> AbstractContextManager[object]:
        return self._made().step()

    def memory(self) -> Sequence[Path]:
        return [one.path for one in current().directory.scan(0) if one.holder == os.getpid()]

    def costs(self) -> Costs:
        return self._costs() if self._guard is not None else self._closed

    def close(self) -> None:
        self._closed = self._costs()
        self._made().close()
        self._guard = None

    def _costs(self) -> Costs:
        stats = self._made().stats()
        held: dict[str, int] = stats["bytes"]  # messages and savepoints in the process among them
        beside = BESIDE if self._overlap else ()
        return Costs(
            stalled_s=sum(seconds for phase, seconds in stats["seconds"].items() if phase not in beside),
            sent_bytes=stats["sent_bytes"],
            memory_bytes=sum(held.values()) - 2 * held["tables"],  # they are the rows' own memory
        )

    def _made(self) -> ecemb.Guard:
        if self._guard is None:
            raise RuntimeError("the guard is made in prepare(), and gone after close()")
        return self._guard


@dataclass(frozen=True)
class ScaledJob:
    """A long job in little: from it each method takes its interval by its own rule.

    Attributes:
        mtbf_steps: Mean time between failures of the whole job, in steps.
        step_s: Seconds of a step, unprotected.
        step_h: Hours of the real job that a step stands for.
        ranks: Of the job.
    """

    mtbf_steps: int
    step_s: float
    step_h: float
    ranks: int

    @property
    def mtbf(self) -> timedelta:
        """Between failures here, for Young's formula with what saves take here."""
        return timedelta(seconds=self.mtbf_steps * self.step_s)

    @property
    def pls_steps(self) -> int:
        """CPR's interval, 2 PLS N T_fail."""
        mtbf_h = self.mtbf_steps * self.step_h
        return self._steps(interval_for_pls(cpr_job.CprJob(mtbf_h, mtbf_h, self.ranks), PLS_TARGET))

    @property
    def check_n_run_steps(self) -> int:
        """Check-N-Run's interval: half an hour."""
        return self._steps(CHECK_N_RUN_H)

    def _steps(self, hours: float) -> int:
        return max(1, round(hours / self.step_h))


@dataclass(frozen=True)
class Place:
    """Where methods keep what outlives processes, and how often.

    Attributes:
        files: Folder that outlives machines; the same on all ranks.
        memory: Folder of this rank's machine alone, on tmpfs.
        every: Steps between two saves, of those that save now and then.
        job: By which each method chooses its interval instead, by its own rule.
        bytes_per_s: What a rank writes to `files`, or reads, at most; None: as fast as it goes.
    """

    files: Path
    memory: Path
    every: int = 4
    job: ScaledJob | None = None
    bytes_per_s: float | None = None

    @property
    def young(self) -> dict[str, Any]:
        """The interval of those that take Young's."""
        return {"every": self.every} if self.job is None else {"mtbf": self.job.mtbf}


def coded(n: int, k: int, **options: Any) -> Callable[[Place], Method]:
    return lambda _: Ecemb(ecemb.Code(n, k), **options)


def partial_recovery(priority: str | None = None) -> Callable[[Place], Method]:
    def make(place: Place) -> Method:
        every = place.every if place.job is None else place.job.pls_steps
        return PartialRecovery(
            place.files, place.memory, every=every, priority=priority, bytes_per_s=place.bytes_per_s
        )

    return make


def controlled(place: Place) -> Method:
    mtbf = MTBF if place.job is None else place.job.mtbf
    return Cpr(place.files, place.memory, mtbf=mtbf, pls=PLS_TARGET, bytes_per_s=place.bytes_per_s)


def changes(policy: str, **options: Any) -> Callable[[Place], Method]:
    def make(place: Place) -> Method:
        given = {"every": place.every}
        if place.job is not None:  # a process apart would import torch beside a whole job
            given = {"every": place.job.check_n_run_steps, "process": False}
        return CheckNRun(
            place.files,
            place.memory,
            policy=policy,
            bytes_per_s=place.bytes_per_s,
            **{**options, **given},
        )

    return make


def snapshots(redundancy: Redundancy, *, beside: bool = False) -> Callable[[Place], Method]:
    return lambda place: SnapshotRecovery(place.memory, redundancy, beside=beside, **place.young)


def full(writer: type[Writer]) -> Callable[[Place], Method]:
    return lambda place: FullRecovery(place.files, writer(place.bytes_per_s), keep=1, **place.young)


def sums(n: int, k: int, dtype: str = "float32") -> Callable[[Place], Method]:
    return lambda place: FloatParity(place.memory, ecemb.Code(n, k), dtype=dtype)


METHODS: Mapping[str, Callable[[Place], Method]] = {
    "nothing": lambda _: Nothing(),
    "ecemb (3, 2)": coded(3, 2),
    "ecemb (3, 2) overlapping": coded(3, 2, overlap=True),
    "ecemb (4, 3)": coded(4, 3),
    "ecemb (4, 3) window 16": coded(4, 3, window=16),
    "ecemb (4, 2)": coded(4, 2),
    "ecemb (4, 3) overlapping": coded(4, 3, overlap=True),
    "ecemb (6, 4)": coded(6, 4),
    "ecemb (6, 4) window 16": coded(6, 4, window=16),
    "ecemb (6, 4) overlapping": coded(6, 4, overlap=True),
    "ecemb copies x2": coded(2, 1),
    "ecemb copies x3": coded(3, 1),
    "float parity (3, 2)": sums(3, 2),
    "float64 parity (3, 1)": sums(3, 1, "float64"),
    "float parity (4, 3)": sums(4, 3),
    "float64 parity (4, 3)": sums(4, 3, "float64"),
    "float parity (4, 2)": sums(4, 2),
    "snapshots x2": snapshots(Copies(1)),
    "snapshots x2 beside": snapshots(Copies(1), beside=True),
    "coded snapshots (3, 2)": snapshots(Coded(3, 2)),
    "coded snapshots (4, 3)": snapshots(Coded(4, 3)),
    "full files": full(Files),
    "full dcp": full(Dcp),
    "full dcp async": full(AsyncDcp),
    "cpr vanilla": partial_recovery(),
    **{f"cpr {priority}": partial_recovery(priority) for priority in ("mfu", "ssu", "scar")},
    "cpr controlled": controlled,
    "check-n-run full": changes("full"),
    "check-n-run one-shot": changes("one_shot"),
    "check-n-run consecutive": changes("consecutive", process=False),
    "check-n-run intermittent": changes("intermittent"),
    "check-n-run model tracker": changes("intermittent", model_tracker=True),
    "check-n-run one-shot 4 bit": changes("one_shot", weights=Scheme("adaptive", 4)),
    "check-n-run consecutive 4 bit": changes("consecutive", weights=Scheme("adaptive", 4)),
    "check-n-run intermittent 8 bit": changes("intermittent", weights=Scheme("asymmetric", 8)),
    "check-n-run intermittent 4 bit": changes("intermittent", weights=Scheme("adaptive", 4)),
}
"""Name -> what makes it."""

OF_TORCHREC = ("check-n-run model tracker",)
"""Those that on other tables are as another one."""
