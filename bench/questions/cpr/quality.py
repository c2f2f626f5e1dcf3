"""What partial recovery costs in quality: trainings with failures, each beside one of the same seed without.

All trainings of a seed have the same data, the same start and, in the same setting, the same failures. So
they differ in what was saved when, and in nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from baselines.cpr.emulation import failure_hours
from baselines.cpr.job import CprJob
from baselines.cpr.pls import expected_pls, expected_pls_of_job, interval_for_pls
from baselines.cpr.priority import PRIORITIES, SHARE
from baselines.cpr.setups import EMULATED, FAILURES, PLS_TARGETS, PRODUCTION
from bench.harness.result import Label, Row, WrongResult, once, summary
from bench.questions.cpr.overhead import FORMULA, WHOLE
from bench.questions.cpr.training import Trained, train
from bench.workloads import click_training
from bench.workloads.click_training import Failure
from bench.workloads.clicks import Data
from bench.workloads.planted import draw

VANILLA = "vanilla"
METHODS = (VANILLA, *PRIORITIES)
FURTHER = 0.4
"""A PLS beyond the paper's, for a longer lever."""
T_95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
"""By degrees of freedom: how many standard errors a confidence interval of 95 % reaches, by Student's t."""
LOST_IN_PRODUCTION = 0.0008
"""Of log loss: published (poster)."""
WHY = "other data, another model, fewer samples; PLS target and variant of the poster are not published"


@dataclass(frozen=True)
class Setting:
    """A job that is emulated by trainings.

    Attributes:
        name: "2 failures", "production".
        job: Whose failures strike, in proportion to the steps.
        target: The PLS that its interval is for.
        methods: That save.
    """

    name: str
    job: CprJob
    target: float
    methods: tuple[str, ...]

    def every(self, steps: int) -> int:
        """T_save in steps: a whole number of r T_save, so that all methods have the same PLS."""
        unit = round(1 / SHARE)
        part = interval_for_pls(self.job, self.target) / self.job.total_h
        return max(1, round(part * steps / unit)) * unit

    def failures(self, steps: int, seed: int) -> list[Failure]:
        """The same for each interval."""
        rng = np.random.default_rng([seed, round(self.job.failures), self.job.servers])
        servers, lost = self.job.servers, self.job.servers_lost
        return [
            Failure(
                int(hour / self.job.total_h * steps), tuple(rng.choice(servers, lost, replace=False).tolist())
            )
            for hour in list(failure_hours(self.job, "progress", rng))  # all hours are drawn first
        ]


def of_failures(count: int, target: float, methods: tuple[str, ...] = METHODS) -> Setting:
    job = replace(EMULATED, mtbf_h=EMULATED.total_h / count)
    return Setting(f"{count} failures", job, target, methods)


FEW, SOME, _ = FAILURES
PRODUCTIVE = Setting("production", PRODUCTION, PLS_TARGETS[1], (VANILLA, "mfu", "ssu"))
SETTINGS = (
    *(of_failures(FEW, target) for target in PLS_TARGETS),
    *(of_failures(SOME, target, (VANILLA, "mfu")) for target in (PLS_TARGETS[1], FURTHER)),
    PRODUCTIVE,
)
"""Those of the same name differ in PLS alone: a slope is over them."""


@dataclass(frozen=True)
class Size(click_training.Size):
    """The same, and `settings`, which are emulated."""

    settings: tuple[Setting, ...] = SETTINGS


@dataclass(frozen=True)
class Pair:
    """A training with failures beside the one without.

    Attributes:
        seed: Of both.
        pls: Counted.
        loss: That was added.
        auc: That was lost.
    """

    seed: int
    pls: float
    loss: float
    auc: float


Pairs = Mapping[tuple[Setting, str], Sequence[Pair]]


@dataclass(frozen=True)
class OfSeed:
    """The trainings of one seed.

    Attributes:
        reference: Without failures.
        failed: Setting and method -> with the setting's.
    """

    reference: Trained
    failed: Mapping[tuple[Setting, str], Trained]


Each = Callable[[Callable[[int], OfSeed], range], Iterable[OfSeed]]


def quality(size: Size, seed: int, each: Each = map) -> list[Row]:
    """Trains, and compares.

    Args:
        size: How much.
        seed: The first one; the others follow it.
        each: Calls a function for each seed.

    Raises:
        WrongResult: Methods of one setting had different PLS.
    """
    whole: list[Trained] = []
    pairs: dict[tuple[Setting, str], list[Pair]] = {}
    spent: dict[str, list[Trained]] = {method: [] for method in METHODS}
    seeds = range(seed, seed + size.seeds)
    for one, found in zip(seeds, each(partial(of_seed, size), seeds), strict=True):
        reference = found.reference
        whole.append(reference)
        for (setting, method), trained in found.failed.items():
            loss = trained.log_loss - reference.log_loss
            pair = Pair(one, trained.pls, loss, reference.auc - trained.auc)
            pairs.setdefault((setting, method), []).append(pair)
            if setting.job.servers == EMULATED.servers:
                spent[method].append(trained)
        for setting in size.settings:
            check(setting, pairs)
    return [
        *undisturbed(whole),
        *(row for setting in size.settings for row in added(setting, pairs)),
        *slopes(pairs),
        *points(pairs),
        *in_production(pairs),
        *bookkeeping(spent),
        *speed(whole),
    ]


