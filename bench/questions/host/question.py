"""What does a window's end cost a host's processors, and how fast are tables put back and memory allocated?

A process does the host's share of one rank's work: tables of 128 elements of 2 bytes and one number a row,
in host memory that stands for a device's; a window changes rows that lie apart, and is committed without
other ranks. What the rank sends goes over TCP to itself, as the same number of bytes from others would. In
rows whose `commit` is `base`, an older commit's clone does the same work in the same run.

- `core_s_per_gb`: processor time of all threads, in seconds for each GB of changed rows, by phase, with one
  or two threads and one or two blocks of parity. `take` sets rows aside on the "device", whose work it is on
  a GPU. `all` is the sum of the others: `store` brings rows to the image and saves the old ones, `delta` lays
  out what others are sent, `exchange` sends and receives it, `prepare` checks it, and `apply` changes parity.
- `gb_per_s`: changed rows, by wall time of `all`; `two_threads_over_one`, with as many idle processors.
- `copy_core_s_per_gb`: a plain copy of as many bytes, in order.
- `put_gb_per_s`: a whole table put back from an arena that the process has just attached, and a plain copy of
  as many bytes from memory that is mapped. `put_over_copy` is the ratio.
- `allocate_gb_per_s`: the memory of new arenas on one host, of one rank and of two that begin together;
  `two_ranks_over_one` is the ratio.

Rows and parity have to be the same with each number of threads, and by both commits.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.harness.guarded_job import GuardedJob
from bench.harness.result import Arguments, BadFile, Label, Row, WrongResult, summary
from bench.questions.host import work  # also so that the result names the modules that it runs
from ecemb.coding.code import Code

CODES = (Code(4, 3), Code(4, 2))
THREADS = (1, 2)
THIS, BASE = "this", "base"
PHASES = ("store", "delta", "exchange", "prepare", "apply")
WORK = Path(work.__file__)
PER_GB = 1e9


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        tables: Number of tables.
        rows: Of all tables.
        dim: Elements of a row.
        changed: Rows that a window changes.
        windows: Measured windows, and repeats of the other measurements.
        put_rows: Of the table that is put back.
        allocated_rows: Of a rank's tables, for whose arena memory is allocated.
        arena_dir: Where arenas lie.
        timeout_s: Of every process.
    """

    tables: int = 4
    rows: int = 6_000_000
    dim: int = 128
    changed: int = 1_500_000
    windows: int = 5
    put_rows: int = 8_000_000
    allocated_rows: int = 8_000_000
    arena_dir: str = "/dev/shm"
    timeout_s: float = 600.0


FULL = Scale()
QUICK = dataclasses.replace(
    FULL, rows=20_000, changed=4000, windows=2, put_rows=20_000, allocated_rows=20_000
)


def run(arguments: Arguments) -> list[Row]:
    """Answers the question; the metrics are in the module's docstring."""
    scale = QUICK if arguments.quick else FULL
    trees = {THIS: ROOT}
    if arguments.base is not None:
        trees[BASE] = checked(arguments.base)
    rows: list[Row] = []
    for code in CODES:
        rows += windows(scale, trees, code, arguments.seed)
    found = asked(scale, ROOT, "copies", seed=arguments.seed)
    rows.append(summary("copy_core_s_per_gb", "s/GB", per_gb(found, "copy")))
    for commit, tree in trees.items():
        rows += put_back(scale, tree, commit, arguments.seed)
    for commit, tree in trees.items():
        rows += allocation(scale, tree, commit, arguments.seed)
    return rows


def checked(base: Path) -> Path:
    """The folder of an older commit's clone.

    Raises:
        BadFile: It has no `ecemb`.
    """
    if not (base / "ecemb" / "__init__.py").is_file():
        raise BadFile(f"--base {base} has no ecemb/: give the folder of a clone, with the commit checked out")
    return base.resolve()


def windows(scale: Scale, trees: Mapping[str, Path], code: Code, seed: int) -> list[Row]:
    """Returns `core_s_per_gb`, `gb_per_s` and `two_threads_over_one` of one code.

    Raises:
        WrongResult: Rows or parity depend on the threads, or on the commit.
    """
    rows: list[Row] = []
    digests: dict[tuple[str, int], str] = {}
    for commit, tree in trees.items():
        rates: list[list[float]] = []
        for threads in THREADS:
            found = asked(scale, tree, "windows", n=code.n, k=code.k, threads=threads, seed=seed)
            digests[commit, threads] = found["digest"]
            labels: dict[str, Label] = {"commit": commit, "code": f"({code.n}, {code.k})", "threads": threads}
            for phase in ("take", *PHASES):
                rows.append(summary("core_s_per_gb", "s/GB", per_gb(found, phase), **labels, phase=phase))
            rows.append(summary("core_s_per_gb", "s/GB", per_gb(found, *PHASES), **labels, phase="all"))
            rates.append([1 / s for s in per_gb(found, *PHASES, clock=1)])
            rows.append(summary("gb_per_s", "GB/s", rates[-1], **labels))
        one, two = map(statistics.median, rates)
        labels = {"commit": commit, "code": f"({code.n}, {code.k})"}
        rows.append(summary("two_threads_over_one", "ratio", [two / one], **labels))
    if len(set(digests.values())) > 1:
        raise WrongResult(f"({code.n}, {code.k}): rows or parity differ: {digests}")
    return rows


