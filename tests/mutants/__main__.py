"""What the tests notice: a sample of mutants of the product, each run against tests until one fails.

    python tests/mutants [--each 35] [--seed 59] [--workers 2] [--minutes M] [--stages A,B] [--json FILE]

A mutant (`mutants.changes`) is written into a copy of the last commit's tree. The tests beside its module run
first, then the simulator, then the package's other tests, then all. Outcomes are kept in build/mutants by
commit, so that a run which was ended goes on. `equivalent.json` has the survivors that were judged: those
without any effect, with the reason. Then the table is printed, of those that a test noticed or that have met
all stages; it is written only once all have.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench.harness import register  # noqa: E402 - the path comes first
from bench.harness.result import Arguments, Row, commit, document, once, write  # noqa: E402 - the path comes first
from mutants.changes import Mutant, mutants  # noqa: E402

PACKAGES = ("kernels", "coding", "memory", "step", "recovery", "net", "start", "state", "checkpoint")
STAGES = ("near", "simulator", "package", "all")
"""Kinds of tests, in the order in which a mutant meets them."""
FOLDER = ROOT / "build" / "mutants"
OUTCOMES = "outcomes.jsonl"
EQUIVALENT = Path(__file__).with_name("equivalent.json")
_SEEDS = 60
_HANGS = 10
"""Tests hang that take this many times as long as with the product as it is."""
_NEAR = {"kernels": ("tests/contracts/test_kernels.py",)}
"""Tests of a package besides those in tests/unit."""


@dataclass(frozen=True)
class Outcome:
    """Of one mutant.

    Attributes:
        name: The mutant's.
        package: Where it is.
        kind: Of change.
        stage: The kind of tests that noticed it; empty if none did.
        stages: Which it has met.
        by: What failed, in a line.
    """

    name: str
    package: str
    kind: str
    stage: str
    stages: tuple[str, ...]
    by: str


def sample(each: int, seed: int) -> list[Mutant]:
    """As many mutants of each package, in an order that a run which is ended early has some of all of."""
    draw = random.Random(seed)
    drawn: list[list[Mutant]] = []
    for package in PACKAGES:
        found = [
            one for path in sorted((ROOT / "ecemb" / package).glob("*.py")) for one in mutants(ROOT, path)
        ]
        drawn.append(draw.sample(found, min(each, len(found))))
    return [one for several in itertools.zip_longest(*drawn) for one in several if one is not None]


def tests_of(mutant: Mutant, stage: str) -> list[str]:
    """The words after `python` that run the tests of a stage; none if it has none."""
    package, module = Path(mutant.path).parts[1], Path(mutant.path).stem
    beside = ROOT / "tests" / "unit" / package
    near = [f"tests/unit/{package}/test_{module}.py"] if (beside / f"test_{module}.py").is_file() else []
    near += _NEAR.get(package, ())
    pytest = ["-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", "-m", "not long"]
    match stage:
        case "near":
            return [*pytest, *near] if near else []
        case "simulator":
            loop = f"for seed in range({_SEEDS}): print('seed', seed, flush=True); job.run(seed)"
            return ["-c", f"from simulator import job\n{loop}"]
        case "package":
            return [*pytest, f"tests/unit/{package}"]
        case _:
            return [*pytest, "--ignore=tests/docs", "--ignore=tests/bench"]


class Unusable(Exception):
    """Tests fail without any mutant."""


class Usual:
    """How long tests take with the product as it is, where they have to pass."""

    def __init__(self, folder: Path) -> None:
        self._path, self._lock = folder / "usual.json", threading.Lock()
        self._seconds: dict[str, float] = json.loads(self._path.read_text()) if self._path.exists() else {}

    def limit_s(self, words: Sequence[str], tree: Path) -> float:
        """When tests hang; runs them if they have not run before.

        Raises:
            Unusable: They fail.
        """
        key = " ".join(words)
        if key not in self._seconds:
            began = time.monotonic()
            if (by := _failure(words, tree, None)) is not None:
                raise Unusable(f"{key} fails without a mutant: {by}")
            with self._lock:
                self._seconds[key] = time.monotonic() - began
                self._path.write_text(json.dumps(self._seconds, indent=1))
        return _HANGS * self._seconds[key]


def try_one(mutant: Mutant, tree: Path, stages: Sequence[str], usual: Usual) -> Outcome:
    """Runs the stages' tests with a mutant until one fails."""
    path = tree / mutant.path
    source = path.read_bytes()
    noticed, by = "", None
    for stage in stages:
        if not (words := tests_of(mutant, stage)):
            continue
        limit_s = usual.limit_s(words, tree)
        path.write_bytes(mutant.apply(source))
        try:
            by = _failure(words, tree, limit_s)
        finally:
            path.write_bytes(source)
        if by is not None:
            noticed = stage
            break
    met = stages[: stages.index(noticed) + 1] if noticed else stages
    return Outcome(mutant.name, Path(mutant.path).parts[1], mutant.kind, noticed, tuple(met), by or "")


def _failure(words: Sequence[str], tree: Path, limit_s: float | None) -> str | None:
    """What failed, in a line; None if nothing did."""
    paths = {"PYTHONPATH": f"{tree}:{tree}/tests", "TMPDIR": str(tree / "tmp")}
    fixed = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *words],
        cwd=tree,
        env={**os.environ, **paths, **fixed},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    ) as process:
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it, and what the tests started
    if process.returncode == 0:
        return None
    lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or said.splitlines()[-1:] or ["no words"])[0][:300]


