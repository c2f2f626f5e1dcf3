"""How many steps a transaction takes (D5): as many as asked for, or as Young's formula says.

Committing costs C seconds. A failure takes back half a window of steps on average. With a mean time M
between failures both together cost least if a window lasts sqrt(2 C M) (Young 1974).

What "auto" measured is kept in the arenas: a restart goes on with it, however often the job restarts.

Must not know: what a commit does.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import struct
import time
from datetime import timedelta
from typing import Literal

from .arena import Arena
from .errors import ConfigurationError, UsageError
from .planner import HOST_FAULTS_PER_DAY, HOST_SHARE
from .transport import Transport

logger: logging.Logger = logging.getLogger("ecemb")

MOST = 1000
"""Steps that "auto" makes a window at most: the journal holds all rows that they change."""
WARM_UP, MEASURED = 5, 20
"""Steps that "auto" lets pass first, and then takes the time of; each is a transaction meanwhile."""

_TIMES = struct.Struct("<qq")  # of a commit and of a step, in nanoseconds
_WORDS = "window_commit_ns", "window_step_ns"


class Window:
    """The number of steps of a transaction; the same on all ranks.

    Args:
        steps: 1 or more, or "auto".
        mtbf: mean time between failures of the whole job, which "auto" goes by; None for what is published of
            so many hosts (`published_mtbf`).

    Attributes:
        asked: what was asked for, to be compared between ranks.
        size: the steps; 1 while "auto" measures.

    Raises:
        ConfigurationError: no such number, or a time without "auto".
    """

    def __init__(self, steps: int | Literal["auto"] = 1, mtbf: timedelta | None = None) -> None:
        if steps != "auto" and (type(steps) is not int or steps < 1):
            raise ConfigurationError(f"window is a number of steps from 1 on, or 'auto'; it is {steps!r}")
        if steps != "auto" and mtbf is not None:
            raise ConfigurationError(
                f"mtbf, the mean time between failures of the job, goes with window='auto'; they are "
                f"{mtbf!r} and {steps!r}: e.g. window='auto', mtbf=timedelta(hours=3)"
            )
        if mtbf is not None and not (isinstance(mtbf, timedelta) and timedelta(0) < mtbf):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"mtbf is a time above 0, e.g. timedelta(hours=3); it is {mtbf!r}")
        self.asked: list[int | str] = [steps, str(mtbf)]
        self._mtbf = mtbf
        self._choosing = steps == "auto"
        self._arena: Arena | None = None
        self.size: int = 1 if steps == "auto" else steps
        self._began: list[float] = []
        self._committing_s: list[float] = []

    def take_up(self, arena: Arena, transport: Transport, hosts: int) -> None:
        """The arenas are open: go on with what any of them says that "auto" has measured. All ranks.

        A rank whose memory was lost, or who was killed before it had stored it, so takes it from another.

        Args:
            arena: this rank's, which keeps what is measured.
            transport: the control group.
            hosts: of the job.
        """
        if not self._choosing:
            return
        self._arena = arena
        self._mtbf = self._mtbf or published_mtbf(hosts)
        own = _TIMES.pack(*(arena.get(word) for word in _WORDS))
        told = [_TIMES.unpack(one) for one in transport.gather(own, "going on with the window")]
        measured = [one for one in told if min(one) > 0]  # one of two words may have been stored
        if measured:
            commit_ns, step_ns = max(measured)
            self._choose(commit_ns, step_ns, transport)

    def begin(self) -> None:
        """A step begins."""
        if self._choosing:
            self._began.append(time.perf_counter())

    def end(self, committing_s: float, transport: Transport) -> None:
        """A transaction was committed, which took so long. All ranks."""
        if not self._choosing:
            return
        self._committing_s.append(committing_s)
        if len(self._committing_s) < WARM_UP + MEASURED:
            return
        began = self._began[WARM_UP:]
        step_s = statistics.median(b - a for a, b in itertools.pairwise(began))
        times = statistics.median(self._committing_s[WARM_UP:]), step_s
        own = _TIMES.pack(*(max(1, round(1e9 * one)) for one in times))
        told = [_TIMES.unpack(one) for one in transport.gather(own, "choosing the window")]
        commit_ns, step_ns = (max(times) for times in zip(*told, strict=True))
        self._choose(commit_ns, step_ns, transport)

    def _choose(self, commit_ns: int, step_ns: int, transport: Transport) -> None:
        """Go by these times from here on, and keep them."""
        if self._arena is None or self._mtbf is None:
            raise UsageError("a window is chosen after `take_up`")
        self._choosing = False
        for word, value in zip(_WORDS, (commit_ns, step_ns), strict=True):
            self._arena.set(word, value)
        self.size = best(commit_ns / 1e9, step_ns / 1e9, self._mtbf.total_seconds())
        logger.log(
            logging.INFO if transport.rank == 0 else logging.DEBUG,
            "window: %d steps are committed together from here on (a commit takes %.1f ms, a step %.1f ms, "
            "and failures are %s apart)",
            self.size,
            commit_ns / 1e6,
            step_ns / 1e6,
            self._mtbf,
        )


def published_mtbf(hosts: int) -> timedelta:
    """The mean time between failures, of any kind, of a job on so many hosts, as clusters have published it.

    InfiniteHBD's trace (2025) has 4.2e-3 faults per GPU server and day, which agrees with Kokolis et al.
    (HPCA 2025: 2.3e-3 to 6.5e-3 per node of 8 GPUs and day); and DLRover's authors see three further failures
    of processes for each lost host. Together that is one failure per host in 60 days.

    Args:
        hosts: of the job.
    """
    return timedelta(days=HOST_SHARE / HOST_FAULTS_PER_DAY / hosts)


def best(committing_s: float, step_s: float, mtbf_s: float) -> int:
    """Young's interval in steps, from 1 to MOST.

    Args:
        committing_s: what a commit takes.
        step_s: what a step takes.
        mtbf_s: mean time between failures.
    """
    steps = math.sqrt(2 * committing_s * mtbf_s) / max(step_s, 1e-9)
    return max(1, min(MOST, round(steps)))
