"""The number of steps in a transaction: a fixed number, or Young's optimum.

A commit costs C seconds. A failure takes back half a window of steps on average. With a mean time M between
failures, both together cost least if a window lasts sqrt(2 C M) (Young 1974).

The arenas keep the measurements of "auto", so a restart continues with them.

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

from ..arena.arena import Arena
from ..arena.header import Word
from ..errors import ConfigurationError, UsageError
from ..group.collectives import Transport
from ..planning.cost import HOST_FAULTS_PER_DAY, HOST_SHARE

logger: logging.Logger = logging.getLogger("ecemb")

MOST = 1000
"""Most steps in a window by "auto": the journal holds all rows that they change."""
WARM_UP, MEASURED = 5, 20
"""Steps that "auto" skips first, and steps that it then measures; meanwhile each step is a transaction."""

_TIMES = struct.Struct("<qq")  # of a commit and of a step, in nanoseconds
_WORDS = Word.WINDOW_COMMIT_NS, Word.WINDOW_STEP_NS


class Window:
    """The number of steps of a transaction; the same on all ranks.

    Args:
        steps: 1 or more, or "auto".
        mtbf: Mean time between failures of the whole job, for "auto"; None for the published rate of as many
            hosts (`published_mtbf`).

    Attributes:
        asked: The arguments, for the comparison between ranks.
        size: The number of steps; 1 while "auto" measures.

    Raises:
        ConfigurationError: `steps` is no such number, or `mtbf` is given without "auto".
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
        """Continues with the measurements of "auto" that any arena holds. All ranks, with open arenas.

        A rank without the measurements, after a loss or an early kill, takes them from another rank.

        Args:
            arena: This rank's, which keeps the measurements.
            transport: The control group.
            hosts: Number of hosts of the job.
        """
        if not self._choosing:
            return
        self._arena = arena
        self._mtbf = self._mtbf or published_mtbf(hosts)
        own = _TIMES.pack(*(arena.get(word) for word in _WORDS))
        told = [_TIMES.unpack(one) for one in transport.gather(own, "going on with the window")]
        measured = [one for one in told if min(one) > 0]  # a kill may have left one of the two words
        if measured:
            commit_ns, step_ns = max(measured)
            self._choose(commit_ns, step_ns, transport)

    @property
    def is_choosing(self) -> bool:
        """Whether "auto" still measures."""
        return self._choosing

    def begin(self) -> None:
        """Marks the begin of a step."""
        if self._choosing:
            self._began.append(time.perf_counter())

    def end(self, committing_s: float, transport: Transport) -> None:
        """Records a commit and its duration. All ranks."""
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
        """Chooses the size by these times, and stores them."""
        if self._arena is None or self._mtbf is None:
            raise UsageError("a window is chosen after `take_up`")
        self._choosing = False
        for word, value in zip(_WORDS, (commit_ns, step_ns), strict=True):
            self._arena.set(word, value)
        self.size = best(commit_ns / 1e9, step_ns / 1e9, self._mtbf.total_seconds())
        logger.log(
            logging.INFO if transport.rank == 0 else logging.DEBUG,
            "window: %d steps are committed together from now on (a commit takes %.1f ms, a step %.1f ms; "
            "mean time between failures %s)",
            self.size,
            commit_ns / 1e6,
            step_ns / 1e6,
            self._mtbf,
        )


def published_mtbf(hosts: int) -> timedelta:
    """The published mean time between failures, of any kind, of a job on this number of hosts.

    InfiniteHBD's trace (2025) has 4.2e-3 faults per GPU server and day, which agrees with Kokolis et al.
    (HPCA 2025: 2.3e-3 to 6.5e-3 per node of 8 GPUs and day). DLRover's authors see three further failures
    of processes per lost host. Together these give one failure per host in 60 days.

    Args:
        hosts: Number of hosts of the job.
    """
    return timedelta(days=HOST_SHARE / HOST_FAULTS_PER_DAY / hosts)


def best(committing_s: float, step_s: float, mtbf_s: float) -> int:
    """Young's interval in steps, from 1 to MOST.

    Args:
        committing_s: Duration of a commit.
        step_s: Duration of a step.
        mtbf_s: Mean time between failures.
    """
    steps = math.sqrt(2 * committing_s * mtbf_s) / max(step_s, 1e-9)
    return max(1, min(MOST, round(steps)))
