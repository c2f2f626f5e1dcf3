"""What restores from quantized checkpoints cost in quality: trainings, each beside one without restores.

All trainings of a seed have the same data and the same start. At each restore, spread evenly over the
training, all rows are what `baselines.check_n_run.codec` gives back of them; optimizer state and the dense
part are exact, and the position in the data is the checkpoint's, so that no sample is lost or met twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean as average
from typing import Final

import torch

from baselines.check_n_run.choose_bits import bits_for, capacity, scheme_for
from baselines.check_n_run.codec import loaded, stored
from baselines.check_n_run.quantize_scheme import BITS, Scheme
from bench.harness.result import Label, Row, once, summary
from bench.questions.cpr.quality import mean
from bench.workloads import click_training
from bench.workloads.click_training import DIM, Model
from bench.workloads.clicks import Data
from bench.workloads.planted import draw

RESTORES: Final = (1, 3, 20)
BUDGETS_PCT: Final = {"published": 0.01, "calibrated": 0.25}
"""Of log loss that may be added: recalled; and, in round figures, the least that the rule keeps to here."""
EXACT_BITS: Final = 32
PLANNED: Final = 1
"""Restores that a job has planned for which then meets more."""
CHOSEN, MORE, FEWER = "chosen", "more than chosen", "fewer than chosen"

Choice = Callable[[int], Scheme]
"""Restores until then -> how weights are stored."""


@dataclass(frozen=True)
class Size(click_training.Size):
    """The same, and more.

    Attributes:
        restores: Of the trainings.
        longer: Steps of further trainings, with the bits that the rule chooses.
    """

    seeds: int = 4
    restores: tuple[int, ...] = RESTORES
    longer: tuple[int, ...] = (2000,)


@dataclass(frozen=True)
class Pair:
    """A training with restores beside the one without.

    Attributes:
        loss: Log loss that was added.
        loss_pct: The same, of that of the one without.
        auc: That was lost.
    """

    loss: float
    loss_pct: float
    auc: float


OfSeed = tuple[tuple[float, float], dict[tuple[int, str], Pair]]
"""Log loss and AUC without restores; restores and bits -> what these cost."""
Each = Callable[[Callable[[int], OfSeed], range], Iterable[OfSeed]]


def quality(size: Size, seed: int, each: Each = map) -> list[Row]:
    """Trains, and compares.

    Args:
        size: How much.
        seed: The first one; the others follow it.
        each: Calls a function for each seed.
    """
    rows: list[Row] = []
    for steps in (size.steps, *size.longer):
        setting: dict[str, Label] = {"batch": size.batch, "dim": DIM, "steps": steps}
        undisturbed: list[tuple[float, float]] = []
        pairs: dict[tuple[int, str], list[Pair]] = {}
        for whole, found in each(partial(of_seed, size, steps), range(seed, seed + size.seeds)):
            undisturbed.append(whole)
            for of, pair in found.items():
                pairs.setdefault(of, []).append(pair)
        rows += [
            summary("log_loss", "nats", [loss for loss, _ in undisturbed], **setting),
            summary("auc", "ratio", [area for _, area in undisturbed], **setting),
            *added(pairs, setting),
        ]
        if steps == size.steps:
            rows += least_bits(pairs, setting)
    budgets = (once("budget_pct", "%", value, budget=name) for name, value in BUDGETS_PCT.items())
    return [*budgets, *rows]


def of_seed(size: Size, steps: int, seed: int) -> OfSeed:
    """All trainings of one seed."""
    data = draw(steps, size.batch, size.held_out, seed)
    loss, area = trained(data, seed)
    pairs: dict[tuple[int, str], Pair] = {}
    for restores in size.restores:
        for name, choice in choices(restores, all_=steps == size.steps).items():
            found = trained(data, seed, restores, choice)
            pairs[restores, name] = Pair(found[0] - loss, 100 * (found[0] / loss - 1), area - found[1])
    return (loss, area), pairs


def choices(restores: int, *, all_: bool = True) -> Mapping[str, Choice]:
    """How a training is stored that is restored so often: by bits, or as a job that planned for fewer.

    Args:
        restores: Of the training.
        all_: Else as the rule chooses alone.
    """
    if not all_:
        return {str(bits_for(restores)): fixed(bits_for(restores))}
    found: dict[str, Choice] = {str(bits): fixed(bits) for bits in BITS}
    if restores > PLANNED:
        first, then = bits_for(PLANNED), bits_for(PLANNED, PLANNED + 1)
        found[f"{first}, then {then}"] = lambda until_then: scheme_for(PLANNED, until_then)
    return found


def fixed(bits: int) -> Choice:
    """Always these bits, by the method that goes with them."""
    scheme = scheme_for(capacity(bits))
    return lambda _: scheme


def trained(data: Data, seed: int, restores: int = 0, choice: Choice | None = None) -> tuple[float, float]:
    """Log loss and AUC, of what is held out, after a training.

    Args:
        data: What it is trained on.
        seed: Of what the model starts with.
        restores: From checkpoints.
        choice: How these are stored.
    """
    model = Model.of(data, seed)
    due = moments(data.steps, restores)
    for step in range(data.steps):
        if choice is not None and step in due:
            restore(model, choice(due.index(step)))
        model.train(data.step(step))
    return model.judged(data.held_out)


def moments(steps: int, restores: int) -> list[int]:
    """Steps before which a training is restored: evenly spread, and neither the first nor the end."""
    return [steps * (number + 1) // (restores + 1) for number in range(restores)]


@torch.no_grad()
def restore(model: Model, scheme: Scheme) -> None:
    """The rows as a checkpoint has them."""
    weight = model.weight
    weight.copy_(loaded(stored(weight.detach(), scheme), scheme, weight))


def added(pairs: Mapping[tuple[int, str], Sequence[Pair]], setting: Mapping[str, Label]) -> Iterator[Row]:
    """Means over the seeds, whether the rule would have these bits, and whether they keep to the budget."""
    for (restores, name), found in pairs.items():
        labels: dict[str, Label] = {**setting, "restores": restores, "bits": name}
        labels["rule"] = ruled(restores, name)
        percents = [pair.loss_pct for pair in found]
        yield mean("loss_added_pct", "%", percents, **labels)
        yield mean("loss_added", "nats", [pair.loss for pair in found], **labels)
        yield mean("auc_lost", "ratio", [pair.auc for pair in found], **labels)
        for budget, most in BUDGETS_PCT.items():
            within = float(average(percents) <= most)
            yield once("within_budget", "0 or 1", within, **labels, budget=budget)


def least_bits(
    pairs: Mapping[tuple[int, str], Sequence[Pair]], setting: Mapping[str, Label]
) -> Iterator[Row]:
    """The fewest bits that keep to each budget, beside those that the rule chooses."""
    for restores in dict.fromkeys(restores for restores, _ in pairs):
        means = {
            int(bits): average([pair.loss_pct for pair in found])
            for (of, bits), found in pairs.items()
            if of == restores and bits.isdigit()
        }
        labels = {**setting, "restores": restores}
        for budget, most in BUDGETS_PCT.items():
            least = min((bits for bits, mean_pct in means.items() if mean_pct <= most), default=EXACT_BITS)
            yield once("least_bits", "bits", least, **labels, asked_by=f"{budget} budget")
        yield once("least_bits", "bits", bits_for(restores), **labels, asked_by="rule")


def ruled(restores: int, bits: str) -> str:
    """What the rule says of bits; "" of those that change on the way."""
    if not bits.isdigit():
        return f"planned for {PLANNED}"
    chosen = bits_for(restores)
    return CHOSEN if int(bits) == chosen else MORE if int(bits) > chosen else FEWER
