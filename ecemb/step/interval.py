"""Young's interval: how many steps are committed together, by the time of a commit and of the faults.

A commit costs C seconds. A failure takes back half a window of steps on average. With a mean time M between
failures, both together cost least if a window lasts sqrt(2 C M) (Young 1974).

Must not know: torch, arenas, how C is measured; `ecemb plan` computes with it as well.
"""

from __future__ import annotations

import math
from datetime import timedelta

from ..coding.placement import HOST_FAULTS_PER_DAY, HOST_SHARE

MOST, LONGEST_S = 1000, 60.0
"""A window by "auto" has at most this many steps, or lasts at most this long, whichever is more. Bounds the
journal, which holds all rows that the steps change."""


def published_mtbf(hosts: int) -> timedelta:
    """The published mean time between failures, of any kind, of a job on this number of hosts.

    InfiniteHBD's trace (2025) has 4.2e-3 faults per GPU server and day, which agrees with Kokolis et al.
    (HPCA 2025: 2.3e-3 to 6.5e-3 per node of 8 GPUs and day). DLRover's authors see three further failures
    of processes per lost host. Together these give one failure per host in 60 days.

    Args:
        hosts: Number of hosts of the job.
    """
    return timedelta(days=HOST_SHARE / HOST_FAULTS_PER_DAY / hosts)


def best(committing_s: float, step_s: float, mtbf_s: float, most_s: float | None = None) -> int:
    """Young's interval in steps: at least one, at most `MOST` or as many as last `LONGEST_S`.

    Args:
        committing_s: Duration of a commit.
        step_s: Duration of a step.
        mtbf_s: Mean time between failures.
        most_s: Longest time that the steps may take; None for no bound.
    """
    step_s = max(step_s, 1e-9)
    steps = round(min(math.sqrt(2 * committing_s * mtbf_s), max(MOST * step_s, LONGEST_S)) / step_s)
    return max(1, steps if most_s is None else min(steps, int(most_s / step_s)))
