"""The duration of a step's phases, for statistics and for profilers.

A step has a dozen of them: a class costs less than a generator for each. Must not know what a phase does.
"""

from __future__ import annotations

import time

from torch.autograd import profiler
from torch.profiler import record_function


class Phase:
    """A `with` block whose wall time is added to a sum; a running profiler shows it as `ecemb.<name>`.

    Args:
        name: of the phase.
        seconds: phase -> its sum so far.
    """

    __slots__ = ("_began", "_name", "_seconds", "_shown")

    def __init__(self, name: str, seconds: dict[str, float]) -> None:
        self._name, self._seconds, self._began = name, seconds, 0.0
        self._shown: record_function | None = None

    def __enter__(self) -> None:
        self._began = time.perf_counter()
        if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
            self._shown = shown = record_function(f"ecemb.{self._name}")
            shown.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._shown is not None:
            self._shown.__exit__(*error)
        spent_s = time.perf_counter() - self._began
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent_s
