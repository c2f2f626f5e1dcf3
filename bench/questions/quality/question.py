"""What quality does a model end with, after failures, under each way of surviving them?

A DLRM with the example's layers is trained on data from which something can be learned, and judged by samples
that it has not seen. All trainings of a seed have the same data, the same start and the same failures, and
differ only in how they survive them: 8 servers hold the tables, and 20 times 2 of them are lost together. The
servers are emulated in one process, by the code that real ranks run: CPR's servers, Check-N-Run's
quantization, ecemb's code, placement and kernels, but not its processes, which are killed in the head-to-head
comparison.

- `auc`, `log_loss`: of what is held out. "no model" says the same of all samples: how often those of the
  training were clicked.
- `auc_lost`, `loss_added`: by failures, against the undisturbed training of the same seed.
- `bit_identical`: 1 if all trainings ended with the bytes of the undisturbed one, dense part and optimizer
  state included. ecemb's and those that go back to an exact save must, or there is no answer.
- `steps_run_again`; `pls`: the portion of lost samples, as CPR counts it.
- `samples`: taken from the data. `malformed_lines`: of a file, left out; `read` says of how many.

All save equally often: each T_save that CPR's formula gives for a PLS of 0.2, the largest of its sweep.
Check-N-Run stores weights in 8, 4 and 2 bits: its rule asks for 4 where up to 20 restores are expected, for 2
where at most one is, and for 8 with more. A restore is from the stored copy, and training goes on from that.

The data: a planted signal, in tables of Criteo's proportions, drawn for each seed. Or a file, with
`--data criteo PATH` (Kaggle's or the terabyte's TSV) or `--data movielens PATH` (u.data; a rating of 4 or 5
counts as a click), gzipped or not: its first 178,000 samples, the same for each seed; then seeds differ in
the model's start and the failures. The split is by position: what is held out follows what is trained on. In
Criteo's files that is by time; MovieLens's are in random order. A sample is taken once.

Means over seeds, and in brackets confidence intervals of 95 % by Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from baselines.cpr.servers import Servers
from baselines.cpr.setups import EMULATED, FAILURES, PLS_TARGETS
from bench.harness.result import Arguments, Label, Row, WrongResult, once
from bench.harness.side_by_side import side_by_side
from bench.questions.cpr.quality import Setting, mean
from bench.questions.quality.methods import IDENTICAL, UNDISTURBED, Nothing, Setup, methods
from bench.workloads.click_training import Judged, Model, Size, train
from bench.workloads.clicks import Data, Format, Tally, take
from bench.workloads.criteo import CRITEO
from bench.workloads.movielens import MOVIELENS
from bench.workloads.planted import draw

FORMATS: Mapping[str, Format] = {"criteo": CRITEO, "movielens": MOVIELENS}
"""What `--data` knows."""
PLANTED = "planted signal"
NO_MODEL = "no model"
RESTORES, LOST = FAILURES[1], 2
SETTING = Setting(
    f"{RESTORES} failures of {LOST} servers",
    replace(EMULATED, mtbf_h=EMULATED.total_h / RESTORES, servers_lost=LOST),
    PLS_TARGETS[-1],
    (),
)


FULL = Size()
QUICK = Size(steps=40, batch=64, held_out=2000, seeds=2)


@dataclass(frozen=True)
class Ended:
    """How one training ended.

    Attributes:
        judged: What its model knows.
        lost: What it knows less than the undisturbed one of its seed: log loss added, AUC lost.
        identical: Whether it has the same bytes.
        steps_again: That were run again.
        pls: The portion of lost samples.
    """

    judged: Judged
    lost: Judged
    identical: bool
    steps_again: int
    pls: float = 0.0


def run(arguments: Arguments) -> list[Row]:
    """Answers the question.

    Raises:
        BadFile: `--data` is no file that can be used.
        WrongResult: A training that had to end with the bytes of the undisturbed one didn't.
    """
    size = QUICK if arguments.quick else FULL
    tally: Tally | None = None
    if arguments.data is None:
        source, name = partial(draw, size.steps, size.batch, size.held_out), PLANTED
    else:
        kind, path = arguments.data
        data, tally = take(path, FORMATS[kind], size.steps, size.batch, size.held_out)
        source, name = partial(given, data), f"{kind}, {path.name}"
    seeds = range(arguments.seed, arguments.seed + size.seeds)
    found = side_by_side(partial(of_seed, source), seeds, quick=arguments.quick)
    ended: dict[str, list[Ended]] = {}
    for one in found:
        for method, end in one.ended.items():
            ended.setdefault(method, []).append(end)
    guessed, samples = [one.guessed for one in found], found[-1].samples
    return [*answers(guessed, ended, name), *counts(samples, name, tally)]


@dataclass(frozen=True)
class OfSeed:
    """What came of one seed.

    Attributes:
        guessed: What one knows without a model.
        ended: Method -> how its training ended.
        samples: Part of the data -> how many.
    """

    guessed: Judged
    ended: Mapping[str, Ended]
    samples: Mapping[str, int]


def given(data: Data, seed: int) -> Data:
    """The same data for each seed."""
    return data


def of_seed(source: Callable[[int], Data], seed: int) -> OfSeed:
    """All trainings of one seed.

    Raises:
        WrongResult: See `run`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operators are too small to be shared
    try:
        data = source(seed)
        samples = {"training": len(data.training.clicks), "held out": len(data.held_out.clicks)}
        return OfSeed(guess(data), trained(data, seed), samples)
    finally:
        torch.set_num_threads(threads)


