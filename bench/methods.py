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
from baselines.cpr.controller import Cpr
from baselines.cpr.recovery import PartialRecovery
from baselines.float_parity import FloatParity
from baselines.full import FullRecovery
from baselines.full.writers import AsyncDcp, Dcp, Files
from baselines.snapshot import Coded, Copies, SnapshotRecovery
from bench.method import Costs, Method, Promise, Training
from ecemb.rendezvous import current
from ecemb.transaction import BESIDE

MTBF = timedelta(hours=1)
"""Mean time between failures, for those that choose by it."""


class Nothing:
    """No protection: after a failure, the training begins again."""

    promise = Promise(bit_identical=True, steps_again=None)

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
    """ecemb itself. Live replication is its `Code(r + 1, 1)`: parity of one block is a copy of it.

    Args:
        code: The (n, k) code.
        window: Steps that are committed together.
        overlap: Deltas are sent beside the next step's body.
    """

    def __init__(self, code: ecemb.Code, window: int = 1, *, overlap: bool = False) -> None:
        self._code, self._window, self._overlap = code, window, overlap
        self._guard: ecemb.Guard | None = None
        self._closed = Costs()
        self.promise = Promise(bit_identical=True, steps_again=window * (2 if overlap else 1) - 1)

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
        held: dict[str, int] = stats["bytes"]
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
class Place:
    """Where methods keep what outlives processes, and how often.

    Attributes:
        files: Folder that outlives machines, too; the same on all ranks.
        memory: Folder of this rank's machine alone, on tmpfs.
        every: Steps between two saves, of those that save now and then.
    """

    files: Path
    memory: Path
    every: int = 4


def coded(n: int, k: int, **options: Any) -> Callable[[Place], Method]:
    return lambda _: Ecemb(ecemb.Code(n, k), **options)


def partial_recovery(priority: str) -> Callable[[Place], Method]:
    return lambda place: PartialRecovery(place.files, place.memory, every=place.every, priority=priority)


def changes(policy: str, **options: Any) -> Callable[[Place], Method]:
    return lambda place: CheckNRun(place.files, place.memory, policy=policy, every=place.every, **options)


def sums(n: int, k: int, dtype: str = "float32") -> Callable[[Place], Method]:
    return lambda place: FloatParity(place.memory, ecemb.Code(n, k), dtype=dtype)


METHODS: Mapping[str, Callable[[Place], Method]] = {
    "nothing": lambda _: Nothing(),
    "ecemb (3, 2)": coded(3, 2),
    "ecemb (3, 2) overlapping": coded(3, 2, overlap=True),
    "ecemb (4, 3)": coded(4, 3),
    "ecemb (4, 2)": coded(4, 2),
    "ecemb (4, 3) overlapping": coded(4, 3, overlap=True),
    "replication x2": coded(2, 1),
    "replication x3": coded(3, 1),
    "float parity (3, 2)": sums(3, 2),
    "float64 parity (3, 1)": sums(3, 1, "float64"),
    "float parity (4, 3)": sums(4, 3),
    "float64 parity (4, 3)": sums(4, 3, "float64"),
    "float parity (4, 2)": sums(4, 2),
    "snapshots x2": lambda place: SnapshotRecovery(place.memory, Copies(1), every=place.every),
    "coded snapshots (3, 2)": lambda place: SnapshotRecovery(place.memory, Coded(3, 2), every=place.every),
    "coded snapshots (4, 3)": lambda place: SnapshotRecovery(place.memory, Coded(4, 3), every=place.every),
    "full files": lambda place: FullRecovery(place.files, Files(), every=place.every),
    "full dcp": lambda place: FullRecovery(place.files, Dcp(), every=place.every),
    "full dcp async": lambda place: FullRecovery(place.files, AsyncDcp(), every=place.every),
    "cpr vanilla": lambda place: PartialRecovery(place.files, place.memory, every=place.every),
    **{f"cpr {priority}": partial_recovery(priority) for priority in ("mfu", "ssu", "scar")},
    "cpr controlled": lambda place: Cpr(place.files, place.memory, mtbf=MTBF),
    "check-n-run full": changes("full"),
    "check-n-run one-shot": changes("one_shot"),
    "check-n-run consecutive": changes("consecutive", process=False),
    "check-n-run intermittent": changes("intermittent"),
    "check-n-run intermittent 8 bit": changes("intermittent", weights=Scheme("asymmetric", 8)),
    "check-n-run intermittent 4 bit": changes("intermittent", weights=Scheme("adaptive", 4)),
}
"""Name -> what makes it."""
