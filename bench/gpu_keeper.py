"""Would a process that keeps a GPU's memory make its tables' images needless? A prototype. A part of `gpu`.

A keeper owns the memory of one table and of a journal on the device, and training workers open it through
CUDA IPC (bench/gpu_keeper_memory.py). They are killed by SIGKILL: one while the device spins half way through
a step, with more of the step behind that, the others while they run far ahead of the device. In the end one
makes the device fault. The next worker undoes what the journal has of the step (bench/gpu_keeper_rank.py).
Taken for a device, memory of the host shows in small that all of it works, and no time means anything.

- `bit_identical`: 1: after all kills, and after the fault, the table has the bytes of an undisturbed training
  of as many steps.
- `undone_steps`: by how many of the kills a step was left to be undone. `undo_ms`: how long that took.
- `death_s`: from SIGKILL until the worker is gone, for which the driver clears away what it had.
- `late_rows`: rows that changed after that, while the next worker looked on. If there ever is one, a worker
  may not undo as soon as the last one is gone. (NVIDIA's open driver leaves the clearing away to a thread of
  its own if the process is interrupted while it waits for a lock: nvidia_close in kernel-open/nvidia/nv.c.)
- `context_s`: what each new process pays first, with a keeper or without: a CUDA context.
- `keeper_attach_s`: from there until the table can be used.
- `image_put_s`: the same table from its image in host memory, in the same run, which a keeper would save.
- `attach_over_put`: attaching, over the median of that.
- `journal_ms`: the journal of a step on the device, of rows whose numbers are there, until it is written;
  `image_ms`: bringing an image up to date with as many rows. `journal_over_image`: the one over the other.
- `delta_ms`: old XOR new rows on the device, and to pinned memory. `journal_and_delta_over_image`: what a
  keeper costs where parity is on other hosts, which deltas have to reach, over the image.

What decides. A keeper saves host memory as large as the tables, and what `attach_over_put` says of a restart,
as far as `context_s`, imports and the rest of it let that be seen. A step gains only as far as
`journal_and_delta_over_image` is below 1; it flatters the image, whose deltas are still to be made on the
host. To be kept, a keeper has to be well ahead in both, with `bit_identical` 1 and `late_rows` 0.

What it can't do. A GPU that is reset, or whose driver fails, loses what it holds, as a host does; and what is
kept is lost with the keeper. A kernel that faults leaves CUDA of its process unusable until that is started
again (so CUDA says of cudaErrorMisalignedAddress and its like). That it leaves the keeper's usable is tried
here; under MPS, where one client's fault reaches all on the GPU, it doesn't
(forums.developer.nvidia.com/t/238139). So parity has to stay on other hosts, as it is. Nor are optimizer
state, dense parameters and generators here, which would go the same way. Others keep weights in such a
process, which don't change: vllm pull request 54921, sglang issue 27310.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.devices import APART, CUDA
from bench.gpu_keeper_memory import Keeping, keep
from bench.gpu_keeper_rank import FAULTY, FREE, HELD, WHOLE, Order, Shape, work
from bench.ranks import RankFailed, Ranks
from bench.result import Arguments, Incomplete, Row, WrongResult, once, summary

LATEST_KILL_S = 0.1
"""After a worker has begun to train."""
IMPORTS = ("bench.gpu_keeper_rank",)


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        device: One of `devices`.
        shape: Of the table and its journal.
        lives: Of workers, one after another: kills, the measuring one, and what else is compared after it.
        steps: Of each of them but those that are killed at any moment.
        watch_s: After a worker was held; longer than the device spins.
        repeats: Of what is measured.
        at_least_s: See `timing.interleaved`.
    """

    device: str
    shape: Shape
    lives: tuple[str, ...]
    steps: int
    watch_s: float
    repeats: int
    at_least_s: float


FULL = Scale(
    device=CUDA,
    shape=Shape(rows=2 << 20, dim=128, touched=200_000),
    lives=(HELD, FREE, FREE, WHOLE, FAULTY, WHOLE),
    steps=5,
    watch_s=1.0,
    repeats=7,
    at_least_s=0.05,
)
QUICK = replace(FULL, shape=Shape(1 << 18, 128, 20_000), lives=(HELD, FREE, WHOLE, FAULTY, WHOLE), repeats=3)
SMALL = replace(QUICK, device=APART, shape=Shape(1 << 12, 16, 512), watch_s=0.05, repeats=2, at_least_s=0.0)


def run(arguments: Arguments, device: str, until: float) -> Iterator[Row]:
    """Measures this part.

    Args:
        arguments: Of the question.
        device: Where tables are, one of `devices`.
        until: When it has to be done, on time.monotonic().

    Raises:
        Incomplete: It failed, or came too late; the rows before that were given.
    """
    scale = SMALL if device != CUDA else QUICK if arguments.quick else FULL
    try:
        yield from measure(scale, arguments.seed, until)
    except (RankFailed, WrongResult) as error:
        raise Incomplete([], str(error)) from error


