"""What the ledgers of one launch of the head to head say, as rows.

Must not know: how it was launched, what methods are.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baselines.method import Costs
from bench.harness.result import Label, Row, once, summary
from bench.methods.ledger import Account, Done, Life
from bench.questions.compare.families import KILLS
from bench.questions.compare.rank import Order

SETTLED = 6
"""First steps of a life, which don't count: memory is touched for the first time in them."""

Stretch = Sequence[tuple[Done, Done]]
"""Each rank's first and last note of the same steps."""


@dataclass(frozen=True)
class Told:
    """What a launch has come to.

    Attributes:
        order: What it was.
        ends: What each rank wrote at its end.
        accounts: Of each rank.
        twins: Of each rank's twin, by the life that it was trained in.
    """

    order: Order
    ends: Sequence[Mapping[str, Any]]
    accounts: Sequence[Account]
    twins: Sequence[Mapping[int, Account]]

    @property
    def step_s(self) -> float:
        """Of the first life's steps but the first ones, the median."""
        done = self.accounts[0].lives[0].done[SETTLED:]
        return statistics.median(after.at_s - before.at_s for before, after in itertools.pairwise(done))

    def is_as(self, other: Told) -> bool:
        """Whether all ranks have ended with the same bytes."""
        return [end["digest"] for end in self.ends] == [end["digest"] for end in other.ends]


def rows_of(told: Told, reference: Told, survives: int | None, labels: Mapping[str, Label]) -> list[Row]:
    """Returns all rows of one method.

    Args:
        told: Of the method.
        reference: Of the undisturbed training.
        survives: See `Promise`.
        labels: Of the method.
    """
    moved, off = (sum(end["squared_distance"] for end in ends) for ends in (reference.ends, told.ends))
    end, undisturbed = told.ends[0], reference.ends[0]
    ranks = len(told.ends) if survives is None else survives
    again = max(one.steps_again for one in told.accounts)
    samples = sum(one.costs.samples_lost for one in told.accounts)
    # Samples are of all ranks, and the rows of one have forgotten them: a part of what a step teaches.
    given_up = again + samples / (told.order.batch * len(told.ends) ** 2)
    every = end["interval_steps"]
    return [
        *([] if every is None else [once("interval_steps", "steps", every, **labels)]),
        once("steps_run_again", "steps", again, **labels),
        once("samples_lost", "samples", samples, **labels),
        once("given_up_steps", "steps", given_up, **labels),
        once("bit_identical", "0 or 1", float(told.is_as(reference)), **labels),
        once("off_by", "ratio", math.sqrt(off / moved), **labels),
        once("log_loss_added", "nats", end["log_loss"] - undisturbed["log_loss"], **labels),
        once("auc", "AUC", end["auc"], **labels),
        once("auc_lost", "AUC", undisturbed["auc"] - end["auc"], **labels),
        once("survives_ranks", "ranks", ranks, **labels),
        *recoveries(told, labels),
        *normal(told, labels),
        once("time_scale", "ratio", told.order.step_h * 3600 / reference.step_s, **labels),
    ]


def recoveries(told: Told, labels: Mapping[str, Label]) -> list[Row]:
    """Returns the rows of what a failure takes, a sample for each."""
    taken: dict[str, list[float]] = {"recovery_s": [], "caught_up_s": [], "prepare_s": []}
    sent: list[float] = []
    for number in range(KILLS):
        struck = [life for one in told.accounts if (life := one.lives[number]).struck_at_s is not None]
        struck_s = min(life.struck_at_s for life in struck if life.struck_at_s is not None)
        cut_off = max(life.begun[-1] for life in struck)
        later = [one.lives[number + 1 :] for one in told.accounts]
        taken["recovery_s"].append(max(ended(lives) for lives in later) - struck_s)
        taken["caught_up_s"].append(max(ended(lives, cut_off) for lives in later) - struck_s)
        taken["prepare_s"].append(max(lives[0].started_s for lives in later))
        sent.append(sum(lives[0].start_costs.sent_bytes for lives in later))
    rows = [summary(metric, "s", samples, **labels) for metric, samples in taken.items()]
    return [*rows, summary("recovery_sent_bytes", "bytes", sent, **labels)]


