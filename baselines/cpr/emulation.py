"""A job with its saves and failures, event by event: what `overhead` and `pls` say in formulas, counted.

The paper (Maeng et al., MLSys 2021) emulates failures in a real training; of its emulation 56 h of
training, failures 28 h apart and 8 servers are recalled. This one has no training in it, and everything
about it is chosen:

- All servers save at once, each T_save hours of training after the last save, and not at the very end. A save
  stops the training; one that a failure cuts off does not count, and is begun again.
- Which servers fail is drawn evenly, without repetition within a failure.
- `arrivals` says when. "progress": a fixed number, T_total / T_fail rounded, evenly over the
  training's progress; none while saving, recovering or training again. This is what the formulas count.
  "clock": a Poisson process in real time; a failure while recovering starts the
  recovery over. Overhead then draws failures of its own: with 40 of them in 56 hours full recovery costs a
  third more than the formula says.

Numbers of one seed are the same on every machine with the same numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .job import CprJob
from .overhead import Costs, Policy
from .pls import PlsAccount

Arrivals = Literal["progress", "clock"]

LONGEST = 1000
"""A job that takes this many times its training time is given up: it may never end."""


@dataclass(frozen=True)
class Outcome:
    """What became of one job.

    Attributes:
        overhead: hours beyond the training time, as a fraction of it.
        pls: portion of lost samples; 0 for full recovery.
        failures: how many there were.
        saves: how many were finished.
        trained_again_h: hours of training that were run a second time.
    """

    overhead: float
    pls: float
    failures: int
    saves: int
    trained_again_h: float


@dataclass(frozen=True)
class Estimate:
    """A mean over runs, with its confidence interval of 95 % (normal approximation).

    Attributes:
        mean: of all runs.
        low: 1.96 standard errors below it.
        high: 1.96 standard errors above it.
    """

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Many runs of one job.

    Attributes:
        overhead: as in `Outcome`.
        pls: as in `Outcome`.
        failures: as in `Outcome`.
        overhead_p90: what one run of ten exceeds.
        runs: how many.
    """

    overhead: Estimate
    pls: Estimate
    failures: Estimate
    overhead_p90: float
    runs: int


class _Run:
    """One job on its way. `_next` is when the next failure comes, on the clock that `arrivals` names."""

    def __init__(
        self,
        costs: Costs,
        job: CprJob,
        policy: Policy,
        failures: Iterable[float],
        arrivals: Arrivals,
        strike: Callable[[], list[int]],
    ) -> None:
        self._costs, self._job, self._policy = costs, job, policy
        self._arrivals: Arrivals = arrivals
        self._failures = iter(failures)
        self._next = next(self._failures, math.inf)
        self._strike = strike
        self._account = PlsAccount(job.total_h, job.servers)
        self._clock = 0.0  # real hours
        self._trained = 0.0  # hours of training that the job's state holds
        self._reached = 0.0  # the most it has ever held
        self._saved = 0.0
        self._count = self._saves = 0
        self._again_h = 0.0

    def run(self) -> Outcome:
        total_h = self._job.total_h
        planned = self._job.saves(self._policy.interval_h)
        while self._trained < total_h:
            saves = self._saves < planned
            end = (self._saves + 1) * self._policy.interval_h if saves else total_h
            if not self._train(end):
                self._recover()
            elif saves:
                if self._stall(self._costs.save_h):
                    self._saved = self._trained
                    self._account.saved(self._trained)
                    self._saves += 1
                else:
                    self._recover()
        return Outcome(self._clock / total_h - 1, self._account.pls, self._count, self._saves, self._again_h)

    def _train(self, end: float) -> bool:
        """Trains up to `end`; False if a failure came before. No failure strikes at the very end."""
        start = self._trained
        if self._arrivals == "clock":
            stop = min(end, start + max(0.0, self._next - self._clock))
        else:
            stop = min(end, max(start, self._next))
        self._trained = stop
        self._clock += stop - start
        self._again_h += max(0.0, min(self._reached, stop) - start)
        self._reached = max(self._reached, stop)
        return stop == end

    def _stall(self, hours: float) -> bool:
        """Waits; False if a failure came before the end."""
        wait = min(hours, self._next - self._clock) if self._arrivals == "clock" else hours
        self._clock += max(0.0, wait)
        return wait == hours

    def _recover(self) -> None:
        """A failure has come. Further ones while recovering have nothing more to take."""
        done = False
        while not done:
            if self._clock > LONGEST * self._job.total_h:
                raise RuntimeError(
                    f"{self._policy} has not ended {self._job} within {LONGEST} times its training time: "
                    "failures are too close together for it"
                )
            self._count += 1
            self._next = next(self._failures, math.inf)
            servers = self._strike()
            if self._policy.recovery == "partial":
                self._account.failed(self._trained, servers)
            else:
                self._trained = self._saved
            done = self._stall(self._costs.recover_h)


