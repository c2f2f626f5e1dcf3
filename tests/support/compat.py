"""`make compat VERSION=2.14`: ecemb with a set of torch, TorchRec and FBGEMM, in an environment of its own.

Makes build/compat/VERSION, installs the set there with the other versions of constraints.txt, and runs what
depends on the set: the contracts with TorchRec's members and its own tests, the engines, some scenarios, and
the demo. What isn't here, as a build without CUDA, pip looks for where it is set up to look.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import venv
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bench.harness import register  # noqa: E402 - the path comes first
from bench.harness.result import Arguments, Row, document, once, write  # noqa: E402 - the path comes first

SETS: Mapping[str, Mapping[str, str]] = {
    "2.13": {},
    "2.14": {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0", "triton": "3.8.0"},
}
"""Version of torch -> the packages that are not those of constraints.txt."""

EXTRAS = "test,bench,metrics,top,lightning"
NO_DEPENDENCIES = ("torchrec",)  # its metadata asks for the CUDA build of FBGEMM
TORCHREC = ("fbgemm-gpu-cpu", "tensordict", "torchmetrics==1.0.3", "tqdm", "pyre-extensions")
PARTS: Mapping[str, tuple[str, ...]] = {
    "contracts": ("tests/contracts",),
    "engines": ("tests/unit/engines", "tests/unit/state"),
    "scenarios": (
        *("tests/scenarios/test_guard.py", "tests/scenarios/test_second_launch.py"),
        *("tests/scenarios/test_torchrec_checkpoint.py", "tests/scenarios/test_torchrec_kills.py"),
    ),
}
"""Part -> what pytest runs of it."""
DEMO = "demo"
OUTCOMES = ("passed", "failed", "skipped")
DEADLINE_S = 3600.0


def pins(version: str) -> str:
    """The versions of a set, as constraints of pip."""
    others = SETS[version]
    kept = [
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if re.split(r"[ =;]", line)[0] not in others
    ]
    return "\n".join([*kept, *(f"{name}=={number}" for name, number in others.items())]) + "\n"


def install(version: str, folder: Path) -> Path:
    """Makes the environment of a set, unless it is there with the same versions; returns its Python.

    Raises:
        subprocess.CalledProcessError: pip can't get it; it has said why.
    """
    python, ready = folder / "bin" / "python", folder / "ready"
    constraints = pins(version)
    if ready.exists() and ready.read_text(encoding="utf-8") == constraints:
        return python
    venv.create(folder, with_pip=True, clear=True)
    listed = folder / "constraints.txt"
    listed.write_text(constraints, encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(listed)]
    subprocess.run([*pip, "-e", f"{ROOT}[{EXTRAS}]", *TORCHREC], check=True)
    subprocess.run([*pip, "--no-deps", *NO_DEPENDENCIES], check=True)
    ready.write_text(constraints, encoding="utf-8")
    return python


def counted(report: Path) -> dict[str, int]:
    """How many tests passed, failed and were skipped, of a report in JUnit's form."""
    found = dict.fromkeys(OUTCOMES, 0)
    for case in ET.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[outcome] += 1
    return found


def outcomes(python: Path, folder: Path, parts: Sequence[str]) -> Iterator[tuple[str, dict[str, int]]]:
    """Runs the parts, and yields how many tests of each had which outcome."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for part in parts:
        if part == DEMO:
            words = [str(python), "examples/demo.py", "--steps", "60", "--seed", "1"]
            done = subprocess.run(words, cwd=ROOT, env=environment, check=False, timeout=DEADLINE_S)
            yield (
                part,
                {"passed": int(not done.returncode), "failed": int(bool(done.returncode)), "skipped": 0},
            )
            continue
        report = folder / f"{part}.xml"
        report.unlink(missing_ok=True)
        options = ["-q", "-n0", "-m", "not long", "-p", "no:cacheprovider", f"--junitxml={report}"]
        words = [str(python), "-m", "pytest", *options, *PARTS[part]]
        done = subprocess.run(words, cwd=ROOT, env=environment, check=False, timeout=DEADLINE_S)
        if done.returncode not in (0, 1) or not report.exists():
            raise SystemExit(f"the tests of {part} did not run: pytest ended with {done.returncode}")
        yield part, counted(report)


def rows(found: Mapping[str, Mapping[str, int]]) -> Iterator[Row]:
    """What is written: tests by part and outcome."""
    for part, by_outcome in found.items():
        for outcome in OUTCOMES:
            yield once("tests", "tests", by_outcome[outcome], part=part, outcome=outcome)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", choices=SETS, help="of torch")
    parser.add_argument("--parts", nargs="*", choices=(*PARTS, DEMO), default=[*PARTS, DEMO])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the raw results")
    options = parser.parse_args(arguments)
    folder = ROOT / "build" / "compat" / options.version
    python = install(options.version, folder)
    code = "import json; from bench.harness.result import versions; print(json.dumps(versions()))"
    shown = subprocess.run([str(python), "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    found: dict[str, dict[str, int]] = {}
    for part, by_outcome in outcomes(python, folder, options.parts):
        print(f"{part}: {', '.join(f'{number} {outcome}' for outcome, number in by_outcome.items())}")
        found[part] = by_outcome
        if options.json:  # a run that ends early shows the parts that it has tried
            result = document("compat", Arguments(), list(rows(found)))
            write(options.json, result | {"versions": json.loads(shown.stdout)})
    return 1 if any(by_outcome["failed"] for by_outcome in found.values()) else 0


if __name__ == "__main__":
    sys.exit(register.script("compat", main, "tests/support/compat.py", sys.argv[1:]))
