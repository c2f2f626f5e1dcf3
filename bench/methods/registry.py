"""All methods by name: ecemb, replication, and the rivals of `baselines/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import ecemb
from baselines.check_n_run.quantize_scheme import Scheme
from baselines.check_n_run.recovery import CheckNRun
from baselines.cpr.controller import Cpr
from baselines.cpr.recovery import PartialRecovery
from baselines.float_parity import FloatParity
from baselines.full import FullRecovery
from baselines.full.writers import AsyncDcp, Dcp, Files, Writer
from baselines.method import Costs, Method, Promise, Training
from baselines.snapshot import Coded, Copies, SnapshotRecovery
from baselines.snapshot.redundancy import Redundancy
from bench.methods import JOB_MTBF
from ecemb.session import current
from ecemb.step.transaction import BESIDE

MTBF = timedelta(hours=1)
"""Mean time between failures, for CPR's controller."""
Domain = Literal["rank", "host"]
"""What is lost at once, as ecemb takes it for where blocks lie."""
PLS_TARGET = 0.1
"""CPR's (recalled from its emulation)."""


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
        mtbf: Mean time between failures, for the window "auto".
        domain: The blocks of a stripe lie in different ones.
    """

    def __init__(
        self,
        code: ecemb.Code,
        window: int | Literal["auto"] = 1,
        *,
        overlap: bool = False,
        mtbf: timedelta | None = None,
        domain: Domain = "rank",
    ) -> None:
        self._code, self._window, self._overlap, self._mtbf = code, window, overlap, mtbf
        self._domain: Domain = domain
        self._guard: ecemb.Guard | None = None
        self._closed = Costs()
        self._on_device = False
        self.interval_steps = None if window == "auto" else window
        again = None if window == "auto" else window * (2 if overlap else 1) - 1
        self.promise = Promise(bit_identical=True, steps_again=again, survives=code.n - code.k)

    def prepare(self, training: Training) -> int:
        self._on_device = any(parameter.is_cuda for parameter in training.model.parameters())
        self._guard = ecemb.protect(
            training.model,
            optimizers=training.optimizers,
            tables=training.tables,
            state=training.state,
            code=self._code,
            window=self._window,
            mtbf=self._mtbf,
            overlap=self._overlap,
            failure_domain=self._domain,
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
        held: dict[str, int] = stats["bytes"]  # messages in the process among them
        beside = BESIDE if self._overlap else ()
        return Costs(
            stalled_s=sum(seconds for phase, seconds in stats["seconds"].items() if phase not in beside),
            sent_bytes=stats["sent_bytes"],
            # The arena's rows are the training's own memory, but for an image of those on a device.
            memory_bytes=sum(held.values()) - (1 if self._on_device else 2) * held["tables"],
        )

    def _made(self) -> ecemb.Guard:
        if self._guard is None:
            raise RuntimeError("the guard is made in prepare(), and gone after close()")
        return self._guard


@dataclass(frozen=True)
class Place:
    """Where methods keep what outlives processes, and how often.

    Attributes:
        files: Folder that outlives machines; the same on all ranks.
        memory: Folder of this rank's machine alone, on tmpfs.
        every: Steps between two saves, of those that save now and then.
        bytes_per_s: What a rank writes to `files`, or reads, at most; None: as fast as it goes.
        in_threads: What is written beside training is written by threads; a process of its own would import
            torch first.
        domain: Of ecemb's code.
        ranks_per_host: Ranks that share a machine's memory, one after another.
    """

    files: Path
    memory: Path
    every: int = 4
    bytes_per_s: float | None = None
    in_threads: bool = False
    domain: Domain = "rank"
    ranks_per_host: int = 1


def coded(n: int, k: int, **options: Any) -> Callable[[Place], Method]:
    return lambda place: Ecemb(ecemb.Code(n, k), domain=place.domain, **options)


def auto(n: int, k: int) -> Callable[[Place], Method]:
    return coded(n, k, window="auto", overlap=True, mtbf=JOB_MTBF)


def partial_recovery(priority: str | None = None) -> Callable[[Place], Method]:
    return lambda place: PartialRecovery(
        place.files, place.memory, every=place.every, priority=priority, bytes_per_s=place.bytes_per_s
    )


def controlled(place: Place) -> Method:
    return Cpr(place.files, place.memory, mtbf=MTBF, pls=PLS_TARGET, bytes_per_s=place.bytes_per_s)


def changes(policy: str, **options: Any) -> Callable[[Place], Method]:
    def make(place: Place) -> Method:
        given = {"process": False} if place.in_threads else {}
        return CheckNRun(
            place.files,
            place.memory,
            policy=policy,
            every=place.every,
            bytes_per_s=place.bytes_per_s,
            **{**options, **given},
        )

    return make


def copies(count: int, *, beside: bool = False) -> Callable[[Place], Method]:
    """Copies on other machines."""
    return lambda place: SnapshotRecovery(
        place.memory, Copies(count, place.ranks_per_host), beside=beside, every=place.every
    )


def snapshots(redundancy: Redundancy) -> Callable[[Place], Method]:
    return lambda place: SnapshotRecovery(place.memory, redundancy, every=place.every)


def full(writer: type[Writer]) -> Callable[[Place], Method]:
    return lambda place: FullRecovery(place.files, writer(place.bytes_per_s), keep=1, every=place.every)


def sums(n: int, k: int, dtype: str = "float32") -> Callable[[Place], Method]:
    return lambda place: FloatParity(place.memory, ecemb.Code(n, k), dtype=dtype)


METHODS: Mapping[str, Callable[[Place], Method]] = {
    "nothing": lambda _: Nothing(),
    "ecemb (3, 2)": coded(3, 2),
    "ecemb (3, 2) overlapping": coded(3, 2, overlap=True),
    "ecemb (4, 3)": coded(4, 3),
    "ecemb (4, 3) window 16": coded(4, 3, window=16),
    "ecemb (4, 3) window auto": auto(4, 3),
    "ecemb (6, 4)": coded(6, 4),
    "ecemb (6, 4) window auto": auto(6, 4),
    "ecemb copies x2": coded(2, 1),
    "float parity (3, 2)": sums(3, 2),
    "float64 parity (3, 1)": sums(3, 1, "float64"),
    "snapshots x2": copies(1),
    "snapshots x2 beside": copies(1, beside=True),
    "coded snapshots (3, 2)": snapshots(Coded(3, 2)),
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
    "check-n-run intermittent 4 bit": changes("intermittent", weights=Scheme("adaptive", 4)),
}
"""Name -> what makes it."""

STAY = ("cpr vanilla", *(f"cpr {priority}" for priority in ("mfu", "ssu", "scar")))
"""Those whose ranks stay in their processes when another one dies, as the paper's servers do."""
OF_TORCHREC = ("check-n-run model tracker",)
"""Those that on other tables are as another one."""
