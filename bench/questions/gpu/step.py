"""What does protection cost a training step whose tables are on a GPU? A part of `gpu`.

A DLRM on ecemb.nn's tables, 26 of a million rows of 128 values, with plain SGD, so that the tables of a
protected model and of its bare twin fit; 8192 samples a step over all ranks. Measured, and checked, as in the
question about the overhead, whose metrics these are: steps of the protected model and of two bare ones take
turns, on the same batches, each timed until the device is done. Processor time includes waiting for the
device, which spins.

- Over gloo, several ranks share the device, and its lookups go through host memory. r = 1.
- Over NCCL, which refuses two ranks on one device, one rank has all tables. No other rank keeps its parity:
  a guard keeps the image and the journals, so that a crash of the process loses nothing, and that is all. Its
  `code` is not used.
- Where there are several devices, ranks are dealt out over them (`devices`); with four, they also train
  over NCCL, and deltas go over TCP or NCCL (`parity`).
- `image_over_step`: what bringing images up to date takes of the protected step's wall time (the phase
  `image` of `step_phase_ms`). That phase begins when the host comes to it, and first waits for what the
  device still has to do of the step, so that it is an upper bound.
- `left_out`: what the machine lacks, with the reason.

Where memory is short, rows are halved until tables, images and parity fit: the `setting` says how many rows
there were, `rows_asked` how many there should have been.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from bench.harness.devices import APART, CUDA, HALVINGS, count, roomiest
from bench.harness.ranks import RankFailed
from bench.harness.result import Arguments, Incomplete, Row, WrongResult, once
from bench.questions.overhead import question as overhead
from bench.questions.overhead.question import Scale
from bench.workloads.training_rank import PROTECTED
from ecemb.coding.code import Code
from ecemb.start.request import ParityBackend

SAMPLES = 8192
"""Of a step, over all ranks."""
LEAST_S = 20.0
"""With less time left, a training is not begun."""
VALUE_BYTES = 4
GIB = 1 << 30


@dataclass(frozen=True)
class Group:
    """One process group.

    Attributes:
        backend: Of the training.
        ranks: How many, dealt out over the devices.
        code: Of the parity, if there are several.
        parity: What deltas go over.
    """

    backend: str
    ranks: int
    code: Code
    parity: ParityBackend = "tcp"

    @property
    def text(self) -> str:
        """What it is, in words."""
        parity = f", parity over {self.parity}" if self.parity != "tcp" else ""
        return f"{self.ranks} ranks over {self.backend}{parity}"

    @property
    def arena_share(self) -> float:
        """Bytes in arenas over those of the tables: images and parity."""
        return 1 + (self.code.r / self.code.k if self.ranks > 1 else 0)


SHARED = Group("gloo", 4, Code(4, 3))
GROUPS = (SHARED, Group("nccl", 1, Code(2, 1)))
APIECE = (Group("nccl", 4, Code(4, 3)), Group("nccl", 4, Code(4, 3), parity="nccl"))
"""With a device for each rank."""
FULL = Scale(rows=1_000_000, dim=128, pairs=40, device=CUDA, rule="SGD")
QUICK = replace(FULL, rows=50_000, pairs=8)
SMALL = replace(FULL, tables=3, rows=1000, dim=16, pairs=4, device=APART)
SMALL_GROUPS = (SHARED, Group("gloo", 1, Code(2, 1)))
SMALL_SAMPLES = 256


def run(arguments: Arguments, device: str, until: float) -> Iterator[Row]:
    """Measures this part.

    Args:
        arguments: Of the question.
        device: Where tables are, one of `devices`.
        until: When it has to be done, on time.monotonic().

    Raises:
        Incomplete: Some of it failed, or came too late.
    """
    if device != CUDA:
        return ask(SMALL, SMALL_GROUPS, SMALL_SAMPLES, arguments.seed, until)
    scale = QUICK if arguments.quick else FULL
    return ask(scale, groups_on(count(device)), SAMPLES, arguments.seed, until)


def groups_on(devices: int) -> tuple[Group, ...]:
    """The groups to measure with this number of devices."""
    return GROUPS + tuple(group for group in APIECE if group.ranks <= devices)


def ask(scale: Scale, groups: Sequence[Group], samples: int, seed: int, until: float) -> Iterator[Row]:
    """Measures in each group, with overlap, then without; what fails doesn't stop the rest.

    Raises:
        Incomplete: Some of it failed, or came too late; the other rows were given.
    """
    lacking = [group for group in groups if group.backend == "nccl" and not dist.is_nccl_available()]
    for group in lacking:
        why = "torch was built without NCCL"
        yield once("left_out", "parts", 1, what=group.text, why=why)
    tried = [
        (overlap, group)
        for overlap in (True, False)
        for group in groups
        if group not in lacking and not (overlap and group.parity == "nccl")
    ]
    yield from one_by_one(  # what matters most comes first: time may run out
        {
            f"{group.text}, overlap {overlap}": lambda left_s, group=group, overlap=overlap: measure(
                replace(scale, timeout_s=left_s), group, samples, overlap=overlap, seed=seed
            )
            for overlap, group in tried
        },
        until,
    )


def one_by_one(trainings: Mapping[str, Callable[[float], Iterator[Row]]], until: float) -> Iterator[Row]:
    """Measures trainings, one after another; what fails doesn't stop the rest.

    Args:
        trainings: What each is, in words, and what measures it in the seconds that are left.
        until: When all have to be done, on time.monotonic().

    Raises:
        Incomplete: Some failed, or came too late; the other rows were given.
    """
    failed: list[str] = []
    for what, measured in trainings.items():
        left_s = until - time.monotonic()
        if left_s < LEAST_S:
            failed.append(f"{what}: not begun, with {left_s:.0f} s left")
            continue
        try:
            yield from measured(left_s)
        except (RankFailed, WrongResult) as error:
            failed.append(f"{what}: {error}")
    if failed:
        raise Incomplete([], "\n".join(failed))


def measure(scale: Scale, group: Group, samples: int, *, overlap: bool, seed: int) -> Iterator[Row]:
    """Measures one group.

    Raises:
        WrongResult: Protection changed the result, or was not there.
        RankFailed: A rank did.
    """
    asked = scale.rows
    scale = fitting(
        replace(
            scale,
            backend=group.backend,
            ranks=group.ranks,
            batch=samples // group.ranks,
            threads=max(1, len(os.sched_getaffinity(0)) // group.ranks),
            parity=group.parity,
        ),
        group,
    )
    rows = overhead.measure(scale, "sparse", group.code, 1, overlap, seed)
    for row in rows:
        yield replace(row, labels=row.labels | {"rows_asked": asked, "devices": count(scale.device)})
    yield image_over_step(rows, rows_asked=asked)


def fitting(scale: Scale, group: Group) -> Scale:
    """With the rows asked for, halved as often as has to be, and with a folder, in which it fits."""
    spare_bytes = group.ranks * GIB if scale.device == CUDA else 0
    most = -(-group.ranks // count(scale.device))  # ranks on one device
    sizes: list[tuple[int, int, int]] = []
    for halved in range(HALVINGS + 1):
        rows = max(1, scale.rows >> halved)
        tables_bytes = scale.tables * rows * scale.dim * VALUE_BYTES
        on_device = len(scale.methods) * tables_bytes + 2 * spare_bytes
        arena_bytes = int(group.arena_share * tables_bytes) + spare_bytes
        sizes.append((rows, on_device * most // group.ranks, arena_bytes))
    rows, folder = roomiest(scale.device, sizes) or (sizes[-1][0], scale.arena_dir)
    return replace(scale, rows=rows, arena_dir=folder)


def image_over_step(rows: Sequence[Row], **more: int) -> Row:
    """What bringing images up to date takes of a protected step, both as means."""
    (image,) = (row for row in rows if row.metric == "step_phase_ms" and row.labels["phase"] == "image")
    (step,) = (row for row in rows if row.metric == "step_wall_ms" and row.labels["method"] == PROTECTED)
    labels = {name: value for name, value in step.labels.items() if name != "method"}
    return once("image_over_step", "ratio", image.value / step.value, **labels, **more)
