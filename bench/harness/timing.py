"""Timing of calls that are compared: each repeat runs all of them, one after the other.

Other load on the machine then slows all rivals down alike, and a ratio can be
taken repeat by repeat.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


def interleaved(
    calls: Mapping[Key, Callable[[], object]], *, repeats: int, at_least_s: float
) -> dict[Key, list[float]]:
    """Times calls against each other.

    Args:
        calls: What to time; each has been called and verified before.
        repeats: How often each is measured.
        at_least_s: A measurement repeats the call for this long, and takes the mean.

    Returns:
        For each call, the seconds that one call took, repeat by repeat.
    """
    loops = {key: _loops(call, at_least_s) for key, call in calls.items()}
    seconds: dict[Key, list[float]] = {key: [] for key in calls}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            for key, call in calls.items():
                seconds[key].append(_timed(call, loops[key]) / loops[key])
    finally:
        if enabled:
            gc.enable()
    return seconds


def _loops(call: Callable[[], object], at_least_s: float) -> int:
    loops = 1
    while (taken := _timed(call, loops)) < at_least_s:
        loops = max(2 * loops, int(loops * at_least_s / max(taken, 1e-9)))
    return loops


def _timed(call: Callable[[], object], loops: int) -> float:
    begin = time.perf_counter()
    for _ in range(loops):
        call()
    return time.perf_counter() - begin