def emulate(
    costs: Costs, job: CprJob, policy: Policy, failures: Iterable[float], arrivals: Arrivals, seed: int = 0
) -> Outcome:
    """One job with failures at given hours.

    Args:
        costs: what a save and a failure stall the job for.
        job: the job; its mtbf_h is not looked at.
        policy: how it survives.
        failures: hours, ascending: of training ("progress") or since the start ("clock").
        arrivals: which.
        seed: of the choice of servers.

    Raises:
        ValueError: other arrivals.
        RuntimeError: the job takes more than `LONGEST` times its training time.
    """
    _check(arrivals)
    rng = np.random.default_rng(seed)

    def strike() -> list[int]:
        return rng.choice(job.servers, job.servers_lost, replace=False).tolist()

    return _Run(costs, job, policy, failures, arrivals, strike).run()


def failure_hours(job: CprJob, arrivals: Arrivals, rng: np.random.Generator) -> Iterator[float]:
    """Draws when failures come, ascending: a number over the training, or without end.

    Raises:
        ValueError: other arrivals than "progress" and "clock".
    """
    _check(arrivals)
    if arrivals == "progress":
        yield from np.sort(rng.uniform(0, job.total_h, round(job.failures))).tolist()
        return
    hour = 0.0
    while True:
        hour += rng.exponential(job.mtbf_h)
        yield hour


def emulate_runs(
    costs: Costs, job: CprJob, policy: Policy, *, arrivals: Arrivals, runs: int, seed: int
) -> Summary:
    """Many jobs, each with failures of its own.

    Args:
        costs: what a save and a failure stall the job for.
        job: the job.
        policy: how it survives.
        arrivals: when failures come.
        runs: how many jobs; at least 2.
        seed: of everything.

    Raises:
        ValueError: fewer than 2 runs, or other arrivals.
        RuntimeError: a job takes more than `LONGEST` times its training time.
    """
    if runs < 2:
        raise ValueError(f"a confidence interval takes at least 2 runs; there are {runs}")
    outcomes: list[Outcome] = []
    for child in np.random.SeedSequence(seed).spawn(runs):
        hours = failure_hours(job, arrivals, np.random.default_rng(child))
        outcomes.append(emulate(costs, job, policy, hours, arrivals, int(child.generate_state(1)[0])))
    return Summary(
        overhead=_estimate(np.array([one.overhead for one in outcomes])),
        pls=_estimate(np.array([one.pls for one in outcomes])),
        failures=_estimate(np.array([one.failures for one in outcomes], dtype=np.float64)),
        overhead_p90=float(np.percentile([one.overhead for one in outcomes], 90)),
        runs=runs,
    )


def _estimate(values: NDArray[np.float64]) -> Estimate:
    mean = float(values.mean())
    margin = 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - margin, mean + margin)


def _check(arrivals: str) -> None:
    if arrivals not in ("progress", "clock"):
        raise ValueError(f"arrivals is 'progress' or 'clock'; it is {arrivals!r}")
