"""Which steps of a launch are measured, which end with a save, and in which a rank dies: for all methods.

    warm-up | plain steps | saves, and steps after each | kills | tail

Must not know: methods, how anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecemb.step.window import MEASURED, WARM_UP

WARM = WARM_UP + MEASURED + 5
"""Steps until the window "auto" is chosen, as in `bench.workloads.pairs`."""
SAVES, AFTER = 3, 4
"""Saves that are measured, and steps from the begin of each to the next one's."""
APART, TAIL = 4, 3
"""Steps between kills, and after the last one."""
LEAST_PLAIN = 10
EVERY = 3
"""Steps between saves while ranks are killed."""


@dataclass(frozen=True)
class Steps:
    """The steps of a launch.

    Attributes:
        plain: Whose cost is measured.
        kills: How many there are.
    """

    plain: int
    kills: int

    @property
    def total(self) -> int:
        """Of the training."""
        return self._after_saves + APART * self.kills + TAIL

    @property
    def plain_end(self) -> int:
        """The first step that is not plain any more."""
        return WARM + self.plain

    @property
    def saves(self) -> Sequence[int]:
        """Steps that end with a save."""
        return range(self.plain_end, self._after_saves, AFTER)

    @property
    def kill_steps(self) -> Sequence[int]:
        """Steps that are cut off, one in each life but the last."""
        return range(self._after_saves + APART - 1, self.total - TAIL, APART)

    @property
    def _after_saves(self) -> int:
        return self.plain_end + SAVES * AFTER


def of(total: int, kills: int) -> Steps:
    """Of a launch of so long a training."""
    return Steps(total - Steps(0, kills).total, kills)
