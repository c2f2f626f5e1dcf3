"""What saves and failures cost under full and under partial recovery, and the choice between them.

Follows Maeng et al. (MLSys 2021). Overheads are fractions of the training time T_total, as recalled:

    full:     O_save / T_save + (O_load + O_res + T_save / 2) / T_fail   best T_save = sqrt(2 O_save T_fail)
    partial:  O_save / T_save + (O_load + O_res) / T_fail                T_save = 2 PLS N T_fail

The controller takes partial recovery, at the longest interval that the PLS target allows, where that
costs less than full recovery at its best interval, and full recovery otherwise (published in words, recalled
as formulas). The best interval is Young's (1974).

Saving r N rows every r T_save, as prioritised saves do, writes the same volume and so costs the same.

These are of first order: they count T_total / T_fail failures and T_total / T_save saves, whole or not, and
failures during saves and recoveries not at all. `expected_overhead_of_job` counts whole saves (derived).

Must not know: events, files, rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from baselines.young import young

from .job import CprJob, above_zero
from .pls import expected_pls, interval_for_pls

Recovery = Literal["full", "partial"]


@dataclass(frozen=True)
class Costs:
    """What a save and a failure stall the job for.

    Attributes:
        save_h: hours to save everything once (O_save).
        recover_h: hours from a failure until training goes on (O_load + O_res): to reschedule what failed and
            to load what was saved. What is trained again is not in it.

    Raises:
        ValueError: a save that takes no time, for which no interval is best; or a negative time.
    """

    save_h: float
    recover_h: float

    def __post_init__(self) -> None:
        above_zero("save_h", self.save_h)
        if not (math.isfinite(self.recover_h) and self.recover_h >= 0):
            raise ValueError(f"recover_h is a number from 0 on; it is {self.recover_h}")


@dataclass(frozen=True)
class Policy:
    """How to survive failures.

    Attributes:
        recovery: "full": all servers go back to the last save and train again. "partial": those that failed
            take up their rows as last saved, the others go on, and nothing is trained again.
        interval_h: hours of training between saves (T_save).

    Raises:
        ValueError: another recovery, or an interval that is not above 0.
    """

    recovery: Recovery
    interval_h: float

    def __post_init__(self) -> None:
        if self.recovery not in ("full", "partial"):
            raise ValueError(f"recovery is 'full' or 'partial'; it is {self.recovery!r}")
        above_zero("interval_h", self.interval_h)


@dataclass(frozen=True)
class Choice:
    """What the controller chose, and on what grounds.

    Attributes:
        policy: to be followed.
        full, partial: the two it chose from.
        full_overhead, partial_overhead: what they are expected to cost, as fractions of the training time.
        pls: expected of the chosen policy; 0 for full recovery.
    """

    policy: Policy
    full: Policy
    partial: Policy
    full_overhead: float
    partial_overhead: float
    pls: float

    @property
    def removed(self) -> float:
        """The part of full recovery's overhead that the chosen policy is expected to save."""
        chosen = min(self.full_overhead, self.partial_overhead)
        return 1 - chosen / self.full_overhead


def best_full_interval_h(costs: Costs, job: CprJob) -> float:
    """Young's interval, sqrt(2 O_save T_fail): the best for full recovery."""
    return young(costs.save_h, job.mtbf_h)


def expected_overhead(costs: Costs, job: CprJob, policy: Policy) -> float:
    """Overhead as a fraction of the training time: the first-order formulas above, as recalled."""
    rerun_h = policy.interval_h / 2 if policy.recovery == "full" else 0.0
    return costs.save_h / policy.interval_h + (costs.recover_h + rerun_h) / job.mtbf_h


def expected_overhead_of_job(costs: Costs, job: CprJob, policy: Policy) -> float:
    """The same for a job of a given length, which saves a whole number of times (derived)."""
    rerun_h = job.mean_since_save_h(policy.interval_h) if policy.recovery == "full" else 0.0
    saves_h = job.saves(policy.interval_h) * costs.save_h
    return saves_h / job.total_h + (costs.recover_h + rerun_h) / job.mtbf_h


def choose(costs: Costs, job: CprJob, pls_target: float) -> Choice:
    """The controller: estimates both recoveries at their best intervals, and takes the cheaper one.

    Args:
        costs: measured, or expected.
        job: the job.
        pls_target: the largest PLS to be expected (0.1 in the paper's emulation, recalled).

    Raises:
        ValueError: a PLS target that is not above 0.
    """
    full = Policy("full", best_full_interval_h(costs, job))
    partial = Policy("partial", interval_for_pls(job, pls_target))
    full_overhead = expected_overhead(costs, job, full)
    partial_overhead = expected_overhead(costs, job, partial)
    takes_partial = partial_overhead < full_overhead
    return Choice(
        policy=partial if takes_partial else full,
        full=full,
        partial=partial,
        full_overhead=full_overhead,
        partial_overhead=partial_overhead,
        pls=expected_pls(job, partial.interval_h) if takes_partial else 0.0,
    )
