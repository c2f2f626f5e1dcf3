"""One life of a rank: a training under a method, from `prepare` to its end or the rank's death."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from baselines.method import Method, Training
from bench.methods.ledger import Ledger
from ecemb.net import replacement, staying


@dataclass(frozen=True)
class Failure:
    """Processes that die, in the first life that comes to it.

    Attributes:
        step: In which.
        ranks: That die, each by itself.
        moment: "body": when the optimizers have changed the rows, before the step ends. "after": when it
            has ended. "clock": `after_s` after the life's first step begins, at any moment of any
            step.
        with_memory: Their machines' memory is lost as well.
        after_s: Of the clock.
    """

    step: int
    ranks: tuple[int, ...]
    moment: str = "body"
    with_memory: bool = True
    after_s: float = 0.0

    def strike(self, rank: int, method: Method) -> None:
        """The end of this process, if it is one of those that die."""
        if rank not in self.ranks:
            return
        if self.with_memory:
            for path in method.memory():
                path.unlink(missing_ok=True)  # by the clock, it may just have gone
        os.kill(os.getpid(), signal.SIGKILL)


def live(
    method: Method,
    training: Training,
    body: Callable[[int], object],
    steps: int,
    *,
    rank: int,
    folder: Path,
    failures: Sequence[Failure] = (),
) -> None:
    """One life of one rank, from `prepare` to the end of the training or its own. All ranks.

    Args:
        method: Keeps it alive.
        training: What `body` changes.
        body: Called with each step's number.
        steps: Of the whole training.
        rank: This one.
        folder: Of the ledgers; outlives the processes. Empty at the first start.
        failures: That strike in this life.
    """
    ledger = Ledger(folder, rank)
    cpu_began = _cpu_s()

    def note(**what: Any) -> None:
        ledger.note(**what, cpu_s=_cpu_s() - cpu_began, costs=dataclasses.asdict(method.costs()))

    def struck(one: Failure) -> None:
        ledger.note(struck_at_s=time.monotonic())
        one.strike(rank, method)

    def strike(number: int, moment: str) -> None:
        for one in failures:
            if (one.step, one.moment) == (number, moment) and rank in one.ranks:
                struck(one)

    by_clock = [one for one in failures if one.moment == "clock" and rank in one.ranks]
    clocks = [threading.Timer(one.after_s, struck, [one]) for one in by_clock]

    try:
        began = time.perf_counter()
        first = method.prepare(training)
        note(started=first, seconds=time.perf_counter() - began)
        for clock in clocks:
            clock.daemon = True
            clock.start()
        for number in range(first, steps):
            ledger.note(begun=number)
            with method.step():
                body(number)
                strike(number, "body")
            note(done=number, at_s=time.monotonic())
            strike(number, "after")
        method.close()
        note()
    finally:
        for clock in clocks:
            clock.cancel()
        ledger.close()


def goes_on() -> None:
    """Has this process stay if another rank dies, under `ecemb.run`, as it has trained. All ranks.

    Under ecemb, `protect` says so, and commits do; other methods have neither.
    """
    stay = staying.current()
    if stay is not None and not stay.is_possible:
        stay.has_trained(dist.get_rank(), "")
    replacement.made_progress()


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
