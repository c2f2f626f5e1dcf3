"""Which methods are compared, and what is measured of each.

Must not know: how anything is measured.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from baselines.cpr import job as cpr_job
from baselines.cpr.pls import interval_for_pls
from baselines.young import young
from bench.methods.registry import OF_TORCHREC, PLS_TARGET
from ecemb.coding.code import Code

Steps = int | Literal["auto"]
RANKS = 4
"""All on this machine, one thread each; of codes with a larger n: n."""
HALF_HOUR_S = 1800.0
"""Between Check-N-Run's checkpoints (published)."""
NOTHING = "nothing"

Rule = Literal["none", "never", "Young", "half an hour", "PLS 0.1"]
"""By which a method chooses its interval; "none" for those that commit steps instead of saving."""


@dataclass(frozen=True)
class Guard:
    """What ecemb does, or copies that are its own code.

    Attributes:
        code: The (n, k) code.
        window: Steps that are committed together.
        overlap: Whether beside the steps that follow.
    """

    code: Code
    window: Steps = 1
    overlap: bool = False


@dataclass(frozen=True)
class Case:
    """One method.

    Attributes:
        method: Of `bench.methods.registry.METHODS`.
        guard: If it is one of ecemb's.
        rule: Of its interval.
        acts: Whether it is worth measuring what a rival does in steps, between saves.
        behind: Whether a save counts only when it is written, which goes on beside training.
    """

    method: str
    guard: Guard | None = None
    rule: Rule = "none"
    acts: bool = False
    behind: bool = False

    @property
    def saves(self) -> bool:
        """Whether it saves now and then."""
        return self.rule not in ("none", "never")

    @property
    def goes_back(self) -> bool:
        """Whether all ranks go back to a save after a failure."""
        return self.saves and self.rule != "PLS 0.1"

    @property
    def ranks(self) -> int:
        """That train under it."""
        blocks = re.search(r"\((\d+), ", self.method)
        return max(RANKS, int(blocks[1]) if blocks else 0)


CASES = (
    Case(NOTHING, rule="never", acts=True),
    Case("ecemb (4, 3)", Guard(Code(4, 3))),
    Case("ecemb (4, 3) window 16", Guard(Code(4, 3), 16)),
    Case("ecemb (4, 3) window auto", Guard(Code(4, 3), "auto", overlap=True)),
    Case("ecemb copies x2", Guard(Code(2, 1))),
    Case("snapshots x2", rule="Young"),
    Case("snapshots x2 beside", rule="Young", behind=True),
    Case("full files", rule="Young"),
    Case("full dcp async", rule="Young", behind=True),
    Case("cpr vanilla", rule="PLS 0.1", acts=True),
    Case("cpr mfu", rule="PLS 0.1", acts=True),
    Case("cpr ssu", rule="PLS 0.1", acts=True),
    Case("check-n-run intermittent", rule="half an hour", acts=True, behind=True),
    Case("check-n-run intermittent 4 bit", rule="half an hour", behind=True),
    Case("check-n-run model tracker", rule="half an hour", acts=True, behind=True),
    Case("ecemb (6, 4)", Guard(Code(6, 4))),
    Case("ecemb (6, 4) window auto", Guard(Code(6, 4), "auto", overlap=True)),
)
BY_METHOD = {case.method: case for case in CASES}
PRIORITIES = ("cpr mfu", "cpr ssu")
"""Measured beside the methods of the pages: CPR as its paper recommends it."""
PRIORITY_SHARE = 8
"""CPR with priorities saves an eighth of the rows, eight times as often."""


def on(engine: str, chosen: tuple[str, ...]) -> list[Case]:
    """The cases of some methods that are measured on an engine."""
    return [
        case
        for case in CASES
        if case.method in chosen and (engine == "torchrec" or case.method not in OF_TORCHREC)
    ]


def interval_s(case: Case, lost_s: float, written_s: float, mtbf_s: float, ranks: int) -> float:
    """Seconds between saves, by the method's own best or published rule.

    Args:
        case: The method.
        lost_s: That training loses by a save.
        written_s: Until a save is written; no save begins before.
        mtbf_s: Mean time between failures of the job.
        ranks: Of the job.
    """
    if case.rule == "PLS 0.1":
        hours = mtbf_s / 3600
        every_s = 3600 * interval_for_pls(cpr_job.CprJob(hours, hours, ranks), PLS_TARGET)
        return every_s / PRIORITY_SHARE if case.method != "cpr vanilla" else every_s
    best_s = young(lost_s, mtbf_s)
    return max(written_s, min(best_s, HALF_HOUR_S) if case.rule == "half an hour" else best_s)


def takes_s(case: Case, every_s: float, written_s: float, ranks: int) -> float:
    """Seconds of training that a failure takes on average, of a method that saves.

    Half an interval, and as long as the last save may not have been written. Under CPR the failed rank alone
    forgets, which is its part of them.
    """
    if case.rule == "PLS 0.1":
        return every_s / 2 / ranks
    return every_s / 2 + (written_s if case.behind else 0.0)


def in_a_window(window: int) -> float:
    """Steps that a failure takes on average: of a window's other steps half, and the one that it cuts off."""
    return (window + 1) / 2
