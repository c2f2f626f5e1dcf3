"""The jobs that methods are compared on: what a step takes, and how many rows it changes.

Who is ahead depends on these more than on anything that is measured here, so that there are several.

Must not know: what methods cost, faults.
"""

from __future__ import annotations

from dataclasses import dataclass

from ecemb.tools.job import Job

HOSTS, RANKS_PER_HOST = 128, 8
HOST_BYTES = 64e9
"""Tables of a host, where a question doesn't say otherwise."""


@dataclass(frozen=True)
class Profile:
    """A kind of jobs.

    Attributes:
        name: For the tables.
        job: With `HOST_BYTES` on each of its hosts.
        rows_of: Where the rows that a step changes are from.
        rows_range: Least and most times as many rows, which are plausible.
    """

    name: str
    job: Job
    rows_of: str
    rows_range: tuple[float, float]


def _job(**given: object) -> Job:
    fixed = {"hosts": HOSTS, "ranks_per_host": RANKS_PER_HOST, "table_bytes": HOSTS * HOST_BYTES}
    return Job(**fixed, **given)  # pyright: ignore[reportArgumentType] - keywords of Job


PROFILES = (
    Profile(
        "processors, 0.25 s a step",
        _job(batch=1e4, features=1, skew=0.0, row_bytes=516, step_s=0.25),
        "10,000 different rows of a rank; 60,000 in jobs of the literature",
        (0.5, 6.0),
    ),
    Profile(
        "GPUs, 50 ms a step",
        _job(batch=2048, features=100, ids=2, skew=1.05, row_bytes=132, step_s=0.05, device="cuda"),
        "100 features of 2 ids, 2,048 samples a rank",
        (0.5, 3.0),
    ),
    Profile(
        "GPUs, 8.5 ms a step",
        _job(batch=1024, features=26, ids=8, skew=1.05, row_bytes=516, step_s=0.0085, device="cuda"),
        "26 features of 8 ids, 1,024 samples a rank, as MLPerf's DLRM",
        (0.5, 3.0),
    ),
)
"""Tables in host memory, whose training keeps all processors busy; and tables on GPUs, whose hosts have
processors to spare."""
