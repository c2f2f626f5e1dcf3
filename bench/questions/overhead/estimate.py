"""What pairs of steps say, with 95 % intervals by resampling the launches, and the rounds of each.

A round has one step of each model. Rounds of a launch are alike, as its memory lies in the same places: so
launches are drawn first, then rounds of those that were drawn (Davison and Hinkley, Bootstrap Methods, 3.8).
Rounds in which a transaction ends, and all others, are resampled apart, and weighted as often as each comes
in a window: a window's commit counts once a window, however many of its other steps were measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.workloads.training_rank import BARE, CONTROL, PROTECTED
from ecemb.step.transaction import BESIDE as STEPS_BESIDE

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RESAMPLED = 4000
PERCENT = 95.0
CPU, WALL, BESIDE, WATCH = range(4)
"""What a slot has, see `bench.workloads.pairs.Slots`."""
CAPTURE = "capture"
"""The phase that is neither at the begin of a step nor at its end."""
ADDED = (
    *("slots", "commits", "cycles", "counted", "protected_steps", "phases_cpu_s", "ends_cpu_s"),
    *("beside_cpu_s", "watch_cpu_s", "wall_s"),
)
"""Of a rank's report, what launches add up to: lists follow each other, numbers are summed."""


class Estimate(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float, less: float = 0.0) -> Estimate:
        """Each number less `less`, times the factor, which is positive."""
        return Estimate(*((one - less) * factor for one in self))


class Strata:
    """Rounds of two kinds, which are resampled apart, in the same launches.

    Args:
        commits: Of each round, whether a transaction ended in it.
        window: Steps of a transaction.
        launches: Of each round, the number of its launch; by default all are of one.
        seed: Of the resampling.
    """

    def __init__(
        self, commits: Sequence[bool], window: int, launches: Sequence[int] = (), seed: int = 0
    ) -> None:
        ended = np.asarray(commits, np.bool_)
        of = np.asarray(launches or [0] * len(ended), np.int64)
        both = [(np.flatnonzero(ended), 1 / window), (np.flatnonzero(~ended), 1 - 1 / window)]
        self._parts = [(rounds, weight) for rounds, weight in both if len(rounds)]
        whole = sum(weight for _, weight in self._parts)
        self._parts = [(rounds, weight / whole) for rounds, weight in self._parts]
        rng = np.random.default_rng(seed)
        count = int(of.max()) + 1
        chosen = rng.integers(count, size=(RESAMPLED, count))
        self._widening = math.sqrt(count / (count - 1)) if count > 1 else 1.0
        self._drawn = [_drawn(rounds, of[rounds], chosen, rng) for rounds, _ in self._parts]
        self.weights: Floats = np.zeros(len(ended))
        for rounds, weight in self._parts:
            self.weights[rounds] = weight / len(rounds)

    def mean(self, each: Floats) -> Estimate:
        """The weighted mean of a number of each round."""
        return self.ratio(each, np.ones_like(each))

    def ratio(self, over: Floats, under: Floats) -> Estimate:
        """The ratio of two weighted means, both over the same rounds."""
        value = float(self.weights @ over) / float(self.weights @ under)
        weights = [weight for _, weight in self._parts]
        a, b = (
            sum(
                weight * each[rounds].mean(axis=1)
                for weight, rounds in zip(weights, self._drawn, strict=True)
            )
            for each in (over, under)
        )
        tail = (100 - PERCENT) / 2
        low, high = np.percentile(np.asarray(a) / np.asarray(b), [tail, 100 - tail])
        low, high = (value + self._widening * (float(end) - value) for end in (low, high))
        return Estimate(value, min(value, low), max(value, high))