def of_seed(size: Size, seed: int) -> OfSeed:
    """All trainings of one seed."""
    data = draw(size.steps, size.batch, size.held_out, seed)
    return OfSeed(
        train(data, seed, servers=EMULATED.servers, every=2 * size.steps),
        {
            (setting, method): failing(setting, method, data, seed)
            for setting in size.settings
            for method in setting.methods
        },
    )


def failing(setting: Setting, method: str, data: Data, seed: int) -> Trained:
    return train(
        data,
        seed,
        servers=setting.job.servers,
        every=setting.every(data.steps),
        failures=setting.failures(data.steps, seed),
        priority=None if method == VANILLA else method,
    )


def check(setting: Setting, pairs: Pairs) -> None:
    found = {method: pairs[setting, method][-1].pls for method in setting.methods}
    if not np.allclose(list(found.values()), found[VANILLA]):
        raise WrongResult(f"{setting.name} with a PLS target of {setting.target}: PLS differ: {found}")


def undisturbed(whole: Sequence[Trained]) -> Iterator[Row]:
    yield summary("log_loss", "nats", [one.log_loss for one in whole], failures="none")
    yield summary("auc", "ratio", [one.auc for one in whole], failures="none")


def added(setting: Setting, pairs: Pairs) -> Iterator[Row]:
    """One line of each table."""
    labels: dict[str, Label] = {"setting": setting.name, "pls_target": setting.target}
    by_method = {method: pairs[setting, method] for method in setting.methods}
    vanilla = by_method[VANILLA]
    interval_h = interval_for_pls(setting.job, setting.target)
    formula = expected_pls(setting.job, interval_h)
    whole = expected_pls_of_job(setting.job, interval_h)
    yield once("pls_of_trainings", "ratio", formula, **labels, source=FORMULA)
    yield once("pls_of_trainings", "ratio", whole, **labels, source=WHOLE)
    yield mean("pls_of_trainings", "ratio", [pair.pls for pair in vanilla], **labels, source="counted")
    for method, found in by_method.items():
        yield mean("loss_added", "nats", [pair.loss for pair in found], **labels, method=method)
        yield mean("auc_lost", "ratio", [pair.auc for pair in found], **labels, method=method)
        if method != VANILLA:
            less = [v.loss - pair.loss for v, pair in zip(vanilla, found, strict=True)]
            yield mean("loss_below_vanilla", "nats", less, **labels, method=method)


def slopes(pairs: Pairs) -> Iterator[Row]:
    """Of quality over PLS, through the training without failures: one for each seed, then their mean."""
    lines = dict.fromkeys((setting.name, method) for setting, method in pairs if setting != PRODUCTIVE)
    for metric, unit, what in (("loss_per_pls", "nats", "loss"), ("auc_per_pls", "ratio", "auc")):
        for name, method in lines:
            found = slopes_of(name, method, what, pairs).values()
            yield mean(metric, unit, list(found), setting=name, method=method)


def slopes_of(name: str, method: str, what: str, pairs: Pairs) -> dict[int, float]:
    """Of each seed: sum(PLS change) / sum(PLS PLS), the least squares through 0."""
    by_seed: dict[int, list[Pair]] = {}
    for (setting, other), found in pairs.items():
        if (setting.name, other) == (name, method):
            for pair in found:
                by_seed.setdefault(pair.seed, []).append(pair)
    return {
        seed: sum(pair.pls * getattr(pair, what) for pair in found) / sum(pair.pls**2 for pair in found)
        for seed, found in by_seed.items()
    }


def points(pairs: Pairs) -> Iterator[Row]:
    """Each pair, for a picture."""
    for (setting, method), found in pairs.items():
        for pair in found:
            labels: dict[str, Label] = {
                "setting": setting.name,
                "method": method,
                "pls_target": setting.target,
                "pair": pair.seed,
                "pls": pair.pls,
            }
            yield once("loss_of_pair", "nats", pair.loss, **labels)
            yield once("auc_of_pair", "ratio", pair.auc, **labels)


def in_production(pairs: Pairs) -> Iterator[Row]:
    """The poster's set-up, beside what it says."""
    if (PRODUCTIVE, VANILLA) not in pairs:
        return
    yield once("loss_in_production", "nats", LOST_IN_PRODUCTION, why=WHY, method="published")
    for method in PRODUCTIVE.methods:
        losses = [pair.loss for pair in pairs[PRODUCTIVE, method]]
        yield mean("loss_in_production", "nats", losses, why=WHY, method=method)


def bookkeeping(spent: Mapping[str, Sequence[Trained]]) -> Iterator[Row]:
    for method, found in spent.items():
        shares = [100 * one.bookkeeping_s / (one.seconds - one.bookkeeping_s) for one in found]
        if shares:
            yield summary("bookkeeping_time_pct", "%", shares, method=method)


def speed(whole: Sequence[Trained]) -> Iterator[Row]:
    """Of the paper's job, on one core."""
    ratios = [EMULATED.total_h * 3600 / one.cpu_s for one in whole]
    yield summary("emulated_speed", "ratio", ratios, emulation="training")


def mean(metric: str, unit: str, values: Sequence[float], **labels: Label) -> Row:
    """The mean with its confidence interval of 95 %."""
    middle = statistics.mean(values)
    margin = T_95[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return Row(metric, middle, unit, middle - margin, middle + margin, len(values), labels)
