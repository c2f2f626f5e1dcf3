"""What the ledgers of killed ranks say, as rows.

Must not know: how they were launched, what methods are.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.harness.result import Label, Row, once, summary
from bench.methods.ledger import Account, Life
from bench.questions.compare.rank import Order

NEXT, CAUGHT_UP, PREPARE, RESTART_SENT = METRICS = (
    *("next_step_s", "caught_up_s", "prepare_s"),
    "restart_sent_bytes",
)


class Struck(Protocol):
    """What failures are counted of.

    Attributes:
        order: Of the launch, as far as its failures go.
        accounts: Of each rank.
    """

    @property
    def order(self) -> Kills: ...
    @property
    def accounts(self) -> Sequence[Account]: ...


class Kills(Protocol):
    """An order to kill ranks.

    Attributes:
        kills: Lives that end with a failure.
    """

    @property
    def kills(self) -> int: ...


@dataclass(frozen=True)
class Told:
    """What a launch has come to.

    Attributes:
        order: What it was.
        ends: What each rank came to at its end.
        accounts: Of each rank.
    """

    order: Order
    ends: Sequence[Mapping[str, Any]]
    accounts: Sequence[Account]

    @property
    def step_s(self) -> float:
        """Of a step of the first life, the median."""
        at_s = [one.at_s for one in self.accounts[0].lives[0].done]
        return statistics.median(after - before for before, after in itertools.pairwise(at_s))

    def is_as(self, other: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all ranks have ended with the bytes of these ends."""
        return [end["digest"] for end in self.ends] == [end["digest"] for end in other]


def rows_of(
    told: Told, undisturbed: Sequence[Mapping[str, Any]], survives: int | None, labels: Mapping[str, Label]
) -> list[Row]:
    """Returns all rows of one method.

    Args:
        told: Of the method.
        undisturbed: What each rank of the undisturbed training came to after as many steps.
        survives: See `Promise`.
        labels: Of the method.
    """
    moved, off = (sum(end["squared_distance"] for end in ends) for ends in (undisturbed, told.ends))
    ranks = len(told.ends)
    samples = sum(one.costs.samples_lost for one in told.accounts)
    sizes = [end["table_bytes"] for end in told.ends]
    costs = [one.costs for one in told.accounts]
    return [
        steps_again(told, labels),
        # Samples are of all ranks, and the rows of one have forgotten them: a part of what a step teaches.
        once(
            "steps_forgotten", "steps", samples / (told.order.batch * ranks**2) / told.order.kills, **labels
        ),
        once("bit_identical", "0 or 1", float(told.is_as(undisturbed)), **labels),
        once("off_by", "ratio", math.sqrt(off / moved), **labels),
        once("survives_ranks", "ranks", ranks if survives is None else survives, **labels),
        *restarts(told, labels),
        once(
            "memory_over_tables",
            "ratio",
            max(one.memory_bytes / size for one, size in zip(costs, sizes, strict=True)),
            **labels,
        ),
        once("stored_over_tables", "ratio", sum(one.stored_bytes for one in costs) / sum(sizes), **labels),
    ]


def again(told: Struck) -> list[int]:
    """Of each failure, how many steps were begun a second time because of it, on the rank with most."""
    found: list[int] = []
    for number in range(told.order.kills):
        before = max(
            life.begun[-1] for one in told.accounts for life in one.lives[: number + 1] if life.begun
        )
        starts = max(one.lives[number + 1].started for one in told.accounts)
        found.append(max(0, before + 1 - starts))
    return found


def steps_again(told: Told, labels: Mapping[str, Label]) -> Row:
    """The mean of `again`, from the least to the most."""
    each = again(told)
    return Row(
        "steps_run_again", statistics.fmean(each), "steps", min(each), max(each), len(each), {**labels}
    )


def restarts(told: Struck, labels: Mapping[str, Label]) -> list[Row]:
    """Returns the rows of what a failure takes until training goes on, a sample for each."""
    units = {NEXT: "s", CAUGHT_UP: "s", PREPARE: "s", RESTART_SENT: "bytes"}
    taken = until_next(told)
    return [summary(metric, unit, taken[metric], **labels) for metric, unit in units.items()]


def until_next(told: Struck) -> dict[str, list[float]]:
    """Metric -> what each failure takes until training goes on."""
    taken: dict[str, list[float]] = {NEXT: [], CAUGHT_UP: [], PREPARE: [], RESTART_SENT: []}
    for number in range(told.order.kills):
        struck = [life for one in told.accounts if (life := one.lives[number]).struck_at_s is not None]
        struck_s = min(life.struck_at_s for life in struck if life.struck_at_s is not None)
        cut_off = max(life.begun[-1] for life in struck)
        later = [one.lives[number + 1 :] for one in told.accounts]
        taken[NEXT].append(max(ended(lives) for lives in later) - struck_s)
        taken[CAUGHT_UP].append(max(ended(lives, cut_off) for lives in later) - struck_s)
        taken[PREPARE].append(max(lives[0].started_s for lives in later))
        taken[RESTART_SENT].append(sum(lives[0].start_costs.sent_bytes for lives in later))
    return taken


def ended(lives: Sequence[Life], step: int = 0) -> float:
    """When a rank had ended this step or a later one, in the first of these lives that came to it."""
    return next(one.at_s for life in lives for one in life.done if one.step >= step)