def ended(lives: Sequence[Life], step: int = 0) -> float:
    """When a rank had ended this step or a later one, in the first of these lives that came to it."""
    return next(one.at_s for life in lives for one in life.done if one.step >= step)


def normal(told: Told, labels: Mapping[str, Label]) -> list[Row]:
    """Returns the rows of what a method costs without failures."""
    pairs: list[tuple[Stretch, Stretch]] = []
    for number in told.twins[0]:
        one = settled([account.lives[number] for account in told.accounts])
        twin = settled([accounts[number].lives[0] for accounts in told.twins])
        if one and twin:
            pairs.append((one, twin))
    lives = [one for one, _ in pairs]

    def each(metric: str, unit: str, of: Callable[[Costs], float]) -> Row:
        """A step's, the mean over ranks."""
        spent = [statistics.fmean(of(end.costs) - of(begin.costs) for begin, end in one) for one in lives]
        return pooled(metric, unit, spent, lives, labels)

    sizes = [end["table_bytes"] for end in told.ends]
    costs = [one.costs for one in told.accounts]
    memory = max(one.memory_bytes / size for one, size in zip(costs, sizes, strict=True))
    stored = sum(one.stored_bytes for one in costs) / sum(sizes)
    return [
        overhead("overhead_cpu_pct", cpu_s, pairs, labels),
        overhead("overhead_wall_pct", wall_s, pairs, labels),
        pooled("step_wall_ms", "ms", [1000 * wall_s(one) for one in lives], lives, labels),
        each("stall_ms_per_step", "ms", lambda one: 1000 * one.stalled_s),
        each("sent_bytes_per_step", "bytes", lambda one: one.sent_bytes),
        each("written_bytes_per_step", "bytes", lambda one: one.written_bytes),
        once("memory_over_tables", "ratio", memory, **labels),
        once("stored_over_tables", "ratio", stored, **labels),
    ]


def pooled(
    metric: str, unit: str, spent: Sequence[float], lives: Sequence[Stretch], labels: Mapping[str, Label]
) -> Row:
    """What a step takes: of all lives together; of the cheapest and the dearest."""
    steps = [steps_of(one) for one in lives]
    single = [a / b for a, b in zip(spent, steps, strict=True)]
    return _spread(metric, unit, sum(spent) / sum(steps), single, labels)


def settled(lives: Sequence[Life]) -> Stretch:
    """A life's steps after the first ones, until the last that all ranks have ended; of none: empty."""
    notes = [{one.step: one for one in life.done} for life in lives]
    common = sorted(set.intersection(*map(set, notes)))[SETTLED - 1 :]
    return [(one[common[0]], one[common[-1]]) for one in notes] if len(common) > 1 else []


def overhead(
    metric: str,
    spent: Callable[[Stretch], float],
    pairs: Sequence[tuple[Stretch, Stretch]],
    labels: Mapping[str, Label],
) -> Row:
    """A method's time over its twin's, less 1: of all lives together; of the cheapest and the dearest."""
    ours = [spent(one) for one, _ in pairs]
    bare = [spent(twin) / steps_of(twin) * steps_of(one) for one, twin in pairs]
    single = [100 * (a / b - 1) for a, b in zip(ours, bare, strict=True)]
    return _spread(metric, "%", 100 * (sum(ours) / sum(bare) - 1), single, labels)


def _spread(
    metric: str, unit: str, value: float, single: Sequence[float], labels: Mapping[str, Label]
) -> Row:
    """A row; rounding may put a mean beyond all that it is of, where they are equal."""
    return Row(metric, value, unit, min(*single, value), max(*single, value), len(single), dict(labels))


def steps_of(stretch: Stretch) -> int:
    """How many there are."""
    return stretch[0][1].step - stretch[0][0].step


def cpu_s(stretch: Stretch) -> float:
    """Processor time of all ranks."""
    return sum(end.cpu_s - begin.cpu_s for begin, end in stretch)


def wall_s(stretch: Stretch) -> float:
    """Until the last rank was done, since the last one had begun."""
    return max(end.at_s for _, end in stretch) - max(begin.at_s for begin, _ in stretch)
