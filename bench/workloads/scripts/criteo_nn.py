"""A DLRM on tables of `ecemb.nn`, and Criteo's click logs, as examples/dlrm.py has it.

Settings: data (a file in Criteo's format, gzipped or not, which all hosts see), rows (of each of the 26
tables, over all ranks; ids are hashed into them), dim, batch (lines of a rank), dense ("dlrm" or "small"). A
file that is too short is read from its start again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch

from baselines.method import Training
from bench.workloads.clicks import Sample, lines
from bench.workloads.criteo import CATEGORIES, parse
from bench.workloads.models import Batch, Twin, sparse_twin
from bench.workloads.scripts import Job

_twins: list[Twin] = []
_read: dict[int, Iterator[Sample]] = {}


def build(job: Job) -> Training:
    if "data" not in job.settings:
        raise ValueError("the script needs a file in Criteo's format: --set data=FILE")
    device = None if job.device.type == "cpu" else str(job.device)
    twin = sparse_twin(
        CATEGORIES,
        job.number("rows", 20_000),
        job.number("dim", 16),
        job.settings.get("dense", "dlrm"),
        device,
    )
    _twins[:] = [twin]
    return Training(twin.model, twin.optimizers, samples=job.number("batch", 256) * job.ranks)


def batch(job: Job, number: int) -> Batch:
    """Lines number * ranks + rank and so on, by batches: a step later, the file is read on from there."""
    size, rows = job.number("batch", 256), job.number("rows", 20_000)
    samples = _read.pop(number, None)
    if samples is None:
        samples = itertools.islice(_samples(Path(job.settings["data"])), number * size * job.ranks, None)
    of_step = list(itertools.islice(samples, size * job.ranks))
    _read.clear()
    _read[number + 1] = samples
    own = of_step[size * job.rank : size * (job.rank + 1)]
    integers = torch.tensor([sample.integers for sample in own])
    ids = torch.tensor([[1 + id_ % (rows - 1) if id_ >= 0 else 0 for id_ in sample.ids] for sample in own])
    clicks = torch.tensor([[sample.click] for sample in own])
    made = Batch(integers, ids.T.reshape(CATEGORIES, size, 1).contiguous(), clicks)
    return Batch(*(tensor.to(job.device) for tensor in made))


def train(training: Training, batch: Batch) -> None:
    _twins[0].train(batch)


def _samples(path: Path) -> Iterator[Sample]:
    """The good lines of a file, over and over."""
    while True:
        good = 0
        for line in lines(path):
            try:
                sample = parse(line)
            except ValueError:
                continue
            good += 1
            yield sample
        if not good:
            raise ValueError(f"--set data={path} has no line in Criteo's format")
