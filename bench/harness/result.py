"""The one form of every measurement: what a row is, and what is written around the rows.

    {"question", "commit", "machine", "versions", "seed", "sources", "inputs",
     "rows": [{"metric", "value", "unit", "low", "high", "repeats", ...labels}],
     "rounds": [{"metric", ...labels, NAME: "number number ..."}], "seal"}

A rival is a row with the same metric and another label (`kernel`, `method`). All rows of one file
come from one run.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from bench import RESULTS
from bench.harness import signature
from bench.harness.isal import IsalUnavailable, load

Label = str | int | float

FIXED = ("metric", "value", "unit", "low", "high", "repeats")
"""A row's keys besides its labels."""

PACKAGES = (
    "ecemb",
    "torch",
    "numpy",
    "llvmlite",
    "numba",
    "galois",
    "zfec",
    "torchrec",
    "fbgemm-gpu-cpu",
    "scikit-learn",
    "torchao",
    "triton",
)


class WrongResult(Exception):
    """What was to be timed computes something else than it should; nothing was timed."""


class Incomplete(Exception):
    """Some of what was to be measured wasn't, and the rest was; the message says what, and why.

    Args:
        rows: Of the rest.
        why: The message.
    """

    def __init__(self, rows: list[Row], why: str) -> None:
        super().__init__(why)
        self.rows = rows


class Unavailable(Exception):
    """What is to be measured isn't on this machine, and nothing was; the message says what, and a way out."""


class BadFile(Exception):
    """A file that was given can't be used, as a trace or as data; the message names it, why, and what can."""


class BadOption(Exception):
    """An option can't have its value, or doesn't go with another; names both, the rule and the way out."""


class More(Protocol):
    """Options of one question alone."""

    def words(self) -> list[str]:
        """They, as words of the command line."""
        ...


@dataclass(frozen=True)
class Arguments:
    """What every question is asked with.

    Attributes:
        quick: Small sizes and few repeats: shows that it works, its numbers are not for quoting.
        seed: Of every random choice.
        engine: Of the tables, if the question is asked of one.
        setting: The only one to be measured, or "" for all.
        traces: Files with faults of real clusters, if the question can be asked of some.
        system: Of a trace of several, those to take: "2,20", "all", or "" for the one with the most faults.
        data: A format of clicks and a file of it, if the question can be asked of one.
        results: Folder of the answers to other questions, which some start from.
        pairs: Pairs of steps to compare in each case, if the question compares pairs; 0 for its own number.
        base: Folder with the clone of an older commit, if the question can be asked of one.
        more: Options of the question alone, if it has some.
        methods: Names of methods, if the question is asked of some; () for its own.
    """

    quick: bool = False
    seed: int = 0
    engine: str = ""
    setting: str = ""
    traces: tuple[Path, ...] = ()
    system: str = ""
    data: tuple[str, Path] | None = None
    results: Path = RESULTS
    pairs: int = 0
    base: Path | None = None
    more: More | None = None
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One measured quantity.

    Attributes:
        metric: Its name, with the unit where it has one (`update_ns_per_row`).
        value: The median of the repeats.
        unit: Of value, low and high; "ratio" when there is none.
        low: The smallest of the repeats.
        high: The largest of the repeats.
        repeats: How many there were.
        labels: What distinguishes this row from others of its metric.
        rounds: What was measured in each round, by name, where the value and its interval are computed from
            pairs, so that a reader can compute them again.
    """

    metric: str
    value: float
    unit: str
    low: float
    high: float
    repeats: int
    labels: dict[str, Label] = field(default_factory=dict[str, Label])
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]], compare=False)

    def __post_init__(self) -> None:
        taken = sorted(set(self.labels) & set(FIXED))
        if taken:
            raise ValueError(f"{self.metric}: labels {taken} have the name of a row's own key")
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.metric}: the value {self.value} is not within {self.low}..{self.high}")

    def to_json(self) -> dict[str, Label]:
        return {key: getattr(self, key) for key in FIXED} | self.labels

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        """The row that `to_json` gave."""
        labels = {key: value for key, value in fields.items() if key not in FIXED}
        return cls(**{key: fields[key] for key in FIXED}, labels=labels)


def summary(metric: str, unit: str, samples: Sequence[float], **labels: Label) -> Row:
    """Returns the row of repeated measurements: their median, smallest and largest."""
    return Row(metric, statistics.median(samples), unit, min(samples), max(samples), len(samples), labels)


def once(metric: str, unit: str, value: float, **labels: Label) -> Row:
    """Returns the row of what is counted or computed, and doesn't spread."""
    return Row(metric, value, unit, value, value, 1, labels)