def trained(data: Data, seed: int) -> dict[str, Ended]:
    """All trainings of one seed, the undisturbed one first.

    Raises:
        WrongResult: See `run`.
    """
    model = Model.of(data, seed)
    train(model, data, Nothing())
    calm, whole = model.state(), model.judged(data.held_out)
    found = {UNDISTURBED: Ended(whole, Judged(0.0, 0.0), identical=True, steps_again=0)}
    job = Setup(SETTING.job.servers, data.steps, SETTING.every(data.steps))
    for name, make in methods(RESTORES).items():
        model = Model.of(data, seed)
        kept = make(model, job)
        again = train(model, data, kept, SETTING.failures(data.steps, seed))
        judged = model.judged(data.held_out)
        lost = Judged(judged.log_loss - whole.log_loss, whole.auc - judged.auc)
        pls = kept.pls if isinstance(kept, Servers) else 0.0
        found[name] = Ended(judged, lost, same(model.state(), calm), again, pls)
        if name.startswith(IDENTICAL) and not found[name].identical:
            raise WrongResult(f"{name}, seed {seed}: after failures, the model is not the undisturbed one")
    return found


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same bytes."""
    return one.keys() == other.keys() and all(
        torch.equal(_bytes(tensor), _bytes(other[name])) for name, tensor in one.items()
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def guess(data: Data) -> Judged:
    """What one knows who says the same of all samples: how often those of the training were clicked."""
    share, clicked = (float(part.clicks.mean()) for part in (data.training, data.held_out))
    return Judged(-(clicked * math.log(share) + (1 - clicked) * math.log(1 - share)), 0.5)


def answers(guessed: Sequence[Judged], ended: Mapping[str, Sequence[Ended]], data: str) -> Iterator[Row]:
    """What models know, and what surviving took."""
    known = {NO_MODEL: guessed} | {method: [one.judged for one in found] for method, found in ended.items()}
    for metric, unit, what in (("auc", "ratio", "auc"), ("log_loss", "nats", "log_loss")):
        for method, judged in known.items():
            yield mean(metric, unit, [getattr(one, what) for one in judged], data=data, method=method)
    for method, found in ended.items():
        labels: dict[str, Label] = {"data": data, "method": method}
        if method == UNDISTURBED:
            continue
        yield mean("auc_lost", "ratio", [one.lost.auc for one in found], **labels)
        yield mean("loss_added", "nats", [one.lost.log_loss for one in found], **labels)
        yield once("bit_identical", "0 or 1", float(all(one.identical for one in found)), **labels)
        yield mean("steps_run_again", "steps", [float(one.steps_again) for one in found], **labels)
        yield mean("pls", "ratio", [one.pls for one in found], **labels)


def counts(samples: Mapping[str, int], data: str, tally: Tally | None) -> Iterator[Row]:
    """What was taken of the data."""
    for part, count in samples.items():
        yield once("samples", "samples", count, data=data, part=part)
    if tally is not None:
        why = tally.first or "none"
        yield once("malformed_lines", "lines", tally.malformed, data=data, read=tally.lines, first=why)
