"""The paper's settings and its sweeps: model and emulation beside what is published.

Follows Maeng et al. (MLSys 2021).

- `EMULATED`: 56 h of training, failures 28 h apart, 8 servers, PLS target 0.1: recalled.
- `KAGGLE`, `TERABYTE`: their costs are **calibrated** so that full and partial recovery come out at the
  published overheads: 8.5 and 0.53 %, 8.2 and 0.68 %. (Published are the ranges, 8.2-8.5 % and 0.53-0.68 %;
  which end belongs to which data is recalled.) That they come out is therefore no evidence. The sweeps are.
- `sweeps()`: 12.5, 25 and 50 % of the servers lost at once; 2, 20 and 40 failures; PLS targets of 0.02, 0.1
  and 0.2: recalled. The rest of each point is as in `EMULATED`: chosen.
- `PRODUCTION`: 18 servers, 50 h, 5 failures of 4 servers each, more than 91 % of the overhead gone: published
  (poster). Its costs and its PLS target are not: it is computed with the calibrated costs and each of the
  sweep's PLS targets, with an interval for 4 servers lost at once and, as the formula is recalled, with one
  for a single server (chosen).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from .emulation import Arrivals, Summary, emulate_runs
from .job import CprJob
from .overhead import Choice, Costs, Policy, choose, expected_overhead, expected_overhead_of_job
from .pls import expected_pls, expected_pls_of_job

EMULATED: Final = CprJob(total_h=56, mtbf_h=28, servers=8)
PRODUCTION: Final = CprJob(total_h=50, mtbf_h=10, servers=18, servers_lost=4)
PLS_TARGET: Final = 0.1

SERVERS_LOST: Final = (1, 2, 4)
FAILURES: Final = (2, 20, 40)
PLS_TARGETS: Final = (0.02, 0.1, 0.2)


@dataclass(frozen=True)
class Published:
    """What the paper says of a setting, as fractions; None where it says nothing that we have.

    Attributes:
        full_overhead: of full recovery.
        partial_overhead: of partial recovery.
        removed: the part of full recovery's overhead that partial recovery saves.
        calibrated: the costs were chosen so that this comes out.
    """

    full_overhead: float | None = None
    partial_overhead: float | None = None
    removed: float | None = None
    calibrated: bool = False


NOTHING: Final = Published()


@dataclass(frozen=True)
class Dataset:
    """A training of the paper, by its data.

    Attributes:
        name: "kaggle" or "terabyte", of Criteo.
        costs: calibrated on `published`.
        published: for `EMULATED`.
    """

    name: str
    costs: Costs
    published: Published


KAGGLE: Final = Dataset(
    "kaggle", Costs(save_h=5.6 / 60, recover_h=5.4 / 60), Published(0.085, 0.0053, calibrated=True)
)
TERABYTE: Final = Dataset(
    "terabyte", Costs(save_h=5.0 / 60, recover_h=8.3 / 60), Published(0.082, 0.0068, calibrated=True)
)


@dataclass(frozen=True)
class Setting:
    """One point of a sweep.

    Attributes:
        sweep: "base", "servers_lost", "failures", "pls_target" or "production".
        costs: what a save and a failure stall the job for.
        job: that is emulated.
        pls_target: for partial recovery.
        planned_for: servers lost at once, of which the partial interval takes account.
        published: what the paper says.
    """

    sweep: str
    costs: Costs
    job: CprJob
    pls_target: float = PLS_TARGET
    planned_for: int = 1
    published: Published = NOTHING


@dataclass(frozen=True)
class Side:
    """One recovery in a setting: by formula and by emulation.

    Attributes:
        policy: the recovery and its interval.
        overhead, pls: the paper's formulas, as recalled.
        overhead_of_job, pls_of_job: with a whole number of saves (derived).
        emulated: counted.
    """

    policy: Policy
    overhead: float
    pls: float
    overhead_of_job: float
    pls_of_job: float
    emulated: Summary


@dataclass(frozen=True)
class Point:
    """A setting with its results.

    Attributes:
        setting: what was computed.
        choice: what the controller makes of it.
        full, partial: both recoveries, also the one that was not chosen.
    """

    setting: Setting
    choice: Choice
    full: Side
    partial: Side

    @property
    def removed(self) -> float:
        """The part of full recovery's overhead that partial recovery saves, by formula."""
        return 1 - self.partial.overhead / self.full.overhead

    @property
    def emulated_removed(self) -> float:
        """The same, emulated: of the means."""
        return 1 - self.partial.emulated.overhead.mean / self.full.emulated.overhead.mean


def sweeps(dataset: Dataset) -> list[Setting]:
    """The setting that the costs were calibrated on, the paper's sweeps and its production set-up."""
    costs = dataset.costs
    found = [Setting("base", costs, EMULATED, published=dataset.published)]
    found += [
        Setting("servers_lost", costs, replace(EMULATED, servers_lost=lost), planned_for=lost)
        for lost in SERVERS_LOST
    ]
    found += [
        Setting("failures", costs, replace(EMULATED, mtbf_h=EMULATED.total_h / failures))
        for failures in FAILURES
    ]
    found += [Setting("pls_target", costs, EMULATED, target) for target in PLS_TARGETS]
    found += [
        Setting("production", costs, PRODUCTION, target, planned_for, Published(removed=0.91))
        for planned_for in (PRODUCTION.servers_lost, 1)
        for target in PLS_TARGETS
    ]
    return found


def evaluate(setting: Setting, *, arrivals: Arrivals, runs: int, seed: int) -> Point:
    """Computes one point, by formula and by emulation.

    Args:
        setting: what to compute.
        arrivals: when the emulation's failures come; see `emulation`.
        runs: jobs emulated for each recovery; at least 2.
        seed: of the emulation; both recoveries see the same failures.

    Raises:
        ValueError: fewer than 2 runs, or other arrivals.
        RuntimeError: a job that does not end.
    """
    costs, job = setting.costs, setting.job
    choice = choose(costs, replace(job, servers_lost=setting.planned_for), setting.pls_target)

    def side(policy: Policy) -> Side:
        partial = policy.recovery == "partial"
        return Side(
            policy=policy,
            overhead=expected_overhead(costs, job, policy),
            pls=expected_pls(job, policy.interval_h) if partial else 0.0,
            overhead_of_job=expected_overhead_of_job(costs, job, policy),
            pls_of_job=expected_pls_of_job(job, policy.interval_h) if partial else 0.0,
            emulated=emulate_runs(costs, job, policy, arrivals=arrivals, runs=runs, seed=seed),
        )

    return Point(setting, choice, side(choice.full), side(choice.partial))
