"""Which results are of the code that they measure: clean, of a commit of the history, and not older than it.

Owns: `CODE`, the paths that a question's numbers depend on; and STALE, the file in bench/results that names
the results that are older than these paths now. Comments and docstrings don't count. `python -m bench report`
writes it, so that the pages, which say what is stale, are made from bench/results alone.

A result is *refused* if it was never of its code: it is of a tree with changes, of a commit that isn't in the
history, its code was another one already when the result was committed, or the modules that it was measured
with are not those of its commit. It is also refused if it is not as it was written, by its seal; only results
that were committed before there were seals have none. A result that starts from other results is as stale as
they are.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT
from bench.harness.result import seal

STALE = "stale.txt"

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
_COSTS = ("compare", "overhead", "recovery")
"""Answers that the simulation starts from."""

CODE: Mapping[str, tuple[str, ...]] = {
    "agreement": ("bench/questions/agreement", *_TRAINED, *_STEP),
    "check_n_run": ("bench/questions/check_n_run", _CLICKS, "baselines/check_n_run"),
    "cluster": ("tests/cluster", "tests/failures/worker.py", *_WARM),
    "compare": (
        *("bench/questions/compare", "bench/methods", "bench/workloads/pairs.py", "baselines"),
        *("bench/questions/overhead/estimate.py", *_WARM),
    ),
    "compat": ("tests/support/compat.py", "tests/contracts", "tests/support/torchrec", "ecemb/engines"),
    "cpr": ("bench/questions/cpr", _CLICKS, "baselines/cpr"),
    "drift": ("bench/questions/drift", "baselines/float_parity", *_BYTES),
    "elastic": ("bench/questions/elastic", *_RESTART),
    "failures": ("tests/failures", *_WARM),
    "follower_kills": ("tests/support/follower", *_FOLLOWER),
    "gpu": ("bench/questions/gpu", *_STEP),
    "kernels": ("bench/questions/kernels", *_BYTES),
    "kills": ("tests/support/check_n_run", "baselines/check_n_run"),
    "memory": ("bench/questions/memory", *_STEP),
    "overhead": ("bench/questions/overhead", "bench/workloads/pairs.py", *_STEP),
    "profile": ("bench/questions/profile", *_STEP),
    "publish": ("bench/questions/publish", *_FOLLOWER),
    "quality": ("bench/questions/quality", _CLICKS, "baselines/check_n_run", "baselines/cpr"),
    "quantization": ("bench/questions/quantization", "baselines/check_n_run"),
    "rebuild": ("bench/questions/rebuild", "bench/questions/recovery", *_WARM),
    "recovery": ("bench/questions/recovery", "ecemb/place.py", *_WARM),
    "scaling": ("bench/questions/scaling", *_TRAINED, *_STEP),
    "simulate": (
        *("bench/questions/simulate", "baselines/cpr", "baselines/young.py", *_PLAN),
        *(f"bench/results/{name}.json" for name in _COSTS if (RESULTS / f"{name}.json").exists()),
    ),
    "soak": ("tests/failures", *_WARM),
    "start": ("bench/questions/start", _TRAINED[1], *_RESTART),
}
"""Question -> paths from the repository's root; a change in one of them makes its numbers old."""
_LEFT_OUT = (
    ":(exclude,glob)bench/questions/*/picture.py",  # is drawn from numbers
    ":(exclude,glob)tests/cluster/test_*.py",
    ":(exclude,glob)tests/failures/test_*.py",
    ":(exclude,glob)tests/failures/[des]*_worker.py",  # scripts that these tests run
)
"""Files that no number depends on."""


class NoHistory(Exception):
    """git, or the history of commits, isn't here: nothing can be judged."""


def stale(results: Path = RESULTS) -> dict[str, str]:
    """Returns file -> what of its code changed since it was measured; or that its commit isn't known.

    Files in the working tree count as they are, committed or not.

    Raises:
        NoHistory: It cannot be judged.
    """
    _need_history()
    found: dict[str, str] = {}
    documents = _documents(results)
    for name, document in documents.items():
        commit = document["commit"].partition("-dirty")[0]
        if not _known(commit):
            found[name] = "its commit is not in the history"
        elif changed := _changed(document["question"], commit):
            found[name] = f"changed since: {', '.join(changed)}"
    for name, document in documents.items():
        inputs = [Path(path).name for path in CODE[document["question"]] if path.endswith(".json")]
        if name not in found and (old := [one for one in inputs if one in found]):
            found[name] = f"starts from what is stale: {', '.join(old)}"
    return dict(sorted(found.items()))