def run(given: argparse.Namespace, folder: Path, drawn: Sequence[Mutant]) -> None:
    """Tries all of the sample that have not met the stages.

    Raises:
        Unusable: Tests fail without any mutant.
    """
    known = {one.name: one for one in outcomes(folder)}
    done = {one.name for one in known.values() if one.stage or set(given.stages) <= set(one.stages)}
    todo = [one for one in drawn if one.name not in done]
    print(f"{len(drawn)} mutants, {len(todo)} to try", flush=True)
    ends = time.monotonic() + 60 * given.minutes
    usual, lock = Usual(folder), threading.Lock()
    trees = [_tree(folder, number) for number in range(given.workers if todo else 0)]

    def work(mutant: Mutant) -> None:
        if time.monotonic() > ends:
            return
        with lock:
            tree = trees.pop()
        try:
            before = known[mutant.name].stages if mutant.name in known else ()
            one = try_one(mutant, tree, [stage for stage in given.stages if stage not in before], usual)
        finally:
            with lock:
                trees.append(tree)
        with lock, (folder / OUTCOMES).open("a") as file:
            file.write(json.dumps({**vars(one), "stages": (*before, *one.stages)}) + "\n")
            print(f"{one.stage or 'SURVIVES':10s} {one.name[:150]}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(given.workers) as pool:
        futures = [pool.submit(work, mutant) for mutant in todo]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _tree(folder: Path, number: int) -> Path:
    tree = folder / f"tree-{number}"
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "tmp").mkdir(parents=True)
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    return tree


def outcomes(folder: Path) -> Iterator[Outcome]:
    """The last outcome of each mutant that was tried."""
    path = folder / OUTCOMES
    last: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        content: dict[str, Any] = json.loads(line)
        content["stages"] = tuple(content["stages"])
        last[content["name"]] = Outcome(**content)
    yield from last.values()


def table(judged: Mapping[str, str], tried: Sequence[Outcome]) -> list[Row]:
    """Prints the share that is noticed, by package and by kind of tests, and the survivors; returns the rows.

    Args:
        judged: Survivors without any effect, by name.
        tried: Of mutants that were noticed, or have met all stages.
    """
    rows: list[Row] = []
    print(f"| package | mutants | equivalent | noticed | {' | '.join(STAGES)} |")
    for package in (*PACKAGES, "all packages"):
        of = [one for one in tried if package in (one.package, "all packages")]
        alike = [one for one in of if not one.stage and one.name in judged]
        by = Counter(one.stage for one in of if one.stage)
        share = sum(by.values()) / max(1, len(of) - len(alike))
        stages = " | ".join(str(by[stage]) for stage in STAGES)
        print(f"| {package} | {len(of)} | {len(alike)} | {100 * share:.0f} % | {stages} |")
        rows.append(once("noticed", "ratio", share, package=package))
        rows.append(once("mutants", "mutants", len(of), package=package, outcome="tried"))
        rows.append(once("mutants", "mutants", len(alike), package=package, outcome="equivalent"))
        rows += [once("mutants", "mutants", by[stage], package=package, outcome=stage) for stage in STAGES]
    for one in tried:
        if not one.stage and one.name not in judged:
            print(f"survives: {one.name}")
            rows.append(once("survivor", "mutants", 1, package=one.package, change=one.name))
    return rows


def stages_of(given: str) -> tuple[str, ...]:
    """The stages of a list with commas.

    Raises:
        argparse.ArgumentTypeError: There is no such stage.
    """
    stages = tuple(given.split(","))
    if wrong := [one for one in stages if one not in STAGES]:
        raise argparse.ArgumentTypeError(f"there are no stages {wrong}; the stages are {', '.join(STAGES)}")
    return stages


def main(words: Sequence[str]) -> int:
    """Tries mutants and prints the table; returns 1 if the tree is not a commit's, or some are left."""
    parser = argparse.ArgumentParser(prog="python tests/mutants", description=str(__doc__).splitlines()[0])
    parser.add_argument("--each", type=int, default=35, help="mutants of each package")
    parser.add_argument("--seed", type=int, default=59, help="of the sample")
    parser.add_argument("--workers", type=int, default=2, help="mutants that are tried at a time")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="try no further one after this time")
    parser.add_argument("--stages", type=stages_of, default=STAGES, help="kinds of tests, in order")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where to write the table of the whole sample"
    )
    given = parser.parse_args(words)
    if (head := commit()).endswith("-dirty"):
        print(
            f"mutants are of a commit, and this tree is {head}: commit or stash the changes", file=sys.stderr
        )
        return 1
    folder = FOLDER / head
    folder.mkdir(parents=True, exist_ok=True)
    drawn = sample(given.each, given.seed)
    run(given, folder, drawn)
    names = {one.name for one in drawn}
    tried = [one for one in outcomes(folder) if one.stage or set(STAGES) <= set(one.stages)]
    tried = [one for one in tried if one.name in names]
    rows = table(json.loads(EQUIVALENT.read_text()), tried)
    if left := len(drawn) - len(tried):
        print(f"{left} of {len(drawn)} mutants have not met all tests: the same command goes on")
        return 1
    if given.json:
        write(given.json, document("mutants", Arguments(seed=given.seed), rows))
    return 0


if __name__ == "__main__":
    sys.exit(register.script("mutants", main, "tests/mutants", sys.argv[1:]))