def measure(scale: Scale, seed: int, until: float) -> Iterator[Row]:
    """Trains through all lives, and compares.

    Raises:
        WrongResult: The table ended with other bytes than an undisturbed training's.
        RankFailed: A worker or the keeper did, or came too late; what there was until then was given.
    """
    told: list[dict[str, Any]] = []
    deaths: list[float] = []
    measured = False
    try:
        for life, (one, death_s) in zip(scale.lives, live(scale, seed, until), strict=True):
            told.append(one)
            deaths += [] if death_s is None else [death_s]
            if life == WHOLE and not measured:
                yield from rows_of_lives(scale, told, deaths)
                yield from rows_of_times(scale, [one["attach_s"] for one in told], one["seconds"])
                measured = True
            if life == WHOLE:
                after = scale.lives[len(told) - 2]
                if one["digest"] != one["expected"]:
                    raise WrongResult(f"a table has other bytes than {one['steps']} steps give it ({after})")
                undone = int(one["undone"])
                yield once("bit_identical", "0 or 1", 1.0, after=after, steps=one["steps"], undone=undone)
    except (RankFailed, SystemExit):
        if told and not measured:
            yield from rows_of_lives(scale, told, deaths)
        raise


def live(scale: Scale, seed: int, until: float) -> Iterator[tuple[dict[str, Any], float | None]]:
    """A keeper, and one worker after another.

    Yields:
        What a worker told, and if it was killed here, how long it took until it was gone.

    Raises:
        RankFailed: One of them did, or came too late.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="ecemb-bench-") as folder:  # for this user alone
        address = str(Path(folder, "keeper"))
        keeping = Keeping(scale.device, address, scale.shape.ends[-1])
        with Ranks(1, keep, keeping, deadline_s=left_s(until), imports=IMPORTS) as keeper:
            keeper.answers()
            for at, life in enumerate(scale.lives):
                before = scale.lives[:at]
                order = Order(
                    device=scale.device,
                    address=address,
                    shape=scale.shape,
                    life=life,
                    steps=scale.steps,
                    watch_s=scale.watch_s if before[-1:] == (HELD,) else 0.0,
                    repeats=0 if WHOLE in before else scale.repeats,
                    at_least_s=scale.at_least_s,
                    seed=seed,
                    timeout_s=left_s(until),
                )
                with Ranks(1, work, order, deadline_s=left_s(until), imports=IMPORTS) as worker:
                    (told,) = worker.answers()
                    if life == WHOLE:
                        worker.finished()
                    elif life == FREE:
                        time.sleep(rng.uniform(0, LATEST_KILL_S))
                    elif life == FAULTY:
                        with contextlib.suppress(RankFailed):  # as it should
                            worker.finished()
                    ended = time.perf_counter()
                yield told, time.perf_counter() - ended if life in (HELD, FREE) else None
            keeper.dismiss()


def left_s(until: float) -> float:
    """Until that moment; hardly any once it has passed, for a failure that says so."""
    return max(0.1, until - time.monotonic())


def rows_of_lives(scale: Scale, told: Sequence[Mapping[str, Any]], deaths: Sequence[float]) -> Iterator[Row]:
    """What was counted and measured whenever a worker began or ended."""
    sizes = {"table_bytes": scale.shape.table_bytes, "device": scale.device}
    after_kills = told[1:]
    undone = [one for one in after_kills if one["undone"]]
    yield once("undone_steps", "steps", len(undone), kills=len(after_kills))
    yield once("late_rows", "rows", sum(one["late_rows"] for one in after_kills), kills=len(after_kills))
    if undone:
        undo_ms = [1000 * one["undo_s"] for one in undone]
        yield summary("undo_ms", "ms", undo_ms, rows=scale.shape.touched, **sizes)
    if deaths:
        yield summary("death_s", "s", deaths, **sizes)
    yield summary("context_s", "s", [one["context_s"] for one in told], **sizes)
    yield summary("keeper_attach_s", "s", [one["attach_s"] for one in told], **sizes)


def rows_of_times(
    scale: Scale, attaches: Sequence[float], seconds: Mapping[str, Sequence[float]]
) -> Iterator[Row]:
    """What the last worker measured, and attaching over it."""
    sizes = {"table_bytes": scale.shape.table_bytes, "device": scale.device}
    yield summary("image_put_s", "s", seconds["put"], **sizes)
    put_s = statistics.median(seconds["put"])
    yield summary("attach_over_put", "ratio", [one / put_s for one in attaches], **sizes)
    rows = {"rows": scale.shape.touched, "row_bytes": 4 * scale.shape.dim, "device": scale.device}
    for name in ("journal", "delta", "image"):
        yield summary(f"{name}_ms", "ms", [1000 * one for one in seconds[name]], **rows)
    repeats = list(zip(seconds["journal"], seconds["delta"], seconds["image"], strict=True))
    over = [journal / image for journal, _, image in repeats]
    yield summary("journal_over_image", "ratio", over, **rows)
    over = [(journal + delta) / image for journal, delta, image in repeats]
    yield summary("journal_and_delta_over_image", "ratio", over, **rows)