def per_gb(found: Mapping[str, Any], *phases: str, clock: int = 0) -> list[float]:
    """Seconds of phases for each GB of changed rows, window by window.

    Args:
        found: the answer of a process.
        *phases: summed.
        clock: 0 for processor time, 1 for wall time.
    """
    gb = found["changed_bytes"] / PER_GB
    return [sum(window[phase][clock] for phase in phases) / gb for window in found["windows"]]


def put_back(scale: Scale, tree: Path, commit: str, seed: int) -> list[Row]:
    """Returns `put_gb_per_s` and `put_over_copy`.

    Raises:
        WrongResult: The table is not what the arena has.
    """
    rows: list[Row] = []
    for threads in THREADS:
        found = asked(scale, tree, "put", threads=threads, rows=scale.put_rows, seed=seed)
        if not found["same"]:
            raise WrongResult(f"{commit}, {threads} threads: the table differs from its image")
        gb = found["size_bytes"] / PER_GB
        labels: dict[str, Label] = {"commit": commit, "threads": threads}
        rates = {what: [gb / spent[1] for spent in taken] for what, taken in found["taken"].items()}
        rows += [summary("put_gb_per_s", "GB/s", rate, **labels, what=what) for what, rate in rates.items()]
        over = [a / b for a, b in zip(rates["put-back"], rates["plain copy"], strict=True)]
        rows.append(summary("put_over_copy", "ratio", over, **labels))
    return rows


def allocation(scale: Scale, tree: Path, commit: str, seed: int) -> list[Row]:
    """Returns `allocate_gb_per_s` and `two_ranks_over_one`."""
    rates: list[list[float]] = []
    rows: list[Row] = []
    for ranks in (1, 2):
        samples: list[float] = []
        for _ in range(scale.windows):
            found = allocated_together(scale, tree, ranks, seed)
            seconds = max(one["ended_s"] for one in found) - min(one["began_s"] for one in found)
            samples.append(sum(one["size_bytes"] for one in found) / PER_GB / seconds)
        rates.append(samples)
        rows.append(summary("allocate_gb_per_s", "GB/s", samples, commit=commit, ranks=ranks))
    one, two = map(statistics.median, rates)
    return [*rows, summary("two_ranks_over_one", "ratio", [two / one], commit=commit)]


def allocated_together(scale: Scale, tree: Path, ranks: int, seed: int) -> list[dict[str, Any]]:
    """What each rank says of its allocation; all begin when all are ready, and end when all have ended."""
    with job(scale, seed).leaving_nothing():
        started = [
            begun(scale, tree, "allocate", rows=scale.allocated_rows, seed=seed, host=f"host{rank}")
            for rank in range(ranks)
        ]
        try:
            for word in ("ready", "made"):
                for process in started:
                    if process.stdout is None or process.stdout.readline().strip() != word:
                        raise WrongResult(f"a rank that allocates memory did not say {word!r}: see its error")
                for process in started:
                    if process.stdin is not None:
                        process.stdin.write("\n")
                        process.stdin.flush()
            return [answer(process, scale) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()


def asked(scale: Scale, tree: Path, what: str, **order: Any) -> dict[str, Any]:
    """Runs one piece of work in a process of its own, with a tree's code."""
    with job(scale, order["seed"]).leaving_nothing():
        return answer(begun(scale, tree, what, **order), scale)


def job(scale: Scale, seed: int) -> GuardedJob:
    """The job whose arenas the work makes."""
    name = f"bench-host-{os.getpid()}"
    return GuardedJob(job=name, arena_dir=scale.arena_dir, n=4, k=3, seed=seed, timeout_s=scale.timeout_s)


def begun(scale: Scale, tree: Path, what: str, **order: Any) -> subprocess.Popen[str]:
    """Starts a process that does a piece of work with a tree's code."""
    fields = {**dataclasses.asdict(scale), "n": 4, "k": 3, "threads": 1, "host": "a", **order}
    fields |= {"work": what, "job": f"bench-host-{os.getpid()}"}
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(WORK), json.dumps(fields)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tree,
    )


def answer(process: subprocess.Popen[str], scale: Scale) -> dict[str, Any]:
    """Waits for what a process says last.

    Raises:
        WrongResult: It failed.
    """
    try:
        said, _ = process.communicate(timeout=scale.timeout_s)
    finally:
        process.kill()
    if process.returncode:
        raise WrongResult(f"a process ended with {process.returncode}: see its error above")
    return json.loads(said.strip().splitlines()[-1])
