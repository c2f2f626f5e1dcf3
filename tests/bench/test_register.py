"""Every run that is to write an answer has a line when it begins, and another one for what came of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench import __main__ as command
from bench.harness import register
from bench.harness.result import Arguments, BadFile, Incomplete, Row, WrongResult, document, once, write
from bench.harness.result import commit as commit_of_tree

ROWS = [once("rain", "mm", 1.5)]
Ask = Callable[..., None]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A register of its own, and a clean tree."""
    monkeypatch.setattr(register, "RUNS", tmp_path / "runs.jsonl")
    for module in (register, command):
        monkeypatch.setattr(module, "commit", lambda: "a" * 40)
    return tmp_path / "runs.jsonl"


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Asks a question whose answer is some rows, or an exception. Without a file it goes to `tmp_path`."""
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "LATEST", tmp_path / "build")

    def asked(answer: list[Row] | BaseException, *words: str) -> None:
        def run(_: Arguments) -> list[Row]:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        module = ModuleType("bench.questions.weather.question")
        monkeypatch.setattr(module, "run", run, raising=False)
        monkeypatch.setitem(sys.modules, "bench.questions.weather.question", module)
        monkeypatch.setitem(command.QUESTIONS, "weather", "whether it rains")
        command.main(["weather", *words])

    return asked


def test_a_run_that_is_kept(runs: Path, ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "weather.json"
    ask(ROWS, "--seed", "3", "--json", str(path))
    begun, ended = register.lines(runs)
    assert begun["outcome"] == "begun" and ended["outcome"] == "kept" and begun["run"] == ended["run"]
    assert (begun["question"], begun["command"]) == ("weather", "python -m bench weather --seed 3")
    assert (begun["commit"], begun["clean"], begun["file"]) == ("a" * 40, True, "weather.json")
    assert begun["machine"] == json.loads(path.read_text())["machine"]
    assert ended["digest"] == json.loads(path.read_text())["seal"] and ended["why"] == ""


@pytest.mark.parametrize(
    ("answer", "raised", "outcome", "why"),
    [
        (WrongResult("other bytes"), WrongResult, "refused", "WrongResult: other bytes"),
        (KeyboardInterrupt(), KeyboardInterrupt, "interrupted", "KeyboardInterrupt: "),
        (OSError("no space"), OSError, "failed", "OSError: no space"),
        (BadFile("no trace"), SystemExit, "failed", "BadFile: no trace"),
        (Incomplete(ROWS, "one method broke"), SystemExit, "kept", "one method broke"),
    ],
)
def test_what_came_of_a_run(
    answer: BaseException,
    raised: type[BaseException],
    outcome: str,
    why: str,
    runs: Path,
    ask: Ask,
    tmp_path: Path,
) -> None:
    with pytest.raises(raised):
        ask(answer, "--json", str(tmp_path / "weather.json"))
    begun, ended = register.lines(runs)
    assert (ended["run"], ended["outcome"], ended["why"]) == (begun["run"], outcome, why)
    assert bool(ended["digest"]) == (outcome == "kept") == (tmp_path / "weather.json").exists()


def test_a_run_that_is_killed_has_begun(runs: Path, tmp_path: Path) -> None:
    with register.registered("weather", "python -m bench weather", tmp_path / "weather.json"):
        (begun,) = register.lines(runs)
        assert begun["outcome"] == "begun"
    assert [line["outcome"] for line in register.lines(runs)] == ["begun", "failed"]
    assert register.lines(runs)[1]["why"] == "nothing was written"


def test_an_answer_of_another_commit_than_its_run_began_with_is_not_kept(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with register.registered("weather", "python -m bench weather", tmp_path / "weather.json"):
        monkeypatch.setattr(register, "commit", lambda: "b" * 40)
        write(tmp_path / "weather.json", document("weather", Arguments(), ROWS))
    ended = register.lines(runs)[1]
    assert (ended["outcome"], ended["why"]) == ("refused", f"the tree has changed since {'a' * 40}")


def test_quick_runs_and_those_that_write_nothing_have_no_line(runs: Path, ask: Ask, tmp_path: Path) -> None:
    ask(ROWS, "--quick", "--json", str(tmp_path / "weather.json"))
    ask(ROWS)
    assert not runs.exists()


def test_an_answer_without_a_file_is_kept_until_the_next_one(
    runs: Path,
    ask: Ask,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask(ROWS)
    assert capsys.readouterr().err == f"goes to build/weather.json; {command.KEEP}\n"
    assert json.loads((tmp_path / "build" / "weather.json").read_text())["question"] == "weather"
    ask(ROWS, "--quick")
    ask(ROWS, "--json", str(tmp_path / "weather.json"))
    monkeypatch.setattr(command, "commit", lambda: "a" * 40 + "-dirty")
    ask(ROWS)
    assert not capsys.readouterr().err


def test_scripts_are_registered_if_they_write_to_the_results(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(words: Any) -> int:
        path = Path(words[-1])
        write(path, document("kills", Arguments(), ROWS))
        return 1

    monkeypatch.setattr(register, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    assert register.script("kills", main, "kills.py", ["--json", str(tmp_path / "kills.json")]) == 1
    assert not runs.exists()
    path = tmp_path / "results" / "kills.json"
    assert register.script("kills", main, "kills.py", ["--kills", "3", "--json", str(path)]) == 1
    begun, ended = register.lines(runs)
    assert begun["command"] == f"python kills.py --kills 3 --json {path}"
    assert (ended["outcome"], ended["why"]) == ("kept", "ended with 1")


def test_which_lines_keep_an_answer(runs: Path, tmp_path: Path) -> None:
    path = tmp_path / "weather.json"
    with register.registered("weather", "python -m bench weather", path):
        write(path, {**document("weather", Arguments(), ROWS), "commit": "a" * 40})
    answer, lines = json.loads(path.read_text()), register.lines(runs)
    assert register.keeps(lines, answer)
    assert not register.keeps(lines[1:], answer) and not register.keeps(lines[:1], answer)
    for change in ({"seal": "0"}, {"commit": "b" * 40}, {"question": "tides"}):
        assert not register.keeps(lines, answer | change)
    dirty = [{**lines[0], "clean": False}, lines[1]]
    assert not register.keeps(dirty, answer)


def test_a_tree_is_clean_or_not() -> None:
    assert register.is_clean("a" * 40)
    assert not register.is_clean("a" * 40 + "-dirty") and not register.is_clean("unknown")
    assert isinstance(commit_of_tree(), str)
