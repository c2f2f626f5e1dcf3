"""A training and the machines that it runs on: T_total, T_fail and N of Maeng et al. (MLSys 2021).

Servers that fail at once are the paper's too (12.5 to 50 % of them in its sweeps, recalled; 4 of 18 in
production, published). How often a job of a given length saves is derived.

Must not know: what saving and failing cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CprJob:
    """A training and the machines that it runs on.

    Attributes:
        total_h: hours of training without saves or failures (T_total).
        mtbf_h: mean hours between failures of the whole job (T_fail).
        servers: that hold the tables (N).
        servers_lost: of them, how many fail at once.

    Raises:
        ValueError: a time that is not above 0, or not 1 <= servers_lost <= servers.
    """

    total_h: float
    mtbf_h: float
    servers: int
    servers_lost: int = 1

    def __post_init__(self) -> None:
        for name in ("total_h", "mtbf_h"):
            above_zero(name, getattr(self, name))
        if not 1 <= self.servers_lost <= self.servers:
            raise ValueError(
                f"servers_lost, which fail at once, are from 1 to all {self.servers} servers; "
                f"they are {self.servers_lost}"
            )

    @property
    def failures(self) -> float:
        """How many failures the formulas expect: T_total / T_fail."""
        return self.total_h / self.mtbf_h

    def saves(self, interval_h: float) -> int:
        """How many there are, one after each `interval_h` of training but not at its very end.

        Raises:
            ValueError: an interval that is not above 0.
        """
        above_zero("interval_h", interval_h)
        return max(0, math.ceil(self.total_h / interval_h - 1e-9) - 1)

    def mean_since_save_h(self, interval_h: float) -> float:
        """Hours of training since the last save, or since the start, on average over the training.

        After s saves T_total - s T_save are left: (s T_save^2 + (T_total - s T_save)^2) / (2 T_total).

        Raises:
            ValueError: an interval that is not above 0.
        """
        saves = self.saves(interval_h)
        rest_h = self.total_h - saves * interval_h
        return (saves * interval_h**2 + rest_h**2) / (2 * self.total_h)


def above_zero(name: str, value: float) -> None:
    """Refuses a number that is not finite and above 0, by its name.

    Raises:
        ValueError: it is not.
    """
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is a number above 0; it is {value}")
