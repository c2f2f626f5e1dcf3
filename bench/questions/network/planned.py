"""What `ecemb plan` computes of the same jobs on the same links, beside what was measured.

Must not know: how it was measured.
"""

from __future__ import annotations

from ecemb.coding.code import Code
from ecemb.tools.cost import after_host
from ecemb.tools.job import Job
from ecemb.tools.window_cost import DELTAS, MESSAGE_S, cost_of, messages, on_the_way_s


def job_on(
    link_gbit: float,
    round_trip_s: float,
    *,
    ranks: int,
    tables: int,
    rows: int,
    row_bytes: int,
    batch: int,
    skew: float,
) -> Job:
    """A job with one rank on each host.

    Args:
        link_gbit: Rate of a host's link; 0 for none.
        round_trip_s: Of a small message and its answer, as measured without ecemb.
        ranks: How many.
        tables: Number of tables.
        rows: Of each, over all ranks.
        row_bytes: Of each row, with optimizer state.
        batch: Samples of a rank in a step.
        skew: Of the rows' popularity.
    """
    network = {"network_bytes_per_s": link_gbit * 1e9 / 8} if link_gbit else {}
    return Job(
        hosts=ranks,
        ranks_per_host=1,
        table_bytes=float(tables * rows * row_bytes),
        row_bytes=row_bytes,
        step_s=1.0,  # nothing below depends on it
        batch=batch,
        features=tables,
        skew=skew,
        overlap=False,
        round_trip_s=round_trip_s,
        **network,
    )


def agreement_s(job: Job, code: Code) -> float:
    """Status, vote, and an exchange of hardly any bytes: messages on their way, and their processor time."""
    return sum(on_the_way_s(job, code, 0.0).values()) + MESSAGE_S * messages(job.ranks, code)


def deltas_bytes(job: Job, code: Code, window: int) -> float:
    """Deltas that a rank sends in a window."""
    return cost_of(job, code, window).sent_bytes


def deltas_s(job: Job, code: Code, window: int) -> float:
    """Their exchange."""
    cost = cost_of(job, code, window)
    return max(cost.work_s["exchange"], on_the_way_s(job, code, cost.sent_bytes)[DELTAS])


def rebuild_s(job: Job, code: Code) -> float:
    """The rebuild of a host's memory, once it is allocated."""
    return after_host(job, code)["rebuild"]
