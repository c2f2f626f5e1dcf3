"""CPR's controller as a method: partial recovery where it pays, at the interval of the PLS target, else full.

Training begins under full recovery, which measures a save and a step, as the slowest rank takes them
(chosen). Then `overhead.choose` decides, once for the job: partial recovery, which starts then and there, or
full recovery at Young's interval, which goes on. O_load + O_res stalls both alike and plays no part, nor does
T_total.

The decision is a file, written when partial recovery has saved everything: until then, a failure is full
recovery's.

Must not know: how either saves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from baselines.files import sync
from baselines.full import FullRecovery
from baselines.full.writers import Files
from baselines.method import Costs, Promise, Training, total

from .job import CprJob
from .overhead import Choice, choose
from .overhead import Costs as Stalls
from .priority import SHARE
from .recovery import PartialRecovery

_HOUR_S = 3600.0


class Cpr:
    """CPR with its controller. All ranks.

    Args:
        files: folder that outlives machines; the job's own, the same on all ranks.
        memory: folder of this rank's machine alone, on tmpfs; the job's own.
        mtbf: mean time between failures of the whole job (T_fail).
        pls: the largest PLS to be expected (0.1 in the paper's emulation, recalled).
        ranks_lost: at once, in a failure.
        priority: see `PartialRecovery`.
        share: see `PartialRecovery`.
        bytes_per_s: see `PartialRecovery`.

    Attributes:
        choice: what was decided in this life, and on what grounds; None if it was before, or isn't yet.

    Raises:
        ValueError: an MTBF or a PLS that is not above 0, or see `PartialRecovery`.
    """

    promise = Promise(bit_identical=False, steps_again=None, samples_lost=True)

    def __init__(
        self,
        files: Path,
        memory: Path,
        *,
        mtbf: timedelta,
        pls: float = 0.1,
        ranks_lost: int = 1,
        priority: str | None = None,
        share: float = SHARE,
        bytes_per_s: float | None = None,
    ) -> None:
        if pls <= 0:
            raise ValueError(f"pls=, the largest PLS to be expected, is above 0; it is {pls}")
        self._files, self._memory, self._mtbf = files, memory, mtbf
        self._bytes_per_s = bytes_per_s
        self._pls, self._ranks_lost, self._priority, self._share = pls, ranks_lost, priority, share
        self._full = FullRecovery(files / "full", Files(bytes_per_s), mtbf=mtbf)
        self._partial: PartialRecovery | None = None
        self._make_partial(every=1)  # refuses what it would refuse later
        self._next = 0
        self._decided = False
        self._before = Costs()  # of full recovery, if partial recovery has taken over
        self.choice: Choice | None = None

    def prepare(self, training: Training) -> int:
        """Starts, or goes on after a failure by what was decided. All ranks.

        Returns:
            The step to run next.

        Raises:
            SavesLost, ValueError: see `PartialRecovery.prepare`.
        """
        decision: list[Any] = [self._read()]
        dist.broadcast_object_list(decision, src=0)
        self._decided, self._training = decision[0] is not None, training
        if decision[0] is not None and decision[0]["recovery"] == "partial":
            if dist.get_rank() == 0:
                shutil.rmtree(self._files / "full", ignore_errors=True)  # if it was cut off in doing so
            self._partial = self._make_partial(decision[0]["every"])
            return self._partial.prepare(training)
        self._make_partial(every=1).discard()  # begun, and not decided on
        self._next = self._full.prepare(training)
        return self._next

    @contextmanager
    def step(self) -> Generator[None]:
        """Around a step's body; what is due comes after it. All ranks."""
        with (self._partial or self._full).step():
            yield
        self._next += 1
        if not self._decided and self._full.interval.measured is not None:
            self._decide(*self._full.interval.measured)

    @property
    def steps_lost(self) -> int:
        """How many steps ranks' rows have forgotten in all: PLS times all steps times ranks."""
        return 0 if self._partial is None else self._partial.steps_lost

    @property
    def interval_steps(self) -> int | None:
        """See `Method.interval_steps`."""
        return (self._partial or self._full).interval_steps

    def memory(self) -> Sequence[Path]:
        """What partial recovery has."""
        return () if self._partial is None else self._partial.memory()

    def costs(self) -> Costs:
        """Of this life until now."""
        if self._partial is None:
            return self._full.costs()
        return total([self._before, self._partial.costs()])

    def close(self) -> None:
        """The training is done. All ranks."""
        (self._partial or self._full).close()

    def _decide(self, save_s: float, step_s: float) -> None:
        """All ranks, with the same figures."""
        mtbf_h = self._mtbf.total_seconds() / _HOUR_S
        job = CprJob(
            total_h=mtbf_h,  # plays no part
            mtbf_h=mtbf_h,
            servers=dist.get_world_size(),
            servers_lost=self._ranks_lost,
        )
        self.choice = choose(Stalls(save_h=save_s / _HOUR_S, recover_h=0.0), job, self._pls)
        policy = self.choice.policy
        every = max(1, round(policy.interval_h * _HOUR_S / step_s))
        if policy.recovery == "partial":
            self._full.close()
            self._before = self._full.costs()
            self._partial = self._make_partial(every)
            self._partial.start(self._training, self._next)
        self._decided = True
        if dist.get_rank() == 0:
            self._write({"recovery": policy.recovery, "every": every})
            if policy.recovery == "partial":
                shutil.rmtree(self._files / "full")

    def _make_partial(self, every: int) -> PartialRecovery:
        return PartialRecovery(
            self._files / "partial",
            self._memory,
            every=every,
            priority=self._priority,
            share=self._share,
            bytes_per_s=self._bytes_per_s,
        )

    def _read(self) -> dict[str, Any] | None:
        path = self._files / "decision.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _write(self, decision: dict[str, Any]) -> None:
        path = self._files / "decision.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(decision), encoding="utf-8")
        sync(partial)
        partial.rename(path)
        sync(path.parent)