def _drawn(rounds: Ints, of: Ints, chosen: Ints, rng: np.random.Generator) -> Ints:
    """Rounds of the launches that were chosen, drawn with replacement: int64 [RESAMPLED, about as many].

    Args:
        rounds: Numbers of rounds.
        of: Of each, the number of its launch.
        chosen: Launches of each resampling, [RESAMPLED, launches]; for one without such rounds, another one
            stands.
        rng: The source.
    """
    have, starts, counts = np.unique(of, return_index=True, return_counts=True)
    places = np.searchsorted(have, chosen) % len(have)
    each = -(-len(rounds) // chosen.shape[1])
    within = (rng.random((*places.shape, each)) * counts[places][..., None]).astype(np.int64)
    return rounds[(starts[places][..., None] + within).reshape(len(chosen), -1)]


def parts(pairs: int, launches: int) -> list[int]:
    """The rounds of each launch."""
    return [pairs // launches + (number < pairs % launches) for number in range(launches)]


def joined(launches: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Of each rank the reports of all launches, as if they were of one with the same window.

    `launches` has the number of each round's launch.
    """
    found: list[dict[str, Any]] = []
    for reports in zip(*launches, strict=True):
        sums = {name: _added([one[name] for one in reports]) for name in ADDED if name in reports[0]}
        idle_s = sum(one.get("idle", 0.0) * one["wall_s"] for one in reports)
        of = [number for number, one in enumerate(reports) for _ in one["commits"]]
        found.append({**reports[0], **sums, "idle": idle_s / sums["wall_s"], "launches": of})
    return found


def _added(values: Sequence[Any]) -> Any:
    if isinstance(values[0], Mapping):
        names = dict.fromkeys(name for one in values for name in one)
        return {name: _added([one[name] for one in values if name in one]) for name in names}
    if isinstance(values[0], list):
        return [each for one in values for each in one]
    return sum(values)


def cpu_s(answers: Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
    """Of each model, the processor time of all ranks in each round, in seconds.

    What the protection's threads did while another model trained counts for the commit that it belongs to.
    What they take when there is nothing to do (`idle`) doesn't count: see `pairs`.
    """
    found: dict[str, Floats] = {}
    for name in answers[0]["slots"]:
        total = np.zeros(len(answers[0]["commits"]))
        for answer in answers:
            slots = np.asarray(answer["slots"][name])
            total += slots[:, CPU] - slots[:, BESIDE]
            if name == PROTECTED:
                spent, passed = np.asarray(answer["cycles"]).T
                total[np.flatnonzero(answer["commits"])] += spent - answer["idle"] * passed
            else:
                total -= slots[:, WATCH]
        found[name] = total
    return found


def wall_s(answers: Sequence[Mapping[str, Any]]) -> dict[str, Floats]:
    """Of each model, the wall time of the slowest rank in each round, in seconds."""
    return {
        name: np.max([np.asarray(answer["slots"][name])[:, WALL] for answer in answers], axis=0)
        for name in answers[0]["slots"]
    }


def overheads(seconds: Mapping[str, Floats], strata: Strata) -> dict[str, Estimate]:
    """Of each model but the bare ones, what its steps take beyond those of both bare ones, in %.

    For the control: what the steps of one bare model take beyond those of the other.
    """
    bare = [seconds[name] for name in (BARE, CONTROL) if name in seconds]
    found = {
        name: strata.ratio(each, sum(bare) / len(bare))
        for name, each in seconds.items()
        if name not in (BARE, CONTROL)
    }
    if CONTROL in seconds:
        found[CONTROL] = strata.ratio(seconds[CONTROL], seconds[BARE])
    return {name: ratio.times(100, less=1) for name, ratio in found.items()}


def rounds_of(
    seconds: Mapping[str, Floats], method: str, commits: Sequence[bool], launches: Sequence[int]
) -> dict[str, list[float]]:
    """What `overheads` computes a method's value from.

    Of each round its launch, whether a transaction ended in it, and the milliseconds of the method and of
    what it is compared with.
    """
    bare = [seconds[name] for name in ((BARE,) if method == CONTROL else (BARE, CONTROL)) if name in seconds]
    return {
        "launch": [float(one) for one in launches or [0] * len(commits)],
        "ends_transaction": [float(one) for one in commits],
        "method_ms": (1000 * seconds[method]).tolist(),
        "bare_ms": (1000 * np.mean(bare, axis=0)).tolist(),
    }


def shared(seconds: Mapping[str, Any]) -> dict[str, Any]:
    """Of each model its rounds; of both bare ones their mean."""
    bare = [seconds[name] for name in (BARE, CONTROL) if name in seconds]
    kept = {name: each for name, each in seconds.items() if name not in (BARE, CONTROL)}
    return {**kept, BARE: sum(bare) / len(bare)}


def phases_cpu_s(answer: Mapping[str, Any], *, overlap: bool) -> dict[str, float]:
    """Of one rank, the processor time of the protection's own calls by phase, in all steps together."""
    phases: dict[str, float] = dict(answer["phases_cpu_s"])
    beside = sum(phases.get(name, 0.0) for name in STEPS_BESIDE) if overlap else 0.0
    at_ends = sum(phases.values()) - phases.get(CAPTURE, 0.0) - beside
    watched, network = answer["watch_cpu_s"] / answer["wall_s"], answer["beside_cpu_s"] - beside
    protected = float(np.asarray(answer["slots"][PROTECTED])[:, 1].mean()) * answer["protected_steps"]
    return {
        **phases,
        "other": max(0.0, answer["ends_cpu_s"] - at_ends),
        "network": max(0.0, network - answer["idle"] * answer["wall_s"]),
        "watch": watched * protected,
    }


def p99_over_median(seconds: Mapping[str, Floats], strata: Strata, *, beside: bool) -> dict[str, float]:
    """Of each method and of the bare models, the 99th percentile of a step's wall time over the median.

    Args:
        seconds: Wall times of all models, by round.
        strata: Of the rounds.
        beside: Whether the protection works beside the steps that follow, whichever model's they are: all
            models' steps then count for the protected one, each over its own model's median.
    """
    own = {name: each / quantile(each, strata.weights, 0.5) for name, each in seconds.items()}
    bare = [own[name] for name in (BARE, CONTROL) if name in own]
    chosen = {BARE: bare} | {name: [each] for name, each in own.items() if name not in (BARE, CONTROL)}
    if PROTECTED in own and beside:
        chosen[PROTECTED] = [*own.values()]
    found: dict[str, float] = {}
    for name, parts in chosen.items():
        each, weights = np.concatenate(parts), np.tile(strata.weights, len(parts))
        found[name] = quantile(each, weights, 0.99) / quantile(each, weights, 0.5)
    return found


def quantile(each: Floats, weights: Floats, part: float) -> float:
    """The smallest of the numbers that this part of the weight doesn't exceed."""
    ascending = np.argsort(each, kind="stable")
    reached = np.cumsum(weights[ascending])
    return float(each[ascending[min(int(np.searchsorted(reached, part * reached[-1])), len(each) - 1)]])
