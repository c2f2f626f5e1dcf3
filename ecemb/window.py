"""How many steps a transaction takes (D5): as many as asked for, or as Young's formula says.

Committing costs C seconds. A failure takes back half a window of steps on average. With a mean time M
between failures both together cost least if a window lasts sqrt(2 C M) (Young 1974).

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

from .errors import ConfigurationError
from .transport import Transport

logger: logging.Logger = logging.getLogger("ecemb")

MOST = 1000
"""Steps that "auto" makes a window at most: the journal holds all rows that they change."""
WARM_UP, MEASURED = 5, 20
"""Steps that "auto" lets pass first, and then takes the time of; each is a transaction meanwhile."""

_TIMES = struct.Struct("<dd")


class Window:
    """The number of steps of a transaction; the same on all ranks.

    Args:
        steps: 1 or more, or "auto".
        mtbf: mean time between failures of the whole job, which "auto" goes by.

    Attributes:
        asked: what was asked for, to be compared between ranks.
        size: the steps; 1 while "auto" measures.

    Raises:
        ConfigurationError: no such number, or "auto" without a time, or a time without "auto".
    """

    def __init__(self, steps: int | Literal["auto"] = 1, mtbf: timedelta | None = None) -> None:
        if steps != "auto" and (type(steps) is not int or steps < 1):
            raise ConfigurationError(f"window is a number of steps from 1 on, or 'auto'; it is {steps!r}")
        if (steps == "auto") != (mtbf is not None):
            raise ConfigurationError(
                f"mtbf, the mean time between failures of the job, goes with window='auto'; they are "
                f"{mtbf!r} and {steps!r}: e.g. window='auto', mtbf=timedelta(hours=3)"
            )
        if mtbf is not None and not (isinstance(mtbf, timedelta) and timedelta(0) < mtbf):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(f"mtbf is a time above 0, e.g. timedelta(hours=3); it is {mtbf!r}")
        self.asked: list[int | str] = [steps, str(mtbf)]
        self._mtbf = mtbf  # None once there is nothing to choose
        self.size: int = 1 if steps == "auto" else steps
        self._began: list[float] = []
        self._committing_s: list[float] = []

    def begin(self) -> None:
        """A step begins."""
        if self._mtbf is not None:
            self._began.append(time.perf_counter())

    def end(self, committing_s: float, transport: Transport) -> None:
        """A transaction was committed, which took so long. All ranks."""
        if self._mtbf is None:
            return
        self._committing_s.append(committing_s)
        if len(self._committing_s) < WARM_UP + MEASURED:
            return
        began = self._began[WARM_UP:]
        step_s = statistics.median(b - a for a, b in itertools.pairwise(began))
        own = _TIMES.pack(statistics.median(self._committing_s[WARM_UP:]), step_s)
        told = [_TIMES.unpack(one) for one in transport.gather(own, "choosing the window")]
        committing_s, step_s = (max(times) for times in zip(*told, strict=True))
        self.size = best(committing_s, step_s, self._mtbf.total_seconds())
        logger.log(
            logging.INFO if transport.rank == 0 else logging.DEBUG,
            "window: %d steps are committed together from here on (a commit takes %.1f ms, a step %.1f ms, "
            "and failures are %s apart)",
            self.size,
            1000 * committing_s,
            1000 * step_s,
            self._mtbf,
        )
        self._mtbf = None


def best(committing_s: float, step_s: float, mtbf_s: float) -> int:
    """Young's interval in steps, from 1 to MOST.

    Args:
        committing_s: what a commit takes.
        step_s: what a step takes.
        mtbf_s: mean time between failures.
    """
    steps = math.sqrt(2 * committing_s * mtbf_s) / max(step_s, 1e-9)
    return max(1, min(MOST, round(steps)))
