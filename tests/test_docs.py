"""Executes the code in README.md and docs/; CONTRIBUTING.md describes the marks that it obeys."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [path for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))] if path.exists()]
DEADLINE_S = 240
MARK = re.compile(r"<!-- (run|skip: .+|torchrun \d+) -->")


@dataclass
class Block:
    """Fenced code: its language, its mark, and its lines with those of a hidden setup before it.

    `lines` maps line numbers of the document to code, so that a traceback names them.
    """

    language: str
    mark: str
    lines: dict[int, str]

    def script(self) -> str:
        return "\n".join(self.lines.get(number, "") for number in range(1, max(self.lines) + 1))


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document, in order. A mark holds for the block that follows it."""
    found: list[Block] = []
    mark, setup = "", {}
    inside: Block | None = None
    in_setup = False
    for number, line in enumerate(text.splitlines(), start=1):
        if in_setup:
            in_setup = line != "-->"
            if in_setup:
                setup[number] = line
        elif inside is not None:
            if line == "```":
                inside = None
            else:
                inside.lines[number] = line
        elif line.startswith("```"):
            inside = Block(line[3:].strip(), mark, dict(setup))
            found.append(inside)
            mark, setup = "", {}
        elif line == "<!-- setup":
            in_setup = True
        elif match := MARK.fullmatch(line):
            mark = match[1]
        elif line.strip():
            mark = ""
    return [block for block in found if block.lines]


def run(command: list[str], folder: Path) -> str:
    """Runs a command to its end, fails the test if it fails, and returns what it printed."""
    env = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_script(source: str, folder: Path, ranks: int = 0) -> str:
    script = folder / "document.py"
    script.write_text(source)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return run([sys.executable, *(torchrun if ranks else []), str(script)], folder)


def run_document(text: str, folder: Path) -> None:
    """Executes all of a document's blocks that are to be executed."""
    together = Block("python", "", {})
    for block in blocks(text):
        if block.mark.startswith("skip"):
            continue
        if block.language == "python" and block.mark.startswith("torchrun"):
            run_script(block.script(), folder, ranks=int(block.mark.split()[1]))
        elif block.language == "python":
            together.lines |= block.lines
        elif block.language == "console" and block.mark == "run":
            run_console("\n".join(block.lines.values()), folder)
    if together.lines:
        run_script(together.script(), folder)


def run_console(text: str, folder: Path) -> None:
    """Runs what follows `$ ` line by line, and compares the output where the document shows it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        printed = run(["bash", "-euo", "pipefail", "-c", command], folder)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if shown.strip() and not doctest.OutputChecker().check_output(shown, printed, flags):
            pytest.fail(f"$ {command}\nshown:\n{shown}\nprinted:\n{printed}")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_runs(path: Path, tmp_path: Path) -> None:
    run_document(path.read_text(), tmp_path)


SAMPLE = """
# A title
<!-- setup
import pathlib
-->
```python
first = 1
```
and then
```python
pathlib.Path("sum").write_text(str(first + 1))
```
<!-- skip: it needs a GPU -->
```python
raise SystemExit(1)
```
<!-- torchrun 2 -->

```python
import os, pathlib
pathlib.Path("rank" + os.environ["RANK"]).touch()
```
<!-- run -->
```console
$ echo one two; touch console
one ...
$ test -f console
```
```console
$ false
```
```text
raise SystemExit(1)
```
"""


def test_the_marks_do_what_contributing_says(tmp_path: Path) -> None:
    run_document(SAMPLE, tmp_path)
    assert (tmp_path / "sum").read_text() == "2"
    assert {path.name for path in tmp_path.iterdir()} >= {"rank0", "rank1", "console"}


def test_a_failure_names_the_line_of_the_document(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)line 5, in.*wrong on purpose"):
        run_document("# Title\n\n```python\n\nraise ValueError('wrong on purpose')\n```\n", tmp_path)


@pytest.mark.parametrize("lines", ["$ false", "$ echo one\ntwo"])
def test_a_wrong_console_block_fails(lines: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_document(f"<!-- run -->\n```console\n{lines}\n```\n", tmp_path)
