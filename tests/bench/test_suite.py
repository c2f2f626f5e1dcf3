"""All questions in turn: files are named as in bench/results, and one that fails is reported at the end."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import __main__ as command
from bench import suite


def test_what_is_asked() -> None:
    every = command.asked(quick=False)
    assert [one.name for one in every[1:4]] == ["compare", "compare-torchrec", "cpr"]
    assert {one.words[0] for one in every} == set(command.QUESTIONS) - {"gpu"}
    assert tuple(one.name for one in command.asked(quick=True)) == command.QUICK


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
    assert asked[-1] == [name, "--seed", "3", "--json", written, "--quick"]
    assert (tmp_path / "new" / f"{name}.log").read_text() == f"of {name}\n"


def test_a_folder_is_for_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["drift", "--json-dir", "there"])
    assert "--json-dir is for all and report; for drift: --json FILE" in capsys.readouterr().err


def test_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    suite.ask([suite.Asked("a", ("drift",))], tmp_path, 0, quick=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.log"]
