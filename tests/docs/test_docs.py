"""Executes the code in README.md and docs/; CONTRIBUTING.md describes the marks that it obeys."""

from __future__ import annotations

import ast
import atexit
import doctest
import functools
import inspect
import json
import multiprocessing
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import yaml

import ecemb
from support.processes import RankFailed, launch

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
DEADLINE_S = 1000
ARENA_DIR: str = inspect.signature(ecemb.init_process_group).parameters["arena_dir"].default
MARK = re.compile(r"<!-- (run|skip: .+|ranks \d+(?: with \w+)?|file: [\w.-]+|as in [\w./-]+) -->")
CHECKED = ("protect", "init_process_group")
"""Public functions whose keywords are checked where code is only read."""


@dataclass
class Block:
    """Fenced code: its language, its mark, and its lines with those of a hidden setup before it.

    `lines` maps line numbers of the document to code, so that a traceback names them.
    """

    language: str
    mark: str
    lines: dict[int, str]

    def text(self) -> str:
        return "\n".join(self.lines.values())

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


@functools.cache
def scripts() -> Path:
    """A folder with the console scripts of this tree, whatever is installed."""
    folder = Path(tempfile.mkdtemp(prefix="ecemb-scripts-"))
    atexit.register(shutil.rmtree, folder)
    table = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]\n")[2].partition("\n\n")[0]
    for name, module, function in re.findall(r'^([\w-]+) = "([\w.]+):(\w+)"$', table, flags=re.MULTILINE):
        script = folder / name
        script.write_text(
            f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
    return folder


def run(command: list[str], folder: Path) -> str:
    """Runs a command to its end, fails the test if it fails, and returns what it printed."""
    env = os.environ | {
        "PATH": os.pathsep.join([str(scripts()), str(Path(sys.executable).parent), os.environ["PATH"]]),
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


def run_script(source: str, folder: Path, ranks: int) -> None:
    """Runs a script on ranks that are forked from a process which has imported torch already.

    Its arenas lie in the folder: documents share names of jobs, and may run at the same time.
    """
    script = folder / "document.py"
    script.write_text(source.replace(ARENA_DIR, str(folder)))
    launch(ranks, _run_rank, folder, script.name)


def _run_rank(folder: Path, meet: Barrier, script: str) -> None:
    os.chdir(folder)
    ecemb.init_process_group.__kwdefaults__["arena_dir"] = str(folder)
    multiprocessing.set_start_method("fork", force=True)  # what a process that was not forked has
    runpy.run_path(script, run_name="__main__")


def run_document(text: str, folder: Path) -> None:
    """Executes all of a document's blocks that are to be executed, and reads the others."""
    together = Block("python", "", {})
    for block in blocks(text):
        kind, _, detail = block.mark.partition(" ")
        if kind == "file:":
            (folder / detail).write_text(block.text() + "\n")
        if kind == "run":
            run_console(block.text(), folder)
        elif kind == "ranks":
            ranks, _, needs = detail.partition(" with ")
            if needs and find_spec(needs) is None:
                read(block)
            else:
                run_script(block.script(), folder, ranks=int(ranks))
        elif kind == "as":
            there = (ROOT / detail.removeprefix("in ")).read_text()
            assert block.text() in [other.text() for other in blocks(there)], f"not {block.mark}"
        elif block.language == "python" and not kind:
            together.lines |= block.lines
        else:
            read(block)
    if together.lines:
        run_script(together.script(), folder, ranks=1)


def run_console(text: str, folder: Path) -> None:
    """Runs what follows `$ ` line by line, and compares the output where the document shows it."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        printed = run(["bash", "-euo", "pipefail", "-c", command], folder)
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        if shown.strip() and not doctest.OutputChecker().check_output(shown, printed, flags):
            pytest.fail(f"$ {command}\nshown:\n{shown}\nprinted:\n{printed}")


def read(block: Block) -> None:
    """Checks what can be checked of code that can't be run here: its form, and ecemb's names in it."""
    if block.language == "python":
        tree = ast.parse(block.text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ecemb":
                assert is_public(node.attr), f"there is no ecemb.{node.attr}"
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)[len("ecemb.") :]) in CHECKED:
                unknown = {word.arg for word in node.keywords} - keywords(name)
                assert not unknown, f"ecemb.{name} takes no {unknown}"
    elif block.language == "yaml":
        assert all(yaml.safe_load_all(block.text()))
    elif block.language in ("bash", "console"):
        shown = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block.text(), flags=re.MULTILINE)
        commands = block.text() if block.language == "bash" else "\n".join(shown)
        subprocess.run(["bash", "-n"], input=commands, text=True, check=True)
    else:
        assert block.language in ("text", "diff"), f"nobody checks a block of {block.language!r}"


def is_public(name: str) -> bool:
    """Whether ecemb has that name to import: in `__all__`, or as a module."""
    init = ast.parse((ROOT / "ecemb" / "__init__.py").read_text())
    lists = [
        n.value for n in init.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"
    ]
    return name in ast.literal_eval(lists[0]) or find_spec(f"ecemb.{name}") is not None


def keywords(function: str) -> set[str | None]:
    """What a public function may be given by name; None stands for `**`."""
    return {*inspect.signature(getattr(ecemb, function)).parameters, None}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_runs(path: Path, tmp_path: Path) -> None:
    run_document(path.read_text(), tmp_path)


def test_arenas_of_a_document_lie_in_its_folder(tmp_path: Path) -> None:
    source = (
        "import os, pathlib, ecemb\n"
        "ecemb.init_process_group('gloo', job='apart')\n"
        "assert pathlib.Path(f'/dev/shm/ecemb-{os.geteuid()}/apart').is_dir()\n"
    )
    run_script(source, tmp_path, ranks=1)
    assert [*tmp_path.glob("ecemb-*/apart")]


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
raise SystemExit(ecemb.Code(n=4, k=3))
```
<!-- ranks 2 -->

```python
import os, pathlib
pathlib.Path("rank" + os.environ["RANK"]).touch()
```
<!-- file: script.py -->
```python
print("three", "four")
```
<!-- run -->
```console
$ echo one two; touch console
one ...
$ test -f console
$ python script.py
three four
```
```console
$ false
```
```yaml
kind: Pod
```
```text
raise SystemExit(1)
```
<!-- as in README.md -->
```bash
make demo
```
<!-- ranks 2 with nobodys_package -->
```python
raise SystemExit(1)
```
"""


def test_the_marks_do_what_contributing_says(tmp_path: Path) -> None:
    same = next(block for block in blocks((ROOT / "README.md").read_text()) if block.language == "console")
    run_document(SAMPLE.replace("make demo", same.text()), tmp_path)
    assert (tmp_path / "sum").read_text() == "2"
    assert {path.name for path in tmp_path.iterdir()} >= {"rank0", "rank1", "console"}


def test_a_failure_names_the_line_of_the_document(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"(?s)line 5, in.*wrong on purpose"):
        run_document("# Title\n\n```python\n\nraise ValueError('wrong on purpose')\n```\n", tmp_path)


@pytest.mark.parametrize("lines", ["$ false", "$ echo one\ntwo"])
def test_a_wrong_console_block_fails(lines: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_document(f"<!-- run -->\n```console\n{lines}\n```\n", tmp_path)


@pytest.mark.parametrize(
    ("mark", "language", "text"),
    [
        ("skip: no", "python", "ecemb.protects(model)"),
        ("skip: no", "python", "ecemb.protect(model, codes=1)"),
        ("skip: no", "python", "if"),
        ("as in README.md", "python", "pass"),
        ("", "bash", "if true"),
        ("", "yaml", "a: [1"),
        ("", "ini", "a = 1"),
    ],
)
def test_wrong_code_that_is_only_read_fails(mark: str, language: str, text: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, SyntaxError, subprocess.CalledProcessError, yaml.YAMLError)):
        run_document(f"<!-- {mark} -->\n```{language}\n{text}\n```\n", tmp_path)


def log_lines() -> list[list[str]]:
    """Of each line that ecemb logs, but for debugging, the parts without a value in them."""
    found: list[list[str]] = []
    for path in sorted((ROOT / "ecemb").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                level, words = node.func.attr, [a.value for a in node.args if isinstance(a, ast.Constant)]
                parts = [part.strip(" ;:,()") for word in words for part in re.split(r"%\S*[a-z]", word)]
                if level != "debug" and (telling := [part for part in parts if len(part) > 8]):
                    found.append(telling)
    return found


def test_the_page_on_operations_explains_each_line_of_the_log() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    unexplained = [parts for parts in log_lines() if not any(part[:25] in page for part in parts)]
    assert len(log_lines()) > 20 and not unexplained


def test_the_readme_says_how_much_of_a_restart_is_the_scripts_own() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "compare.json").read_text())["rows"]
    found = {row["method"]: f"{row['value']:.1f} s" for row in rows if row["metric"] == "next_step_s"}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"takes {found['nothing']} of its {found['ecemb (4, 3) window auto']}." in readme


def test_the_readme_says_what_steps_of_table_work_alone_cost() -> None:
    """A third to a half with a commit in each step, less than a tenth with "auto"."""
    found: dict[int | str, list[float]] = {}
    for path in (ROOT / "bench" / "results").glob("overhead*.json"):
        for row in json.loads(path.read_text())["rows"]:
            if (row["metric"], row.get("method")) == ("overhead_cpu_pct", "protected"):
                if row["setting"].startswith("sparse-heavy"):
                    found.setdefault(row["window"], []).append(row["value"])
    assert min(found[1]) >= 30 and max(found[1]) <= 50 and max(found["auto"]) < 10


def test_the_readme_says_who_is_first_in_the_simulation() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "simulate.json").read_text())["rows"]
    first: dict[str, Counter[str]] = {}
    for row in rows:
        if row["metric"] == "cells_first":
            first.setdefault(row["among"], Counter())[row["method"]] += row["value"]
    (leader, cells), *_ = first["all"].most_common()
    assert leader == "CPR" and cells > 0.8 * first["all"].total()
    assert first["that lose no samples"].most_common()[0][0] == "snapshots"
    open_ = sum(
        row["value"] for row in rows if row["metric"] == "cells_ahead" and row["method"] == "cannot tell"
    )
    assert open_ > 0.8 * sum(counts.total() for counts in first.values())


def test_the_claim_of_the_readme_has_its_numbers_from_a_run() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "soak.json").read_text())["rows"]
    values = [(row["metric"], row["value"]) for row in rows]
    faults = sum(value for metric, value in values if metric == "soak_events")
    minutes = dict(values)["soak_minutes"]
    assert f"In a soak of {minutes:.0f} minutes, {faults} faults" in (ROOT / "README.md").read_text()
    assert dict(values)["steps_lost"] == 0 and dict(values)["bit_identical"] == 1
