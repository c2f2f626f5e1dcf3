"""Which results are of the code that they measure: clean, of a commit of the history, and not older than it.

Owns: STALE, the file in bench/results that names the results that are older than their code is now, or start
from such results. Comments and docstrings don't count. `python -m bench report` writes it, so that the pages,
which say what is stale, are made from bench/results alone.

A result is *refused* if it was never of its code: it is of a tree with changes, of a commit that isn't in the
history, its code was another one already when the result was committed, or the files that it was measured
with are not those of its commit. It is also refused if it is quick, or not as it was written, by its seal;
only results that were committed before there were seals have none. And it is refused if no run in the
register has kept it, unless its commit is older than the register. So is a register that lost lines.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import RESULTS, ROOT
from bench.harness import register, signature
from bench.harness.signature import seal

STALE = "stale.txt"

_LEFT_OUT = (
    ":(exclude,glob)bench/questions/*/picture.py",  # is drawn from numbers
    ":(exclude,glob)tests/cluster/test_*.py",
    ":(exclude)tests/failures/__main__.py",  # chooses one of the commands
    ":(exclude,glob)tests/failures/test_*.py",
    ":(exclude,glob)tests/failures/[des]*_worker.py",  # scripts that these tests run
)
"""Files that no number depends on."""


class NoHistory(Exception):
    """git, or the history of commits, isn't here: nothing can be judged."""


def stale(results: Path = RESULTS) -> dict[str, str]:
    """Returns file -> why it is old: what of its code changed since, or what it starts from.

    A result that starts from another one is stale if that one is, or if that one was measured again since.
    Files in the working tree count as they are, committed or not.

    Raises:
        NoHistory: It cannot be judged.
    """
    _need_history()
    documents = _documents(results)
    why: dict[str, list[str]] = {}
    for name, document in documents.items():
        commit = document["commit"].partition("-dirty")[0]
        if not _known(commit):
            why[name] = ["its commit is not in the history"]
            continue
        changed = _changed(document, commit)
        others = [
            one
            for one, digest in _inputs(document).items()
            if _is_another(results, one, digest, commit, documents.get(one))
        ]
        why[name] = [
            *([f"changed since: {', '.join(changed)}"] if changed else []),
            *([f"starts from what is another now: {', '.join(others)}"] if others else []),
        ]
    old = {name for name, reasons in why.items() if reasons}
    starts = {name: set(_inputs(document)) for name, document in documents.items()}
    while more := {name for name, those in starts.items() if those & old} - old:
        old |= more
    for name, those in starts.items():
        if those & old:
            why[name].append(f"starts from what is stale: {', '.join(sorted(those & old))}")
    return {name: "; ".join(reasons) for name, reasons in sorted(why.items()) if reasons}


def refused(results: Path = RESULTS) -> dict[str, str]:
    """Returns file -> why it was never of its code; see the module.

    Raises:
        NoHistory: It cannot be judged.
    """
    _need_history()
    found: dict[str, str] = {}
    runs = register.lines(results / register.NAME)
    for name, document in _documents(results).items():
        commit, dirty, _ = document["commit"].partition("-dirty")
        committed = _committed(results / name)
        files, paths = document.get("sources", {}), signature.CODE[document["question"]]
        if dirty:
            found[name] = "made with uncommitted changes"
        elif not _known(commit):
            found[name] = "its commit is not in the history"
        elif "seal" not in document and not (committed and _is_before_seals(committed[0])):
            found[name] = "without a seal: it was not written by bench.harness.result"
        elif seal(document) != document.get("seal", seal(document)):
            found[name] = "not as it was written: its seal does not fit its content"
        elif document.get("quick"):
            found[name] = "quick: its numbers are not for quoting"
        elif "seal" in document and not any(signature.is_below(one, paths[0]) for one in files):
            found[name] = f"names no file of {paths[0]} that it was measured with"
        elif others := _of_other_commits(files, commit):
            found[name] = f"measured with other files than those of its commit: {', '.join(others)}"
        elif changed := _of_paths(paths, commit, *committed):
            found[name] = f"older than {', '.join(changed)} when it was committed"
        elif _has_register(commit) and not register.keeps(runs, document):
            found[name] = f"no run in {register.NAME} has kept it"
    if _lost_lines(results / register.NAME):
        found[register.NAME] = "lines were removed or changed: they are only added"
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
        return "seal(" not in _git("show", f"{commit}:bench/harness/result.py")
    except subprocess.CalledProcessError:
        return False


def _has_register(commit: str) -> bool:
    """Whether runs of a commit's code are registered."""
    return bool(_git("ls-tree", "--name-only", commit, "bench/harness/register.py"))


def _lost_lines(path: Path) -> int:
    """Lines of a file that a commit, or the working tree, has no more."""
    changes = _git("log", "--no-renames", "--format=", "--numstat", "--", str(path)).splitlines()
    changes += _git("diff", "--no-renames", "--numstat", "HEAD", "--", str(path)).splitlines()
    return sum(int(change.split()[1]) for change in changes if change)


def _of_other_commits(sources: Mapping[str, str], commit: str) -> list[str]:
    """Those of some files, path -> git's id, that are others in a commit."""
    lines = _git("ls-tree", "-r", commit).splitlines() if sources else []  # "mode type id<tab>path"
    there = {path: about.split()[-1] for about, _, path in (line.partition("\t") for line in lines)}
    return [path for path, blob in sources.items() if there.get(path) != blob]


def _inputs(document: Mapping[str, Any]) -> Mapping[str, str]:
    """The answers that a result starts from, with their digests; with "" if it was written without."""
    return document.get("inputs") or dict.fromkeys(signature.INPUTS.get(document["question"], ()), "")


def _is_another(results: Path, name: str, digest: str, commit: str, now: Mapping[str, Any] | None) -> bool:
    """Whether an answer is not the one that had a digest; or not as in a commit, if no digest is known."""
    if not digest:
        return bool(_git("diff", "--name-only", commit, "--", str(results / name)))
    return now is None or seal(now) != digest


def _changed(document: Mapping[str, Any], commit: str) -> list[str]:
    """Of a result's code, its question's and what it names, the paths that are not as in its commit.

    In the folders where `signature.code` follows imports it names all that counts.
    """
    listed = signature.code(document["question"])
    named = [
        name
        for name in document.get("sources", {})
        if name.partition("/")[0] not in signature.FOLLOWED
        and not any(signature.is_below(name, path) for path in listed)
    ]
    return _of_paths((*listed, *named), commit)


def _of_paths(paths: Sequence[str], commit: str, *until: str) -> list[str]:
    """Of some paths those that are not as in a commit; in another commit, or in the working tree."""
    names = _git("diff", "--name-only", "--no-renames", commit, *until, "--", *paths, *_LEFT_OUT).splitlines()
    below = {path: [name for name in names if signature.is_below(name, path)] for path in paths}
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
