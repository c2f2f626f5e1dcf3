"""What signs a result: the files that it was measured with, the answers that it started from, and a digest.

Owns: `CODE`, the files of each question, and `INPUTS`, the answers that some start from. Called where a
result is written, by `bench.harness.result`, and where it is judged, by `bench.report.provenance`. A digest
has no secret: it shows that a file was edited by hand. Figures that were changed, with all digests computed
again, are found only by measuring again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import ROOT

_OURS = ("baselines", "bench", "ecemb", "examples", "tests")
"""Folders of the checkout with modules; an environment may lie beside them."""
FOLLOWED = ("baselines", "bench")
"""Packages whose imports are followed. Of ecemb, `CODE` has the packages: its root imports all of them."""
_DRAWS = "picture.py"
"""The name of modules that draw numbers and compute none."""

_BYTES = ("ecemb/kernels", "ecemb/coding")
_STEP = (
    *_BYTES,
    *("ecemb/guard.py", "ecemb/nn.py", "ecemb/engines", "ecemb/memory", "ecemb/net"),
    *("ecemb/state", "ecemb/step"),
)
_RESTART = (*_STEP, "ecemb/session.py", "ecemb/start", "ecemb/recovery")
_WARM = (*_RESTART, "ecemb/launch")
_TRAINED = ("bench/harness/messages.py", "bench/workloads/table_training.py")
_FOLLOWER = (
    *("ecemb/checkpoint/follower.py", "ecemb/checkpoint/folder_store.py"),
    *("ecemb/checkpoint/index.py", "ecemb/checkpoint/dcp.py", "baselines/check_n_run"),
)
_CLICKS = "bench/workloads/click_training.py"
_PLAN = (
    *("ecemb/tools/cost.py", "ecemb/tools/job.py", "ecemb/tools/window_cost.py", "ecemb/step/interval.py"),
    *("ecemb/coding/placement.py", "ecemb/coding/code.py"),
)
CODE: Mapping[str, tuple[str, ...]] = {
    "agreement": ("bench/questions/agreement", *_TRAINED, *_STEP),
    "check_n_run": ("bench/questions/check_n_run", _CLICKS, "baselines/check_n_run"),
    "cluster": ("tests/cluster", "tests/failures/worker.py", *_WARM),
    "compare": (
        *("bench/questions/compare", "bench/methods", "bench/workloads/pairs.py", "baselines"),
        *("bench/questions/overhead/estimate.py", *_WARM),
    ),
    "compare_cluster": (
        *("bench/questions/compare_cluster", "bench/methods", "bench/workloads/scripts", "baselines"),
        *("bench/questions/overhead/estimate.py", *_WARM),
    ),
    "compat": ("tests/support/compat.py", "tests/contracts", "tests/support/torchrec", "ecemb/engines"),
    "cpr": ("bench/questions/cpr", _CLICKS, "baselines/cpr"),
    "defects": ("tests/simulator", "tests/failures/sabotage.py", "tests/support/simulation.py", *_RESTART),
    "drift": ("bench/questions/drift", "baselines/float_parity", *_BYTES),
    "elastic": ("bench/questions/elastic", *_RESTART),
    "failures": ("tests/failures", *_WARM),
    "follower_kills": ("tests/support/follower", *_FOLLOWER),
    "gpu": ("bench/questions/gpu", *_STEP),
    "host": ("bench/questions/host", *_STEP),
    "kernels": ("bench/questions/kernels", *_BYTES),
    "kills": ("tests/support/check_n_run", "baselines/check_n_run"),
    "memory": ("bench/questions/memory", *_STEP),
    "mutants": (
        "tests/mutants",
        "tests/unit",
        "tests/contracts",
        "tests/simulator",
        *_RESTART,
        "ecemb/checkpoint",
    ),
    "network": ("bench/questions/network", _TRAINED[1], *_PLAN, *_RESTART),
    "overhead": ("bench/questions/overhead", "bench/workloads/pairs.py", *_STEP),
    "profile": ("bench/questions/profile", *_STEP),
    "publish": ("bench/questions/publish", *_FOLLOWER),
    "quality": ("bench/questions/quality", _CLICKS, "baselines/check_n_run", "baselines/cpr"),
    "quantization": ("bench/questions/quantization", "baselines/check_n_run"),
    "rebuild": ("bench/questions/rebuild", "bench/questions/recovery", *_WARM),
    "recovery": ("bench/questions/recovery", "ecemb/place.py", *_WARM),
    "scaling": ("bench/questions/scaling", *_TRAINED, *_STEP),
    "simulate": ("bench/questions/simulate", "baselines/cpr", "baselines/young.py", *_PLAN),
    "soak": ("tests/failures", *_WARM),
    "start": ("bench/questions/start", _TRAINED[1], *_RESTART),
}
"""Question -> paths from the repository's root: its own, of the scripts that its processes run, and of the
packages of ecemb that they measure. What these import of bench/ and baselines/ counts as well: see `code`."""

INPUTS: Mapping[str, tuple[str, ...]] = {
    "simulate": (
        *("agreement.json", "compare.json", "network.json"),
        *("overhead.json", "overhead-xeon.json", "recovery.json"),
    )
}
"""Question -> files of other answers that it starts from, where they exist."""

WRITERS = (
    *("bench/__init__.py", "bench/__main__.py", "bench/suite.py", "bench/harness/register.py"),
    *("bench/harness/result.py", "bench/harness/signature.py"),
)
"""Modules that ask any question and write its answer: no number depends on them."""


def code(question: str) -> tuple[str, ...]:
    """Returns the paths that a question's numbers depend on: those of `CODE`, and what they import.

    Modules of bench/ and baselines/ are followed, wherever in a file they are imported, also those that only
    another process imports; but not those of a folder's own tests, which no measurement runs.
    """
    listed = CODE[question]
    seen: set[Path] = set()
    waiting = [path for path in _files(listed) if path.name != _DRAWS and not path.name.startswith("test_")]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += [other for other in _imported(path) if _counts(other)]
    names = sorted(str(path.relative_to(ROOT)) for path in seen)
    return (*listed, *(name for name in names if not any(is_below(name, path) for path in listed)))


def is_below(name: str, path: str) -> bool:
    """Whether a file is this path, or lies in this folder."""
    return f"{name}/".startswith(f"{path}/")


def sources(question: str) -> dict[str, str]:
    """Returns path -> git's id of the content, of each file that a question is measured with.

    They are the modules of the checkout that this process has imported, and the files of `code`, which its
    ranks and scripts run.
    """
    modules = [Path(getattr(module, "__file__", None) or "/") for module in list(sys.modules.values())]
    ours = [path for path in modules if any(path.is_relative_to(ROOT / top) for top in _OURS)]
    listed = _files(code(question)) if question in CODE else []
    found: dict[str, str] = {}
    for path in {*ours, *listed}:
        if path.suffix == ".py" and path.is_file():
            content = path.read_bytes()
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content)
            found[str(path.relative_to(ROOT))] = blob.hexdigest()
    return dict(sorted(found.items()))


def inputs(question: str, results: Path) -> dict[str, str]:
    """Returns name -> digest of each answer in a folder that a question starts from."""
    paths = [results / name for name in INPUTS.get(question, ())]
    return {path.name: seal(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()}


def seal(content: Mapping[str, Any]) -> str:
    """Returns the digest of a document, all but its seal, as hexadecimal digits."""
    rest = {key: value for key, value in content.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _files(paths: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for path in (ROOT / name for name in paths):
        found += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [path for path in found if path.is_file()]


def _counts(path: Path) -> bool:
    return path.name != _DRAWS and str(path.relative_to(ROOT)) not in WRITERS


def _imported(path: Path) -> Iterator[Path]:
    """The modules of `FOLLOWED` that a module imports, anywhere in it."""
    for name in _names(path.read_bytes(), path.relative_to(ROOT).parts[:-1]):
        if name.partition(".")[0] in FOLLOWED:
            yield from _module(name)


@functools.cache
def _names(source: bytes, package: tuple[str, ...]) -> tuple[str, ...]:
    """Dotted names of all that a module in a package imports."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found += [f"{base}.{alias.name}" for alias in node.names]
    return tuple(found)


def _module(name: str) -> Iterator[Path]:
    """The file of the module that a dotted name is, or is from."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:length])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path
                return