def by_metric(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of each metric together, in the order in which metrics first come."""
    metrics = list(dict.fromkeys(row.metric for row in rows))
    return sorted(rows, key=lambda row: metrics.index(row.metric))


def commit() -> str:
    """Returns the hash of the checked-out commit, with "-dirty" when files differ from it.

    Files of bench/results don't count: a measurement doesn't depend on the results of another.
    """
    try:
        shown = _git("rev-parse", "HEAD")
        changed = _git(
            "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results"
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{shown}-dirty" if changed else shown


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def machine() -> dict[str, Label]:
    """Returns what the numbers depend on: processor, cores that we may use, memory, system, GPU if any."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return {
        "processor": _first_field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        **({"gpu": cuda.get_device_name()} if cuda is not None and cuda.is_available() else {}),
    }


def versions() -> dict[str, str]:
    """Returns the version of Python and of each package at hand; what is missing is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    with contextlib.suppress(IsalUnavailable):
        found["isal"] = load().version
    return found


def command(question: str, arguments: Arguments) -> str:
    """Returns the command line that asks a question so; of files, the names without folders."""
    words = ["python -m bench", question]
    for option, given in (("engine", arguments.engine), ("setting", arguments.setting)):
        words += [f"--{option} {given}"] if given else []
    words += [f"--trace {path.name}" for path in arguments.traces]
    words += [f"--system {arguments.system}"] if arguments.system else []
    if arguments.data is not None:
        words.append(f"--data {arguments.data[0]} {arguments.data[1].name}")
    words += [f"--base {arguments.base.name}"] if arguments.base is not None else []
    words += [f"--methods '{','.join(arguments.methods)}'"] if arguments.methods else []
    words += arguments.more.words() if arguments.more is not None else []
    words += [f"--seed {arguments.seed}"] if arguments.seed else []
    return " ".join([*words, *(["--quick"] if arguments.quick else [])])


def document(
    question: str, arguments: Arguments, rows: Sequence[Row], minutes: float | None = None
) -> dict[str, Any]:
    """Returns the whole of what is written for one run; with its command, if it says how long it took."""
    return {
        "question": question,
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "seed": arguments.seed,
        **(
            {} if minutes is None else {"command": command(question, arguments), "minutes": round(minutes, 2)}
        ),
        **({"quick": True} if arguments.quick else {}),
        "sources": signature.sources(question),
        **({"inputs": read} if (read := signature.inputs(question, arguments.results)) else {}),
        "rows": [row.to_json() for row in rows],
        **({"rounds": kept} if (kept := [_rounds(row) for row in rows if row.rounds]) else {}),
    }


def _rounds(row: Row) -> dict[str, Label]:
    """A row's rounds with its labels; a list of numbers is a text, as JSON would give each a line."""
    numbers = {name: " ".join(f"{one:.6g}" for one in each) for name, each in row.rounds.items()}
    return {"metric": row.metric, **row.labels, **numbers}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a run's document with its seal as JSON, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    read = json.loads(json.dumps(content))  # as it will be read
    partial.write_text(json.dumps({**read, "seal": signature.seal(read)}, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as text: one table for each metric, its labels as columns."""
    blocks: list[str] = []
    for metric in dict.fromkeys(row.metric for row in rows):
        chosen = [row for row in rows if row.metric == metric]
        labels = list(dict.fromkeys(label for row in chosen for label in row.labels))
        cells = [[*labels, chosen[0].unit, "low", "high", "repeats"]]
        for row in chosen:
            numbers = (f"{x:.4g}" for x in (row.value, row.low, row.high))
            named = (str(row.labels.get(label, "")) for label in labels)
            cells.append([*named, *numbers, str(row.repeats)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i < len(labels) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        blocks.append("\n".join([metric, *("  " + line for line in lines)]))
    return "\n\n".join(blocks)


def _first_field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
