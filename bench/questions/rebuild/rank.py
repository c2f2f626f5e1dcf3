"""One rank whose memory, or a peer's, is rebuilt before training goes on, or beside it; rows drawn uniformly.

Marks, kills and files are those of `bench.questions.recovery.rank`. A life ends, by a kill or as the last
one, some steps after no rank lacks anything: all ranks hear that in the same step.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from bench.questions.recovery.rank import Bags, Training, built, digest, process_began
from bench.questions.recovery.rank import Order as RecoveryOrder


@dataclass(frozen=True)
class Order(RecoveryOrder):
    """What the ranks are to do.

    Attributes:
        steps: Of each life, once no rank lacks anything.
        tables: Number of tables, where the model leaves it open.
        dim: Of each row, there as well, as all that follows.
        lookups: Rows of each table that a sample looks up.
        skew: Of the rows' popularity.
        dense: What is above the tables, one of `DENSE`.
        wait_s: In which a step waits for dense work of an accelerator, and leaves the processors idle.
    """

    tables: int = 0
    dim: int = 0
    lookups: int = 1
    skew: float = 0.0
    dense: str = ""
    wait_s: float = 0.0


def main(path: str) -> None:
    """Trains as the order in the file `path` says."""
    marks = {"process": process_began(), "interpreter": time.monotonic()}
    order = Order.read(path)
    import torch

    import ecemb

    ecemb.init_process_group("gloo", job=order.job, arena_dir=order.arena_dir)
    built(Uniform, order).run(marks)
    torch.distributed.destroy_process_group()


class Rebuilding(Training):
    """Lives that end some steps after no rank lacks anything."""

    order: Order

    def run(self, marks: dict[str, float]) -> None:
        """One life of the job, with the model that is built."""
        import ecemb

        self.marks = marks
        model, optimizers = self.protected()
        code = ecemb.Code(n=self.order.n, k=self.order.k)
        self._cpu_s = [time.process_time()]
        self.guard = guard = ecemb.protect(
            model, optimizers=optimizers, code=code, failure_domain="rank", rebuild=self.order.rebuild
        )
        last = self.life == self.order.kills
        ends: list[float] = []
        whole_at, whole_before = 0.0, 0  # when all was there, and how many steps had ended before
        left = self.order.steps
        while left:
            if not whole_at and guard._background.is_over:
                whole_at, whole_before = time.monotonic(), len(ends)
                self._cpu_s.append(time.process_time())
            left -= bool(whole_at)
            if not left:
                self._leave(ends, whole_at, whole_before)
            self._step(guard.next_step, dies=not left and not last)
            ends.append(time.monotonic())
        self.order.leave(
            self.life, f"end.{self.rank}", {"digest": digest(self.tensors()), "steps": guard.next_step}
        )
        guard.close()

    def wait_for_device(self) -> None:
        """In each step: what an accelerator computes meanwhile takes no processor."""
        if self.order.wait_s:
            time.sleep(self.order.wait_s)

    def _leave(self, ends: list[float], whole_at: float, whole_before: int) -> None:
        """Before the last step of a life, which may be the process's end."""
        guard: Any = self.guard
        report = guard.recovery
        self._cpu_s.append(time.process_time())
        self.order.leave(
            self.life,
            self.rank,
            {
                "pid": os.getpid(),
                "marks": {"first step": ends[0]},
                "kind": report.kind,
                "lost": report.lost,
                "step": report.step,
                "ends": ends,
                "cpu_s": self._cpu_s,
                "lost_bytes": _lost_bytes(guard),
                "whole_at": whole_at,
                "whole_before": whole_before,
                "waited_s": guard.stats()["rebuild"].get("waited_s", 0.0),
            },
        )


class Uniform(Rebuilding, Bags):
    """The model of the question `recovery`."""

    def train(self, number: int, *, dies: bool) -> None:
        self.wait_for_device()
        super().train(number, dies=dies)


def _lost_bytes(guard: Any) -> int:
    """Rows and parity of the rank, of which all are lost with its memory."""
    arena = guard._memory.arena
    return sum(len(arena.region(name)) for name in ("rows", "parity"))


if __name__ == "__main__":
    main(sys.argv[1])
