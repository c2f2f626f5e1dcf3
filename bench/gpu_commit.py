"""Is a commit's local work done sooner on the host's cores, or on the GPU? Of the part `kernels` of `gpu`.

A table on the device, as it was before a step and as it is after it, with an image of it and as much parity
in host memory that is mapped as an arena's is. A commit of so many of its rows is all that a rank does with
their bytes besides sending them, and parity gets as many rows of another rank's. It is done in two ways, on
the same memory, there and back:

- `host`, as ecemb does it. `capture`: old records are gathered from the image. `fetch`: the rows are gathered
  on the device, brought in one copy, and written to the image. `delta`: old XOR new, into the message for
  others. `parity`: the words under what was received are saved, and the weighted rows added to them.
- `device`. All of that memory is registered with CUDA, and Triton's kernels reach it in place. `capture`: old
  records are gathered from the table, which still has them, and brought in one copy; for the delta they stay
  on the device, too. `fetch`: the rows are written to their places in the image, over the bus. `delta`:
  computed there, and brought in one copy. `parity`: the words are read over the bus, saved by one copy, added
  to on the device, and written back: read once, where a sum in place would read them twice.

Either way each phase ends when its bytes are in host memory: a journal has to be whole before the image may
change, a message before it is sent, saved parity before parity changes.

- `commit_ms`: all of it, by `where` (host, device), `rows`, `row_bytes`, and the host's `threads`.
- `commit_phase_ms`: one `phase` of it; of single commits, where `commit_ms` has means of several.
- `device_over_host`: the one over the other, repeat by repeat.
- `register_s`: how long registering took, which a start or restart would pay for all of its arena.
- `left_out`: memory could not be registered, with the reason; then there is the host's way only.

What decides: the device's way is taken only if `device_over_host` is clearly below 1 for few rows and for
many. Until a GPU has said so, ecemb's way stays the host's. Not measured is what else the device and the bus
have to do for training meanwhile, when several ranks share them.

Before anything is timed, the host's results are compared with what they should be, and then all of the memory
after the device's way with that after the host's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from bench.devices import CUDA
from bench.gpu_commit_ways import WEIGHT, Held, OnDevice, OnHost, Work
from bench.gpu_memory import Unregistered, registered
from bench.result import Arguments, Incomplete, Row, WrongResult, once, summary
from bench.timing import interleaved
from ecemb.kernels.reference import product
from ecemb.rows import WORD_BYTES

Spare = tuple[torch.Tensor, torch.Tensor]

HOST, DEVICE = "host", "device"
SAMPLE_ROWS = 50
"""Whose product is compared with the reference's, which takes its time."""
LEAST_S = 2.0
"""With less time left, commits of so many rows are not begun."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        rows: Of the table.
        dim: Values of a row; see `Held`.
        touched: Rows of a commit, one measurement for each; ascending.
        repeats: Of every measurement.
        at_least_s: See `timing.interleaved`.
    """

    rows: int
    dim: int
    touched: tuple[int, ...]
    repeats: int
    at_least_s: float


FULL = Scale(rows=1 << 20, dim=127, touched=(10_000, 200_000), repeats=7, at_least_s=0.05)
QUICK = Scale(rows=1 << 17, dim=127, touched=(1_000, 20_000), repeats=3, at_least_s=0.02)
INTERPRETED = Scale(rows=1 << 9, dim=127, touched=(20, 100), repeats=2, at_least_s=0.0)


def run(arguments: Arguments, device: str, until: float) -> Iterator[Row]:
    """Measures commits.

    Args:
        arguments: Of the question.
        device: Where tables are, one of `devices`.
        until: When it has to be done, on time.monotonic().

    Raises:
        Incomplete: Time ran out; the rows before that were given.
        WrongResult: A way computes something else than it should.
    """
    if device != CUDA:
        return measure(INTERPRETED, torch.device("cpu"), arguments.seed, until)
    return measure(QUICK if arguments.quick else FULL, torch.device(device), arguments.seed, until)


