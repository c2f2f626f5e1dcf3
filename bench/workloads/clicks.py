"""Samples that ended in a click or not: what a training takes of them, and how files of them are read.

A `Format` says what a line is (`bench.workloads.criteo`, `bench.workloads.movielens`); the rest is here:

- A file is read as a stream, gzipped or not, and only as far as a training takes samples from it.
- Lines that are no sample are left out and counted; empty ones are not looked at. What
  can't be unpacked any further counts as one such line. A file of which more than `MOST_MALFORMED` is none,
  or that has too few samples to train on, is refused.
- The split is by position: a training takes the first samples, and is asked about those that follow.
- Of each table there are as many rows as different ids among the samples that were taken, in the ids' order.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bench.harness.result import BadFile

MOST_MALFORMED = 0.1
"""Of the lines that were read."""
LOOKED_AT = 1000
"""Lines after which a file is refused without reading on."""
LONGEST_BYTES = 1 << 16
"""Of a line: the rest of a longer one is skipped."""
LEAST_STEPS = 10
"""Of a training on a file."""
_GZIP = b"\x1f\x8b"
_SHOWN_BYTES = 20


class Sample(NamedTuple):
    """One line.

    Attributes:
        click: 0 or 1.
        integers: As many in all lines.
        ids: One for each table, 0 or above, or -1 for none, which has a row of its own. Below 2^63.
    """

    click: float
    integers: Sequence[float]
    ids: Sequence[int]


@dataclass(frozen=True)
class Format:
    """A format of lines.

    Attributes:
        name: For messages.
        line: What a line is, in words.
        parse: Makes a sample of a line without its end; ValueError, which says why, if it is none.
    """

    name: str
    line: str
    parse: Callable[[bytes], Sample]


@dataclass(frozen=True)
class Clicks:
    """Samples.

    Attributes:
        integers: float32 [samples, integers].
        ids: int64 [samples, tables]; as `Data` has them, rows of all tables one after another.
        clicks: float32 [samples].
    """

    integers: Tensor
    ids: Tensor
    clicks: Tensor

    def part(self, first: int, end: int) -> Clicks:
        return Clicks(self.integers[first:end], self.ids[first:end], self.clicks[first:end])


@dataclass(frozen=True)
class Data:
    """What one training takes, and what it is asked about.

    Attributes:
        training: As many samples as all steps take, each taken once, in their order.
        held_out: To be asked about at the end.
        batch: Samples in a step.
        rows: Of each table.
    """

    training: Clicks
    held_out: Clicks
    batch: int
    rows: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.training.clicks) // self.batch

    def step(self, number: int) -> Clicks:
        return self.training.part(number * self.batch, (number + 1) * self.batch)


@dataclass
class Tally:
    """What became of a file's lines.

    Attributes:
        lines: That were read.
        malformed: Of them, those that are no sample.
        first: Which one was the first, and why.
    """

    lines: int = 0
    malformed: int = 0
    first: str = ""

    def leave_out(self, why: str) -> None:
        """The last line that was read is no sample."""
        self.malformed += 1
        self.first = self.first or f"line {self.lines}: {why}"

    def check(self, path: Path, form: Format) -> None:
        """Refuses a file that is something else.

        Raises:
            BadFile: There is no line, or more than `MOST_MALFORMED` of them are no samples.
        """
        if not self.lines:
            raise BadFile(f"--data {path} is empty; {_is(form)}")
        if self.malformed > MOST_MALFORMED * self.lines:
            raise BadFile(
                f"--data {path}: {self.malformed} of the first {self.lines} lines are no samples, and at "
                f"most {MOST_MALFORMED:.0%} may be none. The first is {self.first}; {_is(form)}"
            )


def stream(path: Path, form: Format, batch: int, tally: Tally) -> Generator[Clicks, None, None]:
    """Reads a file, sample after sample.

    Args:
        path: Of the file, gzipped or not.
        form: Its format.
        batch: Samples that come at once; the last time fewer may.
        tally: Counts lines.

    Returns:
        Batches, with ids as the file has them.

    Raises:
        BadFile: The file can't be opened or read, or is something else.
    """
    found: list[Sample] = []
    try:
        for line in lines(path):
            if not line:
                continue
            tally.lines += 1
            try:
                found.append(form.parse(line))
            except ValueError as error:
                tally.leave_out(str(error))
                if tally.lines >= LOOKED_AT:
                    tally.check(path, form)
            if len(found) == batch:
                yield _together(found)
                found = []
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        tally.lines += 1
        tally.leave_out(f"from here on it can't be unpacked: {error}")
    except OSError as error:
        raise BadFile(f"--data {path}: {error.strerror or error}; give the path of a file") from error
    if found:
        yield _together(found)


def lines(path: Path) -> Iterator[bytes]:
    """Reads a file's lines, without what ends them; of a longer one `LONGEST_BYTES`.

    Raises:
        OSError: It can't be read.
        EOFError: It is gzipped, and cut off.
        zlib.error: It is gzipped, and damaged.
    """
    with ExitStack() as opened:
        file = opened.enter_context(path.open("rb"))
        packed = file.peek(len(_GZIP)).startswith(_GZIP)
        text = opened.enter_context(gzip.open(file)) if packed else file
        while line := text.readline(LONGEST_BYTES):
            end = line
            while len(end) == LONGEST_BYTES and not end.endswith(b"\n"):
                end = text.readline(LONGEST_BYTES)
            yield line.rstrip(b"\r\n")


def take(path: Path, form: Format, steps: int, batch: int, held_out: int) -> tuple[Data, Tally]:
    """Takes the first samples of a file, and what became of its lines as far as they were read.

    Args:
        path: Of the file.
        form: Its format.
        steps: Of the training.
        batch: Samples in each.
        held_out: Samples that follow, and are held out. A file with fewer samples than for all of this is
            split in the same proportion.

    Raises:
        BadFile: The file can't be used; says why.
    """
    wanted = steps * batch + held_out
    tally, parts, count = Tally(), list[Clicks](), 0
    with closing(stream(path, form, batch, tally)) as batches:
        for part in batches:
            parts.append(part)
            count += len(part.clicks)
            if count >= wanted:
                break
    tally.check(path, form)
    fitting = min(count, wanted) * steps // wanted
    if fitting < LEAST_STEPS:
        least = math.ceil(LEAST_STEPS * wanted / steps)
        raise BadFile(f"--data {path} has {count} samples; a training takes {least} or more here")
    integers, ids, clicks = (
        torch.cat([getattr(part, name) for part in parts])[:wanted] for name in ("integers", "ids", "clicks")
    )
    places, rows = _numbered(ids)
    all_ = Clicks(integers, places, clicks)
    data = Data(all_.part(0, fitting * batch), all_.part(fitting * batch, wanted), batch, rows)
    for name, part in (("trained on", data.training), ("held out", data.held_out)):
        if len(part.clicks.unique()) < 2:
            raise BadFile(
                f"--data {path}: the {len(part.clicks)} samples that are {name} are all clicks, or all "
                "none, so that a model can't be judged; use a file in which both come everywhere"
            )
    return data, tally


def _together(samples: Sequence[Sample]) -> Clicks:
    clicks, integers, ids = zip(*samples, strict=True)
    return Clicks(
        torch.tensor(integers, dtype=torch.float32),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(clicks, dtype=torch.float32),
    )


def _numbered(ids: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The rows of all tables one after another that ids [samples, tables] stand for, and those of each."""
    columns: list[Tensor] = []
    rows: list[int] = []
    for column in ids.T:
        distinct, places = column.unique(return_inverse=True)
        columns.append(places + sum(rows))
        rows.append(len(distinct))
    return torch.stack(columns, dim=1), tuple(rows)


def shown(field: bytes) -> str:
    """A field for a message, shortened."""
    return repr(field[:_SHOWN_BYTES]) + ("..." if len(field) > _SHOWN_BYTES else "")


def _is(form: Format) -> str:
    return f"a line of {form.name} is {form.line}"
