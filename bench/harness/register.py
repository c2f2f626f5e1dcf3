"""The register of runs: a line in `RUNS` when a run begins, and a line when it ends, whatever comes of it.

    {"run", "when", "question", "outcome": "begun", "command", "commit", "clean", "machine", "file"}
    {"run", "when", "question", "outcome", "seconds", "digest", "why"}

`run` is the same in both lines. How it ended: *kept*, its answer was written, and `digest` is that answer's
seal; *refused*, by a rule of its own, as that models end with the same bytes; *interrupted*; or *failed*.
`why` says more. A run without a second line was killed, or still goes on. Lines are only added.

Must not know: how an answer is made. It reads the file that a run was to write.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench import RESULTS
from bench.harness.result import WrongResult, commit, machine

NAME = "runs.jsonl"
RUNS = RESULTS / NAME
BEGUN, KEPT, REFUSED, FAILED, INTERRUPTED = "begun", "kept", "refused", "failed", "interrupted"
_LONGEST = 300
"""Characters of `why`."""


@contextmanager
def registered(question: str, command: str, path: Path) -> Iterator[list[str]]:
    """Registers the run in a `with` block, which is to write an answer to a file.

    An answer of another commit than the run began with isn't kept: the tree has changed meanwhile.

    Yields:
        To which the run adds what is to be said of an answer that it keeps.
    """
    run, tree, began, before = secrets.token_hex(6), commit(), time.monotonic(), _seal(path)
    begun: dict[str, Any] = {"command": command, "commit": tree, "clean": is_clean(tree)}
    _add(run, question, BEGUN, begun | {"machine": machine(), "file": path.name})
    outcome, why = FAILED, "nothing was written"
    notes: list[str] = []
    try:
        yield notes
        if _seal(path) != before:
            outcome, why = KEPT, "; ".join(notes)
    except BaseException as error:
        outcome, why = _ended(error), f"{type(error).__name__}: {error}"
        raise
    finally:
        digest = after if (after := _seal(path)) != before else ""
        if outcome == KEPT and commit() != tree:
            outcome, why = REFUSED, f"the tree has changed since {tree}"
            print(f"{path} is refused: {why}, which the run began with", file=sys.stderr)
        seconds = round(time.monotonic() - began, 1)
        _add(run, question, outcome, {"seconds": seconds, "digest": digest, "why": why[:_LONGEST]})


def script(question: str, main: Callable[[Sequence[str]], int], name: str, words: Sequence[str]) -> int:
    """Calls a script's `main` with its words, registered if its option `--json` is a file of bench/results.

    Args:
        question: Of its answer.
        main: Returns the exit status.
        name: Of the script.
        words: Of the command line.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", type=Path)
    path = parser.parse_known_args(words)[0].json
    if path is None or not path.resolve().is_relative_to(RESULTS):
        return main(words)
    with registered(question, " ".join(["python", name, *words]), path) as notes:
        code = main(words)
        notes += [f"ended with {code}"] if code else []
    return code


def lines(path: Path) -> list[Mapping[str, Any]]:
    """Reads a register, oldest line first; without a file there are none."""
    return list(map(json.loads, path.read_text(encoding="utf-8").splitlines())) if path.exists() else []


def keeps(register: Sequence[Mapping[str, Any]], document: Mapping[str, Any]) -> bool:
    """Whether lines of a register have the run that an answer was kept of: clean, and of its commit."""
    kept = KEPT, document.get("seal")
    ended = {line["run"] for line in register if (line["outcome"], line.get("digest")) == kept}
    wanted = (BEGUN, document["question"], document["commit"], True)
    return any(
        (line["outcome"], line["question"], line.get("commit"), line.get("clean")) == wanted
        for line in register
        if line["run"] in ended
    )


def _add(run: str, question: str, outcome: str, more: Mapping[str, Any]) -> None:
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    line = {"run": run, "when": when, "question": question, "outcome": outcome, **more}
    RUNS.parent.mkdir(parents=True, exist_ok=True)
    with RUNS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def is_clean(tree: str) -> bool:
    """Whether this, which `commit` returned, is a commit without changes."""
    return tree != "unknown" and not tree.endswith("-dirty")


def _seal(path: Path) -> str:
    """Of the answer in a file; empty without one."""
    return json.loads(path.read_text(encoding="utf-8")).get("seal", "") if path.exists() else ""


def _ended(error: BaseException) -> str:
    if isinstance(error, WrongResult):
        return REFUSED
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