def measure(scale: Scale, device: torch.device, seed: int, until: float) -> Iterator[Row]:
    """Measures all metrics on a device; see `run`."""
    held = Held(scale.rows, scale.dim, scale.touched[-1], device, seed)
    memory = torch.from_numpy(held.memory)
    spare = torch.empty_like(memory), torch.empty_like(memory)
    kinds: dict[str, type[OnHost | OnDevice]] = {HOST: OnHost}
    with contextlib.ExitStack() as stack:
        try:
            began = time.perf_counter()
            stack.enter_context(registered(held.memory, device))
            taken_s = time.perf_counter() - began
        except Unregistered as error:
            yield once("left_out", "parts", 1, what="commits on the device", why=str(error))
        else:
            kinds[DEVICE] = OnDevice
            if device.type == CUDA:
                yield once("register_s", "s", taken_s, bytes=held.memory.nbytes)
        for touched in scale.touched:
            if (left_s := until - time.monotonic()) < LEAST_S:
                raise Incomplete([], f"commits of {touched} rows: not begun, with {left_s:.0f} s left")
            work = Work(held, touched)
            ways = {where: Commits(work, kind(work)) for where, kind in kinds.items()}
            yield from compare(scale, work, ways, spare)


def compare(scale: Scale, work: Work, ways: Mapping[str, Commits], spare: Spare) -> Iterator[Row]:
    """Times the ways of one commit against each other, once they have come to the same.

    Args:
        scale: Of the measurement.
        work: The commit.
        ways: How; the host's is the first.
        spare: See `check`.

    Raises:
        WrongResult: They don't, or the first one doesn't come to what it should.
    """
    check(work, ways, spare)
    for commits in ways.values():
        commits.seconds.clear()
    labels = {
        "rows": work.touched,
        "row_bytes": work.held.words * WORD_BYTES,
        "threads": torch.get_num_threads(),
    }
    seconds = interleaved(ways, repeats=scale.repeats, at_least_s=scale.at_least_s)
    if work.held.now:  # commits of other rows begin with all of the image as it was
        ways[HOST]()
    for where, commits in ways.items():
        yield summary("commit_ms", "ms", [1000 * s for s in seconds[where]], where=where, **labels)
        for phase, taken in commits.seconds.items():
            milliseconds = [1000 * s for s in taken]
            yield summary("commit_phase_ms", "ms", milliseconds, where=where, phase=phase, **labels)
    if DEVICE in ways:
        ratios = [a / b for a, b in zip(seconds[DEVICE], seconds[HOST], strict=True)]
        yield summary("device_over_host", "ratio", ratios, **labels)


def check(work: Work, ways: Mapping[str, Commits], spare: Spare) -> None:
    """Commits there and back in each way.

    Args:
        work: The commit.
        ways: How.
        spare: uint8, each as large as all of the memory; overwritten.

    Raises:
        WrongResult: The first way's results are wrong, or all that another leaves in memory isn't the same.
    """
    memory = torch.from_numpy(work.held.memory)
    work.forget()  # what commits of other rows have left
    begun, expected = spare
    begun.copy_(memory)
    for place, (where, commit) in enumerate(ways.items()):
        commit()
        if place == 0:
            check_results(work)
            expected.copy_(memory)
        elif not torch.equal(memory, expected):
            raise WrongResult(f"a commit of {work.touched} rows on the {where} leaves other bytes behind")
        commit()
        work.forget()
        if not torch.equal(memory, begun):
            raise WrongResult(f"two commits of {work.touched} rows on the {where} don't cancel each other")


def check_results(work: Work) -> None:
    """Compares what the first commit has left with what the tables say, and the reference kernels.

    Raises:
        WrongResult: Something differs.
    """
    held = work.held
    before, after = work.records(held.tables[1 - held.now]), work.records(held.tables[held.now])
    image = np.empty_like(before)
    held.table.gather(work.ids, image)
    few = slice(SAMPLE_ROWS)
    parity = np.stack([held.parity[at:][: held.words] for at in work.offsets[few]])
    found = {
        "the journal": (work.journal, before),
        "the image": (image, after),
        "the delta": (work.delta, before ^ after),
        "parity": (parity, work.saved[few] ^ product(WEIGHT, work.received[few])),
    }
    for name, (left, expected) in found.items():
        if not np.array_equal(left, expected):
            raise WrongResult(f"after a commit of {work.touched} rows, {name} isn't what it should be")


class Commits:
    """A commit's phases, timed; called again, it is taken back by another one.

    Args:
        work: The commit.
        way: How.

    Attributes:
        seconds: Each phase's, by calls.
    """

    def __init__(self, work: Work, way: OnHost | OnDevice) -> None:
        self._held, self._way = work.held, way
        self.seconds: dict[str, list[float]] = {}

    def __call__(self) -> None:
        """Commits."""
        for name, phase in self._way.phases.items():
            began = time.perf_counter()
            phase()
            self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        self._held.now = 1 - self._held.now
