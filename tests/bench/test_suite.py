"""All questions in turn: files are named as in bench/results, and one that fails is reported at the end."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import __main__ as command
from bench import suite


def test_what_is_asked() -> None:
    every = command.asked(quick=False)
    assert [one.name for one in every[2:4]] == ["compare", "cpr"]
    assert every[2].words == ("compare", "--engine", "torchrec", "--setting", "pages")
    assert {"overhead", "overhead-sparse", "overhead-managed-collision"} < {one.name for one in every}
    assert {one.words[0] for one in every} == set(command.QUESTIONS) - {"gpu", "compare_cluster"}
    assert tuple(one.name for one in command.asked(quick=True)) == command.QUICK


def test_without_a_question_all_are_listed_by_theme(capsys: pytest.CaptureFixture[str]) -> None:
    command.main([])
    shown = capsys.readouterr().out
    for name, minutes in suite.PLANNED.items():
        if name in command.QUESTIONS:
            assert re.search(rf"^  {name} +{minutes:.0f} min  ", shown, re.MULTILINE), name
    assert all(f"\n{theme}:\n" in shown for theme in command.THEMES)


@pytest.mark.parametrize("question", command.QUESTIONS)
def test_a_question_says_what_it_measures_and_its_options(
    question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([question, "--help"])
    shown = capsys.readouterr().out
    assert "Options: --quick, --seed N, --json FILE, --verbose" in shown
    assert ("--engine" in shown.partition("Options:")[2]) == (question in command.OF_ENGINES)
    assert ("--setting" in shown.partition("Options:")[2]) == (question in command.OF_SETTINGS)


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(words: list[str], *, stdout: Any, **_: Any) -> Any:
        asked.append(words[3:])
        stdout.write(f"of {words[3]}\n".encode())
        return SimpleNamespace(returncode=int(words[3] == "simulate"))

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit, match=r"^simulate ended with 1:\nof simulate$"):
        command.main(["all", "--quick", "--seed", "3", "--json-dir", str(tmp_path / "new")])
    assert [words[0] for words in asked] == list(command.QUICK)
    name = command.QUICK[-1]
    written = str(tmp_path / "new" / f"{name}.json")
    folder = ["--results", str(tmp_path / "new")]
    assert asked[-1] == [name, *folder, "--seed", "3", "--json", written, "--quick"]
    assert (tmp_path / "new" / f"{name}.log").read_text() == f"of {name}\n"


def test_traces_and_other_answers_are_for_some_questions(tmp_path: Path) -> None:
    asked = {
        one.name: one.words
        for one in command.asked(quick=False, traces=["--trace", "t"], results=tmp_path / "new")
    }
    assert asked["simulate"] == ("simulate", "--trace", "t", "--results", str(tmp_path / "new"))
    assert asked["recovery"] == ("recovery",)
    clicks = {one.name: one.words for one in command.asked(quick=False, data=[["criteo", "x"]])}
    assert clicks["quality-criteo"] == ("quality", "--data", "criteo", "x") and "quality" in clicks
    assert list(asked).index("simulate") > max(
        list(asked).index(one) for one in ("compare", "overhead", "recovery")
    )


def test_how_long_all_of_them_take(tmp_path: Path) -> None:
    questions = [suite.Asked(name, (name,)) for name in ("drift", "memory")]
    (tmp_path / "drift.json").write_text('{"minutes": 12.5}')
    assert suite.expected(questions, tmp_path) == (
        "2 questions: 14 minutes, as when they were last asked; by the plan: memory"
    )
    assert suite.took(questions, tmp_path).split() == ["12.5", "minutes", "drift", "12.5", "minutes"]


def test_all_of_them_are_planned_to_take_less_than_three_hours() -> None:
    every = [one.name for one in command.asked(quick=False)]
    assert set(suite.PLANNED) == set(every) and sum(suite.PLANNED.values()) < 0.9 * 180


def test_results_are_made_from_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "commit", lambda: "0123-dirty")
    with pytest.raises(SystemExit, match="commit first, or --json-dir"):
        command.main(["all"])


def test_a_folder_is_for_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["drift", "--json-dir", "there"])
    assert "--json-dir is for all and report; for drift: --json FILE" in capsys.readouterr().err


def test_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    suite.ask([suite.Asked("a", ("drift",))], tmp_path, 0, quick=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]
