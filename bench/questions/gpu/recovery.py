"""How long does recovering a table take that is on a GPU, over copying it there? A part of `gpu`.

A table of 4 GiB, weights and optimizer state, sharded over four ranks that share the device, over gloo, under
stock torchrun. One rank is killed in the middle of a step, without its memory or with it; then, as all are
started again, every shard goes from its image to the device, what was lost while it is rebuilt. Phases and
checks are those of the question about recovery.

- `copy_s`: the ceiling, in the same run, right after the recovery: all ranks at once copy as many bytes as
  their shards have from pinned memory to the device.
- `recovery_over_copy`: a phase of the recovery over that: `restore`, which waits for what is left of images,
  and puts dense state back; `rebuild`, beside which images go to the device; and all of `protect`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence

from bench.harness.devices import APART, CUDA, HALVINGS, roomiest
from bench.harness.result import Arguments, Incomplete, Row, WrongResult, summary
from bench.harness.torchrun import LaunchFailed
from bench.questions.recovery import question as recovery
from bench.questions.recovery.question import COLD, MIB, RANKS, Case, Launch, Life, Scale, check, launch
from bench.questions.recovery.rank import PARTS, PROTECTED
from ecemb.coding.code import Code

CODE = Code(4, 3)
PROTECT = "protect"
GIB = 1 << 30
LEAST_S = 25.0
"""With less time left, a training is not begun."""


def cases(table_bytes: int) -> tuple[Case, ...]:
    """What is lost, of shards of this size."""
    return tuple(Case(kind, CODE, table_bytes, 1, kills=1) for kind in ("memory", "process"))


FULL = dataclasses.replace(recovery.FULL, cases=cases(1024 * MIB), device=CUDA)
QUICK = dataclasses.replace(FULL, cases=cases(64 * MIB))
SMALL = dataclasses.replace(QUICK, cases=cases(2 * MIB), device=APART)


def run(arguments: Arguments, device: str, until: float) -> Iterator[Row]:
    """Measures this part.

    Args:
        arguments: Of the question.
        device: Where tables are, one of `devices`.
        until: When it has to be done, on time.monotonic().

    Raises:
        Incomplete: Some of it failed, or came too late; the rows before that were given.
    """
    scale = fitting(SMALL if device != CUDA else QUICK if arguments.quick else FULL)
    try:
        yield from measure(scale, arguments.seed, until)
    except (LaunchFailed, WrongResult) as error:
        raise Incomplete([], str(error)) from error


def measure(scale: Scale, seed: int, until: float) -> Iterator[Row]:
    """Trains undisturbed, then with each kind of loss, and compares.

    Raises:
        WrongResult: A recovered training ended with other bytes than the undisturbed one, or recovered
            something else than was lost.
        LaunchFailed: torchrun did, or came too late.
    """

    def launched(case: Case, kills: int) -> Launch:
        left_s = until - time.monotonic()
        if left_s < LEAST_S:
            raise LaunchFailed(f"the loss of a {case.kind} was not tried, with {left_s:.0f} s left")
        return launch(dataclasses.replace(scale, timeout_s=left_s), case, PROTECTED, kills, seed)

    expected = launched(scale.cases[0], 0).digests
    for case in scale.cases:
        done = launched(case, case.kills)
        check(case, scale, done.restarts, done.digests, expected)
        yield from recovery.rows_of(case, {COLD: done.restarts})
        yield from over_copy(case, done.restarts)


def over_copy(case: Case, restarts: Sequence[Life]) -> Iterator[Row]:
    """Recovery by phase, over the copy."""
    copies = [max(one["copy_s"] for one in life.told) for life in restarts]
    yield summary("copy_s", "s", copies, **case.labels)
    parts = {"restore": ("restore",), "rebuild": ("rebuild",), PROTECT: (*PARTS, "rest of protect")}
    if case.kind != "memory":
        del parts["rebuild"]
    for name, phases in parts.items():
        seconds = [sum(life.phases().get(phase, 0.0) for phase in phases) for life in restarts]
        ratios = [one / copy for one, copy in zip(seconds, copies, strict=True)]
        yield summary("recovery_over_copy", "ratio", ratios, **case.labels, phase=name)


def fitting(scale: Scale) -> Scale:
    """With shards of such a size, halved as often as has to be, and with a folder, in which it fits."""
    spare_bytes = RANKS * GIB if scale.device == CUDA else 0
    sizes: list[tuple[int, int, int]] = []
    for halved in range(HALVINGS + 1):
        table_bytes = max(MIB, scale.cases[0].table_bytes >> halved)
        tables_bytes = RANKS * table_bytes
        arena_bytes = tables_bytes * CODE.n // CODE.k + spare_bytes
        sizes.append((table_bytes, tables_bytes + 2 * spare_bytes, arena_bytes))
    table_bytes, folder = roomiest(scale.device, sizes) or (sizes[-1][0], scale.arena_dir)
    return dataclasses.replace(scale, cases=cases(table_bytes), arena_dir=folder)