def refused(results: Path = RESULTS) -> dict[str, str]:
    """Returns file -> why it was never of its code; see the module.

    Raises:
        NoHistory: It cannot be judged.
    """
    _need_history()
    found: dict[str, str] = {}
    for name, document in _documents(results).items():
        commit, dirty, _ = document["commit"].partition("-dirty")
        committed = _committed(results / name)
        if dirty:
            found[name] = "made with uncommitted changes"
        elif not _known(commit):
            found[name] = "its commit is not in the history"
        elif "seal" not in document and not (committed and _is_before_seals(committed[0])):
            found[name] = "without a seal: it was not written by bench.harness.result"
        elif seal(document) != document.get("seal", seal(document)):
            found[name] = "not as it was written: its seal does not fit its content"
        elif others := _of_other_commits(document.get("sources", {}), commit):
            found[name] = f"measured with other files than those of its commit: {', '.join(others)}"
        elif changed := _changed(document["question"], commit, *committed):
            found[name] = f"older than {', '.join(changed)} when it was committed"
    return found


def noted(results: Path = RESULTS) -> dict[str, str]:
    """Returns file -> what changed, as the file `STALE` has it; empty without one."""
    path = results / STALE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {name: why for name, _, why in (line.partition(": ") for line in lines)}


def text(found: Mapping[str, str]) -> str:
    """Returns the content of the file `STALE`."""
    return "".join(f"{name}: {why}\n" for name, why in found.items())


def _documents(results: Path) -> dict[str, Mapping[str, Any]]:
    paths = sorted(results.glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def _need_history() -> None:
    try:
        shallow = _git("rev-parse", "--is-shallow-repository")
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoHistory(f"git has no history here: {error}") from error
    if shallow != "false":
        raise NoHistory("this clone is shallow: run `git fetch --unshallow`")


def _known(commit: str) -> bool:
    """Whether the checked-out commit is this one, or came after it."""
    try:
        _git("merge-base", "--is-ancestor", commit, "HEAD")
    except subprocess.CalledProcessError:
        return False
    return True


def _committed(path: Path) -> tuple[str, ...]:
    """The commit that a file is from; none if it isn't committed as it is."""
    if _git("status", "--porcelain", "--", str(path)):
        return ()
    return (_git("log", "-1", "--format=%H", "--", str(path)),)


def _is_before_seals(commit: str) -> bool:
    try:
        return "def seal(" not in _git("show", f"{commit}:bench/harness/result.py")
    except subprocess.CalledProcessError:
        return False


def _of_other_commits(sources: Mapping[str, str], commit: str) -> list[str]:
    """Those of some files, path -> git's id, that are others in a commit."""
    lines = _git("ls-tree", "-r", commit).splitlines() if sources else []  # "mode type id<tab>path"
    there = {path: about.split()[-1] for about, _, path in (line.partition("\t") for line in lines)}
    return [path for path, blob in sources.items() if there.get(path) != blob]


def _changed(question: str, commit: str, *until: str) -> list[str]:
    """Of a question's paths those that are not as in a commit; in another commit, or in the working tree."""
    names = _git("diff", "--name-only", "--no-renames", commit, *until, "--", *CODE[question], *_LEFT_OUT)
    below = {
        path: [name for name in names.splitlines() if f"{name}/".startswith(f"{path}/")]
        for path in CODE[question]
    }
    return [path for path, found in below.items() if any(_is_other(name, commit, *until) for name in found)]


def _is_other(name: str, commit: str, *until: str) -> bool:
    """Whether a file that changed since a commit does something else now: comments and docstrings aside."""
    if not name.endswith(".py"):
        return True
    try:
        then = _git("show", f"{commit}:{name}")
        now = _git("show", f"{until[0]}:{name}") if until else (ROOT / name).read_text(encoding="utf-8")
    except (OSError, subprocess.CalledProcessError):  # it is new, or gone
        return True
    return _code(then) != _code(now)


@functools.cache
def _code(source: str) -> str:
    """A module without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [one for one in node.body if not _is_text(one)]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
